//! Choice of experts: `logits[T,E], bias[E]?, experts[T,K]? -> index[T,K], weight[T,K]` (f32).
//!
//! Formula: scores are the softmax or the sigmoid of the logits. The K experts of the largest `score + bias`, or
//! `logit + bias`, are chosen, where experts stand in groups only from the best groups; rank 0 is the largest. A weight is a chosen expert's score
//! (without bias), divided by the sum of the chosen ones if `normalise`, times `scale`.
//! Order: softmax as the op; `score + bias` or `logit + bias` one addition; a group's worth is its largest choice, or the sum of its two
//! largest, larger first. Groups and experts are taken one after the other, each time the largest that is left, the
//! lowest index among equals (-0 equals +0, a NaN is larger than every number). The sum of the chosen scores adds them
//! in the order of rank, from +0; with the sigmoid `f32(1e-20)` is added last.
//! Where `experts` names those of a token, they are chosen, whatever group they are of, in the same order.
//! SparseMixer: scores are the logits, and a weight is the softmax of those that neither were chosen before nor lie far below the
//! chosen one: `(chosen - x) / max(|x|, chosen) > f32(2 * jitter)`.
//! Rounding: every step once to f32.

use crate::backend::device::{Arguments, Buffer, Build, Device, Indices, Unit, int, launch_struct};
use crate::call::{Arguments as CallArguments, Entry};
use crate::element::{Stored, typed};
use crate::logprob::softmax;
use crate::math::sigmoid;
use crate::profile::IEEE;
use crate::simd::scalar::Scalar;
use crate::tensor::Rows;
use crate::{Counter, Cpu, Element, Error, TensorMut, TensorRef, check_len, value_error};
use samebits_schema::Call;
use std::sync::Mutex;

/// Dimensions and parameters of the choice.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Route {
    /// Tokens T.
    pub tokens: usize,
    /// Experts E.
    pub experts: usize,
    /// Experts chosen for each token, K.
    pub chosen: usize,
    /// How logits become scores.
    pub scoring: Scoring,
    /// What decides the choice, beside the bias.
    pub chosen_by: ChosenBy,
    /// Groups of equal size, at least 1.
    pub groups: usize,
    /// Groups that are left, at least 1; together they hold K experts or more.
    pub top_groups: usize,
    /// What a group is worth.
    pub group_worth: GroupWorth,
    /// Whether the weights of a token are divided by their sum.
    pub normalise: bool,
    /// Factor of every weight, in the end.
    pub scale: f64,
}

/// How logits become scores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scoring {
    /// The softmax over all experts.
    Softmax,
    /// Each by itself.
    Sigmoid,
    /// The logits; weights are softmaxes of what lies near the chosen one.
    SparseMixer {
        /// Half the share of the larger of the two by which others may be smaller; at least 0.
        jitter: f64,
    },
}

impl Scoring {
    /// That of a call.
    pub(super) fn of(call: &Call) -> Scoring {
        match call.word("scoring") {
            "sigmoid" => Scoring::Sigmoid,
            "sparsemixer" => Scoring::SparseMixer { jitter: call.float("jitter") },
            _ => Scoring::Softmax,
        }
    }

    /// From how far on others are left out of the softmax of a chosen expert, where there is one of each.
    pub(super) fn limit(self) -> Option<f32> {
        match self {
            Scoring::SparseMixer { jitter } => Some((2.0 * jitter) as f32),
            Scoring::Softmax | Scoring::Sigmoid => None,
        }
    }
}

/// What decides a choice of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChosenBy {
    /// Their scores.
    Scores,
    /// Their logits: where two sigmoids are 1, the larger of these.
    Logits,
}

/// What a group of experts is worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupWorth {
    /// Its largest choice.
    Max,
    /// The sum of its two largest choices.
    TopTwo,
}

/// `logits[T,E], bias[E]?, experts[T,K]? -> index[T,K], weight[T,K]`, row-major, experts of a token in the order of rank. A row of
/// `experts` names those of its token, or is -1, and the token chooses.
///
/// # Errors
/// [`Error::Length`] when a slice does not match; [`Error::Value`] when groups do not divide the experts or are too few
/// for K, `scale` is not finite in f32, or a row of `experts` names one that there is not, or one twice.
///
/// ```
/// use samebits_ops::{ChosenBy, Cpu, GroupWorth, Route, Scoring, route};
///
/// // The better two of three experts, in one group.
/// let shape = Route {
///     tokens: 1,
///     experts: 3,
///     chosen: 2,
///     scoring: Scoring::Softmax,
///     chosen_by: ChosenBy::Scores,
///     groups: 1,
///     top_groups: 1,
///     group_worth: GroupWorth::Max,
///     normalise: true,
///     scale: 1.0,
/// };
/// let (mut index, mut weight) = ([0; 2], [0f32; 2]);
/// route(&Cpu::best(), &shape, &[1f32, 5.0, 5.0], None, None, &mut index, &mut weight)?;
/// assert_eq!((index, weight), ([1, 2], [0.5, 0.5]));
/// // Another choice, replayed: the weights are those of its own scores.
/// route(&Cpu::best(), &shape, &[1f32, 1.0, 5.0], None, Some(&[1, 0]), &mut index, &mut weight)?;
/// assert_eq!((index, weight), ([0, 1], [0.5, 0.5]));
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn route<I: Element>(
    cpu: &Cpu,
    shape: &Route,
    logits: &[I],
    bias: Option<&[I]>,
    experts: Option<&[i32]>,
    index: &mut [i32],
    weight: &mut [f32],
) -> Result<(), Error> {
    check(shape, [logits.len(), index.len(), weight.len()], bias.map(<[I]>::len))?;
    let bias = bias.map(|bias| TensorRef::of(bias, &[shape.experts]));
    run(cpu, shape, TensorRef::of(logits, &[shape.tokens, shape.experts]), bias, experts, (index, weight))
}

/// Rows of logits of any layout; the lengths have been checked.
fn run(
    cpu: &Cpu,
    shape: &Route,
    logits: TensorRef,
    bias: Option<TensorRef>,
    named: Option<&[i32]>,
    (index, weight): (&mut [i32], &mut [f32]),
) -> Result<(), Error> {
    let Route { tokens, experts, chosen, .. } = *shape;
    let scale = check_choice("route", shape)?;
    named.map_or(Ok(()), |named| check_named(shape, named))?;
    logits.on_host("route", "logits")?;
    if tokens == 0 {
        return Ok(());
    }
    typed!(logits.dtype() => I, {
        let bias = bias.map(|bias| bias.dense::<I>("route", "bias")).transpose()?;
        let mut scores = vec![0f32; tokens * experts];
        match shape.scoring {
            Scoring::Softmax => softmax::run(cpu, logits, TensorMut::of(&mut scores, &[tokens, experts]))?,
            Scoring::Sigmoid => score_each(logits.rows::<I>(), &mut scores, sigmoid_of),
            Scoring::SparseMixer { .. } => score_each(logits.rows::<I>(), &mut scores, |logit| logit.widen()),
        }
        let logits = logits.rows::<I>();
        let outputs = index.chunks_exact_mut(chosen).zip(weight.chunks_exact_mut(chosen));
        let rows = Mutex::new(scores.chunks_exact(experts).zip(outputs).enumerate());
        cpu.each(tokens, |_| {
            let next = rows.lock().expect("no panic while holding the lock").next();
            let (t, (scores, (index, weight))) = next.expect("one for each token");
            let named = named.map(|named| &named[t * chosen..][..chosen]).filter(|named| named[0] >= 0);
            choose_row(shape, (scores, logits.row(t)), bias, named, (index, weight));
        });
        if let Some(limit) = shape.scoring.limit() {
            let shares = shares(cpu, shape, logits, index, limit)?;
            for ((shares, expert), weight) in shares.chunks_exact(experts).zip(&*index).zip(&mut *weight) {
                *weight = shares[*expert as usize];
            }
        }
        weight.chunks_exact_mut(chosen).for_each(|weight| weigh(shape, scale, weight));
    });
    Ok(())
}

/// Bytes of shared memory that every device has without being asked.
const SHARED: usize = 48 << 10;

/// Its kernels.
const UNIT: Unit = Unit {
    has_out: false,
    structs: &[Choice::LAYOUT],
    ..Unit::of("route", include_str!("route.cu"), &["route", "route_near", "route_weights"])
};

launch_struct! {
    /// What the kernel is told.
    struct Choice of "route" {
        experts: i32,
        chosen: i32,
        groups: i32,
        top_groups: i32,
        /// What scores are: softmaxes, sigmoids or logits.
        scoring: i32,
        /// Whether logits decide the choice, whether there is a bias, whether a group is worth its two
        /// largest choices, and whether weights are divided by their sum. Whether experts are named.
        by_logits: i32,
        has_bias: i32,
        has_experts: i32,
        top_two: i32,
        normalise: i32,
        scale: f32,
    }
}

/// route, by name: rank and weight of every expert, -1 and +0 where it is not chosen.
pub(crate) const OP: Entry = Entry {
    name: "route",
    cpu: |cpu, args| {
        let shape = Route::of(args.call);
        let Route { tokens, chosen, .. } = shape;
        let (mut index, mut weights) = (vec![0i32; tokens * chosen], vec![0f32; tokens * chosen]);
        let (logits, bias) = (args.input("logits"), args.optional("bias"));
        run(cpu, &shape, logits, bias, named(args)?, (&mut index, &mut weights))?;
        let (rank, weight) =
            (args.output("rank").host::<i32>("route", "rank")?, args.output("weight").host::<f32>("route", "weight")?);
        spread(&shape, &index, &weights, rank, weight);
        Ok(())
    },
    device: Some(|on, args| {
        let shape = Route::of(args.call);
        let (to_rank, to_weight) =
            (args.output("rank").device("route", "rank")?, args.output("weight").device("route", "weight")?);
        let count = shape.tokens * shape.chosen;
        let (mut index, mut weights) = (on.empty::<i32>("route", count)?, on.empty::<f32>("route", count)?);
        let (logits, bias) = (args.input("logits"), args.optional("bias"));
        typed!(logits.dtype() => I, {
            let bias = bias.map(|bias| bias.device::<I>("route", "bias")).transpose()?;
            let logits = logits.device::<I>("route", "logits")?;
            on_device(on, &shape, logits, bias, named(args)?, (&mut index, &mut weights))?;
        });
        let (mut chosen, mut scores) = (vec![0; count], vec![0f32; count]);
        index.download(on, &mut chosen)?;
        weights.download(on, &mut scores)?;
        let (mut rank, mut weight) = (vec![0; shape.tokens * shape.experts], vec![0f32; shape.tokens * shape.experts]);
        spread(&shape, &chosen, &scores, &mut rank, &mut weight);
        to_rank.fill(on, &rank)?;
        to_weight.fill(on, &weight)
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// The experts that a call names.
fn named<'a>(args: &CallArguments<'_, 'a>) -> Result<Option<&'a [i32]>, Error> {
    args.optional("experts").map(|_| args.integers("experts")).transpose()
}

/// [`route`] on a device; softmax scores stand in the workspace, and so do `experts`, which come from the host.
///
/// # Errors
/// As [`route`]; more experts than a block has room for; errors of the device.
pub fn on_device<I: Stored>(
    device: &Device,
    shape: &Route,
    logits: &Buffer<I>,
    bias: Option<&Buffer<I>>,
    named: Option<&[i32]>,
    (index, weight): (&mut Buffer<i32>, &mut Buffer<f32>),
) -> Result<(), Error> {
    let Route { tokens, experts, chosen, groups, top_groups, .. } = *shape;
    let op = "route";
    let lens = [logits.len(), index.len(), weight.len()];
    let scale = check(shape, lens, bias.map(Buffer::len))?;
    named.map_or(Ok(()), |named| check_named(shape, named))?;
    if tokens == 0 {
        return Ok(());
    }
    // Ranks of experts and groups, and the chosen weights.
    let shared = 4 * (experts + groups + chosen);
    if shared > SHARED {
        return Err(value_error(op, format!("{experts} experts are more than a device takes")));
    }
    let scores = match shape.scoring {
        Scoring::Sigmoid | Scoring::SparseMixer { .. } => None,
        Scoring::Softmax => {
            let mut scores = device.take::<f32>(op, tokens * experts, true)?;
            device.ledger().note(Counter::WorkspaceF32, 4 * scores.len(), "workspace of f32 on the device")?;
            softmax::on_device(device, tokens, experts, logits, &mut scores)?;
            Some(scores)
        }
    };
    let choice = Choice {
        experts: int(op, "the number of experts", experts)?,
        chosen: chosen as i32,
        groups: groups as i32,
        top_groups: top_groups as i32,
        scoring: match shape.scoring {
            Scoring::Softmax => 0,
            Scoring::Sigmoid => 1,
            Scoring::SparseMixer { .. } => 2,
        },
        by_logits: i32::from(shape.chosen_by == ChosenBy::Logits),
        has_bias: i32::from(bias.is_some()),
        has_experts: i32::from(named.is_some()),
        top_two: i32::from(shape.group_worth == GroupWorth::TopTwo),
        normalise: i32::from(shape.normalise),
        scale,
    };
    let arguments = Arguments::new().layout(&choice.bytes()).buffer(logits);
    let arguments = match &scores {
        Some(scores) => arguments.buffer(scores),
        None => arguments.null(),
    };
    let arguments = match bias {
        Some(bias) => arguments.buffer(bias),
        None => arguments.null(),
    };
    let named = named.map(|named| device.upload(op, named)).transpose()?;
    let arguments = match &named {
        Some(named) => arguments.buffer(named),
        None => arguments.null(),
    };
    let arguments = arguments.buffer(index).buffer(weight);
    // SAFETY: lengths were checked, and experts that are named are; a block takes a token, and its shared memory holds what the kernel keeps there.
    unsafe { device.launch(Build::of::<I, f32>(op), op, [tokens, 1, 1], 32, shared, &arguments)? };
    let Some(limit) = shape.scoring.limit() else { return Ok(()) };
    let shares = shares_on_device(device, shape, logits, index, limit)?;
    let arguments = Arguments::new().buffer(&shares).buffer(index).buffer(weight).long(tokens);
    let arguments = arguments.int(choice.experts).int(choice.chosen).int(choice.normalise).float(scale);
    // SAFETY: lengths were checked, and the indices are of experts; a thread takes a token, and those behind the last do nothing.
    unsafe { device.launch(Build::of::<I, f32>(op), "route_weights", [tokens.div_ceil(32), 1, 1], 32, 0, &arguments) }
}

/// [`shares`] on a device, of a choice that stands there: each index is one of an expert.
///
/// # Errors
/// Too many choices; errors of the device.
pub(super) fn shares_on_device<I: Stored>(
    device: &Device,
    shape: &Route,
    logits: &Buffer<I>,
    index: &Buffer<i32>,
    limit: f32,
) -> Result<Buffer<f32>, Error> {
    let Route { tokens, experts, chosen, .. } = *shape;
    let (op, rows) = ("route", tokens * chosen);
    let near = device.take::<f32>(op, rows * experts, true)?;
    let mut shares = device.take::<f32>(op, rows * experts, true)?;
    device.ledger().note(Counter::WorkspaceF32, 8 * near.len(), "workspace of f32 on the device")?;
    let arguments = Arguments::new().buffer(logits).buffer(index).buffer(&near);
    let arguments = arguments.int(int(op, "E", experts)?).int(int(op, "K", chosen)?).float(limit);
    // SAFETY: lengths were checked, and the indices are of experts; a block takes a choice.
    unsafe { device.launch(Build::of::<I, f32>(op), "route_near", [rows, 1, 1], 32, 0, &arguments)? };
    softmax::on_device(device, rows, experts, &near, &mut shares)?;
    Ok(shares)
}

/// [`route`] whose choice stays on the device, for [`gemm_experts`](crate::device::gemm_experts).
///
/// # Errors
/// As [`route`].
pub fn route_to<I: Stored>(
    device: &Device,
    shape: &Route,
    logits: &Buffer<I>,
    bias: Option<&Buffer<I>>,
    experts: Option<&[i32]>,
    weight: &mut Buffer<f32>,
) -> Result<Indices, Error> {
    let mut index = device.empty("route", shape.tokens.saturating_mul(shape.chosen))?;
    on_device(device, shape, logits, bias, experts, (&mut index, weight))?;
    // The kernel takes places of experts that are left, and there are as many as are chosen.
    Ok(Indices::made(device, index, shape.experts))
}

/// Rank and weight of every expert from those that were chosen.
fn spread(shape: &Route, index: &[i32], weights: &[f32], rank: &mut [i32], weight: &mut [f32]) {
    rank.fill(-1);
    weight.fill(0.0);
    for (i, (&expert, &w)) in index.iter().zip(weights).enumerate() {
        let at = i / shape.chosen * shape.experts + expert as usize;
        (rank[at], weight[at]) = ((i % shape.chosen) as i32, w);
    }
}

impl Route {
    /// The parameters of a call.
    pub(crate) fn of(call: &Call) -> Route {
        let count = |name: &str| call.count(name);
        Route {
            tokens: call.dim("T"),
            experts: call.dim("E"),
            chosen: count("chosen"),
            scoring: Scoring::of(call),
            chosen_by: if call.word("chosen_by") == "logits" { ChosenBy::Logits } else { ChosenBy::Scores },
            groups: count("groups"),
            top_groups: count("top_groups"),
            group_worth: if call.word("group_worth") == "top_two" { GroupWorth::TopTwo } else { GroupWorth::Max },
            normalise: call.flag("normalise"),
            scale: call.float("scale"),
        }
    }
}

/// Checks a call, whatever it runs on, by the lengths of its slices: `f32(scale)`.
pub(crate) fn check(shape: &Route, [logits, index, weight]: [usize; 3], bias: Option<usize>) -> Result<f32, Error> {
    let Route { tokens, experts, chosen, .. } = *shape;
    check_len("route", "logits", "[T,E]", logits, &[tokens, experts])?;
    check_len("route", "index", "[T,K]", index, &[tokens, chosen])?;
    check_len("route", "weight", "[T,K]", weight, &[tokens, chosen])?;
    if let Some(bias) = bias {
        check_len("route", "bias", "[E]", bias, &[experts])?;
    }
    check_choice("route", shape)
}

/// Every row names experts, none twice, or is -1.
fn check_named(shape: &Route, named: &[i32]) -> Result<(), Error> {
    let Route { tokens, experts, chosen, .. } = *shape;
    check_len("route", "experts", "[T,K]", named.len(), &[tokens, chosen])?;
    for (token, row) in named.chunks_exact(chosen).enumerate().filter(|(_, row)| row.iter().any(|name| *name != -1)) {
        check_row("route", "experts", (token * chosen, row), experts)?;
    }
    Ok(())
}

/// Refuses a row, from an element on, that has not one expert in each place, or one twice.
pub(super) fn check_row(
    op: &'static str,
    what: &str,
    (first, row): (usize, &[i32]),
    experts: usize,
) -> Result<(), Error> {
    for (i, &expert) in row.iter().enumerate() {
        let name = || format!("{what} element {} is {expert}", first + i);
        if !usize::try_from(expert).is_ok_and(|expert| expert < experts) {
            return Err(value_error(op, format!("{} of {experts} experts", name())));
        }
        if row[..i].contains(&expert) {
            return Err(value_error(op, format!("{}, which its token has twice", name())));
        }
    }
    Ok(())
}

/// Checks the parameters: `f32(scale)`.
pub(super) fn check_choice(op: &'static str, shape: &Route) -> Result<f32, Error> {
    let Route { experts, chosen, groups, top_groups, group_worth, .. } = *shape;
    let bad = |what: String| Err(value_error(op, what));
    if chosen == 0 || chosen > experts || i32::try_from(experts).is_err() {
        return bad(format!("{chosen} of {experts} experts; choose at least 1 and at most all"));
    }
    if groups == 0 || !experts.is_multiple_of(groups) {
        return bad(format!("{experts} experts do not make {groups} groups of one size"));
    }
    let size = experts / groups;
    if top_groups == 0 || top_groups > groups || top_groups.saturating_mul(size) < chosen {
        return bad(format!("{top_groups} of {groups} groups of {size} do not hold {chosen} experts"));
    }
    if group_worth == GroupWorth::TopTwo && size < 2 && groups > 1 {
        return bad(format!("a group of {size} has no two experts"));
    }
    if let Some(limit) = shape.scoring.limit().filter(|limit| !(*limit >= 0.0 && limit.is_finite())) {
        return bad(format!("twice the jitter is {limit}; it must be at least 0, and finite in f32"));
    }
    let scale = shape.scale as f32;
    if !scale.is_finite() {
        return bad(format!("scale is {}; it must be finite in f32", shape.scale));
    }
    Ok(scale)
}

/// The sigmoid of a logit.
pub(super) fn sigmoid_of<I: Element>(logit: I) -> f32 {
    f32::narrow(sigmoid(Scalar, logit.widen()))
}

/// Makes a score of each logit.
fn score_each<I: Element>(logits: Rows<I>, scores: &mut [f32], score: impl Fn(I) -> f32) {
    for (t, scores) in scores.chunks_exact_mut(logits.n()).enumerate() {
        scores.iter_mut().zip(logits.row(t)).for_each(|(to, logit)| *to = score(*logit));
    }
}

/// SparseMixer: of each choice `[T,K]` the softmax of the logits that count for its weight, `[T * K,E]`.
pub(super) fn shares<I: Element>(
    cpu: &Cpu,
    shape: &Route,
    logits: Rows<I>,
    index: &[i32],
    limit: f32,
) -> Result<Vec<f32>, Error> {
    let Route { experts, chosen, .. } = *shape;
    let mut near = vec![f32::NEG_INFINITY; index.len() * experts];
    for (i, near) in near.chunks_exact_mut(experts).enumerate() {
        let (row, rank) = (logits.row(i / chosen), i % chosen);
        let (before, top) = (&index[i - rank..i], row[index[i] as usize].widen());
        for (expert, (near, x)) in near.iter_mut().zip(row).enumerate() {
            let x = x.widen();
            let size = if x.abs() < top { top } else { x.abs() };
            let is_far = (top - x) / size > limit;
            if !is_far && !before.contains(&(expert as i32)) {
                *near = x;
            }
        }
    }
    let mut shares = vec![0f32; near.len()];
    let rows = [index.len(), experts];
    softmax::run(cpu, TensorRef::of(&near, &rows), TensorMut::of(&mut shares, &rows))?;
    Ok(shares)
}

/// Chooses for one token, by its scores or its logits: the experts, all or those that are named, and their scores.
fn choose_row<I: Element>(
    shape: &Route,
    (scores, logits): (&[f32], &[I]),
    bias: Option<&[I]>,
    named: Option<&[i32]>,
    (index, weight): (&mut [i32], &mut [f32]),
) {
    let size = shape.experts / shape.groups;
    let decides = |expert: usize| match shape.chosen_by {
        ChosenBy::Scores => scores[expert],
        ChosenBy::Logits => logits[expert].widen(),
    };
    let choice = |expert| bias.map_or(decides(expert), |bias| decides(expert) + bias[expert].widen());
    let mut choice: Vec<Option<f32>> = (0..shape.experts).map(|expert| Some(choice(expert))).collect();
    if let Some(named) = named {
        let is_out = |(expert, _): &(usize, _)| !named.contains(&(*expert as i32));
        choice.iter_mut().enumerate().filter(is_out).for_each(|(_, choice)| *choice = None);
    } else if shape.top_groups < shape.groups {
        let mut worth: Vec<Option<f32>> =
            choice.chunks_exact(size).map(|group| Some(worth(shape.group_worth, group.to_vec()))).collect();
        let mut kept = vec![false; shape.groups];
        for _ in 0..shape.top_groups {
            kept[take_largest(&mut worth)] = true;
        }
        for (group, _) in choice.chunks_exact_mut(size).zip(kept).filter(|(_, kept)| !kept) {
            group.fill(None);
        }
    }
    for (index, weight) in index.iter_mut().zip(weight.iter_mut()) {
        let expert = take_largest(&mut choice);
        (*index, *weight) = (expert as i32, scores[expert]);
    }
}

/// The weights of one token from the scores of its experts.
fn weigh(shape: &Route, scale: f32, weight: &mut [f32]) {
    if shape.normalise {
        let mut sum = weight.iter().fold(0f32, |sum, weight| sum + weight);
        if shape.scoring == Scoring::Sigmoid {
            sum += IEEE.route;
        }
        weight.iter_mut().for_each(|weight| *weight /= sum);
    }
    weight.iter_mut().for_each(|weight| *weight = f32::narrow(*weight * scale));
}

/// What a group is worth.
fn worth(kind: GroupWorth, mut group: Vec<Option<f32>>) -> f32 {
    let mut next = || {
        let values = group.clone();
        values[take_largest(&mut group)].expect("the largest is there")
    };
    match kind {
        GroupWorth::Max => next(),
        GroupWorth::TopTwo => {
            let first = next();
            first + next()
        }
    }
}

/// Takes the largest value out and returns where it stood: the lowest place among equals, a NaN before every number.
fn take_largest(values: &mut [Option<f32>]) -> usize {
    let mut best: Option<(usize, f32)> = None;
    for (i, value) in values.iter().enumerate() {
        let Some(value) = *value else { continue };
        if best.is_none_or(|(_, largest)| value > largest || (value.is_nan() && !largest.is_nan())) {
            best = Some((i, value));
        }
    }
    let (i, _) = best.expect("as many are taken as there are");
    values[i] = None;
    i
}
