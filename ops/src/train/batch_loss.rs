//! The loss of a logical batch: `per_sequence[B] (f32) -> loss[1]` (f32).
//!
//! Formula: `loss = sum of per_sequence / denominator`.
//! Order: group g of G has the sequences from `floor(g B / G)` to `floor((g + 1) B / G)` and adds them ascending from +0;
//! groups are joined as `(g0 + g1)`, `(g2 + g3)`, .., then pairs of pairs.
//! Rounding: every addition and the division once to f32.

use crate::backend::device::{Arguments, Buffer, Build, Device, Unit, int};
use crate::call::Entry;
use crate::train::sequences::check_denominator;
use crate::{Cpu, Element, Error, check_len, value_error};
use samebits_schema::batch_loss::MOST_GROUPS;
use std::ops::Range;

const NAME: &str = "batch_loss";

/// Which of `sequences` sequences group number `group` of `groups` has.
///
/// ```
/// use samebits_ops::sequences_of_group;
///
/// assert_eq!([0, 1].map(|group| sequences_of_group(5, 2, group)), [0..2, 2..5]);
/// ```
pub fn sequences_of_group(sequences: usize, groups: usize, group: usize) -> Range<usize> {
    let border = |group: u128| ((group * sequences as u128) / groups.max(1) as u128).min(sequences as u128) as usize;
    border(group as u128)..border(group as u128 + 1)
}

/// The loss of the logical batch whose sequences are worth `per_sequence[B]`, dealt to `groups` groups: their sum over
/// `denominator`.
///
/// # Errors
/// [`Error::Value`] when `groups` is no power of two or more than 65536, or the denominator not a positive finite f32.
///
/// ```
/// use samebits_ops::{Cpu, batch_loss};
///
/// let loss = batch_loss(&Cpu::best(), 2, 4.0, &[1.0, 2.0, 5.0])?;
/// assert_eq!(loss, 2.0);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn batch_loss(_: &Cpu, groups: usize, denominator: f64, per_sequence: &[f32]) -> Result<f32, Error> {
    let denominator = check(groups, denominator)?;
    let of = |group: usize| &per_sequence[sequences_of_group(per_sequence.len(), groups, group)];
    let sum = |group: usize| of(group).iter().fold(0f32, |sum, value| sum + value);
    let mut sums: Vec<f32> = (0..groups).map(sum).collect();
    while sums.len() > 1 {
        sums = sums.chunks(2).map(|two| two[0] + two[1]).collect();
    }
    Ok(f32::narrow(sums[0] / denominator))
}

fn check(groups: usize, denominator: f64) -> Result<f32, Error> {
    if !groups.is_power_of_two() || groups > MOST_GROUPS {
        return Err(value_error(NAME, format!("groups is {groups}; it must be a power of two, at most {MOST_GROUPS}")));
    }
    check_denominator(NAME, denominator)
}

/// Its kernels.
const UNIT: Unit = Unit { has_out: false, ..Unit::of(NAME, include_str!("batch_loss.cu"), &[NAME]) };

/// batch_loss, by name.
pub(crate) const OP: Entry = Entry {
    name: NAME,
    cpu: |cpu, args| {
        let per_sequence = args.input("per_sequence").dense::<f32>(NAME, "per_sequence")?;
        let loss = args.output("loss").host::<f32>(NAME, "loss")?;
        loss[0] = batch_loss(cpu, args.call.count("groups"), args.call.float("denominator"), per_sequence)?;
        Ok(())
    },
    device: Some(|on, args| {
        let (groups, denominator) = (args.call.count("groups"), args.call.float("denominator"));
        let per_sequence = args.input("per_sequence").device(NAME, "per_sequence")?;
        on_device(on, groups, denominator, per_sequence, args.output("loss").device(NAME, "loss")?)
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// [`batch_loss`] on a device, into `loss[1]`.
///
/// # Errors
/// As [`batch_loss`]; [`Error::Length`] when a buffer does not match; errors of the device.
pub fn on_device(
    device: &Device,
    groups: usize,
    denominator: f64,
    per_sequence: &Buffer<f32>,
    loss: &mut Buffer<f32>,
) -> Result<(), Error> {
    let denominator = check(groups, denominator)?;
    check_len(NAME, "loss", "[1]", loss.len(), &[1])?;
    let groups = int(NAME, "groups", groups)?;
    let arguments = Arguments::new().buffer(per_sequence).buffer(loss).long(per_sequence.len());
    let arguments = arguments.int(groups).float(denominator);
    // SAFETY: lengths were checked; groups end at the last sequence, and there are no more than the kernel has levels for.
    unsafe { device.launch(Build::of::<f32, f32>(NAME), NAME, [1, 1, 1], 256, 0, &arguments) }
}
