//! Gates as tests: every judgment is one, by its name.

use crate::gate::{Asked, Gate, Started, not_asked, was_compared};
use crate::judge::{Judge, Trial};
use libtest_mimic::{Arguments, Completion, Failed, Trial as Test};
use samebits_contract::record::Record;
use samebits_contract::verdict::Verdict;
use samebits_reports::Summary;
use std::process::exit;
use std::sync::{Arc, OnceLock};

/// The judgments of one group, and what came of them.
struct Group {
    trials: Vec<Trial<'static>>,
    records: OnceLock<Vec<Record>>,
}

/// The `main` of a test target with `harness = false`: every judgment is a test `NAME::CASE::JUDGMENT`, so that `cargo test
/// batch` judges invariance along the batch alone, and what is red fails. Ends the process, as tests do.
///
/// What is `unsupported` or waived is shown as ignored, with its reason. A gate of which nothing was compared fails, and so
/// does, where no filter is set, a pair of dtypes of which nothing was, and a waiver that nothing needed.
pub fn run(gates: impl IntoIterator<Item = Gate>) -> ! {
    let started = Started::now();
    let arguments = Arguments::from_args();
    let mut wrong = Vec::new();
    let mut all: Vec<(&'static Asked, Vec<Arc<Group>>)> = Vec::new();
    let mut tests = Vec::new();
    for gate in gates {
        // All of it lives as long as the tests, that is until the process ends.
        let asked: &'static Asked = match gate.prepare() {
            Ok(asked) => Box::leak(Box::new(asked)),
            Err(why) => {
                wrong.push(why);
                continue;
            }
        };
        if all.iter().any(|(other, _)| other.name() == asked.name()) {
            wrong.push(format!("Gate `{}`: another gate has this name", asked.name()));
        }
        let judge: &'static Judge = Box::leak(Box::new(asked.judge()));
        let name = |trial: &Trial| format!("{}::{}", asked.name(), trial.name());
        let mut groups = Vec::new();
        for mut trials in asked.groups() {
            // What is not picked is not judged with the rest of its group.
            trials.retain(|trial| !arguments.is_filtered_out(&Test::test(name(trial), || Ok(()))));
            let group = Arc::new(Group { trials, records: OnceLock::new() });
            for (index, trial) in group.trials.iter().enumerate() {
                let (group, name) = (group.clone(), name(trial));
                let again = again(&name);
                let judged = move || outcome(&group.records.get_or_init(|| judge.group(&group.trials))[index], &again);
                tests.push((index, Test::ignorable_test(name, judged)));
            }
            groups.push(group);
        }
        all.push((asked, groups));
    }
    if !wrong.is_empty() {
        wrong.iter().for_each(|why| eprintln!("{why}"));
        exit(101);
    }
    // The first of all groups come first: side by side they judge different groups instead of waiting for one.
    tests.sort_by_key(|(index, _)| *index);
    let conclusion = libtest_mimic::run(&arguments, tests.into_iter().map(|(_, test)| test).collect());
    if arguments.list {
        exit(0);
    }
    let mut red = conclusion.has_failed();
    let whole = arguments.filter.is_none() && arguments.skip.is_empty();
    for (asked, groups) in &all {
        let records: Vec<Record> = groups.iter().filter_map(|group| group.records.get()).flatten().cloned().collect();
        if whole {
            let report = asked.report(started, records);
            let summary = Summary::of(report.folder());
            println!("{}: {}", asked.name(), summary.headline());
            samebits_reports::notes(report.folder()).iter().for_each(|note| println!("{note}"));
            let left_out = asked.not_asked();
            if !left_out.is_empty() {
                println!("{}: {}", asked.name(), not_asked(&left_out));
            }
            // What no test of its own could say.
            report.unplanned().for_each(|record| println!("{}: {}", record.case, reason(&record.verdict)));
            red |= !report.is_ok();
        } else if let Some(name) = misnamed(&arguments, asked.name(), groups) {
            println!("{}: no judgment is named {name}; --list prints all names", asked.name());
            red = true;
        } else if !arguments.exact && !records.is_empty() && !records.iter().any(was_compared) {
            println!("{}: nothing was compared; all that was picked is unsupported", asked.name());
            red = true;
        }
    }
    exit(if red { 101 } else { 0 })
}

fn reason(verdict: &Verdict) -> String {
    let reason = match verdict {
        Verdict::Pass => "",
        Verdict::Fail(evidence) => &evidence.message,
        Verdict::Waived { reason }
        | Verdict::StaleWaiver { reason }
        | Verdict::Unsupported { reason }
        | Verdict::Error { reason }
        | Verdict::Untested { reason } => reason,
    };
    format!("{}: {reason}", verdict.name())
}

/// The exact name that was asked of this gate, if none of its judgments has it.
fn misnamed<'a>(arguments: &'a Arguments, gate: &str, groups: &[Arc<Group>]) -> Option<&'a str> {
    let name = arguments.filter.as_deref().filter(|_| arguments.exact)?;
    let of_gate = name.strip_prefix(gate).is_some_and(|rest| rest.starts_with("::"));
    (of_gate && groups.iter().all(|group| group.trials.is_empty())).then_some(name)
}

/// The command that runs one judgment again. Cargo names a test's program by its target and 16 hexadecimal digits.
fn again(name: &str) -> String {
    let program = std::env::current_exe().ok();
    let stem = program.as_deref().and_then(|path| path.file_stem()).map(|stem| stem.to_string_lossy());
    let target = stem.as_deref().and_then(|stem| stem.rsplit_once('-')).map(|(target, _)| target);
    let target = target.map(|target| format!(" --test {target}")).unwrap_or_default();
    format!("cargo test{target} -- --exact '{name}'")
}

fn outcome(record: &Record, again: &str) -> Result<Completion, Failed> {
    match &record.verdict {
        Verdict::Pass => Ok(Completion::Completed),
        verdict if verdict.is_red() => Err(format!("{}\nagain: {again}", reason(verdict)).into()),
        verdict => Ok(Completion::ignored_with(reason(verdict))),
    }
}
