//! Softmax: `x[R,N] -> y[R,N]`.
//!
//! Formula: `y = e^x / sum of e^x`.
//! Order: the weights `m * 2^(i-n)` and their sum are those of `logprob` at temperature 1.
//! Rounding: every step once to f32; `weight / sum`, last rounding.
//! Special: a NaN or +inf in the row, or nothing but -inf, gives a row of NaN.

use crate::element::compile_here;
use crate::logprob::logprob::{Denominator, Total, weights};
use crate::simd::stream::{Sink, is_large};
use crate::simd::{Kernel, Simd, load_at, load_two, narrow_at, narrow_two};
use crate::{Cpu, Element, Error, check_len};

/// Weights kept between the sum and the division: most of a first cache. Those of a longer row are computed twice.
const KEPT: usize = 8192;

/// `x[R,N] -> y[R,N]`; `rows` is R.
///
/// # Errors
/// [`Error::Length`] when a slice does not match.
pub fn softmax<I: Element, O: Element>(cpu: &Cpu, rows: usize, n: usize, x: &[I], y: &mut [O]) -> Result<(), Error> {
    check_len("softmax", "x", "[R,N]", x.len(), &[rows, n])?;
    check_len("softmax", "y", "[R,N]", y.len(), &[rows, n])?;
    compile_here!((cpu: &Cpu, rows: usize, n: usize) I(x) O(y) -> () => Rows::chunks(cpu, rows, n, x, y));
    Ok(())
}

struct Rows<'a, I, O> {
    n: usize,
    x: &'a [I],
    y: &'a mut [O],
    large: bool,
}

impl<I: Element, O: Element> Rows<'_, I, O> {
    fn chunks(cpu: &Cpu, rows: usize, n: usize, x: &[I], y: &mut [O]) {
        let rows_per_chunk = cpu.rows_per_chunk(rows, n);
        let large = is_large(cpu, y);
        cpu.chunks(y, rows_per_chunk * n, |chunk, y| {
            let x = &x[chunk * rows_per_chunk * n..][..y.len()];
            cpu.dispatch(Rows { n, x, y, large });
        });
    }
}

impl<I: Element, O: Element> Kernel for Rows<'_, I, O> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut sink = Sink::<O>::new(self.y, self.large);
        let mut kept = [0f32; KEPT];
        for x in self.x.chunks_exact(self.n.max(1)) {
            let whole_row = x.len() <= KEPT;
            let Denominator { n, sum } =
                if whole_row { Denominator::of_row(s, x, 1.0, &mut kept) } else { Total { x, scale: 1.0 }.run(s) };
            for x in x.chunks(KEPT) {
                let w = &mut kept[..x.len()];
                if sum.is_nan() || sum == 0.0 {
                    w.fill(f32::NAN);
                } else if !whole_row {
                    weights(s, x, 1.0, n, w);
                }
                divide(s, w, sum, &mut sink);
            }
        }
        sink.end(s);
    }
}

/// `w / sum`, last rounding, as the next elements of `sink`.
#[inline(always)]
fn divide<S: Simd, O: Element>(s: S, mut w: &[f32], sum: f32, sink: &mut Sink<O>) {
    let (two, sum) = (2 * S::LANES, s.splat(sum));
    while !w.is_empty() {
        let y = sink.room(w.len());
        let (part, rest) = w.split_at(y.len());
        let whole = part.len() - part.len() % two;
        for (w, y) in part.chunks_exact(two).zip(y.chunks_exact_mut(two)) {
            let (w0, w1) = load_two(s, w, false);
            narrow_two(s, (s.div(w0, sum), s.div(w1, sum)), y, false);
        }
        for at in (whole..part.len()).step_by(S::LANES) {
            narrow_at(s, s.div(load_at(s, part, at, 0.0), sum), y, at);
        }
        sink.put(s, part.len());
        w = rest;
    }
}
