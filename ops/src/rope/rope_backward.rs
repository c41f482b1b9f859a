//! Gradient of rotary position embedding: `dy[T,H,D], pos[T] -> dx[T,H,D]`.
//!
//! Formula: each pair of elements of dy is rotated back, by minus the angle.
//! Order: `dx1 = fma(dy1, c, dy2*s)`, `dx2 = fma(dy2, c, -(dy1*s))`: `rope` with sines of the other sign.
//! Rounding: as [`rope`](super::rope).

use crate::backend::device::{Buffer, Device, Stored};
use crate::call::{Arguments, Entry, Prepared};
use crate::element::typed;
use crate::rope::rope::{self, Rope, RopeTable, Rotations, UNIT, table_of, with_rotations, with_table};
use crate::{Cpu, Element, Error, TensorMut, TensorRef, check_len};

/// rope_backward, by name.
pub(crate) const OP: Entry = Entry {
    name: "rope_backward",
    cpu: |cpu, args| {
        let (shape, dy, dx) = (Rope::of(args.call), args.input("dy"), args.output("dx"));
        with_table(cpu, args, reversed, |table| rope::run(cpu, "rope_backward", &shape, table, dy, dx))
    },
    device: Some(|on, args| {
        let (shape, dy, dx) = (Rope::of(args.call), args.input("dy"), args.output("dx"));
        with_rotations(on, args, reversed, |table| {
            typed!(dy.dtype() => I, typed!(dx.dtype() => O, {
                let dy = dy.device("rope_backward", "dy")?;
                rope::on_device::<I, O>(on, &shape, table, dy, dx.device("rope_backward", "dx")?)
            }))
        })
    }),
    unit: Some(&UNIT),
    prepare: Some(|cpu, args| Ok(Some(Prepared::Angles("pos", reversed(cpu, args)?)))),
};

/// The rotations back from the positions of a call.
fn reversed(cpu: &Cpu, args: &Arguments) -> Result<RopeTable, Error> {
    Ok(table_of(cpu, args)?.reversed())
}

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
    rope::on_device(device, shape, back, dy, dx)
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
/// let table = RopeTable::new(&cpu, &inv_freq(10_000.0, 2), &[0, 1]);
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
    let Rope { tokens, heads, dim, .. } = *shape;
    shape.check("rope_backward")?;
    check_len("rope_backward", "dy", "[T,H,D]", dy.len(), &[tokens, heads, dim])?;
    check_len("rope_backward", "dx", "[T,H,D]", dx.len(), &[tokens, heads, dim])?;
    back.check("rope_backward", shape)?;
    let extents = [tokens, heads, dim];
    rope::run(cpu, "rope_backward", shape, back, TensorRef::of(dy, &extents), TensorMut::of(dx, &extents))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Isa, Pairing, inv_freq};

    #[test]
    fn it_is_the_page_on_every_instruction_set() {
        for (pairing, dim) in [(Pairing::Half, 2), (Pairing::Half, 74), (Pairing::Interleaved, 10)] {
            let shape = Rope { tokens: 3, heads: 2, dim, pairing };
            let table = RopeTable::new(&Cpu::best(), &inv_freq(10_000.0, dim), &[0, 7, 123_456]);
            let (_, cosines, sines) = table.parts();
            let dy: Vec<f32> = (0..6 * dim).map(|i| (i as f32 * 0.37).sin()).collect();
            let mut expected = vec![0f32; dy.len()];
            for (i, pair) in (0..3 * dim).map(|i| (i, i % (dim / 2))) {
                let (head, token) = (i / (dim / 2), i / dim);
                let (c, s) = (cosines[token * dim / 2 + pair], sines[token * dim / 2 + pair]);
                let [first, second] = match pairing {
                    Pairing::Half => [pair, pair + dim / 2],
                    Pairing::Interleaved => [2 * pair, 2 * pair + 1],
                }
                .map(|at| head * dim + at);
                expected[first] = dy[first].mul_add(c, dy[second] * s);
                expected[second] = dy[second].mul_add(c, -(dy[first] * s));
            }
            for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
                let mut dx = vec![9f32; dy.len()];
                let cpu = Cpu::new(isa, 2, usize::MAX).unwrap();
                rope_backward(&cpu, &shape, &table.reversed(), &dy, &mut dx).unwrap();
                assert_eq!(bits(&dx), bits(&expected), "{isa} {shape:?}");
            }
        }
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|v| v.to_bits()).collect()
    }
}
