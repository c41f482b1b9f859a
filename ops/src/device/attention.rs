//! Launches of attention.

use super::rows::{build, int};
use super::workspace::choose;
use super::{Arguments, Buffer, Build, Device, Stored};
use crate::attention::{Factors, Lens, check};
use crate::plan::{Need, Plan};
use crate::{Attention, Error, Keys, Sequences, Tf32};
use std::iter::successors;

/// Keys of a block, which belongs to the contract.
const KEYS: usize = 256;
/// Bytes of each key in shared memory at a time, in two stages: as in attention.cu.
const PART: usize = 128;
/// From this many slots on, a block of threads goes through all blocks of keys of its slot.
const MANY: usize = 256;

/// Slots in hand at a time, and how high they are.
#[derive(Clone, Copy)]
struct Slots {
    /// Query rows of a slot: 4, 8 or 16.
    height: usize,
    /// Slots at a time.
    slots: usize,
    /// Whether each block of keys goes to a block of threads of its own, which leaves its sums in the workspace.
    split: bool,
    /// Facts of the call.
    blocks: usize,
    value_dim: usize,
    most_rows: usize,
    entries: usize,
}

impl Slots {
    fn tiles(&self) -> usize {
        self.most_rows.div_ceil(self.height).max(1)
    }

    fn all(&self) -> usize {
        self.entries * self.tiles()
    }

    /// Words of the scores, of the largest by blocks, of the sums of blocks and of their denominators.
    fn words(&self) -> [usize; 4] {
        let blocks = self.slots.saturating_mul(self.height).saturating_mul(self.blocks);
        let split = if self.split { blocks } else { 0 };
        [blocks.saturating_mul(KEYS), blocks, split.saturating_mul(self.value_dim), split]
    }

    fn smaller(&self) -> Option<Slots> {
        let plan = *self;
        Some(match plan {
            Slots { slots: 2.., .. } => Slots { slots: plan.slots.div_ceil(2), ..plan },
            Slots { split: true, .. } => Slots { split: false, ..plan },
            Slots { height: 5.., .. } => Slots { height: plan.height / 2, ..plan },
            _ => return None,
        })
    }
}

impl Plan for Slots {
    fn need(&self) -> Need {
        let shared = self.words().into_iter().fold(0usize, usize::saturating_add);
        Need { shared, slot: 0, workers: 1, pairs: 0 }
    }

    fn tiles(&self) -> [(&'static str, usize); 3] {
        [("rows", self.height), ("slots", self.slots), ("split", usize::from(self.split))]
    }
}

/// Words of workspace that one call takes without being asked to spare: 512 MiB.
const ENOUGH: usize = 128 << 20;

/// [`attention`](crate::attention()) on a device. Positions and lengths come from the host, which checks them.
///
/// # Errors
/// As [`attention`](crate::attention()); errors of the device.
#[allow(clippy::too_many_arguments)]
pub fn attention<I: Stored, O: Stored>(
    device: &Device,
    shape: &Attention,
    q: &Buffer<I>,
    k: &Buffer<I>,
    v: &Buffer<I>,
    q_pos: &[i32],
    kv_len: &[i32],
    out: &mut Buffer<O>,
    lse: &mut Buffer<f32>,
) -> Result<(), Error> {
    attention_over(device, shape, &Sequences::default(), q, k, v, q_pos, kv_len, out, lse)
}

/// [`attention_over`](crate::attention_over()) on a device.
///
/// # Errors
/// As [`attention_over`](crate::attention_over()); errors of the device.
#[allow(clippy::too_many_arguments)]
pub fn attention_over<I: Stored, O: Stored>(
    device: &Device,
    shape: &Attention,
    sequences: &Sequences,
    q: &Buffer<I>,
    k: &Buffer<I>,
    v: &Buffer<I>,
    q_pos: &[i32],
    kv_len: &[i32],
    out: &mut Buffer<O>,
    lse: &mut Buffer<f32>,
) -> Result<(), Error> {
    let op = "attention";
    let Attention { batch, queries, q_heads, kv_heads, head_dim, value_dim, .. } = *shape;
    let lens = Lens { q: q.len(), k: k.len(), v: v.len(), q_pos: q_pos.len(), out: out.len(), lse: lse.len() };
    let Factors { cap, c: (c_hi, c_lo) } = check(shape, sequences, &lens, kv_len)?;
    if lse.is_empty() {
        return Ok(());
    }

    int(op, "B * T", q_pos.len())?;
    int(op, "the rows of k", batch.max(1).saturating_mul(shape.keys))?;
    let q_start: Vec<i32> = match sequences.q_start {
        Some(starts) => starts.to_vec(),
        None => (0..=batch).map(|b| (b * queries) as i32).collect(),
    };
    let (starts, page_size, page_columns): (Vec<i32>, usize, usize) = match sequences.keys {
        Keys::Padded => ((0..batch).map(|b| (b * shape.keys) as i32).collect(), 0, 0),
        Keys::Packed(starts) => (starts[..batch].to_vec(), 0, 0),
        Keys::Paged { page_size, table } => (table.to_vec(), page_size, table.len() / batch),
    };
    let most = q_start.windows(2).map(|two| (two[1] - two[0]) as usize).max().unwrap_or(0);
    let keys = kv_len.iter().map(|&len| len as usize).max().unwrap_or(0);
    let most_rows = most * (q_heads / kv_heads);
    let height = if most_rows <= 4 { 4 } else { 16.min(most_rows.next_power_of_two()) };
    let preferred = Slots {
        height,
        slots: 1,
        split: false,
        blocks: keys.div_ceil(KEYS).max(1),
        value_dim,
        most_rows,
        entries: batch * kv_heads,
    };
    let one: usize = preferred.words().into_iter().fold(0usize, usize::saturating_add).max(1);
    let split = preferred.all() < MANY && preferred.blocks > 1;
    let slots = preferred.all().min((ENOUGH / one).max(1)).min(0xFFFF);
    let preferred = Slots { slots, split, ..preferred };
    let (plan, room) = choose(device, op, successors(Some(preferred), Slots::smaller))?;

    let (cap_set, (cap, factor)) = (cap.is_some(), cap.unwrap_or((0.0, 0.0)));
    let window = i64::try_from(shape.window).unwrap_or(i64::MAX).min(1 << 40);
    let ints = [
        plan.tiles(),
        q_heads,
        kv_heads,
        head_dim,
        value_dim,
        usize::from(shape.causal),
        usize::from(cap_set),
        usize::from(page_size > 0),
        page_size,
        page_columns,
        plan.blocks,
        usize::from(plan.split),
    ];
    let ints = ints.map(|value| int(op, "an extent", value)).into_iter().collect::<Result<Vec<_>, _>>()?;
    let call = |first: usize| -> Vec<u8> {
        let mut bytes = Vec::from((first as i64).to_ne_bytes());
        bytes.extend(window.to_ne_bytes());
        bytes.extend(ints.iter().flat_map(|value| value.to_ne_bytes()));
        bytes.extend([cap, factor, c_hi, c_lo].iter().flat_map(|value| value.to_ne_bytes()));
        bytes
    };

    // One copy for the four.
    let places = [0, q_start.len(), q_start.len() + q_pos.len(), q_start.len() + q_pos.len() + kv_len.len()];
    let indices = device.upload(op, &[&q_start, q_pos, kv_len, &starts].concat())?;
    let build = Build { tf32: shape.tf32 == Tf32::Enabled && I::NAME == "fp32", ..build::<I, O>(op) };
    let [scores_name, values_name, join_name] = match plan.height {
        4 => ["attention_scores4", "attention_values4", "attention_join4"],
        8 => ["attention_scores8", "attention_values8", "attention_join8"],
        _ => ["attention_scores16", "attention_values16", "attention_join16"],
    };
    let [scores, largest, sums, _] = plan.words();
    let at = [0, scores, scores + largest, scores + largest + sums];
    let shared = 2 * KEYS * (PART + 16);
    for first in (0..plan.all()).step_by(plan.slots) {
        let slots = plan.slots.min(plan.all() - first);
        let call = call(first);
        let of_scores = Arguments::new()
            .layout(&call)
            .buffer(q)
            .buffer(k)
            .buffer_from(&indices, places[0])
            .buffer_from(&indices, places[1])
            .buffer_from(&indices, places[3])
            .buffer_from(&indices, places[2])
            .buffer_from(&room, at[0])
            .buffer_from(&room, at[1]);
        let of_values = Arguments::new()
            .layout(&call)
            .buffer(v)
            .buffer_from(&indices, places[0])
            .buffer_from(&indices, places[1])
            .buffer_from(&indices, places[3])
            .buffer_from(&indices, places[2])
            .buffer_from(&room, at[0])
            .buffer_from(&room, at[1])
            .buffer_from(&room, at[2])
            .buffer_from(&room, at[3])
            .buffer(out)
            .buffer(lse);
        let of_join = Arguments::new()
            .layout(&call)
            .buffer_from(&indices, places[0])
            .buffer_from(&room, at[1])
            .buffer_from(&room, at[2])
            .buffer_from(&room, at[3])
            .buffer(out)
            .buffer(lse);
        let each = [plan.blocks, slots, 1];
        // A warp to four rows, 128 columns, and one block or all.
        let tasks = plan.height / 4 * value_dim.div_ceil(128).max(1) * if plan.split { plan.blocks } else { 1 };
        let values = [tasks.div_ceil(4), slots, 1];
        // SAFETY: lengths, starts, pages and key counts were checked; the workspace has room for `plan.slots` slots.
        unsafe {
            device.launch(build, scores_name, each, 256, shared, &of_scores)?;
            device.launch(build, values_name, values, 128, 0, &of_values)?;
            if plan.split {
                device.launch(build, join_name, [1, slots, 1], 128, 0, &of_join)?;
            }
        }
    }
    Ok(())
}
