//! Gradient of normalised and rotated heads: `x[T,H,D], w[D], dy[T,H,D], pos[T] -> dx[T,H,D]`.
//!
//! Formula: dy is turned back by its position, and goes through the norm of each head.
//! Order and rounding: bit for bit `rope_backward` with an f32 output, then `rms_norm_backward` of `[T*H, D]` with that as its
//! dy; one last rounding.

use crate::backend::device::{Arguments, Buffer, Build, Device, Unit, int};
use crate::call::Entry;
use crate::element::{Stored, typed, typed_pair};
use crate::norm::rms_norm::ROWS;
use crate::norm::rms_norm_backward::{KEPT, Row, gradient_of_row};
use crate::rope::rope::{Rotations, check_even, f32_heads, prepare, rotate_head, with_rotations, with_table};
use crate::simd::stream::{Stream, is_large};
use crate::simd::{Kernel, OnLine, Simd};
use crate::tensor::Rows;
use crate::through_f32::{self, f32_row};
use crate::{Cpu, Element, Error, NormRope, RmsNorm, Rope, RopeTable, TensorMut, TensorRef, check_eps, check_len};

const NAME: &str = "norm_rope_backward";

/// The gradient `dx[T,H,D]` of [`norm_rope`](crate::norm_rope)'s x from x, w and the gradient `dy[T,H,D]` of its output. `back`
/// is the [`RopeTable::reversed`] of the forward's table.
///
/// # Errors
/// [`Error::Length`] when a slice or the table does not match; [`Error::Value`] when D is odd.
///
/// ```
/// use samebits_ops::{Cpu, NormRope, Pairing, RopeTable, Rounding, inv_freq, norm_rope_backward};
///
/// // Position 0 is rotated by nothing; what is longer along x has the same norm: of dy, that part is lost.
/// let cpu = Cpu::best();
/// let table = RopeTable::new(&cpu, &inv_freq(10_000.0, 2)?, &[0]);
/// let (rounding, pairing) = (Rounding::Once, Pairing::Half);
/// let shape = NormRope { tokens: 1, heads: 1, dim: 2, eps: 0.0, rounding, weight_offset: false, pairing };
/// let (x, w, dy, mut dx) = ([2f32, -2.0], [1.0, 3.0], [1.0, 1.0], [0f32; 2]);
/// norm_rope_backward(&cpu, &shape, &table.reversed(), &x, &w, &dy, &mut dx)?;
/// assert_eq!(dx, [1.0, 1.0]);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn norm_rope_backward<I: Element, O: Element>(
    cpu: &Cpu,
    shape: &NormRope,
    back: &RopeTable,
    x: &[I],
    w: &[I],
    dy: &[I],
    dx: &mut [O],
) -> Result<(), Error> {
    let NormRope { tokens, heads, dim, pairing, .. } = *shape;
    check(shape, [x.len(), w.len(), dy.len(), dx.len()])?;
    back.check(NAME, &Rope { tokens, heads, dim, pairing })?;
    let extents = [tokens, heads, dim];
    let [x, dy] = [x, dy].map(|heads| TensorRef::of(heads, &extents));
    run(cpu, shape, back, [x, TensorRef::of(w, &[dim]), dy], TensorMut::of(dx, &extents))
}

/// The lengths of x, w, dy and dx.
fn check(shape: &NormRope, [x, w, dy, dx]: [usize; 4]) -> Result<(), Error> {
    let NormRope { tokens, heads, dim, .. } = *shape;
    check_even(NAME, dim)?;
    check_eps(NAME, shape.eps)?;
    check_len(NAME, "x", "[T,H,D]", x, &[tokens, heads, dim])?;
    check_len(NAME, "w", "[D]", w, &[dim])?;
    check_len(NAME, "dy", "[T,H,D]", dy, &[tokens, heads, dim])?;
    check_len(NAME, "dx", "[T,H,D]", dx, &[tokens, heads, dim])
}

/// Heads of x and dy of any layout; the table has been checked.
fn run(cpu: &Cpu, shape: &NormRope, back: &RopeTable, [x, w, dy]: [TensorRef; 3], dx: TensorMut) -> Result<(), Error> {
    for (tensor, name) in [(&x, "x"), (&w, "w"), (&dy, "dy")] {
        tensor.on_host(NAME, name)?;
    }
    let NormRope { tokens, heads, dim, .. } = *shape;
    if tokens * heads * dim == 0 {
        return Ok(());
    }
    typed_pair!(x.dtype() => I, dx.dtype() => O, {
        let (w, dx) = (w.dense::<I>(NAME, "w")?, dx.host::<O>(NAME, "dx")?);
        let (heads_of, size) = ([x.rows::<I>(), dy.rows::<I>()], heads * dim);
        let per_chunk = cpu.rows_per_chunk(tokens, size);
        let large = is_large(cpu, dx);
        cpu.chunks(dx, per_chunk * size, |chunk, dx| {
            let first = chunk * per_chunk;
            cpu.dispatch(Part { shape, back, first, heads: heads_of, head: first * heads, w, dx, large });
        });
        Ok(())
    }, else {
        let w = f32_row(cpu, &w, 0);
        through_f32::rows(cpu, NAME, dx, heads * dim, &|token, dx| {
            let [x, dy] = [&x, &dy].map(|tensor| f32_heads(cpu, tensor, token, heads));
            let heads = [&x, &dy].map(|wide| TensorRef::of(wide, &[heads, dim]).rows::<f32>());
            cpu.dispatch(Part { shape, back, first: token, heads, head: 0, w: &w, dx, large: false });
        })
    })
}

/// Its kernels.
const UNIT: Unit = Unit::of(NAME, include_str!("norm_rope_backward.cu"), &["norm_rope_backward"]);

/// norm_rope_backward, by name. The tables of its calls are [reversed](RopeTable::reversed).
pub(crate) const OP: Entry = Entry {
    name: NAME,
    cpu: |cpu, args| {
        let (shape, dx) = (NormRope::of(args.call), args.output("dx"));
        let inputs = ["x", "w", "dy"].map(|name| args.input(name));
        with_table(cpu, args, |back| run(cpu, &shape, back, inputs, dx))
    },
    device: Some(|on, args| {
        let (shape, dx) = (NormRope::of(args.call), args.output("dx"));
        let [x, w, dy] = ["x", "w", "dy"].map(|name| args.input(name));
        with_rotations(on, args, |back| {
            typed!(x.dtype() => I, typed!(dx.dtype() => O, {
                let (x, w, dy) = (x.device(NAME, "x")?, w.device(NAME, "w")?, dy.device(NAME, "dy")?);
                on_device::<I, O>(on, &shape, back, x, w, dy, dx.device(NAME, "dx")?)
            }))
        })
    }),
    unit: Some(&UNIT),
    prepare: Some(prepare),
};

/// [`norm_rope_backward`] on a device. `back` is a copy of [`RopeTable::reversed`].
///
/// # Errors
/// As [`norm_rope_backward`]; errors of the device.
pub fn on_device<I: Stored, O: Stored>(
    device: &Device,
    shape: &NormRope,
    back: &Rotations,
    x: &Buffer<I>,
    w: &Buffer<I>,
    dy: &Buffer<I>,
    dx: &mut Buffer<O>,
) -> Result<(), Error> {
    let NormRope { tokens, heads, dim, eps, weight_offset, pairing, .. } = *shape;
    back.check(NAME, tokens, dim)?;
    check(shape, [x.len(), w.len(), dy.len(), dx.len()])?;
    if dx.is_empty() {
        return Ok(());
    }
    int(NAME, "H * D", heads * dim)?;
    let arguments = Arguments::new()
        .buffer(x)
        .buffer(w)
        .buffer(dy)
        .buffer(&back.cos)
        .buffer(&back.sin)
        .buffer(dx)
        .long(tokens * heads)
        .int(heads as i32)
        .int(dim as i32)
        .float(eps)
        .int(i32::from(weight_offset))
        .int(pairing.interleaved());
    let grid = [(tokens * heads).div_ceil(ROWS), 1, 1];
    // SAFETY: lengths were checked, those of the table too; a warp takes a head, and the kernel leaves those behind the last
    // alone.
    unsafe { device.launch(Build::of::<I, O>(NAME), NAME, grid, 128, 0, &arguments) }
}

/// Some tokens, from `first` on.
struct Part<'a, I, O> {
    shape: &'a NormRope,
    back: &'a RopeTable,
    first: usize,
    /// Those of x and of dy.
    heads: [Rows<'a, I>; 2],
    /// The row of them that is the first head.
    head: usize,
    w: &'a [I],
    dx: &'a mut [O],
    large: bool,
}

impl<I: Element, O: Element> Kernel for Part<'_, I, O> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let NormRope { heads, dim, eps, rounding, weight_offset, pairing, .. } = *self.shape;
        let norm = RmsNorm { rows: 1, n: dim, eps, rounding, weight_offset };
        let (mut turned, OnLine(kept)) = (vec![0f32; dim], &mut OnLine([0f32; KEPT]));
        let tokens = self.dx.len() / (heads * dim);
        let mut stream = Stream::<O>::new(self.dx, self.large);
        for head in 0..tokens * heads {
            let [x, dy] = self.heads.each_ref().map(|rows| rows.row(self.head + head));
            rotate_head(s, pairing, self.back.row(self.first + head / heads), dy, &mut turned);
            let row = Row { x, w: self.w, dy: &turned[..], dsum: None, next: [] };
            gradient_of_row(s, &norm, row, kept, &mut stream);
        }
        stream.end(s);
    }
}
