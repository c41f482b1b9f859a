//! What outputs of bf16 and fp16 alone leave unseen of the order of sums.

use crate::RunFolder;
use crate::grid;
use samebits_contract::fill::Fill;
use samebits_contract::orders::{self, Seen};
use samebits_contract::record::{Judgment, Record};
use samebits_contract::tensor::DType;
use std::collections::{BTreeMap, BTreeSet};

/// What a reader should know beside the records: the notes of the run, and a line for each implementation and each thing that
/// rounding may have hidden of its sums. Every report has them.
pub fn notes(folder: &RunFolder) -> Vec<String> {
    let mut notes = folder.run.notes.clone();
    for implementation in grid::implementations(&folder.records) {
        notes.extend(unseen(&folder.records, implementation));
    }
    notes
}

/// An answer was compared.
fn was_judged(record: &Record) -> bool {
    let mut counts = crate::Counts::default();
    counts.add(&record.verdict);
    counts.judged() > 0
}

fn unseen(records: &[Record], implementation: &str) -> Vec<String> {
    // By op and input dtype: the dtypes of outputs that were compared with themselves, and whether cases of power were among them.
    let mut asked: BTreeMap<(grid::Op, DType), (BTreeSet<DType>, bool)> = BTreeMap::new();
    let judged =
        |r: &&Record| r.implementation == implementation && r.judgment == Judgment::Invariance && was_judged(r);
    for record in records.iter().filter(judged) {
        let (outs, power) = asked.entry((grid::op(record), record.dtype)).or_default();
        outs.insert(record.out);
        *power |= record.axis.as_deref() == Some("batch") && Fill::Power.is_of(&record.case);
    }
    // What to say of which ops, in the order in which it is said.
    let mut said: BTreeMap<usize, BTreeMap<&str, Vec<&str>>> = BTreeMap::new();
    for ((op, dtype), (outs, power)) in asked.iter().filter(|(_, (outs, _))| !outs.contains(&DType::Fp32)) {
        debug_assert!(!outs.is_empty());
        let what = match (orders::seen(op.name), power) {
            (Seen::NoSum, _) => continue,
            (Seen::All, true) => 0,
            (Seen::All, false) => 1,
            (Seen::Unmeasured, _) => 2,
        };
        said.entry(what).or_default().entry(op.name).or_default().push(dtype.name());
    }
    const SENTENCES: [&str; 3] = [
        "rounding hides single ulps, but in the cases of fill power; of the orders of f32 sums that docs/METHOD.md lists it leaves none unseen",
        "rounding hides single ulps, and no case of fill power was judged along the batch; an order of sums that follows the batch may be unseen",
        "rounding hides single ulps, and which orders of sums it leaves unseen was not measured; fp32 outputs would show them",
    ];
    let line = |(what, ops): (usize, BTreeMap<&str, Vec<&str>>)| {
        let ops: Vec<String> = ops.iter().map(|(op, dtypes)| format!("{op} ({})", dtypes.join(", "))).collect();
        format!("{implementation}: narrow outputs alone of {}: {}", ops.join(", "), SENTENCES[what])
    };
    said.into_iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic;
    use samebits_contract::verdict::Verdict;

    /// A run of one op whose records of invariance are as `change` makes them.
    fn of(op: &str, change: impl Fn(&mut Record)) -> Vec<String> {
        let mut folder = synthetic::green();
        folder.records.retain(|record| record.op == "rms_norm");
        for record in &mut folder.records {
            record.op = op.into();
            record.case = format!("{op}/bf16/orders-power-bf16");
            change(record);
        }
        notes(&folder)
    }

    #[test]
    fn says_what_narrow_outputs_leave_unseen() {
        let one = |notes: Vec<String>| {
            assert_eq!(notes.len(), 1, "{notes:?}");
            notes[0].clone()
        };
        let seen = one(of("rms_norm", |_| {}));
        assert!(seen.starts_with("ours/cpu: narrow outputs alone of rms_norm (bf16): "), "{seen}");
        assert!(seen.ends_with("leaves none unseen"), "{seen}");
        let plain = one(of("rms_norm", |record| record.case = "rms_norm/bf16/normal-normal-bf16".into()));
        assert!(plain.contains("no case of fill power was judged"), "{plain}");
        let not_along = one(of("rms_norm", |record| record.axis = record.axis.take().map(|_| "threads".into())));
        assert!(not_along.contains("no case of fill power was judged"), "{not_along}");
        // Nothing is hidden by fp32, nothing is added without a sum, nothing was seen of what was not compared.
        assert!(of("rms_norm", |record| record.out = DType::Fp32).is_empty());
        assert!(of("silu_mul", |_| {}).is_empty());
        let unsupported = || Verdict::Unsupported { reason: "no".into() };
        assert!(of("rms_norm", |record| record.verdict = unsupported()).is_empty());
        for op in orders::UNMEASURED {
            assert!(one(of(op, |_| {})).contains("was not measured"), "{op}");
        }
    }

    #[test]
    fn every_report_says_it() {
        let mut folder = synthetic::green();
        folder.run.notes.push("a note of the run".into());
        let line = "narrow outputs alone of rms_norm (bf16): ";
        assert!(crate::table(&folder).contains(&format!("\nnote: ours/cpu: {line}")));
        assert!(crate::markdown::document(&folder).contains("narrow outputs alone of rms\\_norm (bf16): "));
        assert!(crate::html::document(&folder).contains(&format!("Note: ours/cpu: {line}")));
        for text in [crate::table(&folder), crate::markdown::document(&folder), crate::html::document(&folder)] {
            assert!(text.contains("a note of the run"));
        }
    }
}
