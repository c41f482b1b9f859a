//! An order of sums that follows the number of rows is seen, whatever the outputs are rounded to; held fixed, it is right.
//!
//! Every mutant of [`FOLLOWS`] is judged in every op of [`OPS`] with outputs of one dtype alone, on the cases of fill `power`:
//! so many records of invariance must be red. By default a part of them, all with `SAMEBITS_ORDERS=all`.

use libtest_mimic::{Arguments, Failed, Trial};
use samebits_contract::fill::Fill;
use samebits_contract::record::{Judgment, Record};
use samebits_contract::table::{Contract, Slice};
use samebits_contract::tensor::DType;
use samebits_contract::verdict::Verdict;
use samebits_harness::checkpoints::Checkpoints;
use samebits_harness::judge::{self, Judge, Selection, plan};
use samebits_harness::machine;
use samebits_mutants::orders::{FOLLOWS, Follows, OPS, Order, Ordered, When};
use std::sync::Arc;

/// How many records of a mutant must be red in the quick slice, and in the default one.
const QUICK: usize = 3;
const DEFAULT: usize = 10;

struct Bench {
    contract: Contract,
    checkpoints: Checkpoints,
}

fn main() {
    let arguments = Arguments::from_args();
    let all = std::env::var("SAMEBITS_ORDERS").is_ok_and(|what| what == "all");
    let contract = Contract::load(None).expect("the contract loads");
    let bench = Arc::new(Bench { contract, checkpoints: Checkpoints::new(None) });
    let mut trials = Vec::new();
    for (place, op) in OPS.into_iter().enumerate() {
        for out in [DType::Bf16, DType::Fp16, DType::Fp32] {
            if !bench
                .contract
                .cases(Slice::Default)
                .any(|case| case.op == op && case.fill == Fill::Power && case.out == out)
            {
                continue;
            }
            // Two others for each op.
            let taken = move |number: usize| all || number % 21 == place % 21;
            let (here, fixed) = (bench.clone(), bench.clone());
            trials.push(Trial::test(format!("{op}::{out}::follows_the_rows"), move || {
                let mutants =
                    FOLLOWS.iter().enumerate().filter(|(number, _)| taken(*number)).map(|(_, follows)| follows);
                here.all_are_seen(op, out, mutants)
            }));
            // Bounds are tightest where nothing is rounded again.
            if out == DType::Fp32 {
                trials.push(Trial::test(format!("{op}::{out}::held_fixed"), move || {
                    let orders =
                        FOLLOWS.iter().enumerate().filter(|(number, _)| taken(*number)).map(|(_, follows)| follows);
                    orders.into_iter().try_for_each(|follows| fixed.is_right(op, out, follows))
                }));
            }
        }
    }
    trials.push(Trial::test("the_judgment_order", move || bench.order_is_judged()));
    libtest_mimic::run(&arguments, trials).exit();
}

impl Bench {
    /// The records of the cases of fill `power` of `op` with outputs of `out`, and in which slice each case is.
    fn judge(
        &self,
        mutant: &Ordered,
        op: &str,
        slice: Slice,
        judgments: &[Judgment],
        axes: &[&str],
    ) -> Vec<(Slice, Record)> {
        let takes = |trial: &judge::Trial| trial.case.fill == Fill::Power && trial.case.out == mutant.out;
        self.judge_those(mutant, op, slice, judgments, axes, takes)
    }

    /// The same of all cases.
    fn judge_all(
        &self,
        mutant: &Ordered,
        op: &str,
        slice: Slice,
        judgments: &[Judgment],
        axes: &[&str],
    ) -> Vec<(Slice, Record)> {
        self.judge_those(mutant, op, slice, judgments, axes, |_| true)
    }

    fn judge_those(
        &self,
        mutant: &Ordered,
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
                let mutant = Ordered { follows, out };
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
        // Claimed bits have the canonical order, which is judged as their arithmetic.
        let mutant = Ordered { follows: changes, out: DType::Fp32 };
        match self.judge_all(&mutant, "gemm", Slice::Quick, &[Judgment::Order], &[]).len() {
            0 => Ok(()),
            count => Err(format!("{count} records of order for one that claims the canonical bits").into()),
        }
    }

    /// Each of the mutants turns enough records red.
    fn all_are_seen<'a>(&self, op: &str, out: DType, mutants: impl Iterator<Item = &'a Follows>) -> Result<(), Failed> {
        let (mut least, mut missed) = ((usize::MAX, usize::MAX), Vec::new());
        for follows in mutants {
            let mutant = Ordered { follows: *follows, out };
            let records = self.judge(&mutant, op, Slice::Default, &[Judgment::Invariance], &["batch"]);
            let red = |slice: Slice| {
                let fails =
                    |(of, record): &&(Slice, Record)| *of <= slice && matches!(record.verdict, Verdict::Fail(_));
                records.iter().filter(fails).count()
            };
            if let Some((_, broken)) =
                records.iter().find(|(_, record)| matches!(record.verdict, Verdict::Error { .. }))
            {
                return Err(format!("{follows}: {}: {:?}", broken.case, broken.verdict).into());
            }
            let (quick, default) = (red(Slice::Quick), red(Slice::Default));
            least = (least.0.min(quick), least.1.min(default));
            if quick < QUICK || default < DEFAULT {
                missed.push(format!("{follows}: {quick} red records in the quick slice, {default} in the default one"));
            }
        }
        println!("{op} {out}: at least {} red records in the quick slice, {} in the default one", least.0, least.1);
        if missed.is_empty() { Ok(()) } else { Err(format!("{op} {out}:\n{}", missed.join("\n")).into()) }
    }

    /// The same orders, one at a time for any number of rows, are within every bound and the same on every axis.
    fn is_right(&self, op: &str, out: DType, follows: &Follows) -> Result<(), Failed> {
        for order in [follows.usual, follows.other] {
            let mutant = Ordered { follows: Follows { usual: order, other: order, ..*follows }, out };
            let mut records = self.judge(&mutant, op, Slice::Default, &[Judgment::Accuracy], &[]);
            records.extend(self.judge(&mutant, op, Slice::Quick, &[Judgment::Invariance], &["padding"]));
            if let Some((_, red)) = records.iter().find(|(_, record)| record.verdict.is_red()) {
                return Err(format!("{order:?}: {}: {:?} {:?}", red.case, red.judgment, red.verdict).into());
            }
        }
        Ok(())
    }
}
