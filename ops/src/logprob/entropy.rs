//! Entropy of rows of logits: `logits[R,V] -> entropy[R], lse[R]` (f32).
//!
//! Formula: `p = softmax(logits / temperature)`, `entropy = -(sum of p * ln p)`; lse is that of `logprob`.
//! Order: weights `w`, their sum `l` and its order are those of `logprob`; `s` sums `w * (top - x)` over the same segments
//! and lanes, a lane a chain of fma, `top` being the largest x, of weight `t`; `rest` is l without the first such.
//! Rounding: every step once to f32; `ln(1 + rest / t) + s / l` in f64, rounded once, its first term `ln(l) - ln(t)` where
//! rest is not below t.
//! Special: -inf and what has weight +0 is skipped; a row whose lse is NaN or -inf has entropy NaN.

use crate::backend::device::{Arguments, Buffer, Build, Device, Unit};
use crate::call::Entry;
use crate::element::{Stored, typed};
use crate::gemm::shape::segment_length;
use crate::logprob::logprob::{Denominator, Reference, folded, inverse, join, weights};
use crate::math::{ln, ln1p};
use crate::reduce::{Add, Lanes};
use crate::simd::{Kernel, OnLine, Simd, load_at, narrow_at};
use crate::{Cpu, Element, Error, TensorRef, check_len};

/// Dimensions and parameter of `entropy` and of its gradient.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Entropy {
    /// Rows R.
    pub rows: usize,
    /// Tokens of the vocabulary, V.
    pub vocab: usize,
    /// What logits are divided by; positive and finite.
    pub temperature: f64,
}

impl Entropy {
    /// At temperature 1.
    pub fn new(rows: usize, vocab: usize) -> Entropy {
        Entropy { rows, vocab, temperature: 1.0 }
    }
}

/// `logits[R,V] -> entropy[R], lse[R]`, row-major, in nats.
///
/// # Errors
/// [`Error::Length`] when a slice does not match; [`Error::Value`] when `temperature` is not positive and finite.
///
/// ```
/// use samebits_ops::{Cpu, Entropy, entropy};
///
/// // Two tokens, equally likely; one that is certain.
/// let (mut h, mut lse) = ([9f32; 2], [9f32; 2]);
/// let logits = [0.0, 0.0, 3.0, f32::NEG_INFINITY];
/// entropy(&Cpu::best(), &Entropy::new(2, 2), &logits, &mut h, &mut lse)?;
/// assert_eq!(h, [2f32.ln(), 0.0]);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn entropy<I: Element>(
    cpu: &Cpu,
    shape: &Entropy,
    logits: &[I],
    entropy: &mut [f32],
    lse: &mut [f32],
) -> Result<(), Error> {
    let Entropy { rows, vocab, temperature } = *shape;
    check(logits.len(), [entropy.len(), lse.len()], rows, vocab)?;
    run(cpu, temperature, TensorRef::of(logits, &[rows, vocab]), entropy, lse)
}

/// Lengths of logits, and of entropy and lse.
fn check(logits: usize, outputs: [usize; 2], rows: usize, vocab: usize) -> Result<(), Error> {
    check_len("entropy", "logits", "[R,V]", logits, &[rows, vocab])?;
    for (name, found) in ["entropy", "lse"].into_iter().zip(outputs) {
        check_len("entropy", name, "[R]", found, &[rows])?;
    }
    Ok(())
}

/// Rows of logits of any layout, as many as there are outputs.
fn run(cpu: &Cpu, temperature: f64, logits: TensorRef, entropy: &mut [f32], lse: &mut [f32]) -> Result<(), Error> {
    let vocab = *logits.shape().last().expect("[R,V]");
    let scale = inverse("entropy", temperature)?;
    logits.on_host("entropy", "logits")?;
    typed!(logits.dtype() => I, {
        let logits = logits.rows::<I>();
        let chunk = cpu.rows_per_chunk(lse.len(), vocab);
        let mut parts: Vec<_> = entropy.chunks_mut(chunk).zip(lse.chunks_mut(chunk)).collect();
        cpu.chunks(&mut parts, 1, |i, parts| {
            for (entropy, lse) in parts {
                for (row, outputs) in (i * chunk..).zip(entropy.iter_mut().zip(lse.iter_mut())) {
                    (*outputs.0, *outputs.1) = cpu.dispatch(Row { x: logits.row(row), scale });
                }
            }
        });
    });
    Ok(())
}

/// Its kernel.
const UNIT: Unit = Unit { has_out: false, ..Unit::of("entropy", include_str!("entropy.cu"), &["entropy"]) };

/// entropy, by name.
pub(crate) const OP: Entry = Entry {
    name: "entropy",
    cpu: |cpu, args| {
        let (entropy, lse) =
            (args.output("entropy").host("entropy", "entropy")?, args.output("lse").host("entropy", "lse")?);
        run(cpu, args.call.float("temperature"), args.input("logits"), entropy, lse)
    },
    device: Some(|on, args| {
        let [rows, vocab] = ["R", "V"].map(|axis| args.call.dim(axis));
        let shape = Entropy { rows, vocab, temperature: args.call.float("temperature") };
        let logits = args.input("logits");
        let [entropy, lse] = ["entropy", "lse"].map(|name| args.output(name).device("entropy", name));
        typed!(logits.dtype() => I, {
            on_device(on, &shape, logits.device::<I>("entropy", "logits")?, entropy?, lse?)
        })
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// [`entropy`] on a device.
///
/// # Errors
/// As [`entropy`]; errors of the device.
pub fn on_device<I: Stored>(
    device: &Device,
    shape: &Entropy,
    logits: &Buffer<I>,
    entropy: &mut Buffer<f32>,
    lse: &mut Buffer<f32>,
) -> Result<(), Error> {
    let Entropy { rows, vocab, temperature } = *shape;
    check(logits.len(), [entropy.len(), lse.len()], rows, vocab)?;
    let scale = inverse("entropy", temperature)?;
    let arguments = Arguments::new().buffer(logits).buffer(entropy).buffer(lse).long(vocab).float(scale);
    // SAFETY: lengths were checked; a block takes a row.
    unsafe { device.launch(Build::of::<I, f32>("entropy"), "entropy", [rows, 1, 1], 256, 0, &arguments) }
}

/// Weights that stay in L1 until they are added; a multiple of 256.
const TILE: usize = 1024;

/// Computes entropy and lse of the row `x * scale`.
struct Row<'a, I> {
    x: &'a [I],
    scale: f32,
}

impl<I: Element> Kernel for Row<'_, I> {
    type Output = (f32, f32);
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> (f32, f32) {
        let Row { x, scale } = self;
        let reference = Reference::of(s, x, scale);
        let Reference { top, mut origin, special, .. } = reference;
        if let Some(sum) = special {
            return (f32::narrow(f32::NAN), Denominator { origin, sum, rest: sum }.lse());
        }
        let far = reference.seen_from_top().map(|from_top| {
            origin = from_top.origin;
            Denominator::of_long_row(s, x, scale, &reference).lse()
        });
        let first = first(x, |x| x.widen() * scale == top);
        let OnLine([w, below]) = &mut OnLine([[0f32; TILE]; 2]);
        let (mut sums, mut rest, mut distances, length) = ([0f32; 8], [0f32; 8], [0f32; 8], segment_length(x.len()));
        for (i, segment) in x.chunks(length).enumerate() {
            let (mut of_weights, mut of_products) = (Lanes::new(), Lanes::new());
            for x in segment.chunks(TILE) {
                let (w, below) = (&mut w[..x.len()], &mut below[..x.len()]);
                weights(s, x, scale, origin, w);
                s.enter(Below { x, scale, top, w, below });
                of_weights.add(s, w, Add);
                of_products.add_products(s, w, below);
            }
            let at = first.checked_sub(i * length);
            [sums[i], rest[i]] = folded(s, of_weights, false, (segment, scale, &origin), at);
            distances[i] = of_products.fold(s, segment.len());
        }
        let total = Denominator { origin, sum: join(sums), rest: join(rest) };
        let Denominator { sum, rest, .. } = total;
        let t = origin.weight(top);
        let spread = if rest < t { ln1p(rest, t) } else { ln(sum) - ln(t) };
        let entropy = spread + f64::from(join(distances)) / f64::from(sum);
        (entropy as f32, far.unwrap_or_else(|| total.lse()))
    }
}

/// The first element for which `is` holds, which it does for one.
fn first<T: Copy>(x: &[T], is: impl Fn(T) -> bool) -> usize {
    // Whole pieces are looked through without a way out, which goes by vectors.
    let piece = x.chunks(64).position(|x| x.iter().fold(false, |any, &x| any | is(x))).expect("one is");
    piece * 64 + x[piece * 64..].iter().position(|&x| is(x)).expect("it is in this piece")
}

/// How far elements of a row are below its top; +0 for those of weight +0.
struct Below<'a, I> {
    x: &'a [I],
    scale: f32,
    top: f32,
    w: &'a [f32],
    below: &'a mut [f32],
}

impl<I: Element> Kernel for Below<'_, I> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // Any other weight is far above the smallest normal number.
        let (top, none, least) = (s.splat(self.top), s.splat(0.0), s.splat(f32::MIN_POSITIVE));
        for at in (0..self.x.len()).step_by(S::LANES) {
            let x = s.mul(load_at(s, self.x, at, I::default()), s.splat(self.scale));
            let w = load_at(s, self.w, at, 0.0);
            narrow_at(s, s.select_ge(w, least, s.sub(top, x), none), self.below, at);
        }
    }
}
