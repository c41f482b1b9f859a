//! Multiplication by one number: `x -> y`, any shape.
//!
//! Formula: `y = x * factor`.
//! Rounding: `f32(factor)`; one f32 product; last rounding.

use crate::backend::device;
use crate::call::Entry;
use crate::element::typed;
use crate::elementwise::frame::{Pointwise, elementwise};
use crate::simd::Simd;
use crate::{Cpu, Element, Error, TensorMut, TensorRef, check_len, value_error};

/// scale, by name.
pub(crate) const OP: Entry = Entry {
    name: "scale",
    cpu: |cpu, args| {
        let op = Scale(narrowed(args.call.float("factor"))?);
        elementwise(cpu, "scale", op, [args.input("x"); 2], args.output("y"))
    },
    device: Some(|on, args| {
        let (x, y, factor) = (args.input("x"), args.output("y"), args.call.float("factor"));
        typed!(x.dtype() => I, typed!(y.dtype() => O, {
            device::scale::<I, O>(on, factor, x.device("scale", "x")?, y.device("scale", "y")?)
        }))
    }),
    prepare: None,
};

/// `y[i] = x[i] * f32(factor)`; both slices have the same length.
///
/// # Errors
/// [`Error::Length`] when the lengths differ; [`Error::Value`] when `factor` is not finite in f32.
pub fn scale<I: Element, O: Element>(cpu: &Cpu, factor: f64, x: &[I], y: &mut [O]) -> Result<(), Error> {
    check_len("scale", "y", "of x", y.len(), &[x.len()])?;
    let factor = narrowed(factor)?;
    let n = [x.len()];
    elementwise(cpu, "scale", Scale(factor), [TensorRef::of(x, &n); 2], TensorMut::of(y, &n))
}

/// `f32(factor)`, checked.
pub(crate) fn narrowed(factor: f64) -> Result<f32, Error> {
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
