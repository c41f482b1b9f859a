//! [`Tile`](super::Tile)s of a panel that the dictionary of [`crate::pack::dictionary`] holds, with `VDPBF16PS`: order and
//! rounding are those of the pairs it stands for.

// Vector numbers index several arrays at once here.
#![allow(clippy::needless_range_loop)]

use crate::pack::PANEL;
use crate::pack::dictionary::{DictionaryPanel, ESCAPE, FAR, NEAR, ask};
use crate::simd::coded::BLOCK;
use crate::simd::prefetch::prefetch_all;
use crate::simd::words::{Kernel512, Simd512};
use crate::simd::{Kernel, Simd};
use crate::workspace::memory::LINE;
use std::mem::MaybeUninit;

/// The 32 pairs whose low bytes stand at `low` and whose codes are the low halves of the bytes of `codes`.
///
/// # Safety
/// `low` has a line.
#[inline(always)]
unsafe fn decode<S: Simd512>(s: S, coded: &DictionaryPanel, low: *const u32, codes: S::I) -> [S::I; 2] {
    // SAFETY: a table has 4 words; the rest is the caller's promise.
    let (table, low) = unsafe { (s.broadcast_i32x4(coded.table().as_ptr()), s.loadu_si512(low)) };
    let high = s.shuffle_epi8(table, s.and_si512(codes, s.set1_epi8(15)));
    [s.unpacklo_epi8(low, high), s.unpackhi_epi8(low, high)]
}

/// Writes the pairs of a panel as they stand where it is not coded, for every instruction set.
pub struct Unpack<'a> {
    pub coded: &'a DictionaryPanel<'a>,
    /// 32 words for each pair.
    pub slot: &'a mut [u32],
}

impl Kernel for Unpack<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Unpack { coded, slot } = self;
        for (run, words) in coded.runs(0..coded.pairs()) {
            let slot = &mut slot[run.start * PANEL..run.end * PANEL];
            if let Some(words) = words {
                slot.copy_from_slice(&words[..slot.len()]);
                continue;
            }
            for (pair, slot) in run.zip(slot.chunks_exact_mut(PANEL)) {
                for (vector, out) in slot.chunks_exact_mut(S::LANES).enumerate() {
                    // SAFETY: there are LANES places, and a pair is in its block.
                    unsafe {
                        let pairs =
                            s.coded_pairs(coded.table().as_ptr(), coded.block(pair / 2).as_ptr(), pair % 2, vector);
                        s.store(pairs, out.as_mut_ptr().cast());
                    }
                }
            }
        }
    }
}

/// The sums of `ROWS` rows and a whole panel. With `KEEP` its pairs are written out as well, as they stand where a panel is
/// not coded: k by k, 32 columns side by side.
#[derive(Clone, Copy)]
pub struct DictionaryChains<'a, const ROWS: usize, const KEEP: bool> {
    pub coded: &'a DictionaryPanel<'a>,
    /// `ROWS` words at every pair of k below the end of the bounds.
    pub left: *const u32,
    /// The distance from one pair to the next.
    pub step: usize,
    /// They end within the panel's k and are multiples of 4, but for the end.
    pub bounds: &'a [usize],
    /// `ROWS` rows of 32.
    pub out: *mut f32,
    /// The distance between them.
    pub out_stride: usize,
    /// With `KEEP`, room for 32 words for each pair.
    pub kept: *mut u32,
}

impl<const ROWS: usize, const KEEP: bool> DictionaryChains<'_, ROWS, KEEP> {
    /// Adds the products of a pair of k.
    ///
    /// # Safety
    /// `pair` is below the end of the bounds, and the machine has `VDPBF16PS`.
    #[inline(always)]
    unsafe fn add<S: Simd512>(self, s: S, sums: &mut [[S::F; 2]; ROWS], pair: usize, weights: [S::I; 2]) {
        // SAFETY: the caller's promise.
        unsafe {
            if KEEP {
                s.storeu_si512(self.kept.add(pair * PANEL), weights[0]);
                s.storeu_si512(self.kept.add(pair * PANEL + 16), weights[1]);
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let x = s.set1_epi32(*self.left.add(pair * self.step + r) as i32);
                sums[0] = s.dpbf16_ps(sums[0], x, weights[0]);
                sums[1] = s.dpbf16_ps(sums[1], x, weights[1]);
            }
        }
    }
}

impl<const ROWS: usize, const KEEP: bool> Kernel512 for DictionaryChains<'_, ROWS, KEEP> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Simd512>(self, s: S) {
        let DictionaryChains { coded, bounds, out, out_stride, .. } = self;
        // They stand apart from the blocks.
        prefetch_all(coded.escapes());
        let zero = s.splat(0.0);
        let mut escapes = coded.escape_numbers().iter().copied().zip(coded.escapes().chunks_exact(ESCAPE)).peekable();
        // As in `fma_chains`.
        let mut stack = [[[MaybeUninit::<S::F>::uninit(); 2]; ROWS]; 3];
        let segments = bounds.len() - 1;
        for i in 0..segments {
            let mut live = [[zero; 2]; ROWS];
            let (mut pair, to) = (bounds[i].div_ceil(2), bounds[i + 1].div_ceil(2));
            // SAFETY: the bounds end within the panel's k, so every pair has its block, and escapes are blocks.
            unsafe {
                while pair < to {
                    let stop = escapes.peek().map_or(to, |&(block, _)| (2 * block as usize).clamp(pair, to));
                    while pair < stop {
                        let block = coded.blocks().as_ptr().add(pair / 2 * BLOCK);
                        ask(block.wrapping_add(FAR), block.wrapping_add(NEAR));
                        let codes = s.loadu_si512(block.add(2 * LINE));
                        self.add(s, &mut live, pair, decode(s, coded, block, codes));
                        if pair + 1 < to {
                            let weights = decode(s, coded, block.add(LINE), s.srli_epi16::<4>(codes));
                            self.add(s, &mut live, pair + 1, weights);
                        }
                        pair += 2;
                    }
                    if stop < to {
                        let (_, words) = escapes.next().expect("an escape");
                        for step in 0..(to - pair).min(2) {
                            let at = words.as_ptr().add(step * PANEL);
                            self.add(s, &mut live, pair + step, [s.loadu_si512(at), s.loadu_si512(at.add(16))]);
                        }
                        pair += 2;
                    }
                }
            }
            let mut level = 0;
            while i >> level & 1 == 1 {
                for (live, earlier) in live.iter_mut().zip(&stack[level]) {
                    for (live, earlier) in live.iter_mut().zip(earlier) {
                        // SAFETY: a set bit of i says that the subtree of its level has been written.
                        *live = s.add(unsafe { earlier.assume_init() }, *live);
                    }
                }
                level += 1;
            }
            for (r, live) in live.iter().enumerate() {
                for (v, &live) in live.iter().enumerate() {
                    if i + 1 < segments {
                        stack[level][r][v].write(live);
                    } else {
                        // SAFETY: the results have their place.
                        unsafe { s.store(live, out.add(r * out_stride + v * 16)) };
                    }
                }
            }
        }
    }
}

/// [`DictionaryChains`] of one row, pair after pair in `left`, and an even count of segments: two of them at a time, because one
/// chain alone waits for its own sums.
#[derive(Clone, Copy)]
pub struct DictionaryRow<'a> {
    pub coded: &'a DictionaryPanel<'a>,
    /// A word at every pair of k below the end of the bounds.
    pub left: *const u32,
    /// As in [`DictionaryChains`].
    pub bounds: &'a [usize],
    /// 32 places.
    pub out: *mut f32,
}

impl DictionaryRow<'_> {
    /// Adds the products of a pair of k.
    ///
    /// # Safety
    /// `pair` is below the end of the bounds, and the machine has `VDPBF16PS`.
    #[inline(always)]
    unsafe fn add<S: Simd512>(self, s: S, sums: &mut [S::F; 2], pair: usize, weights: [S::I; 2]) {
        // SAFETY: the caller's promise.
        unsafe {
            let x = s.set1_epi32(*self.left.add(pair) as i32);
            *sums = [s.dpbf16_ps(sums[0], x, weights[0]), s.dpbf16_ps(sums[1], x, weights[1])];
        }
    }

    /// Adds the pairs of block `pair / 2` below `to`; `escape` is the first one that has not been met.
    ///
    /// # Safety
    /// As for `add`; `to` is no further than the end of the bounds.
    #[inline(always)]
    unsafe fn add_block<S: Simd512>(self, s: S, sums: &mut [S::F; 2], escape: &mut usize, pair: usize, to: usize) {
        let coded = self.coded;
        // SAFETY: the bounds end within the panel's k, so every pair has its block, every escape its words, and
        // `left` a word.
        unsafe {
            if coded.escape_numbers().get(*escape) == Some(&((pair / 2) as u32)) {
                let at = coded.escapes().as_ptr().add(*escape * ESCAPE);
                for step in 0..(to - pair).min(2) {
                    let at = at.add(step * PANEL);
                    self.add(s, sums, pair + step, [s.loadu_si512(at), s.loadu_si512(at.add(LINE))]);
                }
                *escape += 1;
            } else {
                let block = coded.blocks().as_ptr().add(pair / 2 * BLOCK);
                let codes = s.loadu_si512(block.add(2 * LINE));
                self.add(s, sums, pair, decode(s, coded, block, codes));
                if pair + 1 < to {
                    self.add(s, sums, pair + 1, decode(s, coded, block.add(LINE), s.srli_epi16::<4>(codes)));
                }
            }
        }
    }
}

impl Kernel512 for DictionaryRow<'_> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Simd512>(self, s: S) {
        let DictionaryRow { coded, left, bounds, out } = self;
        // They stand apart from the blocks.
        prefetch_all(coded.escapes());
        let numbers = coded.escape_numbers();
        let mut joined = [[s.splat(0.0); 2]; 4];
        let halves = bounds.len() / 2;
        for (two, joined) in joined.iter_mut().enumerate().take(halves) {
            let bound: [usize; 3] = std::array::from_fn(|i| bounds[2 * two + i].div_ceil(2));
            let shared = (bound[1] - bound[0]).min(bound[2] - bound[1]) / 2;
            let (mut even, mut odd) = ([s.splat(0.0); 2], [s.splat(0.0); 2]);
            let [mut of_even, mut of_odd] =
                [0, 1].map(|i| numbers.partition_point(|&block| (block as usize) < bound[i] / 2));
            let until = |escape: usize, first: usize| {
                numbers.get(escape).map_or(shared, |&block| (block as usize - first / 2).min(shared))
            };
            let mut block = 0;
            while block < shared {
                let stop = until(of_even, bound[0]).min(until(of_odd, bound[1]));
                // SAFETY: as above; blocks before `stop` are coded and have both pairs.
                unsafe {
                    let mut at = [0, 1].map(|i| coded.blocks().as_ptr().add((bound[i] / 2 + block) * BLOCK));
                    let mut x = [0, 1].map(|i| left.add(bound[i] + 2 * block));
                    // The next two segments are prefetched in the order of memory.
                    let mut ahead = coded.blocks().as_ptr().wrapping_add((bound[0] / 2 + 2 * (shared + block)) * BLOCK);
                    while block < stop {
                        macro_rules! one {
                            ($i:literal, $live:ident) => {{
                                ask(ahead, at[$i].wrapping_add(NEAR));
                                ahead = ahead.wrapping_add(BLOCK);
                                let codes = s.loadu_si512(at[$i].add(2 * LINE));
                                let [first, last] = decode(s, coded, at[$i], codes);
                                let q = s.set1_epi32(*x[$i] as i32);
                                $live[0] = s.dpbf16_ps($live[0], q, first);
                                $live[1] = s.dpbf16_ps($live[1], q, last);
                                let [first, last] = decode(s, coded, at[$i].add(LINE), s.srli_epi16::<4>(codes));
                                let q = s.set1_epi32(*x[$i].add(1) as i32);
                                $live[0] = s.dpbf16_ps($live[0], q, first);
                                $live[1] = s.dpbf16_ps($live[1], q, last);
                                at[$i] = at[$i].add(BLOCK);
                                x[$i] = x[$i].add(2);
                            }};
                        }
                        one!(0, even);
                        one!(1, odd);
                        block += 1;
                    }
                }
                if block < shared {
                    // SAFETY: these pairs are below the bounds of their segments.
                    unsafe {
                        self.add_block(s, &mut even, &mut of_even, bound[0] + 2 * block, bound[1]);
                        self.add_block(s, &mut odd, &mut of_odd, bound[1] + 2 * block, bound[2]);
                    }
                    block += 1;
                }
            }
            for pair in (bound[0] + 2 * shared..bound[1]).step_by(2) {
                // SAFETY: as above.
                unsafe { self.add_block(s, &mut even, &mut of_even, pair, bound[1]) };
            }
            for pair in (bound[1] + 2 * shared..bound[2]).step_by(2) {
                // SAFETY: as above.
                unsafe { self.add_block(s, &mut odd, &mut of_odd, pair, bound[2]) };
            }
            *joined = [s.add(even[0], odd[0]), s.add(even[1], odd[1])];
        }
        for v in 0..2 {
            let mut sums = [joined[0][v], joined[1][v], joined[2][v], joined[3][v]];
            let mut count = halves;
            while count > 1 {
                count /= 2;
                for i in 0..count {
                    sums[i] = s.add(sums[2 * i], sums[2 * i + 1]);
                }
            }
            // SAFETY: `out` has 32 places.
            unsafe { s.store(sums[0], out.add(v * 16)) };
        }
    }
}
