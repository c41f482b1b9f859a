//! Multiplication by one number: `x -> y`, any shape.
//!
//! Formula: `y = x * factor`.
//! Rounding: `f32(factor)`; one f32 product; last rounding.

use crate::backend::device::{Buffer, Device, Unit};
use crate::call::Entry;
use crate::element::Stored;
use crate::elementwise::frame::{self, Pointwise, elementwise};
use crate::simd::Simd;
use crate::{Cpu, Element, Error, TensorMut, TensorRef, check_len, value_error};

/// Its kernels.
const UNIT: Unit = Unit::of("scale", include_str!("scale.cu"), &["scale"]);

/// scale, by name.
pub(crate) const OP: Entry = Entry {
    name: "scale",
    cpu: |cpu, args| run(cpu, narrowed(args.call.float("factor"))?, args.input("x"), args.output("y")),
    device: Some(|on, args| {
        let factor = narrowed(args.call.float("factor"))?;
        frame::call_on_device(on, args, &["x"], &[factor])
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// [`scale`] on a device.
///
/// # Errors
/// As [`scale`]; errors of the device.
pub fn on_device<I: Stored, O: Stored>(
    device: &Device,
    factor: f64,
    x: &Buffer<I>,
    y: &mut Buffer<O>,
) -> Result<(), Error> {
    frame::on_device(device, "scale", x, None, &[narrowed(factor)?], y)
}

/// `y[i] = x[i] * f32(factor)`; both slices have the same length.
///
/// # Errors
/// [`Error::Length`] when the lengths differ; [`Error::Value`] when `factor` is not finite in f32.
///
/// ```
/// use samebits_ops::{Cpu, scale};
///
/// let mut y = [0f32; 2];
/// scale(&Cpu::best(), 0.5, &[2f32, 4.0], &mut y)?;
/// assert_eq!(y, [1.0, 2.0]);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn scale<I: Element, O: Element>(cpu: &Cpu, factor: f64, x: &[I], y: &mut [O]) -> Result<(), Error> {
    check_len("scale", "y", "of x", y.len(), &[x.len()])?;
    let factor = narrowed(factor)?;
    let n = [x.len()];
    run(cpu, factor, TensorRef::of(x, &n), TensorMut::of(y, &n))
}

/// A tensor of any layout.
fn run(cpu: &Cpu, factor: f32, x: TensorRef, y: TensorMut) -> Result<(), Error> {
    elementwise(cpu, "scale", Scale(factor), [x; 2], y)
}

/// `f32(factor)`, checked.
fn narrowed(factor: f64) -> Result<f32, Error> {
    let factor = factor as f32;
    if !factor.is_finite() {
        return Err(value_error("scale", format!("the factor is {factor}; it must be finite in f32")));
    }
    Ok(factor)
}

#[derive(Clone, Copy)]
struct Scale(f32);

impl Pointwise for Scale {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, x: S::F, _: S::F, _: S::F) -> S::F {
        s.mul(x, s.splat(self.0))
    }
}
