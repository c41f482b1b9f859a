//! Elementwise product: `a, b -> y`, any shape.
//!
//! Formula: `y = a * b`.
//! Rounding: the product once to f32; last rounding.

use crate::backend::device::{Buffer, Device, Unit};
use crate::call::Entry;
use crate::element::Stored;
use crate::elementwise::frame::{self, Pointwise, elementwise};
use crate::simd::Simd;
use crate::{Cpu, Element, Error, TensorMut, TensorRef, check_len};

/// Its kernels.
const UNIT: Unit = Unit::of("mul", include_str!("mul.cu"), &["mul"]);

/// mul, by name.
pub(crate) const OP: Entry = Entry {
    name: "mul",
    cpu: |cpu, args| run(cpu, [args.input("a"), args.input("b")], args.output("y")),
    device: Some(|on, args| frame::call_on_device(on, args, &["a", "b"], &[])),
    unit: Some(&UNIT),
    prepare: None,
};

/// [`mul`] on a device.
///
/// # Errors
/// [`Error::Length`] when the lengths differ; errors of the device.
pub fn on_device<I: Stored, O: Stored>(
    device: &Device,
    a: &Buffer<I>,
    b: &Buffer<I>,
    y: &mut Buffer<O>,
) -> Result<(), Error> {
    frame::on_device(device, "mul", a, Some(("b", b)), &[], y)
}

/// `y[i] = a[i] * b[i]`; all slices have the same length.
///
/// # Errors
/// [`Error::Length`] when the lengths differ.
///
/// ```
/// use samebits_ops::{Cpu, mul};
///
/// let mut y = [0f32; 2];
/// mul(&Cpu::best(), &[1f32, 2.0], &[3.0, 4.0], &mut y)?;
/// assert_eq!(y, [3.0, 8.0]);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn mul<I: Element, O: Element>(cpu: &Cpu, a: &[I], b: &[I], y: &mut [O]) -> Result<(), Error> {
    check_len("mul", "b", "of a", b.len(), &[a.len()])?;
    check_len("mul", "y", "of a", y.len(), &[a.len()])?;
    let n = [a.len()];
    run(cpu, [TensorRef::of(a, &n), TensorRef::of(b, &n)], TensorMut::of(y, &n))
}

/// Tensors of any layout and one shape.
pub(crate) fn run(cpu: &Cpu, inputs: [TensorRef; 2], y: TensorMut) -> Result<(), Error> {
    elementwise(cpu, "mul", Mul, inputs, y)
}

/// `a * b`.
#[derive(Clone, Copy)]
pub(crate) struct Mul;

impl Pointwise for Mul {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, a: S::F, _: S::F, b: S::F) -> S::F {
        s.mul(a, b)
    }
}
