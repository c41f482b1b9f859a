//! Whether a run is green, and how many of what it recorded.

use crate::RunFolder;
use samebits_contract::record::Record;
use samebits_contract::verdict::Verdict;
use std::fmt;

/// How many records have each verdict.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// [`Verdict::Pass`].
    pub pass: usize,
    /// [`Verdict::Fail`].
    pub fail: usize,
    /// [`Verdict::Waived`].
    pub waived: usize,
    /// [`Verdict::StaleWaiver`].
    pub stale_waiver: usize,
    /// [`Verdict::Unsupported`].
    pub unsupported: usize,
    /// [`Verdict::Error`].
    pub error: usize,
    /// [`Verdict::Untested`].
    pub untested: usize,
}

impl Counts {
    /// Counts `records` by verdict.
    pub fn of<'a>(records: impl IntoIterator<Item = &'a Record>) -> Counts {
        let mut counts = Counts::default();
        for record in records {
            counts.add(&record.verdict);
        }
        counts
    }

    pub(crate) fn add(&mut self, verdict: &Verdict) {
        *match verdict {
            Verdict::Pass => &mut self.pass,
            Verdict::Fail(_) => &mut self.fail,
            Verdict::Waived { .. } => &mut self.waived,
            Verdict::StaleWaiver { .. } => &mut self.stale_waiver,
            Verdict::Unsupported { .. } => &mut self.unsupported,
            Verdict::Error { .. } => &mut self.error,
            Verdict::Untested { .. } => &mut self.untested,
        } += 1;
    }

    /// All records.
    pub fn total(&self) -> usize {
        self.by_name().iter().map(|(_, count)| count).sum()
    }

    /// Records whose verdict turns the run red.
    pub fn red(&self) -> usize {
        self.fail + self.stale_waiver + self.error + self.untested
    }

    /// Records that compared an answer: pass, fail and waived.
    pub fn judged(&self) -> usize {
        self.pass + self.fail + self.waived
    }

    /// Every count with the words reports use for it, pass first.
    pub fn by_name(&self) -> [(&'static str, usize); 7] {
        [
            ("pass", self.pass),
            ("fail", self.fail),
            ("error", self.error),
            ("untested", self.untested),
            ("stale waiver", self.stale_waiver),
            ("waived", self.waived),
            ("unsupported", self.unsupported),
        ]
    }
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, other: Counts) {
        let Counts { pass, fail, waived, stale_waiver, unsupported, error, untested } = other;
        self.pass += pass;
        self.fail += fail;
        self.waived += waived;
        self.stale_waiver += stale_waiver;
        self.unsupported += unsupported;
        self.error += error;
        self.untested += untested;
    }
}

/// The counts that are not zero, for example `480 pass, 3 fail`; `none` when all are.
impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts: Vec<String> =
            self.by_name().iter().filter(|(_, n)| *n > 0).map(|(name, n)| format!("{n} {name}")).collect();
        f.write_str(if parts.is_empty() { "none".into() } else { parts.join(", ") }.as_str())
    }
}

/// What a whole run comes to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary {
    /// Records by verdict.
    pub counts: Counts,
    /// Why the run as a whole cannot count as done, whatever its records say: cut off, short of what it planned, or
    /// nothing tested. Empty for a complete run.
    pub problems: Vec<String>,
    /// Why nothing was tested, where that is nobody's fault: every implementation that was asked for wants a device that
    /// this machine does not have, and nobody requires one.
    pub absent: Option<String>,
}

impl Summary {
    /// Sums up `folder`.
    pub fn of(folder: &RunFolder) -> Summary {
        let counts = Counts::of(&folder.records);
        let (found, planned) = (counts.total(), folder.run.planned);
        let mut problems = Vec::new();
        if !folder.run.complete {
            problems.push(format!("interrupted: {found} of {planned} planned records"));
        } else if found != planned {
            problems.push(format!("{found} records where {planned} were planned, in a run that says it is complete"));
        }
        if folder.torn > 0 {
            problems.push("the last line of records.jsonl is cut off and was dropped".into());
        }
        let wants = |record: &Record| folder.run.plan.absent.get(&record.implementation);
        let all_absent = counts.total() > 0 && folder.records.iter().all(|record| {
            matches!((&record.verdict, wants(record)), (Verdict::Unsupported { reason }, Some(why)) if reason == why)
        });
        let absent = folder.records.first().filter(|_| all_absent).and_then(wants).cloned();
        if counts.judged() == 0 && absent.is_none() {
            problems.push("nothing was tested".into());
        }
        Summary { counts, problems, absent }
    }

    /// Whether nothing is red: no red verdict, a complete run, and at least one answer compared, or no device to ask.
    pub fn is_green(&self) -> bool {
        self.counts.red() == 0 && self.problems.is_empty()
    }

    /// 0 when green, 1 when red.
    pub fn exit_code(&self) -> u8 {
        u8::from(!self.is_green())
    }

    /// How many records are red, for example `3 of 512 records are red`.
    pub(crate) fn red_line(&self) -> String {
        let total = self.counts.total();
        match (total, self.counts.red()) {
            (0, _) => "no records".into(),
            (_, 0) => format!("no red verdict in {}", records(total)),
            (_, 1) => format!("1 of {} is red", records(total)),
            (_, red) => format!("{red} of {} are red", records(total)),
        }
    }

    /// `GREEN`, `RED`, or `NOT TESTED` where there was no device to ask.
    pub fn word(&self) -> &'static str {
        match (self.is_green(), &self.absent) {
            (false, _) => "RED",
            (true, None) => "GREEN",
            (true, Some(_)) => "NOT TESTED",
        }
    }

    /// The verdict in one line, for example `RED: 3 of 512 records are red; 509 pass, 3 fail`.
    pub fn headline(&self) -> String {
        let total = self.counts.total();
        let mut parts = self.problems.clone();
        parts.extend(self.absent.clone());
        parts.push(self.red_line());
        if total > 0 {
            parts.push(self.counts.to_string());
        }
        format!("{}: {}", self.word(), parts.join("; "))
    }
}

fn records(count: usize) -> String {
    format!("{count} record{}", if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic;

    #[test]
    fn a_run_of_passes_is_green_and_each_fault_turns_it_red() {
        let green = synthetic::green();
        assert_eq!(Summary::of(&green).exit_code(), 0);
        assert!(Summary::of(&green).headline().starts_with("GREEN: no red verdict in "));

        let mut faults: Vec<(&str, RunFolder)> = Vec::new();
        for verdict in synthetic::verdicts().into_iter().filter(Verdict::is_red) {
            let mut folder = green.clone();
            folder.records[1].verdict = verdict;
            faults.push(("is red", folder));
        }
        assert_eq!(faults.len(), 4);
        let mut folder = green.clone();
        folder.run.complete = false;
        faults.push(("interrupted: 12 of 12 planned records", folder));
        let mut folder = green.clone();
        folder.records.pop();
        faults.push(("11 records where 12 were planned", folder));
        let mut folder = green.clone();
        folder.torn = 1;
        faults.push(("cut off", folder));
        let mut folder = green.clone();
        folder.records.clear();
        folder.run.planned = 0;
        faults.push(("nothing was tested", folder));
        let mut folder = green.clone();
        for record in &mut folder.records {
            record.verdict = Verdict::Unsupported { reason: "no".into() };
        }
        faults.push(("nothing was tested", folder));
        for (words, folder) in faults {
            let summary = Summary::of(&folder);
            assert_eq!(summary.exit_code(), 1, "{words}");
            assert!(summary.headline().starts_with("RED: "), "{words}");
            assert!(summary.headline().contains(words), "{words}: {}", summary.headline());
        }
    }

    /// A machine without a device is no fault of the run; anything else that tests nothing stays red.
    #[test]
    fn only_a_missing_device_excuses_a_run_that_tests_nothing() {
        let why = "no CUDA device: the driver lists none";
        let mut folder = synthetic::green();
        let name = folder.records[0].implementation.clone();
        folder.run.plan.absent.insert(name, why.into());
        assert_eq!(Summary::of(&folder).word(), "GREEN", "what was tested counts");
        for record in &mut folder.records {
            record.verdict = Verdict::Unsupported { reason: why.into() };
        }
        let summary = Summary::of(&folder);
        assert_eq!((summary.exit_code(), summary.word()), (0, "NOT TESTED"));
        assert_eq!(summary.headline(), format!("NOT TESTED: {why}; no red verdict in 12 records; 12 unsupported"));
        let mut faults = [folder.clone(), folder.clone(), folder.clone(), folder.clone()];
        faults[0].records[3].verdict = Verdict::Unsupported { reason: "no kernel".into() };
        faults[1].records[3].implementation = "other".into();
        faults[2].run.complete = false;
        faults[3].run.plan.absent.clear();
        for folder in faults {
            assert_eq!(Summary::of(&folder).exit_code(), 1, "{}", Summary::of(&folder).headline());
        }
    }

    #[test]
    fn waived_and_unsupported_are_not_red_and_not_hidden() {
        let mut folder = synthetic::green();
        folder.records[0].verdict = Verdict::Waived { reason: "known".into() };
        folder.records[1].verdict = Verdict::Unsupported { reason: "no fp16".into() };
        let summary = Summary::of(&folder);
        assert_eq!(summary.exit_code(), 0);
        assert!(summary.headline().ends_with("10 pass, 1 waived, 1 unsupported"), "{}", summary.headline());
    }
}
