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
pub mod scalar;

use crate::cpu::{Cpu, Isa};
use half::{bf16, f16};

/// Most lanes any instruction set has; sizes stack buffers.
pub const MAX_LANES: usize = 16;

/// `LANES` f32 values and the IEEE operations on them. Every operation rounds once, to nearest even, unless it is exact.
pub trait Simd: Copy + Send + Sync {
    /// The vector.
    type F: Copy;
    /// How many f32 it holds.
    const LANES: usize;

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
    /// Whether `a >= b` in any lane.
    fn any_ge(self, a: Self::F, b: Self::F) -> bool;
    /// Whether any lane of `a` is NaN or +inf.
    fn any_nan_or_inf(self, a: Self::F) -> bool;
    /// `2^i` for integral `i` in [-126, 127]; any other lane gives an arbitrary value.
    fn pow2(self, i: Self::F) -> Self::F;

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
    /// The last rounding to f32: only NaN changes, to the canonical one.
    /// # Safety
    /// `p` is valid for writing `LANES` elements.
    unsafe fn narrow_f32(self, v: Self::F, p: *mut f32);
    /// The last rounding to bf16.
    /// # Safety
    /// `p` is valid for writing `LANES` elements.
    unsafe fn narrow_bf16(self, v: Self::F, p: *mut bf16);
    /// The last rounding to f16.
    /// # Safety
    /// `p` is valid for writing `LANES` elements.
    unsafe fn narrow_f16(self, v: Self::F, p: *mut f16);
    /// Loads `LANES` pairs of bf16 and widens them: the high halves (the earlier elements), then the low halves.
    /// # Safety
    /// `p` is valid for reading `LANES` elements.
    unsafe fn load_pairs(self, p: *const u32) -> (Self::F, Self::F);
    /// Copies `LANES` pairs with their halves exchanged: from memory order to the earlier element in the high half.
    /// # Safety
    /// `from` is valid for reading and `to` for writing `LANES` elements; neither need be aligned.
    unsafe fn swap_pairs(self, from: *const u32, to: *mut u32);
    /// Transposes a block: word `at + j` of row i goes to `to[j * stride + i]`, for j below `LANES` and i below `count` (at
    /// most `LANES`). With `SWAP`, the halves of every word are exchanged on the way.
    /// # Safety
    /// The first `LANES` pointers are valid for reading `at + LANES` words, aligned or not; `to` is valid for writing
    /// `(LANES - 1) * stride + count` words.
    unsafe fn transpose<const SWAP: bool>(
        self,
        rows: &[*const u32; MAX_LANES],
        at: usize,
        count: usize,
        to: *mut u32,
        stride: usize,
    );
    /// The least `(bits & 0x7FFF) - 1`, wrapping, of `count` bf16: one less than the bits of the smallest magnitude that
    /// is not zero; `0xFFFF` when all are zero or there are none.
    /// # Safety
    /// `p` is valid for reading `count` elements, a multiple of `2 * LANES`.
    unsafe fn least_bf16(self, p: *const bf16, count: usize) -> u16;
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
            Isa::Scalar => kernel.run(scalar::Scalar),
            // SAFETY: `Cpu::new` refuses an isa that `Isa::available` does not find on this machine.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { avx2::enter(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Avx512Bf16 => unsafe { avx512::enter(kernel) },
            #[cfg(not(target_arch = "x86_64"))]
            _ => unreachable!("Cpu::new refuses an isa this machine lacks"),
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
    /// The last rounding of `LANES` elements.
    /// # Safety
    /// `p` is valid for writing `LANES` elements.
    unsafe fn narrow_lanes<S: Simd>(s: S, v: S::F, p: *mut Self);
}

impl Storage for f32 {
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
}

impl Storage for f16 {
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
