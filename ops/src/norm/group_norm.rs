//! Group normalisation: `x[B,C,P], w[C]?, bias[C]? -> y[B,C,P]`, with silu or without.
//!
//! Formula: over the N elements of a group of channels of an image, `d = x - mean(x)`, `r = 1 / sqrt(mean(d^2) + eps)`;
//! `z = d * r * w + bias`; y is z, or `z * sigmoid(z)`.
//! Order: elements of a group are numbered as they stand, channel after channel; `lanes(x)`, each lane a sum, divided by
//! `f32(N)`; `lanes(d*d)`, each lane a chain of fma, divided by `f32(N)`.
//! Rounding: every step once to f32: d, `d*r`, then `* w` and `+ bias` where they are given, the sigmoid and the product with it;
//! last rounding. Statistics are f32 whatever the inputs are: no sum of fp16 numbers overflows.

use crate::backend::device::{Arguments, Buffer, Build, Device, Unit, int};
use crate::call::Entry;
use crate::conv::causal_conv1d::optional;
use crate::element::{Stored, typed};
use crate::math::sigmoid;
use crate::norm::group::{Group, GroupNorm};
use crate::norm::layer_norm::KEPT;
use crate::simd::{Kernel, OnLine, Simd, load_at, narrow_at};
use crate::{Cpu, Element, Error, TensorMut, TensorRef, check_len};

const NAME: &str = "group_norm";

/// `x[B,C,P], w[C]?, bias[C]? -> y[B,C,P]`, all row-major: images of P places, whatever their axes are.
///
/// # Errors
/// [`Error::Length`] when a slice does not match; [`Error::Value`] for groups that do not divide C.
///
/// ```
/// use samebits_ops::{Cpu, GroupNorm, group_norm};
///
/// let shape = GroupNorm { batch: 1, channels: 2, places: 2, groups: 1, eps: 0.0, silu: false };
/// let mut y = [0f32; 4];
/// group_norm(&Cpu::best(), &shape, &[5f32, 5.0, 1.0, 1.0], Some(&[10.0, 20.0]), Some(&[0.5, 0.0]), &mut y)?;
/// assert_eq!(y, [10.5, 10.5, -20.0, -20.0]);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn group_norm<I: Element, O: Element>(
    cpu: &Cpu,
    shape: &GroupNorm,
    x: &[I],
    w: Option<&[I]>,
    bias: Option<&[I]>,
    y: &mut [O],
) -> Result<(), Error> {
    check(shape, x.len(), [w, bias].map(|given| given.map(<[I]>::len)), y.len())?;
    let affine = [w, bias].map(|given| given.map(|given| TensorRef::of(given, &[shape.channels])));
    run(cpu, shape, TensorRef::of(x, &shape.images()), affine, TensorMut::of(y, &shape.images()))
}

/// Checks the lengths of x, of w and bias where they are given, and of y.
fn check(shape: &GroupNorm, x: usize, [w, bias]: [Option<usize>; 2], y: usize) -> Result<(), Error> {
    let channels = shape.channels;
    shape.check(NAME)?;
    check_len(NAME, "x", "[B,C,P]", x, &shape.images())?;
    check_len(NAME, "w", "[C]", w.unwrap_or(channels), &[channels])?;
    check_len(NAME, "bias", "[C]", bias.unwrap_or(channels), &[channels])?;
    check_len(NAME, "y", "[B,C,P]", y, &shape.images())
}

/// x of any layout; `affine` is w and bias.
fn run(cpu: &Cpu, shape: &GroupNorm, x: TensorRef, affine: [Option<TensorRef>; 2], y: TensorMut) -> Result<(), Error> {
    x.on_host(NAME, "x")?;
    for (given, name) in affine.iter().zip(["w", "bias"]) {
        given.map_or(Ok(()), |given| given.on_host(NAME, name))?;
    }
    if shape.images().contains(&0) {
        return Ok(());
    }
    let [w, bias] = shape.affine(cpu, affine);
    typed!(y.dtype() => O, {
        cpu.chunks(y.host::<O>(NAME, "y")?, shape.len(), |number, y| {
            let (group, channels) = (Group::of(shape, x, number), shape.channels_of(number));
            let [mean, r] = group.moments(cpu, y.len(), shape.eps);
            let OnLine(kept) = &mut OnLine([0f32; KEPT]);
            for (part, y) in y.chunks_mut(KEPT).enumerate() {
                let (at, x) = (part * KEPT, &mut kept[..y.len()]);
                group.read(cpu, at, x);
                let affine = [&w[channels.clone()], &bias[channels.clone()]];
                cpu.dispatch(Finish { x, at, places: shape.places, mean, r, affine, silu: shape.silu, y });
            }
        });
    });
    Ok(())
}

/// Some elements of a group from `at` on.
struct Finish<'a, O> {
    x: &'a [f32],
    at: usize,
    places: usize,
    mean: f32,
    r: f32,
    /// w and bias of its channels.
    affine: [&'a [f32]; 2],
    silu: bool,
    y: &'a mut [O],
}

impl<O: Element> Kernel for Finish<'_, O> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Finish { mut x, mut at, places, mean, r, affine: [w, bias], silu, mut y } = self;
        let (mean, r) = (s.splat(mean), s.splat(r));
        while !x.is_empty() {
            let channel = at / places;
            let (w, bias) = (s.splat(w[channel]), s.splat(bias[channel]));
            let len = x.len().min(places - at % places);
            let (piece, (to, rest)) = (&x[..len], y.split_at_mut(len));
            for i in (0..len).step_by(S::LANES) {
                let d = s.sub(load_at(s, piece, i, 0.0), mean);
                let mut z = s.add(s.mul(s.mul(d, r), w), bias);
                if silu {
                    z = s.mul(z, sigmoid(s, z));
                }
                narrow_at(s, z, to, i);
            }
            (x, y, at) = (&x[len..], rest, at + len);
        }
    }
}

/// Its kernel.
const UNIT: Unit = Unit::of(NAME, include_str!("group_norm.cu"), &[NAME]);

/// group_norm, by name.
pub(crate) const OP: Entry = Entry {
    name: NAME,
    cpu: |cpu, args| {
        let shape = GroupNorm::of(args.call);
        run(cpu, &shape, args.input("x"), ["w", "bias"].map(|name| args.optional(name)), args.output("y"))
    },
    device: Some(|on, args| {
        let shape = GroupNorm::of(args.call);
        let (x, w, bias, y) = (args.input("x"), args.optional("w"), args.optional("bias"), args.output("y"));
        typed!(x.dtype() => I, typed!(y.dtype() => O, {
            let w = w.map(|w| w.device(NAME, "w")).transpose()?;
            let bias = bias.map(|bias| bias.device(NAME, "bias")).transpose()?;
            on_device::<I, O>(on, &shape, x.device(NAME, "x")?, w, bias, y.device(NAME, "y")?)
        }))
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// [`group_norm`] on a device.
///
/// # Errors
/// As [`group_norm`]; errors of the device.
pub fn on_device<I: Stored, O: Stored>(
    device: &Device,
    shape: &GroupNorm,
    x: &Buffer<I>,
    w: Option<&Buffer<I>>,
    bias: Option<&Buffer<I>>,
    y: &mut Buffer<O>,
) -> Result<(), Error> {
    check(shape, x.len(), [w, bias].map(|given| given.map(Buffer::len)), y.len())?;
    if y.is_empty() {
        return Ok(());
    }
    let arguments = [w, bias]
        .into_iter()
        .fold(Arguments::new().buffer(x), |arguments, given| optional(arguments, given.map(|given| (given, 0))))
        .buffer(y)
        .long(shape.places)
        .int(int(NAME, "C", shape.together())?)
        .int(int(NAME, "groups", shape.groups)?)
        .float(shape.eps)
        .int(shape.silu.into());
    // SAFETY: lengths were checked; a block takes a group.
    unsafe { device.launch(Build::of::<I, O>(NAME), NAME, [shape.batch * shape.groups, 1, 1], 256, 0, &arguments) }
}
