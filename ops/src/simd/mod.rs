//! A vector of f32 lanes as a token: a value of a type that implements [`Simd`] exists only where the machine has the
//! instructions, so every method is safe but for those that take a pointer.
//!
//! Algorithms are written once over [`Simd`] as a [`Kernel`]; `Cpu::dispatch` runs them inside a function compiled for
//! the chosen instruction set. Everything a kernel calls must be `#[inline(always)]`, or it is compiled for the
//! baseline and called through memory. Lanes never meet: the order of every sum is in the kernel, not here.

#[cfg(target_arch = "x86_64")]
pub mod avx2;
#[cfg(target_arch = "x86_64")]
pub mod avx512;
pub mod coded;
#[cfg(feature = "emulated-isa")]
pub mod emulated;
pub mod prefetch;
pub mod scalar;
pub mod stream;
pub mod unroll;
// Without an instruction set of 16 lanes nothing runs what is written for it.
#[cfg_attr(not(any(target_arch = "x86_64", feature = "emulated-isa")), allow(dead_code))]
pub mod words;

use crate::backend::cpu::{Cpu, Isa};
use crate::profile::IEEE;
use half::{bf16, f16};

/// Most lanes any instruction set has; sizes stack buffers.
pub const MAX_LANES: usize = 16;

/// `LANES` f32 values and the IEEE operations on them. Every operation rounds once, to nearest even, unless it is exact.
pub trait Simd: Copy + Send + Sync {
    /// The vector.
    type F: Copy;
    /// How many f32 it holds.
    const LANES: usize;

    /// Runs another kernel with the same instructions, as a function of its own: compiled once for all who call it.
    #[inline(always)]
    fn enter<K: Kernel>(self, kernel: K) -> K::Output {
        kernel.run(self)
    }
    /// All lanes `x`.
    fn splat(self, x: f32) -> Self::F;
    /// `a + b`.
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a - b`.
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b`.
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a / b`.
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// The square root of `a`.
    fn sqrt(self, a: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `|a|`.
    fn abs(self, a: Self::F) -> Self::F;
    /// `-a`.
    fn neg(self, a: Self::F) -> Self::F;
    /// The sign of `sign` on the magnitude of `a`.
    fn copysign(self, a: Self::F, sign: Self::F) -> Self::F;
    /// To an integer, ties to even.
    fn round(self, a: Self::F) -> Self::F;
    /// To an integer, down.
    fn floor(self, a: Self::F) -> Self::F;
    /// `a` where `a > b`, else `b`. A NaN in `a` gives `b`; a NaN in `b` stays.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a` where `a < b`, else `b`. A NaN in `a` gives `b`; a NaN in `b` stays.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// `yes` where `a >= b`, else `no` (so `no` where either is NaN).
    fn select_ge(self, a: Self::F, b: Self::F, yes: Self::F, no: Self::F) -> Self::F;
    /// Whether `low <= x <= high` in every lane; a NaN is not.
    fn all_within(self, low: Self::F, x: Self::F, high: Self::F) -> bool;
    /// Whether any lane of `a` is NaN or +inf.
    fn any_nan_or_inf(self, a: Self::F) -> bool;
    /// `2^i` for integral `i` in [-126, 127]; any other lane gives an arbitrary value.
    fn pow2(self, i: Self::F) -> Self::F;
    /// `m * 2^i` for `m` in [0.5, 2) and integral `i` in [-125, 126]; any other lane gives an arbitrary value.
    #[inline(always)]
    fn mul_pow2(self, m: Self::F, i: Self::F) -> Self::F {
        self.mul(m, self.pow2(i))
    }
    /// `t` rounded to an integer, ties to even, for `|t|` below 2^22, and that integer as [`Simd::mul_rounded`] takes it.
    #[inline(always)]
    fn round_small(self, t: Self::F) -> (Self::F, Self::F) {
        let i = self.round(t);
        (i, i)
    }
    /// [`Simd::round_small`] of `x * c` where that product gives the same integer before it is rounded and after.
    #[inline(always)]
    fn round_product(self, x: Self::F, c: Self::F) -> (Self::F, Self::F) {
        self.round_small(self.mul(x, c))
    }
    /// `m * 2^i` for the i of a [`Simd::round_small`] in [-126, 126], where m and the result are normal.
    #[inline(always)]
    fn mul_rounded(self, m: Self::F, rounded: Self::F) -> Self::F {
        self.mul_pow2(m, rounded)
    }
    /// `m * 2^i`, rounded once, for `m` in [0.5, 2) and `i` integral or infinite; a NaN in either gives a NaN.
    #[inline(always)]
    fn scale(self, m: Self::F, i: Self::F) -> Self::F {
        // From 2^252 on either way the result is infinite or +0; the first of the two products is exact.
        let i = self.min(self.splat(IEEE.most_scaled), self.max(self.splat(-IEEE.most_scaled), i));
        let h = self.floor(self.mul(i, self.splat(0.5)));
        self.mul(self.mul(m, self.pow2(h)), self.pow2(self.sub(i, h)))
    }

    /// Loads `LANES` f32.
    /// # Safety
    /// `p` is valid for reading `LANES` elements.
    unsafe fn load(self, p: *const f32) -> Self::F;
    /// Stores `LANES` f32 as they are.
    /// # Safety
    /// `p` is valid for writing `LANES` elements.
    unsafe fn store(self, v: Self::F, p: *mut f32);
    /// Loads and widens `LANES` bf16.
    /// # Safety
    /// `p` is valid for reading `LANES` elements.
    unsafe fn load_bf16(self, p: *const bf16) -> Self::F;
    /// Loads and widens `LANES` f16.
    /// # Safety
    /// `p` is valid for reading `LANES` elements.
    unsafe fn load_f16(self, p: *const f16) -> Self::F;
    /// Loads and widens `LANES` signed bytes. Not for vectors that are unrolled.
    /// # Safety
    /// `p` is valid for reading `LANES` elements.
    #[inline(always)]
    unsafe fn load_i8(self, p: *const i8) -> Self::F {
        assert!(Self::LANES <= MAX_LANES);
        // SAFETY: the caller's promise, and there are as many floats as the vector has.
        unsafe {
            let lane = |i: usize| if i < Self::LANES { f32::from(p.add(i).read()) } else { 0.0 };
            let lanes: [f32; MAX_LANES] = std::array::from_fn(lane);
            self.load(lanes.as_ptr())
        }
    }
    /// Of the words of a vector, as they stand, the number in the four bits from `SHIFT` on, plus `least`, a small integer. Not
    /// of vectors that are unrolled.
    #[inline(always)]
    fn nibble<const SHIFT: u32>(self, words: Self::F, least: Self::F) -> Self::F {
        assert!(Self::LANES <= MAX_LANES);
        let mut lanes = [0f32; MAX_LANES];
        // SAFETY: there are as many as the vector has.
        unsafe {
            self.store(words, lanes.as_mut_ptr());
            lanes.iter_mut().for_each(|lane| *lane = (lane.to_bits() >> SHIFT & 15) as f32);
            self.add(self.load(lanes.as_ptr()), least)
        }
    }
    /// The last rounding to f32: only NaN changes, to the canonical one.
    /// # Safety
    /// `p` is valid for writing `LANES` elements.
    unsafe fn narrow_f32(self, v: Self::F, p: *mut f32);
    /// The last rounding to bf16.
    /// # Safety
    /// `p` is valid for writing `LANES` elements.
    unsafe fn narrow_bf16(self, v: Self::F, p: *mut bf16);
    /// [`Simd::narrow_bf16`] of two vectors, one behind the other.
    /// # Safety
    /// `p` is valid for writing `2 * LANES` elements.
    #[inline(always)]
    unsafe fn narrow_two_bf16(self, v: (Self::F, Self::F), p: *mut bf16) {
        // SAFETY: the caller's promise.
        unsafe {
            self.narrow_bf16(v.0, p);
            self.narrow_bf16(v.1, p.add(Self::LANES));
        }
    }
    /// The last rounding to f16.
    /// # Safety
    /// `p` is valid for writing `LANES` elements.
    unsafe fn narrow_f16(self, v: Self::F, p: *mut f16);
    /// Loads `LANES` pairs of bf16 and widens them: the high halves (the earlier elements), then the low halves.
    /// # Safety
    /// `p` is valid for reading `LANES` elements.
    unsafe fn load_pairs(self, p: *const u32) -> (Self::F, Self::F);
    /// Pairs as they stand, widened as [`Simd::load_pairs`] does. Not of vectors that are unrolled.
    #[inline(always)]
    fn split_pairs(self, pairs: Self::F) -> (Self::F, Self::F) {
        let mut words = [0u32; MAX_LANES];
        assert!(Self::LANES <= MAX_LANES);
        // SAFETY: there are as many as the vector has.
        unsafe {
            self.store(pairs, words.as_mut_ptr().cast());
            self.load_pairs(words.as_ptr())
        }
    }
    /// The pairs of `LANES` columns from `vector * LANES` on, of pair `step` of a coded block, as they stand. Not of vectors that
    /// are unrolled.
    /// # Safety
    /// `table` is valid for reading 4 words, `block` for a [`BLOCK`](coded::BLOCK); step and vector are in it.
    #[inline(always)]
    unsafe fn coded_pairs(self, table: *const u32, block: *const u32, step: usize, vector: usize) -> Self::F {
        assert!(Self::LANES <= MAX_LANES);
        // SAFETY: the caller's promise, and there are as many words as the vector has.
        unsafe {
            let (table, block) = (&*table.cast(), &*block.cast::<[u32; coded::BLOCK]>());
            let column = |i: usize| coded::decoded(table, block, step, vector * Self::LANES + i);
            let words: [u32; MAX_LANES] = std::array::from_fn(|i| if i < Self::LANES { column(i) } else { 0 });
            self.load(words.as_ptr().cast())
        }
    }
    /// Copies 64 bytes past the caches; [`Simd::fence`] must follow before another thread may look.
    /// # Safety
    /// `from` is valid for reading and `to` for writing 64 bytes; `to` is a multiple of 64.
    #[inline(always)]
    unsafe fn stream_line(self, from: *const u8, to: *mut u8) {
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(from, to, 64) }
    }
    /// Orders the lines of [`Simd::stream_line`] before all later stores.
    #[inline(always)]
    fn fence(self) {}
    /// The last rounding of `LANES` pairs to bf16, `high` to the high halves and `low` to the low ones.
    /// # Safety
    /// `p` is valid for writing `LANES` elements; it need not be aligned.
    unsafe fn narrow_pairs(self, high: Self::F, low: Self::F, p: *mut u32);
    /// [`Simd::narrow_pairs`] of what is no NaN.
    /// # Safety
    /// As there.
    #[inline(always)]
    unsafe fn narrow_pairs_of_numbers(self, high: Self::F, low: Self::F, p: *mut u32) {
        // SAFETY: the caller's promise.
        unsafe { self.narrow_pairs(high, low, p) }
    }
    /// [`Simd::narrow_pairs_of_numbers`] of `N` vectors of pairs, one behind the other, of positive numbers whose bits, as integers,
    /// are off by at most 4. Where that may change an element it gives false, and nothing that it wrote counts.
    /// # Safety
    /// `p` is valid for writing `N * LANES` elements; it need not be aligned.
    #[inline(always)]
    unsafe fn narrow_pairs_about<const N: usize>(self, _v: &[(Self::F, Self::F); N], _p: *mut u32) -> bool {
        false
    }
    /// `low[0], high[0], low[1], high[1], ..`, in two vectors.
    fn interleave(self, high: Self::F, low: Self::F) -> (Self::F, Self::F);
    /// Copies `LANES` pairs with their halves exchanged: from memory order to the earlier element in the high half.
    /// # Safety
    /// `from` is valid for reading and `to` for writing `LANES` elements; neither need be aligned.
    unsafe fn swap_pairs(self, from: *const u32, to: *mut u32);
    /// Transposes a block: word `at + j` of row i goes to `to[j * stride + i]`, for j below `LANES` and i below `count` (at
    /// most `LANES`). With `SWAP`, the halves of every word are exchanged on the way.
    /// # Safety
    /// The first `LANES` pointers are valid for reading `at + LANES` words, aligned or not; `to` is valid for writing
    /// `(LANES - 1) * stride + count` words.
    #[inline(always)]
    unsafe fn transpose<const SWAP: bool>(
        self,
        rows: &[*const u32; MAX_LANES],
        at: usize,
        count: usize,
        to: *mut u32,
        stride: usize,
    ) {
        for j in 0..Self::LANES {
            for (i, row) in rows.iter().enumerate().take(count) {
                // SAFETY: the caller's promise.
                unsafe {
                    let word = row.add(at + j).read_unaligned();
                    to.add(j * stride + i).write(if SWAP { word.rotate_left(16) } else { word });
                }
            }
        }
    }
    /// The least `(bits & 0x7FFF) - 1`, wrapping, of `count` bf16: one less than the bits of the smallest magnitude that
    /// is not zero; `0xFFFF` when all are zero or there are none.
    /// # Safety
    /// `p` is valid for reading `count` elements, a multiple of `2 * LANES`.
    #[inline(always)]
    unsafe fn least_bf16(self, p: *const bf16, count: usize) -> u16 {
        // SAFETY: the caller's promise.
        let one = |i: usize| unsafe { (p.add(i).read().to_bits() & 0x7FFF).wrapping_sub(1) };
        (0..count).map(one).fold(u16::MAX, u16::min)
    }
}

/// An algorithm over [`Simd`]. Implementations of `run` are `#[inline(always)]`.
pub trait Kernel {
    /// What it returns.
    type Output;
    /// Runs it with the instructions of `s`.
    fn run<S: Simd>(self, s: S) -> Self::Output;
}

impl Cpu {
    /// Runs `kernel` with this `Cpu`'s instruction set, on the calling thread.
    #[inline]
    pub(crate) fn dispatch<K: Kernel>(&self, kernel: K) -> K::Output {
        match self.isa() {
            Isa::Scalar => scalar::enter(kernel),
            // SAFETY: `Cpu::new` refuses an isa that `Isa::available` does not find on this machine.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { avx2::enter(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Avx512Bf16 => unsafe { avx512::enter(kernel) },
            // SAFETY: as above.
            #[cfg(all(feature = "emulated-isa", not(real_avx512)))]
            Isa::EmulatedAvx512 | Isa::EmulatedAvx512Bf16 => unsafe { emulated::enter(kernel) },
            // SAFETY: as above.
            #[cfg(all(feature = "emulated-isa", real_avx512))]
            Isa::EmulatedAvx512 | Isa::EmulatedAvx512Bf16 => unsafe { avx512::enter(kernel) },
            #[cfg(not(target_arch = "x86_64"))]
            _ => unreachable!("Cpu::new refuses an isa this machine lacks"),
        }
    }

    /// Runs `kernel` with this `Cpu`'s `VDPBF16PS`, on the calling thread.
    ///
    /// # Safety
    /// What the kernel says of its fields holds.
    #[inline]
    pub(crate) unsafe fn dispatch_dot<K: words::Kernel512>(&self, kernel: K) -> K::Output {
        match self.isa() {
            // SAFETY: the caller's promise; `Cpu::new` refuses an isa that `Isa::available` does not find on this machine.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => unsafe { avx512::enter_dot(kernel) },
            // SAFETY: as above.
            #[cfg(feature = "emulated-isa")]
            Isa::EmulatedAvx512Bf16 => unsafe { emulated::enter_dot(kernel) },
            isa => {
                drop(kernel);
                panic!("{isa} has no dot product of pairs")
            }
        }
    }
}

/// Storage types as vectors; the sealed half of `Element`.
pub trait Storage: Copy + Default {
    /// Whether this is bf16, whose products are exact in f32.
    const IS_BF16: bool = false;
    /// Loads and widens `LANES` elements.
    /// # Safety
    /// `p` is valid for reading `LANES` elements.
    unsafe fn load_lanes<S: Simd>(s: S, p: *const Self) -> S::F;
    /// The largest of at least one element, the least one, or +0 where none has a sign, and whether one is NaN or +inf; where one is
    /// NaN, any.
    fn extent(x: &[Self]) -> (Self, Self, bool);
    /// The last rounding of `LANES` elements.
    /// # Safety
    /// `p` is valid for writing `LANES` elements.
    unsafe fn narrow_lanes<S: Simd>(s: S, v: S::F, p: *mut Self);
    /// The same of two vectors, one behind the other.
    /// # Safety
    /// `p` is valid for writing `2 * LANES` elements.
    #[inline(always)]
    unsafe fn narrow_two_lanes<S: Simd>(s: S, v: (S::F, S::F), p: *mut Self) {
        // SAFETY: the caller's promise.
        unsafe {
            Self::narrow_lanes(s, v.0, p);
            Self::narrow_lanes(s, v.1, p.add(S::LANES));
        }
    }
}

/// [`Storage::extent`] by the bits, which need no widening: those of positive numbers grow with them as signed integers,
/// those of negative ones fall as unsigned integers. A loop that the compiler makes vectors of; the largest of negative ones
/// alone, which is rare, takes another.
macro_rules! extent {
    ($unsigned:ty, $signed:ty) => {
        #[inline(always)]
        fn extent(x: &[Self]) -> (Self, Self, bool) {
            let (mut positive, mut high) = (<$signed>::MIN, 0);
            for x in x {
                positive = positive.max(x.to_bits() as $signed);
                high = high.max(x.to_bits());
            }
            let mut largest = positive as $unsigned;
            if positive < 0 {
                for x in x {
                    largest = largest.min(x.to_bits());
                }
            }
            let least = if high > <$signed>::MAX as $unsigned { high } else { 0 };
            let invalid = positive >= Self::INFINITY.to_bits() as $signed || high > Self::NEG_INFINITY.to_bits();
            (Self::from_bits(largest), Self::from_bits(least), invalid)
        }
    };
}

impl Storage for f32 {
    extent!(u32, i32);
    #[inline(always)]
    unsafe fn load_lanes<S: Simd>(s: S, p: *const f32) -> S::F {
        // SAFETY: the caller's promise.
        unsafe { s.load(p) }
    }
    #[inline(always)]
    unsafe fn narrow_lanes<S: Simd>(s: S, v: S::F, p: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { s.narrow_f32(v, p) }
    }
}

impl Storage for bf16 {
    extent!(u16, i16);
    const IS_BF16: bool = true;
    #[inline(always)]
    unsafe fn load_lanes<S: Simd>(s: S, p: *const bf16) -> S::F {
        // SAFETY: the caller's promise.
        unsafe { s.load_bf16(p) }
    }
    #[inline(always)]
    unsafe fn narrow_lanes<S: Simd>(s: S, v: S::F, p: *mut bf16) {
        // SAFETY: the caller's promise.
        unsafe { s.narrow_bf16(v, p) }
    }
    #[inline(always)]
    unsafe fn narrow_two_lanes<S: Simd>(s: S, v: (S::F, S::F), p: *mut bf16) {
        // SAFETY: the caller's promise.
        unsafe { s.narrow_two_bf16(v, p) }
    }
}

impl Storage for f16 {
    extent!(u16, i16);
    #[inline(always)]
    unsafe fn load_lanes<S: Simd>(s: S, p: *const f16) -> S::F {
        // SAFETY: the caller's promise.
        unsafe { s.load_f16(p) }
    }
    #[inline(always)]
    unsafe fn narrow_lanes<S: Simd>(s: S, v: S::F, p: *mut f16) {
        // SAFETY: the caller's promise.
        unsafe { s.narrow_f16(v, p) }
    }
}

/// The `LANES` elements of `x` from `start`, widened; lanes past the end of `x` are `pad`.
#[inline(always)]
pub fn load_at<S: Simd, T: Storage>(s: S, x: &[T], start: usize, pad: T) -> S::F {
    let rest = &x[start..];
    if rest.len() >= S::LANES {
        // SAFETY: `rest` holds at least LANES elements.
        unsafe { T::load_lanes(s, rest.as_ptr()) }
    } else {
        let mut padded = [pad; MAX_LANES];
        padded[..rest.len()].copy_from_slice(rest);
        // SAFETY: MAX_LANES >= LANES.
        unsafe { T::load_lanes(s, padded.as_ptr()) }
    }
}

/// The last rounding of `v` into the `LANES` elements of `y` from `start`; lanes past the end of `y` are dropped.
#[inline(always)]
pub fn narrow_at<S: Simd, T: Storage>(s: S, v: S::F, y: &mut [T], start: usize) {
    let rest = &mut y[start..];
    if rest.len() >= S::LANES {
        // SAFETY: `rest` holds at least LANES elements.
        unsafe { T::narrow_lanes(s, v, rest.as_mut_ptr()) }
    } else {
        let mut padded = [T::default(); MAX_LANES];
        // SAFETY: MAX_LANES >= LANES.
        unsafe { T::narrow_lanes(s, v, padded.as_mut_ptr()) };
        let count = rest.len();
        rest.copy_from_slice(&padded[..count]);
    }
}

/// Whether [`load_two`] and [`narrow_two`] take bf16 from `I` to `O` by pairs: cheaper, because no element changes its
/// place in a register.
#[inline(always)]
pub fn paired<I: Storage, O: Storage>() -> bool {
    I::IS_BF16 && O::IS_BF16
}

/// A value that begins with a line of memory, which the stack would leave to chance: a vector that lies in two lines is read and
/// written twice.
#[repr(align(64))]
pub struct OnLine<T>(pub T);

/// `2 * LANES` elements in two vectors. With `pairs` (of bf16 only) these are the elements of odd and of even index, else
/// the first and the second half; `narrow_two` puts them back.
#[inline(always)]
pub fn load_two<S: Simd, T: Storage>(s: S, x: &[T], pairs: bool) -> (S::F, S::F) {
    assert!(x.len() == 2 * S::LANES && (T::IS_BF16 || !pairs));
    // SAFETY: `x` holds 2 * LANES elements; pairs of bf16 are LANES u32.
    unsafe {
        if pairs {
            s.load_pairs(x.as_ptr().cast())
        } else {
            (T::load_lanes(s, x.as_ptr()), T::load_lanes(s, x.as_ptr().add(S::LANES)))
        }
    }
}

/// The last rounding of two vectors in the order of [`load_two`] into the `2 * LANES` elements of `y`.
#[inline(always)]
pub fn narrow_two<S: Simd, T: Storage>(s: S, v: (S::F, S::F), y: &mut [T], pairs: bool) {
    assert!(y.len() == 2 * S::LANES && (T::IS_BF16 || !pairs));
    // SAFETY: `y` holds 2 * LANES elements; pairs of bf16 are LANES u32.
    unsafe {
        if pairs {
            s.narrow_pairs(v.0, v.1, y.as_mut_ptr().cast());
        } else {
            T::narrow_two_lanes(s, v, y.as_mut_ptr());
        }
    }
}

/// [`narrow_two`] of what is no NaN.
#[inline(always)]
pub fn narrow_two_numbers<S: Simd, T: Storage>(s: S, v: (S::F, S::F), y: &mut [T], pairs: bool) {
    assert!(y.len() == 2 * S::LANES && (T::IS_BF16 || !pairs));
    if pairs {
        // SAFETY: `y` holds 2 * LANES elements; pairs of bf16 are LANES u32.
        unsafe { s.narrow_pairs_of_numbers(v.0, v.1, y.as_mut_ptr().cast()) }
    } else {
        narrow_two(s, v, y, pairs);
    }
}

/// Half an ulp of bf16 and 4 units of f32 more. Added to a number that is off by at most 4, it leaves less than [`TIES`] in the lost half
/// where the number may stand on the other side of a half than what it stands for; all else is rounded.
pub const HALF_AND_FOUR: i32 = 0x8004;
/// See [`HALF_AND_FOUR`].
pub const TIES: i32 = 9;

/// The positive quotients `w / divisor` of `N` times two vectors, each two as [`narrow_two_numbers`] takes them, all of normal
/// numbers and normal themselves. To bf16 a product by the `reciprocal` of the divisor will most often do: its rounding, that
/// of the reciprocal and that of the quotient are less than three units in the last place together, and seldom is half a unit
/// of bf16 so near that all are divided.
#[inline(always)]
pub fn narrow_quotients<S: Simd, T: Storage, const N: usize>(
    s: S,
    w: &[f32],
    (divisor, reciprocal): (S::F, S::F),
    y: &mut [T],
    pairs: bool,
) {
    let two = 2 * S::LANES;
    assert!(w.len() == N * two && y.len() == N * two && (T::IS_BF16 || !pairs));
    if pairs {
        let mut about = [(reciprocal, reciprocal); N];
        for (about, w) in about.iter_mut().zip(w.chunks_exact(two)) {
            let (w0, w1) = load_two(s, w, false);
            *about = (s.mul(w0, reciprocal), s.mul(w1, reciprocal));
        }
        // SAFETY: `y` holds N * 2 * LANES elements; pairs of bf16 are N * LANES u32.
        if unsafe { s.narrow_pairs_about(&about, y.as_mut_ptr().cast()) } {
            return;
        }
    }
    for (w, y) in w.chunks_exact(two).zip(y.chunks_exact_mut(two)) {
        let (w0, w1) = load_two(s, w, false);
        narrow_two_numbers(s, (s.div(w0, divisor), s.div(w1, divisor)), y, pairs);
    }
}

/// Stores two vectors as they are, one after the other.
#[inline(always)]
pub fn store_two<S: Simd>(s: S, v: (S::F, S::F), y: &mut [f32]) {
    assert!(y.len() == 2 * S::LANES);
    // SAFETY: `y` holds 2 * LANES elements.
    unsafe {
        s.store(v.0, y.as_mut_ptr());
        s.store(v.1, y.as_mut_ptr().add(S::LANES));
    }
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;
    use crate::Element;

    /// Two vectors to bf16, by pairs or not; `numbers`: as those of which none is NaN.
    struct Narrow<'a>(&'a [f32], &'a mut [bf16], bool, bool);

    impl Kernel for Narrow<'_> {
        type Output = ();
        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            let Narrow(x, y, pairs, numbers) = self;
            let two = 2 * S::LANES;
            for (x, y) in x.chunks_exact(two).zip(y.chunks_exact_mut(two)) {
                let mut of_pairs = [0f32; 2 * MAX_LANES];
                for (i, x) in x.iter().enumerate() {
                    of_pairs[if pairs { i / 2 + if i % 2 == 1 { 0 } else { S::LANES } } else { i }] = *x;
                }
                let v = load_two(s, &of_pairs[..two], false);
                if numbers { narrow_two_numbers(s, v, y, pairs) } else { narrow_two(s, v, y, pairs) }
            }
        }
    }

    /// Every low half beside high halves of all kinds, in either place of a pair.
    pub(crate) fn two_vectors_to_bf16() {
        let high = [0u32, 1, 0x3F80, 0x3F81, 0x3FFF, 0x7F7F, 0x8000, 0xBF81, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1];
        for high in high {
            let all: Vec<f32> = (0..=0xFFFF).map(|low| f32::from_bits(high << 16 | low)).collect();
            for from in [0, 1] {
                let x = &all[from..][..0xFFE0];
                let expected: Vec<u16> = x.iter().map(|x| bf16::narrow(*x).to_bits()).collect();
                let numbers = x.iter().all(|x| !x.is_nan());
                for isa in crate::Isa::of_machine() {
                    let cpu = Cpu::new(isa, 1, usize::MAX).unwrap();
                    for (pairs, numbers) in [(false, false), (true, false), (false, numbers), (true, numbers)] {
                        let mut y = vec![bf16::ZERO; x.len()];
                        cpu.dispatch(Narrow(x, &mut y, pairs, numbers));
                        let y: Vec<u16> = y.iter().map(|y| y.to_bits()).collect();
                        assert!(y == expected, "{isa}, high half {high:x}, pairs {pairs}, numbers {numbers}");
                    }
                }
            }
        }
    }

    struct Quotients<'a, const N: usize>(&'a [f32], f32, &'a mut [bf16], bool);

    impl<const N: usize> Kernel for Quotients<'_, N> {
        type Output = ();
        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            let (part, divisor) = (N * 2 * S::LANES, (s.splat(self.1), s.splat(1.0 / self.1)));
            for (w, y) in self.0.chunks_exact(part).zip(self.2.chunks_exact_mut(part)) {
                narrow_quotients::<S, bf16, N>(s, w, divisor, y, self.3);
            }
        }
    }

    /// Quotients about every half between two bf16, where the product by a reciprocal may be on the other side of it.
    pub(crate) fn quotients_to_bf16() {
        let mut otherwise = 0;
        for divisor in [0.7f32, 1.0, 3.0, 6.6541, 1234.567, 11_111.1] {
            for high in (0x3F00u32..0x3F80).step_by(3) {
                for low in 0x7FF0..=0x8010u32 {
                    let w = [f32::from_bits(high << 16 | low) * divisor; 2 * MAX_LANES];
                    let expected = bf16::narrow(w[0] / divisor);
                    otherwise += u32::from(bf16::narrow(w[0] * (1.0 / divisor)) != expected);
                    for isa in crate::Isa::of_machine() {
                        for pairs in [false, true] {
                            let mut y = [bf16::ZERO; 2 * MAX_LANES];
                            let cpu = Cpu::new(isa, 1, usize::MAX).unwrap();
                            cpu.dispatch(Quotients::<1>(&w, divisor, &mut y, pairs));
                            assert_eq!(y, [expected; 2 * MAX_LANES], "{isa}, {} / {divisor}, pairs {pairs}", w[0]);
                        }
                    }
                }
            }
        }
        assert!(otherwise > 20, "{otherwise}");
    }

    /// A product by the reciprocal is as near to the quotient as [`HALF_AND_FOUR`] allows for, wherever all three are normal.
    pub(crate) fn a_product_by_the_reciprocal_is_near_to_the_quotient() {
        let (mut state, mut most, mut count) = (5u64, 0, 0);
        let mut number = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            f32::from_bits((state >> 33) as u32)
        };
        for _ in 0..4_000_000 {
            let (w, divisor) = (number(), number());
            let (quotient, product) = (w / divisor, w * (1.0 / divisor));
            if [w, divisor, 1.0 / divisor, quotient, product].iter().all(|x| x.is_normal()) {
                most = most.max(quotient.to_bits().abs_diff(product.to_bits()));
                count += 1;
            }
        }
        assert!(
            count > 1_000_000 && (1..=3).contains(&most) && 0x8000 + most < HALF_AND_FOUR as u32,
            "{most} of {count}"
        );
    }

    /// One quotient among many lies so near to a half that all are divided, wherever it stands.
    pub(crate) fn one_quotient_of_many_is_near_to_a_half() {
        const COUNT: usize = 8 * MAX_LANES;
        let divisor = 11_111.1f32;
        let near = |high: u32| (0x7FFD..=0x8003).map(move |low| f32::from_bits(high << 16 | low) * divisor);
        let other = |w: &f32| bf16::narrow(w / divisor) != bf16::narrow(w * (1.0 / divisor));
        let w: Vec<f32> = (0x3F00u32..0x3F80).flat_map(near).filter(other).collect();
        assert!(w.len() > 2, "{}", w.len());
        for isa in crate::Isa::of_machine() {
            let cpu = Cpu::new(isa, 1, usize::MAX).unwrap();
            let lanes = cpu.dispatch(LanesOf);
            for at in 0..COUNT {
                let mut all: Vec<f32> = (0..COUNT).map(|i| 1.0 + i as f32 / 256.0).collect();
                all[at] = w[at % w.len()];
                let mut y = [bf16::ZERO; COUNT];
                cpu.dispatch(Quotients::<4>(&all, divisor, &mut y, true));
                for (i, y) in y.iter().enumerate() {
                    // Of every two vectors, the first is that of the odd elements.
                    let place = i - i % (2 * lanes) + i % (2 * lanes) / 2 + if i % 2 == 1 { 0 } else { lanes };
                    assert_eq!(*y, bf16::narrow(all[place] / divisor), "{isa}, {at}, element {i}");
                }
            }
        }
    }

    struct LanesOf;

    impl Kernel for LanesOf {
        type Output = usize;
        #[inline(always)]
        fn run<S: Simd>(self, _: S) -> usize {
            S::LANES
        }
    }

    fn extent<T: Element>(x: &[f32]) -> Option<(f32, f32)> {
        let x: Vec<T> = x.iter().map(|x| T::narrow(*x)).collect();
        let (largest, least, invalid) = <T as Storage>::extent(&x);
        (!invalid).then(|| (largest.widen(), least.widen()))
    }

    pub(crate) fn extents() {
        let infinity = f32::INFINITY;
        for of in [extent::<half::bf16>, extent::<half::f16>, extent::<f32>] {
            for x in [
                &[1.0, 3.0, 2.0][..],
                &[-1.0, -3.0, -2.0],
                &[-1.0, 0.0, 5.0, -7.0],
                &[-2.0, -0.0],
                &[-infinity, 4.0, 8.0],
                &[-infinity],
            ] {
                let ends = [f32::NEG_INFINITY, 0.0];
                let expected = x.iter().fold(ends, |[most, least], x| [most.max(*x), least.min(*x)]);
                assert_eq!(of(x), Some((expected[0], expected[1])), "{x:?}");
            }
            assert_eq!(of(&[1.0, infinity, -1.0]), None);
            assert_eq!(of(&[-1.0, f32::NAN, -2.0]), None);
        }
        // A NaN with a sign.
        let negative = half::bf16::from_bits(0xFF81);
        assert!(half::bf16::extent(&[half::bf16::ONE, negative]).2);
        assert!(f32::extent(&[1.0, -f32::NAN]).2);
    }
}
