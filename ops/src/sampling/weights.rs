//! Weights of tokens as integers: their sums have no order that could be seen.

use crate::element::typed;
use crate::math::exp;
use crate::profile::IEEE;
use crate::simd::{Kernel, Simd, Storage, load_at, narrow_at};
use crate::{Cpu, Element, TensorRef};

/// The largest of a row; `None` where it holds a NaN or +inf, or nothing but -inf.
pub(super) fn largest(x: &[f32]) -> Option<f32> {
    if x.is_empty() {
        return None;
    }
    let (largest, _, invalid) = f32::extent(x);
    Some(largest).filter(|largest| !invalid && *largest > f32::NEG_INFINITY)
}

/// `e^(x - top)`.
pub(super) fn exponentials(cpu: &Cpu, x: &[f32], top: f32) -> Vec<f32> {
    let mut e = vec![0f32; x.len()];
    cpu.dispatch(Exponentials { x, top, e: &mut e });
    e
}

struct Exponentials<'a> {
    x: &'a [f32],
    top: f32,
    e: &'a mut [f32],
}

impl Kernel for Exponentials<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let top = s.splat(self.top);
        for at in (0..self.x.len()).step_by(S::LANES) {
            narrow_at(s, exp(s, s.sub(load_at(s, self.x, at, 0.0), top)), self.e, at);
        }
    }
}

/// Row `row` of x, widened and times `scale`.
pub(super) fn scaled(cpu: &Cpu, x: &TensorRef, row: usize, scale: f32, y: &mut [f32]) {
    typed!(x.dtype() => I, cpu.dispatch(Scaled { x: x.rows::<I>().row(row), scale, y }));
}

struct Scaled<'a, I> {
    x: &'a [I],
    scale: f32,
    y: &'a mut [f32],
}

impl<I: Element> Kernel for Scaled<'_, I> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let scale = s.splat(self.scale);
        for at in (0..self.x.len()).step_by(S::LANES) {
            narrow_at(s, s.mul(load_at(s, self.x, at, I::default()), scale), self.y, at);
        }
    }
}

/// The weight of a token whose exponential is e.
#[inline(always)]
pub(super) fn weight(e: f32) -> u64 {
    (e * IEEE.drawn) as u64
}

/// The part of `total` that 53 bits of a number below 1 stand for.
pub(super) fn share(bits: u64, total: u64) -> u64 {
    ((u128::from(bits) * u128::from(total)) >> 53) as u64
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn shares_are_exact() {
        assert_eq!([share(0, 99), share(1 << 53, 99), share((1 << 53) - 1, 99)], [0, 99, 98]);
        let (bits, total) = ((1 << 53) - 1, (1 << 62) - 1);
        assert_eq!(share(bits, total), (1 << 62) - 1 - (1 << 9));
        assert_eq!([1.0, 0.5, f32::from_bits(0x2B80_0000), 1e-20].map(weight), [1 << 40, 1 << 39, 1, 0]);
    }
}
