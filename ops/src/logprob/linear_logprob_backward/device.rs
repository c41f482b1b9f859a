//! Launches of linear_logprob_backward: tiles of logits and of their gradients in the workspace, between the kernels of gemm
//! and of gemm_dw, by which the sums of dx go on from tile to tile as well.

use super::NAME;
use crate::backend::device::workspace::choose;
use crate::backend::device::{Arguments, Buffer, Build, Device, Unit};
use crate::call;
use crate::element::{Stored, typed};
use crate::gemm::device::launch_gemm;
use crate::gemm::gemm_dw::launch;
use crate::gemm::shape::segment_length;
use crate::logprob::logprob::checked_inverse;
use crate::logprob::logprob_backward::DeviceGradients;
use crate::token::device::with_mask;
use crate::workspace::{Need, Plan};
use crate::{Error, Gemm, GemmDw, LinearLogprob, check_len};
use std::iter::successors;

/// Its kernels.
pub(super) const UNIT: Unit = Unit::of(
    NAME,
    include_str!("../linear_logprob_backward.cu"),
    &["linear_logprob_backward_gradients", "linear_logprob_backward_join", "linear_logprob_backward_end"],
);

/// Rows in hand at a time, at most: enough for the weight and its gradient to be worth their way.
const MOST_ROWS: usize = 512;
/// Columns of a tile of logits, at most; a multiple of 16, as every tile but a segment's last.
const MOST_WIDTH: usize = 4096;
/// Tiles are not made narrower than this as long as there are rows to give up.
const NARROW: usize = 512;
/// Rows and columns of a block of the gradients: as in linear_logprob_backward.cu.
const SIDE: usize = 32;

/// [`LogprobRows`](crate::LogprobRows) on a device, but for the targets.
#[derive(Clone, Copy)]
pub struct DeviceRows<'a> {
    /// The token, or none where it is negative; they come from the host, which checks them.
    pub target: &'a [i32],
    /// What [`linear_logprob`](crate::device::linear_logprob()) returned.
    pub lse: &'a Buffer<f32>,
    /// Gradients of what it returned.
    pub gradients: DeviceGradients<'a>,
    /// 0 for each row that is padding; `None` where all are tokens.
    pub mask: Option<&'a Buffer<i32>>,
}

/// How much is in hand at a time.
#[derive(Clone, Copy)]
struct Tile {
    rows: usize,
    width: usize,
    k: usize,
    /// Bytes of an element.
    size: usize,
}

impl Tile {
    /// Words of the logits, their gradients, the transpose of those, and four sums of dx: those of a segment, and three
    /// finished subtrees that wait to be joined.
    fn words(&self) -> [usize; 7] {
        let Tile { rows, width, k, size } = *self;
        let (gradients, sums) = ((rows * width * size).div_ceil(4), rows.saturating_mul(k));
        // Each begins where 16 bytes do.
        [rows * width, gradients, gradients, sums, sums, sums, sums].map(|words| words.next_multiple_of(4))
    }

    fn smaller(&self) -> Option<Tile> {
        let width = self.width.div_ceil(32) * 16;
        Some(match *self {
            Tile { width: old, .. } if old > NARROW => Tile { width, ..*self },
            Tile { rows: 2.., .. } => Tile { rows: self.rows.div_ceil(2), ..*self },
            Tile { width: 17.., .. } => Tile { width, ..*self },
            _ => return None,
        })
    }
}

impl Plan for Tile {
    fn need(&self) -> Need {
        let shared = self.words().into_iter().fold(0, usize::saturating_add);
        Need { shared, slot: 0, workers: 1, pairs: 0 }
    }

    fn tiles(&self) -> [(&'static str, usize); 3] {
        [("rows", self.rows), ("width", self.width), ("", 0)]
    }
}

/// A call by name.
pub(super) fn by_name(on: &Device, args: &mut call::Arguments) -> Result<(), Error> {
    let [rows, vocab, k] = ["M", "V", "K"].map(|axis| args.call.dim(axis));
    let shape = LinearLogprob { rows, vocab, k, temperature: args.call.float("temperature") };
    let per_row = |name: &'static str| args.optional(name).map(|row| row.device::<f32>(NAME, name));
    let [lse, dlogprob] = ["lse", "dlogprob"].map(|name| per_row(name).expect("the call was checked"));
    let gradients = DeviceGradients { dlogprob: dlogprob?, dlse: per_row("dlse").transpose()? };
    let carry = args.optional("carry").map(|carry| carry.device(NAME, "carry")).transpose()?;
    let (target, lse) = (args.integers("target")?, lse?);
    let (x, w, dx, dw) = (args.input("x"), args.input("w"), args.output("dx"), args.output("dw"));
    with_mask(on, args, |mask| {
        let given = DeviceRows { target, lse, gradients, mask };
        typed!(x.dtype() => I, typed!(dx.dtype() => O, {
            let operands = (x.device::<I>(NAME, "x")?, w.device::<I>(NAME, "w")?, carry);
            let outputs = (dx.device::<O>(NAME, "dx")?, dw.device(NAME, "dw")?);
            linear_logprob_backward(on, &shape, operands, &given, outputs)
        }))
    })
}

/// [`linear_logprob_backward`](crate::linear_logprob_backward()) of x, w and carry, to dx and dw, on a device. Tiles of logits
/// stand in the workspace, which grows neither with the vocabulary nor with the rows; the budget decides how large they are.
///
/// # Errors
/// As [`linear_logprob_backward`](crate::linear_logprob_backward()); errors of the device.
pub fn linear_logprob_backward<I: Stored, O: Stored>(
    device: &Device,
    shape: &LinearLogprob,
    (x, w, carry): (&Buffer<I>, &Buffer<I>, Option<&Buffer<f32>>),
    given: &DeviceRows,
    (dx, dw): (&mut Buffer<O>, &mut Buffer<f32>),
) -> Result<(), Error> {
    let LinearLogprob { rows: m, vocab, k, temperature } = *shape;
    let DeviceRows { target, lse, gradients: DeviceGradients { dlogprob, dlse }, mask } = *given;
    for (name, found, shape, extents) in [
        ("x", x.len(), "[M,K]", [m, k]),
        ("w", w.len(), "[V,K]", [vocab, k]),
        ("carry", carry.map_or(vocab * k, Buffer::len), "[V,K]", [vocab, k]),
        ("dx", dx.len(), "[M,K]", [m, k]),
        ("dw", dw.len(), "[V,K]", [vocab, k]),
    ] {
        check_len(NAME, name, shape, found, &extents)?;
    }
    let (dlse_len, mask_len) = (dlse.map_or(m, Buffer::len), mask.map_or(m, Buffer::len));
    let given = [("target", target.len()), ("lse", lse.len()), ("dlogprob", dlogprob.len()), ("dlse", dlse_len)];
    for (name, found) in given.into_iter().chain([("mask", mask_len)]) {
        check_len(NAME, name, "[M]", found, &[m])?;
    }
    let scale = checked_inverse(NAME, vocab, temperature, target)?;
    if k == 0 {
        return Ok(());
    }
    let (build, length) = (Build::of::<I, O>(NAME), segment_length(vocab));
    let width = length.clamp(1, MOST_WIDTH).next_multiple_of(16);
    // Without rows or without a vocabulary one of them is still to be written.
    let preferred = Tile { rows: m.clamp(1, MOST_ROWS), width, k, size: size_of::<I>() };
    let (plan, room) = choose(device, NAME, successors(Some(preferred), Tile::smaller))?;
    let (mut at, mut end) = (plan.words(), 0);
    at.iter_mut().for_each(|words| (*words, end) = (end, end + *words));
    let [logits, gradients, turned, sums @ ..] = at;
    let target = device.upload(NAME, target)?;
    let masked = |arguments: Arguments, first: usize| match mask {
        Some(mask) => arguments.buffer_from(mask, first).int(1),
        None => arguments.null().int(0),
    };
    let none = |arguments: Arguments| arguments.null().int(0);
    if m == 0 && vocab > 0 {
        let arguments = none(Arguments::new().buffer(x).buffer(x));
        let arguments = match carry {
            Some(carry) => arguments.buffer(carry).int(1),
            None => none(arguments),
        };
        // SAFETY: the lengths were checked; without tokens x and dy are not read.
        return unsafe { launch::<I>(device, &GemmDw::new(0, vocab, k), arguments.buffer(dw)) };
    }
    for first in (0..m).step_by(plan.rows) {
        let count = plan.rows.min(m - first);
        // Places of sums that are free, and those of finished subtrees.
        let (mut free, mut waiting) = (sums.to_vec(), Vec::new());
        let blocks = [(count * k).div_ceil(256), 1, 1];
        for segment in 0..8 {
            let sum = free.pop().expect("three subtrees wait at most");
            let (from, to) = ((segment * length).min(vocab), ((segment + 1) * length).min(vocab));
            // A segment of none is +0.
            for tile in (from..to.max(from + 1)).step_by(plan.width) {
                let width = plan.width.min(to - tile);
                // SAFETY: the workspace has room for `count` rows of a tile and of sums, the other lengths were checked, and
                // so was every target. What is both carry and dw is read before it is written, by the thread that does.
                unsafe {
                    if width > 0 {
                        let logits_of = Gemm::new(count, width, k);
                        launch_gemm(device, &logits_of, (x, first), (w, tile), None, (&room, logits))?;
                        let arguments = Arguments::new().buffer_from(&room, logits).buffer_from(&target, first);
                        let arguments = arguments.buffer_from(lse, first).buffer_from(dlogprob, first);
                        let arguments = match dlse {
                            Some(dlse) => arguments.buffer_from(dlse, first).int(1),
                            None => none(arguments),
                        };
                        let arguments = arguments.buffer_from(&room, gradients).buffer_from(&room, turned);
                        let arguments = arguments.long(count).long(width).long(tile).float(scale);
                        let grid = [width.div_ceil(SIDE), count.div_ceil(SIDE), 1];
                        device.launch(build, UNIT.kernels[0], grid, 256, 0, &arguments)?;

                        let arguments = Arguments::new().buffer_from(x, first * k).buffer_from(&room, gradients);
                        let arguments = match (first, carry) {
                            (0, None) => none(masked(arguments, first)),
                            (0, Some(carry)) => masked(arguments, first).buffer_from(carry, tile * k).int(1),
                            _ => masked(arguments, first).buffer_from(dw, tile * k).int(1),
                        };
                        let sums_of = GemmDw::new(count, width, k);
                        launch::<I>(device, &sums_of, arguments.buffer_from(dw, tile * k))?;
                    }
                    let arguments = none(Arguments::new().buffer_from(w, tile.min(to) * k).buffer_from(&room, turned));
                    let arguments = match tile == from {
                        true => none(arguments),
                        false => arguments.buffer_from(&room, sum).int(1),
                    };
                    launch::<I>(device, &GemmDw::new(width, count, k), arguments.buffer_from(&room, sum))?;
                }
            }
            for _ in 0..(segment + 1_usize).trailing_zeros() {
                let earlier = waiting.pop().expect("a subtree of as many segments");
                let arguments = Arguments::new().buffer_from(&room, earlier).buffer_from(&room, sum).long(count * k);
                // SAFETY: both are places of sums.
                unsafe { device.launch(build, UNIT.kernels[1], blocks, 256, 0, &arguments)? };
                free.push(earlier);
            }
            waiting.push(sum);
        }
        let arguments = Arguments::new().buffer_from(&room, waiting[0]).buffer_from(dx, first * k).long(count * k);
        // SAFETY: the sums of all rows, and their places in dx.
        unsafe { device.launch(build, UNIT.kernels[2], blocks, 256, 0, &arguments)? };
    }
    Ok(())
}
