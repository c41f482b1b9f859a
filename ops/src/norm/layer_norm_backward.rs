//! Gradient of layer normalisation: `x[R,N], w[N]?, dy[R,N] -> dx[R,N]`.
//!
//! Formula: with d and r of `layer_norm`, `h = d * r` and `g = dy * w`: `dx = r * (g - mean(g) - mean(g * h) * h)`.
//! Order: `a = lanes(g) / f32(N)`, each lane a sum; `b = lanes(g*h) / f32(N)`, each lane a chain of fma;
//! `r * fma(-b, h, g - a)`.
//! Rounding: every step once to f32; last rounding. Without w there is no product: g is dy.

use crate::backend::device::{Arguments, Buffer, Build, Device, Unit};
use crate::call::Entry;
use crate::element::{Stored, typed, typed_pair};
use crate::norm::gradient::{Slope, weigh};
use crate::norm::layer_norm::{KEPT, differences, moments};
use crate::norm::rms_norm::ROWS;
use crate::reduce::{Add, Lanes};
use crate::simd::stream::{Stream, is_large};
use crate::simd::{Kernel, OnLine, Simd, load_at, narrow_at};
use crate::tensor::Rows;
use crate::through_f32::{self, f32_row};
use crate::{Cpu, Element, Error, LayerNorm, TensorMut, TensorRef, check_eps, check_len};

const NAME: &str = "layer_norm_backward";

/// The gradient `dx[R,N]` of [`layer_norm`](crate::layer_norm)'s x from x, w and the gradient `dy[R,N]` of its output.
///
/// # Errors
/// [`Error::Length`] when a slice does not match.
///
/// ```
/// use samebits_ops::{Cpu, LayerNorm, layer_norm_backward};
///
/// // A shift of the row, or a longer one, has the same norm: of dy, those parts are lost.
/// let shape = LayerNorm { rows: 1, n: 4, eps: 0.0 };
/// let mut dx = [9f32; 4];
/// layer_norm_backward(&Cpu::best(), &shape, &[6f32, 4.0, 6.0, 4.0], None, &[4.0, 0.0, 0.0, 0.0], &mut dx)?;
/// assert_eq!(dx, [2.0, 0.0, -2.0, 0.0]);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn layer_norm_backward<I: Element, O: Element>(
    cpu: &Cpu,
    shape: &LayerNorm,
    x: &[I],
    w: Option<&[I]>,
    dy: &[I],
    dx: &mut [O],
) -> Result<(), Error> {
    let extents = [shape.rows, shape.n];
    check(shape, [x.len(), w.map_or(shape.n, <[I]>::len), dy.len(), dx.len()])?;
    let w = w.map(|w| TensorRef::of(w, &extents[1..]));
    run(cpu, shape, [x, dy].map(|rows| TensorRef::of(rows, &extents)), w, TensorMut::of(dx, &extents))
}

/// Checks the lengths of x, w, dy and dx.
fn check(shape: &LayerNorm, [x, w, dy, dx]: [usize; 4]) -> Result<(), Error> {
    let rows = [shape.rows, shape.n];
    check_eps(NAME, shape.eps)?;
    check_len(NAME, "x", "[R,N]", x, &rows)?;
    check_len(NAME, "w", "[N]", w, &rows[1..])?;
    check_len(NAME, "dy", "[R,N]", dy, &rows)?;
    check_len(NAME, "dx", "[R,N]", dx, &rows)
}

/// Rows of x and dy of any layout.
fn run(
    cpu: &Cpu,
    shape: &LayerNorm,
    [x, dy]: [TensorRef; 2],
    w: Option<TensorRef>,
    dx: TensorMut,
) -> Result<(), Error> {
    x.on_host(NAME, "x")?;
    w.map_or(Ok(()), |w| w.on_host(NAME, "w"))?;
    dy.on_host(NAME, "dy")?;
    typed_pair!(x.dtype() => I, dx.dtype() => O, {
        let w = w.map(|w| w.dense::<I>(NAME, "w")).transpose()?;
        Part::chunks(cpu, shape, [x.rows::<I>(), dy.rows::<I>()], w, dx.host::<O>(NAME, "dx")?);
        Ok(())
    }, else {
        let w = w.map(|w| f32_row(cpu, &w, 0));
        through_f32::rows(cpu, NAME, dx, shape.n, &|row, dx| {
            let rows = [&x, &dy].map(|rows| f32_row(cpu, rows, row));
            let one = [1, shape.n];
            let x = rows.each_ref().map(|row| TensorRef::of(row, &one).rows::<f32>());
            cpu.dispatch(Part { shape, x, first: 0, w: w.as_deref(), dx, large: false });
        })
    })
}

/// Its kernel.
const UNIT: Unit = Unit::of(NAME, include_str!("layer_norm_backward.cu"), &["layer_norm_backward"]);

/// layer_norm_backward, by name.
pub(crate) const OP: Entry = Entry {
    name: "layer_norm_backward",
    cpu: |cpu, args| {
        let (shape, x) = (LayerNorm::of(args.call), ["x", "dy"].map(|name| args.input(name)));
        run(cpu, &shape, x, args.optional("w"), args.output("dx"))
    },
    device: Some(|on, args| {
        let (shape, [x, dy]) = (LayerNorm::of(args.call), ["x", "dy"].map(|name| args.input(name)));
        let (w, dx) = (args.optional("w"), args.output("dx"));
        typed!(x.dtype() => I, typed!(dx.dtype() => O, {
            let w = w.map(|w| w.device(NAME, "w")).transpose()?;
            let (x, dy) = (x.device(NAME, "x")?, dy.device(NAME, "dy")?);
            on_device::<I, O>(on, &shape, x, w, dy, dx.device(NAME, "dx")?)
        }))
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// [`layer_norm_backward`] on a device.
///
/// # Errors
/// [`Error::Length`] when a buffer does not match; errors of the device.
pub fn on_device<I: Stored, O: Stored>(
    device: &Device,
    shape: &LayerNorm,
    x: &Buffer<I>,
    w: Option<&Buffer<I>>,
    dy: &Buffer<I>,
    dx: &mut Buffer<O>,
) -> Result<(), Error> {
    let LayerNorm { rows, n, eps } = *shape;
    check(shape, [x.len(), w.map_or(n, Buffer::len), dy.len(), dx.len()])?;
    if dx.is_empty() {
        return Ok(());
    }
    let arguments = match w {
        Some(w) => Arguments::new().buffer(x).buffer(w).int(1),
        None => Arguments::new().buffer(x).null().int(0),
    };
    let arguments = arguments.buffer(dy).buffer(dx).long(rows).long(n).float(eps);
    // SAFETY: lengths were checked; a warp takes a row, and the kernel leaves rows behind the last alone.
    unsafe { device.launch(Build::of::<I, O>(NAME), NAME, [rows.div_ceil(ROWS), 1, 1], 128, 0, &arguments) }
}

/// Some rows, from `first` on.
struct Part<'a, I, O> {
    shape: &'a LayerNorm,
    /// x and dy.
    x: [Rows<'a, I>; 2],
    first: usize,
    w: Option<&'a [I]>,
    dx: &'a mut [O],
    large: bool,
}

impl<I: Element, O: Element> Part<'_, I, O> {
    fn chunks(cpu: &Cpu, shape: &LayerNorm, x: [Rows<I>; 2], w: Option<&[I]>, dx: &mut [O]) {
        let per_chunk = cpu.rows_per_chunk(shape.rows, shape.n);
        let large = is_large(cpu, dx);
        cpu.chunks(dx, per_chunk * shape.n, |chunk, dx| {
            cpu.dispatch(Part { shape, x, first: chunk * per_chunk, w, dx, large });
        });
    }
}

impl<I: Element, O: Element> Kernel for Part<'_, I, O> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (n, count) = (self.shape.n, self.dx.len() / self.shape.n.max(1));
        let mut stream = Stream::<O>::new(self.dx, self.large);
        let OnLine([h, g]) = &mut OnLine([[0f32; KEPT]; 2]);
        let none = s.splat(-0.0);
        for row in self.first..self.first + count {
            let [x, dy] = self.x.each_ref().map(|x| x.row(row));
            let (mean, r) = moments(s, x, self.shape.eps, h);
            let (mut sum, mut products) = (Lanes::new(), Lanes::new());
            for (part, x) in x.chunks(KEPT).enumerate() {
                normed(s, x, mean, r, h);
                let (dy, w) = (&dy[part * KEPT..][..x.len()], self.w.map(|w| &w[part * KEPT..][..x.len()]));
                weigh(s, dy, w, none, g);
                sum.add(s, &g[..x.len()], Add);
                products.add_products(s, &g[..x.len()], &h[..x.len()]);
            }
            let (a, b) = (s.splat(sum.fold(s, n) / n as f32), s.splat(products.fold(s, n) / n as f32));
            let slope = Slope { r, factor: s.neg(b), a };
            // While this row comes from the cache, the next ones come from memory.
            let next = self.x.each_ref().map(|x| x.address(row + 1));
            for (part, x) in x.chunks(KEPT).enumerate() {
                if n > KEPT {
                    normed(s, x, mean, r, h);
                    let (dy, w) = (&dy[part * KEPT..][..x.len()], self.w.map(|w| &w[part * KEPT..][..x.len()]));
                    weigh(s, dy, w, none, g);
                }
                let next = next.map(|next| next.wrapping_add(part * KEPT));
                slope.row(s, &h[..x.len()], &g[..x.len()], None, &mut stream, next);
            }
        }
        stream.end(s);
    }
}

/// `h[i] = (x[i] - mean) * r`
#[inline(always)]
fn normed<S: Simd, I: Element>(s: S, x: &[I], mean: S::F, r: S::F, h: &mut [f32]) {
    differences(s, x, mean, h);
    let h = &mut h[..x.len()];
    for at in (0..x.len()).step_by(S::LANES) {
        narrow_at(s, s.mul(load_at(s, h, at, 0.0), r), h, at);
    }
}
