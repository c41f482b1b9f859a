//! Softmax: `x[R,N] -> y[R,N]`.
//!
//! Formula: `y = e^x / sum of e^x`.
//! Order: the weights `m * 2^(i-n)` and their sum are those of `logprob` at temperature 1.
//! Rounding: every step once to f32; `weight / sum`, last rounding.
//! Special: a NaN or +inf in the row, or nothing but -inf, gives a row of NaN.

use crate::lanes::{Kernel, Simd, load_at, narrow_at};
use crate::logprob::{Denominator, Total};
use crate::math::{LOG2E_HI, LOG2E_LO, exp_split, weight};
use crate::{Cpu, Element, Error, check_len};

/// `x[R,N] -> y[R,N]`; `rows` is R.
///
/// # Errors
/// [`Error::Length`] when a slice does not match.
pub fn softmax<I: Element, O: Element>(cpu: &Cpu, rows: usize, n: usize, x: &[I], y: &mut [O]) -> Result<(), Error> {
    check_len("softmax", "x", "[R,N]", x.len(), &[rows, n])?;
    check_len("softmax", "y", "[R,N]", y.len(), &[rows, n])?;
    cpu.chunks(y, n, |row, y| {
        let x = &x[row * n..][..y.len()];
        let total = cpu.dispatch(Total { x, scale: 1.0 });
        cpu.dispatch(Divide { x, total, y });
    });
    Ok(())
}

struct Divide<'a, I, O> {
    x: &'a [I],
    total: Denominator,
    y: &'a mut [O],
}

impl<I: Element, O: Element> Kernel for Divide<'_, I, O> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let n = if self.total.n.is_finite() { self.total.n } else { 0.0 };
        for at in (0..self.x.len()).step_by(S::LANES) {
            let x = load_at(s, self.x, at, I::default());
            let (m, i) = exp_split(s, x, s.splat(LOG2E_HI), s.splat(LOG2E_LO));
            let value = s.div(weight(s, m, i, s.splat(n)), s.splat(self.total.sum));
            narrow_at(s, value, self.y, at);
        }
    }
}
