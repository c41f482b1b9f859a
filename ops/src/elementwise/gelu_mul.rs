//! Gated activation: `gate, up -> y`, any shape.
//!
//! Formula: `y = gelu(gate) * up` with the gelu of the hyperbolic tangent,
//! `0.5 g (1 + tanh(sqrt(2/pi) (g + 0.044715 g^3)))`, which is `g * sigmoid(2 sqrt(2/pi) (g + 0.044715 g^3))`.
//! Order: `a = C * fma(K, (g*g)*g, g)`, `(g * sigmoid(a)) * u`.
//! Rounding: every step once to f32; last rounding.

use crate::backend::device::{Buffer, Device, Unit};
use crate::call::Entry;
use crate::element::Stored;
use crate::elementwise::frame::{self, Pointwise, elementwise};
use crate::math::one_plus_exp_neg;
use crate::profile::IEEE;
use crate::simd::Simd;
use crate::{Cpu, Element, Error, TensorMut, TensorRef, check_len};

/// `f32(2 * sqrt(2 / pi))`.
pub(super) const C: f32 = IEEE.gelu[0];
/// `f32(0.044715)`.
const K: f32 = IEEE.gelu[1];

/// Its kernels.
const UNIT: Unit = Unit::of("gelu_mul", include_str!("gelu_mul.cu"), &["gelu_mul"]);

/// gelu_mul, by name.
pub(crate) const OP: Entry = Entry {
    name: "gelu_mul",
    cpu: |cpu, args| run(cpu, [args.input("gate"), args.input("up")], args.output("y")),
    device: Some(|on, args| frame::call_on_device(on, args, &["gate", "up"], &[])),
    unit: Some(&UNIT),
    prepare: None,
};

/// [`gelu_mul`] on a device.
///
/// # Errors
/// [`Error::Length`] when the lengths differ; errors of the device.
pub fn on_device<I: Stored, O: Stored>(
    device: &Device,
    gate: &Buffer<I>,
    up: &Buffer<I>,
    y: &mut Buffer<O>,
) -> Result<(), Error> {
    frame::on_device(device, "gelu_mul", gate, Some(("up", up)), &[], y)
}

/// `y[i] = gelu(gate[i]) * up[i]`, the gelu of the hyperbolic tangent; all slices have the same length.
///
/// # Errors
/// [`Error::Length`] when the lengths differ.
///
/// ```
/// use samebits_ops::{Cpu, gelu_mul};
///
/// // The gelu of 0 is 0, that of a large number the number itself.
/// let mut y = [9f32; 2];
/// gelu_mul(&Cpu::best(), &[0f32, 100.0], &[3.0, 2.0], &mut y)?;
/// assert_eq!(y, [0.0, 200.0]);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn gelu_mul<I: Element, O: Element>(cpu: &Cpu, gate: &[I], up: &[I], y: &mut [O]) -> Result<(), Error> {
    check_len("gelu_mul", "up", "of gate", up.len(), &[gate.len()])?;
    check_len("gelu_mul", "y", "of gate", y.len(), &[gate.len()])?;
    let n = [gate.len()];
    run(cpu, [TensorRef::of(gate, &n), TensorRef::of(up, &n)], TensorMut::of(y, &n))
}

/// Tensors of any layout and one shape.
fn run(cpu: &Cpu, inputs: [TensorRef; 2], y: TensorMut) -> Result<(), Error> {
    elementwise(cpu, "gelu_mul", GeluMul, inputs, y)
}

#[derive(Clone, Copy)]
pub(super) struct GeluMul;

impl Pointwise for GeluMul {
    const FIRST: bool = true;
    #[inline(always)]
    fn first<S: Simd>(self, s: S, gate: S::F) -> S::F {
        let cube = s.mul(s.mul(gate, gate), gate);
        one_plus_exp_neg(s, s.mul(s.splat(C), s.fma(s.splat(K), cube, gate)))
    }
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, gate: S::F, first: S::F, up: S::F) -> S::F {
        s.mul(s.mul(gate, s.div(s.splat(1.0), first)), up)
    }
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn constants_are_rounded_once() {
        assert_eq!(C, (2.0 * (2.0 / std::f64::consts::PI).sqrt()) as f32);
        assert_eq!(K, 0.044715f64 as f32);
    }
}
