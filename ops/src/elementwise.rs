//! The frame of ops that take one element of each of two inputs and make one of the output.

use crate::lanes::twice::Twice;
use crate::lanes::{Kernel, Simd, load_at, load_two, narrow_at, narrow_two, paired};
use crate::pack::prefetch_at;
use crate::sink::{Sink, is_large};
use crate::{Cpu, Element};

/// What is done to each pair of elements, before the last rounding.
pub trait Pointwise: Copy + Sync + Send {
    /// The value made of `a` and `b`.
    fn apply<S: Simd>(self, s: S, a: S::F, b: S::F) -> S::F;
}

/// `y[i] = op(a[i], b[i])`, last rounding; the caller has checked that the lengths are equal.
pub fn elementwise<I: Element, O: Element>(cpu: &Cpu, op: impl Pointwise, a: &[I], b: &[I], y: &mut [O]) {
    let size = cpu.elements_per_chunk(y.len());
    let large = is_large(cpu, y);
    cpu.chunks(y, size, |chunk, y| {
        let range = chunk * size..chunk * size + y.len();
        cpu.dispatch(Part { op, a: &a[range.clone()], b: &b[range], y, large });
    });
}

struct Part<'a, P, I, O> {
    op: P,
    a: &'a [I],
    b: &'a [I],
    y: &'a mut [O],
    large: bool,
}

impl<P: Pointwise, I: Element, O: Element> Kernel for Part<'_, P, I, O> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut sink = Sink::<O>::new(self.y, self.large);
        let mut at = 0;
        while at < self.a.len() {
            let y = sink.room(self.a.len() - at);
            let len = y.len();
            pointwise(s, self.op, &self.a[at..][..len], &self.b[at..][..len], y);
            sink.put(s, len);
            at += len;
        }
        sink.end(s);
    }
}

/// So many bytes ahead of the work memory is asked for: what one element costs leaves the processor's own look-ahead behind.
const AHEAD: usize = 6 << 10;

/// `y[i] = op(a[i], b[i])`, last rounding; the lengths are equal.
#[inline(always)]
pub fn pointwise<S: Simd, I: Element, O: Element>(s: S, op: impl Pointwise, a: &[I], b: &[I], y: &mut [O]) {
    let len = y.len();
    let (pairs, four) = (paired::<I, O>(), 4 * S::LANES);
    let (s2, s4) = (Twice(s), Twice(Twice(s)));
    let whole = len - len % four;
    for ((a, b), y) in a.chunks_exact(four).zip(b.chunks_exact(four)).zip(y.chunks_exact_mut(four)) {
        prefetch_at(a, AHEAD);
        prefetch_at(b, AHEAD);
        let (a, b) = (load_two(s2, a, pairs), load_two(s2, b, pairs));
        narrow_two(s2, op.apply(s4, a, b), y, pairs);
    }
    for at in (whole..len).step_by(S::LANES) {
        let (a, b) = (load_at(s, a, at, I::default()), load_at(s, b, at, I::default()));
        narrow_at(s, op.apply(s, a, b), y, at);
    }
}
