//! Gradients of a whole model: sequences in logical order, cut into groups, ranks and micro-batches.
//!
//! Which sequences are a step's, their order, which of their tokens count, and how many groups they are dealt to is
//! what the result depends on ([`Batch`]). How they are run ([`GradientRun`]) moves no bit of it: the rows of a
//! micro-batch see each other in attention alone, where they are told apart by sequence, and sums over tokens go on
//! from one micro-batch to the next. Padding is rows of sequences that nobody asked for and that no mask lets into a
//! sum.

mod arranged;
mod loss;

use crate::backward::{Backward, Block};
use crate::decoder::{Decoder, Runner};
use crate::experts::StepExperts;
use crate::layers::branch::{Place, Saved, Stream};
use crate::layers::head::Logprobs;
use crate::pass::Pass;
use crate::sampling::Sampled;
use crate::state::States;
use crate::step::{Rows, SequenceInput, Step, StepInputs};
use crate::sums::{Partial, Sums, Tree, overflows};
use crate::trace::{TraceHook, all_finite};
use crate::{Config, Flips, Model, ModelError, PAGE_SIZE, PageOrder, Probe, Seen, Tripwire};
use arranged::{Arranged, PADDING};
use loss::{check_clip, check_drawn, check_loss, entropy_term, loss};
use samebits_ops::{
    Attributes, Backend, Calls, Cpu, MOST_GROUPS, Prepared, RopeTable, Tensor, TensorMut, TensorRef, sequences_of_group,
};
use std::collections::BTreeMap;
use std::ops::Range;
use std::str::FromStr;
use std::sync::Arc;

/// The sequences of a step, in logical order.
pub struct Batch<'a> {
    /// Tokens of each sequence.
    pub sequences: &'a [Vec<i32>],
    /// For each of them 1 where its log-probability, given those before it, counts, else 0; 0 for the first of a
    /// sequence.
    pub count: &'a [Vec<i32>],
    /// What is made of the log-probabilities.
    pub loss: Loss<'a>,
    /// What log-probabilities and entropies are those of: how the texts were sampled.
    pub sampled: Sampled<'a>,
    /// How many groups the sequences are dealt to: a power of two.
    pub groups: usize,
}

/// What is made of log-probabilities.
#[derive(Clone, Copy)]
pub enum Loss<'a> {
    /// Minus their mean over all tokens that count.
    Nll,
    /// The clipped policy gradient, its mean over all tokens that count.
    Policy {
        /// By sequence.
        advantages: &'a [f32],
        /// Log-probabilities when they were sampled, by sequence and token.
        old_logprob: &'a [Vec<f32>],
        /// Ratios count as at least 1 - low.
        low: f64,
        /// Ratios count as at most 1 + high.
        high: f64,
        /// So many times the mean entropy of what tokens that count were drawn from is subtracted.
        entropy: f64,
    },
}

impl Loss<'_> {
    /// How often the mean entropy is subtracted.
    fn entropy(&self) -> f64 {
        match *self {
            Loss::Nll => 0.0,
            Loss::Policy { entropy, .. } => entropy,
        }
    }
}

/// How gradients are made; nothing here may move a bit of them.
#[derive(Clone, Copy, Debug)]
pub struct GradientRun {
    /// Sequences that share a forward and a reverse pass.
    pub micro_batch: usize,
    /// Rows of padding.
    pub padding: Padding,
    /// Whether sequences stand one behind the other, and not each in rows of its own that are as many for all.
    pub pack: bool,
    /// How many ranks the groups are dealt to; they run one after the other.
    pub ranks: usize,
    /// Whether layers are run again for their reverse pass, so that their activations need not be kept.
    pub recompute: bool,
    /// Whether what is made may be NaN or infinite; else that is an error that says where it began.
    pub allow_nonfinite: bool,
}

impl GradientRun {
    /// The micro-batches of a group's sequences.
    fn parts(&self, group: Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
        let (end, size) = (group.end, self.micro_batch);
        group.step_by(size).map(move |first| first..end.min(first.saturating_add(size)))
    }
}

impl Default for GradientRun {
    fn default() -> GradientRun {
        let (micro_batch, padding, ranks) = (1, Padding::None, 1);
        GradientRun { micro_batch, padding, pack: false, ranks, recompute: false, allow_nonfinite: false }
    }
}

/// Rows of padding, whose embeddings are NaN: of each sequence, or once where sequences are packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Padding {
    /// None.
    None,
    /// Before the tokens.
    Left(usize),
    /// Behind them.
    Right(usize),
}

impl FromStr for Padding {
    type Err = ModelError;

    fn from_str(text: &str) -> Result<Padding, ModelError> {
        let number =
            |prefix: &str| text.strip_prefix(prefix).and_then(|n| n.parse().ok()).filter(|&n| n <= MOST_PADDING);
        match (text, number("left:"), number("right:")) {
            ("none", ..) => Ok(Padding::None),
            (_, Some(n), _) => Ok(Padding::Left(n)),
            (_, _, Some(n)) => Ok(Padding::Right(n)),
            _ => {
                let why = format!("`{text}` is not left:N, right:N or none, with N at most {MOST_PADDING}");
                Err(ModelError::input("padding", why))
            }
        }
    }
}

/// More padding is a mistake.
const MOST_PADDING: usize = u16::MAX as usize;

/// What [`Model::gradients`] makes.
pub struct Gradients {
    /// The gradient of every parameter ([`Model::trained`]) in f32, under its name in the folder.
    pub parameters: BTreeMap<String, Tensor>,
    /// The loss.
    pub loss: f32,
    /// What each sequence adds to it before it is divided.
    pub per_sequence: Vec<f32>,
    /// The log-probability of each token of each sequence as it was sampled, +0 for the first ones.
    pub logprob: Vec<Vec<f32>>,
    /// Of each sequence whose experts were recorded, where the routers choose others.
    pub flips: Vec<Option<Flips>>,
}

impl Model {
    /// The loss of a batch and the gradient of every parameter; `progress` is told how many sequences are done. `probe` is
    /// shown what is computed for every micro-batch, forward and back, padding left out, and then the gradients of all
    /// parameters; what it changes is gone on with.
    ///
    /// # Errors
    /// A batch without tokens that count or whose parts do not fit each other, tokens outside the vocabulary, more tokens
    /// than the model has positions, groups that are no power of two or that the ranks do not divide, numbers that are
    /// not finite; a model on a device; too little memory; [`ModelError::NotFinite`] where what is made is not finite and need be.
    pub fn gradients(
        &self,
        cpu: &Cpu,
        batch: &Batch,
        run: &GradientRun,
        probe: Option<&mut dyn Probe>,
        progress: impl FnMut(usize),
    ) -> Result<Gradients, ModelError> {
        if self.is_on_device() {
            return Err(ModelError::input("device", "gradients are made on the processor; load the model there"));
        }
        gradients(self.on(cpu).decoder, cpu, batch, run, (probe, None), progress)
    }
}

/// [`Model::gradients`] of a decoder on the processor. The first gradient of the shape of `spare` takes its place.
pub(crate) fn gradients(
    decoder: &Decoder,
    cpu: &Cpu,
    batch: &Batch,
    run: &GradientRun,
    (probe, spare): (Option<&mut dyn Probe>, Option<Tensor>),
    progress: impl FnMut(usize),
) -> Result<Gradients, ModelError> {
    let found = make(decoder, cpu, batch, run, (probe, spare, false), progress)?;
    let values = |gradient: &Tensor| all_finite(gradient.as_slice().expect("it is f32, and on the host"));
    let Some((name, _)) =
        found.parameters.iter().find(|(_, gradient)| !values(gradient)).filter(|_| !run.allow_nonfinite)
    else {
        return Ok(found);
    };
    // Once more without padding, which is NaN, and with a look at all that is computed.
    let (alone, mut tripwire) = (GradientRun { micro_batch: 1, padding: Padding::None, pack: false, ..*run }, Tripwire);
    let again = make(decoder, cpu, batch, &alone, (Some(&mut tripwire), None, true), |_| ());
    Err(again.err().map_or_else(|| overflows(name), |e| e.helped(decoder.dtype)))
}

/// [`gradients`]; with `looks` a probe is told of ops.
fn make(
    decoder: &Decoder,
    cpu: &Cpu,
    batch: &Batch,
    run: &GradientRun,
    (mut probe, mut spare, looks): (Option<&mut dyn Probe>, Option<Tensor>, bool),
    mut progress: impl FnMut(usize),
) -> Result<Gradients, ModelError> {
    let on = Runner { decoder, machine: cpu, cpu };
    let denominator = batch.check(&decoder.config, cpu, run)?;
    let (mut done, mut per_sequence, mut logprob, mut flips) = (0, Vec::new(), Vec::new(), Vec::new());
    let mut of_ranks = Tree::default();
    for rank in 0..run.ranks {
        let mut of_groups = Tree::default();
        for group in rank * batch.groups / run.ranks..(rank + 1) * batch.groups / run.ranks {
            let mut sums = Sums::new(spare.take());
            for part in run.parts(batch.group(group)) {
                done += part.len();
                let shown = Shown { probe: again(&mut probe), first: part.start, looks };
                let found = micro_batch(&on, batch, (part, denominator), run, shown, &mut sums)?;
                per_sequence.extend(found.0);
                logprob.extend(found.1.0);
                flips.extend(found.1.1);
                progress(done);
            }
            of_groups.push(cpu, sums.end(cpu)?)?;
        }
        of_ranks.push(cpu, of_groups.root())?;
    }
    let attributes = Attributes::new().with("groups", batch.groups).with("denominator", denominator);
    let mut loss = [0f32];
    let inputs = [("per_sequence", TensorRef::new(&per_sequence, &[per_sequence.len()])?)];
    cpu.call("batch_loss", attributes, &inputs, vec![("loss", TensorMut::new(&mut loss, &[1])?)])?;
    let mut parameters = of_ranks.root().finish(cpu, decoder.trained())?;
    if let Some(probe) = probe {
        for (name, gradient) in &mut parameters {
            let rows = if gradient.shape().len() > 1 { gradient.shape()[0] } else { 1 };
            let tokens: Vec<(usize, usize)> = (0..rows).map(|row| (0, row)).collect();
            let values = gradient.as_slice_mut::<f32>().expect("it is f32, and on the host");
            let (layer, op) = (None, None);
            probe.see(&mut Seen { layer, site: &format!("parameters.{name}"), op, tokens: &tokens, values })?;
        }
    }
    Ok(Gradients { parameters, loss: loss[0], per_sequence, logprob, flips })
}

impl Batch<'_> {
    /// The sequences of a group.
    fn group(&self, group: usize) -> Range<usize> {
        sequences_of_group(self.sequences.len(), self.groups, group)
    }

    /// Refuses what cannot be run; the number of tokens that count.
    pub(crate) fn check(&self, config: &Config, cpu: &Cpu, run: &GradientRun) -> Result<f64, ModelError> {
        let Batch { sequences, count, loss, sampled, groups } = *self;
        let bad = |what: &'static str, why: String| Err(ModelError::input(what, why));
        check_groups(groups, run.ranks)?;
        check_sequences(config, sequences, run)?;
        check_lengths("mask", sequences, count)?;
        sampled.check(config, sequences, |b, t| count[b][t] == 1)?;
        for (b, count) in count.iter().enumerate() {
            if let Some(t) = count.iter().position(|c| ![0, 1].contains(c)) {
                return bad("mask", format!("element [{b}, {t}] is {}; it must be 0 or 1", count[t]));
            }
            if count[0] != 0 {
                return bad(
                    "mask",
                    format!("element [{b}, 0] is 1; nothing stands before a first token, so it must be 0"),
                );
            }
        }
        if let Loss::Policy { advantages, old_logprob, low, high, entropy } = loss {
            check_clip(cpu, low, high)?;
            if !(entropy as f32).is_finite() {
                return bad("entropy", format!("its coefficient is {entropy}; it must be finite"));
            }
            if advantages.len() != sequences.len() {
                let why = format!("there are {}; give one for each of {} sequences", advantages.len(), sequences.len());
                return bad("advantages", why);
            }
            if let Some(b) = advantages.iter().position(|a| !a.is_finite()) {
                return bad("advantages", format!("element [{b}] is {}; it must be finite", advantages[b]));
            }
            check_lengths("old_logprob", sequences, old_logprob)?;
            for (b, (old, count)) in old_logprob.iter().zip(count).enumerate() {
                if let Some(t) = (0..old.len()).find(|&t| count[t] == 1 && !old[t].is_finite()) {
                    return bad("old_logprob", format!("element [{b}, {t}] is {}; it must be finite", old[t]));
                }
            }
        }
        match count.iter().flatten().filter(|&&c| c == 1).count() {
            0 => bad("mask", "no token counts, so there is no loss; mark at least one".into()),
            counted => Ok(counted as f64),
        }
    }
}

/// Refuses groups that ranks cannot hold.
fn check_groups(groups: usize, ranks: usize) -> Result<(), ModelError> {
    if !groups.is_power_of_two() || groups > MOST_GROUPS {
        let why = format!("there are {groups}; give a power of two, at most {MOST_GROUPS}");
        return Err(ModelError::input("groups", why));
    }
    if ranks == 0 || !groups.is_multiple_of(ranks) {
        let why = format!("{ranks} ranks do not divide {groups} groups; each must hold as many");
        return Err(ModelError::input("ranks", why));
    }
    Ok(())
}

/// Refuses sequences that cannot be run.
fn check_sequences(config: &Config, sequences: &[Vec<i32>], run: &GradientRun) -> Result<(), ModelError> {
    if run.micro_batch == 0 {
        return Err(ModelError::input("micro batch", "it has no sequence; give at least 1"));
    }
    if let Padding::Left(rows) | Padding::Right(rows) = run.padding
        && rows > MOST_PADDING
    {
        return Err(ModelError::input("padding", format!("is {rows} rows; give at most {MOST_PADDING}")));
    }
    if sequences.is_empty() || sequences.iter().any(Vec::is_empty) {
        let why = "a sequence has none, or there is no sequence; give at least one token";
        return Err(ModelError::input("tokens", why));
    }
    sequences.iter().enumerate().try_for_each(|(b, tokens)| {
        config.check_tokens("tokens", tokens, tokens.len()).map_err(|e| match e {
            ModelError::Input { what, why } => ModelError::input(what, format!("sequence {b}: {why}")),
            e => e,
        })
    })
}

fn check_lengths<T>(what: &'static str, sequences: &[Vec<i32>], given: &[Vec<T>]) -> Result<(), ModelError> {
    if given.len() == sequences.len() && given.iter().zip(sequences).all(|(a, b)| a.len() == b.len()) {
        return Ok(());
    }
    Err(ModelError::input(what, "it must have an element for each token"))
}

/// The same probe for a while.
fn again<'s>(probe: &'s mut Option<&mut dyn Probe>) -> Option<&'s mut dyn Probe> {
    match probe {
        Some(probe) => Some(&mut **probe),
        None => None,
    }
}

/// Makes the rows of padding NaN where they enter the model, and shows a probe all others.
struct Shown<'p> {
    probe: Option<&'p mut dyn Probe>,
    /// The number of the first sequence of the micro-batch.
    first: usize,
    /// Whether it is told of ops.
    looks: bool,
}

impl Probe for Shown<'_> {
    fn see(&mut self, seen: &mut Seen) -> Result<(), ModelError> {
        let width = (seen.values.len() / seen.tokens.len().max(1)).max(1);
        let rows = || seen.tokens.iter().enumerate();
        if seen.site == "embed" {
            for (row, _) in rows().filter(|(_, (label, _))| *label == PADDING) {
                seen.values[row * width..][..width].fill(f32::NAN);
            }
        }
        let Some(probe) = &mut self.probe else { return Ok(()) };
        let there: Vec<usize> = rows().filter(|(_, (label, _))| *label != PADDING).map(|(row, _)| row).collect();
        let number = |&row: &usize| (self.first + seen.tokens[row].0, seen.tokens[row].1);
        let tokens: Vec<(usize, usize)> = there.iter().map(number).collect();
        let mut values: Vec<f32> =
            there.iter().flat_map(|&row| &seen.values[row * width..][..width]).copied().collect();
        let Seen { layer, site, op, .. } = *seen;
        probe.see(&mut Seen { layer, site, op, tokens: &tokens, values: &mut values })?;
        for (&row, values) in there.iter().zip(values.chunks_exact(width)) {
            seen.values[row * width..][..width].copy_from_slice(values);
        }
        Ok(())
    }
}

/// Of each sequence the log-probabilities of its tokens, and where its experts were recorded, where the routers choose others.
pub type OfTokens = (Vec<Vec<f32>>, Vec<Option<Flips>>);

/// What each sequence adds to the loss, and the rest of it.
type OfSequences = (Vec<f32>, OfTokens);

/// Runs some sequences forward and back.
/// What they add to the gradients goes into `sums`.
fn micro_batch(
    on: &Runner,
    batch: &Batch,
    (part, denominator): (Range<usize>, f64),
    run: &GradientRun,
    mut shown: Shown,
    sums: &mut Sums,
) -> Result<OfSequences, ModelError> {
    let with_entropy = batch.loss.entropy() != 0.0;
    let (sequences, keeps) = (&batch.sequences[part.clone()], [true, with_entropy]);
    let sampled = batch.sampled.of(part.clone());
    let mut forward = forward(on, sequences, sampled, run, &mut shown, keeps)?;
    let (logprob, flips) = (std::mem::take(&mut forward.logprob), std::mem::take(&mut forward.flips));
    let counts = |b: usize, t: usize| batch.count[part.start + b][t] == 1;
    check_drawn(sampled, part.start, &logprob, counts)?;
    let (mut per_sequence, dlogprob) = loss(on.cpu, batch, part.clone(), &logprob, denominator)?;
    if !run.allow_nonfinite {
        check_loss(batch, part.start, &logprob, &per_sequence, &dlogprob)?;
    }
    let mut dentropy = None;
    if let Some(entropy) = forward.entropy.take() {
        let (term, gradients) = entropy_term(on.cpu, batch, part, &entropy, denominator)?;
        let (a, n) = (per_sequence.clone(), [term.len()]);
        let inputs = [("a", TensorRef::new(&a, &n)?), ("b", TensorRef::new(&term, &n)?)];
        on.cpu.call("add", Attributes::new(), &inputs, vec![("y", TensorMut::new(&mut per_sequence, &n)?)])?;
        dentropy = Some(gradients);
    }
    reverse(on, forward, (&dlogprob, dentropy.as_deref()), &mut shown, sums)?;
    Ok((per_sequence, (logprob, flips)))
}

/// A forward of some sequences, and what its reverse pass reads.
struct MicroBatch {
    /// The log-probability of each token of each sequence, +0 for the first ones.
    logprob: Vec<Vec<f32>>,
    /// Where it was asked for, the entropy of what each of them was drawn from.
    entropy: Option<Vec<Vec<f32>>>,
    /// Of each sequence whose experts were recorded, where its own are others.
    flips: Vec<Option<Flips>>,
    /// The experts of its rows, where any were recorded.
    experts: Option<StepExperts>,
    blocks: Vec<Block>,
    /// Of each row: 0 for padding, the token that follows, and its own.
    mask: Vec<i32>,
    targets: Vec<i32>,
    tokens: Vec<i32>,
    /// The first row of each sequence.
    starts: Vec<usize>,
    step: Step,
    inputs: StepInputs,
    states: States,
    stream: Stream,
    /// What the first layer has left for all others.
    carried: Option<Tensor>,
    of_rows: Logprobs,
    /// What enters each block, where blocks are run again; else what they saved.
    entered: Vec<Entered>,
    saved: Vec<Vec<Saved>>,
}

/// The stream as it enters a block.
struct Entered {
    x: Tensor,
    y: Tensor,
    added_by: Option<(usize, Place)>,
}

/// Runs some sequences forward, to the log-probabilities of how they were sampled; `keep`: a reverse pass will follow; `with_entropy`: and it will have their gradients.
fn forward(
    on: &Runner,
    sequences: &[Vec<i32>],
    sampled: Sampled,
    run: &GradientRun,
    shown: &mut Shown,
    [keep, with_entropy]: [bool; 2],
) -> Result<MicroBatch, ModelError> {
    let (decoder, c) = (on.decoder, on.config());
    let adapters = decoder.adapters.trained(&sampled.adapters(), sequences.len(), keep)?;
    let lengths: Vec<usize> = sequences.iter().map(Vec::len).collect();
    let arranged = Arranged::new(&lengths, run);
    let mut states = on.states(PAGE_SIZE, PageOrder::Ascending)?;
    let filler = vec![0; arranged.pieces.iter().map(|&(_, length)| length).max().unwrap_or(0)];
    let given = given(&arranged.pieces, sequences, &filler, &adapters, &mut states);
    let (mask, targets, starts) = arranged.rows(sequences);
    let step = Step::of(on.machine, &given, &mut states)?;
    let inputs = StepInputs::new(on, &step, &given, &states, &step.positions(), Rows::All, None)?;

    let (is_seen, looks, first) = (shown.probe.is_some(), shown.looks, shown.first);
    let mut experts = arranged.experts(c, sampled);
    let mut hook = TraceHook { looks, experts: experts.as_mut(), ..TraceHook::of(Some(shown)) };
    let mut pass = pass(on, (&step, &inputs), &mut hook, keep && !run.recompute);
    let mut stream = decoder.embed(&mut pass)?;
    if !is_seen {
        pass.hook.probe = None;
    }
    let (mut entered, mut saved) = (Vec::new(), Vec::new());
    for i in 0..c.layers() {
        if keep && run.recompute {
            let (x, y) = (on.machine.upload(stream.x.view())?, on.machine.upload(stream.y.view())?);
            entered.push(Entered { x, y, added_by: stream.added_by });
        }
        saved.push(decoder.block(i, &mut pass, &mut states, &mut stream)?);
    }
    stream.add(&mut pass)?;
    decoder.last_norm(&mut pass, &mut stream)?;
    let stretches = (on.cpu, sampled.stretches(c, sequences, &arranged.pieces)?);
    let mut of_rows = decoder.head.logprob(&mut pass, &stream.a, &targets, stretches, with_entropy)?;
    pass.see("logprob", &mut of_rows.logprob)?;
    if let Some(entropy) = &mut of_rows.entropy {
        pass.see("entropy", entropy)?;
    }
    let by_token = |rows: &Tensor| arranged::by_token(rows, (&starts, &lengths));
    let (logprob, entropy) = (by_token(&of_rows.logprob), of_rows.entropy.as_ref().map(by_token));
    // What a rule leaves out is -inf.
    let is_ruled = matches!(sampled, Sampled::By(_));
    let is_bad = |v: &f32| !(v.is_finite() || is_ruled && *v == f32::NEG_INFINITY);
    let bad = logprob.iter().position(|logprob| logprob.iter().any(is_bad));
    if let Some(number) = bad.filter(|_| !run.allow_nonfinite && !looks) {
        return Err(why_not_finite(on, &sequences[number], sampled.of(number..number + 1), first + number));
    }
    let tokens = given.iter().flat_map(|input| input.tokens).copied().collect();
    let (blocks, carried) = (arranged.blocks, pass.carried.take());
    let flips =
        experts.as_ref().map_or(Vec::new(), |experts| arranged::flips(c, sampled, experts, (&starts, &lengths)));
    Ok(MicroBatch {
        logprob,
        entropy,
        flips,
        experts,
        blocks,
        mask,
        targets,
        tokens,
        starts,
        step,
        inputs,
        states,
        stream,
        carried,
        of_rows,
        entered,
        saved,
    })
}

/// The pieces of a forward as a step takes them. Rows of padding, whose tokens `filler` has, have the adapter of what stands before
/// them: they cut no product of others.
fn given<'t>(
    pieces: &[(usize, usize)],
    sequences: &'t [Vec<i32>],
    filler: &'t [i32],
    adapters: &[Option<usize>],
    states: &mut States,
) -> Vec<SequenceInput<'t>> {
    let mut adapter = adapters.first().copied().flatten();
    let input = |&(label, length): &(usize, usize)| {
        let sequence = states.open(length);
        if label == PADDING {
            return SequenceInput { sequence, label, tokens: &filler[..length], adapter };
        }
        adapter = adapters[label];
        SequenceInput { sequence, label, tokens: &sequences[label], adapter }
    };
    pieces.iter().map(input).collect()
}

/// Why a log-probability of a sequence is not finite: runs its forward again, alone, and looks at all that is computed.
fn why_not_finite(on: &Runner, sequence: &[i32], sampled: Sampled, number: usize) -> ModelError {
    let mut tripwire = Tripwire;
    let mut shown = Shown { probe: Some(&mut tripwire), first: number, looks: true };
    let (sequence, run) = ([sequence.to_vec()], GradientRun::default());
    let found = forward(on, &sequence, sampled, &run, &mut shown, [false, false]);
    let temperature = sampled.temperature();
    let unseen = || {
        let (place, why) =
            ("log-probabilities".into(), "they are not, and all behind them is: a probe changed it".into());
        ModelError::NotFinite { place, sequence: number, token: 0, why }
    };
    match found.err().unwrap_or_else(unseen) {
        // All before it was finite.
        ModelError::NotFinite { place, sequence, token, why }
            if place.contains("(site logprob)") && temperature != 1.0 =>
        {
            let why = format!("{why}; logits divided by a temperature of {temperature} leave f32: raise it");
            ModelError::NotFinite { place, sequence, token, why }
        }
        e => e.helped(on.decoder.dtype),
    }
}

/// Goes back through a forward from the gradients of the log-probability and, where there is one, of the entropy of each token
/// of each sequence.
fn reverse(
    on: &Runner,
    forward: MicroBatch,
    (dlogprob, dentropy): (&[Vec<f32>], Option<&[Vec<f32>]>),
    shown: &mut Shown,
    sums: &mut Sums,
) -> Result<(), ModelError> {
    let (decoder, c) = (on.decoder, on.config());
    let MicroBatch { blocks, mask, targets, tokens, starts, step, inputs, mut states, mut stream, of_rows, .. } =
        forward;
    let (mut entered, mut saved) = (forward.entered, forward.saved);
    let (is_seen, looks, mut experts) = (shown.probe.is_some(), shown.looks, forward.experts);
    // A block that is run again has the experts that it had.
    let experts = experts.as_mut();
    let mut hook = TraceHook { looks, experts, ..TraceHook::of(if is_seen { Some(shown) } else { None }) };
    let mut pass = pass(on, (&step, &inputs), &mut hook, !entered.is_empty());
    let by_row = |tokens: &[Vec<f32>]| {
        let mut rows = vec![0f32; mask.len()];
        for (&start, of_sequence) in starts.iter().zip(tokens) {
            rows[start..start + of_sequence.len() - 1].copy_from_slice(&of_sequence[1..]);
        }
        Tensor::new(rows, &[mask.len()])
    };
    let mut drows = by_row(dlogprob)?;
    pass.see("dlogprob", &mut drows)?;
    let mut dentropy = dentropy.map(by_row).transpose()?;
    if let Some(dentropy) = &mut dentropy {
        pass.see("dentropy", dentropy)?;
    }

    let of_processor =
        |angles: &Prepared| angles.get::<RopeTable>().expect("they are those of the processor").reversed();
    let angles: Vec<RopeTable> = inputs.angles.iter().map(of_processor).collect();
    pass.carried = forward.carried;
    let mut back = Backward::new(pass, on.cpu, (&angles, &mask, &blocks), sums);
    let da = decoder.head.logprob_backward(&mut back, &stream.a, &targets, &of_rows, (&drows, dentropy.as_ref()))?;
    let mut dx = decoder.last_norm_backward(&mut back, &stream.x, &da)?;
    for i in (0..c.layers()).rev() {
        let mut of_block = saved.pop().expect("every block was run");
        if let Some(Entered { x, y, added_by }) = entered.pop() {
            (stream.x, stream.y, stream.added_by) = (x, y, added_by);
            of_block = decoder.block(i, &mut back.pass, &mut states, &mut stream)?;
        }
        dx = decoder.block_backward(i, &mut back, of_block, dx)?;
    }
    decoder.embed_backward(&mut back, &tokens, dx)
}

fn pass<'a, 'p>(
    on: &Runner<'a>,
    of_step: (&'a Step, &'a StepInputs),
    hook: &'a mut TraceHook<'p>,
    keeps: bool,
) -> Pass<'a, 'p> {
    Pass::new((on.machine, on.decoder.dtype, &*on.decoder.adapters), of_step, hook, Calls::default(), keeps)
}

/// Log-probabilities by the forward of training, and what its reverse pass reads.
pub struct Forward {
    /// That of each token of each sequence, given those before it; +0 for the first ones.
    pub logprob: Vec<Vec<f32>>,
    /// Of each sequence whose experts were recorded, where the routers choose others.
    pub flips: Vec<Option<Flips>>,
    /// The weights that it ran with.
    decoder: Arc<Decoder>,
    /// The number of its first sequence.
    first: usize,
    parts: Vec<MicroBatch>,
}

/// The gradients of a logical batch while its sequences go by, some at a time: those of [`Model::gradients`], bit for
/// bit, with a loss that is made elsewhere.
pub struct Accumulator {
    sequences: usize,
    groups: usize,
    /// Those that are summed here.
    held: Range<usize>,
    /// The sequence that a forward begins with next, and a reverse pass.
    begun: usize,
    done: usize,
    sums: Sums,
    of_groups: Tree,
    /// Groups that have ended.
    ended: usize,
    /// Whether its sums need not be finite: what they are made of was not, or need not be.
    allow_nonfinite: bool,
}

impl Accumulator {
    /// For rank number `rank` of `ranks`, which are to have the groups of `sequences` sequences in equal parts. With one group
    /// the number of sequences need not be known.
    ///
    /// # Errors
    /// Groups that are no power of two or that the ranks do not divide; groups without a number of sequences.
    pub fn new(sequences: Option<usize>, groups: usize, rank: usize, ranks: usize) -> Result<Accumulator, ModelError> {
        check_groups(groups, ranks)?;
        if rank >= ranks {
            return Err(ModelError::input("rank", format!("is {rank} of {ranks}; they are counted from 0")));
        }
        if sequences.is_none() && groups > 1 {
            let why = format!("there are {groups}; say how many sequences the batch has, so that they can be dealt");
            return Err(ModelError::input("groups", why));
        }
        let sequences = sequences.unwrap_or(usize::MAX);
        let held = rank * groups / ranks..(rank + 1) * groups / ranks;
        let begun = sequences_of_group(sequences, groups, held.start).start;
        let (sums, of_groups, ended) = (Sums::default(), Tree::default(), held.start);
        let (done, allow_nonfinite) = (begun, false);
        Ok(Accumulator { sequences, groups, held, begun, done, sums, of_groups, ended, allow_nonfinite })
    }

    /// Log-probabilities of the next sequences, as they were sampled.
    ///
    /// # Errors
    /// Settings out of their range, or that leave out a token behind a prompt; a sequence without tokens, or more of them than there are; tokens outside the vocabulary; more tokens than the model
    /// has positions; a micro-batch of 0; a model on a device; too little memory.
    pub fn forward(
        &mut self,
        model: &Model,
        cpu: &Cpu,
        sequences: &[Vec<i32>],
        sampled: Sampled,
        run: &GradientRun,
    ) -> Result<Forward, ModelError> {
        let last = sequences_of_group(self.sequences, self.groups, self.held.end - 1).end;
        if sequences.len() > last - self.begun {
            let why = format!("there are {} after number {}; {last} were to come", sequences.len(), self.begun);
            return Err(ModelError::input("sequences", why));
        }
        let (mut of_groups, mut at) = (Vec::new(), 0);
        // A micro-batch has sequences of one group.
        for group in self.held.clone() {
            let end = sequences_of_group(self.sequences, self.groups, group).end;
            let to = end.saturating_sub(self.begun).min(sequences.len());
            of_groups.push(at..to);
            at = at.max(to);
        }
        let parts = model.micro_batches(cpu, sequences, sampled, of_groups, run, true)?;
        let logprob: Vec<Vec<f32>> = parts.iter().flat_map(|part| part.logprob.iter().cloned()).collect();
        if !run.allow_nonfinite {
            check_drawn(sampled, self.begun, &logprob, |_, _| true)?;
        }
        let flips = parts.iter().flat_map(|part| part.flips.iter().cloned()).collect();
        let forward = Forward { logprob, flips, decoder: model.decoder.clone(), first: self.begun, parts };
        self.allow_nonfinite |= run.allow_nonfinite;
        self.begun += sequences.len();
        Ok(forward)
    }

    /// Goes back through a forward, from the gradient of the log-probability of each of its tokens.
    ///
    /// # Errors
    /// A forward that is not the next one, gradients of another form; too little memory. What was summed is lost then.
    pub fn reverse(&mut self, cpu: &Cpu, forward: Forward, dlogprob: &[Vec<f32>]) -> Result<(), ModelError> {
        if forward.first != self.done {
            let why = format!(
                "number {} is gone back through, where number {} is the next; go back in the order of the batch",
                forward.first, self.done
            );
            return Err(ModelError::input("sequences", why));
        }
        let lengths = forward.logprob.iter().map(Vec::len);
        if !lengths.eq(dlogprob.iter().map(Vec::len)) {
            return Err(ModelError::input("dlogprob", "it must have an element for each token"));
        }
        self.allow_nonfinite |= !dlogprob.iter().all(|dlogprob| all_finite(dlogprob));
        let on = Runner { decoder: &forward.decoder, machine: cpu, cpu };
        let mut at = 0;
        for part in forward.parts {
            while self.done >= sequences_of_group(self.sequences, self.groups, self.ended).end {
                self.end_group(cpu)?;
            }
            let count = part.starts.len();
            let mut shown = Shown { probe: None, first: self.done, looks: false };
            reverse(&on, part, (&dlogprob[at..at + count], None), &mut shown, &mut self.sums)?;
            at += count;
            self.done += count;
        }
        Ok(())
    }

    fn end_group(&mut self, cpu: &Cpu) -> Result<(), ModelError> {
        self.of_groups.push(cpu, std::mem::take(&mut self.sums).end(cpu)?)?;
        self.ended += 1;
        Ok(())
    }

    /// What this rank has of the gradients.
    ///
    /// # Errors
    /// Sequences that have not been gone back through; sums that are not finite, although the log-probabilities and their
    /// gradients are; too little memory.
    pub fn partial(mut self, cpu: &Cpu) -> Result<Partial, ModelError> {
        let last = sequences_of_group(self.sequences, self.groups, self.held.end - 1).end;
        if self.done != self.begun || self.sequences < usize::MAX && self.done != last {
            let why = match self.done == self.begun {
                true => format!("{} of {last} have come; give all of them", self.done),
                false => format!("{} of {} have been gone back through; go back for all", self.done, self.begun),
            };
            return Err(ModelError::input("sequences", why));
        }
        while self.ended < self.held.end {
            self.end_group(cpu)?;
        }
        let root = self.of_groups.root();
        match root.not_finite().filter(|_| !self.allow_nonfinite) {
            Some(name) => Err(overflows(name)),
            None => Ok(Partial(root)),
        }
    }
}

impl Model {
    /// Log-probabilities of the tokens of some sequences, as they were sampled, by the forward of training, `run.micro_batch`
    /// of them at a time: of each sequence that of each token, given those before it; +0 for the first ones, and -inf for those
    /// that a rule leaves out. And where their experts were recorded, where the routers choose others.
    ///
    /// # Errors
    /// As [`Accumulator::forward`].
    pub fn logprobs(
        &self,
        cpu: &Cpu,
        sequences: &[Vec<i32>],
        sampled: Sampled,
        run: &GradientRun,
    ) -> Result<OfTokens, ModelError> {
        let all = std::iter::once(0..sequences.len());
        let found = self.micro_batches(cpu, sequences, sampled, all, run, false)?;
        let parts = found.into_iter().map(|part| (part.logprob, part.flips));
        let (logprob, flips): (Vec<_>, Vec<_>) = parts.unzip();
        Ok((logprob.concat(), flips.concat()))
    }

    /// Forwards over the sequences of some groups.
    fn micro_batches(
        &self,
        cpu: &Cpu,
        sequences: &[Vec<i32>],
        sampled: Sampled,
        groups: impl IntoIterator<Item = Range<usize>>,
        run: &GradientRun,
        keep: bool,
    ) -> Result<Vec<MicroBatch>, ModelError> {
        if self.is_on_device() {
            return Err(ModelError::input("device", "gradients are made on the processor; load the model there"));
        }
        let on = self.on(cpu);
        check_sequences(on.config(), sequences, run)?;
        sampled.check(on.config(), sequences, |_, _| true)?;
        let run_part = |part: Range<usize>| {
            let mut shown = Shown { probe: None, first: part.start, looks: false };
            forward(&on, &sequences[part.clone()], sampled.of(part), run, &mut shown, [keep, false])
        };
        groups.into_iter().flat_map(|group| run.parts(group)).map(run_part).collect()
    }
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;
    use crate::Precision;
    use crate::weights::Weights;
    use samebits_ops::DType;
    use std::path::Path;

    /// Runs of groups and of micro-batches, each of other rows: more than are a tile of logits, with padding before or
    /// behind them, in one row or not, once more for the reverse pass or not.
    pub(crate) fn how_rows_are_arranged_moves_no_bit() {
        let cpu = Cpu::best();
        let lengths = [40, 45, 1, 44, 39, 45, 45, 41];
        let sequences = lengths.map(|n| (0..n).map(|t| (n * 31 + t * 7) as i32 % 160).collect::<Vec<i32>>());
        let count = lengths.map(|n| (0..n).map(|t| i32::from(t % 3 > 0)).collect::<Vec<i32>>());
        let old_logprob = lengths.map(|n| (0..n).map(|t| t as f32 / -9.0).collect::<Vec<f32>>());
        let advantages = lengths.map(|n| n as f32 / 16.0 - 2.5);
        let policy =
            Loss::Policy { advantages: &advantages, old_logprob: &old_logprob, low: 0.75, high: 1.5, entropy: 0.0 };
        let mut entropy = policy;
        if let Loss::Policy { entropy, .. } = &mut entropy {
            *entropy = 0.25;
        }
        for (name, loss) in [("gemma2", Loss::Nll), ("qwen3", policy), ("qwen3", entropy), ("gemma2", entropy)] {
            let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/checkpoints").join(name);
            let model = Model::load(&dir, Precision::Bf16, &cpu).unwrap();
            let made = |groups: usize, run: GradientRun| {
                let batch = Batch { sequences: &sequences, count: &count, loss, sampled: Sampled::At(0.7), groups };
                let mut done = Vec::new();
                let found = model.gradients(&cpu, &batch, &run, None, |sequences| done.push(sequences)).unwrap();
                assert!(found.logprob.iter().map(Vec::len).eq(lengths) && found.per_sequence.len() == lengths.len());
                assert!(found.logprob.iter().all(|logprob| logprob[0] == 0.0) && found.loss.is_finite());
                let parameters = found.parameters.values().flat_map(|t| t.as_slice::<f32>().unwrap());
                let all = parameters.chain(&found.per_sequence).chain(found.logprob.iter().flatten());
                (all.chain([&found.loss]).map(|v| v.to_bits()).collect::<Vec<u32>>(), done)
            };
            let plain = GradientRun::default();
            assert!(!plain.pack && !plain.recompute);
            let (one, done) = made(1, plain);
            assert_eq!(done, [1, 2, 3, 4, 5, 6, 7, 8]);
            for (run, expected) in [
                (GradientRun { micro_batch: 8, ..plain }, &[8][..]),
                (GradientRun { micro_batch: 5, padding: Padding::Left(3), recompute: true, ..plain }, &[5, 8]),
                (GradientRun { micro_batch: 3, padding: Padding::Right(2), ..plain }, &[3, 6, 8]),
                (GradientRun { micro_batch: 7, padding: Padding::Right(4), pack: true, ..plain }, &[7, 8]),
                (
                    GradientRun { micro_batch: 4, padding: Padding::Left(1), pack: true, recompute: true, ..plain },
                    &[4, 8],
                ),
            ] {
                let (found, done) = made(1, run);
                assert!(found == one && done == expected, "{name} {run:?} {done:?}");
            }
            let (four, _) = made(4, plain);
            assert!(made(4, GradientRun { ranks: 2, micro_batch: 2, ..plain }).0 == four, "{name}");
        }
    }

    /// Sequences that go by with a loss made elsewhere, on ranks whose sums are joined: the gradients of the batch.
    pub(crate) fn sums_of_parts_and_of_ranks_are_those_of_the_batch() {
        let cpu = Cpu::best();
        for (name, lengths) in [("mixtral", &[5, 7, 1, 6, 4, 5, 2, 8][..]), ("qwen3", &[6, 3, 9])] {
            let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/checkpoints").join(name);
            let model = Model::load(&dir, Precision::Bf16, &cpu).unwrap();
            let of = |n: usize| (0..n).map(|t| (n * 31 + t * 7) as i32 % 96).collect::<Vec<i32>>();
            let sequences: Vec<Vec<i32>> = lengths.iter().map(|&n| of(n)).collect();
            let count: Vec<Vec<i32>> =
                lengths.iter().map(|&n| (0..n).map(|t| i32::from(t % 3 > 0)).collect()).collect();
            let sampled = Sampled::At(1.3);
            let batch = Batch { sequences: &sequences, count: &count, loss: Loss::Nll, sampled, groups: 4 };
            let expected = model.gradients(&cpu, &batch, &GradientRun::default(), None, |_| ()).unwrap();
            let three = GradientRun { micro_batch: 3, ..GradientRun::default() };
            let logprob = model.logprobs(&cpu, &sequences, sampled, &three);
            assert!(logprob.unwrap().0 == expected.logprob);
            let denominator = count.iter().flatten().sum::<i32>().into();
            for (ranks, part, recompute) in [(1, 8, true), (1, 3, false), (2, 1, false), (4, 2, false)] {
                let run = GradientRun { micro_batch: 2, recompute, ..GradientRun::default() };
                let mut partials = Vec::new();
                for rank in 0..ranks {
                    let mut sums = Accumulator::new(Some(lengths.len()), 4, rank, ranks).unwrap();
                    let first = batch.group(rank * 4 / ranks).start;
                    let last = batch.group((rank + 1) * 4 / ranks - 1).end;
                    for first in (first..last).step_by(part) {
                        let of_part = first..last.min(first + part);
                        let forward = sums.forward(&model, &cpu, &sequences[of_part.clone()], sampled, &run).unwrap();
                        assert!(forward.logprob == expected.logprob[of_part.clone()]);
                        let (_, dlogprob) = loss(&cpu, &batch, of_part, &forward.logprob, denominator).unwrap();
                        sums.reverse(&cpu, forward, &dlogprob).unwrap();
                    }
                    partials.push(Partial::of_tensors(sums.partial(&cpu).unwrap().tensors()).unwrap());
                }
                let found = Partial::join(&cpu, partials).unwrap().finish(&cpu, &model).unwrap();
                let bits = |of: &BTreeMap<String, Tensor>| -> Vec<u32> {
                    of.values().flat_map(|t| t.as_slice::<f32>().unwrap()).map(|v| v.to_bits()).collect()
                };
                assert!(found.keys().eq(expected.parameters.keys()));
                assert!(bits(&found) == bits(&expected.parameters), "{name} {ranks} {part}");
            }
        }
    }

    /// Sequences that a rank is not to have, that have not been gone back through or that are missing are refused; with one
    /// group any number of them makes a batch.
    pub(crate) fn sequences_of_an_accumulator_are_counted() {
        let cpu = Cpu::best();
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/checkpoints/qwen3");
        let model = Model::load(&dir, Precision::Bf16, &cpu).unwrap();
        let (run, zeros) = (GradientRun::default(), [vec![0.0; 2], vec![0.0; 2]]);
        let sequences = [vec![1, 2], vec![3, 4], vec![5, 6]];
        let refused = |found: Result<(), ModelError>, part: &str| {
            let error = found.unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        };
        refused(Accumulator::new(None, 2, 0, 1).map(|_| ()), "say how many sequences");
        // The second of two ranks has the last two of four sequences.
        let rank = || Accumulator::new(Some(4), 2, 1, 2).unwrap();
        let too_many = "there are 3 after number 2; 4 were to come";
        refused(rank().forward(&model, &cpu, &sequences, Sampled::At(1.0), &run).map(|_| ()), too_many);
        let mut sums = rank();
        let forward = sums.forward(&model, &cpu, &sequences[..1], Sampled::At(1.0), &run).unwrap();
        let too_many = "there are 2 after number 3; 4 were to come";
        refused(sums.forward(&model, &cpu, &sequences[1..], Sampled::At(1.0), &run).map(|_| ()), too_many);
        sums.reverse(&cpu, forward, &zeros[..1]).unwrap();
        refused(sums.partial(&cpu).map(|_| ()), "3 of 4 have come");
        for sequences_of_batch in [Some(2), None] {
            let mut sums = Accumulator::new(sequences_of_batch, 1, 0, 1).unwrap();
            sums.forward(&model, &cpu, &sequences[..2], Sampled::At(1.0), &run).unwrap();
            refused(sums.partial(&cpu).map(|_| ()), "0 of 2 have been gone back through");
            let mut sums = Accumulator::new(sequences_of_batch, 1, 0, 1).unwrap();
            let forward = sums.forward(&model, &cpu, &sequences[..2], Sampled::At(1.0), &run).unwrap();
            sums.reverse(&cpu, forward, &zeros).unwrap();
            assert_eq!(sums.partial(&cpu).unwrap().finish(&cpu, &model).unwrap().len(), model.parameters().len());
        }
    }

    /// Matrices that stand as they were loaded, as they do in training, give the bits of packed ones.
    pub(crate) fn packing_moves_no_bit() {
        let cpu = Cpu::best();
        let (sequences, count) = ([vec![1, 2, 3, 9], vec![4, 5]], [vec![0, 1, 1, 0], vec![0, 1]]);
        let batch =
            Batch { sequences: &sequences, count: &count, loss: Loss::Nll, sampled: Sampled::At(1.0), groups: 1 };
        for name in ["qwen3", "gemma2", "mixtral", "deepseek-v3"] {
            let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/checkpoints").join(name);
            let [packed, rows] = [true, false].map(|packs| {
                let config = Config::load(&dir).unwrap();
                let files = Weights::open(&dir).unwrap();
                let decoder = Decoder::load(&config, files, DType::Bf16, &cpu, packs).unwrap();
                let run = GradientRun { micro_batch: 2, ..GradientRun::default() };
                gradients(&decoder, &cpu, &batch, &run, (None, None), |_| ()).unwrap()
            });
            assert!(packed.logprob == rows.logprob && packed.parameters.keys().eq(rows.parameters.keys()));
            for (name_of, gradient) in &packed.parameters {
                let other = rows.parameters[name_of].as_slice::<f32>().unwrap();
                let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<u32>>();
                assert!(bits(gradient.as_slice::<f32>().unwrap()) == bits(other), "{name}: {name_of}");
            }
        }
    }

    /// Ratios are cut where the loss says.
    pub(crate) fn borders_of_ratios_are_those_of_the_loss() {
        let cpu = Cpu::best();
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/checkpoints/qwen3");
        let model = Model::load(&dir, Precision::Fp32, &cpu).unwrap();
        let loss = |low: f64, high: f64| {
            // Every ratio is far above 1, or far below.
            let loss = Loss::Policy {
                advantages: &[1.0, -1.0],
                old_logprob: &[vec![-60.0; 3], vec![30.0; 3]],
                low,
                high,
                entropy: 0.0,
            };
            let (sequences, count) = ([vec![1, 2, 3], vec![4, 5, 6]], [vec![0, 1, 1], vec![0, 1, 1]]);
            let batch = Batch { sequences: &sequences, count: &count, loss, sampled: Sampled::At(1.0), groups: 1 };
            model.gradients(&cpu, &batch, &GradientRun::default(), None, |_| ()).unwrap().per_sequence
        };
        assert_eq!(loss(0.25, 0.5), [-3.0, 1.5]);
        assert_eq!(loss(0.5, 2.0), [-6.0, 1.0]);
    }

    /// Padding stands before or behind each sequence, or all of them; what a shorter one lacks, behind it.
    pub(crate) fn rows_stand_where_the_run_says() {
        let of = |padding, pack| {
            let arranged = Arranged::new(&[2, 3], &GradientRun { padding, pack, ..GradientRun::default() });
            let block = |block: Block| (block.first, block.stride, block.rows, block.lengths);
            (arranged.pieces, arranged.blocks.into_iter().map(block).collect::<Vec<_>>())
        };
        let p = PADDING;
        assert_eq!(of(Padding::None, false), (vec![(0, 2), (p, 1), (1, 3)], vec![(0, 3, 3, vec![2, 3])]));
        let left = vec![(p, 4), (0, 2), (p, 1), (p, 4), (1, 3)];
        assert_eq!(of(Padding::Left(4), false), (left, vec![(4, 7, 3, vec![2, 3])]));
        let right = vec![(0, 2), (p, 5), (1, 3), (p, 4)];
        assert_eq!(of(Padding::Right(4), false), (right, vec![(0, 7, 7, vec![2, 3])]));
        let packed = |first: usize| vec![(first, 2, 2, vec![2]), (first + 2, 3, 3, vec![3])];
        assert_eq!(of(Padding::None, true), (vec![(0, 2), (1, 3)], packed(0)));
        assert_eq!(of(Padding::Left(4), true), (vec![(p, 4), (0, 2), (1, 3)], packed(4)));
        assert_eq!(of(Padding::Right(4), true), (vec![(0, 2), (1, 3), (p, 4)], packed(0)));
    }

    /// Notes what it is shown: layer, site, tokens and elements of each; adds `more` to the first element of one token at a
    /// site.
    struct Notes {
        seen: Vec<String>,
        at: (Option<usize>, &'static str, (usize, usize)),
        more: f32,
    }

    impl Probe for Notes {
        fn see(&mut self, seen: &mut Seen) -> Result<(), ModelError> {
            let layer = seen.layer.map_or("-".to_string(), |layer| layer.to_string());
            let tokens: String = seen.tokens.iter().map(|(b, t)| format!(" {b}.{t}")).collect();
            self.seen.push(format!("{layer} {}:{tokens} {}", seen.site, seen.values.len()));
            if (seen.layer, seen.site) == (self.at.0, self.at.1)
                && let Some(row) = seen.tokens.iter().position(|token| *token == self.at.2)
            {
                seen.values[row * seen.values.len() / seen.tokens.len()] += self.more;
            }
            Ok(())
        }
    }

    /// All values of a reverse pass are shown, from its end to its beginning and then the parameters, of tokens alone; and
    /// what a probe makes of one goes on, whatever padding stands around it.
    pub(crate) fn a_reverse_pass_is_shown() {
        let (sequences, count) = ([vec![1, 2, 3], vec![4, 5]], [vec![0, 1, 1], vec![0, 1]]);
        let old_logprob = [vec![-4.0; 3], vec![-5.0; 2]];
        let with_entropy =
            Loss::Policy { advantages: &[1.0, -1.0], old_logprob: &old_logprob, low: 0.2, high: 0.2, entropy: 0.25 };
        let together = GradientRun { micro_batch: 2, ..GradientRun::default() };
        let padded = GradientRun { padding: Padding::Left(2), ..together };
        let all = ["dmlp_norm", "dattention_sum", "dattention", "dq", "dk", "dv", "dinput_norm"];
        for (name, loss) in [("gemma2", Loss::Nll), ("qwen3-moe", Loss::Nll), ("qwen3-moe", with_entropy)] {
            let batch = Batch { sequences: &sequences, count: &count, loss, sampled: Sampled::At(1.0), groups: 1 };
            let cpu = Cpu::best();
            let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/checkpoints").join(name);
            let model = Model::load(&dir, Precision::Bf16, &cpu).unwrap();
            let made = |run: &GradientRun, at, more| {
                let mut notes = Notes { seen: Vec::new(), at, more };
                let found = model.gradients(&cpu, &batch, run, Some(&mut notes), |_| ()).unwrap();
                let bits = found.parameters.values().flat_map(|t| t.as_slice::<f32>().unwrap()).map(|v| v.to_bits());
                (bits.collect::<Vec<u32>>(), notes.seen)
            };
            let (plain, seen) = made(&together, (None, "", (0, 0)), 0.0);
            assert_eq!(seen, made(&padded, (None, "", (0, 0)), 0.0).1);
            let reverse: Vec<&str> =
                seen.iter().map(String::as_str).skip_while(|s| !s.starts_with("- logprob:")).collect();
            let of_losses = match loss {
                Loss::Nll => &["- logprob", "- dlogprob", "- dfinal_norm"][..],
                Loss::Policy { .. } => &["- logprob", "- entropy", "- dlogprob", "- dentropy", "- dfinal_norm"],
            };
            let mut sites: Vec<String> = of_losses.iter().map(|site| site.to_string()).collect();
            let parameters = ["- parameters.".to_string()];
            for layer in (0..model.config().layers()).rev() {
                // Gemma has norms behind both parts, Qwen experts in all layers but the first.
                let own = match name {
                    "gemma2" => vec!["dsum", "dmlp", all[0], all[1], "do"],
                    _ if layer > 0 => vec!["dsum", "dexpert_weights", "drouter", all[0], all[1]],
                    _ => vec!["dsum", all[0], all[1]],
                };
                sites.extend(own.iter().chain(&all[2..]).map(|site| format!("{layer} {site}")));
            }
            sites.push("- dembed".into());
            for (site, found) in sites.iter().chain(parameters.iter().cycle()).zip(&reverse) {
                let whole = if site == "- parameters." {
                    found.starts_with(site) && found.contains(": 0.0")
                } else {
                    found.starts_with(&format!("{site}: 0.0 0.1 0.2 1.0 1.1 "))
                };
                assert!(whole, "{name}: {site}, and not {found}");
            }
            let rows = |parameter: &str| {
                let found =
                    reverse.iter().find(|site| site.starts_with(&format!("- parameters.{parameter}:"))).unwrap();
                found.matches('.').count() - parameter.matches('.').count() - 1
            };
            assert_eq!((rows("model.embed_tokens.weight"), rows("model.norm.weight")), (160, 1));
            let mut changes = vec![(Some(0), "dattention_sum", (0, 2)), (Some(1), "dsum", (1, 1))];
            changes
                .extend(of_losses.iter().filter(|site| site.starts_with("- d")).map(|site| (None, &site[2..], (0, 1))));
            for at in changes {
                let changed = made(&together, at, 0.5).0;
                assert!(changed != plain && changed == made(&padded, at, 0.5).0, "{name} {at:?}");
            }
        }
    }

    /// Of rows with labels, those of padding become NaN.
    pub(crate) fn padding_is_spoilt() {
        let (tokens, mut values) = ([(PADDING, 0), (0, 0), (PADDING, 1)], [1f32; 6]);
        let (mut shown, layer, op) = (Shown { probe: None, first: 0, looks: false }, None, None);
        shown.see(&mut Seen { layer, site: "embed", op, tokens: &tokens, values: &mut values }).unwrap();
        assert_eq!(values.map(f32::is_nan), [true, true, false, false, true, true]);
        let mut alone = [1f32; 3];
        shown.see(&mut Seen { layer, site: "embed", op, tokens: &tokens[..1], values: &mut alone }).unwrap();
        assert!(alone.iter().all(|v| v.is_nan()));
        assert_eq!("left:65535".parse::<Padding>().unwrap(), Padding::Left(MOST_PADDING));
        assert!("right:65536".parse::<Padding>().is_err());
    }
}
