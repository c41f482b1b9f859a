//! `junit.xml`: one test case per record, for the test pages of CI systems.

use crate::describe::{again, judgment, one_line, subject, verdict, why};
use crate::{RunFolder, Summary, grid};
use quick_junit::{NonSuccessKind, Property, Report, TestCase, TestCaseStatus, TestSuite};
use samebits_contract::record::Record;
use samebits_contract::verdict::Verdict;
use std::collections::BTreeMap;
use std::time::Duration;

/// The JUnit document: a suite per implementation and op, its cases in the order of the records.
///
/// `fail` and `stale waiver` are failures, `error` and `untested` are errors, `waived` and `unsupported` are skipped.
/// What is wrong with the run as a whole is one error each in a suite of its own named `run`, so that an interrupted
/// or empty run is red here too.
pub fn document(folder: &RunFolder) -> String {
    let RunFolder { run, records, .. } = folder;
    let mut report = Report::new(one_line(&run.contract_name));
    report.set_time(duration(run.seconds));
    let mut by_suite: BTreeMap<_, Vec<&Record>> = BTreeMap::new();
    for record in records {
        by_suite.entry((record.implementation.as_str(), grid::op(record))).or_default().push(record);
    }
    for ((implementation, op), records) in by_suite {
        let mut suite = TestSuite::new(one_line(&format!("{implementation}/{}", op.name)));
        suite.add_property(Property::new("contract", one_line(&run.contract)));
        suite.add_property(Property::new("rows", one_line(&run.rows)));
        suite.set_time(records.iter().map(|r| duration(r.seconds)).sum());
        suite.add_test_cases(records.into_iter().map(case));
        report.add_test_suite(suite);
    }
    let problems = Summary::of(folder).problems;
    if !problems.is_empty() {
        let mut suite = TestSuite::new("run");
        for problem in problems {
            let mut status = TestCaseStatus::non_success(NonSuccessKind::Error);
            status.set_type("run").set_message(problem);
            suite.add_test_case(TestCase::new("the run is complete", status));
        }
        report.add_test_suite(suite);
    }
    report.to_string().expect("writing XML to memory does not fail")
}

fn case(record: &Record) -> TestCase {
    let mut status = match record.verdict {
        Verdict::Pass => TestCaseStatus::success(),
        Verdict::Fail(_) | Verdict::StaleWaiver { .. } => TestCaseStatus::non_success(NonSuccessKind::Failure),
        Verdict::Error { .. } | Verdict::Untested { .. } => TestCaseStatus::non_success(NonSuccessKind::Error),
        Verdict::Waived { .. } | Verdict::Unsupported { .. } => TestCaseStatus::skipped(),
    };
    status.set_type(verdict(&record.verdict)).set_message(why(record));
    if record.verdict.is_red() {
        let again = record.again.as_ref().map(|_| format!("\nagain: {}", again(record))).unwrap_or_default();
        status.set_description(format!("{}\n{}{again}", subject(record), why(record)));
    }
    let mut case = TestCase::new(one_line(&format!("{} {} -> {}", record.case, judgment(record), record.out)), status);
    case.set_classname(one_line(&format!("{}.{}.{}", record.implementation, record.op, record.judgment.name())));
    case.set_time(duration(record.seconds));
    case
}

/// `seconds` as a duration; a time that cannot be one is left out rather than refused.
fn duration(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Counts, synthetic};

    fn parsed(folder: &RunFolder) -> Report {
        Report::deserialize_from_str(&document(folder)).unwrap()
    }

    #[test]
    fn counts_agree_with_the_records() {
        let folder = synthetic::folder();
        let counts = Counts::of(&folder.records);
        let report = parsed(&folder);
        let problems = Summary::of(&folder).problems.len();
        assert_eq!(problems, 0);
        assert_eq!(report.tests, counts.total());
        assert_eq!(report.failures, counts.fail + counts.stale_waiver);
        assert_eq!(report.errors, counts.error + counts.untested);
        let skipped: usize = report.test_suites.iter().map(|s| s.skipped).sum();
        assert_eq!(skipped, counts.waived + counts.unsupported);
    }

    #[test]
    fn names_and_evidence_survive_the_round_trip() {
        let folder = synthetic::folder();
        let report = parsed(&folder);
        let cases: Vec<_> = report.test_suites.iter().flat_map(|s| &s.test_cases).collect();
        let hostile: Vec<_> = cases.iter().filter(|c| c.name.contains("</script>&\"<a|b")).collect();
        assert_eq!(hostile.len(), synthetic::verdicts().len());
        let TestCaseStatus::NonSuccess { message: Some(message), .. } = &hostile[1].status else {
            panic!("{:?}", hostile[1].status)
        };
        assert!(message.contains("base 1 (0x3f80), found 1.0078125 (0x3f81)"), "{}", message.as_str());
    }

    #[test]
    fn an_interrupted_or_empty_run_is_red_here_too() {
        let mut folder = synthetic::green();
        assert_eq!(parsed(&folder).errors + parsed(&folder).failures, 0);
        folder.run.complete = false;
        assert_eq!(parsed(&folder).errors, 1);
        folder.records.clear();
        assert_eq!(parsed(&folder).errors, 2);
    }
}
