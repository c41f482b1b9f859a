//! The frame of ops that take one element of each of two inputs and make one of the output.

use crate::lanes::{Kernel, Simd, load_at, narrow_at};
use crate::{Cpu, Element};

/// What is done to each pair of elements, before the last rounding.
pub trait Pointwise: Copy + Sync + Send {
    /// The value made of `a` and `b`.
    fn apply<S: Simd>(self, s: S, a: S::F, b: S::F) -> S::F;
}

/// `y[i] = op(a[i], b[i])`, last rounding; the caller has checked that the lengths are equal.
pub fn elementwise<I: Element, O: Element>(cpu: &Cpu, op: impl Pointwise, a: &[I], b: &[I], y: &mut [O]) {
    let size = cpu.elements_per_chunk(y.len());
    cpu.chunks(y, size, |chunk, y| {
        let range = chunk * size..chunk * size + y.len();
        cpu.dispatch(Part { op, a: &a[range.clone()], b: &b[range], y });
    });
}

struct Part<'a, P, I, O> {
    op: P,
    a: &'a [I],
    b: &'a [I],
    y: &'a mut [O],
}

impl<P: Pointwise, I: Element, O: Element> Kernel for Part<'_, P, I, O> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for at in (0..self.y.len()).step_by(S::LANES) {
            let (a, b) = (load_at(s, self.a, at, I::default()), load_at(s, self.b, at, I::default()));
            narrow_at(s, self.op.apply(s, a, b), self.y, at);
        }
    }
}
