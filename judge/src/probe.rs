//! What arithmetic does a kernel do? Questions whose answers give it away: the order of its sums, what its accumulator
//! keeps and how it rounds, what it does with its operands, with subnormals, beyond the range and with special values.
//!
//! An implementation is asked as in any other judgment, over [`Implementation::run`]; nothing is assumed of how it works.

mod arithmetic;
mod drawing;
mod order;
mod tree;

pub use arithmetic::{HANDS_ON, hands_on};
pub use order::{Apart, Op, RowsApart, USUAL};
pub use tree::Tree;

use crate::implementation::Implementation;
use samebits_contract::case::{Answer, Case, Config, Status};
use samebits_contract::tensor::{DType, Tensor};
use samebits_schema::{IEEE, PROFILE, profile_suffix};

/// An implementation that is asked.
pub struct Probe<'a> {
    /// Who.
    pub implementation: &'a dyn Implementation,
    /// The profile that calls name.
    pub profile: &'a str,
    /// Dtype of the inputs.
    pub dtype: DType,
    /// Dtype of the outputs that show the order of a sum.
    pub out: DType,
    /// Columns of a matrix product; queries of each sequence in attention.
    pub columns: usize,
    /// In attention, how many keys a page holds; `None` asks for keys side by side.
    pub pages: Option<usize>,
    /// How it is asked to run.
    pub config: Config,
}

impl<'a> Probe<'a> {
    /// Asks `implementation` about one pair of dtypes in a profile, with one column and as it runs by itself.
    pub fn new(implementation: &'a dyn Implementation, profile: &'a str, dtype: DType, out: DType) -> Probe<'a> {
        Probe { implementation, profile, dtype, out, columns: 1, pages: None, config: Config::default() }
    }

    /// Everything that `op` can be asked: its arithmetic, and with `order` the order of its sums.
    ///
    /// # Errors
    /// When the implementation does not answer, or nothing is [declared](declares) for the profile.
    pub fn findings(&self, op: &str, order: bool) -> Result<Vec<Finding>, String> {
        if !declares(self.profile) {
            return Err(format!("no answers are declared for the profile `{}`", self.profile));
        }
        let mut findings = self.arithmetic(op)?;
        if let Some(op) = Op::find(op).filter(|op| order && op.shows(self.dtype, self.out)) {
            findings.push(self.order(op));
        }
        Ok(findings)
    }

    fn ask(
        &self,
        op: &str,
        out: DType,
        params: &[(&str, String)],
        inputs: Vec<(&str, Tensor)>,
    ) -> Result<Answer, String> {
        let answer = self.run(op, out, params, inputs);
        match answer.status {
            Status::Ok => Ok(answer),
            _ => Err(answer.reason),
        }
    }

    fn run(&self, op: &str, out: DType, params: &[(&str, String)], inputs: Vec<(&str, Tensor)>) -> Answer {
        let profile = Some((PROFILE.name, self.profile.to_string())).filter(|_| self.profile != IEEE);
        let params = params.iter().cloned().chain(profile);
        let case = Case {
            name: format!("probe/{op}{}", profile_suffix(self.profile)),
            op: op.into(),
            out,
            params: params.map(|(name, value)| (name.to_string(), value)).collect(),
            inputs: inputs.into_iter().map(|(name, tensor)| (name.to_string(), tensor)).collect(),
            config: self.config.clone(),
        };
        self.implementation.run(&case)
    }
}

/// The profiles whose answers are declared: here, by [`Op::declared`] and where the questions are asked.
const DECLARED: [&str; 1] = [IEEE];

/// Whether there are declared answers to compare those of a profile with.
pub fn declares(profile: &str) -> bool {
    DECLARED.contains(&profile)
}

/// Whether `op` can be asked about its arithmetic or its order in these dtypes.
pub fn askable(op: &str, dtype: DType, out: DType) -> bool {
    hands_on(op) || Op::find(op).is_some_and(|op| op.shows(dtype, out))
}

/// A question that was asked of a kernel, with its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What was asked.
    pub question: String,
    /// What was found.
    pub found: String,
    /// What the contract declares.
    pub declared: String,
}

impl Finding {
    /// Whether the answer is the declared one.
    pub fn as_declared(&self) -> bool {
        self.found == self.declared
    }
}

/// `question: found, declared ...`.
impl std::fmt::Display for Finding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Finding { question, found, declared } = self;
        write!(f, "{question}: {found}, declared {declared}")
    }
}
