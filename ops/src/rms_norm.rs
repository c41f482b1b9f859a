//! Root mean square normalisation: `x[R,N], w[N] -> y[R,N]`.
//!
//! Formula: `r = 1 / sqrt(mean(x^2) + eps)`, `y = x * r * w`.
//! Order: `lanes(x*x)`, each lane a chain of fma; divided by `f32(N)`.
//! Rounding: every step once to f32. `once`: `(x*r)*w`, last rounding. `hf`: `x*r` is rounded to bf16, then `w *` it,
//! last rounding. `weight_offset` first makes `w + 1` in f32.

use crate::lane_sum::{Step, lane_sum};
use crate::lanes::{Kernel, Simd, load_at, narrow_at};
use crate::{Cpu, Element, Error, check_len};
use half::bf16;

/// Where `rms_norm` rounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    /// `(x*r)*w`, one rounding at the end.
    Once,
    /// `w * bf16(x*r)`, as Hugging Face models do in bf16.
    Hf,
}

/// Dimensions and parameters of `rms_norm`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RmsNorm {
    /// Rows R.
    pub rows: usize,
    /// Features N.
    pub n: usize,
    /// Added to the mean square, under the root.
    pub eps: f32,
    /// Where to round.
    pub rounding: Rounding,
    /// Use `w + 1` for `w`.
    pub weight_offset: bool,
}

/// `x[R,N], w[N] -> y[R,N]`, all row-major.
///
/// # Errors
/// [`Error::Length`] when a slice does not match.
pub fn rms_norm<I: Element, O: Element>(
    cpu: &Cpu,
    shape: &RmsNorm,
    x: &[I],
    w: &[I],
    y: &mut [O],
) -> Result<(), Error> {
    let RmsNorm { rows, n, .. } = *shape;
    check_len("rms_norm", "x", "[R,N]", x.len(), &[rows, n])?;
    check_len("rms_norm", "w", "[N]", w.len(), &[n])?;
    check_len("rms_norm", "y", "[R,N]", y.len(), &[rows, n])?;
    let rows_per_chunk = cpu.rows_per_chunk(rows, n);
    cpu.chunks(y, rows_per_chunk * n, |chunk, y| {
        let x = &x[chunk * rows_per_chunk * n..][..y.len()];
        cpu.dispatch(Rows { shape, x, w, y });
    });
    Ok(())
}

/// `acc + x*x`, fused.
#[derive(Clone, Copy)]
struct Square;

impl Step for Square {
    #[inline(always)]
    fn step<S: Simd>(self, s: S, acc: S::F, x: S::F) -> S::F {
        s.fma(x, x, acc)
    }
}

struct Rows<'a, I, O> {
    shape: &'a RmsNorm,
    x: &'a [I],
    w: &'a [I],
    y: &'a mut [O],
}

impl<I: Element, O: Element> Kernel for Rows<'_, I, O> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let RmsNorm { n, eps, rounding, weight_offset, .. } = *self.shape;
        for (x, y) in self.x.chunks(n.max(1)).zip(self.y.chunks_mut(n.max(1))) {
            // The pad +0 adds +0 to a lane that is never -0.
            let mean_square = lane_sum(s, x, I::default(), Square) / n as f32;
            let r = s.splat(1.0 / (mean_square + eps).sqrt());
            for at in (0..n).step_by(S::LANES) {
                let mut weight = load_at(s, self.w, at, I::default());
                if weight_offset {
                    weight = s.add(weight, s.splat(1.0));
                }
                let scaled = s.mul(load_at(s, x, at, I::default()), r);
                let value = match rounding {
                    Rounding::Once => s.mul(scaled, weight),
                    Rounding::Hf => {
                        let mut rounded = [bf16::ZERO; crate::lanes::MAX_LANES];
                        narrow_at(s, scaled, &mut rounded, 0);
                        s.mul(weight, load_at(s, &rounded, 0, bf16::ZERO))
                    }
                };
                narrow_at(s, value, y, at);
            }
        }
    }
}
