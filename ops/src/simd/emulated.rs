//! The 16 lanes of AVX-512 and `VDPBF16PS` by their definitions, for tests on machines without them.
//!
//! Lanes are those of an instruction set that every such machine has, side by side; words stand in memory. What moves words
//! about is the source that AVX-512 runs too (`words.rs`), compiled once and called.

use super::unroll::Unrolled;
use super::words::{self, Kernel512, Simd512};
use super::{Kernel, MAX_LANES, Simd};
use crate::backend::cpu::Cpu;
use half::{bf16, f16};

#[cfg(feature = "unit-tests")]
pub(crate) mod definition;
mod results;

pub use results::emulation_differs;

#[cfg(target_arch = "x86_64")]
type Base = Unrolled<super::avx2::Avx2>;
#[cfg(not(target_arch = "x86_64"))]
type Base = Unrolled<Unrolled<Unrolled<Unrolled<super::scalar::Scalar>>>>;
type Floats = <Base as Simd>::F;

/// Proof that the machine has the instructions of `Base`; made only by [`enter`] and [`enter_dot`].
#[derive(Clone, Copy)]
pub struct Emulated(Base);

/// 16 words.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct Words([u32; 16]);

/// # Safety
/// The machine has what [`crate::Isa::Avx2`] needs, if it is an x86.
#[inline(always)]
unsafe fn token() -> Emulated {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the caller's promise.
    return Emulated(Unrolled(unsafe { super::avx2::Avx2::new() }));
    #[cfg(not(target_arch = "x86_64"))]
    Emulated(Unrolled(Unrolled(Unrolled(Unrolled(super::scalar::Scalar)))))
}

/// Runs `kernel` with 16 lanes.
///
/// # Safety
/// The machine has what [`crate::Isa::Avx2`] needs, if it is an x86.
#[inline(always)]
pub unsafe fn enter<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: the caller's promise.
    unsafe { kernel.entered() }
}

/// Runs `kernel` as `Cpu::dispatch`, on an emulated set whatever the machine has.
fn dispatch<K: Kernel>(cpu: &Cpu, kernel: K) -> K::Output {
    match cpu.isa().emulates() {
        // SAFETY: `Cpu::new` refuses an isa that `Isa::available` does not find on this machine.
        Some(_) => unsafe { enter(kernel) },
        None => cpu.dispatch(kernel),
    }
}

/// What [`enter`] calls: a method, so that the code of a kernel is compiled beside it, and not that of all kernels as one unit.
trait Entered: Kernel + Sized {
    /// # Safety
    /// As [`enter`].
    #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
    unsafe fn entered(self) -> Self::Output {
        // SAFETY: the caller's promise.
        self.run(unsafe { token() })
    }
}

impl<K: Kernel> Entered for K {}

/// Runs `kernel` with 16 lanes and `VDPBF16PS`.
///
/// # Safety
/// As [`enter`]; the rest is the kernel's own.
#[inline(always)]
pub unsafe fn enter_dot<K: Kernel512>(kernel: K) -> K::Output {
    // SAFETY: the caller's promise.
    unsafe { kernel.entered_dot() }
}

/// What [`enter_dot`] calls: a method, as that of [`enter`].
trait EnteredDot: Kernel512 + Sized {
    /// # Safety
    /// As [`enter_dot`].
    #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
    unsafe fn entered_dot(self) -> Self::Output {
        // SAFETY: the caller's promise.
        unsafe { self.run(token()) }
    }
}

impl<K: Kernel512> EnteredDot for K {}

/// `VDPBF16PS` on every lane.
///
/// # Safety
/// The machine has the instructions of `Base`.
#[inline(never)]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
fn dpbf16(s: Emulated, sums: &mut Floats, a: &Words, b: &Words) {
    *sums = flushing_fma(s, s.cast_ps(a.map(|a| a & 0xFFFF_0000)), s.cast_ps(b.map(|b| b & 0xFFFF_0000)), *sums);
    *sums = flushing_fma(s, s.cast_ps(a.map(|a| a << 16)), s.cast_ps(b.map(|b| b << 16)), *sums);
}

/// `a * b + sum` of two bf16 in each lane, subnormals read and returned as zeros. A result is one if it is below the smallest
/// normal number when rounded to 24 bits, not to those that a subnormal has.
#[inline(always)]
fn flushing_fma(s: Emulated, a: Floats, b: Floats, sum: Floats) -> Floats {
    let [a, b, sum] = [flushed(s, a), flushed(s, b), flushed(s, sum)];
    let result = s.fma(a, b, sum);
    let (zero, least) = (s.splat(0.0), s.splat(f32::MIN_POSITIVE));
    // What was rounded to that number may have been below it: a result 2^64 times as large tells. Where a factor is zero the
    // other one may be of any size, so both count as zeros. Else the product is below 2^-100, since larger ones and sums
    // are multiples of 2^-123, and each factor is below 2^26: nothing overflows.
    let [a, b] = [s.select_ge(s.abs(b), least, a, zero), s.select_ge(s.abs(a), least, b, zero)];
    let scale = s.splat(f32::exp2(32.0));
    let scaled = s.fma(s.mul(a, scale), s.mul(b, scale), s.mul(s.mul(sum, scale), scale));
    let large = s.select_ge(s.abs(scaled), s.mul(s.mul(least, scale), scale), result, s.copysign(s.splat(0.0), result));
    flushed(s, s.select_ge(least, s.abs(result), large, result))
}

/// Zeros of the same sign for subnormals.
#[inline(always)]
fn flushed(s: Emulated, x: Floats) -> Floats {
    let greatest = s.splat(f32::from_bits(f32::MIN_POSITIVE.to_bits() - 1));
    s.select_ge(greatest, s.abs(x), s.copysign(s.splat(0.0), x), x)
}

/// # Safety
/// That of [`Simd::transpose`].
#[inline(never)]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
unsafe fn transpose<const SWAP: bool>(
    s: Emulated,
    rows: &[*const u32; MAX_LANES],
    at: usize,
    count: usize,
    to: *mut u32,
    stride: usize,
) {
    // SAFETY: the caller's promise.
    unsafe { words::transpose::<Emulated, SWAP>(s, rows, at, count, to, stride) }
}

/// # Safety
/// That of [`Simd::least_bf16`].
#[inline(never)]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
unsafe fn least_bf16(s: Emulated, p: *const bf16, count: usize) -> u16 {
    // SAFETY: the caller's promise.
    unsafe { words::least_bf16(s, p, count) }
}

/// # Safety
/// That of [`Simd::narrow_bf16`].
#[inline(never)]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
unsafe fn narrow_bf16(s: Emulated, v: &Floats, p: *mut bf16) {
    // SAFETY: the caller's promise.
    unsafe { words::narrow_bf16(s, *v, p) }
}

/// # Safety
/// That of [`Simd::narrow_pairs`].
#[inline(never)]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
unsafe fn narrow_pairs(s: Emulated, high: &Floats, low: &Floats, p: *mut u32) {
    // SAFETY: the caller's promise.
    unsafe { words::narrow_pairs(s, *high, *low, p) }
}

/// # Safety
/// That of [`Simd::narrow_pairs_about`].
#[inline(never)]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
unsafe fn narrow_pairs_about<const N: usize>(s: Emulated, v: &[(Floats, Floats); N], p: *mut u32) -> bool {
    // SAFETY: the caller's promise.
    unsafe { words::narrow_pairs_about(s, v, p) }
}

/// # Safety
/// The machine has the instructions of `Base`.
#[inline(never)]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
unsafe fn interleave(s: Emulated, high: &Floats, low: &Floats) -> (Floats, Floats) {
    words::interleave(s, *high, *low)
}

/// Methods of the base, by name.
macro_rules! of_base {
    ($($name:ident($($arg:ident: $type:ty),*) -> $result:ty)*) => {$(
        #[inline(always)]
        fn $name(self, $($arg: $type),*) -> $result {
            self.0.$name($($arg),*)
        }
    )*};
    ($(unsafe $name:ident($($arg:ident: $type:ty),*) -> $result:ty)*) => {$(
        #[inline(always)]
        unsafe fn $name(self, $($arg: $type),*) -> $result {
            // SAFETY: the caller's promise.
            unsafe { self.0.$name($($arg),*) }
        }
    )*};
}

impl Simd for Emulated {
    type F = Floats;
    const LANES: usize = 16;

    #[inline(always)]
    fn enter<K: Kernel>(self, kernel: K) -> K::Output {
        // SAFETY: an `Emulated` exists only where the machine has the instructions.
        unsafe { enter(kernel) }
    }
    of_base! {
        splat(x: f32) -> Floats
        add(a: Floats, b: Floats) -> Floats
        sub(a: Floats, b: Floats) -> Floats
        mul(a: Floats, b: Floats) -> Floats
        div(a: Floats, b: Floats) -> Floats
        sqrt(a: Floats) -> Floats
        fma(a: Floats, b: Floats, c: Floats) -> Floats
        abs(a: Floats) -> Floats
        neg(a: Floats) -> Floats
        copysign(a: Floats, sign: Floats) -> Floats
        round(a: Floats) -> Floats
        floor(a: Floats) -> Floats
        max(a: Floats, b: Floats) -> Floats
        min(a: Floats, b: Floats) -> Floats
        select_ge(a: Floats, b: Floats, yes: Floats, no: Floats) -> Floats
        all_within(low: Floats, x: Floats, high: Floats) -> bool
        any_nan_or_inf(a: Floats) -> bool
        pow2(i: Floats) -> Floats
        mul_pow2(m: Floats, i: Floats) -> Floats
        scale(m: Floats, i: Floats) -> Floats
        fence() -> ()
    }
    of_base! {
        unsafe load(p: *const f32) -> Floats
        unsafe store(v: Floats, p: *mut f32) -> ()
        unsafe load_bf16(p: *const bf16) -> Floats
        unsafe load_f16(p: *const f16) -> Floats
        unsafe narrow_f32(v: Floats, p: *mut f32) -> ()
        unsafe narrow_f16(v: Floats, p: *mut f16) -> ()
        unsafe stream_line(from: *const u8, to: *mut u8) -> ()
    }

    #[inline(always)]
    unsafe fn narrow_bf16(self, v: Floats, p: *mut bf16) {
        // SAFETY: the caller's promise; an `Emulated` exists only where the machine has the instructions.
        unsafe { narrow_bf16(self, &v, p) }
    }

    #[inline(always)]
    unsafe fn load_pairs(self, p: *const u32) -> (Floats, Floats) {
        // SAFETY: the caller's promise.
        unsafe { words::load_pairs(self, p) }
    }

    #[inline(always)]
    unsafe fn narrow_pairs(self, high: Floats, low: Floats, p: *mut u32) {
        // SAFETY: as for `narrow_bf16`.
        unsafe { narrow_pairs(self, &high, &low, p) }
    }

    #[inline(always)]
    unsafe fn narrow_pairs_about<const N: usize>(self, v: &[(Floats, Floats); N], p: *mut u32) -> bool {
        // SAFETY: as for `narrow_bf16`.
        unsafe { narrow_pairs_about(self, v, p) }
    }

    #[inline(always)]
    fn interleave(self, high: Floats, low: Floats) -> (Floats, Floats) {
        // SAFETY: an `Emulated` exists only where the machine has the instructions.
        unsafe { interleave(self, &high, &low) }
    }

    #[inline(always)]
    unsafe fn swap_pairs(self, from: *const u32, to: *mut u32) {
        // SAFETY: the caller's promise.
        unsafe { words::swap_pairs(self, from, to) }
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
        // SAFETY: as for `narrow_bf16`.
        unsafe { transpose::<SWAP>(self, rows, at, count, to, stride) }
    }

    #[inline(always)]
    unsafe fn least_bf16(self, p: *const bf16, count: usize) -> u16 {
        // SAFETY: as for `narrow_bf16`.
        unsafe { least_bf16(self, p, count) }
    }
}

impl Words {
    /// Word i is `word(i)`. A plain loop, here and below, is done on vectors; what methods of arrays are given is called for each word.
    #[inline(always)]
    fn of(word: impl Fn(usize) -> u32) -> Words {
        let mut words = [0; 16];
        for (i, at) in words.iter_mut().enumerate() {
            *at = word(i);
        }
        Words(words)
    }

    /// Each word alone.
    #[inline(always)]
    fn map(self, word: impl Fn(u32) -> u32) -> Words {
        Words::of(|i| word(self.0[i]))
    }

    /// Halves of words with those of `other`, the low one first.
    #[inline(always)]
    fn halves(self, other: Words, half: impl Fn(u16, u16) -> u16) -> Words {
        Words::of(|i| {
            let (a, b) = (self.0[i], other.0[i]);
            u32::from(half((a >> 16) as u16, (b >> 16) as u16)) << 16 | u32::from(half(a as u16, b as u16))
        })
    }

    /// Bytes ascending, the lowest of a word first.
    #[inline(always)]
    fn bytes(self) -> [u8; 64] {
        let mut bytes = [0; 64];
        for (at, word) in bytes.as_chunks_mut().0.iter_mut().zip(self.0) {
            *at = word.to_le_bytes();
        }
        bytes
    }

    #[inline(always)]
    fn of_bytes(byte: impl Fn(usize) -> u8) -> Words {
        Words::of(|i| u32::from_le_bytes([byte(4 * i), byte(4 * i + 1), byte(4 * i + 2), byte(4 * i + 3)]))
    }

    /// Words `from` and `from + 1` of every quarter, those of a and of b in turn.
    #[inline(always)]
    fn unpack_words(a: Words, b: Words, from: usize) -> Words {
        Words::of(|i| if i % 2 == 0 { &a } else { &b }.0[i / 4 * 4 + from + i % 4 / 2])
    }

    /// Words `from` and `from + 1` of every quarter of a, then those of b.
    #[inline(always)]
    fn unpack_halves(a: Words, b: Words, from: usize) -> Words {
        Words::of(|i| if i % 4 < 2 { &a } else { &b }.0[i / 4 * 4 + from + i % 2])
    }

    /// Eight bytes of every quarter from `from` on, those of a and of b in turn.
    #[inline(always)]
    fn unpack_bytes(a: Words, b: Words, from: usize) -> Words {
        let (a, b) = (a.bytes(), b.bytes());
        Words::of_bytes(|i| if i % 2 == 0 { &a } else { &b }[i / 16 * 16 + from + i % 16 / 2])
    }
}

impl Emulated {
    /// The lanes.
    #[inline(always)]
    fn lanes(self, v: Floats) -> [f32; 16] {
        let mut lanes = [0.0; 16];
        // SAFETY: 16 lanes.
        unsafe { self.store(v, lanes.as_mut_ptr()) };
        lanes
    }

    /// Lane i is `lane(i)`.
    #[inline(always)]
    fn vector(self, lane: impl Fn(usize) -> f32) -> Floats {
        self.cast_ps(Words::of(|i| lane(i).to_bits()))
    }
}

impl Simd512 for Emulated {
    type I = Words;

    #[inline(always)]
    fn cast_ps(self, v: Words) -> Floats {
        // SAFETY: 16 words, of which every bit pattern is an f32.
        unsafe { self.load(v.0.as_ptr().cast()) }
    }
    #[inline(always)]
    fn cast_si512(self, v: Floats) -> Words {
        let lanes = self.lanes(v);
        Words::of(|i| lanes[i].to_bits())
    }
    #[inline(always)]
    fn set1_epi8(self, x: i8) -> Words {
        Words([u32::from_ne_bytes([x as u8; 4]); 16])
    }
    #[inline(always)]
    fn set1_epi16(self, x: i16) -> Words {
        Words([u32::from(x as u16) * 0x1_0001; 16])
    }
    #[inline(always)]
    fn set1_epi32(self, x: i32) -> Words {
        Words([x as u32; 16])
    }
    #[inline(always)]
    fn setr_epi32(self, words: [i32; 16]) -> Words {
        Words::of(|i| words[i] as u32)
    }
    #[inline(never)]
    fn and_si512(self, a: Words, b: Words) -> Words {
        Words::of(|i| a.0[i] & b.0[i])
    }
    #[inline(never)]
    fn add_epi32(self, a: Words, b: Words) -> Words {
        Words::of(|i| a.0[i].wrapping_add(b.0[i]))
    }
    #[inline(never)]
    fn sub_epi16(self, a: Words, b: Words) -> Words {
        a.halves(b, u16::wrapping_sub)
    }
    #[inline(never)]
    fn min_epu16(self, a: Words, b: Words) -> Words {
        a.halves(b, u16::min)
    }
    #[inline(never)]
    fn reduce_min_epu16(self, v: Words) -> u16 {
        v.0.into_iter().fold(u16::MAX, |least, word| least.min(word as u16).min((word >> 16) as u16))
    }
    #[inline(never)]
    fn slli_epi32<const N: u32>(self, v: Words) -> Words {
        v.map(|word| word << N)
    }
    #[inline(never)]
    fn srli_epi32<const N: u32>(self, v: Words) -> Words {
        v.map(|word| word >> N)
    }
    #[inline(never)]
    fn srli_epi16<const N: u32>(self, v: Words) -> Words {
        v.halves(v, |half, _| half >> N)
    }
    #[inline(never)]
    fn rol_epi32<const N: i32>(self, v: Words) -> Words {
        v.map(|word| word.rotate_left(N as u32))
    }
    #[inline(never)]
    fn unpacklo_epi8(self, a: Words, b: Words) -> Words {
        Words::unpack_bytes(a, b, 0)
    }
    #[inline(never)]
    fn unpackhi_epi8(self, a: Words, b: Words) -> Words {
        Words::unpack_bytes(a, b, 8)
    }
    #[inline(never)]
    fn unpacklo_epi32(self, a: Words, b: Words) -> Words {
        Words::unpack_words(a, b, 0)
    }
    #[inline(never)]
    fn unpackhi_epi32(self, a: Words, b: Words) -> Words {
        Words::unpack_words(a, b, 2)
    }
    #[inline(never)]
    fn unpacklo_epi64(self, a: Words, b: Words) -> Words {
        Words::unpack_halves(a, b, 0)
    }
    #[inline(never)]
    fn unpackhi_epi64(self, a: Words, b: Words) -> Words {
        Words::unpack_halves(a, b, 2)
    }
    #[inline(never)]
    fn shuffle_epi8(self, table: Words, which: Words) -> Words {
        let (table, which) = (table.bytes(), which.bytes());
        Words::of_bytes(|i| if which[i] < 0x80 { table[i / 16 * 16 + usize::from(which[i] & 15)] } else { 0 })
    }
    #[inline(never)]
    fn shuffle_epi32<const WHICH: i32>(self, v: Words) -> Words {
        Words::of(|i| v.0[i / 4 * 4 + (WHICH >> (2 * (i % 4)) & 3) as usize])
    }
    #[inline(never)]
    fn shuffle_i32x4<const WHICH: i32>(self, a: Words, b: Words) -> Words {
        Words::of(|i| if i < 8 { &a } else { &b }.0[4 * (WHICH >> (2 * (i / 4)) & 3) as usize + i % 4])
    }
    #[inline(always)]
    fn permutex2var_ps(self, a: Floats, which: Words, b: Floats) -> Floats {
        let (a, b) = (self.lanes(a), self.lanes(b));
        self.vector(|i| if which.0[i] & 16 == 0 { &a } else { &b }[(which.0[i] & 15) as usize])
    }
    #[inline(always)]
    fn insertf32x8_high(self, a: Floats, b: Floats) -> Floats {
        let (a, b) = (self.lanes(a), self.lanes(b));
        self.vector(|i| if i < 8 { a[i] } else { b[i - 8] })
    }
    #[inline(never)]
    fn mask_blend_epi16(self, mask: u32, a: Words, b: Words) -> Words {
        let half = |set: u32| if set & 1 == 0 { 0 } else { 0xFFFF };
        Words::of(|i| {
            let b_bits = half(mask >> (2 * i)) | half(mask >> (2 * i + 1)) << 16;
            a.0[i] & !b_bits | b.0[i] & b_bits
        })
    }
    #[inline(always)]
    fn mask_blend_ps(self, mask: u16, a: Floats, b: Floats) -> Floats {
        let (a, b) = (self.lanes(a), self.lanes(b));
        self.vector(|i| if mask >> i & 1 == 0 { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn cmplt_epu16_mask(self, a: Words, b: Words) -> u32 {
        let less = |i: usize, shift: u32| u32::from(((a.0[i] >> shift) as u16) < (b.0[i] >> shift) as u16);
        (0..16).fold(0, |mask, i| mask | less(i, 0) << (2 * i) | less(i, 16) << (2 * i + 1))
    }
    #[inline(always)]
    fn cmpunord_ps_mask(self, a: Floats, b: Floats) -> u16 {
        let (a, b) = (self.lanes(a), self.lanes(b));
        (0..16).fold(0, |mask, i| mask | u16::from(a[i].is_nan() || b[i].is_nan()) << i)
    }

    #[inline(always)]
    unsafe fn loadu_si512(self, p: *const u32) -> Words {
        // SAFETY: the caller's promise.
        Words(unsafe { p.cast::<[u32; 16]>().read_unaligned() })
    }
    #[inline(never)]
    unsafe fn loadu_halves(self, low: *const u32, high: *const u32) -> Words {
        // SAFETY: the caller's promise.
        let (low, high) =
            unsafe { (low.cast::<[u32; 8]>().read_unaligned(), high.cast::<[u32; 8]>().read_unaligned()) };
        Words::of(|i| if i < 8 { low[i] } else { high[i - 8] })
    }
    #[inline(never)]
    unsafe fn broadcast_i32x4(self, p: *const u32) -> Words {
        // SAFETY: the caller's promise.
        let quarter = unsafe { p.cast::<[u32; 4]>().read_unaligned() };
        Words::of(|i| quarter[i % 4])
    }
    #[inline(always)]
    unsafe fn storeu_si512(self, p: *mut u32, v: Words) {
        // SAFETY: the caller's promise.
        unsafe { p.cast::<[u32; 16]>().write_unaligned(v.0) }
    }
    #[inline(never)]
    unsafe fn mask_storeu_epi32(self, p: *mut u32, mask: u16, v: Words) {
        for (i, word) in v.0.into_iter().enumerate().filter(|(i, _)| mask >> i & 1 == 1) {
            // SAFETY: the caller's promise.
            unsafe { p.add(i).write_unaligned(word) };
        }
    }
    #[inline(never)]
    unsafe fn cvtepi32_storeu_epi16(self, p: *mut u16, v: Words) {
        let mut halves = [0; 16];
        for (half, word) in halves.iter_mut().zip(v.0) {
            *half = word as u16;
        }
        // SAFETY: the caller's promise.
        unsafe { p.cast::<[u16; 16]>().write_unaligned(halves) }
    }

    #[inline(always)]
    unsafe fn dpbf16_ps(self, mut sums: Floats, a: Words, b: Words) -> Floats {
        // SAFETY: an `Emulated` exists only where the machine has the instructions.
        #[allow(unused_unsafe)]
        unsafe {
            dpbf16(self, &mut sums, &a, &b)
        };
        sums
    }
    #[inline(always)]
    unsafe fn pairs_of_normals(self, high: Floats, low: Floats) -> Words {
        let mut pairs = Words([0; 16]);
        // SAFETY: it has room for all.
        unsafe { self.narrow_pairs(flushed(self, high), flushed(self, low), pairs.0.as_mut_ptr()) };
        // What a subnormal would have been rounded up to was read as zero, and others give none.
        pairs
    }
    #[inline(always)]
    unsafe fn call<K: Kernel512>(self, kernel: K) -> K::Output {
        // SAFETY: the caller's promise.
        unsafe { enter_dot(kernel) }
    }
    #[inline(always)]
    fn pin(self, _v: &mut Floats) {}
    #[inline(always)]
    fn pin_words(self, _a: &mut Words, _b: &mut Words, _c: &mut Words) {}
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;
    use crate::{Cpu, Isa};

    /// `VDPBF16PS` of one pair.
    fn dot(sum: f32, a: [f32; 2], b: [f32; 2]) -> f32 {
        let pair = |[high, low]: [f32; 2]| high.to_bits() & 0xFFFF_0000 | low.to_bits() >> 16;
        // SAFETY: the machine has the instructions, or there would be no `Cpu`.
        #[allow(unused_unsafe)]
        let sums = unsafe {
            let s = token();
            let mut sums = s.splat(sum);
            dpbf16(s, &mut sums, &Words([pair(a); 16]), &Words([pair(b); 16]));
            s.lanes(sums)
        };
        assert!(sums.iter().all(|lane| lane.to_bits() == sums[0].to_bits()));
        sums[0]
    }

    /// By the definition of the instruction, worked out by hand.
    pub(crate) fn a_dot_product_takes_the_high_half_first_and_flushes() {
        Cpu::new(Isa::EmulatedAvx512Bf16, 1, 0).unwrap();
        let big = f32::exp2(24.0);
        // 1 + 2^24 is 2^24, a tie to even; the other way round the 1 would be left.
        assert_eq!(dot(1.0, [big, -big], [1.0, 1.0]), 0.0);
        assert_eq!(dot(1.0, [1.0, 3.0], [2.0, 0.5]), 4.5);
        // Subnormals are zero: the operands, the sum before, the one between, the one after; the sign stays.
        let tiny = f32::MIN_POSITIVE / 2.0;
        assert_eq!(dot(0.0, [tiny, 0.0], [f32::exp2(100.0), 0.0]).to_bits(), 0);
        assert_eq!(dot(-tiny, [-0.0, -0.0], [0.0, 0.0]).to_bits(), 0x8000_0000);
        assert_eq!(dot(-f32::MIN_POSITIVE, [f32::MIN_POSITIVE, 1.0], [0.75, f32::MIN_POSITIVE]), f32::MIN_POSITIVE);
        assert_eq!(dot(0.0, [-0.5, -0.0], [f32::MIN_POSITIVE, 0.0]).to_bits(), 0x8000_0000);
        assert!(dot(f32::INFINITY, [f32::INFINITY, 0.0], [-1.0, 0.0]).is_nan());
        // Half of the last place below the smallest normal number, at 24 bits, is a tie to even; above that it is flushed,
        // although a subnormal, which has fewer bits, would be rounded up.
        let [half, more] =
            [1.0, 1.5].map(|by| dot(f32::MIN_POSITIVE, [f32::exp2(-75.0), 0.0], [-by * f32::exp2(-76.0), 0.0]));
        assert_eq!([half, more], [f32::MIN_POSITIVE, 0.0]);
    }
}
