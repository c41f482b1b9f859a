//! A few queries against keys as they stand in memory: `out[r][j] = chain over d of q[r][d] * k[j][d]`, through
//! `VDPBF16PS` and without laying the keys out first.
//!
//! A vector holds four keys of four queries. Each sum is one lane, and its chain ascends: the bits are those of
//! [`dot_tile`](crate::tile::dot_tile), and so is the condition, [`dot_is_exact`](crate::tile::dot_is_exact).

use crate::pack::{Ahead, from_biased};
use crate::{Cpu, Isa};
use half::bf16;

/// Keys of one call.
pub const KEYS: usize = 32;
/// More queries than this are faster with the keys laid out.
pub const MAX_QUERIES: usize = 8;
/// Dimensions come in multiples of this many elements.
pub const DIMENSIONS: usize = 8;

/// Keys of `len` elements each, those at `starts` of `k`.
pub struct Keys<'a> {
    pub k: &'a [bf16],
    pub starts: &'a [usize; KEYS],
    pub len: usize,
}

/// Writes the sums of `rows` queries and all keys to `out[r * stride + j]`, asks for `ahead` on the way, and returns the
/// keys' smallest nonzero magnitude. `query[p * rows + r]` is pair p of query r, the earlier element in the high half, with
/// at least 4 words behind the last.
pub fn dot_rows(
    cpu: &Cpu,
    query: &[u32],
    rows: usize,
    keys: &Keys,
    out: &mut [f32],
    stride: usize,
    ahead: Ahead,
) -> f32 {
    let d = keys.len;
    assert!(cpu.isa() == Isa::Avx512Bf16, "{} has no dot product of pairs", cpu.isa());
    assert!(rows <= MAX_QUERIES && d.is_multiple_of(DIMENSIONS));
    assert!(rows * (d / 2) + 4 <= query.len() && rows.saturating_sub(1) * stride + KEYS <= out.len());
    #[cfg(target_arch = "x86_64")]
    // SAFETY: `Cpu::new` refuses an isa that `Isa::available` does not find on this machine; the assertions bound queries
    // and output.
    return unsafe { quarters(query, rows, keys, out, stride, ahead) };
    #[cfg(not(target_arch = "x86_64"))]
    unreachable!("no machine but x86-64 has {}, {ahead:?}", cpu.isa())
}

/// # Safety
/// The machine has the instructions of [`Isa::Avx512Bf16`], and the queries and the output are as long as [`dot_rows`]
/// asserts.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn quarters(query: &[u32], rows: usize, keys: &Keys, out: &mut [f32], stride: usize, ahead: Ahead) -> f32 {
    use std::arch::x86_64::*;
    use std::mem::transmute;
    let words = keys.len / 2;
    let last = keys.starts.iter().fold(0, |last: usize, &start| last.max(start));
    assert!(keys.len <= keys.k.len() && last <= keys.k.len() - keys.len, "a key outside the keys");
    // One line for every four words of four keys; with nothing ahead, a line that is near.
    let near: *const i8 = keys.k.as_ptr().cast();
    let (mut next, last) = ahead.bounds().unwrap_or((near, near));
    // SAFETY: a vector of words and one of pairs of bf16 have the same 512 bits.
    let pairs = |words: __m512i| unsafe { transmute::<__m512i, __m512bh>(words) };
    let (magnitude, one) = (_mm512_set1_epi16(0x7FFF), _mm512_set1_epi16(1));
    let every_fourth = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 0, 0, 0, 0, 0, 0, 0);
    let mut least = _mm512_set1_epi16(-1);
    // Sixteen keys at a time: as many lines as stay in the nearest cache when keys are a power of two apart.
    let groups = rows.div_ceil(4);
    for group in 0..KEYS / 16 * groups {
        let (column, first) = (group / groups * 16, group % groups * 4);
        // SAFETY: every start is inside k, by the assertion.
        let at: [*const u32; 16] =
            std::array::from_fn(|j| unsafe { keys.k.as_ptr().add(keys.starts[column + j]).cast() });
        let mut sums = [_mm512_setzero_ps(); 4];
        for p in (0..words).step_by(4) {
            // SAFETY: words p..p + 4 of each key, and of the queries `first..first + 4`: where there are fewer, the lanes
            // hold what comes next, and their sums are not written.
            unsafe {
                let step = |i: usize| {
                    let four = _mm_loadu_si128(query.as_ptr().add((p + i) * rows + first).cast());
                    pairs(_mm512_broadcast_i32x4(four))
                };
                let q = [step(0), step(1), step(2), step(3)];
                // Written out, so that every sum stays in its register.
                macro_rules! four_keys {
                    ($($i:literal)*) => {$(
                        let four = |j: usize| _mm_loadu_si128(at[4 * $i + j].add(p).cast());
                        // A quarter for each key.
                        let k = _mm512_castsi128_si512(four(0));
                        let k = _mm512_mask_broadcast_i32x4(k, 0x00F0, four(1));
                        let k = _mm512_mask_broadcast_i32x4(k, 0x0F00, four(2));
                        let k = _mm512_mask_broadcast_i32x4(k, 0xF000, four(3));
                        // +-0 becomes the largest of all.
                        least = _mm512_min_epu16(least, _mm512_sub_epi16(_mm512_and_si512(k, magnitude), one));
                        // The earlier element of a pair belongs in the high half.
                        let k = _mm512_rol_epi32::<16>(k);
                        _mm_prefetch::<_MM_HINT_T0>(next);
                        next = next.wrapping_add(64).min(last);
                        sums[$i] = _mm512_dpbf16_ps(sums[$i], pairs(_mm512_shuffle_epi32::<0x00>(k)), q[0]);
                        sums[$i] = _mm512_dpbf16_ps(sums[$i], pairs(_mm512_shuffle_epi32::<0x55>(k)), q[1]);
                        sums[$i] = _mm512_dpbf16_ps(sums[$i], pairs(_mm512_shuffle_epi32::<0xAA>(k)), q[2]);
                        sums[$i] = _mm512_dpbf16_ps(sums[$i], pairs(_mm512_shuffle_epi32::<0xFF>(k)), q[3]);
                    )*};
                }
                four_keys!(0 1 2 3);
            }
        }
        for r in 0..4.min(rows - first) {
            // Lane 4j + r of a vector is key j of its four, query r.
            let pick = _mm512_add_epi32(every_fourth, _mm512_set1_epi32(r as i32));
            let low = _mm512_permutex2var_ps(sums[0], pick, sums[1]);
            let high = _mm512_permutex2var_ps(sums[2], pick, sums[3]);
            let sixteen = _mm512_insertf32x8::<1>(low, _mm512_castps512_ps256(high));
            // SAFETY: the row has `KEYS` places.
            unsafe { _mm512_storeu_ps(out.as_mut_ptr().add((first + r) * stride + column), sixteen) };
        }
    }
    let half = _mm256_min_epu16(_mm512_castsi512_si256(least), _mm512_extracti64x4_epi64::<1>(least));
    let quarter = _mm_min_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256::<1>(half));
    from_biased(_mm_cvtsi128_si32(_mm_minpos_epu16(quarter)) as u16)
}
