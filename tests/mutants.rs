//! Every mutant is caught by the check that is named for it, and turns nothing red that looks elsewhere.

use libtest_mimic::{Arguments, Completion, Failed, Trial};
use samebits_contract::fill::Fill;
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
use samebits_mutants::{EQUIVALENTS, Equivalent, Holder, MEMORY_PATTERNS, Mutant, Mutation, Others, PLAIN, mutations};
use samebits_ops::{Cpu, Isa};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock};
use tempfile::TempDir;

/// How many mutations there are, and how many ways to be right: a list that lost some must not pass.
const MUTATIONS: usize = 166;
const RIGHT: usize = 39;

/// A narrow dtype and a wide one; the third would say the same again.
const DTYPES: [DType; 2] = [DType::Bf16, DType::Fp32];

/// The checkpoints that mutants of models are judged on: windows and soft limits, keys that layers share, experts, latent attention, the
/// same over keys that are chosen, none of these, scans, gated delta rules, RWKV, and blocks that are shared.
/// The others would say the same again; the test `conformance` judges them all.
const MODELS: [&str; 11] = [
    "deepseek-v3",
    "deepseek-v3-2",
    "falcon-mamba",
    "gemma2",
    "gemma4",
    "mamba2",
    "qwen3",
    "qwen3-moe",
    "qwen3-next",
    "rwkv7",
    "zamba2",
];

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
    let (mut trials, mut single) = (vec![Trial::test("list", list)], Vec::new());
    for mutation in mutations() {
        let bench = bench.clone();
        let name = format!("{}::{}", mutation.op, mutation.name);
        if mutation.caught_by == "invariance:soak" {
            single.push(Trial::ignorable_test(name, move || alone(|| bench.catches(mutation))));
        } else {
            trials.push(Trial::ignorable_test(name, move || beside_others(|| bench.catches(mutation))));
        }
    }
    for mutation in mutations().filter(|mutation| !mutation.op.starts_with("chain")) {
        let bench = bench.clone();
        trials.push(Trial::ignorable_test(format!("wire::{}::{}", mutation.op, mutation.name), move || {
            beside_others(|| bench.over_the_wire(mutation))
        }));
    }
    for pattern in MEMORY_PATTERNS {
        let (here, wire) = (bench.clone(), bench.clone());
        let name = format!("right::{}", pattern.name);
        single.push(Trial::test(name.clone(), move || alone(|| here.keeps_within_bounds(&Holder::new(pattern)))));
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
    for mutation in PLAIN {
        let bench = bench.clone();
        trials.push(Trial::test(format!("right::{}", mutation.name), move || {
            beside_others(|| bench.is_green(&Mutant::new(mutation, bench.checkpoints.clone()), mutation.op))
        }));
    }
    let ops: BTreeSet<&str> = mutations().map(|mutation| mutation.op).collect();
    for op in ops {
        let bench = bench.clone();
        trials.push(Trial::test(format!("{op}::no_mutation"), move || beside_others(|| bench.ours_is_green(op))));
    }
    // The longest first, so that no core waits for the last; before them those that run alone, for which all others wait.
    trials.sort_by_key(|trial| (!trial.name().starts_with("right::"), !trial.name().starts_with("chain")));
    trials.splice(0..0, single);
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

/// As many as there should be, each named once, and every check there is catches at least one of them.
fn list() -> Result<(), Failed> {
    let names: BTreeSet<&str> = mutations().map(|mutation| mutation.name).collect();
    let right = PLAIN.len() + EQUIVALENTS.len() + MEMORY_PATTERNS.len();
    if (names.len(), mutations().count(), right) != (MUTATIONS, MUTATIONS, RIGHT) {
        return Err(format!("{} mutations, {right} ways to be right", names.len()).into());
    }
    for check in every_check() {
        if !mutations().any(|mutation| mutation.caught_by == check) {
            return Err(format!("no mutant shows that `{check}` catches anything").into());
        }
    }
    Ok(())
}

impl Bench {
    /// Judges the cases of `op` in `slice` by `checks`, but for those of fill `power`: they are long, and what they are for is
    /// shown by the test `orders`.
    fn judge(&self, implementation: &dyn Implementation, op: &str, slice: Slice, checks: &[String]) -> Vec<Record> {
        self.judge_until(implementation, op, slice, checks, |_| false)
    }

    /// The same, up to the group of cases with which the records are `enough`.
    fn judge_until(
        &self,
        implementation: &dyn Implementation,
        op: &str,
        slice: Slice,
        checks: &[String],
        enough: impl Fn(&[Record]) -> bool,
    ) -> Vec<Record> {
        let axes: Vec<String> =
            checks.iter().filter_map(|check| check.strip_prefix("invariance:")).map(String::from).collect();
        let takes = |judgment: &Judgment| match judgment {
            Judgment::Invariance => !axes.is_empty(),
            _ => checks.iter().any(|check| check == judgment.name()),
        };
        let judgments: Vec<Judgment> = Judgment::ALL.into_iter().filter(takes).collect();
        assert!(!judgments.is_empty(), "{checks:?} judge nothing");
        let ops = vec![op.to_string()];
        let selection = Selection { ops, dtypes: DTYPES.to_vec(), judgments, axes, ..Selection::all(slice) };
        let judge = self.judge_of(implementation);
        let mut records = Vec::new();
        let is_taken = |group: &Vec<samebits_harness::judge::Trial>| {
            if group.first().is_some_and(|trial| trial.case.fill == Fill::Power) {
                return false;
            }
            let model = group.first().and_then(|trial| trial.case.params.get("model"));
            model.is_none_or(|model| MODELS.contains(&&model[..]))
        };
        for group in plan(&self.contract, implementation.name(), &selection).into_iter().filter(is_taken) {
            records.extend(judge.group(&group));
            if enough(&records) {
                break;
            }
        }
        records
    }

    /// The check that is named for a mutation is red and says something, and the checks beside it that are red in the small
    /// cases are those that the mutation lists.
    fn catches(&self, mutation: &'static Mutation) -> Result<Completion, Failed> {
        let one_isa = self.machine.isas.len() < 2;
        if mutation.caught_by == "invariance:isa" && one_isa {
            return Ok(Completion::ignored_with("this machine has one instruction set"));
        }
        // What grows is watched for the mutants that grow alone: it takes the whole process.
        let checks: Vec<String> = every_check()
            .into_iter()
            .filter(|check| check != "invariance:soak" || mutation.caught_by == "invariance:soak")
            .collect();
        let mutant = || Mutant::new(mutation, self.checkpoints.clone());
        // Of models, those until all that is listed is red: the others would say the same again, and do in ci/nightly.
        let every_model = std::env::var("SAMEBITS_CHECKPOINTS").is_ok_and(|which| which == "all");
        let shown = |records: &[Record]| {
            let Others::Are(others) = &mutation.also_red else { return false };
            let red: BTreeSet<String> = records.iter().filter(|record| failed(record)).map(name).collect();
            let mut wanted = others.iter().chain([&mutation.caught_by]);
            mutation.op.starts_with("chain") && !every_model && wanted.all(|check| red.contains(*check))
        };
        let mut records = self.judge_until(&mutant(), mutation.op, Slice::Quick, &checks, shown);
        let red = records.iter().filter(|record| failed(record)).map(name);
        let red: BTreeSet<String> = red.filter(|check| check != mutation.caught_by).collect();
        if !records.iter().any(|record| name(record) == mutation.caught_by && record.verdict.is_red()) {
            let named = [mutation.caught_by.to_string()];
            let is_caught = |records: &[Record]| records.iter().any(failed);
            records.extend(self.judge_until(&mutant(), mutation.op, Slice::Default, &named, is_caught));
        }
        let evidence = records.iter().find_map(|record| match &record.verdict {
            Verdict::Fail(evidence) if name(record) == mutation.caught_by => Some(evidence),
            _ => None,
        });
        match evidence {
            None => return Err(format!("{} lets it pass: {}", mutation.caught_by, mutation.about).into()),
            Some(evidence) if evidence.message.is_empty() || evidence.count == 0 => {
                return Err(format!("{}: the evidence says nothing: {evidence:?}", mutation.caught_by).into());
            }
            Some(_) => {}
        }
        // An answer that breaks the judging is not a mutant that was found.
        let breaks = |record: &&Record| matches!(record.verdict, Verdict::Error { .. } | Verdict::Untested { .. });
        if let Some(broken) = records.iter().filter(|record| !constant(record)).find(breaks) {
            return Err(format!("{}: {}: {:?}", broken.case, name(broken), broken.verdict).into());
        }
        let Others::Are(others) = &mutation.also_red else { return Ok(Completion::Completed) };
        let listed = others.iter().filter(|check| !(one_isa && **check == "invariance:isa"));
        let expected: BTreeSet<String> = listed.map(|check| check.to_string()).collect();
        if red != expected {
            let more = red.difference(&expected).next();
            let first = more.and_then(|more| records.iter().find(|r| name(r) == *more && r.verdict.is_red()));
            let first = first.map(|record| (&record.case, &record.verdict));
            let beside = mutation.caught_by;
            return Err(
                format!("beside {beside}, red are {red:?}, {expected:?} are listed; the first: {first:?}").into()
            );
        }
        Ok(Completion::Completed)
    }

    /// The same mutation in a program on the wire is caught by the same check.
    fn over_the_wire(&self, mutation: &'static Mutation) -> Result<Completion, Failed> {
        if mutation.caught_by == "invariance:isa" && self.machine.isas.len() < 2 {
            return Ok(Completion::ignored_with("this machine has one instruction set"));
        }
        let (external, _folder) = self.program(mutation.name, mutation.about)?;
        let named = [mutation.caught_by.to_string()];
        let caught = |record: &Record| failed(record) || of_wrong_form(record);
        let records =
            self.judge_until(&external, mutation.op, Slice::Default, &named, |records| records.iter().any(caught));
        let of_form = records.iter().any(of_wrong_form);
        let caught = records.iter().any(caught);
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
        let checks = ["invariance:soak", "invariance:repeat"].map(String::from);
        let records = self.judge(implementation, "gemm", Slice::Default, &checks);
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
        // One op of every class, and a sum over tokens; the others would say the same again.
        let ops = ["gemm", "rms_norm", "attention", "logprob", "silu_mul", "token_sum"].map(String::from).to_vec();
        let judge = self.judge_of(&right);
        // The small cases, or those by default where the small ones have nothing to rearrange.
        let selections = [Slice::Quick, Slice::Default].map(|slice| Selection {
            ops: ops.clone(),
            dtypes: DTYPES.to_vec(),
            ..Selection::all(slice)
        });
        // Where it rearranges nothing it is `ours/cpu`, which the test `conformance` judges.
        let rearranged = |selection: &Selection, powerful: bool| {
            let groups = plan(&self.contract, right.name(), selection).into_iter();
            let is_asked = |group: &Vec<samebits_harness::judge::Trial>| {
                let trial = group.first().filter(|trial| (trial.case.fill == Fill::Power) == powerful);
                trial.is_some_and(|trial| right.rearranged(&trial.case.build()).is_some())
            };
            groups.filter(is_asked).collect::<Vec<_>>()
        };
        let mut plans = selections.iter().map(|selection| rearranged(selection, false));
        let groups = plans.find(|groups| !groups.is_empty());
        let groups = groups.ok_or("it rearranges nothing, so it is no other implementation")?;
        let mut records: Vec<Record> = groups.iter().flat_map(|group| judge.group(group)).collect();
        // Of the inputs by which another order is seen, those of every op: the bits of the golden, which is within the bounds.
        let powerful =
            Selection { dtypes: vec![DType::Bf16], judgments: vec![Judgment::Golden], ..Selection::all(Slice::Quick) };
        records.extend(rearranged(&powerful, true).iter().flat_map(|group| judge.group(group)));
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
            recordings: self.checkpoints.recordings(),
            machine: &self.machine,
        }
    }

    /// Without a mutation the same records are green, so what a trial sees is its mutation. (The cases beyond the small ones
    /// are those of the test `conformance`.)
    fn ours_is_green(&self, op: &str) -> Result<(), Failed> {
        let cpu = Cpu::new(Isa::best(), 1, usize::MAX)?;
        let ours = CpuImplementation::new(cpu).with_checkpoints(self.checkpoints.clone());
        self.is_green(&ours.with_program(env!("CARGO_BIN_EXE_samebits-tested").into()), op)
    }

    /// Green in the small cases, in every check but the one that watches the memory of this process, where other trials run.
    fn is_green(&self, implementation: &dyn Implementation, op: &str) -> Result<(), Failed> {
        let checks: Vec<String> = every_check().into_iter().filter(|check| check != "invariance:soak").collect();
        let records = self.judge(implementation, op, Slice::Quick, &checks);
        if records.is_empty() {
            return Err("nothing was judged".into());
        }
        match records.iter().find(|record| record.verdict.is_red()) {
            Some(red) => Err(format!("{}: {}: {:?}", red.case, name(red), red.verdict).into()),
            None => Ok(()),
        }
    }
}

/// Every judgment of answers, invariance by its axes. What `coverage` judges are the cases, whoever answers them; `order` is
/// asked of those that do not claim the canonical bits, in the test `orders`.
fn every_check() -> Vec<String> {
    let named = |judgment: &Judgment| !matches!(judgment, Judgment::Invariance | Judgment::Order | Judgment::Coverage);
    let judgments = Judgment::ALL.into_iter().filter(named);
    let axes = axis::all().iter().map(|axis| format!("invariance:{}", axis.name));
    judgments.map(|judgment| judgment.name().to_string()).chain(axes).collect()
}

fn failed(record: &Record) -> bool {
    matches!(record.verdict, Verdict::Fail(_))
}

/// On the wire, an output of the wrong form is no answer.
fn of_wrong_form(record: &Record) -> bool {
    matches!(&record.verdict, Verdict::Error { reason } if reason.contains("it must be"))
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
