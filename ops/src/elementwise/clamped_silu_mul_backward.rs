//! Gradient of the gated activation within limits: `gate, up, dy -> dgate, dup`, any shape.
//!
//! Formula: with `s = sigmoid(a g)`: `dgate = dy (u + 1) (s + a g s (1 - s))`, `dup = dy g s`; 0 beyond a limit.
//! Order: `(dy * (u + 1)) * (s + t)`, `t = v * (a * g)`, `v = s * (1 - s)`, 0 where v is; `dy * (g * s)`.
//! Rounding: every step once to f32; last rounding.

use crate::backend::device::{Buffer, Device, Unit};
use crate::call::Entry;
use crate::element::Stored;
use crate::elementwise::clamped_silu_mul::Clamp;
use crate::elementwise::gated::{self, Gated, gated_backward};
use crate::simd::Simd;
use crate::{Cpu, Element, Error};

/// Its kernels.
const UNIT: Unit =
    Unit::of("clamped_silu_mul_backward", include_str!("clamped_silu_mul_backward.cu"), &["clamped_silu_mul_backward"]);

/// clamped_silu_mul_backward, by name.
pub(crate) const OP: Entry = Entry {
    name: "clamped_silu_mul_backward",
    cpu: |cpu, args| gated::call(cpu, Clamp::of(args.call), args),
    device: Some(|on, args| {
        let numbers = Clamp::of(args.call).numbers();
        gated::call_on_device(on, args, &numbers)
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// [`clamped_silu_mul_backward`] on a device.
///
/// # Errors
/// As [`clamped_silu_mul_backward`]; errors of the device.
pub fn on_device<I: Stored, O: Stored>(
    device: &Device,
    clamp: Clamp,
    inputs: [&Buffer<I>; 3],
    outputs: [&mut Buffer<O>; 2],
) -> Result<(), Error> {
    clamp.check("clamped_silu_mul_backward")?;
    gated::on_device(device, "clamped_silu_mul_backward", &clamp.numbers(), inputs, outputs)
}

/// The gradients `dgate` and `dup` of [`clamped_silu_mul`](crate::clamped_silu_mul) from the gradient `dy` of its output; all slices
/// have the same length.
///
/// # Errors
/// As [`clamped_silu_mul`](crate::clamped_silu_mul).
///
/// ```
/// use samebits_ops::{Clamp, Cpu, clamped_silu_mul_backward};
///
/// // Beyond a limit nothing changes.
/// let (mut dgate, mut dup) = ([9f32; 2], [9f32; 2]);
/// let clamp = Clamp { alpha: 100.0, limit: 7.0 };
/// let inputs: [&[f32]; 3] = [&[2.0, 80.0], &[3.0, -80.0], &[1.0, 4.0]];
/// clamped_silu_mul_backward(&Cpu::best(), clamp, inputs, [&mut dgate, &mut dup])?;
/// assert_eq!((dgate, dup), ([4.0, 0.0], [2.0, 0.0]));
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn clamped_silu_mul_backward<I: Element, O: Element>(
    cpu: &Cpu,
    clamp: Clamp,
    inputs: [&[I]; 3],
    outputs: [&mut [O]; 2],
) -> Result<(), Error> {
    clamp.check("clamped_silu_mul_backward")?;
    gated_backward(cpu, "clamped_silu_mul_backward", clamp, inputs, outputs)
}

impl Gated for Clamp {
    #[inline(always)]
    fn gradients<S: Simd>(self, s: S, [gate, up, dy]: [S::F; 3], sigmoid: S::F) -> (S::F, S::F) {
        let (one, zero) = (s.splat(1.0), s.splat(0.0));
        let (g, u) = (self.gate(s, gate), self.up(s, up));
        let v = s.mul(sigmoid, s.sub(one, sigmoid));
        let t = s.mul(v, s.mul(s.splat(self.alpha), g));
        // The gate may be infinite where v is 0. A NaN stays.
        let t = s.select_ge(zero, v, zero, t);
        let dgate = s.mul(s.mul(dy, s.add(u, one)), s.add(sigmoid, t));
        let dup = self.unless_below(s, up, zero, s.mul(dy, s.mul(g, sigmoid)));
        (self.unless_above(s, gate, zero, dgate), self.unless_above(s, up, zero, dup))
    }
}
