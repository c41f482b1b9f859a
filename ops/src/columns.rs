//! States of heads that every token changes, by columns, and sums over their rows: what recurrences share.
//!
//! Columns of a state never meet, so vectors run over them. They stand in groups of [`GROUP`], each of its own, whose rows are
//! close together: what a kernel goes over for every token stays in L1.

use crate::Cpu;
use crate::backend::device::{Arguments, Buffer};
use crate::math::exp;
use crate::parallel::SharedOut;
use crate::profile::IEEE;
use crate::simd::{Kernel, Simd, load_at, narrow_at};
use crate::tensor::Heads;
use crate::through_f32::convert;
use crate::workspace::{Need, Plan};
use std::ops::Range;

/// Columns of a group, a multiple of two vectors of any instruction set.
pub(crate) const GROUP: usize = 32;

/// Columns, and those that fill their last group.
pub(crate) fn padded(columns: usize) -> usize {
    columns.next_multiple_of(GROUP)
}

/// Some groups of columns of a state `[rows, columns]` of a head, or of the gradient of one; +0 where there is none.
pub(crate) fn gather(
    from: Option<&Heads<f32>>,
    head: usize,
    groups: Range<usize>,
    [rows, columns]: [usize; 2],
    to: &mut [f32],
) {
    to.fill(0.0);
    let Some(from) = from else { return };
    for (group, to) in groups.zip(to.chunks_exact_mut((GROUP * rows).max(1))) {
        let own = group * GROUP..columns.min((group + 1) * GROUP);
        for (d, to) in to.chunks_exact_mut(GROUP).enumerate() {
            to[..own.len()].copy_from_slice(&from.get(head, d)[own.clone()]);
        }
    }
}

/// The same back to its place.
pub(crate) fn scatter(
    cpu: &Cpu,
    from: &[f32],
    head: usize,
    groups: Range<usize>,
    [rows, columns]: [usize; 2],
    to: &SharedOut<f32>,
) {
    for (group, from) in groups.zip(from.chunks_exact((GROUP * rows).max(1))) {
        let count = GROUP.min(columns - group * GROUP);
        for (d, from) in from.chunks_exact(GROUP).enumerate() {
            let at = (head * rows + d) * columns + group * GROUP;
            // SAFETY: tasks have heads or columns of their own.
            convert(cpu, &from[..count], unsafe { to.part(at, count) });
        }
    }
}

/// A state `[rows, columns]` of a head whose rows and columns have changed places, in groups of rows; +0 where there is none.
pub(crate) fn turn(from: Option<&Heads<f32>>, head: usize, [rows, columns]: [usize; 2], to: &mut [f32]) {
    to.fill(0.0);
    let Some(from) = from else { return };
    for d in 0..rows {
        let first = d / GROUP * GROUP * columns + d % GROUP;
        for (e, x) in from.get(head, d).iter().enumerate() {
            to[first + e * GROUP] = *x;
        }
    }
}

/// Each number's exponential in its place.
pub(crate) struct Exponentials<'a>(pub &'a mut [f32]);

impl Kernel for Exponentials<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for at in (0..self.0.len()).step_by(S::LANES) {
            narrow_at(s, exp(s, load_at(s, self.0, at, 0.0)), self.0, at);
        }
    }
}

/// Two vectors, a step of the loops over columns.
pub(crate) type Two<S> = [<S as Simd>::F; 2];

/// Two vectors from `at` on.
///
/// # Safety
/// They are in `x`.
#[inline(always)]
pub(crate) unsafe fn two<S: Simd>(s: S, x: &[f32], at: usize) -> Two<S> {
    debug_assert!(at + 2 * S::LANES <= x.len());
    // SAFETY: the caller's promise.
    unsafe { [s.load(x.as_ptr().add(at)), s.load(x.as_ptr().add(at + S::LANES))] }
}

/// Two vectors to `at` and on.
///
/// # Safety
/// They are in `x`.
#[inline(always)]
pub(crate) unsafe fn put<S: Simd>(s: S, v: Two<S>, x: &mut [f32], at: usize) {
    debug_assert!(at + 2 * S::LANES <= x.len());
    // SAFETY: the caller's promise.
    unsafe {
        s.store(v[0], x.as_mut_ptr().add(at));
        s.store(v[1], x.as_mut_ptr().add(at + S::LANES));
    }
}

/// `a * b + c`
#[inline(always)]
pub(crate) fn fma<S: Simd>(s: S, a: Two<S>, b: Two<S>, c: Two<S>) -> Two<S> {
    [s.fma(a[0], b[0], c[0]), s.fma(a[1], b[1], c[1])]
}

/// `a * b`
#[inline(always)]
pub(crate) fn mul<S: Simd>(s: S, a: Two<S>, b: Two<S>) -> Two<S> {
    [s.mul(a[0], b[0]), s.mul(a[1], b[1])]
}

/// `a + b`
#[inline(always)]
pub(crate) fn add<S: Simd>(s: S, a: Two<S>, b: Two<S>) -> Two<S> {
    [s.add(a[0], b[0]), s.add(a[1], b[1])]
}

/// `a - b`
#[inline(always)]
pub(crate) fn sub<S: Simd>(s: S, a: Two<S>, b: Two<S>) -> Two<S> {
    [s.sub(a[0], b[0]), s.sub(a[1], b[1])]
}

/// A number in all lanes.
#[inline(always)]
pub(crate) fn all<S: Simd>(s: S, x: f32) -> Two<S> {
    [s.splat(x); 2]
}

/// Adds up the eight segments of a sum.
#[inline(always)]
pub(crate) fn join<S: Simd>(s: S, p: [Two<S>; IEEE.segments]) -> Two<S> {
    let (first, second) = (add(s, p[0], p[1]), add(s, p[2], p[3]));
    let (third, fourth) = (add(s, p[4], p[5]), add(s, p[6], p[7]));
    add(s, add(s, first, second), add(s, third, fourth))
}

/// Every how many tokens a gradient keeps a state, from which those of the others are made again; columns.cuh has the same.
pub(crate) const KEPT: usize = 32;

/// The states that are kept and those that are made again, in words, of states of so many.
pub(crate) fn kept(length: usize, of_state: usize) -> [usize; 2] {
    [length.div_ceil(KEPT), length.min(KEPT)].map(|count| of_state.saturating_mul(count))
}

/// Extents in all.
pub(crate) fn product(extents: &[usize]) -> usize {
    extents.iter().fold(1usize, |all, n| all.saturating_mul(*n))
}

/// The workspace of a gradient on a device: parts of so many words, one behind the other.
pub(crate) struct Words<const N: usize>(pub [usize; N]);

impl<const N: usize> Words<N> {
    /// Goes on with the parts of `room`.
    pub fn arguments(self, mut arguments: Arguments, room: &Buffer<f32>) -> Arguments {
        let mut first = 0;
        for words in self.0 {
            arguments = arguments.buffer_from(room, first);
            first += words;
        }
        arguments
    }
}

impl<const N: usize> Plan for Words<N> {
    fn need(&self) -> Need {
        let shared = self.0.iter().fold(0usize, |all, words| all.saturating_add(*words));
        Need { shared, workers: 1, ..Need::default() }
    }

    fn tiles(&self) -> [(&'static str, usize); 3] {
        [("tokens", KEPT), ("", 0), ("", 0)]
    }
}

/// Threads of a block on a device: eight for each column.
pub(crate) const THREADS: usize = 256;

/// Which of three kernels columns of so many rows take: up to 128 and up to 256 stay in registers.
pub(crate) fn by_size(rows: usize) -> usize {
    [128, 256].iter().filter(|&&most| rows > most).count()
}
