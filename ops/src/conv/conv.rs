//! Convolution of images: `x[B,C,D,H,W], w[O,I,KD,KH,KW], bias[O]? -> y[B,O,OD,OH,OW]`, I = C / groups.
//!
//! Formula: `y[b][o][q] = sum over k = (i, tap) of w[o][i][tap] * xs + bias[o]`, xs what the tap meets of channel `g I + i` of
//! x, g the group of o; +0 outside of x.
//! Order: that of `gemm` of w `[O,K]` and of rows of K such xs: k by channel, then by tap, depth, height, width; K is cut in 8
//! segments, each a chain of fma from +0, which are joined as a tree. What is met outside of x is a term as all others.
//! Rounding: each fma and each join once to f32; `+ bias` once in f32; the last rounding to the output type.
//!
//! It is gemm whose panels are patches of the image: each is laid out when rows of w come to it.

use super::window::{Conv, Factors, LATTICE, Products, THREADS, whole, with_lattice};
use crate::backend::device::{Arguments, Buffer, Build, Device, Unit, int};
use crate::call::Entry;
use crate::conv::causal_conv1d::{Part, optional};
use crate::conv::taps::on_host;
use crate::element::{Stored, typed};
use crate::gemm::gemm::Says;
use crate::{Cpu, Element, Error, TensorMut, TensorRef, check_len};

/// What conv says of itself.
const SAYS: Says = Says {
    op: "conv",
    lays_out: "conv lays its weight out",
    flushes: "conv: operands so small that VDPBF16PS would flush them",
};

/// `x[B,C,D,H,W], w[O,I,KD,KH,KW], bias[O]? -> y[B,O,OD,OH,OW]`, all row-major.
///
/// # Errors
/// [`Error::Length`] when a slice does not match; [`Error::Value`] for windows that lie on no place of x;
/// [`Error::Budget`] below the smallest plan.
///
/// ```
/// use samebits_ops::{Conv, Cpu, Window, conv};
///
/// // Three taps on four places, with a zero on both sides.
/// let window = Window { before: [0, 0, 1], behind: [0, 0, 1], ..Window::of([1, 1, 3]) };
/// let shape = Conv { batch: 1, channels: 1, outputs: 1, groups: 1, image: [1, 1, 4], window };
/// let mut y = [0f32; 4];
/// conv(&Cpu::best(), &shape, &[1f32, 2.0, 3.0, 4.0], &[1.0, 10.0, 100.0], Some(&[0.5]), &mut y)?;
/// assert_eq!(y, [210.5, 321.5, 432.5, 43.5]);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn conv<I: Element, O: Element>(
    cpu: &Cpu,
    shape: &Conv,
    x: &[I],
    w: &[I],
    bias: Option<&[I]>,
    y: &mut [O],
) -> Result<(), Error> {
    check(shape, [x.len(), w.len(), y.len()], bias.map(<[I]>::len))?;
    let (x, w) = (TensorRef::of(x, &shape.images()), TensorRef::of(w, &shape.weight()));
    let bias = bias.map(|bias| TensorRef::of(bias, &[shape.outputs]));
    run(cpu, shape, x, w, bias, TensorMut::of(y, &shape.outputs_of_all()))
}

/// Checks the lengths of x, w and y, and of bias where it is given.
fn check(shape: &Conv, [x, w, y]: [usize; 3], bias: Option<usize>) -> Result<(), Error> {
    shape.check(SAYS.op)?;
    shape.check_image(SAYS.op, "x", x)?;
    shape.check_weight(SAYS.op, "w", w)?;
    check_len(SAYS.op, "bias", "[O]", bias.unwrap_or(shape.outputs), &[shape.outputs])?;
    shape.check_output(SAYS.op, "y", y)
}

/// Tensors of any layout.
fn run(
    cpu: &Cpu,
    shape: &Conv,
    x: TensorRef,
    w: TensorRef,
    bias: Option<TensorRef>,
    y: TensorMut,
) -> Result<(), Error> {
    on_host(SAYS.op, [("x", Some(x)), ("w", Some(w)), ("bias", bias)])?;
    let channels = shape.channels / shape.groups;
    typed!(x.dtype() => I, {
        let products = Products {
            cpu,
            says: &SAYS,
            batch: shape.batch,
            groups: shape.groups,
            sizes: [shape.outputs / shape.groups, channels * shape.window.size()],
            channels,
            images: x.rows::<I>(),
            axes: shape.forward(),
            bias,
        };
        typed!(y.dtype() => O, products.run(Factors::There(&whole(&w)), y.host::<O>(SAYS.op, "y")?))
    })
}

/// conv, by name.
pub(crate) const OP: Entry = Entry {
    name: "conv",
    cpu: |cpu, args| {
        run(cpu, &Conv::of(args.call), args.input("x"), args.input("w"), args.optional("bias"), args.output("y"))
    },
    device: Some(|on, args| {
        let (x, w, bias, y) = (args.input("x"), args.input("w"), args.optional("bias"), args.output("y"));
        typed!(x.dtype() => I, typed!(y.dtype() => O, {
            let bias = bias.map(|bias| bias.device_part::<I>(SAYS.op, "bias")).transpose()?;
            let (x, w) = (x.device_part::<I>(SAYS.op, "x")?, w.device_part::<I>(SAYS.op, "w")?);
            launch::<I, O>(on, &Conv::of(args.call), [x, w], bias, y.device_part(SAYS.op, "y")?)
        }))
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// Its kernel.
const UNIT: Unit = Unit { structs: &[LATTICE], ..Unit::of("conv", include_str!("conv.cu"), &["conv"]) };

/// Lengths were checked.
fn launch<I: Stored, O: Stored>(
    on: &Device,
    shape: &Conv,
    [x, w]: [Part<I>; 2],
    bias: Option<Part<I>>,
    (y, at): (&mut Buffer<O>, usize),
) -> Result<(), Error> {
    shape.check_device(SAYS.op)?;
    let count: usize = shape.outputs_of_all().iter().product();
    if count == 0 {
        return Ok(());
    }
    let arguments = with_lattice(Arguments::new(), shape.forward()).buffer_from(x.0, x.1).buffer_from(w.0, w.1);
    let arguments = optional(arguments, bias).buffer_from(y, at).long(count);
    let arguments = arguments
        .int(int(SAYS.op, "groups", shape.groups)?)
        .int(int(SAYS.op, "O", shape.outputs / shape.groups)?)
        .int(int(SAYS.op, "C", shape.channels / shape.groups)?);
    let grid = [count.div_ceil(THREADS), 1, 1];
    // SAFETY: lengths were checked; a thread takes an output, and the kernel leaves what is behind the last alone.
    unsafe { on.launch(Build::of::<I, O>("conv"), "conv", grid, THREADS as u32, 0, &arguments) }
}

/// [`conv`] on a device.
///
/// # Errors
/// As [`conv`]; errors of the device.
pub fn on_device<I: Stored, O: Stored>(
    on: &Device,
    shape: &Conv,
    x: &Buffer<I>,
    w: &Buffer<I>,
    bias: Option<&Buffer<I>>,
    y: &mut Buffer<O>,
) -> Result<(), Error> {
    check(shape, [x.len(), w.len(), y.len()], bias.map(Buffer::len))?;
    launch(on, shape, [(x, 0), (w, 0)], bias.map(|bias| (bias, 0)), (y, 0))
}
