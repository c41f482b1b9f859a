//! Outputs in blocks: small ones are written where they belong, large ones past the caches.
//!
//! A store to a line that no cache holds first reads it from memory. For an output that does not fit the caches that
//! read is a third of all traffic and pushes out what is still needed. So its blocks are made in a buffer that stays in
//! the first cache and copied from there by whole lines with stores that bypass the caches.

use crate::simd::Simd;
use crate::{Cpu, Element};

/// Elements of a part, most often.
pub const BLOCK: usize = 1024;
/// An output of this many bytes would not be found in the caches when it is complete.
const LARGE: usize = 32 << 20;

/// Whether an output is written past the caches.
pub fn is_large<O: Element>(cpu: &Cpu, y: &[O]) -> bool {
    cpu.isa() != crate::Isa::Scalar && size_of_val(y) >= LARGE
}

/// Hands out `y` from its first element to its last, a large one in parts of up to `PART` elements.
pub struct Stream<'a, O, const PART: usize = BLOCK> {
    y: &'a mut [O],
    at: usize,
    /// Where elements are made that go past the caches.
    buffer: Option<[O; PART]>,
}

impl<'a, O: Element, const PART: usize> Stream<'a, O, PART> {
    /// Writes `y`, a part of an output of which [`is_large`] says `large`.
    #[inline(always)]
    pub fn new(y: &'a mut [O], large: bool) -> Stream<'a, O, PART> {
        Stream { y, at: 0, buffer: large.then(|| [O::default(); PART]) }
    }

    /// Room for the next elements, as many of `most` as there are (a large output gives `PART` at a time). All of
    /// it must be written before [`Stream::put`].
    #[inline(always)]
    pub fn room(&mut self, most: usize) -> &mut [O] {
        match &mut self.buffer {
            Some(buffer) => &mut buffer[..most.min(PART)],
            None => &mut self.y[self.at..][..most],
        }
    }

    /// Ends the room of `len` elements that [`Stream::room`] gave.
    #[inline(always)]
    pub fn put<S: Simd>(&mut self, s: S, len: usize) {
        if let Some(buffer) = &self.buffer {
            copy_past_caches(s, &buffer[..len], &mut self.y[self.at..][..len]);
        }
        self.at += len;
    }

    /// Makes everything visible to other threads.
    #[inline(always)]
    pub fn end<S: Simd>(self, s: S) {
        if self.buffer.is_some() {
            s.fence();
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
