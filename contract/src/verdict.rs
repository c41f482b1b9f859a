//! What came of one judgment.

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::BTreeMap;

/// The outcome of one judgment on one case.
///
/// Among the fields of a record it is `verdict`, its name, beside `evidence` for a failure and `reason` for what is neither
/// that nor a pass.
#[derive(Clone, Debug, PartialEq)]
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

impl Serialize for Verdict {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Fields<'a> {
            verdict: &'static str,
            #[serde(skip_serializing_if = "Option::is_none")]
            reason: Option<&'a str>,
            #[serde(skip_serializing_if = "Option::is_none")]
            evidence: Option<&'a Evidence>,
        }
        let (reason, evidence) = match self {
            Verdict::Pass => (None, None),
            Verdict::Fail(evidence) => (None, Some(evidence.as_ref())),
            Verdict::Waived { reason }
            | Verdict::StaleWaiver { reason }
            | Verdict::Unsupported { reason }
            | Verdict::Error { reason }
            | Verdict::Untested { reason } => (Some(reason.as_str()), None),
        };
        Fields { verdict: self.name(), reason, evidence }.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Verdict {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Verdict, D::Error> {
        #[derive(Deserialize)]
        struct Fields {
            verdict: Stored,
            #[serde(default)]
            reason: Option<String>,
            #[serde(default)]
            evidence: Option<Box<Evidence>>,
        }
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Stored {
            Name(String),
            // Schema 1: `{"fail": evidence}` or `{"waived": {"reason": ..}}`.
            Old(BTreeMap<String, Old>),
        }
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Old {
            Reason { reason: String },
            Evidence(Box<Evidence>),
        }
        let Fields { verdict, mut reason, mut evidence } = Fields::deserialize(deserializer)?;
        let name = match verdict {
            Stored::Name(name) => name,
            Stored::Old(one) => {
                let (name, old) = one.into_iter().next().ok_or_else(|| D::Error::custom("`verdict` is empty"))?;
                match old {
                    Old::Reason { reason: said } => reason = Some(said),
                    Old::Evidence(found) => evidence = Some(found),
                }
                name
            }
        };
        let missing = |field| D::Error::custom(format!("verdict `{name}` lacks its `{field}`"));
        if name == "pass" {
            return Ok(Verdict::Pass);
        }
        if name == "fail" {
            return evidence.map(Verdict::Fail).ok_or_else(|| missing("evidence"));
        }
        let reason = reason.ok_or_else(|| missing("reason"))?;
        Ok(match name.as_str() {
            "waived" => Verdict::Waived { reason },
            "stale_waiver" => Verdict::StaleWaiver { reason },
            "unsupported" => Verdict::Unsupported { reason },
            "error" => Verdict::Error { reason },
            "untested" => Verdict::Untested { reason },
            _ => return Err(D::Error::custom(format!("verdict `{name}` is not known"))),
        })
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
