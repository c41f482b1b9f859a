//! Outputs from the first element to the last: small ones are written where they belong, large ones past the caches.
//!
//! A store to a line that no cache holds first reads it from memory. For an output that does not fit the caches that
//! read is a third of all traffic and pushes out what is still needed. So its whole lines leave by stores that bypass the
//! caches: each from registers as soon as it is made ([`Stream::fill`]), or from a buffer that stays in L1
//! ([`Stream::room`]), for ops that make their elements in another order.

use crate::simd::prefetch::prefetch_second;
use crate::simd::{MAX_LANES, OnLine, Simd};
use crate::{Cpu, Element};

/// Elements that are made together at most: all that is made of so many stays in L1.
pub const BLOCK: usize = 1024;
/// Elements that [`Made::line`] makes: whole lines of memory (one of bf16, two of f32) and pairs of vectors.
pub const LINE: usize = 32;
const _: () = assert!(LINE.is_multiple_of(2 * MAX_LANES));
/// An output of this many bytes would not be found in the caches when it is complete.
const LARGE: usize = 32 << 20;

/// Whether an output is written past the caches.
pub fn is_large<O: Element>(cpu: &Cpu, y: &[O]) -> bool {
    cpu.isa() != crate::Isa::Scalar && size_of_val(y) >= LARGE
}

/// What makes the elements that [`Stream::fill`] writes, from the first to the last.
pub trait Made<S: Simd, O> {
    /// The next of them.
    fn line(&mut self, s: S, y: &mut [O; LINE]);
    /// The next of them, fewer: what is before the first and after the last whole line of memory.
    fn some(&mut self, s: S, y: &mut [O]);
}

/// The first `n` elements of `x`, which are taken away from it.
#[inline(always)]
pub fn take<'a, T>(x: &mut &'a [T], n: usize) -> &'a [T] {
    let (taken, left) = x.split_at(n);
    *x = left;
    taken
}

/// Prefetches the [`LINE`] elements at `next` to L2 and moves on to those behind them.
#[inline(always)]
pub fn ask<T>(next: &mut *const T) {
    for byte in (0..LINE * size_of::<T>()).step_by(64) {
        prefetch_second(next.wrapping_byte_add(byte));
    }
    *next = next.wrapping_add(LINE);
}

/// Writes `y` from its first element to its last: what [`Stream::fill`] is given, or what [`Stream::room`] is filled with.
pub struct Stream<'a, O> {
    y: &'a mut [O],
    at: usize,
    /// Where elements are made that go past the caches.
    buffer: Option<OnLine<[O; BLOCK]>>,
}

impl<'a, O: Element> Stream<'a, O> {
    /// Writes `y`, a part of an output of which [`is_large`] says `large`.
    #[inline(always)]
    pub fn new(y: &'a mut [O], large: bool) -> Stream<'a, O> {
        Stream { y, at: 0, buffer: large.then(|| OnLine([O::default(); BLOCK])) }
    }

    /// Room for the next elements, as many of `most` as there are (a large output gives [`BLOCK`] at a time). All of
    /// it must be written before [`Stream::put`].
    #[inline(always)]
    pub fn room(&mut self, most: usize) -> &mut [O] {
        match &mut self.buffer {
            Some(buffer) => &mut buffer.0[..most.min(BLOCK)],
            None => &mut self.y[self.at..][..most],
        }
    }

    /// Ends the room of `len` elements that [`Stream::room`] gave.
    #[inline(always)]
    pub fn put<S: Simd>(&mut self, s: S, len: usize) {
        if let Some(buffer) = &self.buffer {
            copy_past_caches(s, &buffer.0[..len], &mut self.y[self.at..][..len]);
        }
        self.at += len;
    }

    /// The next `len` elements, as `made` makes them. Lines that go past the caches leave from registers: copied from a buffer,
    /// their stores would fill the queue that the stores to the buffer wait in.
    #[inline(always)]
    pub fn fill<S: Simd>(&mut self, s: S, len: usize, mut made: impl Made<S, O>) {
        let (head, large) = (self.before_line().min(len), self.buffer.is_some());
        let (head, rest) = self.y[self.at..][..len].split_at_mut(head);
        let (lines, tail) = rest.as_chunks_mut();
        if !head.is_empty() {
            made.some(s, head);
        }
        match large {
            true => put_lines::<S, O, true>(s, lines, &mut made),
            false => put_lines::<S, O, false>(s, lines, &mut made),
        }
        if !tail.is_empty() {
            made.some(s, tail);
        }
        self.at += len;
    }

    /// How many of the next elements of a large output stand before its next whole line of memory.
    #[inline(always)]
    pub fn before_line(&self) -> usize {
        if self.buffer.is_some() { self.y[self.at..].as_ptr().align_offset(64) } else { 0 }
    }

    /// How many of the next `left` elements to [`Stream::fill`] at a time: up to a [`BLOCK`], which begins with a whole line.
    #[inline(always)]
    pub fn block(&self, left: usize) -> usize {
        match self.before_line() {
            0 => left.min(BLOCK),
            head => left.min(head),
        }
    }

    /// The last `len` elements that were written.
    #[inline(always)]
    pub fn last(&self, len: usize) -> &[O] {
        &self.y[self.at - len..self.at]
    }

    /// Makes everything visible to other threads.
    #[inline(always)]
    pub fn end<S: Simd>(self, s: S) {
        if self.buffer.is_some() {
            s.fence();
        }
    }
}

/// Whole lines of an output, with `LARGE` past the caches; then they begin where lines of memory do.
#[inline(always)]
fn put_lines<S: Simd, O: Element, const LARGE: bool>(s: S, lines: &mut [[O; LINE]], made: &mut impl Made<S, O>) {
    assert!(!LARGE || lines.is_empty() || (lines.as_ptr() as usize).is_multiple_of(64));
    for y in lines {
        let mut line = [O::default(); LINE];
        made.line(s, &mut line);
        if LARGE {
            let (from, to) = (line.as_ptr().cast::<u8>(), y.as_mut_ptr().cast::<u8>());
            for byte in (0..size_of_val(&line)).step_by(64) {
                // SAFETY: both have LINE elements; `to` is aligned, as asserted, since LINE elements are whole lines.
                unsafe { s.stream_line(from.add(byte), to.add(byte)) };
            }
        } else {
            *y = line;
        }
    }
}

/// Whole lines of `y` by [`Simd::stream_line`], what is before the first and after the last one by ordinary stores.
#[inline(always)]
fn copy_past_caches<S: Simd, O: Element>(s: S, x: &[O], y: &mut [O]) {
    let head = y.as_ptr().align_offset(64).min(y.len());
    let lines = (y.len() - head) * size_of::<O>() / 64;
    let tail = head + lines * 64 / size_of::<O>();
    y[..head].copy_from_slice(&x[..head]);
    y[tail..].copy_from_slice(&x[tail..]);
    let (from, to) = (x[head..tail].as_ptr().cast::<u8>(), y[head..tail].as_mut_ptr().cast::<u8>());
    for line in 0..lines {
        // SAFETY: both slices hold `lines` times 64 bytes, and `to` is aligned by the choice of `head`.
        unsafe { s.stream_line(from.add(64 * line), to.add(64 * line)) };
    }
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;
    use crate::simd::Kernel;
    use crate::{Isa, bf16};

    /// The numbers from 1 on, as far as `T` tells them apart.
    struct Count(usize);

    fn number<T: Element>(i: usize) -> T {
        T::narrow((1 + i % 251) as f32)
    }

    impl<S: Simd, O: Element> Made<S, O> for Count {
        fn line(&mut self, s: S, y: &mut [O; LINE]) {
            Made::<S, O>::some(self, s, y);
        }
        fn some(&mut self, _: S, y: &mut [O]) {
            for y in y {
                *y = number(self.0);
                self.0 += 1;
            }
        }
    }

    /// Fills `y` in parts of the given lengths, and the rest block by block; the last elements as it hands them out again.
    struct Fill<'a, O>(&'a mut [O], bool, &'a [usize]);

    impl<O: Element + PartialEq> Kernel for Fill<'_, O> {
        type Output = ();
        fn run<S: Simd>(self, s: S) {
            let Fill(y, large, lengths) = self;
            let (all, mut done) = (y.len(), 0);
            let mut stream = Stream::new(y, large);
            for &len in lengths {
                stream.fill(s, len, Count(done));
                let last: Vec<O> = (done..done + len).map(number).collect();
                assert!(stream.last(len) == last);
                done += len;
            }
            let mut first = true;
            while done < all {
                let len = stream.block(all - done);
                assert!(len <= BLOCK && len > 0);
                assert!(first || !large || (stream.y[done..].as_ptr() as usize).is_multiple_of(64));
                stream.fill(s, len, Count(done));
                (done, first) = (done + len, false);
            }
            stream.end(s);
        }
    }

    fn fills<O: Element + PartialEq>() {
        let lengths = [&[][..], &[5], &[LINE], &[0, 64, 200], &[31, 33, 1]];
        for isa in Isa::of_machine() {
            let cpu = Cpu::new(isa, 1, usize::MAX).unwrap();
            for (large, lengths) in [false, true].into_iter().flat_map(|large| lengths.map(|lengths| (large, lengths)))
            {
                let given: usize = lengths.iter().sum();
                // Outputs that begin anywhere in a line, and end anywhere.
                for (from, more) in
                    (0..40).flat_map(|from| [0, 1, 30, 65, BLOCK + 7, 2 * BLOCK].map(|more| (from, more)))
                {
                    let len = given + more;
                    let mut y = vec![O::narrow(-7.0); from + len + 40];
                    cpu.dispatch(Fill(&mut y[from..][..len], large, lengths));
                    let expected =
                        |i: usize| if i < from || i >= from + len { O::narrow(-7.0) } else { number(i - from) };
                    assert!(
                        y.iter().enumerate().all(|(i, y)| *y == expected(i)),
                        "{isa}, large {large}, {lengths:?} and {more} from {from} on"
                    );
                }
            }
        }
    }

    pub(crate) fn every_element_is_written_once_and_nothing_beside() {
        fills::<f32>();
        fills::<bf16>();
    }
}
