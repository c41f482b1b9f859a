//! Eight lanes: AVX2 with FMA and F16C.

use super::{HALF_AND_FOUR, Kernel, MAX_LANES, Simd, TIES};
use half::{bf16, f16};
use std::arch::x86_64::*;

/// Proof that the machine has the instructions; made only by [`enter`], and where tests emulate wider ones.
#[derive(Clone, Copy)]
pub struct Avx2(());

#[cfg(feature = "emulated-isa")]
impl Avx2 {
    /// The proof.
    ///
    /// # Safety
    /// The machine has avx2, fma, f16c; whoever uses the token is compiled for them.
    #[inline(always)]
    pub unsafe fn new() -> Avx2 {
        Avx2(())
    }
}

/// Runs `kernel` compiled for these instructions.
///
/// # Safety
/// The machine has avx2, fma, f16c.
#[inline(always)]
pub unsafe fn enter<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: the caller's promise.
    unsafe { kernel.entered() }
}

/// What [`enter`] calls: a method, so that the code of a kernel is compiled beside it, and not that of all kernels as one unit.
trait Entered: Kernel + Sized {
    /// # Safety
    /// As [`enter`].
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn entered(self) -> Self::Output {
        self.run(Avx2(()))
    }
}

impl<K: Kernel> Entered for K {}

impl Simd for Avx2 {
    type F = __m256;
    const LANES: usize = 8;

    #[inline(always)]
    fn enter<K: Kernel>(self, kernel: K) -> K::Output {
        // SAFETY: a token exists only where the machine has the instructions.
        unsafe { enter(kernel) }
    }
    #[inline(always)]
    fn splat(self, x: f32) -> __m256 {
        // SAFETY: an `Avx2` exists only inside `enter`, where the machine has the instructions.
        unsafe { _mm256_set1_ps(x) }
    }

    #[inline(always)]
    fn add(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: an `Avx2` exists only inside `enter`, where the machine has the instructions.
        unsafe { _mm256_add_ps(a, b) }
    }

    #[inline(always)]
    fn sub(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: an `Avx2` exists only inside `enter`, where the machine has the instructions.
        unsafe { _mm256_sub_ps(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: an `Avx2` exists only inside `enter`, where the machine has the instructions.
        unsafe { _mm256_mul_ps(a, b) }
    }

    #[inline(always)]
    fn div(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: an `Avx2` exists only inside `enter`, where the machine has the instructions.
        unsafe { _mm256_div_ps(a, b) }
    }

    #[inline(always)]
    fn sqrt(self, a: __m256) -> __m256 {
        // SAFETY: an `Avx2` exists only inside `enter`, where the machine has the instructions.
        unsafe { _mm256_sqrt_ps(a) }
    }

    #[inline(always)]
    fn fma(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: an `Avx2` exists only inside `enter`, where the machine has the instructions.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn abs(self, a: __m256) -> __m256 {
        // SAFETY: an `Avx2` exists only inside `enter`, where the machine has the instructions.
        unsafe { _mm256_andnot_ps(_mm256_set1_ps(-0.0), a) }
    }

    #[inline(always)]
    fn neg(self, a: __m256) -> __m256 {
        // SAFETY: an `Avx2` exists only inside `enter`, where the machine has the instructions.
        unsafe { _mm256_xor_ps(_mm256_set1_ps(-0.0), a) }
    }

    #[inline(always)]
    fn copysign(self, a: __m256, sign: __m256) -> __m256 {
        // SAFETY: an `Avx2` exists only inside `enter`, where the machine has the instructions.
        unsafe {
            let bit = _mm256_set1_ps(-0.0);
            _mm256_or_ps(_mm256_andnot_ps(bit, a), _mm256_and_ps(bit, sign))
        }
    }

    #[inline(always)]
    fn round(self, a: __m256) -> __m256 {
        // SAFETY: an `Avx2` exists only inside `enter`, where the machine has the instructions.
        unsafe { _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
    }

    #[inline(always)]
    fn floor(self, a: __m256) -> __m256 {
        // SAFETY: an `Avx2` exists only inside `enter`, where the machine has the instructions.
        unsafe { _mm256_round_ps::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(a) }
    }

    #[inline(always)]
    fn max(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: an `Avx2` exists only inside `enter`, where the machine has the instructions.
        unsafe { _mm256_max_ps(a, b) }
    }

    #[inline(always)]
    fn min(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: an `Avx2` exists only inside `enter`, where the machine has the instructions.
        unsafe { _mm256_min_ps(a, b) }
    }

    #[inline(always)]
    fn select_ge(self, a: __m256, b: __m256, yes: __m256, no: __m256) -> __m256 {
        // SAFETY: an `Avx2` exists only inside `enter`, where the machine has the instructions.
        unsafe {
            // Not a blend, so that a choice between a value and zero is one operation.
            let mask = _mm256_cmp_ps::<_CMP_GE_OQ>(a, b);
            _mm256_or_ps(_mm256_and_ps(mask, yes), _mm256_andnot_ps(mask, no))
        }
    }

    #[inline(always)]
    fn all_within(self, low: __m256, x: __m256, high: __m256) -> bool {
        // SAFETY: an `Avx2` exists only inside `enter`, where the machine has the instructions.
        unsafe {
            let (above, below) = (_mm256_cmp_ps::<_CMP_LE_OQ>(low, x), _mm256_cmp_ps::<_CMP_LE_OQ>(x, high));
            _mm256_movemask_ps(_mm256_and_ps(above, below)) == 0xFF
        }
    }

    #[inline(always)]
    fn any_nan_or_inf(self, a: __m256) -> bool {
        // SAFETY: an `Avx2` exists only inside `enter`, where the machine has the instructions.
        unsafe { _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_NLT_UQ>(a, _mm256_set1_ps(f32::INFINITY))) != 0 }
    }

    #[inline(always)]
    fn pow2(self, i: __m256) -> __m256 {
        // SAFETY: an `Avx2` exists only inside `enter`, where the machine has the instructions.
        unsafe {
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(
                _mm256_cvtps_epi32(i),
                _mm256_set1_epi32(127),
            )))
        }
    }

    #[inline(always)]
    fn mul_pow2(self, m: __m256, i: __m256) -> __m256 {
        // SAFETY: an `Avx2` exists only inside `enter`, where the machine has the instructions.
        unsafe {
            // All in range is normal, so i is added to the exponent.
            let i = _mm256_slli_epi32::<23>(_mm256_cvtps_epi32(i));
            _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(m), i))
        }
    }

    #[inline(always)]
    fn round_small(self, t: __m256) -> (__m256, __m256) {
        // SAFETY: an `Avx2` exists only inside `enter`, where the machine has the instructions.
        unsafe {
            // From 2^23 on the last place of a number is 1; the last bits of the sum are the integer.
            let magic = _mm256_set1_ps(12_582_912.0);
            let sum = _mm256_add_ps(t, magic);
            (_mm256_sub_ps(sum, magic), sum)
        }
    }

    #[inline(always)]
    fn round_product(self, x: __m256, c: __m256) -> (__m256, __m256) {
        // SAFETY: an `Avx2` exists only inside `enter`, where the machine has the instructions.
        unsafe {
            let magic = _mm256_set1_ps(12_582_912.0);
            let sum = _mm256_fmadd_ps(x, c, magic);
            (_mm256_sub_ps(sum, magic), sum)
        }
    }

    #[inline(always)]
    fn mul_rounded(self, m: __m256, rounded: __m256) -> __m256 {
        // SAFETY: an `Avx2` exists only inside `enter`, where the machine has the instructions.
        unsafe {
            let i = _mm256_slli_epi32::<23>(_mm256_castps_si256(rounded));
            _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(m), i))
        }
    }

    #[inline(always)]
    unsafe fn stream_line(self, from: *const u8, to: *mut u8) {
        // SAFETY: an `Avx2` exists only inside `enter`, where the machine has the instructions; the pointers are the caller's promise.
        unsafe {
            _mm256_stream_si256(to.cast(), _mm256_loadu_si256(from.cast()));
            _mm256_stream_si256(to.add(32).cast(), _mm256_loadu_si256(from.add(32).cast()));
        }
    }

    #[inline(always)]
    fn fence(self) {
        // SAFETY: every x86_64 has it.
        unsafe { _mm_sfence() };
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> __m256 {
        // SAFETY: an `Avx2` exists only inside `enter`, where the machine has the instructions; the pointer is the caller's promise.
        unsafe { _mm256_loadu_ps(p) }
    }

    #[inline(always)]
    unsafe fn store(self, v: __m256, p: *mut f32) {
        // SAFETY: an `Avx2` exists only inside `enter`, where the machine has the instructions; the pointer is the caller's promise.
        unsafe { _mm256_storeu_ps(p, v) }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const bf16) -> __m256 {
        // SAFETY: an `Avx2` exists only inside `enter`, where the machine has the instructions; the pointer is the caller's promise.
        unsafe {
            // All eight in both halves, which takes no unit of arithmetic, and one exchange of bytes: to widen words and to shift
            // them takes two, which on Zen 4 stand in the way of multiply-adds.
            #[rustfmt::skip]
            let high = _mm256_setr_epi8(
                -1, -1, 0, 1, -1, -1, 2, 3, -1, -1, 4, 5, -1, -1, 6, 7,
                -1, -1, 8, 9, -1, -1, 10, 11, -1, -1, 12, 13, -1, -1, 14, 15,
            );
            let all = _mm256_broadcastsi128_si256(_mm_loadu_si128(p.cast()));
            _mm256_castsi256_ps(_mm256_shuffle_epi8(all, high))
        }
    }

    #[inline(always)]
    unsafe fn load_f16(self, p: *const f16) -> __m256 {
        // SAFETY: an `Avx2` exists only inside `enter`, where the machine has the instructions; the pointer is the caller's promise.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
    }

    #[inline(always)]
    unsafe fn load_i8(self, p: *const i8) -> __m256 {
        // SAFETY: an `Avx2` exists only inside `enter`, where the machine has the instructions; the pointer is the caller's promise.
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast()))) }
    }

    #[inline(always)]
    fn nibble<const SHIFT: u32>(self, words: __m256, least: __m256) -> __m256 {
        // SAFETY: an `Avx2` exists only inside `enter`, where the machine has the instructions.
        unsafe {
            let shifted = _mm256_srl_epi32(_mm256_castps_si256(words), _mm_cvtsi32_si128(SHIFT as i32));
            _mm256_add_ps(_mm256_cvtepi32_ps(_mm256_and_si256(shifted, _mm256_set1_epi32(15))), least)
        }
    }

    #[inline(always)]
    unsafe fn narrow_f32(self, v: __m256, p: *mut f32) {
        // SAFETY: an `Avx2` exists only inside `enter`, where the machine has the instructions; the pointer is the caller's promise.
        unsafe { _mm256_storeu_ps(p, canonical(v)) }
    }

    #[inline(always)]
    unsafe fn narrow_bf16(self, v: __m256, p: *mut bf16) {
        // SAFETY: an `Avx2` exists only inside `enter`, where the machine has the instructions; the pointer is the caller's promise.
        unsafe { _mm_storeu_si128(p.cast(), to_bf16(v)) }
    }

    #[inline(always)]
    unsafe fn narrow_two_bf16(self, (a, b): (__m256, __m256), p: *mut bf16) {
        // SAFETY: an `Avx2` exists only inside `enter`, where the machine has the instructions; the pointer is the caller's promise.
        unsafe {
            let (a, b) = without_nan(a, b);
            let (a, b) = (_mm256_srli_epi32::<16>(rounded(a)), _mm256_srli_epi32::<16>(rounded(b)));
            // The pack works on 128-bit halves; the permutation brings the four quarters in order.
            let packed = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(a, b));
            _mm256_storeu_si256(p.cast(), packed);
        }
    }

    #[inline(always)]
    unsafe fn narrow_f16(self, v: __m256, p: *mut f16) {
        // SAFETY: an `Avx2` exists only inside `enter`, where the machine has the instructions; the pointer is the caller's promise.
        unsafe { _mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(canonical(v))) }
    }

    #[inline(always)]
    unsafe fn transpose<const SWAP: bool>(
        self,
        rows: &[*const u32; MAX_LANES],
        at: usize,
        count: usize,
        to: *mut u32,
        stride: usize,
    ) {
        // SAFETY: the caller's promise; an `Avx2` exists only inside `enter`, where the machine has the instructions.
        unsafe {
            // Halves of rows i and i + 4 side by side, first the words 0 to 3 and then 4 to 7, so that none crosses later.
            let mut row = [_mm256_setzero_si256(); 8];
            for (i, row) in row.iter_mut().enumerate() {
                let (low, high) = (rows[i % 4].add(at + i / 4 * 4), rows[i % 4 + 4].add(at + i / 4 * 4));
                let low = _mm256_castsi128_si256(_mm_loadu_si128(low.cast()));
                *row = _mm256_inserti128_si256::<1>(low, _mm_loadu_si128(high.cast()));
                if SWAP {
                    *row = _mm256_or_si256(_mm256_slli_epi32::<16>(*row), _mm256_srli_epi32::<16>(*row));
                }
            }
            // Words, then pairs of words, of neighbouring rows alternate.
            let mut column = [_mm256_setzero_si256(); 8];
            for (row, column) in row.chunks_exact(4).zip(column.chunks_exact_mut(4)) {
                let (a, b) = (_mm256_unpacklo_epi32(row[0], row[1]), _mm256_unpacklo_epi32(row[2], row[3]));
                (column[0], column[1]) = (_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
                let (a, b) = (_mm256_unpackhi_epi32(row[0], row[1]), _mm256_unpackhi_epi32(row[2], row[3]));
                (column[2], column[3]) = (_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
            }
            let lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            let mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(count as i32), lane);
            for (j, column) in column.into_iter().enumerate() {
                // A store under a mask takes ten times as long on Zen. Where columns lie side by side, what a whole one writes
                // too much is where the next ones stand, but for the last.
                if count >= 8 || count == stride && j * stride + 8 <= 8 * stride {
                    _mm256_storeu_si256(to.add(j * stride).cast(), column);
                } else {
                    _mm256_maskstore_epi32(to.add(j * stride).cast(), mask, column);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn least_bf16(self, p: *const bf16, count: usize) -> u16 {
        // SAFETY: the caller's promise; an `Avx2` exists only inside `enter`, where the machine has the instructions.
        unsafe {
            let (magnitude, one) = (_mm256_set1_epi16(0x7FFF), _mm256_set1_epi16(1));
            let mut least = _mm256_set1_epi16(-1);
            for i in (0..count).step_by(16) {
                let bits = _mm256_and_si256(_mm256_loadu_si256(p.add(i).cast()), magnitude);
                least = _mm256_min_epu16(least, _mm256_sub_epi16(bits, one));
            }
            let mut lanes = [0u16; 16];
            _mm256_storeu_si256(lanes.as_mut_ptr().cast(), least);
            lanes.into_iter().fold(u16::MAX, u16::min)
        }
    }

    #[inline(always)]
    unsafe fn swap_pairs(self, from: *const u32, to: *mut u32) {
        // SAFETY: the caller's promise.
        unsafe {
            let pairs = _mm256_loadu_si256(from.cast());
            let swapped = _mm256_or_si256(_mm256_slli_epi32::<16>(pairs), _mm256_srli_epi32::<16>(pairs));
            _mm256_storeu_si256(to.cast(), swapped)
        }
    }

    #[inline(always)]
    unsafe fn narrow_pairs(self, high: __m256, low: __m256, p: *mut u32) {
        // SAFETY: an `Avx2` exists only inside `enter`, where the machine has the instructions; the pointer is the caller's promise.
        unsafe {
            let (high, low) = without_nan(high, low);
            self.narrow_pairs_of_numbers(high, low, p);
        }
    }

    #[inline(always)]
    unsafe fn narrow_pairs_of_numbers(self, high: __m256, low: __m256, p: *mut u32) {
        // SAFETY: an `Avx2` exists only inside `enter`, where the machine has the instructions; the pointer is the caller's promise.
        unsafe {
            let (high, low) = (_mm256_castps_si256(high), _mm256_castps_si256(low));
            // What both elements of a pair keep, and what they lose. One is added where that is more than half an ulp, or half
            // of one and the lowest kept bit is 1: where it has its own top bit, less one for a lowest bit of 0 unless it is 0.
            let kept = _mm256_blend_epi16::<0b1010_1010>(_mm256_srli_epi32::<16>(low), high);
            let lost = _mm256_blend_epi16::<0b1010_1010>(low, _mm256_slli_epi32::<16>(high));
            let even = _mm256_andnot_si256(kept, _mm256_set1_epi16(1));
            let more = _mm256_srli_epi16::<15>(_mm256_subs_epu16(lost, even));
            _mm256_storeu_si256(p.cast(), _mm256_add_epi16(kept, more));
        }
    }

    #[inline(always)]
    unsafe fn narrow_pairs_about<const N: usize>(self, v: &[(__m256, __m256); N], p: *mut u32) -> bool {
        // SAFETY: an `Avx2` exists only inside `enter`, where the machine has the instructions; the pointer is the caller's promise.
        unsafe {
            let (half, mut least) = (_mm256_set1_epi32(HALF_AND_FOUR), _mm256_set1_epi16(-1));
            for (i, (high, low)) in v.iter().enumerate() {
                let high = _mm256_add_epi32(_mm256_castps_si256(*high), half);
                let low = _mm256_add_epi32(_mm256_castps_si256(*low), half);
                let rounded = _mm256_blend_epi16::<0b1010_1010>(_mm256_srli_epi32::<16>(low), high);
                _mm256_storeu_si256(p.add(8 * i).cast(), rounded);
                least = _mm256_min_epu16(least, _mm256_min_epu16(high, low));
            }
            let near = _mm256_subs_epu16(_mm256_set1_epi32(TIES), least);
            _mm256_testz_si256(near, near) != 0
        }
    }

    #[inline(always)]
    fn interleave(self, high: __m256, low: __m256) -> (__m256, __m256) {
        // SAFETY: an `Avx2` exists only inside `enter`, where the machine has the instructions.
        unsafe {
            // The unpacks work on 128-bit halves; the permutations bring the halves in order.
            let (a, b) = (_mm256_unpacklo_ps(low, high), _mm256_unpackhi_ps(low, high));
            (_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b))
        }
    }

    #[inline(always)]
    unsafe fn load_pairs(self, p: *const u32) -> (__m256, __m256) {
        // SAFETY: an `Avx2` exists only inside `enter`, where the machine has the instructions; the pointer is the caller's promise.
        self.split_pairs(unsafe { _mm256_loadu_ps(p.cast()) })
    }

    #[inline(always)]
    fn split_pairs(self, pairs: __m256) -> (__m256, __m256) {
        // SAFETY: an `Avx2` exists only inside `enter`, where the machine has the instructions.
        unsafe {
            let pairs = _mm256_castps_si256(pairs);
            (
                _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(0xFFFF_0000_u32 as i32))),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs)),
            )
        }
    }

    #[inline(always)]
    unsafe fn coded_pairs(self, table: *const u32, block: *const u32, step: usize, vector: usize) -> __m256 {
        // SAFETY: an `Avx2` exists only inside `enter`, where the machine has the instructions; a block has two lines of low
        // bytes and one of codes, the rest is the caller's promise.
        unsafe {
            // Bytes of columns 0 to 7 and 16 to 23 stand in the first half of a line.
            let half = block.add(vector % 2 * 8);
            let (low, codes) =
                (_mm256_loadu_si256(half.add(step * 16).cast()), _mm256_loadu_si256(half.add(32).cast()));
            let codes = if step == 1 { _mm256_srli_epi16::<4>(codes) } else { codes };
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.cast()));
            let high = _mm256_shuffle_epi8(table, _mm256_and_si256(codes, _mm256_set1_epi8(15)));
            let pairs = if vector < 2 { _mm256_unpacklo_epi8(low, high) } else { _mm256_unpackhi_epi8(low, high) };
            _mm256_castsi256_ps(pairs)
        }
    }
}

/// NaN lanes become the canonical quiet NaN.
///
/// # Safety
/// The machine has the instructions.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn canonical(v: __m256) -> __m256 {
    let nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FC0_0000));
    _mm256_blendv_ps(v, nan, _mm256_cmp_ps::<_CMP_UNORD_Q>(v, v))
}

/// [`canonical`] of both. NaN is rare: a branch costs less than to look at every lane.
///
/// # Safety
/// The machine has the instructions.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn without_nan(a: __m256, b: __m256) -> (__m256, __m256) {
    let nan = _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_UNORD_Q>(a, b)) != 0;
    if nan {
        std::hint::cold_path();
        (canonical(a), canonical(b))
    } else {
        (a, b)
    }
}

/// Lanes that are no other NaN than the canonical one, to bf16 in the high half, to nearest even: add half an ulp less one
/// plus the lowest kept bit; the low half is left.
///
/// # Safety
/// The machine has the instructions.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn rounded(v: __m256) -> __m256i {
    let bits = _mm256_castps_si256(v);
    let lowest = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
    _mm256_add_epi32(bits, _mm256_add_epi32(lowest, _mm256_set1_epi32(0x7FFF)))
}

/// To bf16.
///
/// # Safety
/// The machine has the instructions.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn to_bf16(v: __m256) -> __m128i {
    let cut = _mm256_srli_epi32::<16>(rounded(canonical(v)));
    // The pack works on 128-bit halves; the permutation brings the two results side by side.
    _mm256_castsi256_si128(_mm256_permute4x64_epi64::<0b1000>(_mm256_packus_epi32(cut, cut)))
}
