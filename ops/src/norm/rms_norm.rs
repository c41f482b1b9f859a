//! Root mean square normalisation: `x[R,N], w[N] -> y[R,N]`.
//!
//! Formula: `r = 1 / sqrt(mean(x^2) + eps)`, `y = x * r * w`.
//! Order: `lanes(x*x)`, each lane a chain of fma; divided by `f32(N)`.
//! Rounding: every step once to f32. `once`: `(x*r)*w`, last rounding. `hf`: `x*r` is rounded to bf16, then `w *` it,
//! last rounding. `weight_offset` first makes `w + 1` in f32.

use crate::backend::device::{Arguments, Buffer, Build, Device, Unit};
use crate::call::Entry;
use crate::element::{Stored, typed, typed_pair};
use crate::reduce::{Square, lane_sum};
use crate::simd::stream::{LINE, Made, Stream, ask, is_large, take};
use crate::simd::{
    Kernel, OnLine, Simd, load_at, load_two, narrow_at, narrow_two, narrow_two_numbers, paired, store_two,
};
use crate::tensor::Rows;
use crate::through_f32::{self, f32_row};
use crate::{Cpu, Element, Error, TensorMut, TensorRef, check_eps, check_len};
use half::bf16;
use samebits_schema::Call;

/// Where `rms_norm` rounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    /// `(x*r)*w`, one rounding at the end.
    Once,
    /// `w * bf16(x*r)`, as Hugging Face models do in bf16.
    Hf,
}

/// Dimensions and parameters of `rms_norm`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RmsNorm {
    /// Rows R.
    pub rows: usize,
    /// Features N.
    pub n: usize,
    /// Added to the mean square, under the root.
    pub eps: f32,
    /// Where to round.
    pub rounding: Rounding,
    /// Use `w + 1` for `w`.
    pub weight_offset: bool,
}

impl Rounding {
    /// As kernels are told of it.
    pub(super) fn hf(self) -> i32 {
        i32::from(self == Rounding::Hf)
    }
}

/// `x[R,N], w[N] -> y[R,N]`, all row-major.
///
/// # Errors
/// [`Error::Length`] when a slice does not match.
///
/// ```
/// use samebits_ops::{Cpu, RmsNorm, Rounding, rms_norm};
///
/// let shape = RmsNorm { rows: 1, n: 2, eps: 0.0, rounding: Rounding::Once, weight_offset: false };
/// let mut y = [0f32; 2];
/// rms_norm(&Cpu::best(), &shape, &[2f32, -2.0], &[1.0, 3.0], &mut y)?;
/// assert_eq!(y, [1.0, -3.0]);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn rms_norm<I: Element, O: Element>(
    cpu: &Cpu,
    shape: &RmsNorm,
    x: &[I],
    w: &[I],
    y: &mut [O],
) -> Result<(), Error> {
    let RmsNorm { rows, n, .. } = *shape;
    check_eps("rms_norm", shape.eps)?;
    check_len("rms_norm", "x", "[R,N]", x.len(), &[rows, n])?;
    check_len("rms_norm", "w", "[N]", w.len(), &[n])?;
    check_len("rms_norm", "y", "[R,N]", y.len(), &[rows, n])?;
    run(cpu, shape, TensorRef::of(x, &[rows, n]), TensorRef::of(w, &[n]), TensorMut::of(y, &[rows, n]))
}

/// Rows of x of any layout.
fn run(cpu: &Cpu, shape: &RmsNorm, x: TensorRef, w: TensorRef, y: TensorMut) -> Result<(), Error> {
    x.on_host("rms_norm", "x")?;
    w.on_host("rms_norm", "w")?;
    typed_pair!(x.dtype() => I, y.dtype() => O, {
        let (w, y) = (w.dense::<I>("rms_norm", "w")?, y.host::<O>("rms_norm", "y")?);
        Part::chunks(cpu, shape, x.rows::<I>(), w, y);
        Ok(())
    }, else {
        let w = f32_row(cpu, &w, 0);
        through_f32::rows(cpu, "rms_norm", y, shape.n, &|row, y| one_row(cpu, shape, &f32_row(cpu, &x, row), &w, y))
    })
}

/// Rows to a block of 128 threads: a warp takes a row.
pub(super) const ROWS: usize = 4;

/// Its kernels.
const UNIT: Unit = Unit::of(
    "rms_norm",
    include_str!("rms_norm.cu"),
    &["rms_norm_short", "rms_norm_middle", "rms_norm_wide", "rms_norm_long"],
);

/// rms_norm, by name.
pub(crate) const OP: Entry = Entry {
    name: "rms_norm",
    cpu: |cpu, args| {
        let shape = RmsNorm::of(args.call, args.call.dim("R"), args.call.dim("N"));
        run(cpu, &shape, args.input("x"), args.input("w"), args.output("y"))
    },
    device: Some(|on, args| {
        let shape = RmsNorm::of(args.call, args.call.dim("R"), args.call.dim("N"));
        let (x, w, y) = (args.input("x"), args.input("w"), args.output("y"));
        typed!(x.dtype() => I, typed!(y.dtype() => O, {
            let (x, w) = (x.device("rms_norm", "x")?, w.device("rms_norm", "w")?);
            on_device::<I, O>(on, &shape, x, w, y.device("rms_norm", "y")?)
        }))
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// [`rms_norm`] on a device.
///
/// # Errors
/// [`Error::Length`] when a buffer does not match; errors of the device.
pub fn on_device<I: Stored, O: Stored>(
    device: &Device,
    shape: &RmsNorm,
    x: &Buffer<I>,
    w: &Buffer<I>,
    y: &mut Buffer<O>,
) -> Result<(), Error> {
    let RmsNorm { rows, n, .. } = *shape;
    check_eps("rms_norm", shape.eps)?;
    check_len("rms_norm", "x", "[R,N]", x.len(), &[rows, n])?;
    check_len("rms_norm", "w", "[N]", w.len(), &[n])?;
    check_len("rms_norm", "y", "[R,N]", y.len(), &[rows, n])?;
    if y.is_empty() {
        return Ok(());
    }
    // What a warp keeps in registers.
    let kernel = match n * size_of::<I>() {
        0..=2048 => "rms_norm_short",
        2049..=8192 => "rms_norm_middle",
        8193..=16384 => "rms_norm_wide",
        _ => "rms_norm_long",
    };
    let arguments = Arguments::new()
        .buffer(x)
        .buffer(w)
        .buffer(y)
        .long(rows)
        .long(n)
        .float(shape.eps)
        .int(shape.rounding.hf())
        .int(i32::from(shape.weight_offset));
    // SAFETY: lengths were checked; the kernel leaves rows behind the last alone.
    unsafe { device.launch(Build::of::<I, O>("rms_norm"), kernel, [rows.div_ceil(ROWS), 1, 1], 128, 0, &arguments) }
}

impl RmsNorm {
    /// The parameters of a call, for `rows` rows of `n`.
    pub(crate) fn of(call: &Call, rows: usize, n: usize) -> RmsNorm {
        // The schema keeps it finite in f32.
        let eps = call.float("eps") as f32;
        let rounding = if call.word("rounding") == "hf" { Rounding::Hf } else { Rounding::Once };
        RmsNorm {
            rows,
            n,
            eps,
            rounding,
            weight_offset: call.op.attribute("weight_offset").is_some() && call.flag("weight_offset"),
        }
    }
}

/// One row.
pub(super) fn one_row(cpu: &Cpu, shape: &RmsNorm, x: &[f32], w: &[f32], y: &mut [f32]) {
    let x = TensorRef::of(x, &[1, shape.n]);
    cpu.dispatch(Part { shape, x: x.rows::<f32>(), first: 0, w, y, large: false });
}

/// Some rows, from `first` on.
struct Part<'a, I, O> {
    shape: &'a RmsNorm,
    x: Rows<'a, I>,
    first: usize,
    w: &'a [I],
    y: &'a mut [O],
    large: bool,
}

impl<I: Element, O: Element> Part<'_, I, O> {
    fn chunks(cpu: &Cpu, shape: &RmsNorm, x: Rows<I>, w: &[I], y: &mut [O]) {
        let per_chunk = cpu.rows_per_chunk(shape.rows, shape.n);
        let large = is_large(cpu, y);
        cpu.chunks(y, per_chunk * shape.n, |chunk, y| {
            cpu.dispatch(Part { shape, x, first: chunk * per_chunk, w, y, large });
        });
    }
}

impl<I: Element, O: Element> Kernel for Part<'_, I, O> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let count = self.y.len() / self.shape.n.max(1);
        let mut stream = Stream::<O>::new(self.y, self.large);
        let mut room = None;
        let weights = Weights::laid_out(s, self.shape, self.w, count, &stream, &mut room);
        for row in self.first..self.first + count {
            let x = self.x.row(row);
            let scale = Scale::of_row(s, self.shape, x);
            // While this row comes from the cache, the next one comes from memory.
            scale.row(s, x, weights, &mut stream, [self.x.address(row + 1)]);
        }
        stream.end(s);
    }
}

/// What the elements of one row are multiplied with.
#[derive(Clone, Copy)]
pub(crate) struct Scale<S: Simd> {
    rounding: Rounding,
    pub(super) r: S::F,
    /// 1 or -0, which changes no weight.
    pub(super) offset: S::F,
    /// Whether the row and r are finite: then so is `x * r`.
    finite: bool,
}

impl<S: Simd> Scale<S> {
    /// That of the row `x`.
    #[inline(always)]
    pub fn of_row<I: Element>(s: S, shape: &RmsNorm, x: &[I]) -> Self {
        // The pad +0 adds +0 to a lane that is never -0.
        let mean_square = lane_sum(s, x, I::default(), Square) / shape.n as f32;
        let r = 1.0 / (mean_square + shape.eps).sqrt();
        let finite = mean_square.is_finite() && r.is_finite();
        Scale { rounding: shape.rounding, r: s.splat(r), offset: s.splat(offset(shape)), finite }
    }

    /// The elements `x` of the row, scaled, for `HF` rounded to bf16.
    #[inline(always)]
    pub(super) fn normed<const HF: bool>(self, s: S, x: S::F) -> S::F {
        let scaled = s.mul(x, self.r);
        if !HF {
            return scaled;
        }
        let mut rounded = [bf16::ZERO; crate::simd::MAX_LANES];
        narrow_at(s, scaled, &mut rounded, 0);
        load_at(s, &rounded, 0, bf16::ZERO)
    }

    /// The elements `x` of the row with their weights, before the last rounding.
    #[inline(always)]
    fn apply<const HF: bool>(self, s: S, x: S::F, w: S::F) -> S::F {
        s.mul(self.normed::<HF>(s, x), s.add(w, self.offset))
    }

    /// The row `x` with the `weights`, last rounding, as the next elements of `stream`. What lies at `next` is prefetched
    /// meanwhile, as far as this row is long.
    #[inline(always)]
    pub fn row<I: Element, W: Element, O: Element, N: Element, const NEXT: usize>(
        self,
        s: S,
        x: &[I],
        weights: Weights<W>,
        stream: &mut Stream<O>,
        next: [*const N; NEXT],
    ) {
        let (scale, w) = (self, weights.w);
        // So that no element asks which rounding it is.
        match (self.rounding, weights.laid.filter(|_| self.finite)) {
            (Rounding::Once, None) => stream.fill(s, x.len(), Scaled::<S, I, W, N, false, NEXT> { scale, x, w, next }),
            (Rounding::Hf, None) => stream.fill(s, x.len(), Scaled::<S, I, W, N, true, NEXT> { scale, x, w, next }),
            (Rounding::Once, Some(w)) => stream.fill(s, x.len(), Numbers::<S, I, N, false, NEXT> { scale, x, w, next }),
            (Rounding::Hf, Some(w)) => stream.fill(s, x.len(), Numbers::<S, I, N, true, NEXT> { scale, x, w, next }),
        }
    }
}

/// 1 or -0, which changes no weight.
fn offset(shape: &RmsNorm) -> f32 {
    if shape.weight_offset { 1.0 } else { -0.0 }
}

/// Weights of at most so many features are laid out: they stay in L1, beside a row.
const LAID_OUT: usize = 4096;
/// So many rows pay for it.
const ROWS_TO_LAY_OUT: usize = 4;
/// Where weights are laid out.
pub(super) type Room = Option<OnLine<[f32; LAID_OUT]>>;

/// The weights of a row, as they are and perhaps laid out for many rows.
#[derive(Clone, Copy)]
pub(crate) struct Weights<'a, W> {
    w: &'a [W],
    /// In f32, their offset added, all of them finite, each line in the order of [`load_two`].
    laid: Option<&'a [f32]>,
}

impl<'a, W: Element> Weights<'a, W> {
    /// As they are.
    pub fn of(w: &'a [W]) -> Self {
        Weights { w, laid: None }
    }

    /// Laid out in `room`, where that pays, for `rows` rows to `stream`: widening them and looking for NaN is a quarter of what scaling
    /// takes on vectors of 8. Every row must begin at the same place of a line.
    #[inline(always)]
    pub fn laid_out<S: Simd, O: Element>(
        s: S,
        shape: &RmsNorm,
        w: &'a [W],
        rows: usize,
        stream: &Stream<O>,
        room: &'a mut Room,
    ) -> Self {
        let (n, two) = (w.len(), 2 * S::LANES);
        if !(const { S::LANES == 8 && W::IS_BF16 && O::IS_BF16 }) {
            return Self::of(w);
        }
        if rows < ROWS_TO_LAY_OUT || n > LAID_OUT || !n.is_multiple_of(LINE) {
            return Self::of(w);
        }
        let (OnLine(laid), offset) = (room.insert(OnLine([0.0; LAID_OUT])), s.splat(offset(shape)));
        let laid = &mut laid[..n];
        let first = stream.before_line().min(n);
        let lines = first..n - (n - first) % LINE;
        for at in lines.clone().step_by(two) {
            let (w0, w1) = load_two(s, &w[at..][..two], true);
            store_two(s, (s.add(w0, offset), s.add(w1, offset)), &mut laid[at..][..two]);
        }
        for at in (0..first).chain(lines.end..n) {
            laid[at] = w[at].widen() + self::offset(shape);
        }
        let largest = laid.iter().fold(0, |largest, w| (w.to_bits() & 0x7FFF_FFFF).max(largest));
        Weights { w, laid: f32::from_bits(largest).is_finite().then_some(laid) }
    }
}

/// The elements of [`Scale::row`] with weights that are laid out: none is NaN.
struct Numbers<'a, S: Simd, I, N, const HF: bool, const NEXT: usize> {
    scale: Scale<S>,
    x: &'a [I],
    w: &'a [f32],
    next: [*const N; NEXT],
}

impl<S: Simd, I: Element, N: Element, O: Element, const HF: bool, const NEXT: usize> Made<S, O>
    for Numbers<'_, S, I, N, HF, NEXT>
{
    #[inline(always)]
    fn line(&mut self, s: S, y: &mut [O; LINE]) {
        let (pairs, two) = (paired::<I, O>(), 2 * S::LANES);
        self.next.iter_mut().for_each(ask);
        let (x, w) = (take(&mut self.x, LINE), take(&mut self.w, LINE));
        for v in (0..LINE).step_by(two) {
            let ((x0, x1), (w0, w1)) = (load_two(s, &x[v..][..two], pairs), load_two(s, &w[v..][..two], false));
            let (x0, x1) = (self.scale.normed::<HF>(s, x0), self.scale.normed::<HF>(s, x1));
            narrow_two_numbers(s, (s.mul(x0, w0), s.mul(x1, w1)), &mut y[v..][..two], pairs);
        }
    }

    #[inline(always)]
    fn some(&mut self, s: S, y: &mut [O]) {
        let (x, w) = (take(&mut self.x, y.len()), take(&mut self.w, y.len()));
        for at in (0..y.len()).step_by(S::LANES) {
            let (x, w) = (load_at(s, x, at, I::default()), load_at(s, w, at, 0.0));
            narrow_at(s, s.mul(self.scale.normed::<HF>(s, x), w), y, at);
        }
    }
}

/// The elements of [`Scale::row`].
struct Scaled<'a, S: Simd, I, W, N, const HF: bool, const NEXT: usize> {
    scale: Scale<S>,
    x: &'a [I],
    w: &'a [W],
    next: [*const N; NEXT],
}

impl<S: Simd, I: Element, W: Element, N: Element, O: Element, const HF: bool, const NEXT: usize> Made<S, O>
    for Scaled<'_, S, I, W, N, HF, NEXT>
{
    #[inline(always)]
    fn line(&mut self, s: S, y: &mut [O; LINE]) {
        let (pairs, two) = (paired::<I, O>() && W::IS_BF16, 2 * S::LANES);
        self.next.iter_mut().for_each(ask);
        let (x, w) = (take(&mut self.x, LINE), take(&mut self.w, LINE));
        for v in (0..LINE).step_by(two) {
            let ((x0, x1), (w0, w1)) = (load_two(s, &x[v..][..two], pairs), load_two(s, &w[v..][..two], pairs));
            let scaled = (self.scale.apply::<HF>(s, x0, w0), self.scale.apply::<HF>(s, x1, w1));
            narrow_two(s, scaled, &mut y[v..][..two], pairs);
        }
    }

    #[inline(always)]
    fn some(&mut self, s: S, y: &mut [O]) {
        let (x, w) = (take(&mut self.x, y.len()), take(&mut self.w, y.len()));
        for at in (0..y.len()).step_by(S::LANES) {
            let (x, w) = (load_at(s, x, at, I::default()), load_at(s, w, at, W::default()));
            narrow_at(s, self.scale.apply::<HF>(s, x, w), y, at);
        }
    }
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;
    use crate::Isa;
    use crate::gemm::tests::number;

    /// Rows of which every third is something else than numbers of one size.
    fn rows(rows: usize, n: usize) -> Vec<bf16> {
        let row = |row: usize| {
            let at = row * 7 % n;
            (0..n).map(move |i| match (row % 9, i == at) {
                (1, true) => bf16::NAN,
                (3, true) => bf16::NEG_INFINITY,
                (4, _) => bf16::ZERO,
                (5, true) => bf16::MAX,
                (7, _) => bf16::from_bits(1 + i as u16 % 4),
                _ => number(row * n + i),
            })
        };
        (0..rows).flat_map(row).collect()
    }

    /// Many rows, whose weights are laid out, are each what they are alone.
    pub(crate) fn a_row_among_many_is_the_row_alone() {
        let count = 9;
        for (isa, n) in Isa::of_machine().flat_map(|isa| [32, 96, 100, LAID_OUT, LAID_OUT + 32].map(|n| (isa, n))) {
            let (cpu, x) = (Cpu::new(isa, 1, usize::MAX).unwrap(), rows(count, n));
            for (special, rounding, weight_offset, eps) in [bf16::ONE, bf16::INFINITY, bf16::NAN, bf16::MAX]
                .into_iter()
                .flat_map(|special| [(special, Rounding::Once, false, 1e-6), (special, Rounding::Hf, true, 0.0)])
            {
                let mut w: Vec<bf16> = (0..n).map(|i| number(3 * i + 1)).collect();
                w[n / 2] = special;
                let shape = RmsNorm { rows: 1, n, eps, rounding, weight_offset };
                let mut alone = vec![bf16::ONE; x.len()];
                for (x, y) in x.chunks(n).zip(alone.chunks_mut(n)) {
                    rms_norm(&Cpu::new(Isa::Scalar, 1, usize::MAX).unwrap(), &shape, x, &w, y).unwrap();
                }
                let shape = RmsNorm { rows: count, ..shape };
                let bits = |y: &[bf16]| y.iter().map(|y| y.to_bits()).collect::<Vec<_>>();
                let mut y = vec![bf16::ONE; x.len()];
                rms_norm(&cpu, &shape, &x, &w, &mut y).unwrap();
                assert!(bits(&y) == bits(&alone), "{isa}, {n}, {special} {shape:?}");
                // Past the caches, from anywhere in a line on.
                for from in [0, 2, 19] {
                    let mut y = vec![bf16::ONE; from + x.len()];
                    let part = TensorRef::of(&x, &[count, n]);
                    let y = &mut y[from..];
                    cpu.dispatch(Part { shape: &shape, x: part.rows::<bf16>(), first: 0, w: &w, y, large: true });
                    assert!(bits(y) == bits(&alone), "{isa}, {n}, {special} {shape:?} from {from}");
                }
            }
        }
    }
}
