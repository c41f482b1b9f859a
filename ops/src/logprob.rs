//! Log-probability of one token per row: `logits[R,V], target[R] -> logprob[R], lse[R]` (f32).
//!
//! Formula: `x = logits / temperature`, `lse = ln(sum of e^x)`, `logprob = x[target] - lse`.
//! Order: `x = z * f32(1/temperature)`; every exponential is `m * 2^i` with `n = max i` as the reference point; the
//! weights `m * 2^(i-n)` are summed as 8 segments of `16 * ceil(V / 128)` elements, each by the `lanes` sum.
//! Rounding: every step once to f32; `lse` in f64, rounded once.
//! Special: a NaN or +inf in the row gives NaN; -inf is skipped; all -inf gives lse -inf and logprob NaN; target < 0
//! gives logprob 0.

use crate::gemm::segment_length;
use crate::lane_sum::{Step, lane_sum};
use crate::lanes::{Kernel, Simd, load_at};
use crate::math::{LOG2E_HI, LOG2E_LO, exp_split, lse, weight};
use crate::{Cpu, Element, Error, check_len, value_error};

/// `logits[R,V], target[R] -> logprob[R], lse[R]`; `rows` is R, `vocab` is V.
///
/// # Errors
/// [`Error::Length`] when a slice does not match; [`Error::Value`] when `temperature` is not positive and finite or a
/// target is V or more.
#[allow(clippy::too_many_arguments)]
pub fn logprob<I: Element>(
    cpu: &Cpu,
    rows: usize,
    vocab: usize,
    temperature: f64,
    logits: &[I],
    target: &[i32],
    logprob: &mut [f32],
    lse: &mut [f32],
) -> Result<(), Error> {
    check_len("logprob", "logits", "[R,V]", logits.len(), &[rows, vocab])?;
    check_len("logprob", "target", "[R]", target.len(), &[rows])?;
    check_len("logprob", "logprob", "[R]", logprob.len(), &[rows])?;
    check_len("logprob", "lse", "[R]", lse.len(), &[rows])?;
    let scale = (1.0 / temperature) as f32;
    if !(temperature > 0.0 && temperature.is_finite() && scale > 0.0 && scale.is_finite()) {
        return Err(value_error("logprob", format!("temperature is {temperature}; it must be positive and finite")));
    }
    if let Some(row) = target.iter().position(|&t| t >= 0 && t as usize >= vocab) {
        return Err(value_error("logprob", format!("target[{row}] is {}; the vocabulary has {vocab}", target[row])));
    }
    cpu.chunks(lse, 1, |row, lse| {
        lse[0] = cpu.dispatch(Total { x: &logits[row * vocab..][..vocab], scale }).lse();
    });
    for (row, (out, &target)) in logprob.iter_mut().zip(target).enumerate() {
        *out = match usize::try_from(target) {
            Ok(target) => f32::narrow(logits[row * vocab + target].widen() * scale - lse[row]),
            Err(_) => 0.0,
        };
    }
    Ok(())
}

/// The softmax denominator of one row as `sum * 2^n`.
pub(crate) struct Denominator {
    /// The reference point: the largest exponent of the row.
    pub n: f32,
    /// Sum of the weights; +0 for a row without a finite element, NaN for a row with a NaN or +inf.
    pub sum: f32,
}

impl Denominator {
    fn lse(&self) -> f32 {
        match self.sum {
            0.0 => f32::NEG_INFINITY,
            sum if sum.is_nan() => f32::narrow(sum),
            sum => lse(self.n, sum),
        }
    }
}

/// Computes the [`Denominator`] of one row of `x * scale`.
pub(crate) struct Total<'a, I> {
    pub x: &'a [I],
    pub scale: f32,
}

impl<I: Element> Kernel for Total<'_, I> {
    type Output = Denominator;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Denominator {
        let scale = s.splat(self.scale);
        let lowest = I::narrow(f32::NEG_INFINITY);
        // exp_split rounds a product that grows with x, so the largest x has the largest exponent.
        let mut largest = s.splat(f32::NEG_INFINITY);
        let mut invalid = false;
        for at in (0..self.x.len()).step_by(S::LANES) {
            let x = s.mul(load_at(s, self.x, at, lowest), scale);
            invalid |= s.any_nan_or_inf(x);
            largest = s.max(x, largest);
        }
        let mut lanes = [f32::NEG_INFINITY; crate::lanes::MAX_LANES];
        // SAFETY: MAX_LANES >= LANES.
        unsafe { s.store(largest, lanes.as_mut_ptr()) };
        let largest = lanes.into_iter().fold(f32::NEG_INFINITY, f32::max);
        let n = (largest * LOG2E_HI).round_ties_even();
        if invalid {
            return Denominator { n, sum: f32::NAN };
        }
        if largest == f32::NEG_INFINITY {
            return Denominator { n, sum: 0.0 };
        }
        if n.is_infinite() {
            // A finite element beyond 2^127.5 overflows x * log2(e): inf - inf.
            return Denominator { n, sum: f32::NAN };
        }
        let step = AddWeight { scale: self.scale, n };
        let length = segment_length(self.x.len());
        let mut part = [0f32; 8];
        for (sum, segment) in part.iter_mut().zip(self.x.chunks(length)) {
            *sum = lane_sum(s, segment, lowest, step);
        }
        let [s0, s1, s2, s3, s4, s5, s6, s7] = part;
        Denominator { n, sum: ((s0 + s1) + (s2 + s3)) + ((s4 + s5) + (s6 + s7)) }
    }
}

/// `acc +` the weight of an element; -inf has weight +0, which changes no lane.
#[derive(Clone, Copy)]
struct AddWeight {
    scale: f32,
    n: f32,
}

impl Step for AddWeight {
    #[inline(always)]
    fn step<S: Simd>(self, s: S, acc: S::F, x: S::F) -> S::F {
        let x = s.mul(x, s.splat(self.scale));
        let (m, i) = exp_split(s, x, s.splat(LOG2E_HI), s.splat(LOG2E_LO));
        s.add(acc, weight(s, m, i, s.splat(self.n)))
    }
}
