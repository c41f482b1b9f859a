//! Sixteen lanes and the 512-bit words beside them, by the instructions of AVX-512.
//!
//! A kernel of 512-bit words is written once over [`Simd512`]. `avx512.rs` gives it the instructions; `emulated.rs` computes
//! each by its definition, so that tests run the same kernel on a machine without them.

use super::{HALF_AND_FOUR, MAX_LANES, Simd, TIES};
use half::bf16;

/// The instructions that kernels use beside [`Simd`]. A method bears the name of its intrinsic, without `_mm512_`, and does
/// what that does; the few others say what they are.
pub trait Simd512: Simd {
    /// 512 bits of integers.
    type I: Copy;

    /// `castsi512_ps`.
    fn cast_ps(self, v: Self::I) -> Self::F;
    /// `castps_si512`.
    fn cast_si512(self, v: Self::F) -> Self::I;
    /// All bytes `x`.
    fn set1_epi8(self, x: i8) -> Self::I;
    /// All halves of words `x`.
    fn set1_epi16(self, x: i16) -> Self::I;
    /// All words `x`.
    fn set1_epi32(self, x: i32) -> Self::I;
    /// These words, ascending.
    fn setr_epi32(self, words: [i32; 16]) -> Self::I;
    /// `a & b`.
    fn and_si512(self, a: Self::I, b: Self::I) -> Self::I;
    /// `a + b`, wrapping, by words.
    fn add_epi32(self, a: Self::I, b: Self::I) -> Self::I;
    /// `a - b`, wrapping, by halves of words.
    fn sub_epi16(self, a: Self::I, b: Self::I) -> Self::I;
    /// The smaller, unsigned, by halves of words.
    fn min_epu16(self, a: Self::I, b: Self::I) -> Self::I;
    /// The smallest half of a word, unsigned.
    fn reduce_min_epu16(self, v: Self::I) -> u16;
    /// `v << N` by words.
    fn slli_epi32<const N: u32>(self, v: Self::I) -> Self::I;
    /// `v >> N` by words, zeros from above.
    fn srli_epi32<const N: u32>(self, v: Self::I) -> Self::I;
    /// `v >> N` by halves of words, zeros from above.
    fn srli_epi16<const N: u32>(self, v: Self::I) -> Self::I;
    /// Words rotated to the left.
    fn rol_epi32<const N: i32>(self, v: Self::I) -> Self::I;
    /// Of every quarter: the bytes of its low half, those of a and of b in turn.
    fn unpacklo_epi8(self, a: Self::I, b: Self::I) -> Self::I;
    /// The same of its high half.
    fn unpackhi_epi8(self, a: Self::I, b: Self::I) -> Self::I;
    /// Of every quarter: the words of its low half, those of a and of b in turn.
    fn unpacklo_epi32(self, a: Self::I, b: Self::I) -> Self::I;
    /// The same of its high half.
    fn unpackhi_epi32(self, a: Self::I, b: Self::I) -> Self::I;
    /// Of every quarter: its low half of a, then that of b.
    fn unpacklo_epi64(self, a: Self::I, b: Self::I) -> Self::I;
    /// The same of the high halves.
    fn unpackhi_epi64(self, a: Self::I, b: Self::I) -> Self::I;
    /// Byte `which & 15` of the same quarter of `table`; 0 where the top bit of `which` is set.
    fn shuffle_epi8(self, table: Self::I, which: Self::I) -> Self::I;
    /// In every quarter, word i is word `WHICH >> 2i & 3` of it.
    fn shuffle_epi32<const WHICH: i32>(self, v: Self::I) -> Self::I;
    /// Two quarters of a, then two of b: quarter i is quarter `WHICH >> 2i & 3`.
    fn shuffle_i32x4<const WHICH: i32>(self, a: Self::I, b: Self::I) -> Self::I;
    /// Lane `which & 31` of a and b one behind the other.
    fn permutex2var_ps(self, a: Self::F, which: Self::I, b: Self::F) -> Self::F;
    /// `insertf32x8::<1>`: the low half of a, then that of b.
    fn insertf32x8_high(self, a: Self::F, b: Self::F) -> Self::F;
    /// b where the bit of `mask` is set, else a, by halves of words.
    fn mask_blend_epi16(self, mask: u32, a: Self::I, b: Self::I) -> Self::I;
    /// b where the bit of `mask` is set, else a.
    fn mask_blend_ps(self, mask: u16, a: Self::F, b: Self::F) -> Self::F;
    /// A bit for each half of a word that is smaller in a, unsigned.
    fn cmplt_epu16_mask(self, a: Self::I, b: Self::I) -> u32;
    /// A bit for each lane where a or b is NaN.
    fn cmpunord_ps_mask(self, a: Self::F, b: Self::F) -> u16;

    /// Loads 16 words, aligned or not, as the other loads.
    /// # Safety
    /// `p` is valid for reading them.
    unsafe fn loadu_si512(self, p: *const u32) -> Self::I;
    /// Loads 8 words into the low half and 8 into the high one.
    /// # Safety
    /// Both are valid for reading them.
    unsafe fn loadu_halves(self, low: *const u32, high: *const u32) -> Self::I;
    /// Loads 4 words into every quarter.
    /// # Safety
    /// `p` is valid for reading them.
    unsafe fn broadcast_i32x4(self, p: *const u32) -> Self::I;
    /// Stores 16 words, aligned or not, as the other stores.
    /// # Safety
    /// `p` is valid for writing them.
    unsafe fn storeu_si512(self, p: *mut u32, v: Self::I);
    /// Stores the words whose bit of `mask` is set.
    /// # Safety
    /// `p` is valid for writing those.
    unsafe fn mask_storeu_epi32(self, p: *mut u32, mask: u16, v: Self::I);
    /// Stores the low half of every word.
    /// # Safety
    /// `p` is valid for writing 16 of them.
    unsafe fn cvtepi32_storeu_epi16(self, p: *mut u16, v: Self::I);

    /// `VDPBF16PS`: to every sum the product of the high halves of its words in a and b, then that of the low ones, by two
    /// fused multiply-adds that round to nearest even and read and give subnormals as zero.
    /// # Safety
    /// The machine has the instruction.
    unsafe fn dpbf16_ps(self, sums: Self::F, a: Self::I, b: Self::I) -> Self::F;
    /// Pairs of two vectors rounded to bf16, `high` in the high halves, by `VCVTNE2PS2BF16`: subnormals are read and given as zero.
    /// # Safety
    /// The machine has the instruction.
    unsafe fn pairs_of_normals(self, high: Self::F, low: Self::F) -> Self::I;
    /// Runs another kernel with the same instructions, as a function of its own.
    /// # Safety
    /// That of [`Kernel512::run`].
    unsafe fn call<K: Kernel512>(self, kernel: K) -> K::Output;
    /// Keeps the compiler from moving anything past it, with `v` in a register.
    fn pin(self, v: &mut Self::F);
    /// [`Simd512::pin`] of three.
    fn pin_words(self, a: &mut Self::I, b: &mut Self::I, c: &mut Self::I);
}

/// An algorithm over [`Simd512`] with `VDPBF16PS`, run by `Cpu::dispatch_dot` or [`Simd512::call`]. Implementations of `run`
/// are `#[inline(always)]`.
pub trait Kernel512 {
    /// What it returns.
    type Output;
    /// Runs it with the instructions of `s`.
    /// # Safety
    /// The machine has `VDPBF16PS`, and what the kernel says of its fields holds.
    unsafe fn run<S: Simd512>(self, s: S) -> Self::Output;
}

/// [`Simd::transpose`].
///
/// # Safety
/// As there.
#[inline(always)]
pub unsafe fn transpose<S: Simd512, const SWAP: bool>(
    s: S,
    rows: &[*const u32; MAX_LANES],
    at: usize,
    count: usize,
    to: *mut u32,
    stride: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut row = [s.set1_epi32(0); 16];
        for (row, from) in row.iter_mut().zip(rows) {
            *row = s.loadu_si512(from.add(at));
            if SWAP {
                *row = s.rol_epi32::<16>(*row);
            }
        }
        // Words, then pairs of words, of neighbouring rows alternate; then quarters of vectors change places.
        let mut two = [s.set1_epi32(0); 16];
        for i in 0..8 {
            two[2 * i] = s.unpacklo_epi32(row[2 * i], row[2 * i + 1]);
            two[2 * i + 1] = s.unpackhi_epi32(row[2 * i], row[2 * i + 1]);
        }
        let mut four = [s.set1_epi32(0); 16];
        for i in 0..4 {
            four[4 * i] = s.unpacklo_epi64(two[4 * i], two[4 * i + 2]);
            four[4 * i + 1] = s.unpackhi_epi64(two[4 * i], two[4 * i + 2]);
            four[4 * i + 2] = s.unpacklo_epi64(two[4 * i + 1], two[4 * i + 3]);
            four[4 * i + 3] = s.unpackhi_epi64(two[4 * i + 1], two[4 * i + 3]);
        }
        // four[4 * i + j]: words j, j + 4, j + 8, j + 12 of rows 4i to 4i + 3, one word to a quarter.
        let mask = (1u32 << count).wrapping_sub(1) as u16;
        for j in 0..4 {
            let even = s.shuffle_i32x4::<0x88>(four[j], four[4 + j]);
            let odd = s.shuffle_i32x4::<0xDD>(four[j], four[4 + j]);
            let even_high = s.shuffle_i32x4::<0x88>(four[8 + j], four[12 + j]);
            let odd_high = s.shuffle_i32x4::<0xDD>(four[8 + j], four[12 + j]);
            let column = [
                s.shuffle_i32x4::<0x88>(even, even_high),
                s.shuffle_i32x4::<0x88>(odd, odd_high),
                s.shuffle_i32x4::<0xDD>(even, even_high),
                s.shuffle_i32x4::<0xDD>(odd, odd_high),
            ];
            for (i, column) in column.into_iter().enumerate() {
                let to = to.add((j + 4 * i) * stride);
                if count == 16 {
                    s.storeu_si512(to, column);
                } else {
                    s.mask_storeu_epi32(to, mask, column);
                }
            }
        }
    }
}

/// [`Simd::least_bf16`].
///
/// # Safety
/// As there.
#[inline(always)]
pub unsafe fn least_bf16<S: Simd512>(s: S, p: *const bf16, count: usize) -> u16 {
    let (magnitude, one) = (s.set1_epi16(0x7FFF), s.set1_epi16(1));
    let mut least = s.set1_epi16(-1);
    for i in (0..count).step_by(32) {
        // SAFETY: the caller's promise.
        let bits = s.and_si512(unsafe { s.loadu_si512(p.add(i).cast()) }, magnitude);
        least = s.min_epu16(least, s.sub_epi16(bits, one));
    }
    s.reduce_min_epu16(least)
}

/// [`Simd::swap_pairs`].
///
/// # Safety
/// As there.
#[inline(always)]
pub unsafe fn swap_pairs<S: Simd512>(s: S, from: *const u32, to: *mut u32) {
    // SAFETY: the caller's promise.
    unsafe { s.storeu_si512(to, s.rol_epi32::<16>(s.loadu_si512(from))) }
}

/// [`Simd::load_pairs`].
///
/// # Safety
/// As there.
#[inline(always)]
pub unsafe fn load_pairs<S: Simd512>(s: S, p: *const u32) -> (S::F, S::F) {
    // SAFETY: the caller's promise.
    let pairs = unsafe { s.loadu_si512(p) };
    (s.cast_ps(s.and_si512(pairs, s.set1_epi32(0xFFFF_0000_u32 as i32))), s.cast_ps(s.slli_epi32::<16>(pairs)))
}

/// [`Simd::narrow_pairs`].
///
/// # Safety
/// As there.
#[inline(always)]
pub unsafe fn narrow_pairs<S: Simd512>(s: S, high: S::F, low: S::F, p: *mut u32) {
    let (mut high, mut low) = (high, low);
    // One look at both for what is rare.
    if s.cmpunord_ps_mask(high, low) != 0 {
        (high, low) = (canonical(s, high), canonical(s, low));
    }
    // SAFETY: the caller's promise.
    unsafe { narrow_pairs_of_numbers(s, high, low, p) }
}

/// [`Simd::narrow_pairs_of_numbers`].
///
/// # Safety
/// As there.
#[inline(always)]
pub unsafe fn narrow_pairs_of_numbers<S: Simd512>(s: S, high: S::F, low: S::F, p: *mut u32) {
    let low = s.srli_epi32::<16>(rounded(s, low));
    // SAFETY: the caller's promise.
    unsafe { s.storeu_si512(p, s.mask_blend_epi16(0xAAAA_AAAA, low, rounded(s, high))) }
}

/// [`Simd::narrow_pairs_about`], by the steps of AVX2.
///
/// # Safety
/// As there.
#[inline(always)]
pub unsafe fn narrow_pairs_about<S: Simd512, const N: usize>(s: S, v: &[(S::F, S::F); N], p: *mut u32) -> bool {
    let (half, mut least) = (s.set1_epi32(HALF_AND_FOUR), s.set1_epi32(-1));
    for (i, (high, low)) in v.iter().enumerate() {
        let (high, low) = (s.add_epi32(s.cast_si512(*high), half), s.add_epi32(s.cast_si512(*low), half));
        // SAFETY: the caller's promise.
        unsafe { s.storeu_si512(p.add(16 * i), s.mask_blend_epi16(0xAAAA_AAAA, s.srli_epi32::<16>(low), high)) };
        least = s.min_epu16(least, s.min_epu16(high, low));
    }
    s.cmplt_epu16_mask(least, s.set1_epi32(TIES)) == 0
}

/// [`Simd::narrow_bf16`].
///
/// # Safety
/// As there.
#[inline(always)]
pub unsafe fn narrow_bf16<S: Simd512>(s: S, v: S::F, p: *mut bf16) {
    // SAFETY: the caller's promise.
    unsafe { s.cvtepi32_storeu_epi16(p.cast(), s.srli_epi32::<16>(rounded(s, canonical(s, v)))) }
}

/// [`Simd::interleave`].
#[inline(always)]
pub fn interleave<S: Simd512>(s: S, high: S::F, low: S::F) -> (S::F, S::F) {
    let first = s.setr_epi32([0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23]);
    let second = s.add_epi32(first, s.set1_epi32(8));
    (s.permutex2var_ps(low, first, high), s.permutex2var_ps(low, second, high))
}

/// NaN lanes become the canonical quiet NaN.
#[inline(always)]
pub fn canonical<S: Simd512>(s: S, v: S::F) -> S::F {
    let nan = s.cast_ps(s.set1_epi32(0x7FC0_0000));
    s.mask_blend_ps(s.cmpunord_ps_mask(v, v), v, nan)
}

/// What is no NaN to bf16 in the high half, to nearest even: add half an ulp less one plus the lowest kept bit; the low half
/// is left.
/// (`VCVTNEPS2BF16` flushes subnormals.)
#[inline(always)]
fn rounded<S: Simd512>(s: S, v: S::F) -> S::I {
    let bits = s.cast_si512(v);
    let lowest = s.and_si512(s.srli_epi32::<16>(bits), s.set1_epi32(1));
    s.add_epi32(bits, s.add_epi32(lowest, s.set1_epi32(0x7FFF)))
}
