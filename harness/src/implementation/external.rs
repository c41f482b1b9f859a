//! Programs that speak the wire, by their entries of `impls.toml`: started when they are needed, kept warm, and started
//! anew after they failed.

use super::{Implementation, Soaked};
use crate::side::{Program, Side};
use samebits_contract::case::{Answer, Case, Status};
use samebits_contract::spec;
use samebits_contract::table;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

/// A program under test.
pub struct External {
    entry: table::Implementation,
    program: Program,
    version: String,
    /// Processes that wait for work, by the instruction set they are held to.
    idle: Mutex<BTreeMap<String, Vec<Side>>>,
}

impl External {
    /// The program of `entry`, which has a command; its commands run in the folder of its list, else in `root`.
    ///
    /// # Errors
    /// When its version command fails: the program is not there.
    pub fn new(entry: &table::Implementation, root: Option<&Path>) -> Result<External, String> {
        let name = &entry.name;
        let folder = entry.folder.as_deref().or(root).map(Path::to_path_buf);
        let command = entry.command.clone().ok_or_else(|| format!("implementation `{name}` is built in"))?;
        let program = Program {
            command,
            env: entry.env.clone(),
            folder,
            limit: "`timeout`: in its list, or an argument of `judge`",
        };
        let version = match entry.version.split_first() {
            None => String::new(),
            Some((head, arguments)) => {
                let mut version = Command::new(head);
                version.args(arguments).envs(&program.env).stdin(Stdio::null());
                if let Some(folder) = &program.folder {
                    version.current_dir(folder);
                }
                let command = entry.version.join(" ");
                let output = version.output().map_err(|e| format!("implementation `{name}`: `{command}`: {e}"))?;
                let last =
                    |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().lines().last().unwrap_or("").to_string();
                if !output.status.success() {
                    let (status, words) = (output.status, last(&output.stderr));
                    return Err(format!("implementation `{name}` is not there: `{command}`: {status}: {words}"));
                }
                String::from_utf8_lossy(&output.stdout).trim().lines().next().unwrap_or("").to_string()
            }
        };
        Ok(External { entry: entry.clone(), program, version, idle: Mutex::default() })
    }

    /// A process for `case`, and the name of what it is held to.
    fn start(&self, case: &Case) -> (String, Side) {
        let isa = self.isa_of(case);
        let waiting = self.idle.lock().expect("no thread panics with it").get_mut(&isa).and_then(Vec::pop);
        let side = waiting.unwrap_or_else(|| self.anew(&isa));
        (isa, side)
    }

    /// The instruction set that `case` is asked of.
    fn isa_of(&self, case: &Case) -> String {
        case.config.isa.clone().or(self.entry.isa.first().map(|isa| isa.name.clone())).unwrap_or_default()
    }

    fn anew(&self, isa: &str) -> Side {
        let mut program = self.program.clone();
        program.env.extend(self.setting(isa).cloned().unwrap_or_default());
        Side::of(&self.entry.name, program)
    }

    fn setting(&self, isa: &str) -> Option<&BTreeMap<String, String>> {
        self.entry.isa.iter().find(|entry| entry.name == isa).map(|entry| &entry.env)
    }

    fn ask(&self, side: &mut Side, case: &Case) -> Answer {
        let mut asked = case.clone();
        // What the environment of a process says is not said again on the wire; nor is what the program knows nothing of.
        let by_environment = self.entry.isa.iter().any(|isa| !isa.env.is_empty());
        if by_environment || self.entry.isa.is_empty() {
            asked.config.isa = None;
        }
        let answer = side.answer(&asked, Duration::from_secs_f64(self.entry.timeout));
        match answer.and_then(|answer| fitting(case, &answer).map(|()| answer)) {
            Ok(answer) => answer,
            Err(reason) => {
                side.stop();
                Answer::error(reason)
            }
        }
    }
}

impl Implementation for External {
    fn name(&self) -> &str {
        &self.entry.name
    }

    fn version(&self) -> &str {
        &self.version
    }

    fn run(&self, case: &Case) -> Answer {
        self.in_order(&[case]).pop().expect("one answer to one case")
    }

    fn in_order(&self, cases: &[&Case]) -> Vec<Answer> {
        let Some(last) = cases.last() else { return Vec::new() };
        let (isa, mut side) = self.start(last);
        let answers = cases.iter().map(|case| self.ask(&mut side, case)).collect();
        self.idle.lock().expect("no thread panics with it").entry(isa).or_default().push(side);
        answers
    }

    fn fresh(&self, case: &Case) -> Option<Answer> {
        let isa = self.isa_of(case);
        Some(self.ask(&mut self.anew(&isa), case))
    }

    fn soak(&self, case: &Case, each: &mut Soaked) -> bool {
        let isa = self.isa_of(case);
        let mut side = self.anew(&isa);
        while each(self.ask(&mut side, case), &|| side.resident()) {}
        true
    }
}

/// The outputs have the shapes and dtypes that the request decides.
fn fitting(case: &Case, answer: &Answer) -> Result<(), String> {
    let Ok(call) = spec::check_form(case) else { return Ok(()) };
    if answer.status != Status::Ok {
        return Ok(());
    }
    // The extents of the model's axes, the vocabulary for one, are for the answer to choose, each once.
    let mut of_model: BTreeMap<&str, usize> = BTreeMap::new();
    for output in call.op.outputs {
        let Some(tensor) = answer.outputs.get(output.name) else { continue };
        let (dtype, found) = (call.output_dtype(output), tensor.shape());
        if tensor.dtype() != dtype {
            return Err(format!("output `{}` is {}; it must be {dtype}", output.name, tensor.dtype()));
        }
        let shape = call.output_shape(output).unwrap_or_else(|| {
            let chosen = |i: usize| found.get(i).copied().unwrap_or(0);
            let mut extent = |(i, axis): (usize, &&'static str)| {
                call.dims.get(axis).unwrap_or_else(|| *of_model.entry(axis).or_insert_with(|| chosen(i)))
            };
            output.axes.iter().enumerate().map(&mut extent).collect()
        });
        if found != shape {
            return Err(format!("output `{}` has shape {found:?}; it must be {shape:?}", output.name));
        }
    }
    Ok(())
}
