//! Weighted sum of expert outputs: `x[R,N], row[T,K], weight[T,K], shared[T,N]? -> y[T,N]`.
//!
//! Formula: `y[t] = sum over r of weight[t][r] * x[row[t][r]] + shared[t]`.
//! Order: a chain over the rank r, ascending: `acc = fma(weight, x, acc)` from +0; then `+ shared`.
//! Rounding: every step once to f32; last rounding.

use crate::element::compile_here;
use crate::simd::{Kernel, Simd, load_at, narrow_at};
use crate::{Cpu, Element, Error, check_len, value_error};

/// Dimensions of the sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Combine {
    /// Tokens T.
    pub tokens: usize,
    /// Experts of each token, K.
    pub chosen: usize,
    /// Rows of x, R.
    pub rows: usize,
    /// Elements of a row, N.
    pub n: usize,
}

/// `x[R,N], row[T,K], weight[T,K], shared[T,N]? -> y[T,N]`: row `row[t][r]` of x is what the expert of rank r made of
/// token t. Rows may stand in any order.
///
/// # Errors
/// [`Error::Length`] when a slice does not match; [`Error::Value`] when a row is outside `0..R`.
pub fn combine<I: Element, O: Element>(
    cpu: &Cpu,
    shape: &Combine,
    x: &[I],
    row: &[i32],
    weight: &[f32],
    shared: Option<&[I]>,
    y: &mut [O],
) -> Result<(), Error> {
    check(shape, [x.len(), weight.len(), y.len()], row, shared.map(<[I]>::len))?;
    compile_here!((cpu: &Cpu, shape: &Combine, row: &[i32], weight: &[f32]) I(x) ?(shared) O(y) -> () => {
        let Combine { chosen, n, .. } = *shape;
        cpu.chunks(y, n, |t, y| {
            let shared = shared.map(|shared| &shared[t * n..][..n]);
            let (row, weight) = (&row[t * chosen..][..chosen], &weight[t * chosen..][..chosen]);
            cpu.dispatch(Token { x, n, row, weight, shared, y });
        })
    });
    Ok(())
}

/// Checks a call, whatever it runs on, by the lengths of its slices and its rows.
pub(crate) fn check(shape: &Combine, lens: [usize; 3], row: &[i32], shared: Option<usize>) -> Result<(), Error> {
    let Combine { tokens, chosen, rows, .. } = *shape;
    check_len("combine", "row", "[T,K]", row.len(), &[tokens, chosen])?;
    check_lens(shape, lens, shared)?;
    if let Some(i) = row.iter().position(|&row| usize::try_from(row).map_or(true, |row| row >= rows)) {
        return Err(value_error("combine", format!("row element {i} is {}; x has {rows} rows", row[i])));
    }
    Ok(())
}

/// Checks the lengths of x, weight, y and shared.
pub(crate) fn check_lens(shape: &Combine, [x, weight, y]: [usize; 3], shared: Option<usize>) -> Result<(), Error> {
    let Combine { tokens, chosen, rows, n } = *shape;
    check_len("combine", "x", "[R,N]", x, &[rows, n])?;
    check_len("combine", "weight", "[T,K]", weight, &[tokens, chosen])?;
    if let Some(shared) = shared {
        check_len("combine", "shared", "[T,N]", shared, &[tokens, n])?;
    }
    check_len("combine", "y", "[T,N]", y, &[tokens, n])
}

struct Token<'a, I, O> {
    x: &'a [I],
    n: usize,
    row: &'a [i32],
    weight: &'a [f32],
    shared: Option<&'a [I]>,
    y: &'a mut [O],
}

impl<I: Element, O: Element> Kernel for Token<'_, I, O> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for at in (0..self.n).step_by(S::LANES) {
            let mut acc = s.splat(0.0);
            for (&row, &weight) in self.row.iter().zip(self.weight) {
                let x = &self.x[row as usize * self.n..][..self.n];
                acc = s.fma(s.splat(weight), load_at(s, x, at, I::default()), acc);
            }
            if let Some(shared) = self.shared {
                acc = s.add(acc, load_at(s, shared, at, I::default()));
            }
            narrow_at(s, acc, self.y, at);
        }
    }
}
