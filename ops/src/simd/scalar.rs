//! One lane: the reference every other instruction set must equal bit for bit.

use super::{Kernel, Simd};
use crate::element::Element;
use half::{bf16, f16};

/// Plain Rust; always available.
#[derive(Clone, Copy)]
pub struct Scalar;

/// Runs `kernel`.
pub fn enter<K: Kernel>(kernel: K) -> K::Output {
    kernel.entered()
}

/// A function of its own, so that it is compiled once however many call it, and a method, so that its code is compiled beside the
/// kernel and not that of all kernels as one unit.
trait Entered: Kernel + Sized {
    #[inline(never)]
    fn entered(self) -> Self::Output {
        self.run(Scalar)
    }
}

impl<K: Kernel> Entered for K {}

impl Simd for Scalar {
    type F = f32;
    const LANES: usize = 1;

    #[inline(always)]
    fn enter<K: Kernel>(self, kernel: K) -> K::Output {
        enter(kernel)
    }
    #[inline(always)]
    fn splat(self, x: f32) -> f32 {
        x
    }
    #[inline(always)]
    fn add(self, a: f32, b: f32) -> f32 {
        a + b
    }
    #[inline(always)]
    fn sub(self, a: f32, b: f32) -> f32 {
        a - b
    }
    #[inline(always)]
    fn mul(self, a: f32, b: f32) -> f32 {
        a * b
    }
    #[inline(always)]
    fn div(self, a: f32, b: f32) -> f32 {
        a / b
    }
    #[inline(always)]
    fn sqrt(self, a: f32) -> f32 {
        a.sqrt()
    }
    #[inline(always)]
    fn fma(self, a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
    #[inline(always)]
    fn abs(self, a: f32) -> f32 {
        a.abs()
    }
    #[inline(always)]
    fn neg(self, a: f32) -> f32 {
        -a
    }
    #[inline(always)]
    fn copysign(self, a: f32, sign: f32) -> f32 {
        a.copysign(sign)
    }
    #[inline(always)]
    fn round(self, a: f32) -> f32 {
        a.round_ties_even()
    }
    #[inline(always)]
    fn floor(self, a: f32) -> f32 {
        a.floor()
    }
    #[inline(always)]
    fn max(self, a: f32, b: f32) -> f32 {
        if a > b { a } else { b }
    }
    #[inline(always)]
    fn min(self, a: f32, b: f32) -> f32 {
        if a < b { a } else { b }
    }
    #[inline(always)]
    fn select_ge(self, a: f32, b: f32, yes: f32, no: f32) -> f32 {
        if a >= b { yes } else { no }
    }
    #[inline(always)]
    fn all_within(self, low: f32, x: f32, high: f32) -> bool {
        low <= x && x <= high
    }

    #[inline(always)]
    fn any_nan_or_inf(self, a: f32) -> bool {
        a.is_nan() || a == f32::INFINITY
    }
    #[inline(always)]
    fn pow2(self, i: f32) -> f32 {
        f32::from_bits((((i as i32).wrapping_add(127)) as u32) << 23)
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { *p }
    }
    #[inline(always)]
    unsafe fn store(self, v: f32, p: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { *p = v }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const bf16) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { (*p).widen() }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const f16) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { (*p).widen() }
    }
    #[inline(always)]
    unsafe fn narrow_f32(self, v: f32, p: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { *p = f32::narrow(v) }
    }
    #[inline(always)]
    unsafe fn narrow_bf16(self, v: f32, p: *mut bf16) {
        // SAFETY: the caller's promise.
        unsafe { *p = bf16::narrow(v) }
    }
    #[inline(always)]
    unsafe fn narrow_f16(self, v: f32, p: *mut f16) {
        // SAFETY: the caller's promise.
        unsafe { *p = f16::narrow(v) }
    }
    #[inline(always)]
    unsafe fn swap_pairs(self, from: *const u32, to: *mut u32) {
        // SAFETY: the caller's promise.
        unsafe { to.write_unaligned(from.read_unaligned().rotate_left(16)) }
    }
    #[inline(always)]
    unsafe fn narrow_pairs(self, high: f32, low: f32, p: *mut u32) {
        let pair = u32::from(bf16::narrow(high).to_bits()) << 16 | u32::from(bf16::narrow(low).to_bits());
        // SAFETY: the caller's promise.
        unsafe { p.write_unaligned(pair) }
    }
    #[inline(always)]
    fn interleave(self, high: f32, low: f32) -> (f32, f32) {
        (low, high)
    }
    #[inline(always)]
    unsafe fn load_pairs(self, p: *const u32) -> (f32, f32) {
        // SAFETY: the caller's promise.
        let pair = unsafe { p.read_unaligned() };
        (f32::from_bits(pair & 0xFFFF_0000), f32::from_bits(pair << 16))
    }
}
