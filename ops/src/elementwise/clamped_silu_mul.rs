//! Gated activation within limits: `gate, up -> y`, any shape.
//!
//! Formula: `y = g * sigmoid(a g) * (u + 1)` of `g = min(gate, c)` and of up between -c and c.
//! Order: `(g * sigmoid(a * g)) * (u + 1)`.
//! Rounding: `f32(alpha)` and `f32(limit)`; every step once to f32; last rounding.

use crate::backend::device::{Buffer, Device, Unit};
use crate::call::Entry;
use crate::element::Stored;
use crate::elementwise::frame::{self, Pointwise, elementwise};
use crate::math::one_plus_exp_neg;
use crate::simd::Simd;
use crate::{Cpu, Element, Error, TensorMut, TensorRef, check_len, value_error};
use samebits_schema::Call;

/// The numbers of a gated activation within limits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Clamp {
    /// The factor of the gate in the sigmoid; above 0 and finite.
    pub alpha: f32,
    /// No gate is above it, no up above it or below its negative; above 0 and finite.
    pub limit: f32,
}

impl Clamp {
    /// Those of a call.
    pub(super) fn of(call: &Call) -> Clamp {
        Clamp { alpha: call.float("alpha") as f32, limit: call.float("limit") as f32 }
    }

    /// What kernels are told.
    pub(super) fn numbers(&self) -> [f32; 2] {
        [self.alpha, self.limit]
    }

    /// Refuses what is no limit.
    pub(super) fn check(&self, op: &'static str) -> Result<(), Error> {
        match self.numbers().iter().all(|v| *v > 0.0 && v.is_finite()) {
            true => Ok(()),
            false => Err(value_error(op, format!("alpha and limit are {:?}; they must be above 0", self.numbers()))),
        }
    }

    /// The gate within its limit; a NaN stays.
    #[inline(always)]
    pub(super) fn gate<S: Simd>(self, s: S, gate: S::F) -> S::F {
        self.unless_above(s, gate, s.splat(self.limit), gate)
    }

    /// up within its limits; a NaN stays.
    #[inline(always)]
    pub(super) fn up<S: Simd>(self, s: S, up: S::F) -> S::F {
        let below = self.unless_below(s, up, s.splat(-self.limit), up);
        self.unless_above(s, up, s.splat(self.limit), below)
    }

    /// `yes` where x is above the limit, else `no`.
    #[inline(always)]
    pub(super) fn unless_above<S: Simd>(self, s: S, x: S::F, yes: S::F, no: S::F) -> S::F {
        s.select_ge(x, s.splat(self.limit.next_up()), yes, no)
    }

    /// `yes` where x is below the negative of the limit, else `no`.
    #[inline(always)]
    pub(super) fn unless_below<S: Simd>(self, s: S, x: S::F, yes: S::F, no: S::F) -> S::F {
        s.select_ge(s.splat(-self.limit.next_up()), x, yes, no)
    }
}

/// Its kernels.
const UNIT: Unit = Unit::of("clamped_silu_mul", include_str!("clamped_silu_mul.cu"), &["clamped_silu_mul"]);

/// clamped_silu_mul, by name.
pub(crate) const OP: Entry = Entry {
    name: "clamped_silu_mul",
    cpu: |cpu, args| run(cpu, Clamp::of(args.call), [args.input("gate"), args.input("up")], args.output("y")),
    device: Some(|on, args| {
        let numbers = Clamp::of(args.call).numbers();
        frame::call_on_device(on, args, &["gate", "up"], &numbers)
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// [`clamped_silu_mul`] on a device.
///
/// # Errors
/// As [`clamped_silu_mul`]; errors of the device.
pub fn on_device<I: Stored, O: Stored>(
    device: &Device,
    clamp: Clamp,
    gate: &Buffer<I>,
    up: &Buffer<I>,
    y: &mut Buffer<O>,
) -> Result<(), Error> {
    clamp.check("clamped_silu_mul")?;
    frame::on_device(device, "clamped_silu_mul", gate, Some(("up", up)), &clamp.numbers(), y)
}

/// `(g * sigmoid(alpha * g)) * (u + 1)` of the gate and of up within their limits; all slices have the same length.
///
/// # Errors
/// [`Error::Length`] when the lengths differ; [`Error::Value`] when a number is not above 0 and finite.
///
/// ```
/// use samebits_ops::{Clamp, Cpu, clamped_silu_mul};
///
/// // No gate counts for more than 7, no up for less than -7.
/// let mut y = [9f32; 2];
/// let clamp = Clamp { alpha: 100.0, limit: 7.0 };
/// clamped_silu_mul(&Cpu::best(), clamp, &[1f32, 80.0], &[1.0, -80.0], &mut y)?;
/// assert_eq!(y, [2.0, -42.0]);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn clamped_silu_mul<I: Element, O: Element>(
    cpu: &Cpu,
    clamp: Clamp,
    gate: &[I],
    up: &[I],
    y: &mut [O],
) -> Result<(), Error> {
    clamp.check("clamped_silu_mul")?;
    check_len("clamped_silu_mul", "up", "of gate", up.len(), &[gate.len()])?;
    check_len("clamped_silu_mul", "y", "of gate", y.len(), &[gate.len()])?;
    let n = [gate.len()];
    run(cpu, clamp, [TensorRef::of(gate, &n), TensorRef::of(up, &n)], TensorMut::of(y, &n))
}

/// Tensors of any layout and one shape.
fn run(cpu: &Cpu, clamp: Clamp, inputs: [TensorRef; 2], y: TensorMut) -> Result<(), Error> {
    elementwise(cpu, "clamped_silu_mul", clamp, inputs, y)
}

impl Pointwise for Clamp {
    const FIRST: bool = true;
    #[inline(always)]
    fn first<S: Simd>(self, s: S, gate: S::F) -> S::F {
        one_plus_exp_neg(s, s.mul(s.splat(self.alpha), self.gate(s, gate)))
    }
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, gate: S::F, first: S::F, up: S::F) -> S::F {
        let one = s.splat(1.0);
        s.mul(s.mul(self.gate(s, gate), s.div(one, first)), s.add(self.up(s, up), one))
    }
}
