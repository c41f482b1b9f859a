//! The 16 lanes of AVX-512 and `VDPBF16PS` by their definitions, for tests on machines without them.
//!
//! Lanes are those of an instruction set that every such machine has, side by side; words stand in memory. What moves words
//! about is the source that AVX-512 runs too (`words.rs`), compiled once and called.

use super::unroll::Unrolled;
use super::words::{self, Kernel512, Simd512};
use super::{Kernel, MAX_LANES, Simd};
use crate::{Cpu, Isa};
use half::{bf16, f16};

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
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
pub unsafe fn enter<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: the caller's promise.
    kernel.run(unsafe { token() })
}

/// Runs `kernel` with 16 lanes and `VDPBF16PS`.
///
/// # Safety
/// As [`enter`]; the rest is the kernel's own.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
pub unsafe fn enter_dot<K: Kernel512>(kernel: K) -> K::Output {
    // SAFETY: the caller's promise.
    unsafe { kernel.run(token()) }
}

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
    let least = s.splat(f32::MIN_POSITIVE);
    // What was rounded to that number may have been below it. Of such a lane no operand is so large that these overflow, and of
    // smaller results, which are flushed either way, they decide nothing.
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
    unsafe fn call<K: Kernel512>(self, kernel: K) -> K::Output {
        // SAFETY: the caller's promise.
        unsafe { enter_dot(kernel) }
    }
    #[inline(always)]
    fn pin(self, _v: &mut Floats) {}
    #[inline(always)]
    fn pin_words(self, _a: &mut Words, _b: &mut Words, _c: &mut Words) {}
}

/// Compares the emulated instructions of `isa` with the real ones, on random operands and special ones: what differs, if
/// anything does. Only for a machine that has them.
///
/// # Panics
/// When the machine lacks them, or `isa` is a real one.
pub fn emulation_differs(isa: Isa) -> Option<String> {
    let [emulated, real] = [isa, isa.emulates().expect("an emulated isa")]
        .map(|isa| Cpu::new(isa, 1, 0).expect("emulation is compared where the machine has the instructions"));
    let mut random = Random(1);
    (0..20_000).find_map(|_| {
        let operands = Operands { floats: random.floats(), words: random.words(), scale: random.scale() };
        let lanes = [&emulated, &real].map(|cpu| cpu.dispatch(LaneResults(&operands)));
        let words = [&emulated, &real].map(|cpu| match isa.has_dot() {
            // SAFETY: the kernel has no pointers.
            true => unsafe { cpu.dispatch_dot(WordResults(&operands)) },
            false => Vec::new(),
        });
        [lanes, words].into_iter().find_map(|[emulated, real]| {
            assert!(emulated.len() == real.len());
            let differs = emulated.into_iter().zip(real).find(|(emulated, real)| emulated != real)?;
            Some(format!("{isa}: {:x?} instead of {:x?} for {operands:x?}", differs.0, differs.1))
        })
    })
}

#[derive(Debug)]
struct Operands {
    floats: [[f32; 16]; 3],
    words: [[u32; 32]; 2],
    /// A value in [0.5, 2) and an integral power for every lane.
    scale: [[f32; 16]; 2],
}

struct Random(u64);

impl Random {
    fn word(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 32) as u32
    }

    /// A bit pattern, or one of those where rules begin and end, in both halves or whole.
    fn special(&mut self) -> u32 {
        const HALVES: [u16; 14] =
            [0, 0x8000, 1, 0x807F, 0x0080, 0x8080, 0x00FF, 0x3F80, 0xBF80, 0x7F7F, 0x7F80, 0xFF80, 0x7FC0, 0x4B00];
        let half = |word: u32| u32::from(HALVES[word as usize % HALVES.len()]);
        match self.word() % 8 {
            0 => half(self.word()) << 16 | half(self.word()),
            1 => half(self.word()) << 16 | [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF][self.word() as usize % 6],
            // Of like size, so that sums cancel and round.
            2 | 3 => self.word() & 0x80FF_80FF | 0x3F00_3F00,
            // Products about the smallest normal number.
            4 => self.word() & 0x83FF_83FF | 0x1E00_1E00,
            _ => self.word(),
        }
    }

    fn floats(&mut self) -> [[f32; 16]; 3] {
        [(); 3].map(|()| [(); 16].map(|()| f32::from_bits(self.special())))
    }

    fn words(&mut self) -> [[u32; 32]; 2] {
        [(); 2].map(|()| [(); 32].map(|()| self.special()))
    }

    fn scale(&mut self) -> [[f32; 16]; 2] {
        let mantissa = [(); 16].map(|()| f32::from_bits(self.word() % 0x0100_0000 + 0x3F00_0000));
        [mantissa, [(); 16].map(|()| (self.word() % 600) as f32 - 300.0)]
    }
}

/// A result: which one it is, and its words; NaN of floats are alike.
type Named = (&'static str, [u32; 16]);

fn floats<S: Simd>(s: S, name: &'static str, v: S::F) -> Named {
    let mut lanes = [0f32; 16];
    // SAFETY: 16 lanes.
    unsafe { s.store(v, lanes.as_mut_ptr()) };
    (name, lanes.map(|lane| if lane.is_nan() { 0x7FC0_0000 } else { lane.to_bits() }))
}

/// What the methods of [`Simd`] give.
struct LaneResults<'a>(&'a Operands);

impl Kernel for LaneResults<'_> {
    type Output = Vec<Named>;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Vec<Named> {
        let Operands { floats: lanes, words, scale } = self.0;
        let mut all = Vec::new();
        // SAFETY: every pointer is to 16 lanes, or to 32 words, of which rows of a block are 16.
        unsafe {
            let [a, b, c] = [0, 1, 2].map(|i| s.load(lanes[i].as_ptr()));
            let [m, i] = [0, 1].map(|i| s.load(scale[i].as_ptr()));
            let in_range = s.max(s.splat(-125.0), s.min(s.splat(126.0), i));
            let halves = words[0].as_ptr();
            let pairs = s.load_pairs(halves);
            let interleaved = s.interleave(a, b);
            all.extend([
                floats(s, "add", s.add(a, b)),
                floats(s, "sub", s.sub(a, b)),
                floats(s, "mul", s.mul(a, b)),
                floats(s, "div", s.div(a, b)),
                floats(s, "fma", s.fma(a, b, c)),
                floats(s, "abs", s.abs(a)),
                floats(s, "neg", s.neg(a)),
                floats(s, "copysign", s.copysign(a, b)),
                floats(s, "round", s.round(a)),
                floats(s, "floor", s.floor(a)),
                floats(s, "max", s.max(a, b)),
                floats(s, "min", s.min(a, b)),
                floats(s, "select_ge", s.select_ge(a, b, c, m)),
                floats(s, "pow2", s.pow2(in_range)),
                floats(s, "mul_pow2", s.mul_pow2(m, in_range)),
                floats(s, "scale", s.scale(m, i)),
                floats(s, "load_bf16", s.load_bf16(halves.cast())),
                floats(s, "load_f16", s.load_f16(halves.cast())),
                floats(s, "load_pairs, high", pairs.0),
                floats(s, "load_pairs, low", pairs.1),
                floats(s, "interleave, first", interleaved.0),
                floats(s, "interleave, second", interleaved.1),
                ("all_within", [u32::from(s.all_within(b, a, c)); 16]),
                ("any_nan_or_inf", [u32::from(s.any_nan_or_inf(a)); 16]),
                ("least_bf16", [u32::from(s.least_bf16(halves.cast(), 64)); 16]),
            ]);
            macro_rules! stored {
                ($name:literal, $store:ident($($v:expr),*)) => {{
                    let mut out = [0u32; 16];
                    s.$store($($v,)* out.as_mut_ptr().cast());
                    all.push(($name, out));
                }};
            }
            stored!("narrow_f32", narrow_f32(a));
            stored!("narrow_bf16", narrow_bf16(a));
            stored!("narrow_f16", narrow_f16(a));
            stored!("narrow_pairs", narrow_pairs(a, b));
            stored!("swap_pairs", swap_pairs(halves));
            for count in 1..=16 {
                let rows = std::array::from_fn(|i| words[i % 2].as_ptr().wrapping_add(i / 2));
                let mut out = [[[0u32; 16]; 16]; 2];
                s.transpose::<false>(&rows, 1, count, out[0].as_mut_ptr().cast(), 16);
                s.transpose::<true>(&rows, 1, count, out[1].as_mut_ptr().cast(), 16);
                all.extend(out.into_iter().flatten().map(|row| ("transpose", row)));
            }
        }
        all
    }
}

/// What the methods of [`Simd512`] give that those of [`Simd`] are not made of, and `VDPBF16PS`.
struct WordResults<'a>(&'a Operands);

impl Kernel512 for WordResults<'_> {
    type Output = Vec<Named>;
    #[inline(always)]
    unsafe fn run<S: Simd512>(self, s: S) -> Vec<Named> {
        let Operands { floats: lanes, words, .. } = self.0;
        // SAFETY: every pointer is to 16 lanes or 32 words, and the machine has `VDPBF16PS`.
        unsafe {
            let integers = |name, v: S::I| {
                let mut out = [0u32; 16];
                s.storeu_si512(out.as_mut_ptr(), v);
                (name, out)
            };
            let [a, b] = [0, 1].map(|i| s.loadu_si512(words[i].as_ptr()));
            let [x, y] = [0, 1].map(|i| s.load(lanes[i].as_ptr()));
            vec![
                integers("loadu_halves", s.loadu_halves(words[0].as_ptr(), words[1].as_ptr().add(3))),
                integers("broadcast_i32x4", s.broadcast_i32x4(words[0].as_ptr().add(1))),
                integers("set1_epi8", s.set1_epi8(-17)),
                integers("set1_epi16", s.set1_epi16(-17)),
                integers("setr_epi32", s.setr_epi32(std::array::from_fn(|i| words[0][i] as i32))),
                integers("min_epu16", s.min_epu16(a, b)),
                integers("sub_epi16", s.sub_epi16(a, b)),
                integers("srli_epi16", s.srli_epi16::<4>(a)),
                integers("unpacklo_epi8", s.unpacklo_epi8(a, b)),
                integers("unpackhi_epi8", s.unpackhi_epi8(a, b)),
                integers("shuffle_epi8", s.shuffle_epi8(a, b)),
                integers("shuffle_epi32", s.shuffle_epi32::<0x6C>(a)),
                integers("shuffle_i32x4", s.shuffle_i32x4::<0x6C>(a, b)),
                integers("mask_blend_epi16", s.mask_blend_epi16(words[0][0], a, b)),
                ("cmplt_epu16_mask", [s.cmplt_epu16_mask(a, b); 16]),
                ("reduce_min_epu16", [u32::from(s.reduce_min_epu16(a)); 16]),
                floats(s, "permutex2var_ps", s.permutex2var_ps(x, b, y)),
                floats(s, "insertf32x8_high", s.insertf32x8_high(x, y)),
                floats(s, "dpbf16_ps", s.dpbf16_ps(x, a, b)),
                floats(s, "dpbf16_ps of sums", s.dpbf16_ps(s.dpbf16_ps(y, a, a), b, b)),
            ]
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    #[test]
    fn a_dot_product_takes_the_high_half_first_and_flushes() {
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
