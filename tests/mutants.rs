//! Every implementation of `MUTATIONS` is caught by the check that its mutation names, and by none that look elsewhere.

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
use samebits_harness::implementation::external::External;
use samebits_harness::judge::{Judge, Selection, plan};
use samebits_harness::machine;
use samebits_mutants::{EQUIVALENTS, Equivalent, Holder, MEMORY_PATTERNS, MUTATIONS, Mutant, Mutation};
use samebits_ops::{Cpu, Isa};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock};
use tempfile::TempDir;

/// A list that lost some must not pass.
const LEAST: usize = 60;

/// So many ways to be right must raise no alarm.
const LEAST_RIGHT: usize = 20;

/// Held while a trial runs; alone where one watches the memory of this very process.
static MEMORY: RwLock<()> = RwLock::new(());

/// What all trials share.
struct Bench {
    contract: Contract,
    goldens: Store,
    checkpoints: Arc<Checkpoints>,
    machine: Machine,
}

fn main() {
    samebits_mutants::serve_if_asked();
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
    for mutation in MUTATIONS {
        let bench = bench.clone();
        trials.push(Trial::ignorable_test(format!("{}::{}", mutation.op, mutation.name), move || {
            match mutation.caught_by {
                "invariance:soak" => alone(|| bench.catches(mutation)),
                _ => beside_others(|| bench.catches(mutation)),
            }
        }));
    }
    for mutation in MUTATIONS.iter().filter(|mutation| mutation.op != "chain") {
        let bench = bench.clone();
        trials.push(Trial::ignorable_test(format!("wire::{}::{}", mutation.op, mutation.name), move || {
            beside_others(|| bench.over_the_wire(mutation))
        }));
    }
    for pattern in MEMORY_PATTERNS {
        let (here, wire) = (bench.clone(), bench.clone());
        let name = format!("right::{}", pattern.name);
        trials.push(Trial::test(name.clone(), move || alone(|| here.keeps_within_bounds(&Holder::new(pattern)))));
        trials.push(Trial::test(format!("wire::{name}"), move || {
            // Nothing is made before it may run: another trial may be watching the memory of this process.
            beside_others(|| {
                let (program, _folder) = wire.program(pattern.name, pattern.about)?;
                wire.keeps_within_bounds(&program)
            })
        }));
    }
    for (axis, setting) in EQUIVALENTS {
        let bench = bench.clone();
        trials.push(Trial::test(format!("right::{axis}={setting}"), move || {
            beside_others(|| bench.no_false_alarm(axis, setting))
        }));
    }
    let ops: BTreeSet<&str> = MUTATIONS.iter().map(|mutation| mutation.op).collect();
    for op in ops {
        let bench = bench.clone();
        trials.push(Trial::test(format!("{op}::no_fault"), move || beside_others(|| bench.honest_is_green(op))));
    }
    // The longest first, so that no core waits for the last.
    trials.sort_by_key(|trial| !trial.name().starts_with("right::"));
    libtest_mimic::run(&arguments, trials).exit();
}

/// Runs `trial` while other trials may run too.
fn beside_others<T>(trial: impl FnOnce() -> T) -> T {
    let _held = MEMORY.read().unwrap_or_else(PoisonError::into_inner);
    trial()
}

/// Runs `trial` while no other trial does.
fn alone<T>(trial: impl FnOnce() -> T) -> T {
    let _held = MEMORY.write().unwrap_or_else(PoisonError::into_inner);
    trial()
}

/// Enough mutations, each named once, and every check there is catches at least one of them.
fn list() -> Result<(), Failed> {
    let names: BTreeSet<&str> = MUTATIONS.iter().map(|mutation| mutation.name).collect();
    if names.len() != MUTATIONS.len() || MUTATIONS.len() < LEAST {
        return Err(format!("{} mutations with {} names; {LEAST} are expected", MUTATIONS.len(), names.len()).into());
    }
    let right = EQUIVALENTS.len() + MEMORY_PATTERNS.len();
    if right < LEAST_RIGHT {
        return Err(format!("{right} correct variants; {LEAST_RIGHT} are expected").into());
    }
    let axes = axis::all().iter().map(|axis| format!("invariance:{}", axis.name));
    for check in ["accuracy".to_string(), "golden".to_string()].into_iter().chain(axes) {
        if !MUTATIONS.iter().any(|mutation| mutation.caught_by == check) {
            return Err(format!("no mutation shows that `{check}` catches anything").into());
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
        let judge = self.judge_of(implementation);
        plan(&self.contract, implementation.name(), &selection).iter().flat_map(|group| judge.group(group)).collect()
    }

    fn catches(&self, mutation: &'static Mutation) -> Result<Completion, Failed> {
        if mutation.caught_by == "invariance:isa" && self.machine.isas.len() < 2 {
            return Ok(Completion::ignored_with("this machine has one instruction set"));
        }
        let checks = [&[mutation.caught_by], mutation.unnoticed_by].concat();
        let records = self.judge(&Mutant::new(mutation, self.checkpoints.clone()), mutation.op, &checks);
        let of = |check: &str| -> Vec<&Record> { records.iter().filter(|record| name(record) == check).collect() };
        let evidence = of(mutation.caught_by).into_iter().find_map(|record| match &record.verdict {
            Verdict::Fail(evidence) => Some(evidence),
            _ => None,
        });
        match evidence {
            None => return Err(format!("{}: {} lets it pass", mutation.about, mutation.caught_by).into()),
            Some(evidence) if evidence.message.is_empty() || evidence.count == 0 => {
                return Err(format!("{}: the evidence says nothing: {evidence:?}", mutation.caught_by).into());
            }
            Some(_) => {}
        }
        for check in mutation.unnoticed_by {
            let judged = of(check);
            if judged.is_empty() {
                return Err(format!("{check} was not judged; `unnoticed_by` claims that it stays green").into());
            }
            if let Some(red) = judged.iter().find(|record| record.verdict.is_red() && !constant(record)) {
                return Err(format!("{check} should stay green: {}: {:?}", red.case, red.verdict).into());
            }
        }
        // An answer that breaks the judging is not a mutation that was found.
        let breaks = |record: &&Record| matches!(record.verdict, Verdict::Error { .. } | Verdict::Untested { .. });
        match records.iter().filter(|record| !constant(record)).find(breaks) {
            Some(broken) => Err(format!("{}: {}: {:?}", broken.case, name(broken), broken.verdict).into()),
            None => Ok(Completion::Completed),
        }
    }

    /// The same mutation in a program on the wire is caught by the same check.
    fn over_the_wire(&self, mutation: &'static Mutation) -> Result<Completion, Failed> {
        if mutation.caught_by == "invariance:isa" && self.machine.isas.len() < 2 {
            return Ok(Completion::ignored_with("this machine has one instruction set"));
        }
        let (external, _folder) = self.program(mutation.name, mutation.about)?;
        let records = self.judge(&external, mutation.op, &[mutation.caught_by]);
        // On the wire, an output of the wrong form is no answer.
        let form =
            |record: &&Record| matches!(&record.verdict, Verdict::Error { reason } if reason.contains("it must be"));
        let of_form = records.iter().any(|record| form(&record));
        let caught = of_form || records.iter().any(|record| matches!(record.verdict, Verdict::Fail(_)));
        let breaks = |record: &&Record| matches!(record.verdict, Verdict::Error { .. } | Verdict::Untested { .. });
        match records.iter().filter(|record| !constant(record) && !of_form).find(breaks) {
            _ if !caught => {
                Err(format!("{}: {} lets it pass over the wire", mutation.about, mutation.caught_by).into())
            }
            Some(broken) => Err(format!("{}: {}: {:?}", broken.case, name(broken), broken.verdict).into()),
            None => Ok(Completion::Completed),
        }
    }

    /// This program as the implementation called `name` on the wire, and the folder it runs in.
    fn program(&self, name: &str, about: &str) -> Result<(External, TempDir), Failed> {
        let isa = self.machine.isas.iter().map(|name| format!("[[implementation.isa]]\nname = \"{name}\"\n"));
        let list = format!(
            "[[implementation]]\nname = \"zoo/{name}\"\nabout = \"{about}\"\ncommand = {:?}\n{}",
            samebits_mutants::command(name),
            isa.collect::<String>()
        );
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("impls.toml");
        std::fs::write(&file, list)?;
        let mut contract = Contract::load(None)?;
        contract.add_implementations(&file)?;
        let entry = contract.implementations.last().expect("just added").clone();
        Ok((External::new(&entry, None)?, folder))
    }

    /// Memory that is held and does not grow is no leak.
    fn keeps_within_bounds(&self, implementation: &dyn Implementation) -> Result<(), Failed> {
        let records = self.judge(implementation, "gemm", &["invariance:soak", "invariance:repeat"]);
        let soaks = records.iter().filter(|record| name(record) == "invariance:soak").count();
        match records.iter().find(|record| record.verdict != Verdict::Pass) {
            Some(other) => Err(format!("{}: {}: {:?}", other.case, name(other), other.verdict).into()),
            None if soaks != 2 => Err(format!("{soaks} cases were asked over and over, not one of each dtype").into()),
            None => Ok(()),
        }
    }

    /// What is right in another way stays green, in every check of the small cases.
    fn no_false_alarm(&self, axis: &'static str, setting: &str) -> Result<(), Failed> {
        let cpu = Cpu::new(Isa::best(), 1, usize::MAX)?;
        let ours = CpuImplementation::new(cpu);
        let machine = Machine { threads: vec![2, 5], ..self.machine.clone() };
        let right = Equivalent::new(ours, axis, setting, machine);
        // One op of every class; the others would say the same again.
        let ops = ["gemm", "rms_norm", "attention", "logprob", "silu_mul"].map(String::from).to_vec();
        let judge = self.judge_of(&right);
        // The small cases, or those by default where the small ones have nothing to rearrange.
        let selections =
            [Slice::Quick, Slice::Default].map(|slice| Selection { ops: ops.clone(), ..Selection::all(slice) });
        let plans = selections.iter().map(|selection| plan(&self.contract, right.name(), selection));
        let rearranges = |groups: &Vec<Vec<samebits_harness::judge::Trial>>| {
            groups.iter().flatten().any(|trial| right.rearranged(&trial.case.build()).is_some())
        };
        let groups =
            plans.into_iter().find(rearranges).ok_or("it rearranges nothing, so it is no other implementation")?;
        let records: Vec<Record> = groups.iter().flat_map(|group| judge.group(group)).collect();
        match records.iter().find(|record| record.verdict.is_red()) {
            Some(red) => Err(format!("{}: {}: {:?}", red.case, name(red), red.verdict).into()),
            None => Ok(()),
        }
    }

    fn judge_of<'a>(&'a self, implementation: &'a dyn Implementation) -> Judge<'a> {
        Judge {
            contract: &self.contract,
            rows: self.contract.default_rows(),
            implementation,
            goldens: Some(&self.goldens),
            references: Vec::new(),
            checkpoints: &self.checkpoints,
            machine: &self.machine,
        }
    }

    /// Without a mutation the same records are green, so what a trial sees is its mutation.
    fn honest_is_green(&self, op: &str) -> Result<(), Failed> {
        let cpu = Cpu::new(Isa::best(), 1, usize::MAX)?;
        let ours = CpuImplementation::new(cpu).with_checkpoints(self.checkpoints.clone());
        let records = self.judge(&ours.with_program(env!("CARGO_BIN_EXE_samebits").into()), op, &[]);
        if records.is_empty() {
            return Err("nothing was judged".into());
        }
        match records.iter().find(|record| record.verdict.is_red()) {
            Some(red) => Err(format!("{}: {}: {:?}", red.case, name(red), red.verdict).into()),
            None => Ok(()),
        }
    }
}

/// Not judged for sameness, because a mutation made the answer one value over and over: the mutation was seen.
fn constant(record: &Record) -> bool {
    matches!(&record.verdict, Verdict::Untested { reason } if reason.contains("is constant over"))
}

/// The check of a record, as [`Mutation::caught_by`] names it.
fn name(record: &Record) -> String {
    match (&record.axis, record.judgment) {
        (Some(axis), Judgment::Invariance) => format!("invariance:{axis}"),
        (_, judgment) => judgment.name().to_string(),
    }
}
