//! Two vectors of another instruction set as one: each operation stands beside its double, so that a long chain of
//! dependent ones (an exponential) keeps the machine busy. The compiler keeps that order.

use super::Simd;
use half::{bf16, f16};

/// Eight vectors as one: a chain of multiply-adds of each takes all the time of two units, and none waits for itself.
pub type Eight<S> = Unrolled<Unrolled<Unrolled<S>>>;

/// The token of eight vectors as one.
#[inline(always)]
pub fn of_eight<S: Simd>(s: S) -> Eight<S> {
    Unrolled(Unrolled(Unrolled(s)))
}

/// Eight vectors as one. They come in an array: a function that makes them one by one would be a closure, which the compiler
/// may leave outside of the kernel, without its instruction set.
#[inline(always)]
pub fn eight<S: Simd>([v0, v1, v2, v3, v4, v5, v6, v7]: [S::F; 8]) -> <Eight<S> as Simd>::F {
    (((v0, v1), (v2, v3)), ((v4, v5), (v6, v7)))
}

/// The vectors of which [`eight`] made `v`.
#[inline(always)]
pub fn vectors<S: Simd>(v: <Eight<S> as Simd>::F) -> [S::F; 8] {
    let (((v0, v1), (v2, v3)), ((v4, v5), (v6, v7))) = v;
    [v0, v1, v2, v3, v4, v5, v6, v7]
}

/// Every operation on both halves.
#[derive(Clone, Copy)]
pub struct Unrolled<S>(pub S);

impl<S: Simd> Simd for Unrolled<S> {
    type F = (S::F, S::F);
    const LANES: usize = 2 * S::LANES;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        (self.0.splat(x), self.0.splat(x))
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        (self.0.add(a.0, b.0), self.0.add(a.1, b.1))
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        (self.0.sub(a.0, b.0), self.0.sub(a.1, b.1))
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        (self.0.mul(a.0, b.0), self.0.mul(a.1, b.1))
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        (self.0.div(a.0, b.0), self.0.div(a.1, b.1))
    }
    #[inline(always)]
    fn sqrt(self, a: Self::F) -> Self::F {
        (self.0.sqrt(a.0), self.0.sqrt(a.1))
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        (self.0.max(a.0, b.0), self.0.max(a.1, b.1))
    }
    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        (self.0.min(a.0, b.0), self.0.min(a.1, b.1))
    }
    #[inline(always)]
    fn mul_pow2(self, m: Self::F, i: Self::F) -> Self::F {
        (self.0.mul_pow2(m.0, i.0), self.0.mul_pow2(m.1, i.1))
    }
    #[inline(always)]
    fn round_small(self, t: Self::F) -> (Self::F, Self::F) {
        let ((i0, rounded0), (i1, rounded1)) = (self.0.round_small(t.0), self.0.round_small(t.1));
        ((i0, i1), (rounded0, rounded1))
    }
    #[inline(always)]
    fn round_product(self, x: Self::F, c: Self::F) -> (Self::F, Self::F) {
        let ((i0, rounded0), (i1, rounded1)) = (self.0.round_product(x.0, c.0), self.0.round_product(x.1, c.1));
        ((i0, i1), (rounded0, rounded1))
    }
    #[inline(always)]
    fn mul_rounded(self, m: Self::F, rounded: Self::F) -> Self::F {
        (self.0.mul_rounded(m.0, rounded.0), self.0.mul_rounded(m.1, rounded.1))
    }
    #[inline(always)]
    fn scale(self, m: Self::F, i: Self::F) -> Self::F {
        (self.0.scale(m.0, i.0), self.0.scale(m.1, i.1))
    }
    #[inline(always)]
    fn copysign(self, a: Self::F, sign: Self::F) -> Self::F {
        (self.0.copysign(a.0, sign.0), self.0.copysign(a.1, sign.1))
    }
    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        (self.0.fma(a.0, b.0, c.0), self.0.fma(a.1, b.1, c.1))
    }
    #[inline(always)]
    fn abs(self, a: Self::F) -> Self::F {
        (self.0.abs(a.0), self.0.abs(a.1))
    }
    #[inline(always)]
    fn neg(self, a: Self::F) -> Self::F {
        (self.0.neg(a.0), self.0.neg(a.1))
    }
    #[inline(always)]
    fn round(self, a: Self::F) -> Self::F {
        (self.0.round(a.0), self.0.round(a.1))
    }
    #[inline(always)]
    fn floor(self, a: Self::F) -> Self::F {
        (self.0.floor(a.0), self.0.floor(a.1))
    }
    #[inline(always)]
    fn pow2(self, i: Self::F) -> Self::F {
        (self.0.pow2(i.0), self.0.pow2(i.1))
    }
    #[inline(always)]
    fn select_ge(self, a: Self::F, b: Self::F, yes: Self::F, no: Self::F) -> Self::F {
        (self.0.select_ge(a.0, b.0, yes.0, no.0), self.0.select_ge(a.1, b.1, yes.1, no.1))
    }
    #[inline(always)]
    fn all_within(self, low: Self::F, x: Self::F, high: Self::F) -> bool {
        self.0.all_within(low.0, x.0, high.0) & self.0.all_within(low.1, x.1, high.1)
    }
    #[inline(always)]
    fn any_nan_or_inf(self, a: Self::F) -> bool {
        self.0.any_nan_or_inf(a.0) | self.0.any_nan_or_inf(a.1)
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> Self::F {
        // SAFETY: the caller's promise, for twice as many lanes.
        unsafe { (self.0.load(p), self.0.load(p.add(S::LANES))) }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const bf16) -> Self::F {
        // SAFETY: the caller's promise, for twice as many lanes.
        unsafe { (self.0.load_bf16(p), self.0.load_bf16(p.add(S::LANES))) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const f16) -> Self::F {
        // SAFETY: the caller's promise, for twice as many lanes.
        unsafe { (self.0.load_f16(p), self.0.load_f16(p.add(S::LANES))) }
    }
    #[inline(always)]
    unsafe fn store(self, v: Self::F, p: *mut f32) {
        // SAFETY: the caller's promise, for twice as many lanes.
        unsafe {
            self.0.store(v.0, p);
            self.0.store(v.1, p.add(S::LANES))
        }
    }
    #[inline(always)]
    unsafe fn narrow_f32(self, v: Self::F, p: *mut f32) {
        // SAFETY: the caller's promise, for twice as many lanes.
        unsafe {
            self.0.narrow_f32(v.0, p);
            self.0.narrow_f32(v.1, p.add(S::LANES))
        }
    }
    #[inline(always)]
    unsafe fn narrow_bf16(self, v: Self::F, p: *mut bf16) {
        // SAFETY: the caller's promise, for twice as many lanes.
        unsafe { self.0.narrow_two_bf16(v, p) }
    }
    #[inline(always)]
    unsafe fn narrow_f16(self, v: Self::F, p: *mut f16) {
        // SAFETY: the caller's promise, for twice as many lanes.
        unsafe {
            self.0.narrow_f16(v.0, p);
            self.0.narrow_f16(v.1, p.add(S::LANES))
        }
    }
    #[inline(always)]
    unsafe fn load_pairs(self, p: *const u32) -> (Self::F, Self::F) {
        // SAFETY: the caller's promise, for twice as many lanes.
        unsafe {
            let ((h0, l0), (h1, l1)) = (self.0.load_pairs(p), self.0.load_pairs(p.add(S::LANES)));
            ((h0, h1), (l0, l1))
        }
    }
    #[inline(always)]
    unsafe fn narrow_pairs(self, high: Self::F, low: Self::F, p: *mut u32) {
        // SAFETY: the caller's promise, for twice as many lanes.
        unsafe {
            self.0.narrow_pairs(high.0, low.0, p);
            self.0.narrow_pairs(high.1, low.1, p.add(S::LANES))
        }
    }
    #[inline(always)]
    unsafe fn narrow_pairs_of_numbers(self, high: Self::F, low: Self::F, p: *mut u32) {
        // SAFETY: the caller's promise, for twice as many lanes.
        unsafe {
            self.0.narrow_pairs_of_numbers(high.0, low.0, p);
            self.0.narrow_pairs_of_numbers(high.1, low.1, p.add(S::LANES))
        }
    }
    #[inline(always)]
    fn interleave(self, high: Self::F, low: Self::F) -> (Self::F, Self::F) {
        (self.0.interleave(high.0, low.0), self.0.interleave(high.1, low.1))
    }
    #[inline(always)]
    unsafe fn swap_pairs(self, from: *const u32, to: *mut u32) {
        // SAFETY: the caller's promise, for twice as many lanes.
        unsafe {
            self.0.swap_pairs(from, to);
            self.0.swap_pairs(from.add(S::LANES), to.add(S::LANES))
        }
    }
    #[inline(always)]
    unsafe fn stream_line(self, from: *const u8, to: *mut u8) {
        // SAFETY: the caller's promise, for twice as many lanes.
        unsafe { self.0.stream_line(from, to) }
    }
    #[inline(always)]
    fn fence(self) {
        self.0.fence()
    }
}
