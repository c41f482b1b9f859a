//! The loss of a logical batch: `per_sequence[B] (f32) -> loss[1]` (f32).
//!
//! Formula: `loss = sum of per_sequence / denominator`.
//! Order: group g of G has the sequences from `floor(g B / G)` to `floor((g + 1) B / G)` and adds them ascending from +0;
//! groups are joined as `(g0 + g1)`, `(g2 + g3)`, .., then pairs of pairs.
//! Rounding: every addition and the division once to f32.

use crate::call::Entry;
use crate::train::sequences::check_denominator;
use crate::{Cpu, Element, Error, value_error};

const NAME: &str = "batch_loss";

/// Most groups there may be.
const MOST_GROUPS: usize = 1 << 16;

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
    let border = |group: usize| (group as u128 * per_sequence.len() as u128 / groups as u128) as usize;
    let sum = |group: usize| per_sequence[border(group)..border(group + 1)].iter().fold(0f32, |sum, value| sum + value);
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

/// batch_loss, by name.
pub(crate) const OP: Entry = Entry {
    name: NAME,
    cpu: |cpu, args| {
        let per_sequence = args.input("per_sequence").dense::<f32>(NAME, "per_sequence")?;
        let loss = args.output("loss").host::<f32>(NAME, "loss")?;
        loss[0] = batch_loss(cpu, args.call.count("groups"), args.call.float("denominator"), per_sequence)?;
        Ok(())
    },
    device: None,
    unit: None,
    prepare: None,
};
