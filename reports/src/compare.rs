//! Two runs side by side: which judgments changed, and which of the changes are for the worse.

use crate::RunFolder;
use samebits_contract::record::{Measure, Record};
use samebits_contract::verdict::Verdict;
use std::collections::BTreeMap;

/// What became of one judgment.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// Case, judgment and axis.
    pub name: String,
    /// The record of the first run, where there is one.
    pub before: Option<Record>,
    /// That of the second.
    pub after: Option<Record>,
    /// Which way it went.
    pub kind: Kind,
    /// Whether it got worse in any way: a worse verdict, a larger error, fewer bits that agree.
    pub worse: bool,
    /// What changed, in words.
    pub what: String,
}

/// Which way a judgment went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Red where it was not, or no longer judged where it was: gone, or unsupported.
    TurnedRed,
    /// Red, and now it is not.
    TurnedGreen,
    /// Neither: an error that moved within its bound, another kernel, a failure that stays one.
    Moved,
}

impl Kind {
    /// All kinds, in the order they are told.
    pub const ALL: [Kind; 3] = [Kind::TurnedRed, Kind::TurnedGreen, Kind::Moved];

    /// The name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Kind::TurnedRed => "turned_red",
            Kind::TurnedGreen => "turned_green",
            Kind::Moved => "moved",
        }
    }

    fn of(before: Option<&Record>, after: Option<&Record>) -> Kind {
        let red = |record: Option<&Record>| record.is_some_and(|record| record.verdict.is_red());
        let judged = |record: Option<&Record>| {
            let verdict = record.map(|record| &record.verdict);
            matches!(verdict, Some(Verdict::Pass | Verdict::Fail(_) | Verdict::Waived { .. }))
        };
        match (red(before), red(after)) {
            (false, true) => Kind::TurnedRed,
            (false, false) if judged(before) && !judged(after) => Kind::TurnedRed,
            (true, false) if judged(after) => Kind::TurnedGreen,
            _ => Kind::Moved,
        }
    }
}

/// All of it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Changes {
    /// Judgments that both runs have.
    pub common: usize,
    /// Those that differ, in the order of the second run, then what is gone.
    pub changes: Vec<Change>,
}

impl Changes {
    /// Those of one kind.
    pub fn of(&self, kind: Kind) -> impl Iterator<Item = &Change> {
        self.changes.iter().filter(move |change| change.kind == kind)
    }

    /// Whether any got worse.
    pub fn worse(&self) -> bool {
        self.changes.iter().any(|change| change.worse)
    }
}

fn name(record: &Record, with_implementation: bool) -> String {
    let axis = record.axis.as_ref().map_or(String::new(), |axis| format!(" {axis}"));
    let who = if with_implementation { format!(" ({})", record.implementation) } else { String::new() };
    format!("{} {}{axis}{who}", record.case, record.judgment.name())
}

/// Compares `before` with `after` judgment by judgment. Runs of one implementation each are compared whoever it is, so that
/// two implementations can be laid side by side.
pub fn changes(before: &RunFolder, after: &RunFolder) -> Changes {
    let several = |folder: &RunFolder| crate::grid::implementations(&folder.records).len() > 1;
    let named = several(before) || several(after);
    let mut old: BTreeMap<String, &Record> = before.records.iter().map(|r| (name(r, named), r)).collect();
    let mut found = Changes::default();
    for record in &after.records {
        let name = name(record, named);
        let Some(was) = old.remove(&name) else {
            let what = format!("new: {}", record.verdict.name());
            let worse = record.verdict.is_red();
            let kind = Kind::of(None, Some(record));
            found.changes.push(Change { name, before: None, after: Some(record.clone()), kind, worse, what });
            continue;
        };
        found.common += 1;
        if let Some((worse, what)) = changed(was, record) {
            let (before, after) = (Some(was.clone()), Some(record.clone()));
            found.changes.push(Change { name, kind: Kind::of(Some(was), Some(record)), before, after, worse, what });
        }
    }
    for (name, was) in old {
        let what = format!("gone: it was {}", was.verdict.name());
        let kind = Kind::of(Some(was), None);
        found.changes.push(Change { name, before: Some(was.clone()), after: None, kind, worse: true, what });
    }
    found
}

/// From best to worst.
fn rank(verdict: &Verdict) -> usize {
    match verdict {
        Verdict::Pass => 0,
        Verdict::Waived { .. } => 1,
        Verdict::Unsupported { .. } => 2,
        Verdict::StaleWaiver { .. } => 3,
        Verdict::Untested { .. } | Verdict::Error { .. } => 4,
        Verdict::Fail(_) => 5,
    }
}

fn changed(was: &Record, is: &Record) -> Option<(bool, String)> {
    if was.verdict.name() != is.verdict.name() {
        let worse = rank(&is.verdict) > rank(&was.verdict);
        return Some((worse, format!("{} -> {}", was.verdict.name(), is.verdict.name())));
    }
    if let (Verdict::Fail(a), Verdict::Fail(b)) = (&was.verdict, &is.verdict)
        && (a.count, &a.found_bits) != (b.count, &b.found_bits)
    {
        return Some((b.count > a.count, format!("still fails: {} -> {} elements wrong", a.count, b.count)));
    }
    // By their bits: a measure that is NaN is the same as itself.
    let bits = |m: &Measure| [m.max_ulp, m.correctly_rounded, m.max_abs].map(f64::to_bits);
    if let (Some(a), Some(b)) = (&was.measure, &is.measure)
        && bits(a) != bits(b)
    {
        let worse = b.max_ulp > a.max_ulp || b.correctly_rounded < a.correctly_rounded;
        let shares = (100.0 * a.correctly_rounded, 100.0 * b.correctly_rounded);
        return Some((
            worse,
            format!(
                "max ulp {:.4} -> {:.4}, correctly rounded {:.2}% -> {:.2}%",
                a.max_ulp, b.max_ulp, shares.0, shares.1
            ),
        ));
    }
    (was.kernel != is.kernel).then(|| (false, format!("kernel {} -> {}", was.kernel, is.kernel)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic;

    #[test]
    fn a_run_against_itself_and_against_a_worse_one() {
        let mut folder = synthetic::folder();
        // A real run judges nothing twice.
        folder.records.iter_mut().enumerate().for_each(|(i, record)| record.case += &format!("#{i}"));
        assert!(changes(&folder, &folder).changes.is_empty());
        let mut other = folder.clone();
        let passing = other.records.iter().position(|r| r.verdict == Verdict::Pass && r.measure.is_some()).unwrap();
        other.records[passing].verdict = Verdict::Error { reason: "gone".into() };
        let found = changes(&folder, &other);
        assert!(found.worse() && found.changes.len() == 1 && found.changes[0].what == "pass -> error");
        assert!(!changes(&other, &folder).worse(), "the other way round it got better");
        let mut other = folder.clone();
        other.records[passing].measure.as_mut().unwrap().max_ulp += 1.0;
        assert!(changes(&folder, &other).worse() && !changes(&other, &folder).worse());
        let mut other = folder.clone();
        other.records.remove(passing);
        let found = changes(&folder, &other);
        assert!(found.worse() && found.changes[0].what.starts_with("gone"));
        assert_eq!(found.common, folder.records.len() - 1);
        assert_eq!(found.changes[0].kind, Kind::TurnedRed);
    }

    /// A kernel that is mended rounds otherwise in places, within its bound: that is no reason to stop it.
    #[test]
    fn what_turned_is_told_apart_from_what_moved() {
        let mut folder = synthetic::folder();
        folder.records.iter_mut().enumerate().for_each(|(i, record)| record.case += &format!("#{i}"));
        let measured = folder.records.iter().position(|r| r.verdict == Verdict::Pass && r.measure.is_some()).unwrap();
        let passing = folder.records.iter().rposition(|r| r.verdict == Verdict::Pass).unwrap();
        let failing = folder.records.iter().position(|r| matches!(r.verdict, Verdict::Fail(_))).unwrap();
        let mut mended = folder.clone();
        mended.records[failing].verdict = Verdict::Pass;
        mended.records[measured].measure.as_mut().unwrap().correctly_rounded -= 0.001;
        let kinds = |a: &RunFolder, b: &RunFolder| {
            let found = changes(a, b);
            found.changes.into_iter().map(|change| (change.kind, change.worse)).collect::<Vec<_>>()
        };
        assert_eq!(kinds(&folder, &mended), [(Kind::Moved, true), (Kind::TurnedGreen, false)]);
        assert_eq!(kinds(&mended, &folder), [(Kind::Moved, false), (Kind::TurnedRed, true)]);
        let reason = || "no".to_string();
        for (verdict, kind) in [
            (Verdict::Error { reason: reason() }, Kind::TurnedRed),
            (Verdict::Untested { reason: reason() }, Kind::TurnedRed),
            (Verdict::Unsupported { reason: reason() }, Kind::TurnedRed),
            (Verdict::Waived { reason: reason() }, Kind::Moved),
        ] {
            let mut other = folder.clone();
            other.records[passing].verdict = verdict.clone();
            assert_eq!(kinds(&folder, &other), [(kind, true)], "{verdict:?}");
        }
        let mut other = folder.clone();
        other.records.remove(failing);
        assert_eq!(kinds(&folder, &other), [(Kind::Moved, true)], "a failure that is gone turned nothing");
    }
}
