//! Activation: `x -> y`, any shape.
//!
//! Formula: `gelu` is x times the share of a normal distribution below x, `gelu_tanh` the same by the hyperbolic tangent, as in
//! `gelu_mul`, `relu2` the square of what of x is above 0, `xielu` `b x` and a share of the square above 0, of `e^x - 1 - x` below.
//! Order: `x * c` with c of `normal`; `x * sigmoid(C * fma(K, (x*x)*x, x))`; `m * m` with m = x above 0, else +0;
//! `fma(n, expm1(x) - x, b*x)` if x is not above 0, else `fma(p*x, x, b*x)`.
//! Rounding: every step once to f32; last rounding.

use crate::backend::device::{Buffer, Device, Unit};
use crate::call::Entry;
use crate::element::Stored;
use crate::elementwise::frame::{self, Pointwise, elementwise};
use crate::elementwise::gelu_mul::GeluMul;
use crate::math::{expm1, normal, sigmoid, softplus};
use crate::simd::Simd;
use crate::simd::scalar::Scalar;
use crate::{Cpu, Element, Error, TensorMut, TensorRef, check_len};
use samebits_schema::Call;

/// Which activation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// The gelu of the error function.
    Gelu,
    /// That of the hyperbolic tangent.
    GeluTanh,
    /// The square of what is above 0.
    Relu2,
    /// xIELU.
    Xielu(Xielu),
}

/// The numbers of an xIELU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Xielu {
    /// The share of squares above 0.
    pub alpha_p: f32,
    /// That of `e^x - 1 - x` below 0.
    pub alpha_n: f32,
    /// That of x.
    pub beta: f32,
}

impl Xielu {
    /// The beta of the published function.
    pub const BETA: f32 = 0.5;

    /// Those that two parameters make: `softplus(a)` and `BETA + softplus(b)`; and the slope of each in its parameter.
    pub fn of_parameters([a, b]: [f32; 2]) -> (Xielu, [f32; 2]) {
        let numbers = Xielu { alpha_p: softplus(a), alpha_n: Xielu::BETA + softplus(b), beta: Xielu::BETA };
        (numbers, [a, b].map(|v| sigmoid(Scalar, v)))
    }
}

impl Activation {
    /// That of a call.
    pub(super) fn of(call: &Call) -> Activation {
        match call.word("kind") {
            "gelu" => Activation::Gelu,
            "gelu_tanh" => Activation::GeluTanh,
            "relu2" => Activation::Relu2,
            _ => {
                let [alpha_p, alpha_n, beta] = ["alpha_p", "alpha_n", "beta"].map(|name| call.float(name) as f32);
                Activation::Xielu(Xielu { alpha_p, alpha_n, beta })
            }
        }
    }

    /// What its kernels are told.
    pub(super) fn numbers(&self) -> Vec<f32> {
        match *self {
            Activation::Xielu(Xielu { alpha_p, alpha_n, beta }) => vec![alpha_p, alpha_n, beta],
            _ => Vec::new(),
        }
    }
}

/// Its kernels.
const UNIT: Unit = Unit::of(
    "activate",
    include_str!("activate.cu"),
    &["activate_gelu", "activate_gelu_tanh", "activate_relu2", "activate_xielu"],
);

/// activate, by name.
pub(crate) const OP: Entry = Entry {
    name: "activate",
    cpu: |cpu, args| run(cpu, Activation::of(args.call), args.input("x"), args.output("y")),
    device: Some(|on, args| {
        let kind = Activation::of(args.call);
        frame::call_kernel(on, kernel(kind), args, &["x"], &kind.numbers())
    }),
    unit: Some(&UNIT),
    prepare: None,
};

fn kernel(kind: Activation) -> &'static str {
    match kind {
        Activation::Gelu => "activate_gelu",
        Activation::GeluTanh => "activate_gelu_tanh",
        Activation::Relu2 => "activate_relu2",
        Activation::Xielu(_) => "activate_xielu",
    }
}

/// [`activate`] on a device.
///
/// # Errors
/// [`Error::Length`] when the lengths differ; errors of the device.
pub fn on_device<I: Stored, O: Stored>(
    device: &Device,
    kind: Activation,
    x: &Buffer<I>,
    y: &mut Buffer<O>,
) -> Result<(), Error> {
    frame::launch(device, ["activate", kernel(kind)], x, None, &kind.numbers(), y)
}

/// An activation of every element; both slices have the same length.
///
/// # Errors
/// [`Error::Length`] when the lengths differ.
///
/// ```
/// use samebits_ops::{Activation, Cpu, activate};
///
/// let mut y = [9f32; 3];
/// activate(&Cpu::best(), Activation::Relu2, &[-2f32, 0.0, 3.0], &mut y)?;
/// assert_eq!(y, [0.0, 0.0, 9.0]);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn activate<I: Element, O: Element>(cpu: &Cpu, kind: Activation, x: &[I], y: &mut [O]) -> Result<(), Error> {
    check_len("activate", "y", "of x", y.len(), &[x.len()])?;
    let n = [x.len()];
    run(cpu, kind, TensorRef::of(x, &n), TensorMut::of(y, &n))
}

/// A tensor of any layout.
fn run(cpu: &Cpu, kind: Activation, x: TensorRef, y: TensorMut) -> Result<(), Error> {
    match kind {
        Activation::Gelu => elementwise(cpu, "activate", Gelu, [x; 2], y),
        Activation::GeluTanh => elementwise(cpu, "activate", GeluTanh, [x; 2], y),
        Activation::Relu2 => elementwise(cpu, "activate", Relu2, [x; 2], y),
        Activation::Xielu(numbers) => elementwise(cpu, "activate", numbers, [x; 2], y),
    }
}

#[derive(Clone, Copy)]
struct Gelu;

impl Pointwise for Gelu {
    const FIRST: bool = true;
    #[inline(always)]
    fn first<S: Simd>(self, s: S, x: S::F) -> S::F {
        normal(s, x).0
    }
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, x: S::F, share: S::F, _: S::F) -> S::F {
        s.mul(x, share)
    }
}

#[derive(Clone, Copy)]
struct GeluTanh;

impl Pointwise for GeluTanh {
    const FIRST: bool = true;
    #[inline(always)]
    fn first<S: Simd>(self, s: S, x: S::F) -> S::F {
        GeluMul.first(s, x)
    }
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, x: S::F, first: S::F, _: S::F) -> S::F {
        s.mul(x, s.div(s.splat(1.0), first))
    }
}

#[derive(Clone, Copy)]
struct Relu2;

impl Pointwise for Relu2 {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, x: S::F, _: S::F, _: S::F) -> S::F {
        let m = positive(s, x);
        s.mul(m, m)
    }
}

impl Pointwise for Xielu {
    const FIRST: bool = true;
    #[inline(always)]
    fn first<S: Simd>(self, s: S, x: S::F) -> S::F {
        expm1(s, x)
    }
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, x: S::F, first: S::F, _: S::F) -> S::F {
        let t = s.mul(s.splat(self.beta), x);
        let above = s.fma(s.mul(s.splat(self.alpha_p), x), x, t);
        let below = s.fma(s.splat(self.alpha_n), s.sub(first, x), t);
        s.select_ge(s.splat(0.0), x, below, above)
    }
}

/// x above 0, else +0; a NaN stays.
#[inline(always)]
pub(super) fn positive<S: Simd>(s: S, x: S::F) -> S::F {
    s.select_ge(s.splat(0.0), x, s.splat(0.0), x)
}
