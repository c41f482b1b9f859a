//! An order of sums that follows the number of rows is seen, whatever the outputs are rounded to; held fixed, it is right.
//!
//! Every mutant of [`FOLLOWS`] is judged in every op of [`OPS`] with outputs of one dtype alone, on the cases of fill `power`:
//! so many records of invariance must be red. By default one for each op, in fp32 and one narrow dtype; all with
//! `SAMEBITS_ORDERS=all`, as in ci/nightly, or those of some numbers with `SAMEBITS_ORDERS=11,30`.

use libtest_mimic::{Arguments, Failed, Trial};
use samebits_contract::axis;
use samebits_contract::case::{Answer, Case};
use samebits_contract::fill::Fill;
use samebits_contract::orders;
use samebits_contract::record::{Judgment, Record};
use samebits_contract::round;
use samebits_contract::spec;
use samebits_contract::table::{CaseSpec, Contract, Slice};
use samebits_contract::tensor::DType;
use samebits_contract::verdict::Verdict;
use samebits_harness::checkpoints::Checkpoints;
use samebits_harness::implementation::Implementation;
use samebits_harness::judge::{self, Judge, Selection, plan};
use samebits_harness::machine;
use samebits_mutants::orders::{FOLLOWS, Follows, OPS, Order, Ordered, When};
use std::sync::Arc;

/// How many records of a mutant must be red in the quick slice, and in the default one.
const QUICK: usize = 3;
const DEFAULT: usize = 10;

/// Ops of which so many are red where inputs are bf16 as well, and nothing else is offered.
const BF16_ALONE: [&str; 10] = [
    "gemm",
    "gemm_dx",
    "rms_norm",
    "rms_norm_backward",
    "add_rms_norm",
    "add_rms_norm_backward",
    "layer_norm",
    "layer_norm_backward",
    "softmax",
    "softmax_backward",
];

/// Sums of an op that has several, each of which is seen where it alone follows the rows.
const ALONE: [(&str, &str); 2] = [("attention", "weights"), ("attention", "values")];

/// Orders that begin where few cases reach, or of one sum among several: each is red in the slice quick with bf16 alone.
const HIDDEN: [(&str, Option<&str>, Follows); 13] = [
    ("gemm", None, MANY),
    ("gemm_dx", None, MANY),
    ("rms_norm", None, MANY),
    ("rms_norm_backward", None, MANY),
    ("add_rms_norm", None, MANY),
    ("add_rms_norm_backward", None, MANY),
    ("layer_norm", None, MANY),
    ("layer_norm_backward", None, MANY),
    ("softmax", None, MANY),
    ("softmax_backward", None, MANY),
    ("attention_backward", Some("scores"), OF_HEADS),
    ("attention_backward", Some("products"), OF_HEADS),
    ("layer_norm_backward", Some("gradients"), SOME),
];
const MANY: Follows = Follows { usual: Order::Chain, other: Order::Lanes(32), when: When::Above(384) };
/// Of 64 terms lanes of 32 and of 64 are one tree.
const OF_HEADS: Follows = Follows { usual: Order::Chain, other: Order::Lanes(8), when: When::Above(4) };
const SOME: Follows = Follows { usual: Order::Lanes(32), other: Order::Lanes(64), when: When::Above(4) };

struct Bench {
    contract: Contract,
    checkpoints: Checkpoints,
}

fn main() {
    let arguments = Arguments::from_args();
    let asked = std::env::var("SAMEBITS_ORDERS").ok();
    let numbers: Vec<usize> = match asked.as_deref() {
        None => Vec::new(),
        Some("all") => (0..FOLLOWS.len()).collect(),
        Some(list) => {
            let numbers = list.split(',').map(|number| number.trim().parse().ok().filter(|n| *n < FOLLOWS.len()));
            let numbers: Option<Vec<usize>> = numbers.collect();
            numbers.unwrap_or_else(|| panic!("SAMEBITS_ORDERS is {list}: `all`, or numbers below {}", FOLLOWS.len()))
        }
    };
    let contract = Contract::load(None).expect("the contract loads");
    let bench = Arc::new(Bench { contract, checkpoints: Checkpoints::new(None) });
    let mut trials = Vec::new();
    for (place, op) in OPS.into_iter().enumerate() {
        for (turn, out) in [DType::Bf16, DType::Fp16, DType::Fp32].into_iter().enumerate() {
            if !bench.contract.cases(Slice::Default).any(|case| takes(op, out, case)) {
                continue;
            }
            // Of the narrow dtypes one and the other by turns, where nothing else is asked for.
            if numbers.is_empty() && out != DType::Fp32 && turn != place % 2 {
                continue;
            }
            // Another one for each op and dtype.
            let numbers = match &numbers[..] {
                [] => vec![(place + 14 * turn) % FOLLOWS.len()],
                numbers => numbers.to_vec(),
            };
            let mutants: Arc<[&Follows]> = numbers.into_iter().map(|number| &FOLLOWS[number]).collect();
            let (here, those) = (bench.clone(), mutants.clone());
            trials.push(Trial::test(format!("{op}::{out}::follows_the_rows"), move || {
                here.all_are_seen(op, None, out, &those)
            }));
            for &(_, sum) in ALONE.iter().filter(|(of, _)| *of == op) {
                let (here, those) = (bench.clone(), mutants.clone());
                trials.push(Trial::test(format!("{op}::{out}::{sum}_alone"), move || {
                    here.all_are_seen(op, Some(sum), out, &those)
                }));
            }
            // Bounds are tightest where nothing is rounded again.
            if out == DType::Fp32 {
                let fixed = bench.clone();
                trials.push(Trial::test(format!("{op}::{out}::held_fixed"), move || {
                    mutants.iter().try_for_each(|follows| fixed.is_right(op, out, follows))
                }));
            }
        }
    }
    for (op, only, follows) in HIDDEN {
        let name = format!("{op}::{}{follows}", only.map(|sum| format!("{sum} alone, ")).unwrap_or_default());
        let (here, mutant) = (bench.clone(), Ordered { follows, only, out: DType::Bf16 });
        trials.push(Trial::test(name, move || here.is_seen(&mutant, op)));
    }
    let here = bench.clone();
    trials.push(Trial::test("gemm::bias_first_above_8_rows", move || here.is_seen(&BiasFirst, "gemm")));
    trials.push(Trial::test("what_is_said_is_measured", what_is_said_is_measured));
    trials.push(Trial::test("the_judgment_order", move || bench.order_is_judged()));
    // The longest first, so that no core waits for the last.
    trials.sort_by_key(|trial| !trial.name().ends_with("held_fixed"));
    libtest_mimic::run(&arguments, trials).exit();
}

/// The cases of an op that show an order in outputs of `out`: those of fill `power`, and all where outputs are f32 by contract.
fn takes(op: &str, out: DType, case: &CaseSpec) -> bool {
    // Of every pair of a query and a key plain loops have the terms of three gradients; the other cases have fewer pairs.
    let takes_minutes = op == "attention_backward" && ["orders", "orders_long"].contains(&&case.stem[..]);
    case.op == op && case.out == out && (case.fill == Fill::Power || f32_alone(op)) && !takes_minutes
}

fn f32_alone(op: &str) -> bool {
    spec::find(op).is_some_and(|spec| spec.outs() == [DType::Fp32])
}

/// Attention in f32 by chains, and by another order where keys stand in pages.
struct Paged(Order);

impl Implementation for Paged {
    fn name(&self) -> &str {
        "mutant/order"
    }

    fn version(&self) -> &str {
        ""
    }

    fn run(&self, case: &Case) -> Answer {
        let order = |order| Follows { usual: order, other: order, when: When::Above(0) };
        let ordered = |order_of: Order| Ordered { follows: order(order_of), only: None, out: DType::Fp32 };
        if case.op != axis::PAGED {
            return ordered(Order::Chain).run(case);
        }
        let mut case = Case { op: "attention".into(), ..case.clone() };
        let table = case.inputs.remove("page_table").expect("it is checked");
        let pages: Vec<usize> = table.as_i32().expect("integers").iter().map(|&page| page as usize).collect();
        for name in ["k", "v"] {
            let tensor = &case.inputs[name];
            let (size, shape) = (tensor.shape()[1], [table.shape()[0], table.shape()[1] * tensor.shape()[1]]);
            let shape = [&shape, &tensor.shape()[2..]].concat();
            let width = tensor.shape()[2..].iter().product::<usize>() * size;
            let dense = tensor.gather(width, &pages.iter().map(|&page| Some(page)).collect::<Vec<_>>(), &shape);
            case.inputs.insert(name.into(), dense);
        }
        ordered(self.0).run(&case)
    }
}

/// Products by a chain, to which the bias is added last, and above 8 rows first.
struct BiasFirst;

impl Implementation for BiasFirst {
    fn name(&self) -> &str {
        "mutant/order"
    }

    fn version(&self) -> &str {
        ""
    }

    fn run(&self, case: &Case) -> Answer {
        let chain = Follows { usual: Order::Chain, other: Order::Chain, when: When::Above(0) };
        let mut case = case.clone();
        if let Some(bias) = case.inputs.get("bias").filter(|_| case.inputs["x"].shape()[0] > 8).cloned() {
            case.inputs.remove("bias");
            // One term more before the others.
            for (name, first) in [("x", vec![1.0; case.inputs["x"].shape()[0]]), ("w", bias.to_f64())] {
                let tensor = &case.inputs[name];
                let rows = tensor.to_f64();
                let rows = rows.chunks(tensor.shape()[1]).zip(first).flat_map(|(row, first)| [&[first], row].concat());
                let shape = [tensor.shape()[0], tensor.shape()[1] + 1];
                let longer = round::tensor(tensor.dtype(), &shape, &rows.collect::<Vec<_>>());
                case.inputs.insert(name.into(), longer);
            }
        }
        Ordered { follows: chain, only: None, out: DType::Bf16 }.run(&case)
    }
}

/// What reports say of narrow outputs is what is measured here, of every op that has them and a sum.
fn what_is_said_is_measured() -> Result<(), Failed> {
    let measured: Vec<&str> = OPS.into_iter().filter(|op| !f32_alone(op)).collect();
    match measured.iter().find(|op| !orders::MEASURED.contains(op)) {
        Some(op) => Err(format!("{op} is measured and not among contract's `orders::MEASURED`").into()),
        None if measured.len() != orders::MEASURED.len() => {
            Err(format!("{:?}, of which {measured:?} are measured", orders::MEASURED).into())
        }
        None => Ok(()),
    }
}

impl Bench {
    /// The records of the cases that show an order, and in which slice each case is.
    fn judge(
        &self,
        mutant: &Ordered,
        op: &str,
        slice: Slice,
        judgments: &[Judgment],
        axes: &[&str],
    ) -> Vec<(Slice, Record)> {
        self.judge_those(mutant, op, slice, judgments, axes, |trial| takes(op, mutant.out, trial.case))
    }

    /// The same of all cases.
    fn judge_all(
        &self,
        mutant: &dyn Implementation,
        op: &str,
        slice: Slice,
        judgments: &[Judgment],
        axes: &[&str],
    ) -> Vec<(Slice, Record)> {
        self.judge_those(mutant, op, slice, judgments, axes, |_| true)
    }

    fn judge_those(
        &self,
        mutant: &dyn Implementation,
        op: &str,
        slice: Slice,
        judgments: &[Judgment],
        axes: &[&str],
        takes: impl Fn(&judge::Trial) -> bool,
    ) -> Vec<(Slice, Record)> {
        let selection = Selection {
            ops: vec![op.to_string()],
            judgments: judgments.to_vec(),
            axes: axes.iter().map(|axis| axis.to_string()).collect(),
            ..Selection::all(slice)
        };
        let machine = machine::of_slice(slice);
        let judge = Judge {
            contract: &self.contract,
            rows: self.contract.default_rows(),
            implementation: mutant,
            goldens: None,
            references: Vec::new(),
            recordings: self.checkpoints.recordings(),
            machine: &machine,
        };
        let mut records = Vec::new();
        for group in plan(&self.contract, "mutant/order", &selection) {
            let trials: Vec<_> = group.into_iter().filter(|trial| takes(trial)).collect();
            let slices: Vec<Slice> = trials.iter().map(|trial| trial.case.slice).collect();
            records.extend(slices.into_iter().zip(judge.group(&trials)));
        }
        records
    }

    /// The judgment `order` sees an order that follows the rows, in fp32 outputs and where terms have signs in narrow ones, and
    /// no other; it is asked of those that do not claim the canonical bits.
    fn order_is_judged(&self) -> Result<(), Failed> {
        let folder = tempfile::tempdir()?;
        let list = folder.path().join("impls.toml");
        let entry = "[[implementation]]\nname = \"mutant/order\"\nabout = \"it adds\"\njudgments = [\"invariance\"]\n";
        std::fs::write(&list, entry)?;
        let mut contract = Contract::load(None)?;
        contract.add_implementations(&list)?;
        let bench = Bench { contract, checkpoints: Checkpoints::new(None) };
        let changes = Follows { usual: Order::Chain, other: Order::Parts(4), when: When::Above(2) };
        for (op, out, seen) in [
            ("gemm", DType::Fp32, true),
            ("gemm", DType::Bf16, true),
            ("attention", DType::Fp32, true),
            ("attention", DType::Bf16, true),
            ("rms_norm", DType::Fp32, true),
            ("rms_norm", DType::Bf16, false),
            ("softmax", DType::Fp32, true),
            ("logprob", DType::Fp32, true),
        ] {
            for (follows, changes) in [(changes, true), (Follows { usual: changes.other, ..changes }, false)] {
                let mutant = Ordered { follows, only: None, out };
                let records = bench.judge_all(&mutant, op, Slice::Quick, &[Judgment::Order], &[]);
                let of_form = |verdict: &Verdict| match (seen, changes) {
                    (false, _) => matches!(verdict, Verdict::Unsupported { .. }),
                    (true, true) => matches!(verdict, Verdict::Fail(_)),
                    (true, false) => *verdict == Verdict::Pass,
                };
                // fp16 has no units small enough for a mean of them.
                let asked = |record: &&Record| record.out == out && record.dtype != DType::Fp16;
                let records: Vec<Record> =
                    records.into_iter().map(|(_, record)| record).filter(|r| asked(&r)).collect();
                if records.len() != 2 {
                    return Err(format!(
                        "{op} {out}: {} records of order, one for bf16 and one for fp32",
                        records.len()
                    )
                    .into());
                }
                if let Some(other) = records.iter().find(|record| !of_form(&record.verdict)) {
                    return Err(format!("{follows}: {}: {:?}", other.case, other.verdict).into());
                }
            }
        }
        // Keys in pages are asked for where they are offered.
        for (order, is_red) in [(Order::Chain, false), (Order::Blocks(16), true)] {
            let records = bench.judge_all(&Paged(order), "attention", Slice::Quick, &[Judgment::Order], &[]);
            let mut seen = records.iter().map(|(_, record)| record).filter(|record| record.out == DType::Fp32);
            let of_pages = |record: &Record| match &record.verdict {
                Verdict::Fail(evidence) => is_red && evidence.message.contains("pages of 16 keys"),
                verdict => !is_red && *verdict == Verdict::Pass,
            };
            if seen.clone().count() != 3 || !seen.all(of_pages) {
                return Err(format!("{order:?} over pages: {records:?}").into());
            }
        }
        // Claimed bits have the canonical order, which is judged as their arithmetic.
        let mutant = Ordered { follows: changes, only: None, out: DType::Fp32 };
        match self.judge_all(&mutant, "gemm", Slice::Quick, &[Judgment::Order], &[]).len() {
            0 => Ok(()),
            count => Err(format!("{count} records of order for one that claims the canonical bits").into()),
        }
    }

    /// A record of the slice quick with inputs and outputs of bf16 is red along the axis batch.
    fn is_seen(&self, mutant: &dyn Implementation, op: &str) -> Result<(), Failed> {
        let takes = |trial: &judge::Trial| {
            let CaseSpec { fill, dtype, out, .. } = trial.case;
            (*fill, *dtype, *out) == (Fill::Power, DType::Bf16, DType::Bf16)
        };
        let records = self.judge_those(mutant, op, Slice::Quick, &[Judgment::Invariance], &["batch"], takes);
        match records.iter().filter(|(_, record)| matches!(record.verdict, Verdict::Fail(_))).count() {
            0 => Err(format!("none of {} records is red", records.len()).into()),
            _ => Ok(()),
        }
    }

    /// Each of the mutants turns enough records red.
    fn all_are_seen(
        &self,
        op: &str,
        only: Option<&'static str>,
        out: DType,
        mutants: &[&Follows],
    ) -> Result<(), Failed> {
        let (mut least, mut missed) = ((usize::MAX, usize::MAX), Vec::new());
        let bf16_alone = out == DType::Bf16 && BF16_ALONE.contains(&op);
        for follows in mutants {
            let mutant = Ordered { follows: **follows, only, out };
            // Where outputs are f32 by contract there are fewer records on each axis.
            let axes = ["batch", "micro_batch", "accumulation", "padding"];
            let axes = if f32_alone(op) { &axes[..] } else { &axes[..3] };
            let records = self.judge(&mutant, op, Slice::Default, &[Judgment::Invariance], axes);
            // A kernel of bf16 alone is shown as much as one of all dtypes.
            let counts = |record: &Record| !bf16_alone || record.dtype == DType::Bf16;
            let red = |slice: Slice| {
                let fails = |(of, record): &&(Slice, Record)| {
                    *of <= slice && counts(record) && matches!(record.verdict, Verdict::Fail(_))
                };
                records.iter().filter(fails).count()
            };
            if let Some((_, broken)) =
                records.iter().find(|(_, record)| matches!(record.verdict, Verdict::Error { .. }))
            {
                return Err(format!("{follows}: {}: {:?}", broken.case, broken.verdict).into());
            }
            let (quick, default) = (red(Slice::Quick), red(Slice::Default));
            least = (least.0.min(quick), least.1.min(default));
            let enough = match only {
                // One of several sums that a kernel has in one order.
                Some(_) => (1, 5),
                None => (QUICK, DEFAULT),
            };
            if quick < enough.0 || default < enough.1 {
                missed.push(format!("{follows}: {quick} red records in the quick slice, {default} in the default one"));
            }
        }
        println!(
            "{op} {}{out}: at least {} red records in the quick slice, {} in the default one",
            only.unwrap_or(""),
            least.0,
            least.1
        );
        if missed.is_empty() { Ok(()) } else { Err(format!("{op} {out}:\n{}", missed.join("\n")).into()) }
    }

    /// The same orders, one at a time for any number of rows, are within every bound and the same on every axis.
    fn is_right(&self, op: &str, out: DType, follows: &Follows) -> Result<(), Failed> {
        for order in [follows.usual, follows.other] {
            let mutant = Ordered { follows: Follows { usual: order, other: order, ..*follows }, only: None, out };
            // Other cases hold infinities and NaN, which plain loops need not have as the page has them.
            let power = |trial: &judge::Trial| trial.case.fill == Fill::Power && trial.case.out == out;
            let mut records = self.judge_those(&mutant, op, Slice::Default, &[Judgment::Accuracy], &[], power);
            records.extend(self.judge_those(&mutant, op, Slice::Quick, &[Judgment::Invariance], &["padding"], power));
            if let Some((_, red)) = records.iter().find(|(_, record)| record.verdict.is_red()) {
                return Err(format!("{order:?}: {}: {:?} {:?}", red.case, red.judgment, red.verdict).into());
            }
        }
        Ok(())
    }
}
