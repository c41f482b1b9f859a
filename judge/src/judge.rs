//! From the contract to records: which judgments there are, and what came of each.
//!
//! Nothing here knows how an implementation works; it is asked cases and its answers are compared. A group of cases
//! shares inputs, so the oracle and the base answers are computed once for all judgments of the group.

use crate::implementation::Implementation;
use crate::probe::{self, Apart, Finding, Probe};
use crate::recordings::Recordings;
use samebits_contract::axis::{self, Axis, Join, Machine, Variant, Way};
use samebits_contract::case::{Answer, Case, Status};
use samebits_contract::compare::{self, Bound};
use samebits_contract::fill::Fill;
use samebits_contract::gradients::GradientMeasure;
use samebits_contract::record::{Judgment, Measure, Record, SCHEMA, Spread};
use samebits_contract::spec::{self, Class, References};
use samebits_contract::table::{self, CaseSpec, Contract, Exception, Row, Slice};
use samebits_contract::tensor::{DType, Tensor};
use samebits_contract::verdict::{Evidence, Verdict};
use samebits_goldens::{Store, Verified};
use std::collections::BTreeMap;
use std::time::Instant;

/// What to judge: everything of a slice that passes every filter that is set.
#[derive(Clone, Debug)]
pub struct Selection {
    /// How much of the contract.
    pub slice: Slice,
    /// Ops by name; empty for all.
    pub ops: Vec<String>,
    /// Input dtypes; empty for all.
    pub dtypes: Vec<DType>,
    /// Case names, whole or with a final `*`; empty for all.
    pub cases: Vec<String>,
    /// Judgments; empty for all.
    pub judgments: Vec<Judgment>,
    /// Invariance axes by name; empty for all.
    pub axes: Vec<String>,
    /// Axes with the settings that alone are asked on them; other axes keep all.
    pub settings: Vec<(String, String)>,
    /// Whether golden is asked of implementations that do not claim the canonical bits: the goldens are their own.
    pub own_goldens: bool,
    /// The draw of inputs and of random settings; goldens hold draw 0 alone.
    pub seed: u64,
    /// One part of several that are judged apart, (i, n) with i from 1 to n; groups of shared inputs stay whole.
    pub shard: (usize, usize),
}

impl Selection {
    /// All of `slice`.
    pub fn all(slice: Slice) -> Selection {
        Selection {
            slice,
            ops: Vec::new(),
            dtypes: Vec::new(),
            cases: Vec::new(),
            judgments: Vec::new(),
            axes: Vec::new(),
            settings: Vec::new(),
            own_goldens: false,
            seed: 0,
            shard: (1, 1),
        }
    }

    /// What it would be if nothing but its slice narrowed it.
    pub fn whole(&self) -> Selection {
        Selection { own_goldens: self.own_goldens, ..Selection::all(self.slice) }
    }

    /// Whether `case` passes the filters on cases.
    pub fn takes(&self, case: &CaseSpec) -> bool {
        let fits =
            |pattern: &String| pattern.strip_suffix('*').map_or(*pattern == case.name, |p| case.name.starts_with(p));
        (self.ops.is_empty() || self.ops.contains(&case.op))
            && (self.dtypes.is_empty() || self.dtypes.contains(&case.dtype))
            && (self.cases.is_empty() || self.cases.iter().any(fits))
    }

    fn judges(&self, judgment: Judgment) -> bool {
        self.judgments.is_empty() || self.judgments.contains(&judgment)
    }
}

/// One judgment on one case.
#[derive(Clone, Copy)]
pub struct Trial<'a> {
    /// The case.
    pub case: &'a CaseSpec,
    /// The row that asks for it.
    pub row: &'a Row,
    /// How it is judged.
    pub judgment: Judgment,
    /// What is varied, for invariance.
    pub axis: Option<&'static Axis>,
}

impl Trial<'_> {
    /// Unique in a plan: the case, the judgment and the axis.
    pub fn name(&self) -> String {
        let axis = self.axis.map_or(String::new(), |axis| format!(":{}", axis.name));
        format!("{}::{}{axis}", self.case.name, self.judgment.name())
    }
}

/// Every trial that the contract asks of `implementation` within `selection`, grouped by shared inputs, in order.
pub fn plan<'a>(contract: &'a Contract, implementation: &str, selection: &Selection) -> Vec<Vec<Trial<'a>>> {
    let mut groups: Vec<Vec<Trial<'a>>> = Vec::new();
    let asks = |case: &&CaseSpec| selection.takes(case) && contract.asks(implementation, case);
    for case in contract.cases(selection.slice).filter(asks) {
        let Some(row) = contract.row(implementation, case) else { continue };
        let mut trials = Vec::new();
        let entry = contract.implementation(implementation);
        let built_in = entry.is_none_or(|entry| entry.command.is_none());
        let restarts = contract.restarts(case) || built_in && selection.slice == Slice::Exhaustive;
        let listed = entry.and_then(|entry| entry.judgments.as_ref());
        // What the row says holds, whatever the entry claims of itself.
        let same_as = contract.same_as(implementation, case).is_some();
        let by_row = row.same_as.is_some() && same_as;
        let lists = |judgment: &Judgment| listed.is_none_or(|listed| listed.contains(judgment));
        let asked = |judgment: &Judgment| match judgment {
            Judgment::Golden => lists(judgment) || by_row || selection.own_goldens,
            // Whoever claims the canonical bits is asked for the canonical order, as part of its arithmetic. Of the others one
            // order is asked where invariance is.
            Judgment::Order => !lists(&Judgment::Golden) && (lists(judgment) || lists(&Judgment::Invariance)),
            _ => lists(judgment),
        };
        for judgment in Judgment::ALL.into_iter().filter(|judgment| selection.judges(*judgment)).filter(asked) {
            let trial = |axis| Trial { case, row, judgment, axis };
            match judgment {
                Judgment::Invariance => trials.extend(
                    axis::all()
                        .iter()
                        .filter(|axis| row.invariant.contains(&axis.name))
                        .filter(|axis| match axis.name {
                            "restart" => restarts,
                            "soak" => contract.soaks(case),
                            _ => true,
                        })
                        .filter(|axis| selection.axes.is_empty() || selection.axes.iter().any(|name| name == axis.name))
                        .map(|axis| trial(Some(axis))),
                ),
                // A chain's reference is recorded, not computed.
                Judgment::Accuracy if case.spec().class == Class::Chain && case.fill != Fill::Recorded => {}
                // The answers of another implementation are golden for every case.
                Judgment::Golden if same_as => trials.push(trial(None)),
                // Of the exhaustive slice nothing is blessed.
                Judgment::Golden if !case.blessed() && case.vector.is_none() => {}
                // One case stands for its op and dtypes.
                Judgment::Arithmetic | Judgment::Order | Judgment::Coverage if !contract.covers(case) => {}
                Judgment::Arithmetic if !probe::askable(&case.op, case.dtype, case.out) => {}
                Judgment::Order if probe::Op::find(&case.op).is_none() => {}
                // Other inputs than those that were blessed; recorded ones are drawn by nobody.
                Judgment::Golden if selection.seed != 0 && case.fill != Fill::Recorded => {}
                _ => trials.push(trial(None)),
            }
        }
        match groups.last_mut() {
            Some(group) if group.first().is_some_and(|trial| trial.case.group == case.group) => group.extend(trials),
            _ if trials.is_empty() => {}
            _ => groups.push(trials),
        }
    }
    let (part, parts) = selection.shard;
    groups.into_iter().skip(part - 1).step_by(parts).collect()
}

/// Judges one implementation by one contract.
pub struct Judge<'a> {
    /// The contract.
    pub contract: &'a Contract,
    /// The row set that bounds accuracy.
    pub rows: &'a str,
    /// Who is judged.
    pub implementation: &'a dyn Implementation,
    /// Blessed outputs; `None` when there is no store at hand.
    pub goldens: Option<&'a Store>,
    /// The implementations whose bits it must have, where its entry or a row names one.
    pub references: Vec<&'a dyn Implementation>,
    /// Recorded tokens and logits of the models, and the vectors.
    pub recordings: &'a Recordings,
    /// What the axes can vary on this machine.
    pub machine: &'a Machine,
}

/// Everything known about one case while its trials are judged.
struct Base {
    case: Case,
    answer: Answer,
}

/// How one trial ended, before it becomes a [`Record`].
pub(crate) struct Outcome {
    verdict: Verdict,
    setting: Option<String>,
    measure: Option<Measure>,
    chain: Option<compare::ChainMeasure>,
    gradient: Option<GradientMeasure>,
}

impl Outcome {
    pub(crate) fn of(verdict: Verdict) -> Outcome {
        Outcome { verdict, setting: None, measure: None, chain: None, gradient: None }
    }

    fn error(reason: impl Into<String>) -> Outcome {
        Outcome::of(Verdict::Error { reason: reason.into() })
    }

    fn untested(reason: impl Into<String>) -> Outcome {
        Outcome::of(Verdict::Untested { reason: reason.into() })
    }
}

impl Judge<'_> {
    /// Judges the trials of one group, in order.
    pub fn group(&self, trials: &[Trial]) -> Vec<Record> {
        let mut oracle: Option<Result<References, String>> = None;
        let mut base: Option<(&CaseSpec, Result<Base, String>)> = None;
        trials
            .iter()
            .map(|trial| {
                let start = Instant::now();
                let first = base.as_ref().is_none_or(|(case, _)| case.name != trial.case.name);
                if first {
                    if trial.case.spec().reads_stored() {
                        oracle = None;
                    }
                    base = Some((trial.case, self.base(trial.case, base.take())));
                }
                let (_, base) = base.as_ref().expect("just made");
                let mut record = match base {
                    Err(reason) => self.record(trial, Outcome::untested(reason.clone())),
                    // One failure to answer is one error; what could not be judged for want of the answer is untested.
                    Ok(base) if base.answer.status == Status::Error && !first => {
                        self.record(trial, Outcome::untested("there is no answer to judge; the case's error says why"))
                    }
                    Ok(base) => {
                        let mut record = self.record(trial, self.trial(trial, base, &mut oracle));
                        record.kernel = base.answer.kernel.clone();
                        if trial.judgment == Judgment::Accuracy {
                            record.plan = base.answer.plan.clone();
                            record.ledger = base.answer.ledger.clone();
                            // Whether a buffer was there from a call before depends on which thread was free.
                            record.ledger.remove("allocated_bytes");
                        }
                        record
                    }
                };
                record.seconds = start.elapsed().as_secs_f64();
                record
            })
            .collect()
    }

    /// `before` is the last case of the group.
    fn base(&self, spec: &CaseSpec, before: Option<(&CaseSpec, Result<Base, String>)>) -> Result<Base, String> {
        let case = match before {
            // The same inputs, made once.
            Some((of, Ok(before))) if of.group == spec.group && spec.fill != Fill::Recorded => {
                Case { name: spec.name.clone(), out: spec.out, ..before.case }
            }
            _ => self.recordings.fill(spec, self.machine.seed)?,
        };
        let mut answer = self.implementation.run(&case);
        if let (Status::Ok, Err(reason)) = (answer.status, complete(spec, &answer)) {
            answer = Answer { kernel: answer.kernel, ..Answer::error(reason) };
        }
        Ok(Base { case, answer })
    }

    fn trial(&self, trial: &Trial, base: &Base, oracle: &mut Option<Result<References, String>>) -> Outcome {
        match base.answer.status {
            Status::Error => return Outcome::error(base.answer.reason.clone()),
            Status::Unsupported => {
                let reason = base.answer.reason.clone();
                return match self.contract.requires(self.implementation.name(), trial.case) {
                    false => Outcome::of(Verdict::Unsupported { reason }),
                    true => {
                        let role = self.contract.role(trial.case.dtype).name();
                        Outcome::untested(format!(
                            "required ({} is {role}) and not offered: {reason}",
                            trial.case.dtype
                        ))
                    }
                };
            }
            Status::Ok => {}
        }
        match trial.judgment {
            Judgment::Accuracy if trial.case.spec().is_model_gradient() => self.gradients(trial, base),
            Judgment::Accuracy if trial.case.spec().class == Class::Chain => self.chain(trial, base),
            Judgment::Accuracy => {
                let oracle =
                    oracle.get_or_insert_with(|| trial.case.spec().oracle(&base.case).map_err(|e| e.to_string()));
                match oracle {
                    Ok(references) => self.accuracy(trial, base, references),
                    Err(reason) => Outcome::error(format!("the oracle refuses the case: {reason}")),
                }
            }
            Judgment::Invariance => match constant(trial, base, oracle) {
                Some(reason) => Outcome::untested(reason),
                None => self.invariance(trial, base),
            },
            Judgment::Golden => self.golden(trial, base),
            Judgment::Arithmetic => self.arithmetic(trial),
            Judgment::Order => self.order(trial),
            Judgment::Coverage => self.coverage(trial),
        }
    }

    /// What questions to the op give away, against what the profile declares.
    fn arithmetic(&self, trial: &Trial) -> Outcome {
        let entry = self.contract.implementation(self.implementation.name());
        let judgments = entry.and_then(|entry| entry.judgments.as_ref());
        // Golden is the claim to have the canonical bits, and with them the canonical order.
        let canonical = judgments.is_none_or(|judgments| judgments.contains(&Judgment::Golden));
        let (CaseSpec { op, dtype, out, .. }, profile) = (trial.case, trial.case.profile());
        if !probe::declares(profile) {
            let reason = format!("no answers are declared for the profile `{profile}`");
            return Outcome::of(Verdict::Unsupported { reason });
        }
        let probe = Probe::new(self.implementation, profile, *dtype, *out);
        match probe.findings(op, canonical) {
            Err(reason) => Outcome::error(format!("asked about its arithmetic: {reason}")),
            Ok(findings) if findings.is_empty() => {
                Outcome::of(Verdict::Unsupported { reason: "it can be asked nothing about its arithmetic".into() })
            }
            Ok(findings) => {
                let wrong: Vec<&Finding> = findings.iter().filter(|finding| !finding.as_declared()).collect();
                let (count, total) = (wrong.len(), findings.len());
                let setting = Some(format!("{total} questions"));
                let Some(first) = wrong.first() else { return Outcome { setting, ..Outcome::of(Verdict::Pass) } };
                let texts: Vec<String> = wrong.iter().map(|finding| finding.to_string()).collect();
                let evidence = Evidence {
                    message: format!("{}; {count} of {total} answers are not as declared", texts.join("; ")),
                    output: trial.case.spec().outputs[0].name.to_string(),
                    expected: first.declared.clone(),
                    found: first.found.clone(),
                    count,
                    total,
                    ..Evidence::default()
                };
                Outcome { setting, ..Outcome::of(Verdict::Fail(Box::new(evidence))) }
            }
        }
    }

    /// Whether the order of a sum is one for all numbers of rows, places and schedules that can be asked for.
    fn order(&self, trial: &Trial) -> Outcome {
        let CaseSpec { op, dtype, out, .. } = trial.case;
        let op = probe::Op::find(op).expect("the plan asks of these alone");
        match Probe::new(self.implementation, trial.case.profile(), *dtype, *out).one_order(op, &self.machine.threads) {
            Ok(settings) => Outcome { setting: Some(format!("{settings} settings")), ..Outcome::of(Verdict::Pass) },
            Err(Apart::Unasked(reason)) => Outcome::of(Verdict::Unsupported { reason }),
            Err(Apart::NoAnswer(reason)) => Outcome::error(reason),
            Err(Apart::Differs { setting, terms, expected, found, count, total }) => {
                let evidence = Evidence {
                    message: format!(
                        "order = {setting}: the sum of {terms} terms is added in another order than with {}: {count} of {total} \
                         questions are answered otherwise",
                        probe::USUAL
                    ),
                    output: trial.case.spec().outputs[0].name.to_string(),
                    expected: format!("{expected:e}"),
                    found: format!("{found:e}"),
                    count,
                    total,
                    ..Evidence::default()
                };
                Outcome { setting: Some(setting), ..Outcome::of(Verdict::Fail(Box::new(evidence))) }
            }
        }
    }

    /// Which classes of number the right answers to the cases have.
    fn coverage(&self, trial: &Trial) -> Outcome {
        let coverage = self.contract.coverage(self.implementation.name(), trial.case);
        if !coverage.missing.is_empty() {
            return Outcome::untested(coverage.missing.join("; "));
        }
        if !coverage.stale.is_empty() {
            return Outcome::of(Verdict::StaleWaiver { reason: coverage.stale.join("; ") });
        }
        let setting = Some(format!("{} classes", coverage.covered));
        Outcome { setting, ..Outcome::of(Verdict::Pass) }
    }

    /// Every output against the oracle; the record keeps the measure closest to its bound, and how the errors of all are spread.
    fn accuracy(&self, trial: &Trial, base: &Base, references: &References) -> Outcome {
        let mut outcome = Outcome::of(Verdict::Pass);
        let mut spread = Spread::default();
        for output in trial.case.spec().outputs {
            let dtype = trial.case.spec().output_dtype(output, trial.case.out);
            // Integers have no error to bound: they are right or wrong.
            let bound = match dtype {
                DType::I32 => Bound::Bits,
                _ => match self.contract.bound(self.rows, trial.row, trial.case, dtype, Judgment::Accuracy) {
                    Some(bound) => bound,
                    None => return Outcome::error(format!("row set `{}` has no bound for {dtype}", self.rows)),
                },
            };
            let found = &base.answer.outputs[output.name];
            let (measure, evidence) = compare::accuracy(output.name, dtype, found, &references[output.name], &bound);
            spread.add(&measure.spread);
            if outcome.measure.as_ref().is_none_or(|worst| measure.of_bound > worst.of_bound) {
                outcome.measure = Some(measure);
            }
            if let (Some(evidence), Verdict::Pass) = (evidence, &outcome.verdict) {
                outcome.verdict = Verdict::Fail(evidence);
            }
        }
        if let Some(measure) = &mut outcome.measure {
            measure.spread = spread;
        }
        outcome
    }

    /// What a program gives against the recorded fp32 run, and next to the error of the recorded run in the same dtype.
    fn chain(&self, trial: &Trial, base: &Base) -> Outcome {
        let bound = self.contract.bound(self.rows, trial.row, trial.case, trial.case.dtype, Judgment::Accuracy);
        let Some(Bound::Chain(bound)) = bound else {
            return Outcome::error(format!("row set `{}` has no chain bound for {}", self.rows, trial.case.dtype));
        };
        let recorded = match self.recordings.recorded(trial.case) {
            Ok(recorded) => recorded,
            Err(reason) => return Outcome::untested(reason),
        };
        let mut outcome = Outcome::of(Verdict::Pass);
        for output in trial.case.spec().outputs {
            let of_program = compare::OfProgram { op: trial.case.spec().op, output, inputs: &base.case.inputs };
            let reference = &recorded.fp32[output.name];
            let measured = of_program.measure(&base.answer.outputs[output.name], reference);
            let own =
                recorded.same_dtype.as_ref().map(|own| of_program.measure(&own[output.name], reference)).transpose();
            let (measure, evidence) = match (measured, own) {
                (Ok(measure), Ok(own)) => {
                    let evidence = of_program.hold(&measure, own.as_ref(), &bound);
                    (measure, evidence)
                }
                (Err(evidence), _) => return Outcome::of(Verdict::Fail(evidence)),
                (_, Err(evidence)) => return Outcome::error(format!("the recorded run: {}", evidence.message)),
            };
            // The record has the measure of what fails, else of the first output.
            match evidence {
                Some(evidence) => return Outcome { chain: Some(measure), ..Outcome::of(Verdict::Fail(evidence)) },
                None => _ = outcome.chain.get_or_insert(measure),
            }
        }
        outcome
    }

    /// Gradients of every recorded batch, of which the case is the first, against those of torch.
    fn gradients(&self, trial: &Trial, base: &Base) -> Outcome {
        let bound = self.contract.bound(self.rows, trial.row, trial.case, trial.case.dtype, Judgment::Accuracy);
        let Some(Bound::Gradient(bound)) = bound else {
            return Outcome::error(format!("row set `{}` has no gradient bound for {}", self.rows, trial.case.dtype));
        };
        let recorded = self.recordings.recorded_gradients(trial.case);
        let (recorded, batches) =
            match recorded.and_then(|recorded| Ok((recorded, self.recordings.batches(trial.case)?))) {
                Ok(both) => both,
                Err(reason) => return Outcome::untested(reason),
            };
        let mut others = Vec::new();
        for (number, inputs) in batches.into_iter().enumerate().skip(1) {
            let answer = self.implementation.run(&Case { inputs, ..base.case.clone() });
            if answer.status != Status::Ok {
                return Outcome::error(format!("batch {number}: {}", answer.reason));
            }
            if let Err(reason) = complete(trial.case, &answer) {
                return Outcome::error(format!("batch {number}: {reason}"));
            }
            others.push(answer.outputs);
        }
        let answers: Vec<_> = std::iter::once(&base.answer.outputs).chain(&others).collect();
        let (verdict, measure) = match recorded.measure(&answers, &bound) {
            Ok(measure) => (Verdict::Pass, measure),
            Err((evidence, measure)) => (Verdict::Fail(evidence), measure),
        };
        Outcome { gradient: Some(measure), ..Outcome::of(verdict) }
    }

    /// Every setting of one axis against the base answer, bit for bit.
    fn invariance(&self, trial: &Trial, base: &Base) -> Outcome {
        let axis = trial.axis.expect("an invariance trial has an axis");
        let machine = match axis.name {
            "budget" => match self.smallest_budget(&base.case) {
                Ok(smallest_budget) => &Machine { smallest_budget, ..self.machine.clone() },
                Err(reason) => return Outcome::error(reason),
            },
            _ => self.machine,
        };
        let mut variants = (axis.variants)(&base.case, machine);
        let alone = |setting: &String| machine.alone.contains(&(axis.name.to_string(), setting.clone()));
        if !variants.is_empty() && machine.alone.iter().any(|(name, _)| name == axis.name) {
            let all: Vec<String> = variants.iter().map(|variant| variant.setting.clone()).collect();
            variants.retain(|variant| alone(&variant.setting));
            if variants.is_empty() {
                let reason = format!(
                    "axis {}: of the settings that are asked this case has none; it has {}",
                    axis.name,
                    all.join(", ")
                );
                return Outcome::of(Verdict::Unsupported { reason });
            }
        }
        if variants.is_empty() {
            let why = match axis.name {
                "threads" if machine.threads.is_empty() => "its list names no thread counts that it can be asked for",
                "isa" if machine.isas.len() < 2 => "it has one instruction set here",
                "layout" if machine.layouts.is_empty() => "its list names no layouts that it can be asked for",
                "budget" if machine.smallest_budget.is_none() => {
                    "it offers no budget, or its answer does not say that it kept to one (`budget`)"
                }
                _ => "this case has nothing to vary",
            };
            return Outcome::of(Verdict::Unsupported { reason: format!("axis {}: {why}", axis.name) });
        }
        let settings = variants.len();
        let mut failed: Vec<(String, Box<Evidence>)> = Vec::new();
        for variant in variants {
            if let Err(reason) = another_question(axis, &base.case, &variant) {
                return Outcome { setting: Some(variant.setting), ..Outcome::error(reason) };
            }
            if let Way::Soak = variant.way {
                return self.soak(trial, base);
            }
            let mut answer = match self.ask(&variant) {
                Ok(answer) => answer,
                Err(reason) => {
                    let reason = format!("{} = {}: {reason}", axis.name, variant.setting);
                    return Outcome { setting: Some(variant.setting), ..Outcome::of(Verdict::Unsupported { reason }) };
                }
            };
            // A form of the op that only an axis asks for is not required.
            let own_form =
                variant.case().op == base.case.op && !matches!(variant.way, Way::Parts(_, Join::Tree { .. }));
            if answer.status == Status::Unsupported && !own_form {
                let reason = format!("{} = {}: {}", axis.name, variant.setting, answer.reason);
                return Outcome { setting: Some(variant.setting), ..Outcome::of(Verdict::Unsupported { reason }) };
            }
            if variant.case().op == axis::PACKED {
                answer.outputs.values_mut().for_each(|tensor| *tensor = tensor.with_leading_axis());
            }
            if answer.status != Status::Ok {
                let outcome = Outcome::error(format!("{}: {}", variant.setting, answer.reason));
                return Outcome { setting: Some(variant.setting), ..outcome };
            }
            if let Some(layout) = variant.case().config.layout.as_ref().filter(|layout| **layout != answer.layout) {
                let reason = format!("{layout}: the answer does not say that the inputs were laid out so (`layout`)");
                return Outcome { setting: Some(variant.setting), ..Outcome::error(reason) };
            }
            let asked = &variant.case().config;
            for (name, asked, said) in
                [("threads", asked.threads, answer.threads), ("budget", asked.budget, answer.budget)]
            {
                if asked.is_some() && asked != said {
                    let setting = &variant.setting;
                    let reason = format!("{name} = {setting}: the answer does not say that it kept to it (`{name}`)");
                    return Outcome { setting: Some(setting.clone()), ..Outcome::of(Verdict::Unsupported { reason }) };
                }
            }
            if let Err(reason) = complete(trial.case, &answer) {
                return Outcome {
                    setting: Some(variant.setting.clone()),
                    ..Outcome::error(format!("{}: {reason}", variant.setting))
                };
            }
            let spec = trial.case.spec();
            let differs = spec.outputs.iter().find_map(|output| {
                let (expected, found) = (&base.answer.outputs[output.name], &answer.outputs[output.name]);
                variant.compare(spec, output, &base.case, expected, found).err()
            });
            failed.extend(differs.map(|evidence| (variant.setting, evidence)));
        }
        let different = failed.len();
        match failed.into_iter().next() {
            None => Outcome { setting: Some(format!("{settings} settings")), ..Outcome::of(Verdict::Pass) },
            Some((setting, mut evidence)) => {
                evidence.message = format!(
                    "{} = {setting}: {}; {different} of {settings} settings differ",
                    axis.name, evidence.message
                );
                Outcome { setting: Some(setting), ..Outcome::of(Verdict::Fail(evidence)) }
            }
        }
    }

    /// The answer to a variant, however it is asked.
    ///
    /// # Errors
    /// Why the implementation cannot be asked so.
    fn ask(&self, variant: &Variant) -> Result<Answer, String> {
        match &variant.way {
            Way::Plain | Way::Soak | Way::Parts(..) => Ok(variant.answer(|case| self.implementation.run(case))),
            Way::Fresh => self.implementation.fresh(variant.case()).ok_or("it cannot be started anew here".to_string()),
            Way::After(before) => {
                let cases: Vec<&Case> = before.iter().chain([variant.case()]).collect();
                Ok(self.implementation.in_order(&cases).pop().expect("as many answers as cases"))
            }
        }
    }

    /// The case over and over: every answer against the base's, and the memory of the process that gives them.
    fn soak(&self, trial: &Trial, base: &Base) -> Outcome {
        let soak = &self.contract.soak;
        let (start, mut asked, mut resident, mut wrong) = (Instant::now(), 0, Vec::new(), None);
        let done = self.implementation.soak(&base.case, &mut |answer, memory| {
            asked += 1;
            let outputs = &base.answer.outputs;
            let same = outputs.iter().all(|(name, a)| answer.outputs.get(name).is_some_and(|b| a.same_bits(b)));
            if !same || outputs.len() != answer.outputs.len() {
                wrong = Some(answer);
            } else if soak.looks_after(asked) {
                resident.push(memory());
            }
            wrong.is_none() && asked < soak.requests && start.elapsed().as_secs_f64() < soak.patience
        });
        let unsupported = |reason: String| Outcome::of(Verdict::Unsupported { reason });
        if !done {
            return unsupported("it has no process of its own here that could be watched".into());
        }
        if let Some(answer) = wrong {
            let at = format!("request {asked}");
            if answer.status != Status::Ok {
                return Outcome { setting: Some(at.clone()), ..Outcome::error(format!("{at}: {}", answer.reason)) };
            }
            if let Err(reason) = complete(trial.case, &answer) {
                return Outcome { setting: Some(at.clone()), ..Outcome::error(format!("{at}: {reason}")) };
            }
            let mut evidence = differs(trial, &base.answer, &answer).expect("some bits are others");
            evidence.message = format!("soak: the answer to {at} of one process: {}", evidence.message);
            return Outcome { setting: Some(at), ..Outcome::of(Verdict::Fail(evidence)) };
        }
        if asked < soak.requests {
            return unsupported(format!("it does not answer {} requests within {} s", soak.requests, soak.patience));
        }
        let Some(resident) = resident.into_iter().collect::<Option<Vec<u64>>>() else {
            return unsupported("memory was not checked: this system does not tell what a process holds".into());
        };
        let growth = soak.growth_of(&resident);
        let setting = Some(format!("{} requests", soak.requests));
        if growth <= soak.growth {
            return Outcome { setting, ..Outcome::of(Verdict::Pass) };
        }
        let kib = |bytes: u64| bytes >> 10;
        let (first, last) = (resident[0], resident[resident.len() - 1]);
        let message = format!(
            "soak: every request adds {growth:.0} bytes of memory, {} are allowed: {} KiB after {} requests, {} KiB after {}",
            soak.growth,
            kib(first),
            soak.warm_up,
            kib(last),
            soak.requests
        );
        let (expected, found) = (format!("at most {} bytes a request", soak.growth), format!("{growth:.0} bytes"));
        let total = soak.requests - soak.warm_up;
        let evidence =
            Evidence { message, output: "memory".into(), expected, found, count: total, total, ..Evidence::default() };
        Outcome { setting, ..Outcome::of(Verdict::Fail(Box::new(evidence))) }
    }

    /// The least budget under which `case` is answered, as the implementation tells when it refuses a smaller one; `None`
    /// where the case is not offered.
    fn smallest_budget(&self, case: &Case) -> Result<Option<usize>, String> {
        let mut case = case.clone();
        let mut budget = 0;
        // A model names the smallest plan of one op after the other.
        loop {
            case.config.budget = Some(budget);
            let answer = self.implementation.run(&case);
            match (answer.status, answer.smallest_budget) {
                (Status::Ok, _) => return Ok(answer.budget.filter(|said| *said == budget)),
                (Status::Unsupported, _) => return Ok(None),
                (Status::Error, Some(smallest)) if smallest > budget => budget = smallest,
                (Status::Error, _) => return Err(format!("with a budget of {budget} bytes: {}", answer.reason)),
            }
        }
    }

    /// The blessed outputs of the case, bit for bit; for a vector that the store does not have, the outputs in its file.
    fn golden(&self, trial: &Trial, base: &Base) -> Outcome {
        if let Some(name) = self.contract.same_as(self.implementation.name(), trial.case) {
            return match self.references.iter().find(|reference| reference.name() == name) {
                Some(reference) => self.same_as(trial, base, *reference),
                None => Outcome::untested(format!("{name}, whose bits it must have, is not at hand")),
            };
        }
        let blessed = self.goldens.is_some_and(|store| store.find(&trial.case.name).is_some());
        if let (Some(vector), false) = (&trial.case.vector, blessed) {
            return match self.recordings.expected(trial.case, vector) {
                Ok(outputs) => Outcome::of(match differs(trial, &Answer::ok("", outputs), &base.answer) {
                    None => Verdict::Pass,
                    Some(mut evidence) => {
                        evidence.message = format!("vectors/{vector}.safetensors: {}", evidence.message);
                        Verdict::Fail(evidence)
                    }
                }),
                Err(reason) => Outcome::untested(reason),
            };
        }
        let Some(store) = self.goldens else {
            return Outcome::untested("no goldens at hand; run inside the repository or give --root");
        };
        match store.verify(&trial.case.name, &base.answer.outputs) {
            Verified::Match => Outcome::of(Verdict::Pass),
            Verified::Mismatch(evidence) => Outcome::of(Verdict::Fail(evidence)),
            Verified::Damaged(damage) => Outcome::error(damage.to_string()),
            Verified::Absent => Outcome::untested(
                "not among the goldens; `samebits goldens record`, or `samebits bless` in the repository, adds it",
            ),
        }
    }

    /// Every output against that of `reference`, bit for bit.
    fn same_as(&self, trial: &Trial, base: &Base, reference: &dyn Implementation) -> Outcome {
        let answer = reference.run(&base.case);
        if answer.status != Status::Ok {
            return Outcome::untested(format!("{} does not answer: {}", reference.name(), answer.reason));
        }
        if let Err(reason) = complete(trial.case, &answer) {
            return Outcome::error(format!("{}: {reason}", reference.name()));
        }
        let verdict = differs(trial, &answer, &base.answer).map_or(Verdict::Pass, |mut evidence| {
            evidence.message = format!("same_as {}: {}", reference.name(), evidence.message);
            Verdict::Fail(evidence)
        });
        Outcome { setting: Some(format!("same_as {}", reference.name())), ..Outcome::of(verdict) }
    }

    fn record(&self, trial: &Trial, outcome: Outcome) -> Record {
        record_of(self.contract, self.rows, self.implementation.name(), trial, outcome)
    }
}

/// The record of a trial; a waiver of its row covers a failure.
pub(crate) fn record_of(
    contract: &Contract,
    rows: &str,
    implementation: &str,
    trial: &Trial,
    outcome: Outcome,
) -> Record {
    let mut verdict = outcome.verdict;
    if let (Verdict::Fail(_), Some(waiver)) = (&verdict, &trial.row.waive)
        && waiver.covers(trial.judgment, trial.axis.map(|axis| axis.name))
    {
        verdict = Verdict::Waived { reason: waiver.reason.clone() };
    }
    if let Verdict::Fail(evidence) = &mut verdict {
        let axis = trial.axis.map(|axis| axis.name);
        let covers = |waiver: &&Exception| waiver.covers(implementation, &trial.case.name, trial.judgment, axis);
        let covering = || contract.exceptions.iter().filter(covers);
        if let Some(waiver) = covering().find(|waiver| !waiver.expired) {
            verdict = Verdict::Waived { reason: waiver.text() };
        } else if let Some(waiver) = covering().next() {
            let (place, owner, expires) = (&waiver.place, &waiver.owner, &waiver.expires);
            evidence.message += &format!("; the waiver {place} of {owner} expired on {expires}");
        }
    }
    Record {
        schema: SCHEMA,
        contract: contract.digest().to_string(),
        rows: rows.to_string(),
        implementation: implementation.to_string(),
        op: trial.case.op.clone(),
        class: trial.case.spec().class.name().to_string(),
        dtype: trial.case.dtype,
        out: trial.case.out,
        case: trial.case.name.clone(),
        judgment: trial.judgment,
        axis: trial.axis.map(|axis| axis.name.to_string()),
        setting: outcome.setting,
        kernel: String::new(),
        plan: String::new(),
        ledger: BTreeMap::new(),
        verdict,
        measure: outcome.measure,
        chain: outcome.chain,
        gradient: outcome.gradient,
        again: None,
        seconds: 0.0,
    }
}

/// A setting that asks exactly what the base asked shows nothing, unless asking again is the point.
fn another_question(axis: &Axis, base: &Case, variant: &Variant) -> Result<(), String> {
    let case = variant.case();
    let same_inputs = || {
        base.inputs.len() == case.inputs.len()
            && base.inputs.iter().all(|(name, a)| case.inputs.get(name).is_some_and(|b| a.same_bits(b)))
    };
    let same = || base.op == case.op && base.params == case.params && base.config == case.config && same_inputs();
    let may_be_same = !matches!(variant.way, Way::Plain | Way::Parts(..)) || axis.name == "repeat";
    if variant.rows.is_empty() || (!may_be_same && same()) {
        return Err(format!("{} = {}: asks what the base asks; nothing is varied", axis.name, variant.setting));
    }
    Ok(())
}

/// Why sameness of the answer would say nothing: an output holds one value over and over where the oracle's does not.
fn constant(trial: &Trial, base: &Base, oracle: &mut Option<Result<References, String>>) -> Option<String> {
    // What survives of such sums is a matter of their order, and a right one may leave the same of each.
    if trial.case.fill == Fill::Power {
        return None;
    }
    let one_value = |tensor: &Tensor| {
        let elements = tensor.elements();
        (1..tensor.len()).all(|i| elements.bits(i) == elements.bits(0))
    };
    for output in trial.case.spec().outputs {
        let found = &base.answer.outputs[output.name];
        if found.len() < 2 || !one_value(found) {
            continue;
        }
        let expected = match trial.case.spec().class {
            Class::Chain => false,
            _ => {
                let oracle =
                    oracle.get_or_insert_with(|| trial.case.spec().oracle(&base.case).map_err(|e| e.to_string()));
                let dtype = trial.case.spec().output_dtype(output, trial.case.out);
                oracle.as_ref().map_or(true, |references| one_value(&references[output.name].rounded(dtype)))
            }
        };
        if !expected {
            let elements = found.len();
            return Some(format!(
                "`{}` is constant over {elements} elements; that it is always the same says nothing",
                output.name
            ));
        }
    }
    None
}

/// The first difference between the outputs of two answers to one case, row by row.
fn differs(trial: &Trial, expected: &Answer, found: &Answer) -> Option<Box<Evidence>> {
    let spec = trial.case.spec();
    spec.outputs.iter().find_map(|output| {
        let (expected, found) = (&expected.outputs[output.name], &found.outputs[output.name]);
        let rows = found.shape()[..output.rows.min(found.shape().len())].iter().product();
        let all: Vec<(usize, usize)> = (0..rows).map(|row| (row, row)).collect();
        compare::bits(output.name, output.rows, expected, found, &all).err()
    })
}

/// Every output the specification names is there, and nothing else.
fn complete(case: &CaseSpec, answer: &Answer) -> Result<(), String> {
    let outputs = case.spec().outputs;
    if let Some(missing) = outputs.iter().find(|output| !answer.outputs.contains_key(output.name)) {
        return Err(format!("the answer lacks `{}`", missing.name));
    }
    match answer.outputs.keys().find(|name| !outputs.iter().any(|output| output.name == name.as_str())) {
        Some(extra) => Err(format!("the answer has `{extra}`, which {} does not return", case.op)),
        None => Ok(()),
    }
}

/// Judges the answer to a call that is no case of the contract against the f64 oracle, within the bounds of its op's class in
/// the default row set. Shares and percentiles are left out: they say nothing of a few elements. Where f32 may overflow on the
/// way to every element, nothing is claimed, and the verdict is `unsupported`.
pub fn hold(contract: &Contract, implementation: &dyn Implementation, case: &Case) -> Verdict {
    let error = |reason: String| Verdict::Error { reason };
    let Some(spec) = spec::of(&case.op, &case.params) else {
        return error(format!("op `{}`: no oracle knows it", case.op));
    };
    let references = match spec.oracle(case) {
        Ok(references) => references,
        Err(e) => return error(format!("the oracle refuses the call: {}", e.reason())),
    };
    let answer = implementation.run(case);
    match answer.status {
        Status::Ok => {}
        Status::Unsupported => return Verdict::Unsupported { reason: answer.reason },
        Status::Error => return error(answer.reason),
    }
    let dtype = spec.dtype(case).unwrap_or(case.out);
    let mut compared = false;
    for output in spec.outputs {
        if references[output.name].condition.iter().all(|condition| *condition == f64::INFINITY) {
            continue;
        }
        compared = true;
        let Some(found) = answer.outputs.get(output.name) else {
            return error(format!("the answer lacks `{}`", output.name));
        };
        let out = spec.output_dtype(output, case.out);
        let (rows, narrow) = (contract.default_rows(), table::narrower(dtype, out));
        let threshold = contract.threshold(rows, spec.class, spec.direction(), narrow, Judgment::Accuracy);
        // Integers have none: they are right or wrong.
        let mut bound = threshold.map_or(Bound::Bits, |threshold| threshold.bound);
        if let Bound::Ulp { p99_ulp, correctly_rounded, .. } = &mut bound {
            (*p99_ulp, *correctly_rounded) = (None, None);
        }
        let (_, evidence) = compare::accuracy(output.name, out, found, &references[output.name], &bound);
        if let Some(evidence) = evidence {
            return Verdict::Fail(evidence);
        }
    }
    match compared {
        true => Verdict::Pass,
        false => {
            Verdict::Unsupported { reason: "f32 may overflow on the way: nothing is claimed of the outputs".into() }
        }
    }
}
