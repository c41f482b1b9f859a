//! Gated activation: `gate, up -> y`, any shape.
//!
//! Formula: `y = gate * sigmoid(gate) * up`, `sigmoid(x) = 1 / (1 + e^-x)`.
//! Order: `(g * sigmoid(g)) * u`.
//! Rounding: every step once to f32; last rounding.

use crate::backend::device::{Buffer, Device, Unit};
use crate::call::Entry;
use crate::element::Stored;
use crate::elementwise::frame::{self, Pointwise, elementwise};
use crate::math::one_plus_exp_neg;
use crate::simd::Simd;
use crate::{Cpu, Element, Error, TensorMut, TensorRef, check_len};

/// Its kernels.
const UNIT: Unit = Unit::of("silu_mul", include_str!("silu_mul.cu"), &["silu_mul"]);

/// silu_mul, by name.
pub(crate) const OP: Entry = Entry {
    name: "silu_mul",
    cpu: |cpu, args| run(cpu, [args.input("gate"), args.input("up")], args.output("y")),
    device: Some(|on, args| frame::call_on_device(on, args, &["gate", "up"], &[])),
    unit: Some(&UNIT),
    prepare: None,
};

/// [`silu_mul`] on a device.
///
/// # Errors
/// [`Error::Length`] when the lengths differ; errors of the device.
pub fn on_device<I: Stored, O: Stored>(
    device: &Device,
    gate: &Buffer<I>,
    up: &Buffer<I>,
    y: &mut Buffer<O>,
) -> Result<(), Error> {
    frame::on_device(device, "silu_mul", gate, Some(("up", up)), &[], y)
}

/// `y[i] = (gate[i] * sigmoid(gate[i])) * up[i]`; all slices have the same length.
///
/// # Errors
/// [`Error::Length`] when the lengths differ.
///
/// ```
/// use samebits_ops::{Cpu, silu_mul};
///
/// // The silu of 0 is 0, that of a large number the number itself.
/// let mut y = [9f32; 2];
/// silu_mul(&Cpu::best(), &[0f32, 100.0], &[3.0, 2.0], &mut y)?;
/// assert_eq!(y, [0.0, 200.0]);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn silu_mul<I: Element, O: Element>(cpu: &Cpu, gate: &[I], up: &[I], y: &mut [O]) -> Result<(), Error> {
    check_len("silu_mul", "up", "of gate", up.len(), &[gate.len()])?;
    check_len("silu_mul", "y", "of gate", y.len(), &[gate.len()])?;
    let n = [gate.len()];
    run(cpu, [TensorRef::of(gate, &n), TensorRef::of(up, &n)], TensorMut::of(y, &n))
}

/// Tensors of any layout and one shape.
fn run(cpu: &Cpu, inputs: [TensorRef; 2], y: TensorMut) -> Result<(), Error> {
    elementwise(cpu, "silu_mul", SiluMul, inputs, y)
}

#[derive(Clone, Copy)]
pub(super) struct SiluMul;

impl Pointwise for SiluMul {
    const FIRST: bool = true;
    #[inline(always)]
    fn first<S: Simd>(self, s: S, gate: S::F) -> S::F {
        one_plus_exp_neg(s, gate)
    }
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, gate: S::F, first: S::F, up: S::F) -> S::F {
        s.mul(s.mul(gate, s.div(s.splat(1.0), first)), up)
    }
}
