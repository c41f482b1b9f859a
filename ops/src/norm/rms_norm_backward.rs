//! Gradient of root mean square normalisation: `x[R,N], w[N], dy[R,N] -> dx[R,N]`.
//!
//! Formula: with r and w' of `rms_norm` and `g = dy * w'`: `dx = r * (g - r^2 * mean(g * x) * x)`.
//! Order: `c = lanes(g*x) / f32(N)`, each lane a chain of fma; `r * fma(-((c*r)*r), x, g)`.
//! Rounding: every step once to f32; last rounding. A rounding of the forward counts as if it changed nothing.
//!
//! `add_rms_norm_backward` is the same with one addition more, and runs here.

use crate::backend::device::{Arguments, Buffer, Build, Device, Unit};
use crate::call::{self, Entry};
use crate::element::{Stored, typed, typed_pair};
use crate::norm::gradient::{Slope, weigh};
use crate::norm::rms_norm::{ROWS, Scale};
use crate::reduce::Lanes;
use crate::simd::stream::{Stream, is_large};
use crate::simd::{Kernel, OnLine, Simd};
use crate::tensor::Rows;
use crate::through_f32::{self, f32_row};
use crate::{Cpu, Element, Error, RmsNorm, TensorMut, TensorRef, check_eps, check_len};

/// Weighed gradients kept between their sum and the result, a multiple of 256. Those of a longer row are made twice.
pub(super) const KEPT: usize = 4096;

/// The op, and what it calls the input of the norm.
pub(super) type Names = [&'static str; 2];

const NAMES: Names = ["rms_norm_backward", "x"];

/// The inputs of a call.
#[derive(Clone, Copy)]
pub(super) struct Inputs<'a> {
    pub x: TensorRef<'a>,
    pub w: TensorRef<'a>,
    pub dy: TensorRef<'a>,
    pub dsum: Option<TensorRef<'a>>,
}

/// The gradient `dx[R,N]` of [`rms_norm`](crate::rms_norm)'s x from x, w and the gradient `dy[R,N]` of its output.
///
/// # Errors
/// [`Error::Length`] when a slice does not match.
///
/// ```
/// use samebits_ops::{Cpu, RmsNorm, Rounding, rms_norm_backward};
///
/// // What is longer along x has the same norm: of dy, that part is lost.
/// let shape = RmsNorm { rows: 1, n: 2, eps: 0.0, rounding: Rounding::Once, weight_offset: false };
/// let mut dx = [9f32; 2];
/// rms_norm_backward(&Cpu::best(), &shape, &[2f32, -2.0], &[1.0, 3.0], &[1.0, 1.0], &mut dx)?;
/// assert_eq!(dx, [1.0, 1.0]);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn rms_norm_backward<I: Element, O: Element>(
    cpu: &Cpu,
    shape: &RmsNorm,
    x: &[I],
    w: &[I],
    dy: &[I],
    dx: &mut [O],
) -> Result<(), Error> {
    on_slices(cpu, NAMES, shape, [x, w, dy], None, dx)
}

/// Dense rows; the first three are x, w and dy.
pub(super) fn on_slices<I: Element, O: Element>(
    cpu: &Cpu,
    names: Names,
    shape: &RmsNorm,
    [x, w, dy]: [&[I]; 3],
    dsum: Option<&[I]>,
    dx: &mut [O],
) -> Result<(), Error> {
    let extents = [shape.rows, shape.n];
    check(names, shape, [x.len(), w.len(), dy.len(), dx.len()], dsum.map(<[I]>::len))?;
    let [x, dy] = [x, dy].map(|rows| TensorRef::of(rows, &extents));
    let dsum = dsum.map(|dsum| TensorRef::of(dsum, &extents));
    let inputs = Inputs { x, w: TensorRef::of(w, &extents[1..]), dy, dsum };
    run(cpu, names, shape, inputs, TensorMut::of(dx, &extents))
}

/// Checks the lengths of x, w, dy and dx, and that of dsum.
fn check([op, name]: Names, shape: &RmsNorm, [x, w, dy, dx]: [usize; 4], dsum: Option<usize>) -> Result<(), Error> {
    let rows = [shape.rows, shape.n];
    check_eps(op, shape.eps)?;
    check_len(op, name, "[R,N]", x, &rows)?;
    check_len(op, "w", "[N]", w, &rows[1..])?;
    check_len(op, "dy", "[R,N]", dy, &rows)?;
    dsum.map_or(Ok(()), |dsum| check_len(op, "dsum", "[R,N]", dsum, &rows))?;
    check_len(op, "dx", "[R,N]", dx, &rows)
}

/// Rows of any layout.
pub(super) fn run(cpu: &Cpu, [op, name]: Names, shape: &RmsNorm, inputs: Inputs, dx: TensorMut) -> Result<(), Error> {
    let Inputs { x, w, dy, dsum } = inputs;
    x.on_host(op, name)?;
    w.on_host(op, "w")?;
    dy.on_host(op, "dy")?;
    dsum.map_or(Ok(()), |dsum| dsum.on_host(op, "dsum"))?;
    typed_pair!(x.dtype() => I, dx.dtype() => O, {
        let (w, dx) = (w.dense::<I>(op, "w")?, dx.host::<O>(op, "dx")?);
        Part::chunks(cpu, shape, [x.rows::<I>(), dy.rows::<I>()], dsum.map(|dsum| dsum.rows::<I>()), w, dx);
        Ok(())
    }, else {
        let w = f32_row(cpu, &w, 0);
        through_f32::rows(cpu, op, dx, shape.n, &|row, dx| {
            let [x, dy] = [&x, &dy].map(|rows| f32_row(cpu, rows, row));
            let dsum = dsum.map(|dsum| f32_row(cpu, &dsum, row));
            let one = [1, shape.n];
            let x = [&x, &dy].map(|row| TensorRef::of(row, &one).rows::<f32>());
            let dsum = dsum.as_ref().map(|row| TensorRef::of(row, &one).rows::<f32>());
            cpu.dispatch(Part { shape, x, dsum, first: 0, w: &w, dx, large: false });
        })
    })
}

/// Its kernel, and that of `add_rms_norm_backward`.
pub(super) const UNIT: Unit =
    Unit::of("rms_norm_backward", include_str!("rms_norm_backward.cu"), &["rms_norm_backward"]);

/// rms_norm_backward, by name.
pub(crate) const OP: Entry = Entry {
    name: "rms_norm_backward",
    cpu: |cpu, args| call(cpu, NAMES, args),
    device: Some(|on, args| call_on_device(on, NAMES, args)),
    unit: Some(&UNIT),
    prepare: None,
};

/// A call by name.
pub(super) fn call(cpu: &Cpu, names: Names, args: &mut call::Arguments) -> Result<(), Error> {
    let shape = RmsNorm::of(args.call, args.call.dim("R"), args.call.dim("N"));
    let [x, w, dy] = [names[1], "w", "dy"].map(|name| args.input(name));
    run(cpu, names, &shape, Inputs { x, w, dy, dsum: args.optional("dsum") }, args.output("dx"))
}

/// A call by name on a device.
pub(super) fn call_on_device(on: &Device, names: Names, args: &mut call::Arguments) -> Result<(), Error> {
    let [op, name] = names;
    let shape = RmsNorm::of(args.call, args.call.dim("R"), args.call.dim("N"));
    let [x, w, dy] = [name, "w", "dy"].map(|name| args.input(name));
    let (dsum, dx) = (args.optional("dsum"), args.output("dx"));
    typed!(x.dtype() => I, typed!(dx.dtype() => O, {
        let (x, w, dy) = (x.device(op, name)?, w.device(op, "w")?, dy.device(op, "dy")?);
        let dsum = dsum.map(|dsum| dsum.device(op, "dsum")).transpose()?;
        on_buffers::<I, O>(on, names, &shape, [x, w, dy], dsum, dx.device(op, "dx")?)
    }))
}

/// [`rms_norm_backward`] on a device.
///
/// # Errors
/// [`Error::Length`] when a buffer does not match; errors of the device.
pub fn on_device<I: Stored, O: Stored>(
    device: &Device,
    shape: &RmsNorm,
    x: &Buffer<I>,
    w: &Buffer<I>,
    dy: &Buffer<I>,
    dx: &mut Buffer<O>,
) -> Result<(), Error> {
    on_buffers(device, NAMES, shape, [x, w, dy], None, dx)
}

/// The first three are x, w and dy.
pub(super) fn on_buffers<I: Stored, O: Stored>(
    device: &Device,
    names: Names,
    shape: &RmsNorm,
    [x, w, dy]: [&Buffer<I>; 3],
    dsum: Option<&Buffer<I>>,
    dx: &mut Buffer<O>,
) -> Result<(), Error> {
    let RmsNorm { rows, n, .. } = *shape;
    check(names, shape, [x.len(), w.len(), dy.len(), dx.len()], dsum.map(Buffer::len))?;
    if dx.is_empty() {
        return Ok(());
    }
    let arguments = Arguments::new().buffer(x).buffer(w).buffer(dy);
    let arguments = match dsum {
        Some(dsum) => arguments.buffer(dsum).int(1),
        None => arguments.null().int(0),
    };
    let arguments = arguments.buffer(dx).long(rows).long(n).float(shape.eps).int(i32::from(shape.weight_offset));
    let (build, grid) = (Build::of::<I, O>("rms_norm_backward"), [rows.div_ceil(ROWS), 1, 1]);
    // SAFETY: lengths were checked; a warp takes a row, and the kernel leaves rows behind the last alone.
    unsafe { device.launch(build, "rms_norm_backward", grid, 128, 0, &arguments) }
}

/// Some rows, from `first` on.
struct Part<'a, I, O> {
    shape: &'a RmsNorm,
    /// x and dy.
    x: [Rows<'a, I>; 2],
    dsum: Option<Rows<'a, I>>,
    first: usize,
    w: &'a [I],
    dx: &'a mut [O],
    large: bool,
}

impl<I: Element, O: Element> Part<'_, I, O> {
    fn chunks(cpu: &Cpu, shape: &RmsNorm, x: [Rows<I>; 2], dsum: Option<Rows<I>>, w: &[I], dx: &mut [O]) {
        let per_chunk = cpu.rows_per_chunk(shape.rows, shape.n);
        let large = is_large(cpu, dx);
        cpu.chunks(dx, per_chunk * shape.n, |chunk, dx| {
            cpu.dispatch(Part { shape, x, dsum, first: chunk * per_chunk, w, dx, large });
        });
    }
}

impl<I: Element, O: Element> Kernel for Part<'_, I, O> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let count = self.dx.len() / self.shape.n.max(1);
        let mut stream = Stream::<O>::new(self.dx, self.large);
        let OnLine(kept) = &mut OnLine([0f32; KEPT]);
        for row in self.first..self.first + count {
            let [x, dy] = self.x.each_ref().map(|x| x.row(row));
            // While this row comes from the cache, the next ones come from memory.
            let [x_next, dy_next] = self.x.each_ref().map(|x| x.address(row + 1));
            match &self.dsum {
                None => {
                    let row = Row { x, w: self.w, dy, dsum: None, next: [x_next, dy_next] };
                    gradient_of_row(s, self.shape, row, kept, &mut stream);
                }
                Some(dsum) => {
                    let next = [x_next, dy_next, dsum.address(row + 1)];
                    let row = Row { x, w: self.w, dy, dsum: Some(dsum.row(row)), next };
                    gradient_of_row(s, self.shape, row, kept, &mut stream);
                }
            }
        }
        stream.end(s);
    }
}

/// A row of x and dy, and w; what is prefetched while it is written.
pub(super) struct Row<'a, I, D, const NEXT: usize> {
    pub x: &'a [I],
    pub w: &'a [I],
    pub dy: &'a [D],
    pub dsum: Option<&'a [I]>,
    pub next: [*const I; NEXT],
}

/// dx of a row as the next elements of `stream`.
#[inline(always)]
pub(super) fn gradient_of_row<S: Simd, I: Element, D: Element, O: Element, const NEXT: usize>(
    s: S,
    shape: &RmsNorm,
    row: Row<I, D, NEXT>,
    kept: &mut [f32; KEPT],
    stream: &mut Stream<O>,
) {
    let Row { x, w, dy, dsum, next } = row;
    let Scale { r, offset, .. } = Scale::of_row(s, shape, x);
    let mut lanes = Lanes::new();
    for (part, x) in x.chunks(KEPT).enumerate() {
        let from = part * KEPT;
        weigh(s, &dy[from..][..x.len()], Some(&w[from..][..x.len()]), offset, kept);
        lanes.add_products(s, &kept[..x.len()], x);
    }
    let c = s.splat(lanes.fold(s, x.len()) / x.len() as f32);
    let slope = Slope { r, factor: s.neg(s.mul(s.mul(c, r), r)), a: s.splat(0.0) };
    for (part, x_part) in x.chunks(KEPT).enumerate() {
        let (from, len) = (part * KEPT, x_part.len());
        if x.len() > KEPT {
            weigh(s, &dy[from..][..len], Some(&w[from..][..len]), offset, kept);
        }
        let next = next.map(|next| next.wrapping_add(from));
        slope.row(s, x_part, &kept[..len], dsum.map(|dsum| &dsum[from..][..len]), stream, next);
    }
}
