//! Gradient of the images of a convolution: `dy[B,O,OD,OH,OW], w[O,I,KD,KH,KW], offset[C]? -> dx[B,C,D,H,W]`, I = C / groups. With
//! an offset it is the transposed convolution.
//!
//! Formula: `dx[b][c][p] = sum over k = (o, tap) of w[o][i][tap] * dys + offset[c]`, o of the group of c, i the number of c in it,
//! dys that dy[b][o] whose tap has met place p; +0 where there is none.
//! Order: that of `gemm`, as in `conv`: k by channel o, then by tap, depth, height, width; segments of chains of fma, joined as a
//! tree. What is met outside of dy, or between its places, is a term as all others.
//! Rounding: each fma and each join once to f32; `+ offset` once in f32; the last rounding to the output type.

use super::window::{Conv, Factors, Products, THREADS, whole, with_lattice};
use crate::backend::device::{Arguments, Buffer, Build, Device, Unit, int};
use crate::call::Entry;
use crate::conv::causal_conv1d::{Part, optional};
use crate::conv::taps::on_host;
use crate::element::{Stored, typed};
use crate::gemm::gemm::Says;
use crate::{Cpu, Element, Error, TensorMut, TensorRef, check_len};

/// What conv_dx says of itself.
const SAYS: Says = Says {
    op: "conv_dx",
    lays_out: "conv_dx lays its weight out",
    flushes: "conv_dx: operands so small that VDPBF16PS would flush them",
};

/// `dy[B,O,OD,OH,OW], w[O,I,KD,KH,KW], offset[C]? -> dx[B,C,D,H,W]`, all row-major: the gradient of x from that of
/// [`conv`](crate::conv())'s y.
///
/// # Errors
/// As [`conv`](crate::conv()).
///
/// ```
/// use samebits_ops::{Conv, Cpu, Window, conv_dx};
///
/// // Two taps on every second place.
/// let window = Window { stride: [1, 1, 2], ..Window::of([1, 1, 2]) };
/// let shape = Conv { batch: 1, channels: 1, outputs: 1, groups: 1, image: [1, 1, 5], window };
/// let mut dx = [9f32; 5];
/// conv_dx(&Cpu::best(), &shape, &[1f32, 2.0], &[10.0, 100.0], None, &mut dx)?;
/// assert_eq!(dx, [10.0, 100.0, 20.0, 200.0, 0.0]);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn conv_dx<I: Element, O: Element>(
    cpu: &Cpu,
    shape: &Conv,
    dy: &[I],
    w: &[I],
    offset: Option<&[I]>,
    dx: &mut [O],
) -> Result<(), Error> {
    check(shape, [dy.len(), w.len(), dx.len()], offset.map(<[I]>::len))?;
    let (dy, w) = (TensorRef::of(dy, &shape.outputs_of_all()), TensorRef::of(w, &shape.weight()));
    let offset = offset.map(|offset| TensorRef::of(offset, &[shape.channels]));
    run(cpu, shape, dy, w, offset, TensorMut::of(dx, &shape.images()))
}

/// Checks the lengths of dy, w and dx, and of offset where it is given.
fn check(shape: &Conv, [dy, w, dx]: [usize; 3], offset: Option<usize>) -> Result<(), Error> {
    shape.check(SAYS.op)?;
    shape.check_output(SAYS.op, "dy", dy)?;
    shape.check_weight(SAYS.op, "w", w)?;
    check_len(SAYS.op, "offset", "[C]", offset.unwrap_or(shape.channels), &[shape.channels])?;
    shape.check_image(SAYS.op, "dx", dx)
}

/// Tensors of any layout.
fn run(
    cpu: &Cpu,
    shape: &Conv,
    dy: TensorRef,
    w: TensorRef,
    offset: Option<TensorRef>,
    dx: TensorMut,
) -> Result<(), Error> {
    on_host(SAYS.op, [("dy", Some(dy)), ("w", Some(w)), ("offset", offset)])?;
    let (rows, channels, taps) = (shape.channels / shape.groups, shape.outputs / shape.groups, shape.window.size());
    typed!(dy.dtype() => I, {
        let products = Products {
            cpu,
            says: &SAYS,
            batch: shape.batch,
            groups: shape.groups,
            sizes: [rows, channels * taps],
            channels,
            images: dy.rows::<I>(),
            axes: shape.backward(),
            bias: offset,
        };
        let w = whole::<I>(&w);
        // Row i of a group: the taps of input channel i in all output channels, one behind the other.
        let write = |room: &mut [I]| {
            let mut taps_of_rows = room.chunks_exact_mut(taps);
            for (group, i) in (0..shape.groups).flat_map(|group| (0..rows).map(move |i| (group, i))) {
                for o in group * channels..(group + 1) * channels {
                    let to = taps_of_rows.next().expect("the room has all");
                    to.copy_from_slice(&w[(o * rows + i) * taps..][..taps]);
                }
            }
        };
        typed!(dx.dtype() => O, products.run(Factors::Made(&write), dx.host::<O>(SAYS.op, "dx")?))
    })
}

/// conv_dx, by name.
pub(crate) const OP: Entry = Entry {
    name: "conv_dx",
    cpu: |cpu, args| {
        run(cpu, &Conv::of(args.call), args.input("dy"), args.input("w"), args.optional("offset"), args.output("dx"))
    },
    device: Some(|on, args| {
        let (dy, w, offset, dx) = (args.input("dy"), args.input("w"), args.optional("offset"), args.output("dx"));
        typed!(dy.dtype() => I, typed!(dx.dtype() => O, {
            let offset = offset.map(|offset| offset.device_part::<I>(SAYS.op, "offset")).transpose()?;
            let (dy, w) = (dy.device_part::<I>(SAYS.op, "dy")?, w.device_part::<I>(SAYS.op, "w")?);
            launch::<I, O>(on, &Conv::of(args.call), [dy, w], offset, dx.device_part(SAYS.op, "dx")?)
        }))
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// Its kernel.
const UNIT: Unit = Unit::of("conv_dx", include_str!("conv_dx.cu"), &["conv_dx"]);

/// Lengths were checked.
fn launch<I: Stored, O: Stored>(
    on: &Device,
    shape: &Conv,
    [dy, w]: [Part<I>; 2],
    offset: Option<Part<I>>,
    (dx, at): (&mut Buffer<O>, usize),
) -> Result<(), Error> {
    shape.check_device(SAYS.op)?;
    let count: usize = shape.images().iter().product();
    if count == 0 {
        return Ok(());
    }
    let arguments = with_lattice(Arguments::new(), shape.backward()).buffer_from(dy.0, dy.1).buffer_from(w.0, w.1);
    let arguments = optional(arguments, offset).buffer_from(dx, at).long(count);
    let arguments = arguments
        .int(int(SAYS.op, "groups", shape.groups)?)
        .int(int(SAYS.op, "C", shape.channels / shape.groups)?)
        .int(int(SAYS.op, "O", shape.outputs / shape.groups)?);
    let grid = [count.div_ceil(THREADS), 1, 1];
    // SAFETY: lengths were checked; a thread takes an output, and the kernel leaves what is behind the last alone.
    unsafe { on.launch(Build::of::<I, O>("conv_dx"), "conv_dx", grid, THREADS as u32, 0, &arguments) }
}

/// [`conv_dx`] on a device.
///
/// # Errors
/// As [`conv_dx`]; errors of the device.
pub fn on_device<I: Stored, O: Stored>(
    on: &Device,
    shape: &Conv,
    dy: &Buffer<I>,
    w: &Buffer<I>,
    offset: Option<&Buffer<I>>,
    dx: &mut Buffer<O>,
) -> Result<(), Error> {
    check(shape, [dy.len(), w.len(), dx.len()], offset.map(Buffer::len))?;
    launch(on, shape, [(dy, 0), (w, 0)], offset.map(|offset| (offset, 0)), (dx, 0))
}
