//! One judged fact as one JSON line, and the facts of the run as a whole.

use crate::compare::ChainMeasure;
use crate::gradients::GradientMeasure;
use crate::tensor::DType;
use crate::verdict::Verdict;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Version of the record schema; a reader refuses a newer one and reads older ones. 1 had `verdict` in several shapes.
pub const SCHEMA: u32 = 2;

/// The ways an answer is judged, and the cases with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Judgment {
    /// Against the f64 oracle, within the contract's bounds.
    Accuracy,
    /// Against the implementation's own answer under another setting, bit for bit.
    Invariance,
    /// Against blessed or independently computed outputs, bit for bit.
    Golden,
    /// The arithmetic that answers give away against the one that the profile declares.
    Arithmetic,
    /// The order in which an op adds, as questions give it away, with any number of rows, at every place and on every schedule.
    Order,
    /// The cases: every class of number that an output can hold must be among the right answers.
    Coverage,
}

impl Judgment {
    /// All judgments, in the order tables print them.
    pub const ALL: [Judgment; 6] = [
        Judgment::Accuracy,
        Judgment::Invariance,
        Judgment::Golden,
        Judgment::Arithmetic,
        Judgment::Order,
        Judgment::Coverage,
    ];

    /// Those that compare outputs, and so have a threshold.
    pub const COMPARING: [Judgment; 3] = [Judgment::Accuracy, Judgment::Invariance, Judgment::Golden];

    /// The names of all judgments, for messages.
    pub fn names() -> String {
        Judgment::ALL.map(Judgment::name).join(", ")
    }

    /// The stable name used in records and tables.
    pub fn name(self) -> &'static str {
        match self {
            Judgment::Accuracy => "accuracy",
            Judgment::Invariance => "invariance",
            Judgment::Golden => "golden",
            Judgment::Arithmetic => "arithmetic",
            Judgment::Order => "order",
            Judgment::Coverage => "coverage",
        }
    }
}

/// Measured error of one answer against the oracle.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Measure {
    /// Elements compared.
    pub samples: usize,
    /// Largest |found - oracle| in ulp of the output dtype.
    pub max_ulp: f64,
    /// 99th percentile of the same.
    pub p99_ulp: f64,
    /// Share of elements equal to the correctly rounded oracle.
    pub correctly_rounded: f64,
    /// Largest |found - oracle|.
    pub max_abs: f64,
    /// Largest error as a share of the bound it was held to; at most 1 passes.
    pub of_bound: f64,
    /// How the errors of all outputs are distributed; records from before there was one have none.
    #[serde(default, skip_serializing_if = "Spread::is_empty")]
    pub spread: Spread,
}

/// Elements by the size of their error.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spread {
    /// By |found - oracle| in ulp of the output dtype: up to each of [`Spread::ULP`], and beyond the last. Elements without a
    /// distance, as NaN, are left out.
    pub ulp: [u64; Spread::ULP.len() + 1],
    /// By the share of the bound that the error takes: up to each of [`Spread::SHARE`], and beyond the bound.
    pub share: [u64; Spread::SHARE.len() + 1],
}

impl Spread {
    /// Upper ends, each included, of the classes by ulp.
    pub const ULP: [f64; 9] = [0.0, 0.125, 0.25, 0.375, 0.5, 1.0, 4.0, 16.0, 256.0];
    /// Upper ends, each included, of the classes by share.
    pub const SHARE: [f64; 11] = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0];

    /// Whether nothing was counted.
    pub fn is_empty(&self) -> bool {
        *self == Spread::default()
    }

    /// Counts one element.
    pub fn count(&mut self, ulp: Option<f64>, share: f64) {
        if let Some(ulp) = ulp {
            self.ulp[class(&Spread::ULP, ulp)] += 1;
        }
        self.share[class(&Spread::SHARE, share)] += 1;
    }

    /// Adds what another one counted.
    pub fn add(&mut self, other: &Spread) {
        self.ulp.iter_mut().zip(other.ulp).for_each(|(count, more)| *count += more);
        self.share.iter_mut().zip(other.share).for_each(|(count, more)| *count += more);
    }
}

/// The first class that holds `value`; the last where none does, as for a NaN.
fn class(ends: &[f64], value: f64) -> usize {
    ends.iter().position(|end| value <= *end).unwrap_or(ends.len())
}

/// One judgment on one case of one implementation: a line of `records.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// [`SCHEMA`] when written.
    pub schema: u32,
    /// SHA-256 of the contract's files, in hex.
    pub contract: String,
    /// The row set, for example `tight`.
    pub rows: String,
    /// The implementation, for example `ours/cpu`.
    pub implementation: String,
    /// The op's stem, or `chain` and `chain_backward` for a model.
    pub op: String,
    /// Threshold class: elementwise, reduction, logprob, attention, chain.
    pub class: String,
    /// Dtype of the floating-point inputs.
    pub dtype: DType,
    /// Dtype of the floating-point outputs.
    pub out: DType,
    /// The case's name.
    pub case: String,
    /// How it was judged.
    pub judgment: Judgment,
    /// The axis that was varied, for invariance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub axis: Option<String>,
    /// The setting on that axis, for invariance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub setting: Option<String>,
    /// What the implementation says it ran.
    pub kernel: String,
    /// How it says it used its workspace, for accuracy.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub plan: String,
    /// What it counted besides (bytes of workspace, conversions, slow paths), for accuracy.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub ledger: BTreeMap<String, u64>,
    /// What came of it: `verdict`, with `evidence` or `reason` beside it.
    #[serde(flatten)]
    pub verdict: Verdict,
    /// The command that asks it again, where it is red and a command asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub again: Option<String>,
    /// Error against the oracle, for accuracy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measure: Option<Measure>,
    /// Error of a whole model's logits, for accuracy of a chain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chain: Option<ChainMeasure>,
    /// Error of a whole model's gradients, for accuracy of those.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gradient: Option<GradientMeasure>,
    /// Wall time of the judgment in seconds; the only field that differs between two equal runs.
    pub seconds: f64,
}

/// Facts of a whole run, kept in `run.json` beside `records.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// [`SCHEMA`] when written.
    pub schema: u32,
    /// `samebits` and its version.
    pub tool: String,
    /// Contract name and version, for example `ws1 1.0.0`.
    pub contract_name: String,
    /// SHA-256 of the contract's files, in hex.
    pub contract: String,
    /// The row set.
    pub rows: String,
    /// The command line's arguments after the program name.
    pub arguments: Vec<String>,
    /// Start, seconds since 1970-01-01 UTC.
    pub started: u64,
    /// Whether the run came to its end; false while it runs and after an interruption.
    pub complete: bool,
    /// How many records the run is going to write.
    pub planned: usize,
    /// Wall time in seconds; 0 until complete.
    pub seconds: f64,
    /// Machine and build facts by name (`cpu`, `cores`, `isas`, `os`, `rustc`), printed in reports.
    pub machine: BTreeMap<String, String>,
    /// What a reader should know beside the records, a line each: what was not asked, which waivers end soon.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// What was planned, so that a run can be resumed and parts of one can be joined.
    #[serde(default)]
    pub plan: Plan,
    /// SHA-256 of `records.jsonl`, in hex; absent until complete.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sealed: Option<String>,
}

/// What a run is going to do, and how far earlier attempts at it came.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// SHA-256 over the names of all judgments of all parts, and over what the axes vary; equal plans ask the same.
    pub digest: String,
    /// The draw of inputs; 0 is the one that goldens hold.
    pub seed: u64,
    /// Which part of how many, as `2/5`; empty for the whole.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub shard: String,
    /// Whether the parts together leave out some of what the slice asks of an implementation; said of parts alone.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub narrowed: bool,
    /// The implementations with what their version commands said.
    pub implementations: BTreeMap<String, String>,
    /// Those of them that this machine cannot run at all, nobody requires, and why: for want of a device.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub absent: BTreeMap<String, String>,
    /// Attempts that were interrupted, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub attempts: Vec<Attempt>,
}

/// An attempt that was interrupted, sealed by the one that went on.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Attempt {
    /// Bytes of `journal.jsonl` that it and those before it left whole.
    pub bytes: u64,
    /// SHA-256 of those bytes, in hex.
    pub sha256: String,
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;
    use crate::verdict::Evidence;

    pub(crate) fn every_element_is_counted_once_in_the_class_of_its_error() {
        let mut spread = Spread::default();
        assert!(spread.is_empty());
        for (ulp, share) in [(Some(0.0), 0.0), (Some(0.5), 1.0), (Some(0.51), 1.0001), (Some(1e9), f64::INFINITY)] {
            spread.count(ulp, share);
        }
        spread.count(None, f64::NAN);
        assert_eq!(spread.ulp, [1, 0, 0, 0, 1, 1, 0, 0, 0, 1]);
        assert_eq!(spread.share, [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 3]);
        let mut twice = spread.clone();
        twice.add(&spread);
        assert_eq!((twice.ulp[4], twice.share[11]), (2, 6));
    }

    /// A record has its verdict as one word, and is read as schema 1 had it.
    pub(crate) fn verdicts_are_one_word_beside_their_reason_or_evidence() {
        let evidence = Evidence { message: "y[0] differs".into(), ulp: Some(1.0), count: 3, ..Evidence::default() };
        let reason = || "why".to_string();
        let all = [
            Verdict::Pass,
            Verdict::Fail(Box::new(evidence.clone())),
            Verdict::Waived { reason: reason() },
            Verdict::StaleWaiver { reason: reason() },
            Verdict::Unsupported { reason: reason() },
            Verdict::Error { reason: reason() },
            Verdict::Untested { reason: reason() },
        ];
        for verdict in all {
            let text = serde_json::to_string(&verdict).unwrap();
            assert!(text.starts_with(&format!("{{\"verdict\":\"{}\"", verdict.name())), "{text}");
            assert_eq!(serde_json::from_str::<Verdict>(&text).unwrap(), verdict);
            let old = match &verdict {
                Verdict::Pass => r#"{"verdict":"pass"}"#.to_string(),
                Verdict::Fail(e) => format!(r#"{{"verdict":{{"fail":{}}}}}"#, serde_json::to_string(e).unwrap()),
                other => format!(r#"{{"verdict":{{"{}":{{"reason":"why"}}}}}}"#, other.name()),
            };
            assert_eq!(serde_json::from_str::<Verdict>(&old).unwrap(), verdict, "{old}");
        }
        for wrong in [r#"{"verdict":"fail"}"#, r#"{"verdict":"error"}"#, r#"{"verdict":"fine"}"#, r#"{"verdict":{}}"#] {
            assert!(serde_json::from_str::<Verdict>(wrong).is_err(), "{wrong}");
        }
    }

    /// What was written before there was a spread is read, and writes none.
    pub(crate) fn measures_without_a_spread_stay_as_they_are() {
        let old = r#"{"samples":1,"max_ulp":0.5,"p99_ulp":0.5,"correctly_rounded":1.0,"max_abs":0.0,"of_bound":0.5}"#;
        let measure: Measure = serde_json::from_str(old).unwrap();
        assert!(measure.spread.is_empty());
        assert_eq!(serde_json::to_string(&measure).unwrap(), old);
    }
}
