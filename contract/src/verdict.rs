//! What came of one judgment.

use serde::{Deserialize, Serialize};

/// The outcome of one judgment on one case.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The contract holds here.
    Pass,
    /// It does not; the evidence names the first element.
    Fail(Box<Evidence>),
    /// It does not, and a written waiver covers it.
    Waived {
        /// The waiver's reason.
        reason: String,
    },
    /// A waiver that covered no failure in the whole run: red.
    StaleWaiver {
        /// The waiver's reason.
        reason: String,
    },
    /// The implementation does not offer this combination.
    Unsupported {
        /// Which combination, and why.
        reason: String,
    },
    /// The implementation should have answered and did not: red.
    Error {
        /// What it said.
        reason: String,
    },
    /// Required and never run: red.
    Untested {
        /// Why it did not run.
        reason: String,
    },
}

impl Verdict {
    /// The stable name used in records and tables.
    pub fn name(&self) -> &'static str {
        match self {
            Verdict::Pass => "pass",
            Verdict::Fail(_) => "fail",
            Verdict::Waived { .. } => "waived",
            Verdict::StaleWaiver { .. } => "stale_waiver",
            Verdict::Unsupported { .. } => "unsupported",
            Verdict::Error { .. } => "error",
            Verdict::Untested { .. } => "untested",
        }
    }

    /// Whether this verdict turns the run red.
    pub fn is_red(&self) -> bool {
        matches!(
            self,
            Verdict::Fail(_) | Verdict::StaleWaiver { .. } | Verdict::Error { .. } | Verdict::Untested { .. }
        )
    }
}

/// Where and how an answer is wrong: the first differing or out-of-bound element, and how many there are.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Evidence {
    /// One line for people.
    pub message: String,
    /// The output tensor, for example `y`.
    pub output: String,
    /// Row-major index in that tensor.
    pub index: usize,
    /// The same index by axis.
    pub coordinates: Vec<usize>,
    /// What was expected, as a decimal that reads back to the same value.
    pub expected: String,
    /// What was found.
    pub found: String,
    /// Bits of the expected value, for example `0x3f80` (empty for an f64 reference).
    pub expected_bits: String,
    /// Bits of the value found.
    pub found_bits: String,
    /// Distance in units in the last place of the output dtype; absent where it has no meaning (NaN, inf).
    pub ulp: Option<f64>,
    /// How many elements are wrong.
    pub count: usize,
    /// Out of how many.
    pub total: usize,
}
