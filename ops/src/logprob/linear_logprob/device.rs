//! Launches of linear_logprob: tiles of logits in the workspace, and what their weights come to.

use super::SUMMED_TWICE;
use crate::backend::device::workspace::choose;
use crate::backend::device::{Arguments, Buffer, Build, Device, Unit};
use crate::element::Stored;
use crate::gemm::device::launch_gemm;
use crate::logprob::logprob::checked_inverse;
use crate::profile::IEEE;
use crate::workspace::{Need, Plan};
use crate::{Counter, Error, Gemm, LinearLogprob, check_len};
use std::iter::successors;

/// The kernels of linear_logprob.
pub(super) const UNIT: Unit = Unit {
    has_out: false,
    ..Unit::of("linear_logprob", include_str!("../linear_logprob.cu"), &["linear_logprob_add", "linear_logprob_end"])
};

/// Segments of a row and lanes of a segment; both belong to the contract.
const LANES: usize = IEEE.segments * IEEE.lanes;
/// Words of a row's segments beside their lanes: as in linear_logprob.cu.
const FACTS: usize = IEEE.segments * 5;
/// What a pass over the tiles does, and what it leaves to do of a row: as in linear_logprob.cu.
const FIRST: i32 = 0;
const KNOWN: i32 = 1;
const FROM_TOP: i32 = 2;
const LOST: i32 = 1;
const IS_FAR: i32 = 2;
/// Rows whose sums are in hand at a time, at most: enough for the weight to be worth its way.
const MOST_ROWS: usize = 512;
/// Columns of a tile of logits, at most; a multiple of 16, as every tile.
const MOST_WIDTH: usize = 16384;
/// Tiles are not made narrower than this as long as there are rows to give up.
const NARROW: usize = 1024;

/// How much is in hand at a time.
#[derive(Clone, Copy)]
struct Tile {
    rows: usize,
    width: usize,
    /// Rows whose results wait in the workspace: all of them, where nothing is written before the whole call is known to be
    /// allowed; else none.
    held: usize,
}

impl Tile {
    /// Words of the lanes, the logits, the facts, the targets' logits, the reference points and two results.
    fn words(&self) -> [usize; 7] {
        let Tile { rows, width, held } = *self;
        [rows * LANES, rows * width, rows * FACTS, rows, rows, held, held]
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
        Need { shared: self.words().into_iter().sum(), slot: 0, workers: 1, pairs: 0 }
    }

    fn tiles(&self) -> [(&'static str, usize); 3] {
        [("rows", self.rows), ("width", self.width), ("", 0)]
    }
}

/// [`linear_logprob`](crate::linear_logprob()) on a device. Tiles of f32 logits stand in the workspace, which grows neither
/// with the vocabulary nor with the rows; the budget decides how large they are.
///
/// # Errors
/// As [`linear_logprob`](crate::linear_logprob()); errors of the device.
pub fn linear_logprob<I: Stored>(
    device: &Device,
    shape: &LinearLogprob,
    x: &Buffer<I>,
    w: &Buffer<I>,
    target: &[i32],
    logprob: &mut Buffer<f32>,
    lse: &mut Buffer<f32>,
) -> Result<(), Error> {
    let op = "linear_logprob";
    let LinearLogprob { rows, vocab, k, temperature } = *shape;
    check_len(op, "x", "[M,K]", x.len(), &[rows, k])?;
    check_len(op, "w", "[V,K]", w.len(), &[vocab, k])?;
    check_len(op, "target", "[M]", target.len(), &[rows])?;
    check_len(op, "logprob", "[M]", logprob.len(), &[rows])?;
    check_len(op, "lse", "[M]", lse.len(), &[rows])?;
    let scale = checked_inverse(op, vocab, temperature, target)?;
    if rows == 0 {
        return Ok(());
    }
    let width = vocab.clamp(1, MOST_WIDTH).next_multiple_of(16);
    // Whether rows are summed twice shows only when they were summed once.
    let strict = device.ledger().forbids(Counter::SlowPaths);
    let preferred = Tile { rows: rows.min(MOST_ROWS), width, held: if strict { rows } else { 0 } };
    let (plan, room) = choose(device, op, successors(Some(preferred), Tile::smaller))?;
    let mut at = plan.words();
    let mut end = 0;
    at.iter_mut().for_each(|words| (*words, end) = (end, end + *words));
    let [lanes, logits, facts, picked, known, held, held_lse] = at;
    let target = device.upload(op, target)?;
    let lost = device.empty::<i32>(op, plan.rows)?;
    let mut found = vec![0; plan.rows];
    for first in (0..rows).step_by(plan.rows) {
        let count = plan.rows.min(rows - first);
        let mut run = |pass: i32| -> Result<[usize; 2], Error> {
            // A vocabulary of none has one tile of none.
            for from in (0..vocab.max(1)).step_by(plan.width) {
                let width = plan.width.min(vocab - from);
                let arguments = Arguments::new()
                    .buffer_from(&room, logits)
                    .buffer_from(&target, first)
                    .buffer_from(&room, lanes)
                    .buffer_from(&room, facts)
                    .buffer_from(&room, picked)
                    .buffer_from(&room, known)
                    .long(vocab)
                    .long(from)
                    .long(width)
                    .float(scale)
                    .int(i32::from(from == 0))
                    .int(pass);
                // SAFETY: the workspace has room for `count` rows of a tile and of sums, the other lengths were checked.
                unsafe {
                    launch_gemm(device, &Gemm::new(count, width, k), (x, first), (w, from), None, (&room, logits))?;
                    device.launch(
                        Build::of::<f32, f32>(op),
                        "linear_logprob_add",
                        [count, 1, 1],
                        256,
                        0,
                        &arguments,
                    )?;
                }
            }
            let arguments = Arguments::new()
                .buffer_from(&room, lanes)
                .buffer_from(&room, facts)
                .buffer_from(&room, picked)
                .buffer_from(&target, first)
                .buffer_from(&room, known)
                .buffer(&lost);
            let arguments = match strict {
                true => arguments.buffer_from(&room, held + first).buffer_from(&room, held_lse + first),
                false => arguments.buffer_from(logprob, first).buffer_from(lse, first),
            };
            let arguments = arguments.long(vocab).int(pass);
            // SAFETY: as above.
            unsafe {
                device.launch(Build::of::<f32, f32>(op), "linear_logprob_end", [count, 1, 1], 256, 0, &arguments)?
            };
            lost.download(device, &mut found)?;
            Ok([LOST, IS_FAR].map(|left| found[..count].iter().filter(|&&found| found == left).count()))
        };
        // Where it is strict, this is refused.
        let again = |count: usize| device.ledger().note(Counter::SlowPaths, count, SUMMED_TWICE);
        let [lost, mut far] = run(FIRST)?;
        if lost > 0 {
            again(lost)?;
            [_, far] = run(KNOWN)?;
        }
        if far > 0 {
            again(far)?;
            run(FROM_TOP)?;
        }
    }
    if strict {
        logprob.copy_from(0, &room, held, rows)?;
        lse.copy_from(0, &room, held_lse, rows)?;
    }
    Ok(())
}
