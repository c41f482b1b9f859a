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
use samebits_harness::judge::{Judge, Selection, plan};
use samebits_harness::machine;
use samebits_mutants::orders::{FOLLOWS, Follows, OPS, Ordered};
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
            trials.push(Trial::test(format!("{op}::{out}::held_fixed"), move || {
                let orders =
                    FOLLOWS.iter().enumerate().filter(|(number, _)| taken(*number)).map(|(_, follows)| follows);
                orders.into_iter().try_for_each(|follows| fixed.is_right(op, out, follows))
            }));
        }
    }
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
            let trials: Vec<_> = group
                .into_iter()
                .filter(|trial| trial.case.fill == Fill::Power && trial.case.out == mutant.out)
                .collect();
            let slices: Vec<Slice> = trials.iter().map(|trial| trial.case.slice).collect();
            records.extend(slices.into_iter().zip(judge.group(&trials)));
        }
        records
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
