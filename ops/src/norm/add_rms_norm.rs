//! Residual sum and its normalisation in one: `x[R,N], residual[R,N], w[N] -> sum[R,N], y[R,N]`.
//!
//! Formula: `sum = x + residual`, `y = rms_norm(sum, w)`.
//! Order and rounding: bit for bit `add` with its last rounding, then `rms_norm` of the sum as it is stored.

use crate::backend::device::{Arguments, Buffer, Build, Device, Unit};
use crate::call::Entry;
use crate::element::{Stored, typed, typed_pair};
use crate::elementwise::add::{self, Add};
use crate::elementwise::frame::Applied;
use crate::norm::rms_norm::{ROWS, Scale, Weights, one_row};
use crate::simd::stream::{LINE, Made, Stream, is_large};
use crate::simd::{Kernel, OnLine, Simd};
use crate::tensor::Rows;
use crate::through_f32::{self, f32_row};
use crate::{Cpu, Element, Error, RmsNorm, TensorMut, TensorRef, check_eps, check_len};

/// The longest row of a large sum that stays in the cache, too, for its norm.
const KEPT: usize = 8192;

/// `x[R,N], residual[R,N], w[N] -> sum[R,N], y[R,N]`, all row-major. Sum and y may differ in type; the norm reads the sum
/// as it is stored.
///
/// # Errors
/// [`Error::Length`] when a slice does not match.
///
/// ```
/// use samebits_ops::{Cpu, RmsNorm, Rounding, add_rms_norm};
///
/// let shape = RmsNorm { rows: 1, n: 2, eps: 0.0, rounding: Rounding::Once, weight_offset: false };
/// let (mut sum, mut y) = ([0f32; 2], [0f32; 2]);
/// add_rms_norm(&Cpu::best(), &shape, &[1f32, -1.0], &[1.0, -1.0], &[1.0, 3.0], &mut sum, &mut y)?;
/// assert_eq!((sum, y), ([2.0, -2.0], [1.0, -3.0]));
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn add_rms_norm<I: Element, M: Element, O: Element>(
    cpu: &Cpu,
    shape: &RmsNorm,
    x: &[I],
    residual: &[I],
    w: &[I],
    sum: &mut [M],
    y: &mut [O],
) -> Result<(), Error> {
    let RmsNorm { rows, n, .. } = *shape;
    check_eps("add_rms_norm", shape.eps)?;
    check_len("add_rms_norm", "x", "[R,N]", x.len(), &[rows, n])?;
    check_len("add_rms_norm", "residual", "[R,N]", residual.len(), &[rows, n])?;
    check_len("add_rms_norm", "w", "[N]", w.len(), &[n])?;
    check_len("add_rms_norm", "sum", "[R,N]", sum.len(), &[rows, n])?;
    check_len("add_rms_norm", "y", "[R,N]", y.len(), &[rows, n])?;
    let extents = [rows, n];
    let [x, residual] = [x, residual].map(|x| TensorRef::of(x, &extents));
    let outputs = (TensorMut::of(sum, &extents), TensorMut::of(y, &extents));
    run(cpu, shape, [x, residual], TensorRef::of(w, &[n]), outputs)
}

/// Rows of x and residual of any layout, into sum and y.
fn run(
    cpu: &Cpu,
    shape: &RmsNorm,
    [x, residual]: [TensorRef; 2],
    w: TensorRef,
    (sum, y): (TensorMut, TensorMut),
) -> Result<(), Error> {
    x.on_host("add_rms_norm", "x")?;
    residual.on_host("add_rms_norm", "residual")?;
    w.on_host("add_rms_norm", "w")?;
    if sum.dtype() != x.dtype() {
        return by_parts(cpu, shape, [x, residual], w, (sum, y));
    }
    typed_pair!(x.dtype() => I, y.dtype() => O, {
        let (x, w) = ([x, residual].map(|x| x.rows::<I>()), w.dense::<I>("add_rms_norm", "w")?);
        let (sum, y) = (sum.host::<I>("add_rms_norm", "sum")?, y.host::<O>("add_rms_norm", "y")?);
        Part::chunks(cpu, shape, x, w, sum, y);
        Ok(())
    }, else by_parts(cpu, shape, [x, residual], w, (sum, y)))
}

/// Types that no kernel is compiled for: the sum, and then its norm.
fn by_parts(
    cpu: &Cpu,
    shape: &RmsNorm,
    [x, residual]: [TensorRef; 2],
    w: TensorRef,
    (sum, y): (TensorMut, TensorMut),
) -> Result<(), Error> {
    let w = f32_row(cpu, &w, 0);
    typed!(sum.dtype() => M, {
        let sum = sum.host::<M>("add_rms_norm", "sum")?;
        add::run(cpu, [x, residual], TensorMut::of(sum, &[shape.rows, shape.n]))?;
        let sum = TensorRef::of(sum, &[shape.rows, shape.n]);
        through_f32::rows(cpu, "add_rms_norm", y, shape.n, &|row, y| {
            one_row(cpu, shape, &f32_row(cpu, &sum, row), &w, y);
        })
    })
}

/// Its kernels.
const UNIT: Unit = Unit::of(
    "add_rms_norm",
    include_str!("add_rms_norm.cu"),
    &["add_rms_norm_bf16", "add_rms_norm_fp16", "add_rms_norm_fp32"],
);

/// add_rms_norm, by name.
pub(crate) const OP: Entry = Entry {
    name: "add_rms_norm",
    cpu: |cpu, args| {
        let shape = RmsNorm::of(args.call, args.call.dim("R"), args.call.dim("N"));
        let (x, outputs) = ([args.input("x"), args.input("residual")], (args.output("sum"), args.output("y")));
        run(cpu, &shape, x, args.input("w"), outputs)
    },
    device: Some(|on, args| {
        const NAME: &str = "add_rms_norm";
        let shape = RmsNorm::of(args.call, args.call.dim("R"), args.call.dim("N"));
        let [x, residual, w] = ["x", "residual", "w"].map(|name| args.input(name));
        let (sum, y) = (args.output("sum"), args.output("y"));
        typed!(x.dtype() => I, typed!(sum.dtype() => M, typed!(y.dtype() => O, {
            let (x, residual) = (x.device(NAME, "x")?, residual.device(NAME, "residual")?);
            let (sum, y) = (sum.device(NAME, "sum")?, y.device(NAME, "y")?);
            on_device::<I, M, O>(on, &shape, x, residual, w.device(NAME, "w")?, sum, y)
        })))
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// [`add_rms_norm`] on a device.
///
/// # Errors
/// [`Error::Length`] when a buffer does not match; errors of the device.
pub fn on_device<I: Stored, M: Stored, O: Stored>(
    device: &Device,
    shape: &RmsNorm,
    x: &Buffer<I>,
    residual: &Buffer<I>,
    w: &Buffer<I>,
    sum: &mut Buffer<M>,
    y: &mut Buffer<O>,
) -> Result<(), Error> {
    let RmsNorm { rows, n, .. } = *shape;
    check_eps("add_rms_norm", shape.eps)?;
    check_len("add_rms_norm", "x", "[R,N]", x.len(), &[rows, n])?;
    check_len("add_rms_norm", "residual", "[R,N]", residual.len(), &[rows, n])?;
    check_len("add_rms_norm", "w", "[N]", w.len(), &[n])?;
    check_len("add_rms_norm", "sum", "[R,N]", sum.len(), &[rows, n])?;
    check_len("add_rms_norm", "y", "[R,N]", y.len(), &[rows, n])?;
    if y.is_empty() {
        return Ok(());
    }
    let arguments = Arguments::new()
        .buffer(x)
        .buffer(residual)
        .buffer(w)
        .buffer(sum)
        .buffer(y)
        .long(rows)
        .long(n)
        .float(shape.eps)
        .int(shape.rounding.hf())
        .int(i32::from(shape.weight_offset));
    let kernel = match M::NAME {
        "bf16" => "add_rms_norm_bf16",
        "fp16" => "add_rms_norm_fp16",
        _ => "add_rms_norm_fp32",
    };
    let grid = [rows.div_ceil(ROWS), 1, 1];
    // SAFETY: as for rms_norm.
    unsafe { device.launch(Build::of::<I, O>("add_rms_norm"), kernel, grid, 128, 0, &arguments) }
}

/// Some rows, from `first` on.
struct Part<'a, I, O> {
    shape: &'a RmsNorm,
    /// x and residual.
    x: [Rows<'a, I>; 2],
    first: usize,
    w: &'a [I],
    sum: &'a mut [I],
    y: &'a mut [O],
    /// Of sum and y.
    large: (bool, bool),
}

impl<I: Element, O: Element> Part<'_, I, O> {
    fn chunks(cpu: &Cpu, shape: &RmsNorm, x: [Rows<I>; 2], w: &[I], sum: &mut [I], y: &mut [O]) {
        let n = shape.n;
        let large = (n <= KEPT && is_large(cpu, sum), is_large(cpu, y));
        let per_chunk = cpu.rows_per_chunk(shape.rows, n);
        let size = (per_chunk * n).max(1);
        let mut parts: Vec<_> = sum.chunks_mut(size).zip(y.chunks_mut(size)).collect();
        cpu.chunks(&mut parts, 1, |part, outputs| {
            for (sum, y) in outputs {
                cpu.dispatch(Part { shape, x, first: part * per_chunk, w, sum, y, large });
            }
        });
    }
}

impl<I: Element, O: Element> Kernel for Part<'_, I, O> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let n = self.shape.n;
        let rows = self.first..self.first + self.y.len() / n;
        let mut sums = Stream::<I>::new(self.sum, self.large.0);
        let mut stream = Stream::<O>::new(self.y, self.large.1);
        let mut room = None;
        let weights = Weights::laid_out(s, self.shape, self.w, rows.len(), &stream, &mut room);
        let OnLine(kept) = &mut OnLine([I::default(); KEPT + LINE]);
        for row in rows {
            // By reference: the two views are large, and a copy of them for each row is felt.
            let [a, b] = self.x.each_ref().map(|x| x.row(row));
            let added = Applied { op: Add, a, b, firsts: &[] };
            let sum = if self.large.0 {
                // Lines of memory are lines here, too: where stores cross them a Zen 3 takes a tenth longer.
                let kept = &mut kept[(LINE - sums.before_line()) % LINE..][..n];
                sums.fill(s, n, Kept { made: added, kept: &mut *kept });
                kept
            } else {
                sums.fill(s, n, added);
                sums.last(n)
            };
            let next = self.x.each_ref().map(|x| x.address(row + 1));
            Scale::of_row(s, self.shape, sum).row(s, sum, weights, &mut stream, next);
        }
        sums.end(s);
        stream.end(s);
    }
}

/// Elements that stay in the cache, too.
struct Kept<'a, M, O> {
    made: M,
    kept: &'a mut [O],
}

impl<S: Simd, M: Made<S, O>, O: Element> Made<S, O> for Kept<'_, M, O> {
    #[inline(always)]
    fn line(&mut self, s: S, y: &mut [O; LINE]) {
        self.made.line(s, y);
        self.kept.split_off_mut(..LINE).expect("as many as are made").copy_from_slice(y);
    }

    #[inline(always)]
    fn some(&mut self, s: S, y: &mut [O]) {
        self.made.some(s, y);
        self.kept.split_off_mut(..y.len()).expect("as many as are made").copy_from_slice(y);
    }
}
