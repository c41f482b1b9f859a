//! Softmax: `x[R,N] -> y[R,N]`.
//!
//! Formula: `y = e^x / sum of e^x`.
//! Order: the weights `m * 2^(i-n)` and their sum are those of `logprob` at temperature 1.
//! Rounding: every step once to f32; `weight / sum`, last rounding.
//! Special: a NaN or +inf in the row, or nothing but -inf, gives a row of NaN.

use crate::backend::device::{Arguments, Buffer, Build, Device, Unit};
use crate::call::Entry;
use crate::element::{Stored, typed, typed_pair};
use crate::gemm::shape::segment_length;
use crate::logprob::logprob::{Denominator, Reference, join, weights};
use crate::math::{LOG2E, near_coefficients, near_weight, near_weights};
use crate::reduce::{EightSums, Lanes};
use crate::simd::prefetch::{prefetch_second, prefetch_to_write};
use crate::simd::scalar::Scalar;
use crate::simd::stream::{BLOCK, Stream, is_large};
use crate::simd::unroll::Unrolled;
use crate::simd::{
    Kernel, OnLine, Simd, load_at, load_two, narrow_at, narrow_quotients, narrow_two, paired, store_two,
};
use crate::tensor::Rows;
use crate::through_f32::{self, f32_row};
use crate::{Cpu, Element, Error, TensorMut, TensorRef, check_len};

/// Weights kept between the sum and the division: most of an L1. Those of a longer row are computed twice.
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
        let n = self.x.n();
        let count = self.y.len() / n.max(1);
        let mut stream = Stream::<O>::new(self.y, self.large);
        let (OnLine(kept), mut sums) = (&mut OnLine([0f32; KEPT]), EightSums::new());
        let whole_row = n <= KEPT;
        // The sum of the weights in `kept`, of a row whose division is due.
        let mut due = None;
        for x in (self.first..self.first + count).map(|row| self.x.row(row)) {
            let reference = if whole_row { Some(Reference::of(s, x, 1.0)) } else { None };
            if let Some(Reference { special: None, near: Some(unit), .. }) = reference {
                due = Some(turn(s, x, unit, due, &mut kept[..n], &mut sums, &mut stream));
                continue;
            }
            if let Some(sum) = due.take() {
                divide(s, &kept[..n], sum, paired::<I, O>(), &mut stream);
            }
            let Denominator { origin, sum, .. } = match &reference {
                Some(reference) => Denominator::of_row(s, x, 1.0, reference, kept),
                None => Denominator::of_long_row(s, x, 1.0, &Reference::of(s, x, 1.0)),
            };
            for x in x.chunks(KEPT) {
                let w = &mut kept[..x.len()];
                if sum.is_nan() || sum == 0.0 {
                    w.fill(f32::NAN);
                } else if !whole_row {
                    weights(s, x, 1.0, origin, w);
                }
                divide(s, w, sum, false, &mut stream);
            }
        }
        if let Some(sum) = due {
            divide(s, &kept[..n], sum, paired::<I, O>(), &mut stream);
        }
        stream.end(s);
    }
}

/// Puts the weights of `x` in the place of those in `kept`, of the row before, whose sum `due` is and whose quotients are the
/// next elements of `stream`; returns the new sum. A divider and the units of multiply-adds work at the same time. Where both
/// are bf16, they are taken by pairs, and weights stand so in `kept`.
#[inline(always)]
fn turn<S: Simd, I: Element, O: Element>(
    s: S,
    x: &[I],
    unit: f32,
    due: Option<f32>,
    kept: &mut [f32],
    sums: &mut EightSums,
    stream: &mut Stream<O>,
) -> f32 {
    if paired::<I, O>() && x.len() == 8 * EightSums::LEN {
        return s.enter(TurnEight { x, unit, due, kept, sums, stream });
    }
    let (n, mut part, mut lanes) = (x.len(), [0f32; 8], Lanes::new());
    let mut unused = [O::default(); BLOCK];
    let length = segment_length(x.len());
    for (part, (x, w)) in part.iter_mut().zip(x.chunks(length).zip(kept.chunks_mut(length))) {
        lanes.begin(x.len());
        let y = if due.is_some() { stream.room(x.len()) } else { &mut unused[..x.len()] };
        s.enter(Turn { x, next: x.as_ptr().wrapping_add(n), unit, lanes: &mut lanes, w, sum: due.unwrap_or(1.0), y });
        if due.is_some() {
            stream.put(s, x.len());
        }
        *part = if paired::<I, O>() { lanes.fold_pairs(s, x.len()) } else { lanes.fold(s, x.len()) };
    }
    join(part)
}

/// A segment of [`turn`], no longer than [`BLOCK`].
struct Turn<'a, I, O> {
    x: &'a [I],
    /// What is prefetched meanwhile: the same elements of the next row, if there is one.
    next: *const I,
    unit: f32,
    lanes: &'a mut Lanes,
    w: &'a mut [f32],
    sum: f32,
    y: &'a mut [O],
}

/// The prefetch distance of y, in bytes.
const AHEAD: usize = 2048;

impl<I: Element, O: Element> Kernel for Turn<'_, I, O> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Turn { x, next, unit, lanes, w, sum, y } = self;
        let (two, s2, pairs) = (2 * S::LANES, Unrolled(s), paired::<I, O>());
        let divisor = (s.splat(sum), s.splat(1.0 / sum));
        assert!(w.len() == x.len() && y.len() == x.len());
        let whole = x.len() - x.len() % two;
        let parts = x.chunks_exact(two).zip(w.chunks_exact_mut(two)).zip(y.chunks_exact_mut(two));
        for (at, ((x, w), y)) in (0..whole).step_by(two).zip(parts) {
            for line in (0..two * size_of::<I>()).step_by(64) {
                prefetch_second(next.wrapping_add(at).wrapping_byte_add(line));
            }
            for line in (0..two * size_of::<O>()).step_by(64) {
                prefetch_to_write(y.as_ptr().wrapping_byte_add(AHEAD + line));
            }
            // No weight and no sum of them is so small or so large that a quotient would not be normal.
            narrow_quotients::<S, O, 1>(s, w, divisor, y, pairs);
            let weight = near_weight(s2, load_two(s, x, pairs), unit, I::IS_BF16);
            lanes.add_next(s, at, weight);
            store_two(s, weight, w);
        }
        for at in whole..x.len() {
            y[at] = O::narrow(w[at] / sum);
            w[at] = near_weight(Scalar, x[at].widen(), unit, I::IS_BF16);
            lanes.add_one(s, at, w[at], pairs);
        }
    }
}

/// [`turn`] of a row of bf16 to bf16 whose segments are the [`EightSums`]. All quotients of a segment come before its weights: an
/// exponential is a long chain of dependent steps, and what stands between fills the window in which the machine finds others.
struct TurnEight<'a, 'y, I, O> {
    x: &'a [I],
    unit: f32,
    due: Option<f32>,
    kept: &'a mut [f32],
    sums: &'a mut EightSums,
    stream: &'a mut Stream<'y, O>,
}

impl<I: Element, O: Element> Kernel for TurnEight<'_, '_, I, O> {
    type Output = f32;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        const LEN: usize = EightSums::LEN;
        let TurnEight { x, unit, due, kept, sums, stream } = self;
        let (two, coefficients) = (2 * S::LANES, near_coefficients(s, s.splat(unit)));
        let after = x.as_ptr().wrapping_add(x.len());
        for (of, (x, w)) in x.chunks_exact(LEN).zip(kept.chunks_exact_mut(LEN)).enumerate() {
            let (next, y) = (after.wrapping_add(of * LEN), stream.room(LEN));
            let ahead = y.as_ptr().wrapping_byte_add(AHEAD);
            if let Some(sum) = due {
                let divisor = (s.splat(sum), s.splat(1.0 / sum));
                for (w, y) in w.chunks_exact(4 * two).zip(y.chunks_exact_mut(4 * two)) {
                    narrow_quotients::<S, O, 4>(s, w, divisor, y, true);
                }
            }
            for at in (0..LEN / 4).step_by(two) {
                for line in (4 * at * size_of::<I>()..4 * (at + two) * size_of::<I>()).step_by(64) {
                    prefetch_second(next.wrapping_byte_add(line));
                    prefetch_to_write(ahead.wrapping_byte_add(line));
                }
                let [x0, x1] = two_weights(s, at, x, &coefficients, w);
                let [x2, x3] = two_weights(s, at + LEN / 4, x, &coefficients, w);
                sums.put(s, of, at, [x0, x1, x2, x3]);
            }
            if due.is_some() {
                stream.put(s, LEN);
            }
        }
        join(sums.fold(s))
    }
}

/// The weights, two vectors each, of a segment of [`TurnEight`] from `at` on and from half a segment later on, which are put to `w`.
#[inline(always)]
fn two_weights<S: Simd, I: Element>(
    s: S,
    at: usize,
    x: &[I],
    coefficients: &[S::F; 7],
    w: &mut [f32],
) -> [(S::F, S::F); 2] {
    let (two, later) = (2 * S::LANES, at + EightSums::LEN / 2);
    let (a, b) = (load_two(s, &x[at..][..two], true), load_two(s, &x[later..][..two], true));
    let [a0, a1, b0, b1] = near_weights::<_, 4, true>(s, [a.0, a.1, b.0, b.1], LOG2E, coefficients);
    store_two(s, (a0, a1), &mut w[at..][..two]);
    store_two(s, (b0, b1), &mut w[later..][..two]);
    [(a0, a1), (b0, b1)]
}

/// `w / sum`, last rounding, as the next elements of `stream`; with `pairs` the weights stand as [`turn`] leaves them.
#[inline(always)]
fn divide<S: Simd, O: Element>(s: S, w: &[f32], sum: f32, pairs: bool, stream: &mut Stream<O>) {
    let (two, sum) = (2 * S::LANES, s.splat(sum));
    for w in w.chunks(segment_length(w.len())) {
        let y = stream.room(w.len());
        let whole = w.len() - w.len() % two;
        for at in (0..whole).step_by(two) {
            let (w0, w1) = load_two(s, &w[at..][..two], false);
            narrow_two(s, (s.div(w0, sum), s.div(w1, sum)), &mut y[at..][..two], pairs);
        }
        for at in (whole..w.len()).step_by(S::LANES) {
            narrow_at(s, s.div(load_at(s, w, at, 0.0), sum), y, at);
        }
        stream.put(s, w.len());
    }
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;
    use crate::Isa;
    use crate::logprob::logprob::Origin;

    /// Rows whose divisions wait for the next row, beside rows that take the other ways, have the bits of each alone.
    pub(crate) fn rows_of_every_kind_side_by_side() {
        rows_of_every_kind::<f32>();
        // By pairs.
        rows_of_every_kind::<half::bf16>();
    }

    fn rows_of_every_kind<T: Element>() {
        for n in [1, 31, 160, 512, 1000, 2048, 4090, 4096, 4101, KEPT, KEPT + 3] {
            let rows = 9;
            let mut x: Vec<f32> = (0..rows * n).map(|i| ((i * 7919 + i / n) % 1009) as f32 / 64.0 - 8.0).collect();
            x[2 * n] = f32::NEG_INFINITY;
            x[3 * n] = f32::NAN;
            x[6 * n] = 300.0;
            x[7 * n..8 * n].fill(-0.0);
            // Finite numbers whose exponents are not.
            x[5 * n] = 3e38;
            x[5 * n + n / 2] = 3e38;
            x[8 * n..9 * n].fill(-3e38);
            let x: Vec<T> = x.into_iter().map(T::narrow).collect();
            for isa in Isa::of_machine() {
                let cpu = Cpu::new(isa, 1, usize::MAX).unwrap();
                let mut all = vec![T::default(); rows * n];
                softmax(&cpu, rows, n, &x, &mut all).unwrap();
                for (r, (x, y)) in x.chunks(n).zip(all.chunks(n)).enumerate() {
                    let total = cpu.dispatch(Plain(x));
                    for (i, (x, y)) in x.iter().zip(y).enumerate() {
                        let mut w = [0f32];
                        cpu.dispatch(One(x.widen(), total.origin, &mut w));
                        let expected = if total.sum > 0.0 { w[0] / total.sum } else { f32::NAN };
                        assert_eq!(
                            y.widen().to_bits(),
                            T::narrow(expected).widen().to_bits(),
                            "{isa}, n = {n}, row {r}, element {i}"
                        );
                    }
                }
            }
        }
    }

    /// The denominator of a row, by weights that look at what is negligible.
    struct Plain<'a, T>(&'a [T]);

    impl<T: Element> Kernel for Plain<'_, T> {
        type Output = Denominator;
        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> Denominator {
            let mut kept = vec![0f32; self.0.len()];
            Denominator::of_row(s, self.0, 1.0, &Reference::of(s, self.0, 1.0), &mut kept)
        }
    }

    struct One<'a>(f32, Origin, &'a mut [f32]);

    impl Kernel for One<'_> {
        type Output = ();
        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            weights(s, &[self.0], 1.0, self.1, self.2);
        }
    }
}
