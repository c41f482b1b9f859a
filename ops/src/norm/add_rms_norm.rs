//! Residual sum and its normalisation in one: `x[R,N], residual[R,N], w[N] -> sum[R,N], y[R,N]`.
//!
//! Formula: `sum = x + residual`, `y = rms_norm(sum, w)`.
//! Order and rounding: bit for bit `add` with its last rounding, then `rms_norm` of the sum as it is stored.

use crate::elementwise::add::Add;
use crate::elementwise::frame::pointwise;
use crate::norm::rms_norm::Scale;
use crate::simd::stream::{Sink, is_large};
use crate::simd::{Kernel, Simd};
use crate::{Cpu, Element, Error, RmsNorm, Rounding, check_len};

/// The longest row of a large sum that is made in the cache before it is written past it.
const KEPT: usize = 8192;

/// `x[R,N], residual[R,N], w[N] -> sum[R,N], y[R,N]`, all row-major. Sum and y may differ in type; the norm reads the sum
/// as it is stored.
///
/// # Errors
/// [`Error::Length`] when a slice does not match.
pub fn add_rms_norm<I: Element, M: Element, O: Element>(
    cpu: &Cpu,
    shape: &RmsNorm,
    x: &[I],
    residual: &[I],
    w: &[I],
    sum: &mut [M],
    y: &mut [O],
) -> Result<(), Error> {
    let RmsNorm { rows, n, .. } = *shape;
    check_len("add_rms_norm", "x", "[R,N]", x.len(), &[rows, n])?;
    check_len("add_rms_norm", "residual", "[R,N]", residual.len(), &[rows, n])?;
    check_len("add_rms_norm", "w", "[N]", w.len(), &[n])?;
    check_len("add_rms_norm", "sum", "[R,N]", sum.len(), &[rows, n])?;
    check_len("add_rms_norm", "y", "[R,N]", y.len(), &[rows, n])?;
    let large = (n <= KEPT && is_large(cpu, sum), is_large(cpu, y));
    let size = (cpu.rows_per_chunk(rows, n) * n).max(1);
    let mut parts: Vec<_> = sum.chunks_mut(size).zip(y.chunks_mut(size)).collect();
    cpu.chunks(&mut parts, 1, |part, outputs| {
        for (sum, y) in outputs {
            let (x, residual) = (&x[part * size..][..y.len()], &residual[part * size..][..y.len()]);
            cpu.dispatch(Rows { shape, x, residual, w, sum, y, large });
        }
    });
    Ok(())
}

struct Rows<'a, I, M, O> {
    shape: &'a RmsNorm,
    x: &'a [I],
    residual: &'a [I],
    w: &'a [I],
    sum: &'a mut [M],
    y: &'a mut [O],
    /// Of sum and y.
    large: (bool, bool),
}

impl<I: Element, M: Element, O: Element> Kernel for Rows<'_, I, M, O> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.shape.rounding {
            Rounding::Once => self.rows::<S, false>(s),
            Rounding::Hf => self.rows::<S, true>(s),
        }
    }
}

impl<I: Element, M: Element, O: Element> Rows<'_, I, M, O> {
    #[inline(always)]
    fn rows<S: Simd, const HF: bool>(self, s: S) {
        let n = self.shape.n;
        let mut sums = Sink::<M, KEPT>::new(self.sum, self.large.0);
        let mut sink = Sink::<O>::new(self.y, self.large.1);
        for (row, (x, residual)) in self.x.chunks_exact(n).zip(self.residual.chunks_exact(n)).enumerate() {
            let sum = sums.room(n);
            pointwise(s, Add, x, residual, sum, &mut []);
            let scale = Scale::<S, HF>::of_row(s, self.shape, sum);
            let next = [self.x, self.residual].map(|x| x.as_ptr().wrapping_add((row + 1) * n));
            scale.row(s, sum, self.w, &mut sink, next);
            sums.put(s, n);
        }
        sums.end(s);
        sink.end(s);
    }
}
