//! What keys are worth to tokens, by the indexer of a sparse attention: `q[T,H,D], k[S,D], weight[T,H] (f32) -> score[T,S]` (f32).
//!
//! Formula: `score[t][s] = sum over h of weight[t][h] * max(scale * (q[t][h] . k[s]), 0)`.
//! Order: a chain over d, from +0; times `f32(scale)`; +0 in the place of what is not above 0, but a NaN stays; a chain over h, from
//! +0.
//! Rounding: every step once to f32.

use crate::backend::device::{Arguments, Buffer, Build, Device, Unit, int};
use crate::call::Entry;
use crate::columns::{GROUP, all, fma, mul, put, two};
use crate::element::{Stored, typed};
use crate::pack::as_floats_mut;
use crate::parallel::SharedOut;
use crate::simd::{Kernel, Simd};
use crate::through_f32::{convert, widen};
use crate::workspace::{Need, Plan, choose};
use crate::{Cpu, Element, Error, TensorRef, check_len, value_error};
use samebits_schema::Call;
use std::iter::successors;

const NAME: &str = "index_score";

/// Dimensions and parameters of the scores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct IndexScore {
    /// Tokens T.
    pub tokens: usize,
    /// Heads of a token, H.
    pub heads: usize,
    /// Elements of a head and of a key, D.
    pub dim: usize,
    /// Keys S, which all heads have in common.
    pub keys: usize,
    /// Factor of a head's score.
    pub scale: f64,
}

/// `q[T,H,D], k[S,D], weight[T,H] -> score[T,S]`, row-major.
///
/// # Errors
/// [`Error::Length`] when a slice does not match; [`Error::Value`] when `scale` is not finite in f32; [`Error::Budget`] and
/// [`Error::Memory`].
///
/// ```
/// use samebits_ops::{Cpu, IndexScore, index_score};
///
/// // Two heads: the second is below 0 for the first key, the first for the second.
/// let shape = IndexScore { tokens: 1, heads: 2, dim: 1, keys: 2, scale: 0.5 };
/// let mut score = [0f32; 2];
/// index_score(&Cpu::best(), &shape, &[4f32, -4.0], &[1.0, -3.0], &[1.0, 10.0], &mut score)?;
/// assert_eq!(score, [2.0, 60.0]);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn index_score<I: Element>(
    cpu: &Cpu,
    shape: &IndexScore,
    q: &[I],
    k: &[I],
    weight: &[f32],
    score: &mut [f32],
) -> Result<(), Error> {
    let scale = shape.check([q.len(), k.len(), weight.len(), score.len()])?;
    let IndexScore { tokens, heads, dim, keys, .. } = *shape;
    let (q, k) = (TensorRef::of(q, &[tokens, heads, dim]), TensorRef::of(k, &[keys, dim]));
    run(cpu, shape, scale, [q, k, TensorRef::of(weight, &[tokens, heads])], score)
}

impl IndexScore {
    /// The parameters of a call.
    fn of(call: &Call) -> IndexScore {
        let [tokens, heads, dim, keys] = ["T", "H", "D", "S"].map(|axis| call.dim(axis));
        IndexScore { tokens, heads, dim, keys, scale: call.float("scale") }
    }

    /// Checks the lengths of all slices and the scale: `f32(scale)`.
    fn check(&self, [q, k, weight, score]: [usize; 4]) -> Result<f32, Error> {
        let IndexScore { tokens, heads, dim, keys, .. } = *self;
        check_len(NAME, "q", "[T,H,D]", q, &[tokens, heads, dim])?;
        check_len(NAME, "k", "[S,D]", k, &[keys, dim])?;
        check_len(NAME, "weight", "[T,H]", weight, &[tokens, heads])?;
        check_len(NAME, "score", "[T,S]", score, &[tokens, keys])?;
        self.factor()
    }

    /// `f32(scale)`.
    fn factor(&self) -> Result<f32, Error> {
        let scale = self.scale as f32;
        match scale.is_finite() {
            true => Ok(scale),
            false => Err(value_error(NAME, format!("scale is {}; it must be finite in f32", self.scale))),
        }
    }
}

/// Heads that are summed side by side, so that none waits for its own last product.
const HEADS: usize = 4;

/// Keys that are worked on at a time, by so many workers.
#[derive(Clone, Copy)]
struct Cut {
    dim: usize,
    keys: usize,
    workers: usize,
}

impl Cut {
    /// As many keys as stay in the caches, as long as every thread has some.
    fn preferred(cpu: &Cpu, shape: &IndexScore) -> Cut {
        let most = shape.keys / cpu.threads();
        let keys = [4 * GROUP, 2 * GROUP].into_iter().find(|keys| *keys <= most).unwrap_or(GROUP);
        Cut { dim: shape.dim, keys, workers: cpu.threads().min(shape.keys.div_ceil(keys)) }
    }

    fn smaller(&self) -> Option<Cut> {
        match *self {
            Cut { keys, .. } if keys > GROUP => Some(Cut { keys: keys / 2, ..*self }),
            Cut { workers, .. } if workers > 1 => Some(Cut { workers: workers / 2, ..*self }),
            _ => None,
        }
    }
}

impl Plan for Cut {
    fn need(&self) -> Need {
        let slot = self.dim.saturating_mul(self.keys + HEADS).saturating_add(self.keys);
        Need { slot, workers: self.workers, ..Need::default() }
    }

    fn tiles(&self) -> [(&'static str, usize); 3] {
        [("keys", self.keys), ("heads", HEADS), ("", 0)]
    }
}

/// The form of the call has been checked; tensors of any layout.
fn run(
    cpu: &Cpu,
    shape: &IndexScore,
    scale: f32,
    [q, k, weight]: [TensorRef; 3],
    score: &mut [f32],
) -> Result<(), Error> {
    let IndexScore { tokens, heads, dim, keys, .. } = *shape;
    for (tensor, name) in [(q, "q"), (k, "k"), (weight, "weight")] {
        tensor.on_host(NAME, name)?;
    }
    if score.is_empty() {
        return Ok(());
    }
    let (cut, mut workspace) = choose(cpu, NAME, successors(Some(Cut::preferred(cpu, shape)), Cut::smaller))?;
    let mut slots: Vec<&mut [f32]> = workspace.split().1.into_iter().map(as_floats_mut).collect();
    let (weight, score) = (weight.rows::<f32>(), SharedOut::new(score));
    cpu.each_in(slots.iter_mut(), keys.div_ceil(cut.keys), |slot, block| {
        let (first, count) = (block * cut.keys, cut.keys.min(keys - block * cut.keys));
        let (panel, rest) = slot.split_at_mut(dim * cut.keys);
        let (rows, sums) = rest.split_at_mut(dim * HEADS);
        let sums = &mut sums[..count.next_multiple_of(GROUP)];
        pack(cpu, &k, first..first + count, &mut rows[..dim], panel);
        for t in 0..tokens {
            sums.fill(0.0);
            for head in (0..heads).step_by(HEADS) {
                let some = HEADS.min(heads - head);
                for h in 0..some {
                    widen(cpu, &q, t * heads + head + h, 0, &mut rows[h * dim..][..dim]);
                }
                cpu.dispatch(Heads { panel, rows, weight: &weight.row(t)[head..][..some], scale, sums });
            }
            // SAFETY: tokens and blocks are disjoint.
            convert(cpu, &sums[..count], unsafe { score.part(t * keys + first, count) });
        }
    });
    Ok(())
}

/// Some keys as groups of columns, +0 where the last one has none; `row` is room for one.
fn pack(cpu: &Cpu, k: &TensorRef, keys: std::ops::Range<usize>, row: &mut [f32], panel: &mut [f32]) {
    if !keys.len().is_multiple_of(GROUP) {
        panel.fill(0.0);
    }
    for (i, key) in keys.enumerate() {
        widen(cpu, k, key, 0, row);
        let column = i / GROUP * GROUP * row.len() + i % GROUP;
        for (d, x) in row.iter().enumerate() {
            panel[column + d * GROUP] = *x;
        }
    }
}

/// What up to [`HEADS`] heads of a token add to the scores of some keys.
struct Heads<'a> {
    /// Groups `[D,GROUP]` of keys.
    panel: &'a [f32],
    /// `[HEADS,D]`
    rows: &'a [f32],
    /// Of the heads that there are.
    weight: &'a [f32],
    scale: f32,
    sums: &'a mut [f32],
}

impl Kernel for Heads<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let dim = self.rows.len() / HEADS;
        let (zero, scale) = (s.splat(0.0), all(s, self.scale));
        for (group, sums) in self.sums.chunks_exact_mut(GROUP).enumerate() {
            let panel = &self.panel[group * dim * GROUP..][..dim * GROUP];
            for at in (0..GROUP).step_by(2 * S::LANES) {
                let mut x = [[zero; 2]; HEADS];
                for d in 0..dim {
                    // SAFETY: the panel has GROUP numbers for each d, and two vectors from `at` on are among them.
                    let k = unsafe { two(s, panel, d * GROUP + at) };
                    for (x, row) in x.iter_mut().zip(self.rows.chunks_exact(dim)) {
                        *x = fma(s, all(s, row[d]), k, *x);
                    }
                }
                // SAFETY: as above, of GROUP sums.
                let mut sum = unsafe { two(s, sums, at) };
                for (x, weight) in x.iter().zip(self.weight) {
                    let x = mul(s, *x, scale);
                    let r = [s.select_ge(zero, x[0], zero, x[0]), s.select_ge(zero, x[1], zero, x[1])];
                    sum = fma(s, all(s, *weight), r, sum);
                }
                // SAFETY: as above.
                unsafe { put(s, sum, sums, at) };
            }
        }
    }
}

/// Its kernels.
const UNIT: Unit = Unit { has_out: false, ..Unit::of(NAME, include_str!("index_score.cu"), &[NAME]) };

/// index_score, by name.
pub(crate) const OP: Entry = Entry {
    name: NAME,
    cpu: |cpu, args| {
        let shape = IndexScore::of(args.call);
        let inputs = ["q", "k", "weight"].map(|name| args.input(name));
        run(cpu, &shape, shape.factor()?, inputs, args.output("score").host(NAME, "score")?)
    },
    device: Some(|on, args| {
        let (shape, [q, k, weight]) = (IndexScore::of(args.call), ["q", "k", "weight"].map(|name| args.input(name)));
        let (weight, score) = (weight.device_part(NAME, "weight")?, args.output("score").device_part(NAME, "score")?);
        typed!(q.dtype() => I, {
            let operands = [q.device_part::<I>(NAME, "q")?, k.device_part(NAME, "k")?];
            launch(on, &shape, shape.factor()?, operands, weight, score)
        })
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// Threads of a block, each of which takes a key.
const THREADS: usize = 128;

/// The call was checked.
fn launch<I: Stored>(
    on: &Device,
    shape: &IndexScore,
    scale: f32,
    [(q, q_at), (k, k_at)]: [(&Buffer<I>, usize); 2],
    (weight, weight_at): (&Buffer<f32>, usize),
    (score, at): (&mut Buffer<f32>, usize),
) -> Result<(), Error> {
    let IndexScore { tokens, heads, dim, keys, .. } = *shape;
    if tokens == 0 || keys == 0 {
        return Ok(());
    }
    let arguments = Arguments::new().buffer_from(q, q_at).buffer_from(k, k_at).buffer_from(weight, weight_at);
    let arguments = arguments.buffer_from(score, at).int(int(NAME, "H", heads)?).int(int(NAME, "D", dim)?);
    let (arguments, grid) = (arguments.long(keys).float(scale), [tokens, keys.div_ceil(THREADS), 1]);
    // SAFETY: lengths were checked; a thread takes a score, and those behind the last key do nothing.
    unsafe { on.launch(Build::of::<I, f32>(NAME), NAME, grid, THREADS as u32, 0, &arguments) }
}

/// [`index_score`] on a device.
///
/// # Errors
/// As [`index_score`]; errors of the device.
pub fn on_device<I: Stored>(
    on: &Device,
    shape: &IndexScore,
    q: &Buffer<I>,
    k: &Buffer<I>,
    weight: &Buffer<f32>,
    score: &mut Buffer<f32>,
) -> Result<(), Error> {
    let scale = shape.check([q.len(), k.len(), weight.len(), score.len()])?;
    launch(on, shape, scale, [(q, 0), (k, 0)], (weight, 0), (score, 0))
}
