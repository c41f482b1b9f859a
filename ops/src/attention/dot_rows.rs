//! A few queries against keys as they stand in memory: `out[r][j] = chain over d of q[r][d] * k[j][d]`, through
//! `VDPBF16PS` and without laying the keys out first.
//!
//! A vector holds four keys of four queries. Each sum is one lane, and its chain ascends: the bits are those of
//! [`dot_tile`](crate::gemm::tile::dot_tile), and so is the condition, [`dot_is_exact`](crate::gemm::tile::dot_is_exact). Sixteen keys
//! of four queries are four chains, which wait for their own sums (6 cycles each); eight queries, or two key heads at a
//! time, are eight.

// Heads and groups index several arrays at once here.
#![allow(clippy::needless_range_loop)]

use crate::Cpu;
use crate::pack::from_biased;
use crate::simd::prefetch::{Prefetch, prefetch};
use crate::simd::words::{Kernel512, Simd512};
use half::bf16;

/// Keys of one call.
pub const KEYS: usize = 32;
/// More queries than this are faster with the keys laid out.
pub const MAX_QUERIES: usize = 8;
/// Dimensions come in multiples of this many elements.
pub const DIMENSIONS: usize = 16;

/// Keys of `len` elements each, those at `starts` of `k`; those of a second head stand behind those of the first.
pub struct Keys<'a> {
    pub k: &'a [bf16],
    pub starts: &'a [usize; KEYS],
    pub len: usize,
}

/// The queries of a key head and their scores: `query[p * rows + r]` is pair p of query r, the earlier element in the high
/// half, with at least 4 words behind the last; the sum of query r and key j goes to `out[r * stride + j]`.
pub struct Head<'a> {
    pub query: &'a [u32],
    pub out: &'a mut [f32],
}

/// How many heads of so many queries are taken at a time.
pub fn heads_at_once(rows: usize) -> usize {
    if rows <= 4 { 2 } else { 1 }
}

/// Writes the sums of `rows` queries of each head (one, or [`heads_at_once`]) and all keys, prefetches `ahead` on the way, and
/// returns the keys' smallest nonzero magnitude.
pub fn dot_rows(cpu: &Cpu, heads: &mut [Head], rows: usize, keys: &Keys, stride: usize, ahead: Prefetch) -> f32 {
    let d = keys.len;
    assert!(rows <= MAX_QUERIES && d.is_multiple_of(DIMENSIONS));
    let last = keys.starts.iter().fold(0, |last: usize, &start| last.max(start));
    let end = d.saturating_mul(heads.len());
    assert!(end <= keys.k.len() && last <= keys.k.len() - end, "a key outside the keys");
    for Head { query, out } in &*heads {
        assert!(rows * (d / 2) + 4 <= query.len(), "queries too short");
        assert!(rows.saturating_sub(1).saturating_mul(stride).saturating_add(KEYS) <= out.len(), "output too short");
    }
    // SAFETY: the assertions bound keys, queries and output, and two groups of four are eight queries.
    unsafe {
        match (heads.len(), rows <= 4) {
            (1, true) => cpu.dispatch_dot(Quarters::<1, 1> { heads, rows, keys, stride, ahead }),
            (1, false) => cpu.dispatch_dot(Quarters::<1, 2> { heads, rows, keys, stride, ahead }),
            (2, true) => cpu.dispatch_dot(Quarters::<2, 1> { heads, rows, keys, stride, ahead }),
            (count, _) => panic!("{count} heads of {rows} queries at a time"),
        }
    }
}

/// `HEADS` heads of `GROUPS` times four queries; the fields are as long as [`dot_rows`] asserts.
struct Quarters<'a, 'h, const HEADS: usize, const GROUPS: usize> {
    heads: &'a mut [Head<'h>],
    rows: usize,
    keys: &'a Keys<'a>,
    stride: usize,
    ahead: Prefetch,
}

impl<const HEADS: usize, const GROUPS: usize> Kernel512 for Quarters<'_, '_, HEADS, GROUPS> {
    type Output = f32;
    #[inline(always)]
    unsafe fn run<S: Simd512>(self, s: S) -> f32 {
        let Quarters { heads, rows, keys, stride, mut ahead } = self;
        let words = keys.len / 2;
        // Two lines for every eight words of four keys are as many as there are; anything else is prefetched at once.
        let mut next: *const i8 = keys.k.as_ptr().cast();
        let mut step = 0;
        match ahead.bounds() {
            Some((first, _)) if ahead.lines() == HEADS * KEYS * words / 16 => (next, step) = (first, 128),
            _ => ahead.ask(usize::MAX),
        }
        let (magnitude, one) = (s.set1_epi16(0x7FFF), s.set1_epi16(1));
        let mut least = s.set1_epi16(-1);
        let queries: [*const u32; HEADS] = std::array::from_fn(|h| heads[h].query.as_ptr());
        // Sixteen keys at a time: as many lines as stay in the nearest cache when keys are a power of two apart.
        for column in (0..KEYS).step_by(16) {
            // SAFETY: every start is inside k, by the caller's promise.
            let at: [*const u32; 16] =
                std::array::from_fn(|j| unsafe { keys.k.as_ptr().add(keys.starts[column + j]).cast() });
            let mut sums = [[[s.splat(0.0); 4]; GROUPS]; HEADS];
            for p in (0..words).step_by(8) {
                // Written out, so that every sum stays in its register.
                macro_rules! head {
                    ($h:literal) => {{
                        let mut q = [[s.set1_epi32(0); 8]; GROUPS];
                        for group in 0..GROUPS {
                            for i in 0..8 {
                                // SAFETY: words p..p + 8 of four queries: where there are fewer, the lanes hold what comes
                                // next, and their sums are not written.
                                let words = unsafe { s.broadcast_i32x4(queries[$h].add((p + i) * rows + 4 * group)) };
                                q[group][i] = words;
                            }
                        }
                        head!($h q 0 1 2 3);
                    }};
                    ($h:literal $q:ident $($i:literal)*) => {$(
                        // A half for each key, the earlier element of a pair in the high half of its word.
                        // SAFETY: words p..p + 8 of four keys of this head.
                        let (a, b) = unsafe {
                            let word = $h * words + p;
                            (
                                s.loadu_halves(at[4 * $i].add(word), at[4 * $i + 1].add(word)),
                                s.loadu_halves(at[4 * $i + 2].add(word), at[4 * $i + 3].add(word)),
                            )
                        };
                        // +-0 becomes the largest of all.
                        least = s.min_epu16(least, s.sub_epi16(s.and_si512(a, magnitude), one));
                        least = s.min_epu16(least, s.sub_epi16(s.and_si512(b, magnitude), one));
                        let (a, b) = (s.rol_epi32::<16>(a), s.rol_epi32::<16>(b));
                        prefetch(next);
                        prefetch(next.wrapping_add(64));
                        next = next.wrapping_add(step);
                        // A quarter for each key: four words of it, then the other four.
                        let (mut low, mut high) = (s.shuffle_i32x4::<0x88>(a, b), s.shuffle_i32x4::<0xDD>(a, b));
                        // Left to itself the compiler loads all keys first and has no registers for them, and makes one
                        // slow permutation of words of two quick ones, of quarters and within them.
                        s.pin_words(&mut least, &mut low, &mut high);
                        head!($h $i $q low 0 0x00 1 0x55 2 0xAA 3 0xFF);
                        head!($h $i $q high 4 0x00 5 0x55 6 0xAA 7 0xFF);
                        for group in 0..GROUPS {
                            s.pin(&mut sums[$h][group][$i]);
                        }
                    )*};
                    ($h:literal $i:literal $q:ident $four:ident $($word:literal $which:literal)*) => {$(
                        let word = s.shuffle_epi32::<$which>($four);
                        for group in 0..GROUPS {
                            // SAFETY: the machine has the instruction.
                            let sum = unsafe { s.dpbf16_ps(sums[$h][group][$i], word, $q[group][$word]) };
                            sums[$h][group][$i] = sum;
                        }
                    )*};
                }
                head!(0);
                if HEADS == 2 {
                    head!(1);
                }
            }
            let every_fourth = s.setr_epi32([0, 4, 8, 12, 16, 20, 24, 28, 0, 0, 0, 0, 0, 0, 0, 0]);
            for (head, sums) in heads.iter_mut().zip(&sums) {
                for r in 0..rows {
                    // Lane 4j + r of a vector is key j of its four, query r.
                    let pick = s.add_epi32(every_fourth, s.set1_epi32((r % 4) as i32));
                    let [a, b, c, d] = sums[r / 4];
                    let (low, high) = (s.permutex2var_ps(a, pick, b), s.permutex2var_ps(c, pick, d));
                    // SAFETY: the row has `KEYS` places.
                    unsafe { s.store(s.insertf32x8_high(low, high), head.out.as_mut_ptr().add(r * stride + column)) };
                }
            }
        }
        from_biased(s.reduce_min_epu16(least))
    }
}
