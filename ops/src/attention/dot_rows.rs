//! A few queries against keys as they stand in memory: `out[r][j] = chain over d of q[r][d] * k[j][d]`, through
//! `VDPBF16PS` and without laying the keys out first.
//!
//! A vector holds four keys of four queries. Each sum is one lane, and its chain ascends: the bits are those of
//! [`dot_tile`](crate::gemm::tile::dot_tile), and so is the condition, [`dot_is_exact`](crate::gemm::tile::dot_is_exact). Sixteen keys
//! of four queries are four chains, which wait for their own sums (6 cycles each); eight queries, or two key heads at a
//! time, are eight.

use crate::pack::{Ahead, from_biased};
use crate::{Cpu, Isa};
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

/// Writes the sums of `rows` queries of each head (one, or [`heads_at_once`]) and all keys, asks for `ahead` on the way, and
/// returns the keys' smallest nonzero magnitude.
pub fn dot_rows(cpu: &Cpu, heads: &mut [Head], rows: usize, keys: &Keys, stride: usize, ahead: Ahead) -> f32 {
    let d = keys.len;
    assert!(cpu.isa() == Isa::Avx512Bf16, "{} has no dot product of pairs", cpu.isa());
    assert!(rows <= MAX_QUERIES && d.is_multiple_of(DIMENSIONS));
    let last = keys.starts.iter().fold(0, |last: usize, &start| last.max(start));
    let end = d * heads.len();
    assert!(end <= keys.k.len() && last <= keys.k.len() - end, "a key outside the keys");
    for Head { query, out } in &*heads {
        assert!(rows * (d / 2) + 4 <= query.len() && rows.saturating_sub(1) * stride + KEYS <= out.len());
    }
    #[cfg(target_arch = "x86_64")]
    // SAFETY: `Cpu::new` refuses an isa that `Isa::available` does not find on this machine; the assertions bound keys,
    // queries and output, and two groups of four are eight queries.
    return unsafe {
        match (heads.len(), rows <= 4) {
            (1, true) => quarters::<1, 1>(heads, rows, keys, stride, ahead),
            (1, false) => quarters::<1, 2>(heads, rows, keys, stride, ahead),
            (2, true) => quarters::<2, 1>(heads, rows, keys, stride, ahead),
            (count, _) => panic!("{count} heads of {rows} queries at a time"),
        }
    };
    #[cfg(not(target_arch = "x86_64"))]
    unreachable!("no machine but x86-64 has {}, {ahead:?}", cpu.isa())
}

/// `HEADS` heads of `GROUPS` times four queries.
///
/// # Safety
/// The machine has the instructions of [`Isa::Avx512Bf16`]; there are `HEADS` heads, and keys, queries and outputs are as
/// long as [`dot_rows`] asserts.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn quarters<const HEADS: usize, const GROUPS: usize>(
    heads: &mut [Head],
    rows: usize,
    keys: &Keys,
    stride: usize,
    mut ahead: Ahead,
) -> f32 {
    use std::arch::x86_64::*;
    use std::mem::transmute;
    let words = keys.len / 2;
    // Two lines for every eight words of four keys are as many as there are; anything else is asked for at once.
    let mut next: *const i8 = keys.k.as_ptr().cast();
    let mut step = 0;
    match ahead.bounds() {
        Some((first, _)) if ahead.lines() == HEADS * KEYS * words / 16 => (next, step) = (first, 128),
        _ => ahead.ask(usize::MAX),
    }
    // Nothing moves past this: left to itself the compiler loads all keys first and has no registers for them, and makes one
    // slow permutation of words of two quick ones, of quarters and within them.
    macro_rules! here {
        ($($names:literal $v:expr),*) => {
            // SAFETY: no instruction, and so nothing but the registers is named.
            unsafe { std::arch::asm!($($names,)* $(inout(zmm_reg) $v,)* options(nostack, preserves_flags)) }
        };
    }
    // SAFETY: a vector of words and one of pairs of bf16 have the same 512 bits.
    let pairs = |words: __m512i| unsafe { transmute::<__m512i, __m512bh>(words) };
    let (magnitude, one) = (_mm512_set1_epi16(0x7FFF), _mm512_set1_epi16(1));
    let mut least = _mm512_set1_epi16(-1);
    let queries: [*const u32; HEADS] = std::array::from_fn(|h| heads[h].query.as_ptr());
    // Sixteen keys at a time: as many lines as stay in the nearest cache when keys are a power of two apart.
    for column in (0..KEYS).step_by(16) {
        // SAFETY: every start is inside k, by the caller's promise.
        let at: [*const u32; 16] =
            std::array::from_fn(|j| unsafe { keys.k.as_ptr().add(keys.starts[column + j]).cast() });
        let mut sums = [[[_mm512_setzero_ps(); 4]; GROUPS]; HEADS];
        for p in (0..words).step_by(8) {
            // Written out, so that every sum stays in its register.
            macro_rules! head {
                ($h:literal) => {{
                    // SAFETY: words p..p + 8 of four queries: where there are fewer, the lanes hold what comes next, and
                    // their sums are not written.
                    let query = |group: usize, i: usize| unsafe {
                        let at = queries[$h].add((p + i) * rows + 4 * group);
                        pairs(_mm512_broadcast_i32x4(_mm_loadu_si128(at.cast())))
                    };
                    let q: [[__m512bh; 8]; GROUPS] =
                        std::array::from_fn(|group| std::array::from_fn(|i| query(group, i)));
                    head!($h q 0 1 2 3);
                }};
                ($h:literal $q:ident $($i:literal)*) => {$(
                    // SAFETY: words p..p + 8 of a key of this head.
                    let eight = |j: usize| unsafe { _mm256_loadu_si256(at[4 * $i + j].add($h * words + p).cast()) };
                    // A half for each key, the earlier element of a pair in the high half of its word.
                    let two = |j: usize| _mm512_inserti64x4::<1>(_mm512_castsi256_si512(eight(j)), eight(j + 1));
                    let (a, b) = (two(0), two(2));
                    // +-0 becomes the largest of all.
                    least = _mm512_min_epu16(least, _mm512_sub_epi16(_mm512_and_si512(a, magnitude), one));
                    least = _mm512_min_epu16(least, _mm512_sub_epi16(_mm512_and_si512(b, magnitude), one));
                    let (a, b) = (_mm512_rol_epi32::<16>(a), _mm512_rol_epi32::<16>(b));
                    _mm_prefetch::<_MM_HINT_T0>(next);
                    _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add(64));
                    next = next.wrapping_add(step);
                    // A quarter for each key: four words of it, then the other four.
                    let (mut low, mut high) = (_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0xDD>(a, b));
                    here!("/* {0} */" least, "/* {1} */" low, "/* {2} */" high);
                    head!($h $i $q low 0 0x00 1 0x55 2 0xAA 3 0xFF);
                    head!($h $i $q high 4 0x00 5 0x55 6 0xAA 7 0xFF);
                    sums[$h].iter_mut().for_each(|sums| here!("/* {0} */" sums[$i]));
                )*};
                ($h:literal $i:literal $q:ident $four:ident $($word:literal $which:literal)*) => {$(
                    let word = pairs(_mm512_shuffle_epi32::<$which>($four));
                    for group in 0..GROUPS {
                        sums[$h][group][$i] = _mm512_dpbf16_ps(sums[$h][group][$i], word, $q[group][$word]);
                    }
                )*};
            }
            head!(0);
            if HEADS == 2 {
                head!(1);
            }
        }
        let every_fourth = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 0, 0, 0, 0, 0, 0, 0);
        for (head, sums) in heads.iter_mut().zip(&sums) {
            for r in 0..rows {
                // Lane 4j + r of a vector is key j of its four, query r.
                let pick = _mm512_add_epi32(every_fourth, _mm512_set1_epi32((r % 4) as i32));
                let [a, b, c, d] = sums[r / 4];
                let (low, high) = (_mm512_permutex2var_ps(a, pick, b), _mm512_permutex2var_ps(c, pick, d));
                let sixteen = _mm512_insertf32x8::<1>(low, _mm512_castps512_ps256(high));
                // SAFETY: the row has `KEYS` places.
                unsafe { _mm512_storeu_ps(head.out.as_mut_ptr().add(r * stride + column), sixteen) };
            }
        }
    }
    let half = _mm256_min_epu16(_mm512_castsi512_si256(least), _mm512_extracti64x4_epi64::<1>(least));
    let quarter = _mm_min_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256::<1>(half));
    from_biased(_mm_cvtsi128_si32(_mm_minpos_epu16(quarter)) as u16)
}
