//! Soft limit: `x -> y`, any shape.
//!
//! Formula: `y = cap * tanh(x / cap)`.
//! Order: `f32(cap) * tanh(x * f32(1/cap))`, `1/cap` in f64.
//! Rounding: every step once to f32; last rounding.

use crate::backend::device::{Buffer, Device, Unit};
use crate::call::Entry;
use crate::element::Stored;
use crate::elementwise::frame::{self, Pointwise, elementwise};
use crate::math::tanh;
use crate::simd::Simd;
use crate::{Cpu, Element, Error, TensorMut, TensorRef, check_len, value_error};

/// Its kernels.
const UNIT: Unit = Unit::of("softcap", include_str!("softcap.cu"), &["softcap"]);

/// softcap, by name.
pub(crate) const OP: Entry = Entry {
    name: "softcap",
    cpu: |cpu, args| run(cpu, factors("softcap", args.call.float("cap"))?, args.input("x"), args.output("y")),
    device: Some(|on, args| {
        let (cap, inverse) = factors("softcap", args.call.float("cap"))?;
        frame::call_on_device(on, args, &["x"], &[cap, inverse])
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// [`softcap`] on a device.
///
/// # Errors
/// As [`softcap`]; errors of the device.
pub fn on_device<I: Stored, O: Stored>(
    device: &Device,
    cap: f64,
    x: &Buffer<I>,
    y: &mut Buffer<O>,
) -> Result<(), Error> {
    let (cap, inverse) = factors("softcap", cap)?;
    frame::on_device(device, "softcap", x, None, &[cap, inverse], y)
}

/// `y[i] = cap * tanh(x[i] / cap)`; both slices have the same length.
///
/// # Errors
/// [`Error::Length`] when the lengths differ; [`Error::Value`] when `cap` or its inverse is not a positive finite f32.
///
/// ```
/// use samebits_ops::{Cpu, softcap};
///
/// // Nothing is larger than the cap.
/// let mut y = [9f32; 2];
/// softcap(&Cpu::best(), 2.0, &[0f32, 100.0], &mut y)?;
/// assert_eq!(y, [0.0, 2.0]);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn softcap<I: Element, O: Element>(cpu: &Cpu, cap: f64, x: &[I], y: &mut [O]) -> Result<(), Error> {
    check_len("softcap", "y", "of x", y.len(), &[x.len()])?;
    let n = [x.len()];
    run(cpu, factors("softcap", cap)?, TensorRef::of(x, &n), TensorMut::of(y, &n))
}

/// A tensor of any layout; `cap` and its inverse.
fn run(cpu: &Cpu, (cap, inverse): (f32, f32), x: TensorRef, y: TensorMut) -> Result<(), Error> {
    elementwise(cpu, "softcap", Softcap { cap, inverse }, [x; 2], y)
}

/// `f32(cap)` and `f32(1 / cap)`, checked.
pub(super) fn factors(op: &'static str, cap: f64) -> Result<(f32, f32), Error> {
    let (cap, inverse) = (cap as f32, (1.0 / cap) as f32);
    if !(cap > 0.0 && cap.is_finite() && inverse > 0.0 && inverse.is_finite()) {
        return Err(value_error(op, format!("cap is {cap}; it and its inverse must be positive and finite")));
    }
    Ok((cap, inverse))
}

#[derive(Clone, Copy)]
struct Softcap {
    cap: f32,
    inverse: f32,
}

impl Pointwise for Softcap {
    const FIRST: bool = true;
    #[inline(always)]
    fn first<S: Simd>(self, s: S, x: S::F) -> S::F {
        tanh(s, s.mul(x, s.splat(self.inverse)))
    }
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, _: S::F, tanh: S::F, _: S::F) -> S::F {
        s.mul(s.splat(self.cap), tanh)
    }
}
