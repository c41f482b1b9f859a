//! Gradient of the gated activation: `gate, up, dy -> dgate, dup`, any shape.
//!
//! Formula: `y = act(g) * u` with `act(g) = g * s`, `s = sigmoid(g)`: `dgate = dy * u * act'(g)`, `dup = dy * act(g)`,
//! `act'(g) = s * (1 + g * (1 - s))`.
//! Order: `(dy * u) * (s * fma(g, 1 - s, 1))`; `dy * (g * s)`.
//! Rounding: every step once to f32; last rounding.

use crate::backend::device::{Buffer, Device, Unit};
use crate::call::Entry;
use crate::element::Stored;
use crate::elementwise::gated::{self, Gated, gated_backward, of_product};
use crate::elementwise::silu_mul::SiluMul;
use crate::simd::Simd;
use crate::{Cpu, Element, Error};

/// Its kernels.
const UNIT: Unit = Unit::of("silu_mul_backward", include_str!("silu_mul_backward.cu"), &["silu_mul_backward"]);

/// silu_mul_backward, by name.
pub(crate) const OP: Entry = Entry {
    name: "silu_mul_backward",
    cpu: |cpu, args| gated::call(cpu, SiluMul, args),
    device: Some(|on, args| gated::call_on_device(on, args, &[])),
    unit: Some(&UNIT),
    prepare: None,
};

/// [`silu_mul_backward`] on a device.
///
/// # Errors
/// [`Error::Length`] when the lengths differ; errors of the device.
pub fn on_device<I: Stored, O: Stored>(
    device: &Device,
    inputs: [&Buffer<I>; 3],
    outputs: [&mut Buffer<O>; 2],
) -> Result<(), Error> {
    gated::on_device(device, "silu_mul_backward", &[], inputs, outputs)
}

/// The gradients `dgate` and `dup` of [`silu_mul`](crate::silu_mul) from the gradient `dy` of its output; all slices have the same length.
///
/// # Errors
/// [`Error::Length`] when the lengths differ.
///
/// ```
/// use samebits_ops::{Cpu, silu_mul_backward};
///
/// // The slope of silu at 0 is 1/2, at a large number 1.
/// let (mut dgate, mut dup) = ([9f32; 2], [9f32; 2]);
/// silu_mul_backward(&Cpu::best(), [&[0f32, 100.0], &[3.0, 2.0], &[1.0, 4.0]], [&mut dgate, &mut dup])?;
/// assert_eq!((dgate, dup), ([1.5, 8.0], [0.0, 400.0]));
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn silu_mul_backward<I: Element, O: Element>(
    cpu: &Cpu,
    [gate, up, dy]: [&[I]; 3],
    [dgate, dup]: [&mut [O]; 2],
) -> Result<(), Error> {
    gated_backward(cpu, "silu_mul_backward", SiluMul, [gate, up, dy], [dgate, dup])
}

impl Gated for SiluMul {
    #[inline(always)]
    fn gradients<S: Simd>(self, s: S, inputs: [S::F; 3], sigmoid: S::F) -> (S::F, S::F) {
        let one = s.splat(1.0);
        let slope = s.mul(sigmoid, s.fma(inputs[0], s.sub(one, sigmoid), one));
        of_product(s, inputs, sigmoid, slope)
    }
}
