//! Launches of attention.

use crate::attention::job::{BLOCK as KEYS, Factors, Lens, check, check_places, check_sinks, check_tensors};
use crate::backend::device::workspace::choose;
use crate::backend::device::{Arguments, Buffer, Build, Device, Unit, int, launch_struct};
use crate::element::Stored;
use crate::workspace::{Need, Plan};
use crate::{Attention, Error, Keys, Qkv, Sequences, Tf32, value_error};
use std::iter::successors;

/// The kernels of attention in all its forms.
pub(super) const UNIT: Unit = Unit {
    has_product: true,
    structs: &[Call::LAYOUT],
    ..Unit::of(
        "attention",
        include_str!("attention.cu"),
        &[
            "attention_scores4",
            "attention_values4",
            "attention_join4",
            "attention_scores8",
            "attention_values8",
            "attention_join8",
            "attention_scores16",
            "attention_values16",
            "attention_join16",
        ],
    )
};

launch_struct! {
    /// What all three kernels are told.
    struct Call of "attention" {
        /// Slots of earlier launches.
        slots_before: i64,
        /// 0 means none.
        window: i64,
        /// Tiles of a sequence and key head.
        tiles: i32,
        q_heads: i32,
        kv_heads: i32,
        head_dim: i32,
        value_dim: i32,
        causal: i32,
        chunk: i32,
        capped: i32,
        paged: i32,
        page_size: i32,
        page_columns: i32,
        /// Blocks of keys, and whether each goes to a block of threads of its own.
        blocks: i32,
        split: i32,
        /// Whether there are sinks.
        sinks: i32,
        cap: f32,
        cap_factor: f32,
        c_hi: f32,
        c_lo: f32,
    }
}

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

/// [`attention`](crate::attention()) on a device. Where the sequences stand comes from the host, which checks it.
///
/// # Errors
/// As [`attention`](crate::attention()); errors of the device.
pub fn attention<I: Stored, O: Stored>(
    device: &Device,
    shape: &Attention,
    sequences: &Sequences,
    qkv: Qkv<Buffer<I>>,
    sinks: Option<&Buffer<f32>>,
    out: &mut Buffer<O>,
    lse: &mut Buffer<f32>,
) -> Result<(), Error> {
    let factors = check(shape, sequences, &lens(qkv, sequences.q_pos.len(), out, lse))?;
    check_sinks(shape, sinks.map(Buffer::len))?;
    if lse.is_empty() {
        return Ok(());
    }
    let metadata = AttentionMetadata::exact(device, shape, sequences)?;
    // SAFETY: everything was checked together.
    unsafe { launch_attention(device, shape, factors, &metadata, qkv, sinks, (out, lse)) }
}

fn lens<I: Stored, O: Stored>(
    Qkv { q, k, v }: Qkv<Buffer<I>>,
    q_pos: usize,
    out: &Buffer<O>,
    lse: &Buffer<f32>,
) -> Lens {
    Lens { q: q.len(), k: k.len(), v: v.len(), q_pos, out: out.len(), lse: lse.len() }
}

/// [`attention`] by metadata that stands on the device.
///
/// # Errors
/// As [`attention`]; [`Error::Value`] when the metadata was made for other dimensions or never set.
pub fn attention_at<I: Stored, O: Stored>(
    device: &Device,
    shape: &Attention,
    metadata: &AttentionMetadata,
    qkv: Qkv<Buffer<I>>,
    sinks: Option<&Buffer<f32>>,
    out: &mut Buffer<O>,
    lse: &mut Buffer<f32>,
) -> Result<(), Error> {
    let Attention { batch, queries, keys, .. } = *shape;
    if [batch, queries, keys] != [metadata.batch, metadata.queries, metadata.keys] {
        let made = [metadata.batch, metadata.queries, metadata.keys];
        let why =
            format!("metadata of {made:?} sequences, queries and keys does not serve {:?}", [batch, queries, keys]);
        return Err(value_error("attention", why));
    }
    if !metadata.set {
        return Err(value_error("attention", "the metadata was never set"));
    }
    let (packed, padded) = (metadata.packed, metadata.padded);
    let factors = check_tensors(shape, packed, padded, &lens(qkv, metadata.positions(), out, lse))?;
    check_sinks(shape, sinks.map(Buffer::len))?;
    if lse.is_empty() {
        return Ok(());
    }
    // SAFETY: tensors were checked here, and what stands in `metadata` when it was set.
    unsafe { launch_attention(device, shape, factors, metadata, qkv, sinks, (out, lse)) }
}

/// Where the queries and keys of a call stand, on a device: starts, positions, lengths and pages. They can be set anew
/// for another call of the same form, and are checked on the host whenever they are.
pub struct AttentionMetadata {
    batch: usize,
    queries: usize,
    /// Rows of k, per sequence where they are padded.
    keys: usize,
    packed: bool,
    padded: bool,
    page_size: usize,
    columns: usize,
    /// Most queries and most keys of a sequence that it may be set to.
    most: usize,
    reach: usize,
    /// `q_start`, `q_pos`, `kv_len`, and starts of keys or pages.
    indices: Buffer<i32>,
    /// Whether something was written there.
    set: bool,
}

impl AttentionMetadata {
    /// Those of packed queries over pages: of `shape.batch` sequences, with room for a table of `columns` pages each,
    /// that may be set to up to `most` queries and as many keys as the pages hold. Nothing is set yet.
    ///
    /// # Errors
    /// [`Error::Value`] when an extent is more than a device takes; those of the device.
    pub fn paged(
        device: &Device,
        shape: &Attention,
        page_size: usize,
        columns: usize,
        most: usize,
    ) -> Result<AttentionMetadata, Error> {
        let Attention { batch, queries, keys, .. } = *shape;
        let reach = columns.saturating_mul(page_size);
        check_extents(queries, keys, reach)?;
        let pages = batch.checked_mul(columns);
        let words = [1, queries, batch, batch].into_iter().try_fold(pages.unwrap_or(usize::MAX), usize::checked_add);
        let words = words.ok_or_else(|| value_error("attention", format!("{batch} sequences of {columns} pages")))?;
        let indices = device.empty("attention", words)?;
        let (packed, padded, set) = (true, false, false);
        Ok(AttentionMetadata { batch, queries, keys, packed, padded, page_size, columns, most, reach, indices, set })
    }

    /// Those of one call.
    fn exact(device: &Device, shape: &Attention, sequences: &Sequences) -> Result<AttentionMetadata, Error> {
        let Attention { batch, queries, keys, .. } = *shape;
        let Sequences { q_pos, kv_len, .. } = *sequences;
        let (page_size, columns) = match sequences.keys {
            Keys::Paged { page_size, table } => (page_size, table.len() / batch),
            _ => (0, 0),
        };
        let padded = matches!(sequences.keys, Keys::Padded);
        let reach = kv_len.iter().map(|&len| len as usize).max().unwrap_or(0);
        check_extents(q_pos.len(), if padded { batch.max(1).saturating_mul(keys) } else { keys }, reach)?;
        let (starts, most) = starts(shape, sequences);
        let packed = sequences.q_start.is_some();
        let indices = device.upload("attention", &join(shape, sequences, starts))?;
        Ok(AttentionMetadata {
            batch,
            queries,
            keys,
            packed,
            padded,
            page_size,
            columns,
            most,
            reach,
            indices,
            set: true,
        })
    }

    /// Sets those of the next call: `table` has `columns` pages for each sequence.
    ///
    /// # Errors
    /// [`Error::Length`] and [`Error::Value`] as [`attention`]; more queries or keys than there is room for; those of
    /// the device.
    pub fn set(
        &mut self,
        device: &Device,
        shape: &Attention,
        q_start: &[i32],
        q_pos: &[i32],
        kv_len: &[i32],
        table: &[i32],
    ) -> Result<(), Error> {
        let AttentionMetadata { batch, queries, keys, page_size, columns, .. } = *self;
        if [shape.batch, shape.queries, shape.keys] != [batch, queries, keys] || table.len() != batch * columns {
            return Err(value_error("attention", "the metadata was made for other dimensions"));
        }
        let keys = Keys::Paged { page_size, table };
        let sequences = Sequences { q_pos, kv_len, q_start: Some(q_start), keys };
        check_places(shape, &sequences)?;
        let (starts, most) = starts(shape, &sequences);
        if most > self.most {
            return Err(value_error("attention", format!("{most} queries; there is room for {}", self.most)));
        }
        self.indices.fill(device, &join(shape, &sequences, starts))?;
        self.set = true;
        Ok(())
    }

    fn positions(&self) -> usize {
        if self.packed { self.queries } else { self.batch * self.queries }
    }
}

fn check_extents(queries: usize, keys: usize, reach: usize) -> Result<(), Error> {
    int("attention", "B * T", queries)?;
    int("attention", "the rows of k", keys)?;
    int("attention", "the longest sequence", reach).map(drop)
}

/// Where the queries of each sequence start, and the most that one has.
fn starts(shape: &Attention, sequences: &Sequences) -> (Vec<i32>, usize) {
    let starts: Vec<i32> = match sequences.q_start {
        Some(starts) => starts.to_vec(),
        None => (0..=shape.batch).map(|b| (b * shape.queries) as i32).collect(),
    };
    let most = starts.windows(2).map(|two| (two[1] - two[0]) as usize).max().unwrap_or(0);
    (starts, most)
}

/// What stands in [`AttentionMetadata::indices`].
fn join(shape: &Attention, sequences: &Sequences, q_start: Vec<i32>) -> Vec<i32> {
    let keys: Vec<i32> = match sequences.keys {
        Keys::Padded => (0..shape.batch).map(|b| (b * shape.keys) as i32).collect(),
        Keys::Packed(starts) => starts[..shape.batch].to_vec(),
        Keys::Paged { table, .. } => table.to_vec(),
    };
    [&q_start, sequences.q_pos, sequences.kv_len, &keys].concat()
}

/// The slots that a call takes where there is room.
fn preferred(shape: &Attention, &AttentionMetadata { most, reach, .. }: &AttentionMetadata) -> Slots {
    let Attention { batch, q_heads, kv_heads, value_dim, .. } = *shape;
    let most_rows = most * (q_heads / kv_heads);
    let height = if most_rows <= 4 { 4 } else { 16.min(most_rows.next_power_of_two()) };
    let preferred = Slots {
        height,
        slots: 1,
        split: false,
        blocks: reach.div_ceil(KEYS).max(1),
        value_dim,
        most_rows,
        entries: batch * kv_heads,
    };
    let one = preferred.need().shared.max(1);
    let split = preferred.all() < MANY && preferred.blocks > 1;
    let slots = preferred.all().min((ENOUGH / one).max(1)).min(0xFFFF);
    Slots { slots, split, ..preferred }
}

/// What the kernels are told of a call, as if no slots went before.
fn told(
    shape: &Attention,
    Factors { cap, c: (c_hi, c_lo) }: Factors,
    &AttentionMetadata { page_size, columns, .. }: &AttentionMetadata,
    plan: &Slots,
) -> Result<Call, Error> {
    let Attention { q_heads, kv_heads, head_dim, value_dim, .. } = *shape;
    let (cap_set, (cap, factor)) = (cap.is_some(), cap.unwrap_or((0.0, 0.0)));
    // 0 says that there is none.
    let window = shape.window.map_or(0, |window| window.min(1 << 40) as i64);
    let extent = |value: usize| int("attention", "an extent", value);
    Ok(Call {
        slots_before: 0,
        window,
        tiles: extent(plan.tiles())?,
        q_heads: extent(q_heads)?,
        kv_heads: extent(kv_heads)?,
        head_dim: extent(head_dim)?,
        value_dim: extent(value_dim)?,
        causal: i32::from(shape.causal),
        // One that holds every position is none.
        chunk: shape.chunk.and_then(|chunk| chunk.try_into().ok()).unwrap_or(0),
        capped: i32::from(cap_set),
        paged: i32::from(page_size > 0),
        page_size: extent(page_size)?,
        page_columns: extent(columns)?,
        blocks: extent(plan.blocks)?,
        split: i32::from(plan.split),
        sinks: 0,
        cap,
        cap_factor: factor,
        c_hi,
        c_lo,
    })
}

/// Starts the kernels of a call.
///
/// # Safety
/// The buffers are as long as `shape` says, and `metadata` was set for that shape.
unsafe fn launch_attention<I: Stored, O: Stored>(
    device: &Device,
    shape: &Attention,
    factors: Factors,
    metadata: &AttentionMetadata,
    Qkv { q, k, v }: Qkv<Buffer<I>>,
    sinks: Option<&Buffer<f32>>,
    (out, lse): (&mut Buffer<O>, &mut Buffer<f32>),
) -> Result<(), Error> {
    let op = "attention";
    let (batch, value_dim, indices) = (shape.batch, shape.value_dim, &metadata.indices);
    let preferred = preferred(shape, metadata);
    let (plan, room) = choose(device, op, successors(Some(preferred), Slots::smaller))?;

    let call = Call { sinks: i32::from(sinks.is_some()), ..told(shape, factors, metadata, &plan)? };
    let positions = batch + 1;
    let lengths = positions + metadata.positions();
    let parts = [0, positions, lengths, lengths + batch];
    let build = Build { tf32: shape.tf32 == Tf32::Enabled && I::NAME == "fp32", ..Build::of::<I, O>(op) };
    let [scores_name, values_name, join_name] = match plan.height {
        4 => ["attention_scores4", "attention_values4", "attention_join4"],
        8 => ["attention_scores8", "attention_values8", "attention_join8"],
        _ => ["attention_scores16", "attention_values16", "attention_join16"],
    };
    let [scores, largest, sums, _] = plan.words();
    let at = [0, scores, scores + largest, scores + largest + sums];
    let shared = 2 * KEYS * (PART + 16);
    let sinks = sinks.unwrap_or(&room); // Without sinks nothing is read there.
    for first in (0..plan.all()).step_by(plan.slots) {
        let slots = plan.slots.min(plan.all() - first);
        let call = Call { slots_before: first as i64, ..call }.bytes();
        let of_scores = Arguments::new()
            .layout(&call)
            .buffer(q)
            .buffer(k)
            .buffer_from(indices, parts[0])
            .buffer_from(indices, parts[1])
            .buffer_from(indices, parts[3])
            .buffer_from(indices, parts[2])
            .buffer_from(&room, at[0])
            .buffer_from(&room, at[1]);
        let of_values = Arguments::new()
            .layout(&call)
            .buffer(v)
            .buffer_from(indices, parts[0])
            .buffer_from(indices, parts[1])
            .buffer_from(indices, parts[3])
            .buffer_from(indices, parts[2])
            .buffer_from(&room, at[0])
            .buffer_from(&room, at[1])
            .buffer_from(&room, at[2])
            .buffer_from(&room, at[3])
            .buffer(sinks)
            .buffer(out)
            .buffer(lse);
        let of_join = Arguments::new()
            .layout(&call)
            .buffer_from(indices, parts[0])
            .buffer_from(&room, at[1])
            .buffer_from(&room, at[2])
            .buffer_from(&room, at[3])
            .buffer(sinks)
            .buffer(out)
            .buffer(lse);
        let each = [plan.blocks, slots, 1];
        // A warp to four rows, 128 columns, and one block or all.
        let tasks = plan.height / 4 * value_dim.div_ceil(128).max(1) * if plan.split { plan.blocks } else { 1 };
        let values = [tasks.div_ceil(4), slots, 1];
        // SAFETY: the caller's promise; the workspace has room for `plan.slots` slots.
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
