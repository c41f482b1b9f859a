//! Normalised and rotated heads in one: `x[T,H,D], w[D], pos[T] -> y[T,H,D]`.
//!
//! Formula: `y = rope(rms_norm(x, w))`, the norm over each head.
//! Order and rounding: bit for bit `rms_norm` of `[T*H, D]` with an f32 output, then `rope` of that; one last rounding.

use crate::backend::device::{Arguments, Buffer, Build, Device, Unit, int};
use crate::call::Entry;
use crate::element::{Stored, typed, typed_pair};
use crate::norm::rms_norm::{ROWS, Scale, Weights};
use crate::rope::rope::{Rotations, f32_heads, prepare, rotate_head, with_rotations, with_table};
use crate::simd::stream::{BLOCK, Stream, is_large};
use crate::simd::{Kernel, Simd};
use crate::tensor::Rows;
use crate::through_f32::{self, f32_row};
use crate::{
    Cpu, Element, Error, Pairing, RmsNorm, Rope, RopeTable, Rounding, TensorMut, TensorRef, check_eps, check_len,
    value_error,
};
use samebits_schema::Call;

/// Dimensions and parameters of `norm_rope`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormRope {
    /// Tokens T.
    pub tokens: usize,
    /// Heads H.
    pub heads: usize,
    /// Head dimension D, even.
    pub dim: usize,
    /// As in [`RmsNorm`].
    pub eps: f32,
    /// As in [`RmsNorm`].
    pub rounding: Rounding,
    /// As in [`RmsNorm`].
    pub weight_offset: bool,
    /// Which elements rotate together.
    pub pairing: Pairing,
}

/// `x[T,H,D], w[D] -> y[T,H,D]`, row-major; row t of the table belongs to token t.
///
/// # Errors
/// [`Error::Length`] when a slice or the table does not match; [`Error::Value`] when D is odd.
///
/// ```
/// use samebits_ops::{Cpu, NormRope, Pairing, RopeTable, Rounding, inv_freq, norm_rope};
///
/// // Position 0 is rotated by nothing: what is left is the norm.
/// let cpu = Cpu::best();
/// let table = RopeTable::new(&cpu, &inv_freq(10_000.0, 2)?, &[0]);
/// let (rounding, pairing) = (Rounding::Once, Pairing::Half);
/// let shape = NormRope { tokens: 1, heads: 1, dim: 2, eps: 0.0, rounding, weight_offset: false, pairing };
/// let mut y = [0f32; 2];
/// norm_rope(&cpu, &shape, &table, &[2f32, -2.0], &[1.0, 3.0], &mut y)?;
/// assert_eq!(y, [1.0, -3.0]);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn norm_rope<I: Element, O: Element>(
    cpu: &Cpu,
    shape: &NormRope,
    table: &RopeTable,
    x: &[I],
    w: &[I],
    y: &mut [O],
) -> Result<(), Error> {
    let NormRope { tokens, heads, dim, pairing, .. } = *shape;
    if dim % 2 != 0 {
        return Err(value_error("norm_rope", format!("the head dimension is {dim}; it must be even")));
    }
    check_eps("norm_rope", shape.eps)?;
    check_len("norm_rope", "x", "[T,H,D]", x.len(), &[tokens, heads, dim])?;
    check_len("norm_rope", "w", "[D]", w.len(), &[dim])?;
    check_len("norm_rope", "y", "[T,H,D]", y.len(), &[tokens, heads, dim])?;
    table.check("norm_rope", &Rope { tokens, heads, dim, pairing })?;
    let extents = [tokens, heads, dim];
    run(cpu, shape, table, [TensorRef::of(x, &extents), TensorRef::of(w, &[dim])], TensorMut::of(y, &extents))
}

/// Heads of x of any layout; the table has been checked.
fn run(cpu: &Cpu, shape: &NormRope, table: &RopeTable, [x, w]: [TensorRef; 2], y: TensorMut) -> Result<(), Error> {
    x.on_host("norm_rope", "x")?;
    w.on_host("norm_rope", "w")?;
    let NormRope { tokens, heads, dim, .. } = *shape;
    if tokens * heads * dim == 0 {
        return Ok(());
    }
    typed_pair!(x.dtype() => I, y.dtype() => O, {
        let (w, y) = (w.dense::<I>("norm_rope", "w")?, y.host::<O>("norm_rope", "y")?);
        Part::chunks(cpu, shape, table, x.rows::<I>(), w, y);
        Ok(())
    }, else {
        let w = f32_row(cpu, &w, 0);
        through_f32::rows(cpu, "norm_rope", y, heads * dim, &|token, y| {
            let x = f32_heads(cpu, &x, token, heads);
            let x = TensorRef::of(&x, &[heads, dim]);
            cpu.dispatch(Part { shape, table, first: token, x: x.rows::<f32>(), head: 0, w: &w, y, large: false });
        })
    })
}

/// Its kernels.
const UNIT: Unit = Unit::of("norm_rope", include_str!("norm_rope.cu"), &["norm_rope"]);

/// norm_rope, by name.
pub(crate) const OP: Entry = Entry {
    name: "norm_rope",
    cpu: |cpu, args| {
        let (shape, x, y) = (NormRope::of(args.call), ["x", "w"].map(|name| args.input(name)), args.output("y"));
        with_table(cpu, args, |table| run(cpu, &shape, table, x, y))
    },
    device: Some(|on, args| {
        let (shape, [x, w], y) = (NormRope::of(args.call), ["x", "w"].map(|name| args.input(name)), args.output("y"));
        with_rotations(on, args, |table| {
            typed!(x.dtype() => I, typed!(y.dtype() => O, {
                let (x, w) = (x.device("norm_rope", "x")?, w.device("norm_rope", "w")?);
                on_device::<I, O>(on, &shape, table, x, w, y.device("norm_rope", "y")?)
            }))
        })
    }),
    unit: Some(&UNIT),
    prepare: Some(prepare),
};

/// [`norm_rope`] on a device.
///
/// # Errors
/// As [`norm_rope`]; errors of the device.
pub fn on_device<I: Stored, O: Stored>(
    device: &Device,
    shape: &NormRope,
    table: &Rotations,
    x: &Buffer<I>,
    w: &Buffer<I>,
    y: &mut Buffer<O>,
) -> Result<(), Error> {
    let NormRope { tokens, heads, dim, eps, weight_offset, pairing, .. } = *shape;
    table.check("norm_rope", tokens, dim)?;
    check_eps("norm_rope", shape.eps)?;
    check_len("norm_rope", "x", "[T,H,D]", x.len(), &[tokens, heads, dim])?;
    check_len("norm_rope", "w", "[D]", w.len(), &[dim])?;
    check_len("norm_rope", "y", "[T,H,D]", y.len(), &[tokens, heads, dim])?;
    if y.is_empty() {
        return Ok(());
    }
    int("norm_rope", "H * D", heads * dim)?;
    let arguments = Arguments::new()
        .buffer(x)
        .buffer(w)
        .buffer(&table.cos)
        .buffer(&table.sin)
        .buffer(y)
        .long(tokens * heads)
        .int(heads as i32)
        .int(dim as i32)
        .float(eps)
        .int(shape.rounding.hf())
        .int(i32::from(weight_offset))
        .int(pairing.interleaved());
    let grid = [(tokens * heads).div_ceil(ROWS), 1, 1];
    // SAFETY: lengths were checked, those of the table too.
    unsafe { device.launch(Build::of::<I, O>("norm_rope"), "norm_rope", grid, 128, 0, &arguments) }
}

impl NormRope {
    /// The parameters of a call.
    pub(crate) fn of(call: &Call) -> NormRope {
        let Rope { tokens, heads, dim, pairing } = Rope::of(call);
        let RmsNorm { eps, rounding, weight_offset, .. } = RmsNorm::of(call, tokens, dim);
        NormRope { tokens, heads, dim, eps, rounding, weight_offset, pairing }
    }
}

/// Some tokens, from `first` on.
struct Part<'a, I, O> {
    shape: &'a NormRope,
    table: &'a RopeTable,
    first: usize,
    x: Rows<'a, I>,
    /// The row of x that is the first head.
    head: usize,
    w: &'a [I],
    y: &'a mut [O],
    large: bool,
}

impl<I: Element, O: Element> Part<'_, I, O> {
    fn chunks(cpu: &Cpu, shape: &NormRope, table: &RopeTable, x: Rows<I>, w: &[I], y: &mut [O]) {
        let size = shape.heads * shape.dim;
        let per_chunk = cpu.rows_per_chunk(shape.tokens, size);
        let large = shape.dim <= BLOCK && is_large(cpu, y);
        cpu.chunks(y, per_chunk * size, |chunk, y| {
            let first = chunk * per_chunk;
            cpu.dispatch(Part { shape, table, first, x, head: first * shape.heads, w, y, large });
        });
    }
}

impl<I: Element, O: Element> Kernel for Part<'_, I, O> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let NormRope { heads, dim, eps, rounding, weight_offset, pairing, .. } = *self.shape;
        let norm = RmsNorm { rows: 1, n: dim, eps, rounding, weight_offset };
        const NO_ROW: [*const f32; 0] = [];
        let mut normed = vec![0f32; dim];
        let tokens = self.first..self.first + self.y.len() / (heads * dim);
        let mut stream = Stream::<O>::new(self.y, self.large);
        for t in tokens {
            let angles = self.table.row(t);
            // A large output is made of whole heads at a time.
            let at_once = (BLOCK / dim).max(1);
            for from in (0..heads).step_by(at_once) {
                let some = from..heads.min(from + at_once);
                let y = stream.room(some.len() * dim);
                let len = y.len();
                for (h, y) in some.zip(y.chunks_exact_mut(dim)) {
                    let x = self.x.row(self.head + (t - self.first) * heads + h);
                    let scale = Scale::of_row(s, &norm, x);
                    scale.row(s, x, Weights::of(self.w), &mut Stream::<f32>::new(&mut normed, false), NO_ROW);
                    rotate_head(s, pairing, angles, &normed, y);
                }
                stream.put(s, len);
            }
        }
        stream.end(s);
    }
}
