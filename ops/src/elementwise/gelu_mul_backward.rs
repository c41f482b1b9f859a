//! Gradient of the gated activation: `gate, up, dy -> dgate, dup`, any shape.
//!
//! Formula: `y = act(g) * u` with `act(g) = g * s`, `s = sigmoid(a)`, `a = C (g + K g^3)`: `dgate = dy * u * act'(g)`,
//! `dup = dy * act(g)`, `act'(g) = s + s * (1 - s) * g * C (1 + 3 K g^2)`.
//! Order: `v = s * (1 - s)`, `t = v * (g * (C * fma(3K, g*g, 1)))`, 0 where v is; `(dy * u) * (s + t)`; `dy * (g * s)`.
//! Rounding: every step once to f32; last rounding.

use crate::backend::device::{Buffer, Device, Unit};
use crate::call::Entry;
use crate::element::Stored;
use crate::elementwise::gated::{self, Gated, gated_backward, of_product};
use crate::elementwise::gelu_mul::{C, GeluMul};
use crate::simd::Simd;
use crate::{Cpu, Element, Error};

/// Its kernels.
const UNIT: Unit = Unit::of("gelu_mul_backward", include_str!("gelu_mul_backward.cu"), &["gelu_mul_backward"]);

/// gelu_mul_backward, by name.
pub(crate) const OP: Entry = Entry {
    name: "gelu_mul_backward",
    cpu: |cpu, args| gated::call(cpu, GeluMul, args),
    device: Some(|on, args| gated::call_on_device(on, args, &[])),
    unit: Some(&UNIT),
    prepare: None,
};

/// [`gelu_mul_backward`] on a device.
///
/// # Errors
/// [`Error::Length`] when the lengths differ; errors of the device.
pub fn on_device<I: Stored, O: Stored>(
    device: &Device,
    inputs: [&Buffer<I>; 3],
    outputs: [&mut Buffer<O>; 2],
) -> Result<(), Error> {
    gated::on_device(device, "gelu_mul_backward", &[], inputs, outputs)
}

/// The gradients `dgate` and `dup` of [`gelu_mul`](crate::gelu_mul) from the gradient `dy` of its output; all slices have the same length.
///
/// # Errors
/// [`Error::Length`] when the lengths differ.
///
/// ```
/// use samebits_ops::{Cpu, gelu_mul_backward};
///
/// // The slope of gelu at 0 is 1/2, at a large number 1.
/// let (mut dgate, mut dup) = ([9f32; 2], [9f32; 2]);
/// gelu_mul_backward(&Cpu::best(), [&[0f32, 100.0], &[3.0, 2.0], &[1.0, 4.0]], [&mut dgate, &mut dup])?;
/// assert_eq!((dgate, dup), ([1.5, 8.0], [0.0, 400.0]));
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn gelu_mul_backward<I: Element, O: Element>(
    cpu: &Cpu,
    [gate, up, dy]: [&[I]; 3],
    [dgate, dup]: [&mut [O]; 2],
) -> Result<(), Error> {
    gated_backward(cpu, "gelu_mul_backward", GeluMul, [gate, up, dy], [dgate, dup])
}

/// `f32(3 * 0.044715)`.
const THREE_K: f32 = f32::from_bits(0x3E09_5D4F);

impl GeluMul {
    /// The slope of the activation at `gate`, whose sigmoid this is.
    #[inline(always)]
    pub(super) fn slope<S: Simd>(self, s: S, gate: S::F, sigmoid: S::F) -> S::F {
        let one = s.splat(1.0);
        let v = s.mul(sigmoid, s.sub(one, sigmoid));
        let inner = s.mul(s.splat(C), s.fma(s.splat(THREE_K), s.mul(gate, gate), one));
        // Where the sigmoid is 0 or 1, `inner` may be infinite.
        let t = s.select_ge(v, s.splat(f32::from_bits(1)), s.mul(v, s.mul(gate, inner)), s.splat(0.0));
        s.add(sigmoid, t)
    }
}

impl Gated for GeluMul {
    #[inline(always)]
    fn gradients<S: Simd>(self, s: S, inputs: [S::F; 3], sigmoid: S::F) -> (S::F, S::F) {
        of_product(s, inputs, sigmoid, self.slope(s, inputs[0], sigmoid))
    }
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn the_constant_is_rounded_once() {
        assert_eq!(THREE_K, (3.0 * 0.044715f64) as f32);
    }
}
