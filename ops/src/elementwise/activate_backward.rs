//! Gradient of an activation: `x, dy -> dx`, any shape.
//!
//! Formula: `dx = dy * act'(x)`: of `gelu` the share c of a normal distribution below x plus x times its density, of `gelu_tanh`
//! as in `gelu_mul_backward`, of `relu2` twice what of x is above 0, of `xielu` b and twice x or `e^x - 1` times its share.
//! Order: `dy * (c + d)`, `d = x * (e * f32(1/sqrt(2 pi)))`, 0 where e is; `dy * (s + t)`; `dy * (m + m)`;
//! `dy * fma(n, expm1(x), b)` if x is not above 0, else `dy * fma(p + p, x, b)`.
//! Rounding: every step once to f32; last rounding.

use crate::backend::device::{Buffer, Device, Unit};
use crate::call::Entry;
use crate::element::Stored;
use crate::elementwise::activate::{self, Activation, positive};
use crate::elementwise::frame::{self, Pointwise, elementwise};
use crate::elementwise::gelu_mul::GeluMul;
use crate::math::{expm1, normal};
use crate::profile::IEEE;
use crate::simd::Simd;
use crate::{Cpu, Element, Error, TensorMut, TensorRef, check_len};

/// Its kernels.
const UNIT: Unit = Unit::of(
    "activate_backward",
    include_str!("activate_backward.cu"),
    &["activate_backward_gelu", "activate_backward_gelu_tanh", "activate_backward_relu2", "activate_backward_xielu"],
);

/// activate_backward, by name.
pub(crate) const OP: Entry = Entry {
    name: "activate_backward",
    cpu: |cpu, args| run(cpu, Activation::of(args.call), [args.input("x"), args.input("dy")], args.output("dx")),
    device: Some(|on, args| {
        let kind = Activation::of(args.call);
        frame::call_kernel(on, kernel(kind), args, &["x", "dy"], &kind.numbers())
    }),
    unit: Some(&UNIT),
    prepare: None,
};

fn kernel(kind: Activation) -> &'static str {
    match kind {
        Activation::Gelu => "activate_backward_gelu",
        Activation::GeluTanh => "activate_backward_gelu_tanh",
        Activation::Relu2 => "activate_backward_relu2",
        Activation::Xielu(_) => "activate_backward_xielu",
    }
}

/// [`activate_backward`] on a device.
///
/// # Errors
/// [`Error::Length`] when the lengths differ; errors of the device.
pub fn on_device<I: Stored, O: Stored>(
    device: &Device,
    kind: Activation,
    x: &Buffer<I>,
    dy: &Buffer<I>,
    dx: &mut Buffer<O>,
) -> Result<(), Error> {
    frame::launch(device, ["activate_backward", kernel(kind)], x, Some(("dy", dy)), &kind.numbers(), dx)
}

/// The gradient `dx` of [`activate`](crate::activate)'s x from the gradient `dy` of its output; all slices have the same length.
///
/// # Errors
/// [`Error::Length`] when the lengths differ.
///
/// ```
/// use samebits_ops::{Activation, Cpu, activate_backward};
///
/// // The slope of gelu at 0 is 1/2, at a large number 1.
/// let mut dx = [9f32; 2];
/// activate_backward(&Cpu::best(), Activation::Gelu, &[0f32, 100.0], &[3.0, 3.0], &mut dx)?;
/// assert_eq!(dx, [1.5, 3.0]);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn activate_backward<I: Element, O: Element>(
    cpu: &Cpu,
    kind: Activation,
    x: &[I],
    dy: &[I],
    dx: &mut [O],
) -> Result<(), Error> {
    check_len("activate_backward", "dy", "of x", dy.len(), &[x.len()])?;
    check_len("activate_backward", "dx", "of x", dx.len(), &[x.len()])?;
    let n = [x.len()];
    run(cpu, kind, [TensorRef::of(x, &n), TensorRef::of(dy, &n)], TensorMut::of(dx, &n))
}

/// Tensors of any layout and one shape.
fn run(cpu: &Cpu, kind: Activation, inputs: [TensorRef; 2], dx: TensorMut) -> Result<(), Error> {
    match kind {
        Activation::Gelu => elementwise(cpu, "activate_backward", Gelu, inputs, dx),
        Activation::GeluTanh => elementwise(cpu, "activate_backward", GeluTanh, inputs, dx),
        Activation::Relu2 => elementwise(cpu, "activate_backward", Relu2, inputs, dx),
        Activation::Xielu(numbers) => elementwise(cpu, "activate_backward", Xielu(numbers), inputs, dx),
    }
}

#[derive(Clone, Copy)]
struct Gelu;

impl Pointwise for Gelu {
    const FIRST: bool = true;
    #[inline(always)]
    fn first<S: Simd>(self, s: S, x: S::F) -> S::F {
        let (share, e) = normal(s, x);
        let d = s.mul(x, s.mul(e, s.splat(IEEE.normal_density)));
        // x may be infinite where e is 0.
        s.add(share, s.select_ge(e, s.splat(f32::from_bits(1)), d, s.splat(0.0)))
    }
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, _: S::F, slope: S::F, dy: S::F) -> S::F {
        s.mul(dy, slope)
    }
}

#[derive(Clone, Copy)]
struct GeluTanh;

impl Pointwise for GeluTanh {
    const FIRST: bool = true;
    #[inline(always)]
    fn first<S: Simd>(self, s: S, x: S::F) -> S::F {
        let sigmoid = s.div(s.splat(1.0), GeluMul.first(s, x));
        GeluMul.slope(s, x, sigmoid)
    }
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, _: S::F, slope: S::F, dy: S::F) -> S::F {
        s.mul(dy, slope)
    }
}

#[derive(Clone, Copy)]
struct Relu2;

impl Pointwise for Relu2 {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, x: S::F, _: S::F, dy: S::F) -> S::F {
        let m = positive(s, x);
        s.mul(dy, s.add(m, m))
    }
}

#[derive(Clone, Copy)]
struct Xielu(activate::Xielu);

impl Pointwise for Xielu {
    const FIRST: bool = true;
    #[inline(always)]
    fn first<S: Simd>(self, s: S, x: S::F) -> S::F {
        let (p, n, b) = (s.splat(self.0.alpha_p), s.splat(self.0.alpha_n), s.splat(self.0.beta));
        s.select_ge(s.splat(0.0), x, s.fma(n, expm1(s, x), b), s.fma(s.add(p, p), x, b))
    }
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, _: S::F, slope: S::F, dy: S::F) -> S::F {
        s.mul(dy, slope)
    }
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn the_density_is_rounded_once() {
        assert_eq!(IEEE.normal_density, (1.0 / (2.0 * std::f64::consts::PI).sqrt()) as f32);
    }
}
