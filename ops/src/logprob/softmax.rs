//! Softmax: `x[R,N] -> y[R,N]`.
//!
//! Formula: `y = e^x / sum of e^x`.
//! Order: the weights `m * 2^(i-n)` and their sum are those of `logprob` at temperature 1.
//! Rounding: every step once to f32; `weight / sum`, last rounding.
//! Special: a NaN or +inf in the row, or nothing but -inf, gives a row of NaN.

use crate::backend::device::{Arguments, Buffer, Build, Device, Stored, Unit};
use crate::call::Entry;
use crate::element::{typed, typed_pair};
use crate::logprob::logprob::{Denominator, Total, weights};
use crate::simd::stream::{Stream, is_large};
use crate::simd::{Kernel, Simd, load_at, load_two, narrow_at, narrow_two};
use crate::tensor::Rows;
use crate::through_f32::{self, f32_row};
use crate::{Cpu, Element, Error, TensorMut, TensorRef, check_len};

/// Weights kept between the sum and the division: most of a first cache. Those of a longer row are computed twice.
pub(super) const KEPT: usize = 8192;

/// `x[R,N] -> y[R,N]`, row-major; `rows` is R, `n` is N.
///
/// # Errors
/// [`Error::Length`] when a slice does not match.
///
/// ```
/// use samebits_ops::{Cpu, softmax};
///
/// let mut y = [0f32; 2];
/// softmax(&Cpu::best(), 1, 2, &[7f32, 7.0], &mut y)?;
/// assert_eq!(y, [0.5, 0.5]);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn softmax<I: Element, O: Element>(cpu: &Cpu, rows: usize, n: usize, x: &[I], y: &mut [O]) -> Result<(), Error> {
    check_len("softmax", "x", "[R,N]", x.len(), &[rows, n])?;
    check_len("softmax", "y", "[R,N]", y.len(), &[rows, n])?;
    run(cpu, TensorRef::of(x, &[rows, n]), TensorMut::of(y, &[rows, n]))
}

/// Rows of x of any layout.
pub(crate) fn run(cpu: &Cpu, x: TensorRef, y: TensorMut) -> Result<(), Error> {
    x.on_host("softmax", "x")?;
    typed_pair!(x.dtype() => I, y.dtype() => O, {
        Part::chunks(cpu, x.rows::<I>(), y.host::<O>("softmax", "y")?);
        Ok(())
    }, else {
        let n = *x.shape().last().expect("it has an axis");
        through_f32::rows(cpu, "softmax", y, n, &|row, y| {
            let x = f32_row(cpu, &x, row);
            cpu.dispatch(Part { x: TensorRef::of(&x, &[1, n]).rows::<f32>(), first: 0, y, large: false });
        })
    })
}

/// Its kernels.
const UNIT: Unit = Unit::of("softmax", include_str!("softmax.cu"), &["softmax"]);

/// softmax, by name.
pub(crate) const OP: Entry = Entry {
    name: "softmax",
    cpu: |cpu, args| run(cpu, args.input("x"), args.output("y")),
    device: Some(|on, args| {
        let ([r, n], x, y) = (["R", "N"].map(|axis| args.call.dim(axis)), args.input("x"), args.output("y"));
        typed!(x.dtype() => I, typed!(y.dtype() => O, {
            on_device::<I, O>(on, r, n, x.device("softmax", "x")?, y.device("softmax", "y")?)
        }))
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// [`softmax`] on a device.
///
/// # Errors
/// [`Error::Length`] when a buffer does not match; errors of the device.
pub fn on_device<I: Stored, O: Stored>(
    device: &Device,
    rows: usize,
    n: usize,
    x: &Buffer<I>,
    y: &mut Buffer<O>,
) -> Result<(), Error> {
    check_len("softmax", "x", "[R,N]", x.len(), &[rows, n])?;
    check_len("softmax", "y", "[R,N]", y.len(), &[rows, n])?;
    if y.is_empty() {
        return Ok(());
    }
    let arguments = Arguments::new().buffer(x).buffer(y).long(n);
    // SAFETY: lengths were checked; a block takes a row.
    unsafe { device.launch(Build::of::<I, O>("softmax"), "softmax", [rows, 1, 1], 256, 0, &arguments) }
}

/// Some rows, from `first` on.
struct Part<'a, I, O> {
    x: Rows<'a, I>,
    first: usize,
    y: &'a mut [O],
    large: bool,
}

impl<I: Element, O: Element> Part<'_, I, O> {
    fn chunks(cpu: &Cpu, x: Rows<I>, y: &mut [O]) {
        let per_chunk = cpu.rows_per_chunk(x.count(), x.n());
        let large = is_large(cpu, y);
        cpu.chunks(y, per_chunk * x.n(), |chunk, y| {
            cpu.dispatch(Part { x, first: chunk * per_chunk, y, large });
        });
    }
}

impl<I: Element, O: Element> Kernel for Part<'_, I, O> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let count = self.y.len() / self.x.n().max(1);
        let mut stream = Stream::<O>::new(self.y, self.large);
        let mut kept = [0f32; KEPT];
        for x in (self.first..self.first + count).map(|row| self.x.row(row)) {
            let whole_row = x.len() <= KEPT;
            let Denominator { n, sum } = if whole_row {
                Denominator::of_row(s, x, 1.0, &mut kept)
            } else {
                s.enter(Total { x, scale: 1.0, next: &[] })
            };
            for x in x.chunks(KEPT) {
                let w = &mut kept[..x.len()];
                if sum.is_nan() || sum == 0.0 {
                    w.fill(f32::NAN);
                } else if !whole_row {
                    weights(s, x, 1.0, n, w);
                }
                divide(s, w, sum, &mut stream);
            }
        }
        stream.end(s);
    }
}

/// `w / sum`, last rounding, as the next elements of `stream`.
#[inline(always)]
fn divide<S: Simd, O: Element>(s: S, mut w: &[f32], sum: f32, stream: &mut Stream<O>) {
    let (two, sum) = (2 * S::LANES, s.splat(sum));
    while !w.is_empty() {
        let y = stream.room(w.len());
        let (part, rest) = w.split_at(y.len());
        let whole = part.len() - part.len() % two;
        for at in (0..whole).step_by(two) {
            let (w0, w1) = load_two(s, &part[at..][..two], false);
            narrow_two(s, (s.div(w0, sum), s.div(w1, sum)), &mut y[at..][..two], false);
        }
        for at in (whole..part.len()).step_by(S::LANES) {
            narrow_at(s, s.div(load_at(s, part, at, 0.0), sum), y, at);
        }
        stream.put(s, part.len());
        w = rest;
    }
}
