//! Gradient of the soft limit: `x, dy -> dx`, any shape.
//!
//! Formula: `dx = dy * (1 - tanh(x / cap)^2)`.
//! Order: `t = tanh(x * f32(1/cap))`, `1/cap` in f64; `dy * fma(-t, t, 1)`.
//! Rounding: every step once to f32; last rounding.

use crate::backend::device::{Buffer, Device, Unit};
use crate::call::Entry;
use crate::element::Stored;
use crate::elementwise::frame::{self, Pointwise, elementwise};
use crate::elementwise::softcap::factors;
use crate::math::tanh;
use crate::simd::Simd;
use crate::{Cpu, Element, Error, TensorMut, TensorRef, check_len};

/// Its kernels.
const UNIT: Unit = Unit::of("softcap_backward", include_str!("softcap_backward.cu"), &["softcap_backward"]);

/// softcap_backward, by name.
pub(crate) const OP: Entry = Entry {
    name: "softcap_backward",
    cpu: |cpu, args| run(cpu, args.call.float("cap"), [args.input("x"), args.input("dy")], args.output("dx")),
    device: Some(|on, args| {
        let (_, inverse) = factors("softcap_backward", args.call.float("cap"))?;
        frame::call_on_device(on, args, &["x", "dy"], &[inverse])
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// [`softcap_backward`] on a device.
///
/// # Errors
/// As [`softcap_backward`]; errors of the device.
pub fn on_device<I: Stored, O: Stored>(
    device: &Device,
    cap: f64,
    x: &Buffer<I>,
    dy: &Buffer<I>,
    dx: &mut Buffer<O>,
) -> Result<(), Error> {
    let (_, inverse) = factors("softcap_backward", cap)?;
    frame::on_device(device, "softcap_backward", x, Some(("dy", dy)), &[inverse], dx)
}

/// The gradient `dx` of [`softcap`](crate::softcap)'s x from the gradient `dy` of its output; all slices have the same length.
///
/// # Errors
/// [`Error::Length`] when the lengths differ; [`Error::Value`] when `cap` or its inverse is not a positive finite f32.
///
/// ```
/// use samebits_ops::{Cpu, softcap_backward};
///
/// // At 0 the slope is 1; where the output has come to the cap it is 0.
/// let mut dx = [9f32; 2];
/// softcap_backward(&Cpu::best(), 2.0, &[0f32, 100.0], &[3.0, 3.0], &mut dx)?;
/// assert_eq!(dx, [3.0, 0.0]);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn softcap_backward<I: Element, O: Element>(
    cpu: &Cpu,
    cap: f64,
    x: &[I],
    dy: &[I],
    dx: &mut [O],
) -> Result<(), Error> {
    check_len("softcap_backward", "dy", "of x", dy.len(), &[x.len()])?;
    check_len("softcap_backward", "dx", "of x", dx.len(), &[x.len()])?;
    let n = [x.len()];
    run(cpu, cap, [TensorRef::of(x, &n), TensorRef::of(dy, &n)], TensorMut::of(dx, &n))
}

/// Tensors of any layout and one shape.
fn run(cpu: &Cpu, cap: f64, inputs: [TensorRef; 2], dx: TensorMut) -> Result<(), Error> {
    let (_, inverse) = factors("softcap_backward", cap)?;
    elementwise(cpu, "softcap_backward", SoftcapBackward { inverse }, inputs, dx)
}

#[derive(Clone, Copy)]
struct SoftcapBackward {
    inverse: f32,
}

impl Pointwise for SoftcapBackward {
    const FIRST: bool = true;
    #[inline(always)]
    fn first<S: Simd>(self, s: S, x: S::F) -> S::F {
        tanh(s, s.mul(x, s.splat(self.inverse)))
    }
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, _: S::F, tanh: S::F, dy: S::F) -> S::F {
        s.mul(dy, s.fma(s.neg(tanh), tanh, s.splat(1.0)))
    }
}
