//! What `check` judges, as tests: one trial per case and judgment, per axis for invariance, of slice default.
//!
//! The trials of a group share their inputs and the oracle's answer, so the first one that runs judges the group for
//! all of them.

use libtest_mimic::{Arguments, Completion, Failed, Trial};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;
use samebits_contract::record::Record;
use samebits_contract::spec::{self, Class, Spec};
use samebits_contract::table::{Contract, Slice};
use samebits_contract::verdict::Verdict;
use samebits_goldens::Store;
use samebits_harness::checkpoints::Checkpoints;
use samebits_harness::implementation::Implementation;
use samebits_harness::implementation::cpu::CpuImplementation;
use samebits_harness::judge::{Judge, Selection, Trial as Planned, hold, plan};
use samebits_harness::machine;
use samebits_judge::strategies;
use samebits_ops::{Cpu, Isa};
use std::path::Path;
use std::sync::{Arc, LazyLock, OnceLock};

fn main() {
    let arguments = Arguments::from_args();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let checkpoints = Arc::new(Checkpoints::new(Some(root.join("tests/checkpoints"))));
    let isa = Isa::best();
    let cpu = Cpu::new(isa, 1, usize::MAX).expect("the best instruction set is there");
    let implementation = CpuImplementation::new(cpu).with_checkpoints(checkpoints.clone());
    let implementation = implementation.with_program(env!("CARGO_BIN_EXE_samebits-tested").into());
    // All of it lives as long as the trials, that is until the process ends.
    let contract: &Contract = Box::leak(Box::new(Contract::load(None).expect("the contract loads")));
    let judge: &Judge = Box::leak(Box::new(Judge {
        contract,
        rows: contract.default_rows(),
        implementation: Box::leak(Box::new(implementation)),
        goldens: Some(Box::leak(Box::new(Store::open(&root.join("goldens")).expect("the goldens open")))),
        references: Vec::new(),
        recordings: Box::leak(Box::new(checkpoints.recordings().clone())),
        machine: Box::leak(Box::new(machine::axes(isa))),
    }));

    let mut trials = Vec::new();
    for mut group in plan(contract, judge.implementation.name(), &Selection::all(Slice::Default)) {
        group.retain(is_of_a_change);
        let names: Vec<String> = group.iter().map(|trial| trial.name()).collect();
        let records: Arc<OnceLock<Vec<Record>>> = Arc::default();
        let group = Arc::new(group);
        for (index, name) in names.into_iter().enumerate() {
            let (group, records) = (group.clone(), records.clone());
            let judged = move || outcome(&records.get_or_init(|| judge.group(&group))[index]);
            trials.push((index, Trial::ignorable_test(name, judged)));
        }
    }
    // The first trials of all groups come first: side by side they judge different groups instead of waiting for one.
    trials.sort_by_key(|(index, _)| *index);
    let mut trials: Vec<Trial> = trials.into_iter().map(|(_, trial)| trial).collect();
    let planned = trials.len();
    trials.extend(random_calls(contract, judge.implementation));
    trials.push(Trial::test("something_is_planned", move || match planned {
        0 => Err("the contract asks nothing of ours/cpu".into()),
        _ => Ok(()),
    }));
    libtest_mimic::run(&arguments, trials).exit();
}

/// Whether a change is held to a trial. A case of the slice default has a third of its axes here, which by its name, and its numbers
/// and instruction sets always; with SAMEBITS_CONFORMANCE=all, as in ci/nightly, and in every `check` it has all.
fn is_of_a_change(trial: &Planned) -> bool {
    static ALL: LazyLock<bool> =
        LazyLock::new(|| std::env::var("SAMEBITS_CONFORMANCE").is_ok_and(|which| which == "all"));
    let is_one_of_three =
        || trial.name().bytes().fold(7u32, |sum, byte| sum.wrapping_mul(31).wrapping_add(u32::from(byte))) % 3 == 0;
    *ALL || trial.case.slice == Slice::Quick || trial.axis.is_none_or(|axis| axis.name == "isa") || is_one_of_three()
}

/// Calls that are no cases of the contract, by the strategies that other projects test with: those raise no alarm where the
/// ops are right, and say something of every op.
fn random_calls(contract: &'static Contract, ours: &'static dyn Implementation) -> Vec<Trial> {
    let ops = spec::all().iter().filter(|spec| spec.class != Class::Chain);
    let calls = |spec: &'static Spec| {
        let mut runner = TestRunner::deterministic();
        let pairs = spec.dtypes().iter().flat_map(|dtype| spec.outs().iter().map(move |out| (*dtype, *out)));
        let mut passed = 0;
        for (dtype, out) in pairs {
            let strategy = strategies::calls(spec.name, dtype, out);
            for _ in 0..24 {
                let case = strategy.new_tree(&mut runner).map_err(|e| e.to_string())?.current();
                match hold(contract, ours, &case) {
                    Verdict::Pass => passed += 1,
                    verdict if verdict.is_red() => {
                        let shapes: Vec<_> = case.inputs.iter().map(|(name, x)| (name, x.dtype(), x.shape())).collect();
                        return Err(format!("{dtype} -> {out} {:?} {shapes:?}: {verdict:?}", case.params).into());
                    }
                    _ => {}
                }
            }
        }
        if passed > 0 { Ok(()) } else { Err(Failed::from("nothing was compared")) }
    };
    ops.map(|spec| Trial::test(format!("random_calls::{}", spec.name), move || calls(spec))).collect()
}

fn outcome(record: &Record) -> Result<Completion, Failed> {
    match &record.verdict {
        Verdict::Pass => Ok(Completion::Completed),
        Verdict::Unsupported { reason } | Verdict::Waived { reason } => Ok(Completion::ignored_with(reason.clone())),
        Verdict::Fail(evidence) => Err(format!("{} ({}): {evidence:#?}", evidence.message, record.kernel).into()),
        Verdict::StaleWaiver { reason } | Verdict::Error { reason } | Verdict::Untested { reason } => {
            Err(format!("{}: {reason}", record.verdict.name()).into())
        }
    }
}
