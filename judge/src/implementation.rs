//! What can be held to the contract: anything that turns a [`Case`] into an [`Answer`].

use samebits_contract::case::{Answer, Case};

/// An implementation under test.
///
/// `run` takes `&self` and the trait asks for `Sync`, so that trials may share one implementation; one that owns a
/// pipe keeps it behind a lock.
pub trait Implementation: Send + Sync {
    /// The name used in tables and records, for example `ours/cpu`.
    fn name(&self) -> &str;

    /// What was tested: a version that changes when the code does.
    fn version(&self) -> &str;

    /// Why this machine cannot run it at all, where that is so: every answer is then `unsupported` for that reason.
    fn absent(&self) -> Option<&str> {
        None
    }

    /// Answers `case`. Never panics: what cannot be answered comes back as `unsupported` or `error` with a reason.
    fn run(&self, case: &Case) -> Answer;

    /// Answers `cases` one right after the other, by the same process.
    fn in_order(&self, cases: &[&Case]) -> Vec<Answer> {
        cases.iter().map(|case| self.run(case)).collect()
    }

    /// Answers `case` in a process started for it; `None` where that cannot be done.
    fn fresh(&self, _case: &Case) -> Option<Answer> {
        None
    }

    /// Answers `case` over and over, in a process that does nothing else, until `each` has enough; `false` where that cannot
    /// be done.
    fn soak(&self, _case: &Case, _each: &mut Soaked) -> bool {
        false
    }
}

/// Takes an answer, and something that tells the resident bytes of the process that gave it; says whether to go on.
pub type Soaked<'a> = dyn FnMut(Answer, &dyn Fn() -> Option<u64>) -> bool + 'a;
