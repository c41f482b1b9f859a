//! Launches of the ops of a mixture of experts.

use super::rows::{build, int};
use super::{Arguments, Buffer, Device, Indices, Stored};
use crate::{Combine, Counter, Error, Route, Scoring, check_len, value_error};

/// Bytes of shared memory that every device has without being asked.
const SHARED: usize = 48 << 10;

/// [`route`](crate::route()) on a device; softmax scores stand in the workspace.
///
/// # Errors
/// As [`route`](crate::route()); more experts than a block has room for; errors of the device.
pub fn route<I: Stored>(
    device: &Device,
    shape: &Route,
    logits: &Buffer<I>,
    bias: Option<&Buffer<I>>,
    index: &mut Buffer<i32>,
    weight: &mut Buffer<f32>,
) -> Result<(), Error> {
    let Route { tokens, experts, chosen, groups, top_groups, .. } = *shape;
    let op = "route";
    let lens = [logits.len(), index.len(), weight.len()];
    let scale = crate::moe::route::check(shape, lens, bias.map(Buffer::len))?;
    if tokens == 0 {
        return Ok(());
    }
    // Ranks of experts and groups, and the chosen weights.
    let shared = 4 * (experts + groups + chosen);
    if shared > SHARED {
        return Err(value_error(op, format!("{experts} experts are more than a device takes")));
    }
    let scores = match shape.scoring {
        Scoring::Sigmoid => None,
        Scoring::Softmax => {
            let mut scores = device.take::<f32>(op, tokens * experts, true)?;
            device.ledger().note(Counter::WorkspaceF32, 4 * scores.len(), "workspace of f32 on the device")?;
            super::softmax(device, tokens, experts, logits, &mut scores)?;
            Some(scores)
        }
    };
    let ints = [
        int(op, "the number of experts", experts)?,
        chosen as i32,
        groups as i32,
        top_groups as i32,
        i32::from(shape.scoring == Scoring::Sigmoid),
        i32::from(bias.is_some()),
        i32::from(shape.group_worth == crate::GroupWorth::TopTwo),
        i32::from(shape.normalise),
    ];
    let mut choice: Vec<u8> = ints.iter().flat_map(|value| value.to_ne_bytes()).collect();
    choice.extend(scale.to_ne_bytes());
    let arguments = Arguments::new().layout(&choice).buffer(logits);
    let arguments = match &scores {
        Some(scores) => arguments.buffer(scores),
        None => arguments.null(),
    };
    let arguments = match bias {
        Some(bias) => arguments.buffer(bias),
        None => arguments.null(),
    };
    let arguments = arguments.buffer(index).buffer(weight);
    // SAFETY: lengths were checked; a block takes a token, and its shared memory holds what the kernel keeps there.
    unsafe { device.launch(build::<I, f32>(op), op, [tokens, 1, 1], 32, shared, &arguments) }
}

/// [`route`] whose choice stays on the device, for [`gemm_experts`](super::gemm_experts).
///
/// # Errors
/// As [`route`].
pub fn route_to<I: Stored>(
    device: &Device,
    shape: &Route,
    logits: &Buffer<I>,
    bias: Option<&Buffer<I>>,
    weight: &mut Buffer<f32>,
) -> Result<Indices, Error> {
    let mut index = device.empty("route", shape.tokens.saturating_mul(shape.chosen))?;
    route(device, shape, logits, bias, &mut index, weight)?;
    // The kernel takes places of experts that are left, and there are as many as are chosen.
    Ok(Indices::made(device, index, shape.experts))
}

/// [`combine`](crate::combine()) on a device; rows come from the host, which checks them.
///
/// # Errors
/// As [`combine`](crate::combine()); errors of the device.
pub fn combine<I: Stored, O: Stored>(
    device: &Device,
    shape: &Combine,
    x: &Buffer<I>,
    row: &[i32],
    weight: &Buffer<f32>,
    shared: Option<&Buffer<I>>,
    y: &mut Buffer<O>,
) -> Result<(), Error> {
    crate::moe::combine::check(shape, [x.len(), weight.len(), y.len()], row, shared.map(Buffer::len))?;
    if y.is_empty() {
        return Ok(());
    }
    combine_at(device, shape, x, &Indices::new(device, "combine", row, shape.rows)?, weight, shared, y)
}

/// [`combine`] of rows that stand on the device.
///
/// # Errors
/// [`Error::Length`] when a buffer does not match; [`Error::Value`] when rows may be outside x; errors of the device.
pub fn combine_at<I: Stored, O: Stored>(
    device: &Device,
    shape: &Combine,
    x: &Buffer<I>,
    row: &Indices,
    weight: &Buffer<f32>,
    shared: Option<&Buffer<I>>,
    y: &mut Buffer<O>,
) -> Result<(), Error> {
    let Combine { tokens, chosen, rows, n } = *shape;
    let op = "combine";
    check_len(op, "row", "[T,K]", row.len(), &[tokens, chosen])?;
    crate::moe::combine::check_lens(shape, [x.len(), weight.len(), y.len()], shared.map(Buffer::len))?;
    if row.limit() > rows {
        return Err(value_error(op, format!("rows up to {} of {rows}", row.limit())));
    }
    let arguments = Arguments::new().buffer(x).buffer(row.buffer(device)?).buffer(weight);
    let arguments = match shared {
        Some(shared) => arguments.buffer(shared).int(1),
        None => arguments.null().int(0),
    };
    let arguments = arguments.buffer(y).int(int(op, "K", chosen)?).long(n);
    let grid = [tokens, n.div_ceil(128 * 8), 1];
    // SAFETY: lengths were checked, and every row is below the limit.
    unsafe { device.launch(build::<I, O>(op), op, grid, 128, 0, &arguments) }
}
