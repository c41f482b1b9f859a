//! Gradients of group normalisation: `x[B,C,P], w[C]?, bias[C]?, dy[B,C,P] -> dx[B,C,P], dw[B,C], dbias[B,C]` (both f32).
//!
//! Formula: with d and r of `group_norm`, `h = d * r` and `z = h * w + bias`: dz is dy, or with silu
//! `dy * s * (1 + z * (1 - s))`, `s = sigmoid(z)`. Of a channel of an image `dbias = sum(dz)`, `dw = sum(dz * h)`; of a group
//! `a = sum(w * dbias) / N`, `b = sum(w * dw) / N`; `dx = r * (dz * w - a - b * h)`.
//! Order: `dbias = lanes(dz)`, each lane a sum, and `dw = lanes(dz*h)`, each lane a chain of fma, over the places of a channel; a
//! and b are chains of fma over the channels of a group, divided by `f32(N)`; `r * fma(-b, h, dz * w - a)`.
//! Rounding: every step once to f32; dx has the last rounding. The gradients of w and bias are `token_sum` of dw and dbias, whose
//! rows are images.

use crate::backend::device::{Arguments, Buffer, Build, Device, Unit, int};
use crate::call::Entry;
use crate::conv::causal_conv1d::optional;
use crate::element::{Stored, typed};
use crate::math::sigmoid;
use crate::norm::group::{Fold, Group, GroupNorm};
use crate::norm::layer_norm::KEPT;
use crate::parallel::SharedOut;
use crate::reduce::{Add, Lanes};
use crate::simd::{Kernel, OnLine, Simd, load_at, narrow_at};
use crate::{Cpu, Element, Error, TensorMut, TensorRef, check_len};

const NAME: &str = "group_norm_backward";

/// What [`group_norm_backward`] reads.
#[derive(Clone, Copy, Debug)]
pub struct GroupNormInputs<'a, I> {
    /// `x[B,C,P]`.
    pub x: &'a [I],
    /// `w[C]`.
    pub w: Option<&'a [I]>,
    /// `bias[C]`; it is read with silu alone.
    pub bias: Option<&'a [I]>,
    /// `dy[B,C,P]`.
    pub dy: &'a [I],
}

/// The gradient `dx[B,C,P]` of [`group_norm`](crate::group_norm())'s x from the gradient `dy[B,C,P]` of its output, and
/// those of w and bias of each image, `[B,C]` each.
///
/// # Errors
/// [`Error::Length`] when a slice does not match; [`Error::Value`] for groups that do not divide C.
///
/// ```
/// use samebits_ops::{Cpu, GroupNorm, GroupNormInputs, group_norm_backward};
///
/// // A shift of the group, or a longer one, has the same norm: of dy, those parts are lost.
/// let shape = GroupNorm { batch: 1, channels: 2, places: 2, groups: 1, eps: 0.0, silu: false };
/// let inputs = GroupNormInputs { x: &[6f32, 4.0, 6.0, 4.0], w: None, bias: None, dy: &[4.0, 0.0, 0.0, 0.0] };
/// let (mut dx, mut dw, mut dbias) = ([9f32; 4], [9f32; 2], [9f32; 2]);
/// group_norm_backward(&Cpu::best(), &shape, &inputs, &mut dx, &mut dw, &mut dbias)?;
/// assert_eq!((dx, dw, dbias), ([2.0, 0.0, -2.0, 0.0], [4.0, 0.0], [4.0, 0.0]));
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn group_norm_backward<I: Element, O: Element>(
    cpu: &Cpu,
    shape: &GroupNorm,
    inputs: &GroupNormInputs<I>,
    dx: &mut [O],
    dw: &mut [f32],
    dbias: &mut [f32],
) -> Result<(), Error> {
    let GroupNormInputs { x, w, bias, dy } = *inputs;
    let affine = [w, bias].map(|given| given.map(<[I]>::len));
    check(shape, [x.len(), dy.len(), dx.len()], affine, [dw.len(), dbias.len()])?;
    let affine = [w, bias].map(|given| given.map(|given| TensorRef::of(given, &[shape.channels])));
    let images = shape.images();
    run(cpu, shape, [x, dy].map(|x| TensorRef::of(x, &images)), affine, TensorMut::of(dx, &images), [dw, dbias])
}

/// Checks the lengths of x, dy and dx, of w and bias where they are given, and of dw and dbias.
fn check(
    shape: &GroupNorm,
    images: [usize; 3],
    [w, bias]: [Option<usize>; 2],
    [dw, dbias]: [usize; 2],
) -> Result<(), Error> {
    let GroupNorm { batch, channels, .. } = *shape;
    shape.check(NAME)?;
    for (found, name) in images.into_iter().zip(["x", "dy", "dx"]) {
        check_len(NAME, name, "[B,C,P]", found, &shape.images())?;
    }
    check_len(NAME, "w", "[C]", w.unwrap_or(channels), &[channels])?;
    check_len(NAME, "bias", "[C]", bias.unwrap_or(channels), &[channels])?;
    check_len(NAME, "dw", "[B,C]", dw, &[batch, channels])?;
    check_len(NAME, "dbias", "[B,C]", dbias, &[batch, channels])
}

/// x and dy of any layout; `affine` is w and bias.
fn run(
    cpu: &Cpu,
    shape: &GroupNorm,
    [x, dy]: [TensorRef; 2],
    affine: [Option<TensorRef>; 2],
    dx: TensorMut,
    [dw, dbias]: [&mut [f32]; 2],
) -> Result<(), Error> {
    let given = [("x", Some(x)), ("w", affine[0]), ("bias", affine[1]), ("dy", Some(dy))];
    given.into_iter().try_for_each(|(name, given)| given.map_or(Ok(()), |given| given.on_host(NAME, name)))?;
    if shape.images().contains(&0) {
        dw.fill(0.0);
        dbias.fill(0.0);
        return Ok(());
    }
    let [w, bias] = shape.affine(cpu, affine);
    let (dw, dbias) = (SharedOut::new(dw), SharedOut::new(dbias));
    typed!(dx.dtype() => O, {
        cpu.chunks(dx.host::<O>(NAME, "dx")?, shape.len(), |number, dx| {
            let channels = shape.channels_of(number);
            let reader = Reader {
                cpu,
                places: shape.places,
                silu: shape.silu,
                x: Group::of(shape, x, number),
                dy: Group::of(shape, dy, number),
                moments: Group::of(shape, x, number).moments(cpu, dx.len(), shape.eps),
                w: &w[channels.clone()],
                bias: &bias[channels],
            };
            let first = number * shape.together();
            // SAFETY: a group has channels of its own.
            let sums = unsafe { [dw.part(first, shape.together()), dbias.part(first, shape.together())] };
            let [b, a] = reader.sums(sums).map(|sum| sum / dx.len() as f32);
            reader.dx(a, b, dx);
        });
    });
    Ok(())
}

/// A group, read some places of a channel at a time.
struct Reader<'a> {
    cpu: &'a Cpu,
    places: usize,
    silu: bool,
    x: Group<'a>,
    dy: Group<'a>,
    /// Mean and scale.
    moments: [f32; 2],
    /// w and bias of its channels.
    w: &'a [f32],
    bias: &'a [f32],
}

impl Reader<'_> {
    /// h and dz of places of a channel from `at` on.
    fn read(&self, channel: usize, at: usize, h: &mut [f32], dz: &mut [f32]) {
        self.x.read(self.cpu, channel * self.places + at, h);
        self.dy.read(self.cpu, channel * self.places + at, dz);
        let (w, bias) = (self.w[channel], self.bias[channel]);
        self.cpu.dispatch(Slope { moments: self.moments, w, bias, silu: self.silu, h, dz });
    }

    /// Calls `part` with h and dz of some places of a channel at a time, and where they stand in it.
    fn parts(&self, channel: usize, mut part: impl FnMut(usize, &[f32], &[f32])) {
        let OnLine([h, dz]) = &mut OnLine([[0f32; KEPT]; 2]);
        for at in (0..self.places).step_by(KEPT) {
            let len = KEPT.min(self.places - at);
            self.read(channel, at, &mut h[..len], &mut dz[..len]);
            part(at, &h[..len], &dz[..len]);
        }
    }

    /// dw and dbias of its channels, and the sums of both times w.
    fn sums(&self, [dw, dbias]: [&mut [f32]; 2]) -> [f32; 2] {
        let mut sums = [0f32; 2];
        for (channel, w) in self.w.iter().enumerate() {
            let mut lanes = [Lanes::new(), Lanes::new()];
            self.parts(channel, |_, h, dz| self.cpu.dispatch(Enter { h, dz, lanes: &mut lanes }));
            let [of_w, of_bias] = lanes.each_mut().map(|lanes| self.cpu.dispatch(Fold { lanes, n: self.places }));
            sums = [w.mul_add(of_w, sums[0]), w.mul_add(of_bias, sums[1])];
            [dw[channel], dbias[channel]] = [of_w, of_bias].map(<f32 as Element>::narrow);
        }
        sums
    }

    fn dx<O: Element>(&self, a: f32, b: f32, dx: &mut [O]) {
        for (channel, dx) in dx.chunks_mut(self.places).enumerate() {
            self.parts(channel, |at, h, dz| {
                let dx = &mut dx[at..][..h.len()];
                self.cpu.dispatch(Finish { h, dz, w: self.w[channel], r: self.moments[1], a, b, dx });
            });
        }
    }
}

/// h in the place of x, and dz in the place of dy.
struct Slope<'a> {
    moments: [f32; 2],
    w: f32,
    bias: f32,
    silu: bool,
    h: &'a mut [f32],
    dz: &'a mut [f32],
}

impl Kernel for Slope<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Slope { moments: [mean, r], w, bias, silu, h, dz } = self;
        let (mean, r, w, bias, one) = (s.splat(mean), s.splat(r), s.splat(w), s.splat(bias), s.splat(1.0));
        for at in (0..h.len()).step_by(S::LANES) {
            let normed = s.mul(s.sub(load_at(s, h, at, 0.0), mean), r);
            narrow_at(s, normed, h, at);
            if silu {
                let z = s.add(s.mul(normed, w), bias);
                let share = sigmoid(s, z);
                let slope = s.mul(share, s.fma(z, s.sub(one, share), one));
                narrow_at(s, s.mul(load_at(s, dz, at, 0.0), slope), dz, at);
            }
        }
    }
}

/// dz * h and dz enter their lanes.
struct Enter<'a> {
    h: &'a [f32],
    dz: &'a [f32],
    lanes: &'a mut [Lanes; 2],
}

impl Kernel for Enter<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Enter { h, dz, lanes: [of_w, of_bias] } = self;
        of_w.add_products(s, dz, h);
        of_bias.add(s, dz, Add);
    }
}

/// Some places of a channel.
struct Finish<'a, O> {
    h: &'a [f32],
    dz: &'a [f32],
    w: f32,
    r: f32,
    a: f32,
    b: f32,
    dx: &'a mut [O],
}

impl<O: Element> Kernel for Finish<'_, O> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Finish { h, dz, w, r, a, b, dx } = self;
        let (w, r, a, factor) = (s.splat(w), s.splat(r), s.splat(a), s.splat(-b));
        for at in (0..h.len()).step_by(S::LANES) {
            let g = s.mul(load_at(s, dz, at, 0.0), w);
            let inner = s.fma(factor, load_at(s, h, at, 0.0), s.sub(g, a));
            narrow_at(s, s.mul(r, inner), dx, at);
        }
    }
}

/// Its kernel.
const UNIT: Unit = Unit::of(NAME, include_str!("group_norm_backward.cu"), &[NAME]);

/// group_norm_backward, by name.
pub(crate) const OP: Entry = Entry {
    name: NAME,
    cpu: |cpu, args| {
        let shape = GroupNorm::of(args.call);
        let (images, affine) =
            (["x", "dy"].map(|name| args.input(name)), ["w", "bias"].map(|name| args.optional(name)));
        let (dw, dbias) = (args.output("dw").host(NAME, "dw")?, args.output("dbias").host(NAME, "dbias")?);
        run(cpu, &shape, images, affine, args.output("dx"), [dw, dbias])
    },
    device: Some(|on, args| {
        let (shape, [x, dy]) = (GroupNorm::of(args.call), ["x", "dy"].map(|name| args.input(name)));
        let (w, bias) = (args.optional("w"), args.optional("bias"));
        let (dx, dw, dbias) = (args.output("dx"), args.output("dw"), args.output("dbias"));
        typed!(x.dtype() => I, typed!(dx.dtype() => O, {
            let inputs = DeviceInputs::<I> {
                x: x.device(NAME, "x")?,
                w: w.map(|w| w.device(NAME, "w")).transpose()?,
                bias: bias.map(|bias| bias.device(NAME, "bias")).transpose()?,
                dy: dy.device(NAME, "dy")?,
            };
            let sums = [dw.device(NAME, "dw")?, dbias.device(NAME, "dbias")?];
            on_device::<I, O>(on, &shape, &inputs, dx.device(NAME, "dx")?, sums)
        }))
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// As [`GroupNormInputs`], on a device.
#[derive(Clone, Copy)]
pub struct DeviceInputs<'a, I> {
    /// `x[B,C,P]`.
    pub x: &'a Buffer<I>,
    /// `w[C]`.
    pub w: Option<&'a Buffer<I>>,
    /// `bias[C]`.
    pub bias: Option<&'a Buffer<I>>,
    /// `dy[B,C,P]`.
    pub dy: &'a Buffer<I>,
}

/// [`group_norm_backward`] on a device; the last two are dw and dbias.
///
/// # Errors
/// As [`group_norm_backward`]; errors of the device.
pub fn on_device<I: Stored, O: Stored>(
    device: &Device,
    shape: &GroupNorm,
    inputs: &DeviceInputs<I>,
    dx: &mut Buffer<O>,
    [dw, dbias]: [&mut Buffer<f32>; 2],
) -> Result<(), Error> {
    let DeviceInputs { x, w, bias, dy } = *inputs;
    let affine = [w, bias].map(|given| given.map(Buffer::len));
    check(shape, [x.len(), dy.len(), dx.len()], affine, [dw.len(), dbias.len()])?;
    if dw.is_empty() {
        return Ok(());
    }
    let arguments = optional(Arguments::new().buffer(x), w.map(|w| (w, 0)));
    let arguments = optional(arguments, bias.map(|bias| (bias, 0))).buffer(dy).buffer(dx).buffer(dw).buffer(dbias);
    let arguments = arguments
        .long(shape.places)
        .int(int(NAME, "C", shape.together())?)
        .int(int(NAME, "groups", shape.groups)?)
        .float(shape.eps)
        .int(shape.silu.into());
    // SAFETY: lengths were checked; a block takes a group.
    unsafe { device.launch(Build::of::<I, O>(NAME), NAME, [shape.batch * shape.groups, 1, 1], 256, 0, &arguments) }
}
