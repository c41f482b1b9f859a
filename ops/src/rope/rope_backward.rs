//! Gradient of rotary position embedding: `dy[T,H,D], pos[T] -> dx[T,H,D]`.
//!
//! Formula: each pair of elements of dy is rotated back, by minus the angle.
//! Order: `dx1 = fma(dy1, c, dy2*s)`, `dx2 = fma(dy2, c, -(dy1*s))`: `rope` with sines of the other sign.
//! Rounding: as [`rope`](super::rope).

use crate::backend::device::{Buffer, Device};
use crate::call::Entry;
use crate::element::{Stored, typed};
use crate::rope::rope::{Names, Rope, RopeTable, Rotations, UNIT, on_buffers, on_slices, prepare, run};
use crate::rope::rope::{with_rotations, with_table};
use crate::{Cpu, Element, Error};

const NAMES: Names = ["rope_backward", "dy", "dx"];

/// rope_backward, by name. The tables of its calls are [reversed](RopeTable::reversed).
pub(crate) const OP: Entry = Entry {
    name: "rope_backward",
    cpu: |cpu, args| {
        let (shape, dy, dx) = (Rope::of(args.call), args.input("dy"), args.output("dx"));
        with_table(cpu, args, |table| run(cpu, NAMES, &shape, table, dy, dx))
    },
    device: Some(|on, args| {
        let (shape, dy, dx) = (Rope::of(args.call), args.input("dy"), args.output("dx"));
        with_rotations(on, args, |table| {
            typed!(dy.dtype() => I, typed!(dx.dtype() => O, {
                let dy = dy.device("rope_backward", "dy")?;
                on_device::<I, O>(on, &shape, table, dy, dx.device("rope_backward", "dx")?)
            }))
        })
    }),
    unit: Some(&UNIT),
    prepare: Some(prepare),
};

/// [`rope_backward`] on a device. `back` is a copy of [`RopeTable::reversed`].
///
/// # Errors
/// As [`rope_backward`]; errors of the device.
pub fn on_device<I: Stored, O: Stored>(
    device: &Device,
    shape: &Rope,
    back: &Rotations,
    dy: &Buffer<I>,
    dx: &mut Buffer<O>,
) -> Result<(), Error> {
    on_buffers(device, NAMES, shape, back, dy, dx)
}

/// The gradient `dx[T,H,D]` of [`rope`](crate::rope())'s x from the gradient `dy[T,H,D]` of its output. `back` is the
/// [`RopeTable::reversed`] of the forward's table; it is made once, too.
///
/// # Errors
/// [`Error::Length`] when a slice or the table does not match; [`Error::Value`] when D is odd.
///
/// ```
/// use samebits_ops::{Cpu, Pairing, Rope, RopeTable, inv_freq, rope, rope_backward};
///
/// // What is rotated and rotated back is where it was, but for rounding.
/// let cpu = Cpu::best();
/// let table = RopeTable::new(&cpu, &inv_freq(10_000.0, 2)?, &[0, 1]);
/// let shape = Rope { tokens: 2, heads: 1, dim: 2, pairing: Pairing::Half };
/// let (mut y, mut back) = ([0f32; 4], [0f32; 4]);
/// rope(&cpu, &shape, &table, &[1f32, 2.0, 1.0, 0.0], &mut y)?;
/// rope_backward(&cpu, &shape, &table.reversed(), &y, &mut back)?;
/// assert!(back[..2] == [1.0, 2.0] && (back[2] - 1.0).abs() < 1e-6 && back[3].abs() < 1e-6);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn rope_backward<I: Element, O: Element>(
    cpu: &Cpu,
    shape: &Rope,
    back: &RopeTable,
    dy: &[I],
    dx: &mut [O],
) -> Result<(), Error> {
    on_slices(cpu, NAMES, shape, back, dy, dx)
}
