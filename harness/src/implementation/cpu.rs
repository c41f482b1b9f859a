//! `ours/cpu`: the ops of `samebits-ops`, asked by name.

use super::builtin::{Refusal, on_cpu};
use super::{Implementation, Soaked};
use crate::checkpoints::Checkpoints;
use crate::clock::Clock;
use crate::side::{Program, Side};
use samebits_contract::case::{Answer, Case, Config};
use samebits_ops::{Cpu, Isa};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

/// How long a process of its own may take for an answer.
const PATIENCE: Duration = Duration::from_secs(600);

/// The built-in CPU ops under a default [`Cpu`]; a case's own [`Config`] overrides it.
pub struct CpuImplementation {
    cpu: Cpu,
    /// The models that `chain` and `chain_backward` may name; none for a program that only offers ops.
    checkpoints: Option<Arc<Checkpoints>>,
    /// The program whose `answer` verb gives the same ops in a process of its own.
    program: Option<PathBuf>,
}

impl CpuImplementation {
    /// Answers with `cpu` where a case does not say how to run.
    pub fn new(cpu: Cpu) -> CpuImplementation {
        CpuImplementation { cpu, checkpoints: None, program: None }
    }

    /// Also answers the ops `chain` and `chain_backward`, for the models of `checkpoints`.
    pub fn with_checkpoints(self, checkpoints: Arc<Checkpoints>) -> CpuImplementation {
        CpuImplementation { checkpoints: Some(checkpoints), ..self }
    }

    /// Also answers in a new process, of the `samebits` program at `program`.
    pub fn with_program(self, program: PathBuf) -> CpuImplementation {
        CpuImplementation { program: Some(program), ..self }
    }

    /// A process of its own, where a program was named.
    fn anew(&self) -> Option<Side> {
        let program = self.program.as_ref()?;
        let (isa, threads) = (self.cpu.isa().to_string(), self.cpu.threads().to_string());
        let command = [program.to_str()?, "answer", "--isa", &isa, "--threads", &threads].map(String::from).to_vec();
        let program = Program { command, env: BTreeMap::new(), folder: None, limit: "10 minutes" };
        Some(Side::of(self.name(), program))
    }

    /// Answers `case`, its op timed by `clock` where there is one.
    pub fn answer(&self, case: &Case, clock: Option<&Clock>) -> Answer {
        // Every request has counters of its own.
        let cpu = match configured(&self.cpu, &case.config) {
            Ok(cpu) => cpu.recording(),
            Err(refusal) => return refusal.answer(),
        };
        let models = self.checkpoints.as_ref().filter(|_| Checkpoints::answers(&case.op));
        let answer = if let Some(checkpoints) = models {
            checkpoints.answer(&cpu, case)
        } else {
            let answer = on_cpu(&cpu, case, clock).map(|outputs| Answer::ok(kernel(&cpu, case), outputs));
            answer.unwrap_or_else(Refusal::answer)
        };
        let plans = cpu.ledger().plans();
        let counts = cpu.ledger().counts();
        Answer {
            plan: plans.iter().map(|plan| plan.to_string()).collect::<Vec<_>>().join("; "),
            ledger: counts.into_iter().map(|(counter, count)| (counter.name().to_string(), count)).collect(),
            ..answer.under(&case.config)
        }
    }
}

/// `<op>/<isa>` of the kernels that ran, as the ledger has them: matrix products of bf16 may have used two. The other ops
/// have no kernel of their own for AVX512-BF16.
fn kernel(cpu: &Cpu, case: &Case) -> String {
    match cpu.ledger().kernels() {
        kernels if kernels.is_empty() => format!("{}/{}", case.op, cpu.isa().without_dot()),
        kernels => format!("{}/{}", case.op, kernels.join("+")),
    }
}

impl Implementation for CpuImplementation {
    fn name(&self) -> &str {
        "ours/cpu"
    }

    fn version(&self) -> &str {
        env!("CARGO_PKG_VERSION")
    }

    fn run(&self, case: &Case) -> Answer {
        self.answer(case, None)
    }

    fn fresh(&self, case: &Case) -> Option<Answer> {
        Some(self.anew()?.answer(case, PATIENCE).unwrap_or_else(Answer::error))
    }

    fn soak(&self, case: &Case, each: &mut Soaked) -> bool {
        let Some(mut side) = self.anew() else { return false };
        while each(side.answer(case, PATIENCE).unwrap_or_else(Answer::error), &|| side.resident()) {}
        true
    }
}

/// `default` with what `config` asks for.
fn configured(default: &Cpu, config: &Config) -> Result<Cpu, Refusal> {
    if *config == Config::default() {
        return Ok(default.clone());
    }
    let isa = match &config.isa {
        None => default.isa(),
        Some(name) => Isa::from_str(name).map_err(|e| Refusal::Error(format!("`config.isa`: {e}")))?,
    };
    if !isa.available() {
        return Err(Refusal::Unsupported(format!("`config.isa`: this machine lacks `{isa}`")));
    }
    let threads = config.threads.unwrap_or(default.threads());
    let budget = config.budget.unwrap_or(default.budget());
    default.other(isa, threads, budget).map_err(|e| Refusal::Error(format!("`config.threads`: {e}")))
}
