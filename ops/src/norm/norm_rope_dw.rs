//! Gradient of the weight of normalised and rotated heads:
//! `x[T,H,D], dy[T,H,D], pos[T], mask[T]?, carry[64,D]? (f32) -> dw[64,D]` (f32).
//!
//! Formula: dy is turned back by its position; then `rms_norm_dw` over heads, those of a token side by side.
//! Order and rounding: bit for bit `rope_backward` with an f32 output, then `rms_norm_dw` of `[T*H, D]` with that as its dy.

use crate::backend::device::{Arguments, Buffer, Build, Device, Unit, int};
use crate::call::Entry;
use crate::element::{Stored, typed};
use crate::norm::rms_norm_dw::add_row;
use crate::rope::rope::{Rotations, check_even, prepare, rotate_head, with_rotations, with_table};
use crate::simd::{Kernel, Simd};
use crate::tensor::Rows;
use crate::token::chains::{Tokens, Turns, begin};
use crate::token::device;
use crate::{Cpu, Element, Error, NormRope, RmsNorm, Rope, RopeTable, TensorRef, check_eps, check_len};

const NAME: &str = "norm_rope_dw";

/// Adds the gradients of [`norm_rope`](crate::norm_rope)'s w that the heads `x[T,H,D]` and `dy[T,H,D]` make, as far as their
/// tokens are no padding, to the 64 sums `dw[64,D]`, which go on from what they hold. `back` is the
/// [`RopeTable::reversed`] of the forward's table; `shape.weight_offset` changes nothing.
///
/// # Errors
/// [`Error::Length`] when a slice or the table does not match; [`Error::Value`] when D is odd.
///
/// ```
/// use samebits_ops::{Cpu, NormRope, Pairing, RopeTable, Rounding, Tokens, inv_freq, norm_rope_dw};
///
/// // Position 0 is rotated by nothing.
/// let cpu = Cpu::best();
/// let back = RopeTable::new(&cpu, &inv_freq(10_000.0, 2)?, &[0]).reversed();
/// let (rounding, pairing) = (Rounding::Once, Pairing::Half);
/// let shape = NormRope { tokens: 1, heads: 1, dim: 2, eps: 0.0, rounding, weight_offset: false, pairing };
/// let mut dw = [0f32; 128];
/// norm_rope_dw(&cpu, &shape, &back, Tokens::default(), &[2f32, -2.0], &[1.0, 3.0], &mut dw)?;
/// assert_eq!(dw[..2], [1.0, -3.0]);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn norm_rope_dw<I: Element>(
    cpu: &Cpu,
    shape: &NormRope,
    back: &RopeTable,
    tokens: Tokens,
    x: &[I],
    dy: &[I],
    dw: &mut [f32],
) -> Result<(), Error> {
    let NormRope { tokens: count, heads, dim, pairing, .. } = *shape;
    let extents = [count, heads, dim];
    check_even(NAME, dim)?;
    check_eps(NAME, shape.eps)?;
    check_len(NAME, "x", "[T,H,D]", x.len(), &extents)?;
    check_len(NAME, "dy", "[T,H,D]", dy.len(), &extents)?;
    back.check(NAME, &Rope { tokens: count, heads, dim, pairing })?;
    run(cpu, shape, back, tokens, [x, dy].map(|heads| TensorRef::of(heads, &extents)), dw)
}

/// Heads of any layout; the table has been checked.
fn run(
    cpu: &Cpu,
    shape: &NormRope,
    back: &RopeTable,
    tokens: Tokens,
    [x, dy]: [TensorRef; 2],
    dw: &mut [f32],
) -> Result<(), Error> {
    typed!(x.dtype() => I, {
        let rows = [x.rows::<I>(), dy.rows::<I>()];
        tokens.sum(cpu, [NAME, "dw"], [shape.tokens, shape.heads, shape.dim], dw, |turns, dw| {
            cpu.dispatch(Part { shape, back, rows, turns, dw });
        })
    })
}

/// Its kernel.
const UNIT: Unit = Unit::of(NAME, include_str!("norm_rope_dw.cu"), &["norm_rope_dw"]);

/// norm_rope_dw, by name. The tables of its calls are [reversed](RopeTable::reversed).
pub(crate) const OP: Entry = Entry {
    name: NAME,
    cpu: |cpu, args| {
        let (shape, tokens) = (NormRope::of(args.call), Tokens::of(args)?);
        let (rows, dw) = begin(cpu, args, ["x", "dy"], "dw")?;
        with_table(cpu, args, |back| run(cpu, &shape, back, tokens, rows, dw))
    },
    device: Some(|on, args| {
        let (shape, dw) = (NormRope::of(args.call), args.output("dw"));
        let [x, dy] = ["x", "dy"].map(|name| args.input(name));
        with_rotations(on, args, |back| {
            device::with_tokens(on, args, |tokens, carry| {
                typed!(x.dtype() => I, {
                    let (x, dy) = (x.device(NAME, "x")?, dy.device(NAME, "dy")?);
                    on_device::<I>(on, &shape, back, tokens, [x, dy], carry, dw.device(NAME, "dw")?)
                })
            })
        })
    }),
    unit: Some(&UNIT),
    prepare: Some(prepare),
};

/// [`norm_rope_dw`] on a device, from `carry[64,D]` or +0; the first two are x and dy. `back` is a copy of
/// [`RopeTable::reversed`].
///
/// # Errors
/// As [`norm_rope_dw`]; errors of the device.
pub fn on_device<I: Stored>(
    on: &Device,
    shape: &NormRope,
    back: &Rotations,
    tokens: device::Tokens,
    [x, dy]: [&Buffer<I>; 2],
    carry: Option<&Buffer<f32>>,
    dw: &mut Buffer<f32>,
) -> Result<(), Error> {
    let NormRope { tokens: count, heads, dim, eps, rounding, pairing, .. } = *shape;
    check_even(NAME, dim)?;
    back.check(NAME, count, dim)?;
    check_eps(NAME, shape.eps)?;
    check_len(NAME, "x", "[T,H,D]", x.len(), &[count, heads, dim])?;
    check_len(NAME, "dy", "[T,H,D]", dy.len(), &[count, heads, dim])?;
    tokens.check([NAME, "dw"], [count, dim], carry, dw)?;
    if dim == 0 {
        return Ok(());
    }
    let inputs = Arguments::new().buffer(x).buffer(dy).buffer(&back.cos).buffer(&back.sin);
    let arguments = tokens
        .arguments(inputs, carry, dw)
        .long(count * heads)
        .int(int(NAME, "H", heads)?)
        .int(int(NAME, "D", dim)?)
        .int(tokens.start(heads))
        .float(eps)
        .int(rounding.hf())
        .int(pairing.interleaved());
    // SAFETY: lengths were checked, those of the table too, and these are the kernel's arguments.
    unsafe { device::launch(on, Build::of::<I, f32>(NAME), NAME, dim, &arguments) }
}

/// Some chains.
struct Part<'a, I> {
    shape: &'a NormRope,
    back: &'a RopeTable,
    /// Heads of x and of dy.
    rows: [Rows<'a, I>; 2],
    turns: Turns<'a>,
    dw: &'a mut [f32],
}

impl<I: Element> Kernel for Part<'_, I> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let NormRope { heads, dim, eps, rounding, weight_offset, pairing, .. } = *self.shape;
        let norm = RmsNorm { rows: 1, n: dim, eps, rounding, weight_offset };
        let mut turned = vec![0f32; dim];
        while let Some((row, chain)) = self.turns.next() {
            let [x, dy] = self.rows.each_ref().map(|rows| rows.row(row));
            rotate_head(s, pairing, self.back.row(row / heads), dy, &mut turned);
            add_row(s, &norm, x, &turned, &mut self.dw[chain * dim..][..dim]);
        }
    }
}
