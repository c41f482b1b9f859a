//! Gradient of the weights of chosen experts: `logits[T,E], index[T,K], dweight[T,K] -> dlogits[T,E]` (f32).
//!
//! Formula: with s the scores of the chosen experts, S their sum and n = s / S, `a = dweight * scale`, with `normalise`
//! `a = (a - sum of a * n) / S`; then `s * (a - sum of a * s)` over all experts for the softmax, `a * s * (1 - s)` of the
//! chosen ones for the sigmoid; for sparsemixer that of the softmax of each rank's share, added over the ranks. A choice itself has
//! no gradient.
//! Order: scores and S as in `route`; both sums are chains in the order of rank from +0: `fma(a, n, sum)`,
//! `fma(a, s, sum)`. For an expert that is not chosen, a is +0, and the sigmoid gives +0.
//! Rounding: every step once to f32.

use crate::backend::device::{Arguments, Buffer, Build, Device, Indices, Unit, int};
use crate::call::{Arguments as CallArguments, Entry};
use crate::element::{Stored, typed};
use crate::logprob::softmax;
use crate::moe::route::{
    ChosenBy, GroupWorth, Route, Scoring, check_choice, check_row, shares, shares_on_device, sigmoid_of,
};
use crate::profile::IEEE;
use crate::simd::{Kernel, Simd, load_at, narrow_at};
use crate::tensor::Rows;
use crate::{Cpu, Element, Error, TensorMut, TensorRef, check_len, value_error};

const NAME: &str = "route_backward";

/// The gradient `dlogits[T,E]` of [`route`](crate::route())'s logits from that of its weights, `dweight[T,K]`, row-major; `index`
/// is what it chose. Groups and bias decide only the choice, and have no part here.
///
/// # Errors
/// [`Error::Length`] when a slice does not match; [`Error::Value`] when an index is outside `0..E` or stands twice in a row,
/// and for parameters as `route`.
///
/// ```
/// use samebits_ops::{ChosenBy, Cpu, GroupWorth, Route, Scoring, route_backward};
///
/// // The second of two experts, equally likely: more of its weight is less of the other's.
/// let shape = Route {
///     tokens: 1,
///     experts: 2,
///     chosen: 1,
///     scoring: Scoring::Softmax,
///     chosen_by: ChosenBy::Scores,
///     groups: 1,
///     top_groups: 1,
///     group_worth: GroupWorth::Max,
///     normalise: false,
///     scale: 1.0,
/// };
/// let mut dlogits = [0f32; 2];
/// route_backward(&Cpu::best(), &shape, &[3f32, 3.0], &[1], &[8.0], &mut dlogits)?;
/// assert_eq!(dlogits, [-2.0, 2.0]);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn route_backward<I: Element>(
    cpu: &Cpu,
    shape: &Route,
    logits: &[I],
    index: &[i32],
    dweight: &[f32],
    dlogits: &mut [f32],
) -> Result<(), Error> {
    let scale = check(shape, [logits.len(), dlogits.len()], [index.len(), dweight.len()])?;
    check_index(shape, index)?;
    run(cpu, shape, scale, TensorRef::of(logits, &[shape.tokens, shape.experts]), (index, dweight), dlogits)
}

/// Checks the parameters and the lengths of logits and dlogits, and of index and dweight: `f32(scale)`.
fn check(shape: &Route, [logits, dlogits]: [usize; 2], [index, dweight]: [usize; 2]) -> Result<f32, Error> {
    let Route { tokens, experts, chosen, .. } = *shape;
    check_len(NAME, "logits", "[T,E]", logits, &[tokens, experts])?;
    check_len(NAME, "dlogits", "[T,E]", dlogits, &[tokens, experts])?;
    check_len(NAME, "index", "[T,K]", index, &[tokens, chosen])?;
    check_len(NAME, "dweight", "[T,K]", dweight, &[tokens, chosen])?;
    check_choice(NAME, shape)
}

/// Every index is one of an expert, and no token has one twice.
fn check_index(shape: &Route, index: &[i32]) -> Result<(), Error> {
    let mut rows = index.chunks_exact(shape.chosen).enumerate();
    rows.try_for_each(|(token, row)| check_row(NAME, "index", (token * shape.chosen, row), shape.experts))
}

/// Rows of logits of any layout; the rest has been checked.
fn run(
    cpu: &Cpu,
    shape: &Route,
    scale: f32,
    logits: TensorRef,
    (index, dweight): (&[i32], &[f32]),
    dlogits: &mut [f32],
) -> Result<(), Error> {
    let Route { tokens, experts, chosen, scoring, .. } = *shape;
    logits.on_host(NAME, "logits")?;
    if let Some(limit) = scoring.limit() {
        let shares = typed!(logits.dtype() => I, shares(cpu, shape, logits.rows::<I>(), index, limit)?);
        let of_token = |rows: usize| (shares.chunks_exact(rows * experts)).zip(index.chunks_exact(rows));
        let tokens = of_token(chosen).zip(dweight.chunks_exact(chosen)).zip(dlogits.chunks_exact_mut(experts));
        tokens
            .for_each(|(((shares, index), dweight), dlogits)| by_shares(shape, scale, shares, index, dweight, dlogits));
        return Ok(());
    }
    // Scores stand where their gradients will.
    match scoring {
        Scoring::Softmax => softmax::run(cpu, logits, TensorMut::of(dlogits, &[tokens, experts]))?,
        Scoring::Sigmoid => typed!(logits.dtype() => I, {
            let logits = logits.rows::<I>();
            dlogits.fill(0.0);
            for (i, &expert) in index.iter().enumerate() {
                let (token, expert) = (i / chosen, expert as usize);
                dlogits[token * experts + expert] = sigmoid_of(logits.row(token)[expert]);
            }
        }),
        Scoring::SparseMixer { .. } => unreachable!("its shares have a row for each rank"),
    }
    let per_chunk = cpu.rows_per_chunk(tokens, experts);
    cpu.chunks(dlogits, per_chunk * experts, |chunk, dlogits| {
        let (from, count) = (chunk * per_chunk * chosen, dlogits.len() / experts * chosen);
        let (index, dweight) = (&index[from..][..count], &dweight[from..][..count]);
        cpu.dispatch(Part { shape, scale, index, dweight, dlogits });
    });
    Ok(())
}

/// The gradient of one token by sparsemixer, from the share `[K,E]` of every expert for each rank.
fn by_shares(shape: &Route, scale: f32, shares: &[f32], index: &[i32], dweight: &[f32], dlogits: &mut [f32]) {
    let scores: Vec<f32> =
        shares.chunks_exact(shape.experts).zip(index).map(|(shares, expert)| shares[*expert as usize]).collect();
    let a = of_scores(shape, &scores, dweight.iter().map(|dweight| dweight * scale).collect());
    for (rank, (shares, (expert, a))) in shares.chunks_exact(shape.experts).zip(index.iter().zip(a)).enumerate() {
        let whole = a.mul_add(scores[rank], 0.0);
        for (at, (share, dlogit)) in shares.iter().zip(&mut *dlogits).enumerate() {
            let d = share * (if at == *expert as usize { a } else { 0.0 } - whole);
            *dlogit = f32::narrow(if rank == 0 { d } else { *dlogit + d });
        }
    }
}

/// From the gradients `a` of the weights of a token: those of its scores.
#[inline(always)]
fn of_scores(shape: &Route, scores: &[f32], mut a: Vec<f32>) -> Vec<f32> {
    if shape.normalise {
        let mut sum = scores.iter().fold(0f32, |sum, score| sum + score);
        if shape.scoring == Scoring::Sigmoid {
            sum += IEEE.route;
        }
        let common = a.iter().zip(scores).fold(0f32, |common, (a, score)| a.mul_add(score / sum, common));
        a.iter_mut().for_each(|a| *a = (*a - common) / sum);
    }
    a
}

/// Some tokens, whose scores stand in `dlogits`.
struct Part<'a> {
    shape: &'a Route,
    scale: f32,
    index: &'a [i32],
    dweight: &'a [f32],
    dlogits: &'a mut [f32],
}

impl Kernel for Part<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Part { shape, scale, index, dweight, dlogits } = self;
        let (mut scores, mut a) = (vec![0f32; shape.chosen], vec![0f32; shape.chosen]);
        for (token, dlogits) in dlogits.chunks_exact_mut(shape.experts).enumerate() {
            let index = &index[token * shape.chosen..][..shape.chosen];
            for (rank, &expert) in index.iter().enumerate() {
                scores[rank] = dlogits[expert as usize];
                a[rank] = dweight[token * shape.chosen + rank] * scale;
            }
            a = of_scores(shape, &scores, a);
            if shape.scoring == Scoring::Softmax {
                let whole = a.iter().zip(&scores).fold(0f32, |whole, (a, score)| a.mul_add(*score, whole));
                let others = s.splat(0.0 - whole);
                for at in (0..dlogits.len()).step_by(S::LANES) {
                    narrow_at(s, s.mul(load_at(s, dlogits, at, 0.0), others), dlogits, at);
                }
                a.iter_mut().for_each(|a| *a -= whole);
            } else {
                scores.iter_mut().for_each(|score| *score *= 1.0 - *score);
            }
            for (rank, &expert) in index.iter().enumerate() {
                dlogits[expert as usize] = f32::narrow(scores[rank] * a[rank]);
            }
        }
    }
}

/// Its kernels.
const UNIT: Unit =
    Unit { has_out: false, ..Unit::of(NAME, include_str!("route_backward.cu"), &[NAME, "route_backward_shares"]) };

/// route_backward, by name: with the rank of every expert for the choice, and its dweight.
pub(crate) const OP: Entry = Entry {
    name: NAME,
    cpu: |cpu, args| {
        let (shape, dweight) = (shape_of(args), args.input("dweight"));
        let (scale, index) = (check_choice(NAME, &shape)?, index_of(&shape, args.integers("rank")?)?);
        dweight.on_host(NAME, "dweight")?;
        let dweight = of_chosen(&shape, &index, dweight.rows());
        let dlogits = args.output("dlogits").host::<f32>(NAME, "dlogits")?;
        run(cpu, &shape, scale, args.input("logits"), (&index, &dweight), dlogits)
    },
    device: Some(|on, args| {
        let (shape, dlogits) = (shape_of(args), args.output("dlogits").device::<f32>(NAME, "dlogits")?);
        let index = index_of(&shape, args.integers("rank")?)?;
        let of_all = args.input("dweight").device::<f32>(NAME, "dweight")?;
        let mut dweight = vec![0f32; of_all.len()];
        of_all.download(on, &mut dweight)?;
        let dweight = TensorRef::of(&dweight, &[shape.tokens, shape.experts]);
        let dweight = on.upload(NAME, &of_chosen(&shape, &index, dweight.rows()))?;
        let logits = args.input("logits");
        typed!(logits.dtype() => I, {
            on_device(on, &shape, logits.device::<I>(NAME, "logits")?, &index, &dweight, dlogits)
        })
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// What of `route`'s parameters has a part in the gradient.
fn shape_of(args: &CallArguments) -> Route {
    let call = args.call;
    Route {
        tokens: call.dim("T"),
        experts: call.dim("E"),
        chosen: call.count("chosen"),
        scoring: Scoring::of(call),
        chosen_by: ChosenBy::Scores,
        groups: 1,
        top_groups: 1,
        group_worth: GroupWorth::Max,
        normalise: call.flag("normalise"),
        scale: call.float("scale"),
    }
}

/// The chosen experts of each token in the order of rank.
fn index_of(shape: &Route, rank: &[i32]) -> Result<Vec<i32>, Error> {
    let Route { tokens, experts, chosen, .. } = *shape;
    let mut index = vec![-1; tokens * chosen];
    for (i, &rank) in rank.iter().enumerate().filter(|(_, rank)| **rank != -1) {
        let place = usize::try_from(rank).ok().filter(|rank| *rank < chosen);
        let place = place.map(|rank| &mut index[i / experts * chosen + rank]);
        let Some(place) = place.filter(|place| **place == -1) else {
            let why = format!("rank element {i} is {rank}; each rank from 0 to {} stands once in a row", chosen - 1);
            return Err(value_error(NAME, why));
        };
        *place = (i % experts) as i32;
    }
    match index.iter().position(|&expert| expert == -1) {
        Some(i) => Err(value_error(NAME, format!("row {} of rank has no {}", i / chosen, i % chosen))),
        None => Ok(index),
    }
}

/// Of each token those of `all` that belong to its chosen experts.
fn of_chosen(shape: &Route, index: &[i32], all: Rows<f32>) -> Vec<f32> {
    let of = |(i, expert): (usize, &i32)| all.row(i / shape.chosen)[*expert as usize];
    index.iter().enumerate().map(of).collect()
}

/// [`route_backward`] on a device; the choice comes from the host, which checks it.
///
/// # Errors
/// As [`route_backward`]; errors of the device.
pub fn on_device<I: Stored>(
    device: &Device,
    shape: &Route,
    logits: &Buffer<I>,
    index: &[i32],
    dweight: &Buffer<f32>,
    dlogits: &mut Buffer<f32>,
) -> Result<(), Error> {
    check(shape, [logits.len(), dlogits.len()], [index.len(), dweight.len()])?;
    check_index(shape, index)?;
    route_backward_at(device, shape, logits, &Indices::new(device, NAME, index, shape.experts)?, dweight, dlogits)
}

/// [`route_backward`] of a choice that stands on the device, as [`route_to`](crate::device::route_to) makes it: no token has an
/// expert twice.
///
/// # Errors
/// [`Error::Length`] when a buffer does not match; [`Error::Value`] when an index may be outside the experts, and for parameters as
/// `route`; errors of the device.
pub fn route_backward_at<I: Stored>(
    device: &Device,
    shape: &Route,
    logits: &Buffer<I>,
    index: &Indices,
    dweight: &Buffer<f32>,
    dlogits: &mut Buffer<f32>,
) -> Result<(), Error> {
    let Route { tokens, experts, chosen, .. } = *shape;
    let scale = check(shape, [logits.len(), dlogits.len()], [index.len(), dweight.len()])?;
    if index.limit() > experts {
        return Err(value_error(NAME, format!("indices up to {} of {experts} experts", index.limit())));
    }
    if tokens == 0 {
        return Ok(());
    }
    if let Some(limit) = shape.scoring.limit() {
        let index = index.buffer(device)?;
        let shares = shares_on_device(device, shape, logits, index, limit)?;
        let arguments = Arguments::new().buffer(&shares).buffer(index).buffer(dweight).buffer(dlogits).long(tokens);
        let arguments = arguments.int(int(NAME, "E", experts)?).int(int(NAME, "K", chosen)?);
        let arguments = arguments.int(i32::from(shape.normalise)).float(scale);
        // SAFETY: as below.
        return unsafe {
            device.launch(
                Build::of::<I, f32>(NAME),
                "route_backward_shares",
                [tokens.div_ceil(4), 1, 1],
                128,
                0,
                &arguments,
            )
        };
    }
    if shape.scoring == Scoring::Softmax {
        softmax::on_device(device, tokens, experts, logits, dlogits)?;
    }
    let arguments = Arguments::new().buffer(logits).buffer(index.buffer(device)?).buffer(dweight).buffer(dlogits);
    let arguments = arguments
        .long(tokens)
        .int(int(NAME, "E", experts)?)
        .int(int(NAME, "K", chosen)?)
        .int(i32::from(shape.scoring == Scoring::Sigmoid))
        .int(i32::from(shape.normalise))
        .float(scale);
    // SAFETY: lengths were checked, and every index is below the limit; a warp takes a token, and the kernel leaves those behind
    // the last alone.
    unsafe { device.launch(Build::of::<I, f32>(NAME), NAME, [tokens.div_ceil(4), 1, 1], 128, 0, &arguments) }
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;

    /// A rank beyond the last stands in nobody's place, the next row's neither.
    pub(crate) fn ranks_are_those_of_the_chosen_once_each() {
        let shape = Route {
            tokens: 2,
            experts: 3,
            chosen: 2,
            scoring: Scoring::Softmax,
            chosen_by: ChosenBy::Scores,
            groups: 1,
            top_groups: 1,
            group_worth: GroupWorth::Max,
            normalise: false,
            scale: 1.0,
        };
        assert_eq!(index_of(&shape, &[1, -1, 0, 0, 1, -1]).unwrap(), [2, 0, 0, 1]);
        for (rank, why) in [
            ([0, 2, 1, -1, 0, 1], "element 1 is 2"),
            ([0, 1, -1, 0, -1, 2], "element 5 is 2"),
            ([0, 0, 1, 0, 1, -1], "element 1 is 0"),
            ([0, -2, 1, 0, 1, -1], "element 1 is -2"),
            ([0, 1, -1, -1, 0, -1], "row 1 of rank has no 1"),
        ] {
            let line = index_of(&shape, &rank).unwrap_err().to_string();
            assert!(line.contains(why), "{line}");
        }
    }
}
