//! Every implementation of `FAULTS` is caught by the check that its fault names, and by none that look elsewhere.

use libtest_mimic::{Arguments, Completion, Failed, Trial};
use samebits_contract::record::{Judgment, Record};
use samebits_contract::table::{Contract, Slice};
use samebits_contract::tensor::DType;
use samebits_contract::verdict::Verdict;
use samebits_contract::{axis, axis::Machine};
use samebits_goldens::Store;
use samebits_harness::checkpoints::Checkpoints;
use samebits_harness::implementation::Implementation;
use samebits_harness::implementation::cpu::CpuImplementation;
use samebits_harness::implementation::faulty::{FAULTS, Fault, Faulty};
use samebits_harness::judge::{Judge, Selection, plan};
use samebits_harness::machine;
use samebits_ops::{Cpu, Isa};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

/// A list that lost some must not pass.
const LEAST: usize = 35;

/// What all trials share.
struct Bench {
    contract: Contract,
    goldens: Store,
    checkpoints: Arc<Checkpoints>,
    machine: Machine,
}

fn main() {
    let arguments = Arguments::from_args();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let bench = Arc::new(Bench {
        contract: Contract::load(None).expect("the contract loads"),
        goldens: Store::open(&root.join("goldens")).expect("the goldens open"),
        checkpoints: Arc::new(Checkpoints::new(Some(root.join("tests/checkpoints")))),
        // Two thread counts are enough to see an order that follows them.
        machine: Machine { threads: vec![2, 3], ..machine::axes(Isa::best()) },
    });
    let mut trials = vec![Trial::test("list", list)];
    for fault in FAULTS {
        let bench = bench.clone();
        trials.push(Trial::ignorable_test(format!("{}::{}", fault.op, fault.name), move || bench.catches(fault)));
    }
    let ops: BTreeSet<&str> = FAULTS.iter().map(|fault| fault.op).collect();
    for op in ops {
        let bench = bench.clone();
        trials.push(Trial::test(format!("{op}::no_fault"), move || bench.honest_is_green(op)));
    }
    libtest_mimic::run(&arguments, trials).exit();
}

/// Enough faults, each named once, and every check there is catches at least one of them.
fn list() -> Result<(), Failed> {
    let names: BTreeSet<&str> = FAULTS.iter().map(|fault| fault.name).collect();
    if names.len() != FAULTS.len() || FAULTS.len() < LEAST {
        return Err(format!("{} faults with {} names; {LEAST} are expected", FAULTS.len(), names.len()).into());
    }
    let axes = axis::all().iter().map(|axis| format!("invariance:{}", axis.name));
    for check in ["accuracy".to_string(), "golden".to_string()].into_iter().chain(axes) {
        if !FAULTS.iter().any(|fault| fault.caught_by == check) {
            return Err(format!("no fault shows that `{check}` catches anything").into());
        }
    }
    Ok(())
}

impl Bench {
    /// Judges the cases of `op` by `checks`, or by all there are.
    fn judge(&self, implementation: &dyn Implementation, op: &str, checks: &[&str]) -> Vec<Record> {
        let axes: Vec<String> =
            checks.iter().filter_map(|check| check.strip_prefix("invariance:")).map(String::from).collect();
        let takes = |judgment: &Judgment| match judgment {
            Judgment::Invariance => !axes.is_empty(),
            _ => checks.contains(&judgment.name()),
        };
        let judgments = Judgment::ALL.into_iter().filter(takes).collect();
        // A narrow dtype and a wide one; the third would say the same again.
        let dtypes = vec![DType::Bf16, DType::Fp32];
        let ops = vec![op.to_string()];
        let selection = Selection { ops, dtypes, judgments, axes, ..Selection::all(Slice::Default) };
        let judge = Judge {
            contract: &self.contract,
            rows: self.contract.default_rows(),
            implementation,
            goldens: Some(&self.goldens),
            checkpoints: &self.checkpoints,
            machine: &self.machine,
        };
        plan(&self.contract, implementation.name(), &selection).iter().flat_map(|group| judge.group(group)).collect()
    }

    fn catches(&self, fault: &'static Fault) -> Result<Completion, Failed> {
        if fault.caught_by == "invariance:isa" && self.machine.isas.len() < 2 {
            return Ok(Completion::ignored_with("this machine has one instruction set"));
        }
        let checks = [&[fault.caught_by], fault.unnoticed_by].concat();
        let records = self.judge(&Faulty::new(fault, self.checkpoints.clone()), fault.op, &checks);
        let of = |check: &str| -> Vec<&Record> { records.iter().filter(|record| name(record) == check).collect() };
        let evidence = of(fault.caught_by).into_iter().find_map(|record| match &record.verdict {
            Verdict::Fail(evidence) => Some(evidence),
            _ => None,
        });
        match evidence {
            None => return Err(format!("{}: {} lets it pass", fault.about, fault.caught_by).into()),
            Some(evidence) if evidence.message.is_empty() || evidence.count == 0 => {
                return Err(format!("{}: the evidence says nothing: {evidence:?}", fault.caught_by).into());
            }
            Some(_) => {}
        }
        for check in fault.unnoticed_by {
            let judged = of(check);
            if judged.is_empty() {
                return Err(format!("{check} was not judged; `unnoticed_by` claims that it stays green").into());
            }
            if let Some(red) = judged.iter().find(|record| record.verdict.is_red()) {
                return Err(format!("{check} should stay green: {}: {:?}", red.case, red.verdict).into());
            }
        }
        // An answer that breaks the judging is not a fault that was found.
        match records.iter().find(|record| matches!(record.verdict, Verdict::Error { .. } | Verdict::Untested { .. })) {
            Some(broken) => Err(format!("{}: {}: {:?}", broken.case, name(broken), broken.verdict).into()),
            None => Ok(Completion::Completed),
        }
    }

    /// Without a fault the same records are green, so what a trial sees is its fault.
    fn honest_is_green(&self, op: &str) -> Result<(), Failed> {
        let cpu = Cpu::new(Isa::best(), 1, usize::MAX)?;
        let records = self.judge(&CpuImplementation::new(cpu).with_checkpoints(self.checkpoints.clone()), op, &[]);
        if records.is_empty() {
            return Err("nothing was judged".into());
        }
        match records.iter().find(|record| record.verdict.is_red()) {
            Some(red) => Err(format!("{}: {}: {:?}", red.case, name(red), red.verdict).into()),
            None => Ok(()),
        }
    }
}

/// The check of a record, as [`Fault::caught_by`] names it.
fn name(record: &Record) -> String {
    match (&record.axis, record.judgment) {
        (Some(axis), Judgment::Invariance) => format!("invariance:{axis}"),
        (_, judgment) => judgment.name().to_string(),
    }
}
