//! Layer normalisation: `x[R,N], w[N]?, bias[N]? -> y[R,N]`.
//!
//! Formula: `d = x - mean(x)`, `r = 1 / sqrt(mean(d^2) + eps)`, `y = d * r * w + bias`.
//! Order: `lanes(x)`, each lane a sum, divided by `f32(N)`; `lanes(d*d)`, each lane a chain of fma, divided by `f32(N)`.
//! Rounding: every step once to f32: d, r, `d*r`, then `* w` and `+ bias` where they are given; last rounding.

use crate::backend::device::{Arguments, Buffer, Build, Device, Unit};
use crate::call::Entry;
use crate::element::{Stored, typed, typed_pair};
use crate::reduce::{Add, Lanes, Square, lane_sum};
use crate::simd::stream::{Stream, is_large};
use crate::simd::{Kernel, OnLine, Simd, load_at, load_two, narrow_at, narrow_two, store_two};
use crate::tensor::Rows;
use crate::through_f32::{self, f32_row};
use crate::{Cpu, Element, Error, TensorMut, TensorRef, check_eps, check_len};
use samebits_schema::Call;

/// Differences kept between their squares and the product: a part of an L1, a multiple of 256. Those of a longer
/// row are computed twice.
pub(super) const KEPT: usize = 4096;

/// Dimensions and parameters of `layer_norm`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerNorm {
    /// Rows R.
    pub rows: usize,
    /// Features N.
    pub n: usize,
    /// Added to the variance, under the root.
    pub eps: f32,
}

/// `x[R,N], w[N]?, bias[N]? -> y[R,N]`, all row-major.
///
/// # Errors
/// [`Error::Length`] when a slice does not match.
///
/// ```
/// use samebits_ops::{Cpu, LayerNorm, layer_norm};
///
/// let shape = LayerNorm { rows: 1, n: 2, eps: 0.0 };
/// let mut y = [0f32; 2];
/// layer_norm(&Cpu::best(), &shape, &[5f32, 1.0], Some(&[10.0, 20.0]), None, &mut y)?;
/// assert_eq!(y, [10.0, -20.0]);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn layer_norm<I: Element, O: Element>(
    cpu: &Cpu,
    shape: &LayerNorm,
    x: &[I],
    w: Option<&[I]>,
    bias: Option<&[I]>,
    y: &mut [O],
) -> Result<(), Error> {
    let LayerNorm { rows, n, .. } = *shape;
    check_eps("layer_norm", shape.eps)?;
    check_len("layer_norm", "x", "[R,N]", x.len(), &[rows, n])?;
    check_len("layer_norm", "w", "[N]", w.map_or(n, <[I]>::len), &[n])?;
    check_len("layer_norm", "bias", "[N]", bias.map_or(n, <[I]>::len), &[n])?;
    check_len("layer_norm", "y", "[R,N]", y.len(), &[rows, n])?;
    let affine = [w, bias].map(|given| given.map(|given| TensorRef::of(given, &[n])));
    run(cpu, shape, TensorRef::of(x, &[rows, n]), affine, TensorMut::of(y, &[rows, n]))
}

/// Rows of x of any layout; `affine` is w and bias.
fn run(cpu: &Cpu, shape: &LayerNorm, x: TensorRef, affine: [Option<TensorRef>; 2], y: TensorMut) -> Result<(), Error> {
    x.on_host("layer_norm", "x")?;
    for (given, name) in affine.iter().zip(["w", "bias"]) {
        given.map_or(Ok(()), |given| given.on_host("layer_norm", name))?;
    }
    typed_pair!(x.dtype() => I, y.dtype() => O, {
        let [w, bias] = affine;
        let w = w.map(|w| w.dense::<I>("layer_norm", "w")).transpose()?;
        let bias = bias.map(|bias| bias.dense::<I>("layer_norm", "bias")).transpose()?;
        Part::chunks(cpu, shape, x.rows::<I>(), [w, bias], y.host::<O>("layer_norm", "y")?);
        Ok(())
    }, else {
        let affine = affine.map(|given| given.map(|given| f32_row(cpu, &given, 0)));
        let affine = affine.each_ref().map(Option::as_deref);
        through_f32::rows(cpu, "layer_norm", y, shape.n, &|row, y| {
            let x = f32_row(cpu, &x, row);
            let x = TensorRef::of(&x, &[1, shape.n]).rows::<f32>();
            cpu.dispatch(Part { shape, x, first: 0, affine, y, large: false });
        })
    })
}

/// Its kernels.
const UNIT: Unit = Unit::of(
    "layer_norm",
    include_str!("layer_norm.cu"),
    &["layer_norm_short", "layer_norm_middle", "layer_norm_wide", "layer_norm_long"],
);

/// layer_norm, by name.
pub(crate) const OP: Entry = Entry {
    name: "layer_norm",
    cpu: |cpu, args| {
        let shape = LayerNorm::of(args.call);
        run(cpu, &shape, args.input("x"), ["w", "bias"].map(|name| args.optional(name)), args.output("y"))
    },
    device: Some(|on, args| {
        let shape = LayerNorm::of(args.call);
        let (x, w, bias, y) = (args.input("x"), args.optional("w"), args.optional("bias"), args.output("y"));
        typed!(x.dtype() => I, typed!(y.dtype() => O, {
            let w = w.map(|w| w.device("layer_norm", "w")).transpose()?;
            let bias = bias.map(|bias| bias.device("layer_norm", "bias")).transpose()?;
            on_device::<I, O>(on, &shape, x.device("layer_norm", "x")?, w, bias, y.device("layer_norm", "y")?)
        }))
    }),
    unit: Some(&UNIT),
    prepare: None,
};

impl LayerNorm {
    /// The parameters of a call.
    pub(super) fn of(call: &Call) -> LayerNorm {
        // The schema keeps it finite in f32.
        let eps = call.float("eps") as f32;
        LayerNorm { rows: call.dim("R"), n: call.dim("N"), eps }
    }
}

/// [`layer_norm`] on a device.
///
/// # Errors
/// [`Error::Length`] when a buffer does not match; errors of the device.
pub fn on_device<I: Stored, O: Stored>(
    device: &Device,
    shape: &LayerNorm,
    x: &Buffer<I>,
    w: Option<&Buffer<I>>,
    bias: Option<&Buffer<I>>,
    y: &mut Buffer<O>,
) -> Result<(), Error> {
    let LayerNorm { rows, n, .. } = *shape;
    check_eps("layer_norm", shape.eps)?;
    check_len("layer_norm", "x", "[R,N]", x.len(), &[rows, n])?;
    check_len("layer_norm", "w", "[N]", w.map_or(n, Buffer::len), &[n])?;
    check_len("layer_norm", "bias", "[N]", bias.map_or(n, Buffer::len), &[n])?;
    check_len("layer_norm", "y", "[R,N]", y.len(), &[rows, n])?;
    if y.is_empty() {
        return Ok(());
    }
    // What a warp keeps in registers.
    let kernel = match n * size_of::<I>() {
        0..=2048 => "layer_norm_short",
        2049..=8192 => "layer_norm_middle",
        8193..=16384 => "layer_norm_wide",
        _ => "layer_norm_long",
    };
    let arguments = [w, bias].into_iter().fold(Arguments::new().buffer(x), |arguments, given| match given {
        Some(given) => arguments.buffer(given).int(1),
        None => arguments.null().int(0),
    });
    let arguments = arguments.buffer(y).long(rows).long(n).float(shape.eps);
    // SAFETY: lengths were checked; a warp takes a row, and the kernel leaves rows behind the last alone.
    unsafe { device.launch(Build::of::<I, O>("layer_norm"), kernel, [rows.div_ceil(4), 1, 1], 128, 0, &arguments) }
}

/// Some rows, from `first` on.
struct Part<'a, I, O> {
    shape: &'a LayerNorm,
    x: Rows<'a, I>,
    first: usize,
    /// w and bias.
    affine: [Option<&'a [I]>; 2],
    y: &'a mut [O],
    large: bool,
}

impl<I: Element, O: Element> Part<'_, I, O> {
    fn chunks(cpu: &Cpu, shape: &LayerNorm, x: Rows<I>, affine: [Option<&[I]>; 2], y: &mut [O]) {
        let per_chunk = cpu.rows_per_chunk(shape.rows, shape.n);
        let large = is_large(cpu, y);
        cpu.chunks(y, per_chunk * shape.n, |chunk, y| {
            cpu.dispatch(Part { shape, x, first: chunk * per_chunk, affine, y, large });
        });
    }
}

impl<I: Element, O: Element> Kernel for Part<'_, I, O> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (n, count) = (self.shape.n, self.y.len() / self.shape.n.max(1));
        let mut stream = Stream::<O>::new(self.y, self.large);
        let OnLine(kept) = &mut OnLine([0f32; KEPT]);
        for row in self.first..self.first + count {
            let x = self.x.row(row);
            let (mean, r) = moments(s, x, self.shape.eps, kept);
            for (part, x) in x.chunks(KEPT).enumerate() {
                if n > KEPT {
                    differences(s, x, mean, kept);
                }
                let affine = self.affine.map(|given| given.map(|given| &given[part * KEPT..][..x.len()]));
                scale(s, &kept[..x.len()], r, affine, &mut stream);
            }
        }
        stream.end(s);
    }
}

/// The mean of a row and its scale r, all lanes alike. The differences of a row that is not longer than `kept` are there.
#[inline(always)]
pub(super) fn moments<S: Simd, I: Element>(s: S, x: &[I], eps: f32, kept: &mut [f32; KEPT]) -> (S::F, S::F) {
    let n = x.len();
    // The pad +0 leaves a lane, which is never -0, as it is.
    let mean = s.splat(lane_sum(s, x, I::default(), Add) / n as f32);
    let mut lanes = Lanes::new();
    for x in x.chunks(KEPT) {
        differences(s, x, mean, kept);
        lanes.add(s, &kept[..x.len()], Square);
    }
    (mean, s.splat(1.0 / (lanes.fold(s, n) / n as f32 + eps).sqrt()))
}

/// `d[i] = x[i] - mean`
#[inline(always)]
pub(super) fn differences<S: Simd, I: Element>(s: S, x: &[I], mean: S::F, d: &mut [f32]) {
    let two = 2 * S::LANES;
    let whole = x.len() - x.len() % two;
    for at in (0..whole).step_by(two) {
        let (x0, x1) = load_two(s, &x[at..][..two], false);
        store_two(s, (s.sub(x0, mean), s.sub(x1, mean)), &mut d[at..][..two]);
    }
    for at in (whole..x.len()).step_by(S::LANES) {
        narrow_at(s, s.sub(load_at(s, x, at, I::default()), mean), &mut d[..x.len()], at);
    }
}

/// `d * r * w + bias`, last rounding, as the next elements of `stream`.
#[inline(always)]
fn scale<S: Simd, I: Element, O: Element>(s: S, d: &[f32], r: S::F, affine: [Option<&[I]>; 2], stream: &mut Stream<O>) {
    let (mut from, two) = (0, 2 * S::LANES);
    while from < d.len() {
        let y = stream.room(d.len() - from);
        let len = y.len();
        let (d, [w, bias]) = (&d[from..][..len], affine.map(|given| given.map(|given| &given[from..][..len])));
        let whole = len - len % two;
        for at in (0..whole).step_by(two) {
            let (d0, d1) = load_two(s, &d[at..][..two], false);
            let mut y01 = (s.mul(d0, r), s.mul(d1, r));
            if let Some(w) = w {
                let (w0, w1) = load_two(s, &w[at..][..two], false);
                y01 = (s.mul(y01.0, w0), s.mul(y01.1, w1));
            }
            if let Some(bias) = bias {
                let (b0, b1) = load_two(s, &bias[at..][..two], false);
                y01 = (s.add(y01.0, b0), s.add(y01.1, b1));
            }
            narrow_two(s, y01, &mut y[at..][..two], false);
        }
        for at in (whole..len).step_by(S::LANES) {
            let mut v = s.mul(load_at(s, d, at, 0.0), r);
            if let Some(w) = w {
                v = s.mul(v, load_at(s, w, at, I::default()));
            }
            if let Some(bias) = bias {
                v = s.add(v, load_at(s, bias, at, I::default()));
            }
            narrow_at(s, v, y, at);
        }
        stream.put(s, len);
        from += len;
    }
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;
    use crate::{Isa, bf16, f16};
    use samebits_schema::sample::Random;

    /// The rule of NUMERICS, loop by loop.
    fn page(x: &[f32], eps: f32, w: Option<&[f32]>, bias: Option<&[f32]>) -> Vec<f32> {
        let lanes = |step: &dyn Fn(f32, f32) -> f32| {
            let mut lanes = [0f32; 256];
            x.iter().enumerate().for_each(|(i, &x)| lanes[i % 256] = step(lanes[i % 256], x));
            for h in [128, 64, 32, 16, 8, 4, 2, 1] {
                (0..h).for_each(|l| lanes[l] += lanes[l + h]);
            }
            lanes[0] / x.len() as f32
        };
        let mean = lanes(&|lane, x| lane + x);
        let r = 1.0 / (lanes(&|lane, x| (x - mean).mul_add(x - mean, lane)) + eps).sqrt();
        let element = |(i, x): (usize, &f32)| {
            let scaled = (x - mean) * r;
            let weighed = w.map_or(scaled, |w| scaled * w[i]);
            bias.map_or(weighed, |bias| weighed + bias[i])
        };
        x.iter().enumerate().map(element).collect()
    }

    fn values<I: Element>(random: &mut Random, len: usize, spread: f32, centre: f32) -> Vec<I> {
        (0..len).map(|_| I::narrow(centre + spread * (random.bits() as i32 as f32 / i32::MAX as f32))).collect()
    }

    fn is_the_page<I: Element, O: Element>(random: &mut Random) {
        let longest = random.pick(&[9000, 600, 600, 600]);
        let (rows, n) = (1 + random.below(4), 1 + random.below(longest));
        let (spread, centre) = (random.pick(&[0.01, 1.0, 300.0]), random.pick(&[0.0, 0.0, 7.0, 1000.0]));
        let mut x: Vec<I> = values(random, rows * n, spread, centre);
        let (w, bias): (Vec<I>, Vec<I>) = (values(random, n, 2.0, 0.0), values(random, n, 1.0, 0.0));
        let special = [f32::NAN, f32::INFINITY, -0.0, 3e38];
        (0..random.below(3)).for_each(|_| x[random.below(rows * n)] = I::narrow(random.pick(&special)));
        let w = Some(w.as_slice()).filter(|_| random.below(3) > 0);
        let bias = Some(bias.as_slice()).filter(|_| random.below(3) > 0);
        let shape = LayerNorm { rows, n, eps: random.pick(&[0.0, 1e-5, 0.5]) };
        let wide = |v: &[I]| -> Vec<f32> { v.iter().map(|v| v.widen()).collect() };
        let (wide_w, wide_bias) = (w.map(wide), bias.map(wide));
        let of_row = |x| page(&wide(x), shape.eps, wide_w.as_deref(), wide_bias.as_deref());
        let wanted: Vec<O> = x.chunks(n).flat_map(of_row).map(O::narrow).collect();
        for isa in Isa::of_machine() {
            let cpu = Cpu::new(isa, 1 + random.below(2), usize::MAX).unwrap();
            let mut y = vec![O::default(); rows * n];
            layer_norm(&cpu, &shape, &x, w, bias, &mut y).unwrap();
            let differs = |(found, wanted): (&O, &O)| found.widen().to_bits() != wanted.widen().to_bits();
            let at = y.iter().zip(&wanted).position(differs);
            assert_eq!(at, None, "{} to {} on {isa}: {shape:?}, {:?}", I::NAME, O::NAME, [w.is_some(), bias.is_some()]);
        }
    }

    pub(crate) fn it_is_the_page_on_every_instruction_set() {
        let mut random = Random::new(7);
        for _ in 0..60 {
            is_the_page::<bf16, bf16>(&mut random);
            is_the_page::<bf16, f32>(&mut random);
            is_the_page::<f16, bf16>(&mut random);
            is_the_page::<f32, bf16>(&mut random);
            is_the_page::<f32, f32>(&mut random);
        }
    }
}
