//! Sixteen lanes: AVX-512 F, BW, DQ and VL.

use super::{Kernel, MAX_LANES, Simd};
use half::{bf16, f16};
use std::arch::x86_64::*;

/// Proof that the machine has the instructions; made only by [`enter`].
#[derive(Clone, Copy)]
pub struct Avx512(());

/// Runs `kernel` compiled for these instructions.
///
/// # Safety
/// The machine has avx512f, avx512bw, avx512dq, avx512vl, avx2, fma, f16c.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub unsafe fn enter<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Avx512(()))
}

impl Simd for Avx512 {
    type F = __m512;
    const LANES: usize = 16;

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        // SAFETY: a `Avx512` exists only inside `enter`, where the machine has the instructions.
        unsafe { _mm512_set1_ps(x) }
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: a `Avx512` exists only inside `enter`, where the machine has the instructions.
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: a `Avx512` exists only inside `enter`, where the machine has the instructions.
        unsafe { _mm512_sub_ps(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: a `Avx512` exists only inside `enter`, where the machine has the instructions.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: a `Avx512` exists only inside `enter`, where the machine has the instructions.
        unsafe { _mm512_div_ps(a, b) }
    }

    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: a `Avx512` exists only inside `enter`, where the machine has the instructions.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn abs(self, a: __m512) -> __m512 {
        // SAFETY: a `Avx512` exists only inside `enter`, where the machine has the instructions.
        unsafe { _mm512_abs_ps(a) }
    }

    #[inline(always)]
    fn neg(self, a: __m512) -> __m512 {
        // SAFETY: a `Avx512` exists only inside `enter`, where the machine has the instructions.
        unsafe { _mm512_xor_ps(_mm512_set1_ps(-0.0), a) }
    }

    #[inline(always)]
    fn copysign(self, a: __m512, sign: __m512) -> __m512 {
        // SAFETY: a `Avx512` exists only inside `enter`, where the machine has the instructions.
        unsafe {
            let bit = _mm512_set1_ps(-0.0);
            _mm512_or_ps(_mm512_andnot_ps(bit, a), _mm512_and_ps(bit, sign))
        }
    }

    #[inline(always)]
    fn round(self, a: __m512) -> __m512 {
        // SAFETY: a `Avx512` exists only inside `enter`, where the machine has the instructions.
        unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
    }

    #[inline(always)]
    fn floor(self, a: __m512) -> __m512 {
        // SAFETY: a `Avx512` exists only inside `enter`, where the machine has the instructions.
        unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(a) }
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: a `Avx512` exists only inside `enter`, where the machine has the instructions.
        unsafe { _mm512_max_ps(a, b) }
    }

    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: a `Avx512` exists only inside `enter`, where the machine has the instructions.
        unsafe { _mm512_min_ps(a, b) }
    }

    #[inline(always)]
    fn select_ge(self, a: __m512, b: __m512, yes: __m512, no: __m512) -> __m512 {
        // SAFETY: a `Avx512` exists only inside `enter`, where the machine has the instructions.
        unsafe { _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_GE_OQ>(a, b), no, yes) }
    }

    #[inline(always)]
    fn all_within(self, low: __m512, x: __m512, high: __m512) -> bool {
        // SAFETY: a `Avx512` exists only inside `enter`, where the machine has the instructions.
        unsafe {
            let above = _mm512_cmp_ps_mask::<_CMP_LE_OQ>(low, x);
            _mm512_mask_cmp_ps_mask::<_CMP_LE_OQ>(above, x, high) == 0xFFFF
        }
    }

    #[inline(always)]
    fn any_nan_or_inf(self, a: __m512) -> bool {
        // SAFETY: a `Avx512` exists only inside `enter`, where the machine has the instructions.
        unsafe { _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(a, _mm512_set1_ps(f32::INFINITY)) != 0 }
    }

    #[inline(always)]
    fn pow2(self, i: __m512) -> __m512 {
        // SAFETY: a `Avx512` exists only inside `enter`, where the machine has the instructions.
        unsafe {
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_add_epi32(
                _mm512_cvtps_epi32(i),
                _mm512_set1_epi32(127),
            )))
        }
    }

    #[inline(always)]
    fn mul_pow2(self, m: __m512, i: __m512) -> __m512 {
        self.scale(m, i)
    }

    #[inline(always)]
    fn scale(self, m: __m512, i: __m512) -> __m512 {
        // SAFETY: a `Avx512` exists only inside `enter`, where the machine has the instructions.
        unsafe { _mm512_scalef_ps(m, i) }
    }

    #[inline(always)]
    unsafe fn stream_line(self, from: *const u8, to: *mut u8) {
        // SAFETY: a `Avx512` exists only inside `enter`, where the machine has the instructions; the pointers are the caller's promise.
        unsafe { _mm512_stream_si512(to.cast(), _mm512_loadu_si512(from.cast())) }
    }

    #[inline(always)]
    fn fence(self) {
        // SAFETY: every x86_64 has it.
        unsafe { _mm_sfence() };
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> __m512 {
        // SAFETY: a `Avx512` exists only inside `enter`, where the machine has the instructions; the pointer is the caller's promise.
        unsafe { _mm512_loadu_ps(p) }
    }

    #[inline(always)]
    unsafe fn store(self, v: __m512, p: *mut f32) {
        // SAFETY: a `Avx512` exists only inside `enter`, where the machine has the instructions; the pointer is the caller's promise.
        unsafe { _mm512_storeu_ps(p, v) }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const bf16) -> __m512 {
        // SAFETY: a `Avx512` exists only inside `enter`, where the machine has the instructions; the pointer is the caller's promise.
        unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast())))) }
    }

    #[inline(always)]
    unsafe fn load_f16(self, p: *const f16) -> __m512 {
        // SAFETY: a `Avx512` exists only inside `enter`, where the machine has the instructions; the pointer is the caller's promise.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }

    #[inline(always)]
    unsafe fn narrow_f32(self, v: __m512, p: *mut f32) {
        // SAFETY: a `Avx512` exists only inside `enter`, where the machine has the instructions; the pointer is the caller's promise.
        unsafe { _mm512_storeu_ps(p, canonical(v)) }
    }

    #[inline(always)]
    unsafe fn narrow_bf16(self, v: __m512, p: *mut bf16) {
        // SAFETY: a `Avx512` exists only inside `enter`, where the machine has the instructions; the pointer is the caller's promise.
        unsafe { _mm256_storeu_si256(p.cast(), to_bf16(v)) }
    }

    #[inline(always)]
    unsafe fn narrow_f16(self, v: __m512, p: *mut f16) {
        // SAFETY: a `Avx512` exists only inside `enter`, where the machine has the instructions; the pointer is the caller's promise.
        unsafe { _mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(canonical(v))) }
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
        // SAFETY: the caller's promise; a `Avx512` exists only inside `enter`, where the machine has the instructions.
        unsafe {
            let mut row = [_mm512_setzero_si512(); 16];
            for (row, from) in row.iter_mut().zip(rows) {
                *row = _mm512_loadu_si512(from.add(at).cast());
                if SWAP {
                    *row = _mm512_rol_epi32::<16>(*row);
                }
            }
            // Words, then pairs of words, of neighbouring rows alternate; then quarters of vectors change places.
            let mut two = [_mm512_setzero_si512(); 16];
            for i in 0..8 {
                two[2 * i] = _mm512_unpacklo_epi32(row[2 * i], row[2 * i + 1]);
                two[2 * i + 1] = _mm512_unpackhi_epi32(row[2 * i], row[2 * i + 1]);
            }
            let mut four = [_mm512_setzero_si512(); 16];
            for i in 0..4 {
                four[4 * i] = _mm512_unpacklo_epi64(two[4 * i], two[4 * i + 2]);
                four[4 * i + 1] = _mm512_unpackhi_epi64(two[4 * i], two[4 * i + 2]);
                four[4 * i + 2] = _mm512_unpacklo_epi64(two[4 * i + 1], two[4 * i + 3]);
                four[4 * i + 3] = _mm512_unpackhi_epi64(two[4 * i + 1], two[4 * i + 3]);
            }
            // four[4 * i + j]: words j, j + 4, j + 8, j + 12 of rows 4i to 4i + 3, one word to a quarter.
            let mask = (1u32 << count).wrapping_sub(1) as u16;
            for j in 0..4 {
                let even = _mm512_shuffle_i32x4::<0x88>(four[j], four[4 + j]);
                let odd = _mm512_shuffle_i32x4::<0xDD>(four[j], four[4 + j]);
                let even_high = _mm512_shuffle_i32x4::<0x88>(four[8 + j], four[12 + j]);
                let odd_high = _mm512_shuffle_i32x4::<0xDD>(four[8 + j], four[12 + j]);
                let column = [
                    _mm512_shuffle_i32x4::<0x88>(even, even_high),
                    _mm512_shuffle_i32x4::<0x88>(odd, odd_high),
                    _mm512_shuffle_i32x4::<0xDD>(even, even_high),
                    _mm512_shuffle_i32x4::<0xDD>(odd, odd_high),
                ];
                for (i, column) in column.into_iter().enumerate() {
                    let to = to.add((j + 4 * i) * stride);
                    if count == 16 {
                        _mm512_storeu_si512(to.cast(), column);
                    } else {
                        _mm512_mask_storeu_epi32(to.cast(), mask, column);
                    }
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn least_bf16(self, p: *const bf16, count: usize) -> u16 {
        // SAFETY: the caller's promise; a `Avx512` exists only inside `enter`, where the machine has the instructions.
        unsafe {
            let (magnitude, one) = (_mm512_set1_epi16(0x7FFF), _mm512_set1_epi16(1));
            let mut least = _mm512_set1_epi16(-1);
            for i in (0..count).step_by(32) {
                let bits = _mm512_and_si512(_mm512_loadu_si512(p.add(i).cast()), magnitude);
                least = _mm512_min_epu16(least, _mm512_sub_epi16(bits, one));
            }
            let half = _mm256_min_epu16(_mm512_castsi512_si256(least), _mm512_extracti64x4_epi64::<1>(least));
            let quarter = _mm_min_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256::<1>(half));
            _mm_cvtsi128_si32(_mm_minpos_epu16(quarter)) as u16
        }
    }

    #[inline(always)]
    unsafe fn swap_pairs(self, from: *const u32, to: *mut u32) {
        // SAFETY: the caller's promise.
        unsafe { _mm512_storeu_si512(to.cast(), _mm512_rol_epi32::<16>(_mm512_loadu_si512(from.cast()))) }
    }

    #[inline(always)]
    unsafe fn narrow_pairs(self, high: __m512, low: __m512, p: *mut u32) {
        // SAFETY: a `Avx512` exists only inside `enter`, where the machine has the instructions; the pointer is the caller's promise.
        unsafe {
            let (mut high, mut low) = (high, low);
            // One look at both for what is rare.
            if _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(high, low) != 0 {
                (high, low) = (canonical(high), canonical(low));
            }
            let low = _mm512_srli_epi32::<16>(rounded(low));
            _mm512_storeu_si512(p.cast(), _mm512_mask_blend_epi16(0xAAAA_AAAA, low, rounded(high)));
        }
    }

    #[inline(always)]
    fn interleave(self, high: __m512, low: __m512) -> (__m512, __m512) {
        // SAFETY: a `Avx512` exists only inside `enter`, where the machine has the instructions.
        unsafe {
            let first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            let second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
            (_mm512_permutex2var_ps(low, first, high), _mm512_permutex2var_ps(low, second, high))
        }
    }

    #[inline(always)]
    unsafe fn load_pairs(self, p: *const u32) -> (__m512, __m512) {
        // SAFETY: a `Avx512` exists only inside `enter`, where the machine has the instructions; the pointer is the caller's promise.
        unsafe {
            let pairs = _mm512_loadu_si512(p.cast());
            (
                _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(0xFFFF_0000_u32 as i32))),
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)),
            )
        }
    }
}

/// NaN lanes become the canonical quiet NaN.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn canonical(v: __m512) -> __m512 {
    let nan = _mm512_castsi512_ps(_mm512_set1_epi32(0x7FC0_0000));
    _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v), v, nan)
}

/// What is no NaN to bf16 in the high half, to nearest even: add half an ulp less one plus the lowest kept bit; the low half
/// is left.
/// (`VCVTNEPS2BF16` flushes subnormals.)
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn rounded(v: __m512) -> __m512i {
    let bits = _mm512_castps_si512(v);
    let lowest = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
    _mm512_add_epi32(bits, _mm512_add_epi32(lowest, _mm512_set1_epi32(0x7FFF)))
}

/// To bf16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn to_bf16(v: __m512) -> __m256i {
    _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(rounded(canonical(v))))
}
