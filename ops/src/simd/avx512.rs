//! Sixteen lanes: AVX-512 F, BW, DQ and VL; `VDPBF16PS` where the machine has it.

use super::words::{self, Kernel512, Simd512};
use super::{Kernel, MAX_LANES, Simd};
use half::{bf16, f16};
use std::arch::x86_64::*;

/// Proof that the machine has the instructions; made only by [`enter`] and [`enter_dot`].
#[derive(Clone, Copy)]
pub struct Avx512(());

/// Runs `kernel` compiled for these instructions.
///
/// # Safety
/// The machine has avx512f, avx512bw, avx512dq, avx512vl, avx2, fma, f16c.
#[inline(always)]
pub unsafe fn enter<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: the caller's promise.
    unsafe { kernel.entered() }
}

/// What [`enter`] calls: a method, so that the code of a kernel is compiled beside it, and not that of all kernels as one unit.
trait Entered: Kernel + Sized {
    /// # Safety
    /// As [`enter`].
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn entered(self) -> Self::Output {
        self.run(Avx512(()))
    }
}

impl<K: Kernel> Entered for K {}

/// Runs `kernel` compiled for these instructions and `VDPBF16PS`.
///
/// # Safety
/// The machine has avx512f, avx512bw, avx512dq, avx512vl, avx512bf16; the rest is the kernel's own.
#[inline(always)]
pub unsafe fn enter_dot<K: Kernel512>(kernel: K) -> K::Output {
    // SAFETY: the caller's promise.
    unsafe { kernel.entered_dot() }
}

/// What [`enter_dot`] calls: a method, so that the code of a kernel is compiled beside it, and not that of all kernels as one unit.
trait EnteredDot: Kernel512 + Sized {
    /// # Safety
    /// As [`enter_dot`].
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn entered_dot(self) -> Self::Output {
        // SAFETY: the caller's promise.
        unsafe { self.run(Avx512(())) }
    }
}

impl<K: Kernel512> EnteredDot for K {}

impl Simd for Avx512 {
    type F = __m512;
    const LANES: usize = 16;

    #[inline(always)]
    fn enter<K: Kernel>(self, kernel: K) -> K::Output {
        // SAFETY: a token exists only where the machine has the instructions.
        unsafe { enter(kernel) }
    }
    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        // SAFETY: an `Avx512` exists only inside `enter`, where the machine has the instructions.
        unsafe { _mm512_set1_ps(x) }
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: an `Avx512` exists only inside `enter`, where the machine has the instructions.
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: an `Avx512` exists only inside `enter`, where the machine has the instructions.
        unsafe { _mm512_sub_ps(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: an `Avx512` exists only inside `enter`, where the machine has the instructions.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: an `Avx512` exists only inside `enter`, where the machine has the instructions.
        unsafe { _mm512_div_ps(a, b) }
    }

    #[inline(always)]
    fn sqrt(self, a: __m512) -> __m512 {
        // SAFETY: an `Avx512` exists only inside `enter`, where the machine has the instructions.
        unsafe { _mm512_sqrt_ps(a) }
    }

    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: an `Avx512` exists only inside `enter`, where the machine has the instructions.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn abs(self, a: __m512) -> __m512 {
        // SAFETY: an `Avx512` exists only inside `enter`, where the machine has the instructions.
        unsafe { _mm512_abs_ps(a) }
    }

    #[inline(always)]
    fn neg(self, a: __m512) -> __m512 {
        // SAFETY: an `Avx512` exists only inside `enter`, where the machine has the instructions.
        unsafe { _mm512_xor_ps(_mm512_set1_ps(-0.0), a) }
    }

    #[inline(always)]
    fn copysign(self, a: __m512, sign: __m512) -> __m512 {
        // SAFETY: an `Avx512` exists only inside `enter`, where the machine has the instructions.
        unsafe {
            let bit = _mm512_set1_ps(-0.0);
            _mm512_or_ps(_mm512_andnot_ps(bit, a), _mm512_and_ps(bit, sign))
        }
    }

    #[inline(always)]
    fn round(self, a: __m512) -> __m512 {
        // SAFETY: an `Avx512` exists only inside `enter`, where the machine has the instructions.
        unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
    }

    #[inline(always)]
    fn floor(self, a: __m512) -> __m512 {
        // SAFETY: an `Avx512` exists only inside `enter`, where the machine has the instructions.
        unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(a) }
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: an `Avx512` exists only inside `enter`, where the machine has the instructions.
        unsafe { _mm512_max_ps(a, b) }
    }

    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: an `Avx512` exists only inside `enter`, where the machine has the instructions.
        unsafe { _mm512_min_ps(a, b) }
    }

    #[inline(always)]
    fn select_ge(self, a: __m512, b: __m512, yes: __m512, no: __m512) -> __m512 {
        // SAFETY: an `Avx512` exists only inside `enter`, where the machine has the instructions.
        unsafe { _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_GE_OQ>(a, b), no, yes) }
    }

    #[inline(always)]
    fn all_within(self, low: __m512, x: __m512, high: __m512) -> bool {
        // SAFETY: an `Avx512` exists only inside `enter`, where the machine has the instructions.
        unsafe {
            let above = _mm512_cmp_ps_mask::<_CMP_LE_OQ>(low, x);
            _mm512_mask_cmp_ps_mask::<_CMP_LE_OQ>(above, x, high) == 0xFFFF
        }
    }

    #[inline(always)]
    fn any_nan_or_inf(self, a: __m512) -> bool {
        // SAFETY: an `Avx512` exists only inside `enter`, where the machine has the instructions.
        unsafe { _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(a, _mm512_set1_ps(f32::INFINITY)) != 0 }
    }

    #[inline(always)]
    fn pow2(self, i: __m512) -> __m512 {
        // SAFETY: an `Avx512` exists only inside `enter`, where the machine has the instructions.
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
        // SAFETY: an `Avx512` exists only inside `enter`, where the machine has the instructions.
        unsafe { _mm512_scalef_ps(m, i) }
    }

    #[inline(always)]
    unsafe fn stream_line(self, from: *const u8, to: *mut u8) {
        // SAFETY: an `Avx512` exists only inside `enter`, where the machine has the instructions; the pointers are the caller's promise.
        unsafe { _mm512_stream_si512(to.cast(), _mm512_loadu_si512(from.cast())) }
    }

    #[inline(always)]
    fn fence(self) {
        // SAFETY: every x86_64 has it.
        unsafe { _mm_sfence() };
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> __m512 {
        // SAFETY: an `Avx512` exists only inside `enter`, where the machine has the instructions; the pointer is the caller's promise.
        unsafe { _mm512_loadu_ps(p) }
    }

    #[inline(always)]
    unsafe fn store(self, v: __m512, p: *mut f32) {
        // SAFETY: an `Avx512` exists only inside `enter`, where the machine has the instructions; the pointer is the caller's promise.
        unsafe { _mm512_storeu_ps(p, v) }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const bf16) -> __m512 {
        // SAFETY: an `Avx512` exists only inside `enter`, where the machine has the instructions; the pointer is the caller's promise.
        unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast())))) }
    }

    #[inline(always)]
    unsafe fn load_f16(self, p: *const f16) -> __m512 {
        // SAFETY: an `Avx512` exists only inside `enter`, where the machine has the instructions; the pointer is the caller's promise.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }

    #[inline(always)]
    unsafe fn load_i8(self, p: *const i8) -> __m512 {
        // SAFETY: an `Avx512` exists only inside `enter`, where the machine has the instructions; the pointer is the caller's promise.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast()))) }
    }

    #[inline(always)]
    fn nibble<const SHIFT: u32>(self, words: __m512, least: __m512) -> __m512 {
        // SAFETY: an `Avx512` exists only inside `enter`, where the machine has the instructions.
        unsafe {
            // A permutation looks at the lowest four bits alone; the table stays where it is while a loop runs.
            let numbers = _mm512_setr_ps(0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.);
            let which = _mm512_srli_epi32::<SHIFT>(_mm512_castps_si512(words));
            _mm512_permutexvar_ps(which, _mm512_add_ps(numbers, least))
        }
    }

    #[inline(always)]
    unsafe fn narrow_f32(self, v: __m512, p: *mut f32) {
        // SAFETY: an `Avx512` exists only inside `enter`, where the machine has the instructions; the pointer is the caller's promise.
        unsafe { _mm512_storeu_ps(p, words::canonical(self, v)) }
    }

    #[inline(always)]
    unsafe fn narrow_bf16(self, v: __m512, p: *mut bf16) {
        // SAFETY: the caller's promise.
        unsafe { words::narrow_bf16(self, v, p) }
    }

    #[inline(always)]
    unsafe fn narrow_f16(self, v: __m512, p: *mut f16) {
        // SAFETY: an `Avx512` exists only inside `enter`, where the machine has the instructions; the pointer is the caller's promise.
        unsafe {
            _mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(words::canonical(self, v)))
        }
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
        // SAFETY: the caller's promise.
        unsafe { words::transpose::<Self, SWAP>(self, rows, at, count, to, stride) }
    }

    #[inline(always)]
    unsafe fn least_bf16(self, p: *const bf16, count: usize) -> u16 {
        // SAFETY: the caller's promise.
        unsafe { words::least_bf16(self, p, count) }
    }

    #[inline(always)]
    unsafe fn swap_pairs(self, from: *const u32, to: *mut u32) {
        // SAFETY: the caller's promise.
        unsafe { words::swap_pairs(self, from, to) }
    }

    #[inline(always)]
    unsafe fn narrow_pairs(self, high: __m512, low: __m512, p: *mut u32) {
        // SAFETY: the caller's promise.
        unsafe { words::narrow_pairs(self, high, low, p) }
    }

    #[inline(always)]
    unsafe fn narrow_pairs_of_numbers(self, high: __m512, low: __m512, p: *mut u32) {
        // SAFETY: the caller's promise.
        unsafe { words::narrow_pairs_of_numbers(self, high, low, p) }
    }

    #[inline(always)]
    unsafe fn narrow_pairs_about<const N: usize>(self, v: &[(__m512, __m512); N], p: *mut u32) -> bool {
        // SAFETY: the caller's promise.
        unsafe { words::narrow_pairs_about(self, v, p) }
    }

    #[inline(always)]
    fn interleave(self, high: __m512, low: __m512) -> (__m512, __m512) {
        words::interleave(self, high, low)
    }

    #[inline(always)]
    unsafe fn load_pairs(self, p: *const u32) -> (__m512, __m512) {
        // SAFETY: the caller's promise.
        unsafe { words::load_pairs(self, p) }
    }
}

/// Each method of the list is the intrinsic of its name.
macro_rules! intrinsics {
    ($($name:ident$([$imm:ident: $imm_type:ty])?($($arg:ident: $type:ty),*) -> $result:ty = $intrinsic:ident)*) => {$(
        #[inline(always)]
        fn $name$(<const $imm: $imm_type>)?(self, $($arg: $type),*) -> $result {
            // SAFETY: an `Avx512` exists only inside `enter` or `enter_dot`, where the machine has the instructions.
            unsafe { $intrinsic$(::<$imm>)?($($arg),*) }
        }
    )*};
}

impl Simd512 for Avx512 {
    type I = __m512i;

    intrinsics! {
        cast_ps(v: __m512i) -> __m512 = _mm512_castsi512_ps
        cast_si512(v: __m512) -> __m512i = _mm512_castps_si512
        set1_epi8(x: i8) -> __m512i = _mm512_set1_epi8
        set1_epi16(x: i16) -> __m512i = _mm512_set1_epi16
        set1_epi32(x: i32) -> __m512i = _mm512_set1_epi32
        and_si512(a: __m512i, b: __m512i) -> __m512i = _mm512_and_si512
        add_epi32(a: __m512i, b: __m512i) -> __m512i = _mm512_add_epi32
        sub_epi16(a: __m512i, b: __m512i) -> __m512i = _mm512_sub_epi16
        min_epu16(a: __m512i, b: __m512i) -> __m512i = _mm512_min_epu16
        slli_epi32[N: u32](v: __m512i) -> __m512i = _mm512_slli_epi32
        srli_epi32[N: u32](v: __m512i) -> __m512i = _mm512_srli_epi32
        srli_epi16[N: u32](v: __m512i) -> __m512i = _mm512_srli_epi16
        rol_epi32[N: i32](v: __m512i) -> __m512i = _mm512_rol_epi32
        unpacklo_epi8(a: __m512i, b: __m512i) -> __m512i = _mm512_unpacklo_epi8
        unpackhi_epi8(a: __m512i, b: __m512i) -> __m512i = _mm512_unpackhi_epi8
        unpacklo_epi32(a: __m512i, b: __m512i) -> __m512i = _mm512_unpacklo_epi32
        unpackhi_epi32(a: __m512i, b: __m512i) -> __m512i = _mm512_unpackhi_epi32
        unpacklo_epi64(a: __m512i, b: __m512i) -> __m512i = _mm512_unpacklo_epi64
        unpackhi_epi64(a: __m512i, b: __m512i) -> __m512i = _mm512_unpackhi_epi64
        shuffle_epi8(table: __m512i, which: __m512i) -> __m512i = _mm512_shuffle_epi8
        shuffle_epi32[WHICH: i32](v: __m512i) -> __m512i = _mm512_shuffle_epi32
        shuffle_i32x4[WHICH: i32](a: __m512i, b: __m512i) -> __m512i = _mm512_shuffle_i32x4
        permutex2var_ps(a: __m512, which: __m512i, b: __m512) -> __m512 = _mm512_permutex2var_ps
        mask_blend_epi16(mask: u32, a: __m512i, b: __m512i) -> __m512i = _mm512_mask_blend_epi16
        mask_blend_ps(mask: u16, a: __m512, b: __m512) -> __m512 = _mm512_mask_blend_ps
        cmplt_epu16_mask(a: __m512i, b: __m512i) -> u32 = _mm512_cmplt_epu16_mask
        cmpunord_ps_mask(a: __m512, b: __m512) -> u16 = _mm512_cmpunord_ps_mask
    }

    #[inline(always)]
    fn setr_epi32(self, words: [i32; 16]) -> __m512i {
        // SAFETY: both are 512 bits, of which every pattern is a value.
        unsafe { std::mem::transmute(words) }
    }

    #[inline(always)]
    fn insertf32x8_high(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: an `Avx512` exists only inside `enter` or `enter_dot`, where the machine has the instructions.
        unsafe { _mm512_insertf32x8::<1>(a, _mm512_castps512_ps256(b)) }
    }

    #[inline(always)]
    fn reduce_min_epu16(self, v: __m512i) -> u16 {
        // SAFETY: an `Avx512` exists only inside `enter` or `enter_dot`, where the machine has the instructions.
        unsafe {
            let half = _mm256_min_epu16(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64::<1>(v));
            let quarter = _mm_min_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256::<1>(half));
            _mm_cvtsi128_si32(_mm_minpos_epu16(quarter)) as u16
        }
    }

    #[inline(always)]
    unsafe fn loadu_si512(self, p: *const u32) -> __m512i {
        // SAFETY: the caller's promise; an `Avx512` exists only where the machine has the instructions.
        unsafe { _mm512_loadu_si512(p.cast()) }
    }

    #[inline(always)]
    unsafe fn loadu_halves(self, low: *const u32, high: *const u32) -> __m512i {
        // SAFETY: as above.
        unsafe {
            let low = _mm512_castsi256_si512(_mm256_loadu_si256(low.cast()));
            _mm512_inserti64x4::<1>(low, _mm256_loadu_si256(high.cast()))
        }
    }

    #[inline(always)]
    unsafe fn broadcast_i32x4(self, p: *const u32) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_broadcast_i32x4(_mm_loadu_si128(p.cast())) }
    }

    #[inline(always)]
    unsafe fn storeu_si512(self, p: *mut u32, v: __m512i) {
        // SAFETY: as above.
        unsafe { _mm512_storeu_si512(p.cast(), v) }
    }

    #[inline(always)]
    unsafe fn mask_storeu_epi32(self, p: *mut u32, mask: u16, v: __m512i) {
        // SAFETY: as above.
        unsafe { _mm512_mask_storeu_epi32(p.cast(), mask, v) }
    }

    #[inline(always)]
    unsafe fn cvtepi32_storeu_epi16(self, p: *mut u16, v: __m512i) {
        // SAFETY: as above.
        unsafe { _mm256_storeu_si256(p.cast(), _mm512_cvtepi32_epi16(v)) }
    }

    #[inline(always)]
    unsafe fn dpbf16_ps(self, sums: __m512, a: __m512i, b: __m512i) -> __m512 {
        // SAFETY: the caller's promise; a vector of words and one of pairs of bf16 have the same 512 bits.
        unsafe {
            use std::mem::transmute;
            _mm512_dpbf16_ps(sums, transmute::<__m512i, __m512bh>(a), transmute::<__m512i, __m512bh>(b))
        }
    }

    #[inline(always)]
    unsafe fn pairs_of_normals(self, high: __m512, low: __m512) -> __m512i {
        // SAFETY: the caller's promise; a vector of pairs of bf16 and one of words have the same 512 bits.
        unsafe {
            let halves = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low));
            let half = |i: i32| (i + 16) << 16 | i;
            let which = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15].map(half);
            _mm512_permutexvar_epi16(_mm512_loadu_si512(which.as_ptr().cast()), halves)
        }
    }

    #[inline(always)]
    unsafe fn call<K: Kernel512>(self, kernel: K) -> K::Output {
        // SAFETY: the caller's promise.
        unsafe { enter_dot(kernel) }
    }

    #[inline(always)]
    fn pin(self, v: &mut __m512) {
        // SAFETY: an `Avx512` exists only inside `enter` or `enter_dot`, where the machine has the instructions.
        unsafe { pin(v) }
    }

    #[inline(always)]
    fn pin_words(self, a: &mut __m512i, b: &mut __m512i, c: &mut __m512i) {
        // SAFETY: as above.
        unsafe { pin_words(a, b, c) }
    }
}

/// Nothing moves past this, and `v` is in a register.
///
/// # Safety
/// The machine has the instructions.
#[inline]
#[target_feature(enable = "avx512f")]
fn pin(v: &mut __m512) {
    // SAFETY: no instruction, and so nothing but the register is named.
    unsafe { std::arch::asm!("/* {0} */", inout(zmm_reg) * v, options(nostack, preserves_flags)) }
}

/// [`pin`] of three.
///
/// # Safety
/// The machine has the instructions.
#[inline]
#[target_feature(enable = "avx512f")]
fn pin_words(a: &mut __m512i, b: &mut __m512i, c: &mut __m512i) {
    // SAFETY: as above.
    unsafe {
        std::arch::asm!(
            "/* {0} */",
            "/* {1} */",
            "/* {2} */",
            inout(zmm_reg) * a,
            inout(zmm_reg) * b,
            inout(zmm_reg) * c,
            options(nostack, preserves_flags)
        )
    }
}
