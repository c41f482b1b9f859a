//! Gradient of softmax: `x[R,N], dy[R,N] -> dx[R,N]`.
//!
//! Formula: `p = softmax(x)`, `dx = p * (dy - sum of p * dy)`.
//! Order: p is that of `softmax`; the sum is 8 segments of `16 * ceil(N / 128)` elements, each by the `lanes` sum, a lane
//! a chain of fma.
//! Rounding: every step once to f32, p too; last rounding.
//! Special: a row of which softmax makes NaN is NaN.

use crate::backend::device::{Arguments, Buffer, Build, Device, Unit};
use crate::call::Entry;
use crate::element::{Stored, typed, typed_pair};
use crate::gemm::shape::segment_length;
use crate::logprob::logprob::{Denominator, Reference, join, weights};
use crate::logprob::softmax::KEPT;
use crate::reduce::Lanes;
use crate::simd::stream::{Stream, is_large};
use crate::simd::{Kernel, OnLine, Simd, load_at, load_two, narrow_at, narrow_two, store_two};
use crate::tensor::Rows;
use crate::through_f32::{self, f32_row};
use crate::{Cpu, Element, Error, TensorMut, TensorRef, check_len};

/// The gradient `dx[R,N]` of [`softmax`](crate::softmax)'s x from the gradient `dy[R,N]` of its output, row-major; `rows` is
/// R, `n` is N.
///
/// # Errors
/// [`Error::Length`] when a slice does not match.
///
/// ```
/// use samebits_ops::{Cpu, softmax_backward};
///
/// // Two equal shares: what one gains the other loses.
/// let mut dx = [9f32; 2];
/// softmax_backward(&Cpu::best(), 1, 2, &[7f32, 7.0], &[4.0, 0.0], &mut dx)?;
/// assert_eq!(dx, [1.0, -1.0]);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn softmax_backward<I: Element, O: Element>(
    cpu: &Cpu,
    rows: usize,
    n: usize,
    x: &[I],
    dy: &[I],
    dx: &mut [O],
) -> Result<(), Error> {
    check_len("softmax_backward", "x", "[R,N]", x.len(), &[rows, n])?;
    check_len("softmax_backward", "dy", "[R,N]", dy.len(), &[rows, n])?;
    check_len("softmax_backward", "dx", "[R,N]", dx.len(), &[rows, n])?;
    let shape = [rows, n];
    run(cpu, TensorRef::of(x, &shape), TensorRef::of(dy, &shape), TensorMut::of(dx, &shape))
}

/// Rows of x and dy of any layout.
fn run(cpu: &Cpu, x: TensorRef, dy: TensorRef, dx: TensorMut) -> Result<(), Error> {
    x.on_host("softmax_backward", "x")?;
    dy.on_host("softmax_backward", "dy")?;
    let n = *x.shape().last().expect("[R,N]");
    typed_pair!(x.dtype() => I, dx.dtype() => O, {
        let (x, dy, dx) = (x.rows::<I>(), dy.rows::<I>(), dx.host::<O>("softmax_backward", "dx")?);
        let (per_chunk, large) = (cpu.rows_per_chunk(x.count(), n), is_large(cpu, dx));
        cpu.chunks(dx, per_chunk * n, |chunk, dx| {
            cpu.dispatch(Part { x, dy, first: chunk * per_chunk, dx, large });
        });
        Ok(())
    }, else typed!(dx.dtype() => O, {
        let shape = dx.shape().to_vec();
        let dx = TensorMut::of(dx.host::<O>("softmax_backward", "dx")?, &shape);
        through_f32::rows(cpu, "softmax_backward", dx, n, &|row, dx| {
            let [x, dy] = [&x, &dy].map(|tensor| f32_row(cpu, tensor, row));
            let [x, dy] = [&x, &dy].map(|row| TensorRef::of(row, &[1, n]).rows::<f32>());
            cpu.dispatch(Part { x, dy, first: 0, dx, large: false });
        })
    }))
}

/// Its kernels.
const UNIT: Unit = Unit::of("softmax_backward", include_str!("softmax_backward.cu"), &["softmax_backward"]);

/// softmax_backward, by name.
pub(crate) const OP: Entry = Entry {
    name: "softmax_backward",
    cpu: |cpu, args| run(cpu, args.input("x"), args.input("dy"), args.output("dx")),
    device: Some(|on, args| {
        let [r, n] = ["R", "N"].map(|axis| args.call.dim(axis));
        let (x, dy, dx) = (args.input("x"), args.input("dy"), args.output("dx"));
        typed!(x.dtype() => I, typed!(dx.dtype() => O, {
            let (x, dy) = (x.device("softmax_backward", "x")?, dy.device("softmax_backward", "dy")?);
            on_device::<I, O>(on, r, n, x, dy, dx.device("softmax_backward", "dx")?)
        }))
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// [`softmax_backward`] on a device.
///
/// # Errors
/// [`Error::Length`] when a buffer does not match; errors of the device.
pub fn on_device<I: Stored, O: Stored>(
    device: &Device,
    rows: usize,
    n: usize,
    x: &Buffer<I>,
    dy: &Buffer<I>,
    dx: &mut Buffer<O>,
) -> Result<(), Error> {
    check_len("softmax_backward", "x", "[R,N]", x.len(), &[rows, n])?;
    check_len("softmax_backward", "dy", "[R,N]", dy.len(), &[rows, n])?;
    check_len("softmax_backward", "dx", "[R,N]", dx.len(), &[rows, n])?;
    if dx.is_empty() {
        return Ok(());
    }
    let arguments = Arguments::new().buffer(x).buffer(dy).buffer(dx).long(n);
    let build = Build::of::<I, O>("softmax_backward");
    // SAFETY: lengths were checked; a block takes a row.
    unsafe { device.launch(build, "softmax_backward", [rows, 1, 1], 256, 0, &arguments) }
}

/// Some rows, from `first` on.
struct Part<'a, I, O> {
    x: Rows<'a, I>,
    dy: Rows<'a, I>,
    first: usize,
    dx: &'a mut [O],
    large: bool,
}

impl<I: Element, O: Element> Kernel for Part<'_, I, O> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let n = self.x.n();
        let count = self.dx.len() / n.max(1);
        let mut stream = Stream::<O>::new(self.dx, self.large);
        // The shares of a row; those of a longer one are computed twice.
        let OnLine(kept) = &mut OnLine([0f32; KEPT]);
        let (whole_row, length) = (n <= KEPT, segment_length(n));
        for row in self.first..self.first + count {
            let (x, dy) = (self.x.row(row), self.dy.row(row));
            let total = match whole_row {
                true => Denominator::of_row(s, x, 1.0, &Reference::of(s, x, 1.0), kept),
                false => Denominator::of_long_row(s, x, 1.0, &Reference::of(s, x, 1.0)),
            };
            if whole_row {
                divide(s, &total, &mut kept[..n]);
            }
            let mut part = [0f32; 8];
            for (i, (part, dy)) in part.iter_mut().zip(dy.chunks(length)).enumerate() {
                let mut lanes = Lanes::new();
                if whole_row {
                    lanes.add_products(s, &kept[i * length..][..dy.len()], dy);
                } else {
                    for (x, dy) in x[i * length..][..dy.len()].chunks(KEPT).zip(dy.chunks(KEPT)) {
                        shares(s, x, &total, &mut kept[..x.len()]);
                        lanes.add_products(s, &kept[..x.len()], dy);
                    }
                }
                *part = lanes.fold(s, dy.len());
            }
            let sum = s.splat(join(part));
            for (x, dy) in x.chunks(KEPT).zip(dy.chunks(KEPT)) {
                if !whole_row {
                    shares(s, x, &total, &mut kept[..x.len()]);
                }
                products(s, &kept[..x.len()], dy, sum, &mut stream);
            }
        }
        stream.end(s);
    }
}

/// The shares of some elements of a row.
#[inline(always)]
fn shares<S: Simd, I: Element>(s: S, x: &[I], total: &Denominator, p: &mut [f32]) {
    if total.sum > 0.0 {
        weights(s, x, 1.0, total.origin, p);
    }
    divide(s, total, p);
}

/// Weights become shares. A row that has no sum has none.
#[inline(always)]
fn divide<S: Simd>(s: S, total: &Denominator, w: &mut [f32]) {
    if total.sum.is_nan() || total.sum == 0.0 {
        w.fill(f32::NAN);
        return;
    }
    let (two, sum) = (2 * S::LANES, s.splat(total.sum));
    let whole = w.len() - w.len() % two;
    for w in w[..whole].chunks_exact_mut(two) {
        let (w0, w1) = load_two(s, w, false);
        store_two(s, (s.div(w0, sum), s.div(w1, sum)), w);
    }
    for at in (whole..w.len()).step_by(S::LANES) {
        narrow_at(s, s.div(load_at(s, w, at, 0.0), sum), w, at);
    }
}

/// `p * (dy - sum)`, last rounding, as the next elements of `stream`.
#[inline(always)]
fn products<S: Simd, I: Element, O: Element>(s: S, mut p: &[f32], mut dy: &[I], sum: S::F, stream: &mut Stream<O>) {
    let two = 2 * S::LANES;
    while !p.is_empty() {
        let dx = stream.room(p.len());
        let len = dx.len();
        let whole = len - len % two;
        for at in (0..whole).step_by(two) {
            let ((p0, p1), (d0, d1)) = (load_two(s, &p[at..][..two], false), load_two(s, &dy[at..][..two], false));
            let made = (s.mul(p0, s.sub(d0, sum)), s.mul(p1, s.sub(d1, sum)));
            narrow_two(s, made, &mut dx[at..][..two], false);
        }
        for at in (whole..len).step_by(S::LANES) {
            let (p, dy) = (load_at(s, &p[..len], at, 0.0), load_at(s, &dy[..len], at, I::default()));
            narrow_at(s, s.mul(p, s.sub(dy, sum)), dx, at);
        }
        stream.put(s, len);
        (p, dy) = (&p[len..], &dy[len..]);
    }
}
