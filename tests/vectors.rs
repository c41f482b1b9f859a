//! Every file of `tests/vectors` through `samebits answer`: the raw bits it expects, for every instruction set, with 1 and 2
//! threads, with fp32 and bf16 outputs. What the machine lacks is emulated; the last line says which are real.

#[path = "vector_files.rs"]
mod files;

use libtest_mimic::{Arguments, Completion, Failed, Trial};
use samebits_contract::case::Answer;
use samebits_contract::table::{Contract, Slice};
use samebits_contract::wire::{decode_answer, read_frame, write_frame};
use samebits_harness::machine;
use samebits_ops::{Isa, emulation_differs};
use std::collections::BTreeSet;
use std::io::{BufReader, BufWriter};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex};

fn main() {
    let arguments = Arguments::from_args();
    let files = files::files();
    let found = files.len();
    let names: BTreeSet<String> =
        files.iter().map(|file| file.file_stem().expect("found by extension").to_string_lossy().into_owned()).collect();
    let mut trials = vec![
        Trial::test("all_files_are_there", move || Ok(files::all_there(found)?)),
        Trial::test("check_holds_all_files", move || check_holds(&names)),
        Trial::test("loose_answers_are_refused", || Ok(files::loose_answers_are_refused()?)),
    ];
    for isa in Isa::all().filter(|isa| isa.emulates().is_some()) {
        trials.push(Trial::ignorable_test(format!("emulation_is_the_instructions::{isa}"), move || emulation(isa)));
    }
    // Emulation runs here even where the real instructions do: the vectors then hold both.
    let isas: Vec<Isa> = Isa::all().filter(|isa| isa.available()).collect();
    for &isa in &isas {
        for threads in [1, 2] {
            let program = Arc::new(Program::new(isa, threads));
            for file in &files {
                let stem = file.file_stem().expect("found by extension").to_string_lossy();
                let (program, file) = (program.clone(), file.clone());
                trials.push(Trial::test(format!("{stem}::{isa}::{threads}"), move || {
                    let answer =
                        |request: &[u8]| program.answer(request).map_err(|e| e.message().unwrap_or_default().into());
                    Ok(files::holds(&file, answer)?)
                }));
            }
        }
    }
    let end = libtest_mimic::run(&arguments, trials);
    if end.num_passed > 0 && end.num_filtered_out == 0 && !end.has_failed() {
        println!("instruction sets: {}", machine::covered(&Isa::of_machine().collect::<Vec<_>>()));
    }
    end.exit();
}

/// An emulated instruction gives what the real one does, on random operands and special ones.
fn emulation(isa: Isa) -> Result<Completion, Failed> {
    match isa.emulates().filter(|real| real.available()) {
        None => Ok(Completion::ignored_with("this machine lacks the instructions to compare with")),
        Some(_) => match emulation_differs(isa) {
            None => Ok(Completion::Completed),
            Some(difference) => Err(difference.into()),
        },
    }
}

/// Every file is a case of slice default, and every such case has its file.
fn check_holds(files: &BTreeSet<String>) -> Result<(), Failed> {
    let contract = Contract::load(None)?;
    let cases: BTreeSet<String> = contract.cases(Slice::Default).filter_map(|case| case.vector.clone()).collect();
    match cases.symmetric_difference(files).next() {
        None => Ok(()),
        Some(name) => Err(format!("{name}: in tests/vectors or in the contract's `vectors`, and not in both").into()),
    }
}

/// `samebits answer` under one setting, started by the first trial that asks and kept until this process ends.
struct Program {
    isa: Isa,
    threads: usize,
    running: Mutex<Option<Running>>,
}

struct Running {
    _child: Child,
    requests: BufWriter<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Program {
    fn new(isa: Isa, threads: usize) -> Program {
        Program { isa, threads, running: Mutex::new(None) }
    }

    fn answer(&self, request: &[u8]) -> Result<Answer, Failed> {
        let mut running = self.running.lock().map_err(|_| "an earlier trial broke the pipe")?;
        if running.is_none() {
            *running = Some(self.start()?);
        }
        let Running { requests, answers, .. } = running.as_mut().expect("just started");
        write_frame(requests, request)?;
        let frame = read_frame(answers)?.ok_or("the program ended without an answer")?;
        Ok(decode_answer(&frame)?)
    }

    fn start(&self) -> Result<Running, Failed> {
        let mut child = Command::new(env!("CARGO_BIN_EXE_samebits-tested"))
            .args(["answer", "--isa", self.isa.name(), "--threads", &self.threads.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let requests = BufWriter::new(child.stdin.take().expect("stdin is piped"));
        let answers = BufReader::new(child.stdout.take().expect("stdout is piped"));
        Ok(Running { _child: child, requests, answers })
    }
}
