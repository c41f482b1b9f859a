//! Gradients of the weight and the bias of a convolution:
//! `x[B,C,D,H,W], dy[B,O,OD,OH,OW], mask[B]?, carry[O,I,KD,KH,KW] (f32) -> dw[O,I,KD,KH,KW], dbias[B,O]` (both f32), I = C / groups.
//!
//! Formula: `dw[o][i][tap] += dy[b][o][q] * xs` over the places q of the images that count, xs what the tap meets there, as in
//! `conv`; `dbias[b][o] = sum over q of dy[b][o][q]`.
//! Order: a chain of fma for each element of dw, images ascending, and in each its places, from carry. dbias is `lanes`, each lane
//! a sum; the gradient of bias is `token_sum` of it, whose rows are images.
//! Rounding: every step once to f32; a NaN becomes the canonical one.
//!
//! A worker takes some rows of dw and a panel of 32 of its columns through all places: patches and dy are laid out as f32, some
//! places at a time, and the chains wait in dw between them.

use super::window::{Conv, THREADS, whole, with_lattice};
use crate::backend::device::{Arguments, Buffer, Build, Device, Unit, int};
use crate::call::Entry;
use crate::conv::causal_conv1d::optional;
use crate::conv::taps::on_host;
use crate::element::{Stored, typed};
use crate::gemm::tile::{Left, Order, Right, TILE_ROWS, Tile, fma_tile};
use crate::pack::patches::{Axis, Patches};
use crate::pack::{PANEL, as_elements_mut, as_floats_mut, f32_of_rows};
use crate::parallel::SharedOut;
use crate::reduce::{Add, lane_sum};
use crate::simd::{Kernel, Simd};
use crate::tensor::Rows;
use crate::through_f32::convert;
use crate::token::chains::mask_of;
use crate::token::device::with_mask;
use crate::workspace::{Need, Plan, choose};
use crate::{Cpu, Element, Error, TensorRef, Tf32, check_len};
use std::iter::successors;
use std::ops::Range;

const NAME: &str = "conv_dw";
/// Places that are laid out at a time, at most.
const STEPS: usize = 256;
/// Rows of dw of a task, at most: whole tiles, of which the first pays for the panel.
const ROWS: usize = 8 * TILE_ROWS;

/// Adds the products of the places of `dy[B,O,OD,OH,OW]` and what taps meet there of `x[B,C,D,H,W]` to `dw[O,I,KD,KH,KW]`, which goes
/// on from what it holds, for the images whose `mask[B]` is not 0; and writes the sums `dbias[B,O]` of dy over each image. They are
/// the gradients of w and bias from that of [`conv`](crate::conv())'s y.
///
/// # Errors
/// As [`conv`](crate::conv()).
///
/// ```
/// use samebits_ops::{Conv, Cpu, Window, conv_dw};
///
/// let shape =
///     Conv { batch: 1, channels: 1, outputs: 1, groups: 1, image: [1, 1, 3], window: Window::of([1, 1, 2]) };
/// let (mut dw, mut dbias) = ([0.5f32, 0.0], [9f32]);
/// conv_dw(&Cpu::best(), &shape, None, &[1f32, 2.0, 3.0], &[10.0, 100.0], &mut dw, &mut dbias)?;
/// assert_eq!((dw, dbias), ([210.5, 320.0], [110.0]));
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn conv_dw<I: Element>(
    cpu: &Cpu,
    shape: &Conv,
    mask: Option<&[i32]>,
    x: &[I],
    dy: &[I],
    dw: &mut [f32],
    dbias: &mut [f32],
) -> Result<(), Error> {
    check(shape, mask.map(<[i32]>::len), [x.len(), dy.len()], [dw.len(), dbias.len()])?;
    let (x, dy) = (TensorRef::of(x, &shape.images()), TensorRef::of(dy, &shape.outputs_of_all()));
    run(cpu, shape, mask, [x, dy], |_| (), [dw, dbias])
}

/// Checks the lengths of the mask, of x and dy, and of dw and dbias.
fn check(shape: &Conv, mask: Option<usize>, [x, dy]: [usize; 2], [dw, dbias]: [usize; 2]) -> Result<(), Error> {
    shape.check(NAME)?;
    check_len(NAME, "mask", "[B]", mask.unwrap_or(shape.batch), &[shape.batch])?;
    shape.check_image(NAME, "x", x)?;
    shape.check_output(NAME, "dy", dy)?;
    shape.check_weight(NAME, "dw", dw)?;
    check_len(NAME, "dbias", "[B,O]", dbias, &[shape.batch, shape.outputs])
}

/// x and dy of any layout. `begin` puts into dw what it goes on from, once nothing is refused any more.
fn run(
    cpu: &Cpu,
    shape: &Conv,
    mask: Option<&[i32]>,
    [x, dy]: [TensorRef; 2],
    begin: impl FnOnce(&mut [f32]),
    [dw, dbias]: [&mut [f32]; 2],
) -> Result<(), Error> {
    let steps = shape.output().iter().product::<usize>().min(STEPS);
    let preferred = Cut { steps, workers: cpu.threads() };
    let (Cut { steps, .. }, mut workspace) = choose(cpu, NAME, successors(Some(preferred), Cut::smaller))?;
    begin(dw);
    let mut slots = workspace.split().1;
    typed!(x.dtype() => I, {
        let sums = Sums { cpu, shape, mask, x: x.rows::<I>(), dy: dy.rows::<I>(), steps };
        sums.biases(dbias);
        sums.run(&mut slots, dw);
    });
    Ok(())
}

/// Places that a worker lays out at a time.
struct Cut {
    steps: usize,
    workers: usize,
}

impl Cut {
    fn smaller(&self) -> Option<Cut> {
        match *self {
            Cut { steps: 17.., workers } => Some(Cut { steps: self.steps.div_ceil(32) * 16, workers }),
            Cut { workers: 2.., steps } => Some(Cut { steps, workers: self.workers / 2 }),
            _ => None,
        }
    }
}

impl Plan for Cut {
    fn need(&self) -> Need {
        // Rows as they come, then a panel and a tile of f32.
        Need { shared: 0, slot: self.steps * (2 * PANEL + TILE_ROWS), workers: self.workers, pairs: 0 }
    }

    fn tiles(&self) -> [(&'static str, usize); 3] {
        [("places", self.steps), ("", 0), ("", 0)]
    }
}

/// The sums of a call.
struct Sums<'a, I> {
    cpu: &'a Cpu,
    shape: &'a Conv,
    mask: Option<&'a [i32]>,
    x: Rows<'a, I>,
    dy: Rows<'a, I>,
    steps: usize,
}

impl<I: Element> Sums<'_, I> {
    /// Channels of a group of x and of y.
    fn channels(&self) -> [usize; 2] {
        let Conv { channels, outputs, groups, .. } = *self.shape;
        [channels / groups, outputs / groups]
    }

    /// What taps meet of the channels of a group of an image.
    fn patches(&self, image: usize, group: usize) -> Patches<'_, I> {
        let Conv { channels, image: [depth, height, _], .. } = *self.shape;
        let first = (image * channels + group * self.channels()[0]) * depth * height;
        Patches { rows: self.x, first, axes: self.shape.forward() }
    }

    /// Those of dy as they stand.
    fn gradients(&self, image: usize, group: usize) -> Patches<'_, I> {
        let places = self.shape.output();
        let first = (image * self.shape.outputs + group * self.channels()[1]) * places[0] * places[1];
        Patches { rows: self.dy, first, axes: places.map(Axis::whole) }
    }

    fn biases(&self, dbias: &mut [f32]) {
        let (places, [_, outputs]) = (self.shape.output().iter().product(), self.channels());
        self.cpu.chunks(dbias, outputs, |number, dbias| {
            let gradients = self.gradients(number / self.shape.groups, number % self.shape.groups);
            let mut row = vec![I::default(); places];
            for (o, sum) in dbias.iter_mut().enumerate() {
                gradients.write(o, 0..places, &mut row);
                *sum = Element::narrow(self.cpu.dispatch(Sum { row: &row }));
            }
        });
    }

    fn run(&self, slots: &mut [&mut [u32]], dw: &mut [f32]) {
        let [channels, outputs] = self.channels();
        let terms = channels * self.shape.window.size();
        let (panels, runs) = (terms.div_ceil(PANEL), outputs.div_ceil(ROWS));
        let dw = SharedOut::new(dw);
        self.cpu.each_in(slots.iter_mut(), self.shape.groups * runs * panels, |slot, task| {
            let (panel, run, group) = (task % panels, task / panels % runs, task / panels / runs);
            let rows = run * ROWS..outputs.min((run + 1) * ROWS);
            let columns = panel * PANEL..terms.min((panel + 1) * PANEL);
            let at = |row: usize| (group * outputs + row) * terms + columns.start;
            self.task(slot, group, rows, columns.clone(), |row, sums, reads| {
                // SAFETY: tasks differ in group, rows or columns.
                let there = unsafe { dw.part(at(row), columns.len()) };
                match reads {
                    true => sums.copy_from_slice(there),
                    false => convert(self.cpu, sums, there),
                }
            });
        });
        self.cpu.ledger().ran(self.cpu.isa().without_dot().name());
    }

    /// Some rows and columns of a group's dw; `chains` reads the chains of a row, or puts them there.
    fn task(
        &self,
        slot: &mut [u32],
        group: usize,
        rows: Range<usize>,
        columns: Range<usize>,
        mut chains: impl FnMut(usize, &mut [f32], bool),
    ) {
        let Sums { cpu, shape, mask, steps, .. } = *self;
        let (raw, room) = slot.split_at_mut(steps * PANEL);
        let raw = as_elements_mut::<I>(raw);
        let (panel, tile) = as_floats_mut(room).split_at_mut(steps * PANEL);
        let places: usize = shape.output().iter().product();
        let mut sums = [0f32; TILE_ROWS * PANEL];
        for image in (0..shape.batch).filter(|&image| mask.is_none_or(|mask| mask[image] != 0)) {
            let (patches, gradients) = (self.patches(image, group), self.gradients(image, group));
            for from in (0..places).step_by(steps) {
                let len = steps.min(places - from);
                lay_out(cpu, &patches, columns.clone(), from..from + len, raw, panel, PANEL);
                for first in rows.clone().step_by(TILE_ROWS) {
                    let these = first..rows.end.min(first + TILE_ROWS);
                    let count = these.len();
                    lay_out(cpu, &gradients, these.clone(), from..from + len, raw, tile, count);
                    for (row, sums) in these.clone().zip(sums.chunks_mut(PANEL)) {
                        chains(row, &mut sums[..columns.len()], true);
                    }
                    let left = Left { data: &tile[..count * len], row_stride: 1, step: count };
                    let (right, order, out) = (Right::F32(panel, PANEL), Order::Chain(len), &mut sums[..count * PANEL]);
                    fma_tile(cpu, Tile { left, right, order, rows: count, columns: PANEL, out, out_stride: PANEL });
                    for (row, sums) in these.zip(sums.chunks_mut(PANEL)) {
                        chains(row, &mut sums[..columns.len()], false);
                    }
                }
            }
        }
    }
}

/// Lays some terms of patches side by side as f32, place by place.
fn lay_out<I: Element>(
    cpu: &Cpu,
    patches: &Patches<I>,
    terms: Range<usize>,
    places: Range<usize>,
    raw: &mut [I],
    out: &mut [f32],
    stride: usize,
) {
    let len = places.len();
    for (term, row) in terms.clone().zip(raw.chunks_exact_mut(len)) {
        patches.write(term, places.clone(), row);
    }
    f32_of_rows(cpu, terms.len(), len, |i| &raw[i * len..][..len], Tf32::Disabled, out, stride);
}

/// The `lanes` sum of a row.
struct Sum<'a, I> {
    row: &'a [I],
}

impl<I: Element> Kernel for Sum<'_, I> {
    type Output = f32;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        // The pad +0 leaves a lane, which is never -0, as it is.
        lane_sum(s, self.row, I::default(), Add)
    }
}

/// conv_dw, by name.
pub(crate) const OP: Entry = Entry {
    name: NAME,
    cpu: |cpu, args| {
        let (mask, carry) = (mask_of(args)?, args.input("carry"));
        let tensors = ["x", "dy"].map(|name| args.input(name));
        on_host(NAME, [("x", Some(tensors[0])), ("dy", Some(tensors[1])), ("carry", Some(carry))])?;
        let (dw, dbias) = (args.output("dw").host(NAME, "dw")?, args.output("dbias").host(NAME, "dbias")?);
        let begin = |dw: &mut [f32]| convert(cpu, &whole::<f32>(&carry), dw);
        run(cpu, &Conv::of(args.call), mask, tensors, begin, [dw, dbias])
    },
    device: Some(|on, args| {
        let (shape, x, dy) = (Conv::of(args.call), args.input("x"), args.input("dy"));
        let carry = args.input("carry").device(NAME, "carry")?;
        let (dw, dbias) = (args.output("dw"), args.output("dbias"));
        with_mask(on, args, |mask| {
            typed!(x.dtype() => I, {
                let images = [x.device::<I>(NAME, "x")?, dy.device::<I>(NAME, "dy")?];
                let sums = [dw.device(NAME, "dw")?, dbias.device(NAME, "dbias")?];
                on_device(on, &shape, mask, images, carry, sums)
            })
        })
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// Its kernels.
const UNIT: Unit =
    Unit { has_out: false, ..Unit::of(NAME, include_str!("conv_dw.cu"), &["conv_dw", "conv_dw_biases"]) };

/// [`conv_dw`] on a device, from `carry[O,I,KD,KH,KW]`; the images are x and dy, the sums dw and dbias.
///
/// # Errors
/// As [`conv_dw`]; errors of the device.
pub fn on_device<I: Stored>(
    on: &Device,
    shape: &Conv,
    mask: Option<&Buffer<i32>>,
    [x, dy]: [&Buffer<I>; 2],
    carry: &Buffer<f32>,
    [dw, dbias]: [&mut Buffer<f32>; 2],
) -> Result<(), Error> {
    check(shape, mask.map(Buffer::len), [x.len(), dy.len()], [dw.len(), dbias.len()])?;
    shape.check_weight(NAME, "carry", carry.len())?;
    shape.check_device(NAME)?;
    let build = Build::of::<I, f32>(NAME);
    if !dbias.is_empty() {
        let places = shape.output().iter().product();
        let arguments = Arguments::new().buffer(dy).buffer(dbias).long(places);
        // SAFETY: lengths were checked; a block takes a channel of an image.
        unsafe { on.launch(build, "conv_dw_biases", [dbias.len(), 1, 1], THREADS as u32, 0, &arguments)? };
    }
    if dw.is_empty() {
        return Ok(());
    }
    let arguments = with_lattice(Arguments::new(), shape.forward()).buffer(x).buffer(dy);
    let arguments = optional(arguments, mask.map(|mask| (mask, 0))).buffer(carry).buffer(&*dw).long(dw.len());
    let arguments = arguments
        .int(int(NAME, "B", shape.batch)?)
        .int(int(NAME, "groups", shape.groups)?)
        .int(int(NAME, "O", shape.outputs / shape.groups)?)
        .int(int(NAME, "C", shape.channels / shape.groups)?);
    let grid = [dw.len().div_ceil(THREADS), 1, 1];
    // SAFETY: lengths were checked; a thread takes an element of dw, and the kernel leaves what is behind the last alone.
    unsafe { on.launch(build, NAME, grid, THREADS as u32, 0, &arguments) }
}
