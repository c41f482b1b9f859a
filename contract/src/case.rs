//! One question to an implementation, and its answer.

use crate::tensor::{DType, Tensor};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// How an implementation is asked to run; no setting may move a bit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Config {
    /// Instruction set by name (`scalar`, `avx2`, ..); `None` leaves the choice to the implementation.
    pub isa: Option<String>,
    /// Number of threads; `None` leaves the choice to the implementation.
    pub threads: Option<usize>,
    /// Workspace limit in bytes; `None` means no limit.
    pub budget: Option<usize>,
    /// How the inputs lie in memory, one of [`LAYOUTS`](crate::axis::LAYOUTS); `None`: each by itself, in row-major order.
    pub layout: Option<String>,
    /// The number of the request, which the answer repeats; `None`: it has none.
    pub id: Option<u64>,
}

/// An op, its parameters and its inputs: everything that decides the answer's bits, plus a [`Config`] that must not.
#[derive(Clone, Debug)]
pub struct Case {
    /// Unique and stable: `<op>/<dtype>/<stem>`.
    pub name: String,
    /// The op's stem, for example `rms_norm`.
    pub op: String,
    /// The dtype of the floating-point outputs.
    pub out: DType,
    /// Parameters as they stand on the wire.
    pub params: BTreeMap<String, String>,
    /// Inputs by their names in the specification.
    pub inputs: BTreeMap<String, Tensor>,
    /// How to run it.
    pub config: Config,
}

/// Whether an implementation answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// The outputs are there.
    Ok,
    /// The implementation does not offer this combination; `reason` says which.
    Unsupported,
    /// It should have answered and could not; `reason` says why.
    Error,
}

/// What an implementation returned for a [`Case`].
#[derive(Clone, Debug)]
pub struct Answer {
    /// Whether there are outputs.
    pub status: Status,
    /// Why there are none; empty when `status` is ok.
    pub reason: String,
    /// What actually ran, for example `gemm/avx512bf16`.
    pub kernel: String,
    /// Outputs by their names in the specification.
    pub outputs: BTreeMap<String, Tensor>,
    /// How the workspace was used, one line; empty when there is none.
    pub plan: String,
    /// What was counted besides: bytes of workspace, conversions, slow paths, by name; zeros are left out.
    pub ledger: BTreeMap<String, u64>,
    /// The least `budget` that would do, when the answer is an error because of it.
    pub smallest_budget: Option<usize>,
    /// The layout its inputs were brought into, where one was asked for; empty when it was not.
    pub layout: String,
    /// The number of threads it ran on, where one was asked for and kept to.
    pub threads: Option<usize>,
    /// The workspace limit in bytes that it kept to, where one was asked for.
    pub budget: Option<usize>,
    /// The number of the request it answers, where it says so.
    pub id: Option<u64>,
}

impl Answer {
    /// An answer with outputs.
    pub fn ok(kernel: impl Into<String>, outputs: BTreeMap<String, Tensor>) -> Answer {
        Answer { kernel: kernel.into(), outputs, ..Answer::empty(Status::Ok, String::new()) }
    }

    /// A combination the implementation does not offer.
    pub fn unsupported(reason: impl Into<String>) -> Answer {
        Answer::empty(Status::Unsupported, reason.into())
    }

    /// A failure to answer.
    pub fn error(reason: impl Into<String>) -> Answer {
        Answer::empty(Status::Error, reason.into())
    }

    fn empty(status: Status, reason: String) -> Answer {
        let (kernel, plan, layout) = (String::new(), String::new(), String::new());
        let (outputs, ledger) = (BTreeMap::new(), BTreeMap::new());
        let (smallest_budget, threads, budget, id) = (None, None, None, None);
        Answer { status, reason, kernel, outputs, plan, ledger, smallest_budget, layout, threads, budget, id }
    }

    /// The answer of what ran under all settings of `config`, which it says.
    pub fn under(self, config: &Config) -> Answer {
        let layout = config.layout.clone().unwrap_or_default();
        Answer { layout, threads: config.threads, budget: config.budget, ..self }
    }
}
