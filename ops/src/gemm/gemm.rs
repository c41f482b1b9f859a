//! Matrix product with a transposed weight: `x[M,K], w[N,K], bias[N]? -> y[M,N]`.
//!
//! Formula: `y[m][n] = sum over k of x[m][k] * w[n][k] + bias[n]`.
//! Order: k is cut in 8 segments of `16 * ceil(k_total / 128)`; a segment is a chain of fma from +0, k ascending; the
//! eight sums are joined as `((s0+s1)+(s2+s3)) + ((s4+s5)+(s6+s7))`.
//! Rounding: each fma and each join once to f32; `+ bias` once in f32; the last rounding to the output type.

use super::device;
use super::packed::{PackedWeight, Panel, Panels, Weight};
use super::shape::Gemm;
use crate::call::{Arguments, Entry};
use crate::element::typed;
use crate::gemm::tile::{
    Block, Left, MAX_ROWS, Order, Right, TILE_ROWS, Tile, block_rows, block_words, dot_is_exact, dot_tile,
    dot_unpacking, fma_block, fma_tile,
};
use crate::pack::matrix::{Matrix, Packing, Side, least_of_rows, pack_panels, pack_rows, panel_words, row_words};
use crate::pack::{PANEL, as_floats, as_floats_mut, f32_of_rows, f32_row};
use crate::parallel::SharedOut;
use crate::simd::{Kernel, Simd, load_at, narrow_at};
use crate::tensor::{Prepared, Rows};
use crate::workspace::memory::LINE;
use crate::workspace::{Need, Plan, choose};
use crate::{Counter, Cpu, Element, Error, TensorMut, TensorRef, Tf32, check_len, value_error};
use half::bf16;
use std::iter::successors;
use std::sync::atomic::{AtomicUsize, Ordering};

/// `x[M,K], w[N,K], bias[N]? -> y[M,N]`, all row-major. The weight is laid out anew in every call: pack it once and call
/// [`gemm_packed`] where it is used again.
///
/// # Errors
/// [`Error::Length`] when a slice does not match; [`Error::Value`] when `k_offset`, `k` and `k_total` do not name a
/// subtree of the segments, and for a bias of a part, which belongs to the whole; [`Error::Budget`] below the smallest plan
/// (2 KiB).
///
/// ```
/// use samebits_ops::{Cpu, Gemm, gemm};
///
/// let (x, w) = ([1f32, 2.0], [3.0, 4.0, 5.0, 6.0]);
/// let mut y = [0f32; 2];
/// gemm(&Cpu::best(), &Gemm::new(1, 2, 2), &x, &w, Some(&[100.0, 200.0]), &mut y)?;
/// assert_eq!(y, [111.0, 217.0]);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn gemm<I: Element, O: Element>(
    cpu: &Cpu,
    shape: &Gemm,
    x: &[I],
    w: &[I],
    bias: Option<&[I]>,
    y: &mut [O],
) -> Result<(), Error> {
    check_len("gemm", "w", "[N,K]", w.len(), &[shape.n, shape.k])?;
    let w = TensorRef::of(w, &[shape.n, shape.k]);
    sliced(cpu, shape, x, w, bias, y)
}

/// [`gemm`] with a weight packed beforehand: the same bits, of a part of a longer sum too. `x[M,K], bias[N]? -> y[M,N]`.
///
/// # Errors
/// As [`gemm`]; [`Error::Value`] when the weight is not `[N,K]`, and for TF32, for which no weight is packed;
/// [`Error::Budget`] below the smallest plan (64 bytes).
///
/// ```
/// use samebits_ops::{Cpu, Gemm, PackedWeight, gemm_packed};
///
/// let cpu = Cpu::best();
/// let w = PackedWeight::pack(&cpu, 2, 2, &[3f32, 4.0, 5.0, 6.0])?;
/// let mut y = [0f32; 2];
/// gemm_packed(&cpu, &Gemm::new(1, 2, 2), &[1f32, 2.0], &w, None, &mut y)?;
/// assert_eq!(y, [11.0, 17.0]);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn gemm_packed<I: Element, O: Element>(
    cpu: &Cpu,
    shape: &Gemm,
    x: &[I],
    w: &PackedWeight,
    bias: Option<&[I]>,
    y: &mut [O],
) -> Result<(), Error> {
    sliced(cpu, shape, x, TensorRef::packed(w), bias, y)
}

fn sliced<I: Element, O: Element>(
    cpu: &Cpu,
    shape: &Gemm,
    x: &[I],
    w: TensorRef,
    bias: Option<&[I]>,
    y: &mut [O],
) -> Result<(), Error> {
    let Gemm { m, n, k, .. } = *shape;
    check_len("gemm", "x", "[M,K]", x.len(), &[m, k])?;
    check_len("gemm", "y", "[M,N]", y.len(), &[m, n])?;
    if let Some(bias) = bias {
        check_len("gemm", "bias", "[N]", bias.len(), &[n])?;
        if shape.is_partial() {
            return Err(value_error("gemm", "a bias of a part of a sum; add it to the whole"));
        }
    }
    let bias = bias.map(|bias| TensorRef::of(bias, &[n]));
    run(cpu, shape, [TensorRef::of(x, &[m, k]), w], bias, TensorMut::of(y, &[m, n]))
}

/// Rows of x and w of any layout.
fn run(cpu: &Cpu, shape: &Gemm, [x, w]: [TensorRef; 2], bias: Option<TensorRef>, y: TensorMut) -> Result<(), Error> {
    x.on_host("gemm", "x")?;
    check_weight("gemm", [shape.n, shape.k], shape.tf32, w)?;
    typed!(x.dtype() => I, {
        let bias = bias.map(|bias| bias.dense::<I>("gemm", "bias")).transpose()?;
        let (bounds, w) = (&shape.bounds()?, Weight::of("gemm", w)?);
        let product = Product { cpu, says: &SAYS, shape: *shape, x: x.rows::<I>(), w, bias, bounds };
        typed!(y.dtype() => O, product.run(y.host::<O>("gemm", "y")?))
    })
}

/// What is wrong with the weight `w[N,K]` of a product.
pub(super) fn check_weight(op: &'static str, [n, k]: [usize; 2], tf32: Tf32, w: TensorRef) -> Result<(), Error> {
    if w.shape() != [n, k] {
        return Err(value_error(op, format!("w is {:?}; it must be [{n}, {k}]", w.shape())));
    }
    if w.as_prepared::<PackedWeight>().is_some() && tf32 == Tf32::Enabled {
        return Err(value_error(op, "a packed weight is whole; TF32 reads the matrix"));
    }
    Ok(())
}

/// What gemm says of itself.
pub(crate) const SAYS: Says = Says {
    op: "gemm",
    lays_out: "gemm lays its weight out; pack it once and call gemm_packed",
    flushes: "gemm: operands so small that VDPBF16PS would flush them",
};

/// gemm, by name.
pub(crate) const OP: Entry = Entry {
    name: "gemm",
    cpu: |cpu, args| {
        let shape = Gemm::of(args.call);
        // A rank's part is added to others before the bias is.
        let bias = args.optional("bias").filter(|_| !shape.is_partial());
        run(cpu, &shape, [args.input("x"), args.input("w")], bias, args.output("y"))
    },
    device: Some(|on, args| {
        let shape = Gemm::of(args.call);
        let bias = args.optional("bias").filter(|_| !shape.is_partial());
        let (x, w, y) = (args.input("x"), args.input("w"), args.output("y"));
        typed!(x.dtype() => I, typed!(y.dtype() => O, {
            let bias = bias.map(|bias| bias.device_part::<I>("gemm", "bias")).transpose()?;
            let (x, w) = (x.device_part::<I>("gemm", "x")?, w.device_part("gemm", "w")?);
            device::gemm_parts::<I, O>(on, &shape, x, w, bias, y.device_part("gemm", "y")?)
        }))
    }),
    unit: Some(&device::UNIT),
    prepare: Some(prepare),
};

/// The weight `w` of a product, packed; none under TF32.
pub(crate) fn prepare(cpu: &Cpu, args: &Arguments) -> Result<Option<Prepared>, Error> {
    packed(cpu, args, Side::Rows)
}

/// The weight `w` of a product whose outputs are a side of it.
pub(super) fn packed(cpu: &Cpu, args: &Arguments, outputs: Side) -> Result<Option<Prepared>, Error> {
    let w = args.input("w");
    if args.call.tf32() || w.as_prepared::<PackedWeight>().is_some() {
        return Ok(None);
    }
    w.on_host(args.op(), "w")?;
    Ok(Some(Prepared::new("w", PackedWeight::of(cpu, outputs, w)?)))
}

/// What a product says where it is not what was asked for.
pub(crate) struct Says {
    pub op: &'static str,
    /// That it lays its weight out.
    pub lays_out: &'static str,
    /// That it leaves `VDPBF16PS`.
    pub flushes: &'static str,
}

/// Rows of a block at most: with 2048 steps of k they fit an L2 of 1 MiB.
const BLOCK_ROWS: usize = 96;
/// From so many rows on tiles pass over a panel together.
const FEWEST_ROWS: usize = 13;

/// How a product is cut into tiles.
#[derive(Clone, Copy)]
pub(crate) struct Tiling {
    k: usize,
    /// Rows of a tile.
    height: usize,
    /// Tiles of x packed at a time.
    tiles: usize,
    /// Panels of w packed at a time; 0 when w is packed beforehand, or by each worker.
    panels: usize,
    /// Whether each worker packs a panel of w when its tiles come to it. It passes under all of them from the nearest caches, where
    /// panels that are packed for everybody go through memory first.
    own: bool,
    /// 0 when whole rows are packed; else each worker packs this many steps of k at a time, again for every tile.
    steps: usize,
    pub workers: usize,
    /// Whether x and w are packed as pairs.
    x_pairs: bool,
    w_pairs: bool,
    /// Whether a worker unpacks coded panels.
    unpack: bool,
    /// Tiles that pass over a panel together, by [`fma_block`]; 0 where each is by itself.
    block: usize,
}

impl Tiling {
    /// Words of one packed tile of x.
    fn tile_words(&self) -> usize {
        (self.height * row_words(self.k, self.x_pairs)).next_multiple_of(LINE) + LINE
    }

    fn x_words(&self) -> usize {
        self.tiles * self.tile_words()
    }

    /// Words at the start of the shared ones in which all of x stays as it was laid out, for another run with the same x;
    /// none where only a part of its `m` rows is there at a time.
    pub fn held_words(&self, m: usize) -> usize {
        if self.steps == 0 && self.tiles * self.height >= m { self.x_words() } else { 0 }
    }

    fn w_words(&self) -> usize {
        self.panels * panel_words(self.k, self.w_pairs)
    }

    /// The next smaller plan: fewer operands at a time, then pieces of k, then fewer workers, then one row.
    pub fn smaller(&self) -> Option<Tiling> {
        let plan = *self;
        if plan.steps == 0 && (plan.tiles > 1 || plan.panels > 1) {
            let halve = |count: usize| count.div_ceil(2);
            let tiles = halve(plan.tiles);
            let (unpack, block) = (plan.unpack && (tiles > 1 || plan.block > 0), plan.block.min(tiles));
            return Some(Tiling { tiles, panels: halve(plan.panels), unpack, block, ..plan });
        }
        match plan {
            Tiling { steps: 0, .. } => {
                let height = plan.height.min(TILE_ROWS);
                Some(Tiling { steps: plan.k.clamp(16, 1024).next_multiple_of(16), height, block: 0, ..plan })
            }
            Tiling { steps: 17.., .. } => Some(Tiling { steps: plan.steps.div_ceil(32) * 16, ..plan }),
            Tiling { workers: 2.., .. } => Some(Tiling { workers: plan.workers / 2, ..plan }),
            Tiling { height: 2.., .. } => Some(Tiling { height: plan.height / 2, ..plan }),
            _ => None,
        }
    }
}

impl Plan for Tiling {
    fn need(&self) -> Need {
        if self.steps > 0 {
            let columns = if self.panels > 0 || self.own { PANEL } else { 0 };
            return Need { shared: 0, slot: self.steps * (self.height + columns), workers: self.workers, pairs: 0 };
        }
        let (x, w) = (self.x_words(), self.w_words());
        let pairs = if self.x_pairs { x } else { 0 } + if self.w_pairs { w } else { 0 };
        let panel = if self.unpack || self.own { panel_words(self.k, self.w_pairs) } else { 0 };
        let pairs = pairs + if self.w_pairs { panel * self.workers } else { 0 };
        let slot = panel + if self.block > 0 { block_words(self.block * self.height) } else { 0 };
        Need { shared: x.saturating_add(w), slot, workers: self.workers, pairs }
    }

    fn tiles(&self) -> [(&'static str, usize); 3] {
        match self.steps {
            0 => [("rows", self.tiles * self.height), ("panels", self.panels), ("", 0)],
            steps => [("rows", self.height), ("steps", steps), ("", 0)],
        }
    }
}

/// Some rows of a product and a panel of its outputs.
#[derive(Clone, Copy)]
pub(crate) struct Part {
    pub first: usize,
    pub rows: usize,
    pub panel: usize,
}

/// One matrix product, ready to run.
pub(crate) struct Product<'a, I> {
    pub cpu: &'a Cpu,
    pub says: &'static Says,
    /// Rows of x, outputs and terms.
    pub shape: Gemm,
    pub x: Rows<'a, I>,
    pub w: Weight<'a, I>,
    pub bias: Option<&'a [I]>,
    /// Bounds of the segments.
    pub bounds: &'a [usize],
}

impl<I: Element> Product<'_, I> {
    /// Whether bf16 pairs meet in `VDPBF16PS`.
    pub(crate) fn dots(&self) -> bool {
        self.cpu.isa().has_dot() && I::IS_BF16
    }

    /// Whether workers unpack the panels of the weight: the first of several tiles does it for all. One alone reads them as
    /// they stand.
    pub(crate) fn unpacks(&self, tiles: usize) -> bool {
        tiles > 1 && (self.quantized() || self.dots() && self.coded())
    }

    /// The largest plan.
    pub(crate) fn preferred(&self) -> Tiling {
        // Few rows are one tall tile, so that each weight is read once.
        let Gemm { m, n, k, .. } = self.shape;
        let blocks = self.block_height();
        let height = blocks.unwrap_or(if m <= MAX_ROWS { m } else { TILE_ROWS });
        let plain = if let Weight::Plain(w) = &self.w { Some(w) } else { None };
        let own = blocks.is_none() && plain.is_some_and(Matrix::packs_alone);
        let (tiles, workers) = (m.div_ceil(height), self.cpu.threads());
        let panels = plain.filter(|_| !own).map_or(0, |w| w.at_a_time(n.div_ceil(PANEL), workers));
        let (x_pairs, w_pairs) = (self.dots() && blocks.is_none(), I::IS_BF16);
        let unpack = self.unpacks(if blocks.is_some() { usize::MAX } else { tiles });
        let block = blocks.map_or(0, |height| (BLOCK_ROWS / height).min(tiles));
        Tiling { k, height, tiles, panels, own, steps: 0, workers, x_pairs, w_pairs, unpack, block }
    }

    /// Rows of a tile where tiles pass over a panel together: many, of products that multiply-adds make.
    pub(crate) fn block_height(&self) -> Option<usize> {
        let (m, isa) = (self.shape.m, self.cpu.isa());
        let multiply_adds = !self.dots() || !isa.dots_pay();
        // Panels of f32 feed tiles of 16 lanes as they stand.
        let gains = I::IS_BF16 || isa.lanes() < 16;
        // Rows that only fill the last tile are to take an eighth of the time at most.
        let pays = |height: &usize| m >= FEWEST_ROWS && m.next_multiple_of(*height) <= m + m / 8;
        let readable = !self.coded() || isa.reads_coded();
        block_rows(isa).filter(pays).filter(|_| multiply_adds && gains && readable)
    }

    /// Whether the weight holds its panels in 12 bits.
    fn coded(&self) -> bool {
        matches!(self.w, Weight::Packed(panels) if panels.are_coded())
    }

    /// Whether it holds integers with scales.
    pub(crate) fn quantized(&self) -> bool {
        matches!(self.w, Weight::Packed(panels) if panels.are_quantized())
    }

    /// Writes the product to `y[M,N]`.
    pub(super) fn run<O: Element>(&self, y: &mut [O]) -> Result<(), Error> {
        let Product { cpu, says, shape: Gemm { m, n, .. }, .. } = *self;
        if m == 0 || n == 0 {
            return Ok(());
        }
        if matches!(self.w, Weight::Plain(_)) {
            cpu.ledger().note(Counter::Layouts, 1, says.lays_out)?;
        }
        let plans = successors(Some(self.preferred()), Tiling::smaller);
        let (plan, mut workspace) = choose(cpu, says.op, plans)?;
        if cpu.ledger().forbids(Counter::SlowPaths) {
            cpu.ledger().note(Counter::SlowPaths, self.slow_tiles(&plan), says.flushes)?;
        }
        let (shared, slots) = workspace.split();
        let y = SharedOut::new(y);
        let at = |part: Part| part.first * n + part.panel * PANEL;
        // The lines of y arrive while the tile is summed.
        let ask = |part: Part| y.prefetch_rows(at(part), part.rows, n);
        self.run_in(&plan, (shared, false), slots, ask, |part, sums| {
            let columns = PANEL.min(n - part.panel * PANEL);
            let bias = self.bias_of(part.panel);
            // SAFETY: parts differ in rows or in panel, so their places in y are disjoint.
            unsafe { finish(cpu, sums, bias.as_ref(), &y, at(part), n, columns) };
        });
        Ok(())
    }

    /// Puts the sums of all parts of the product, which has elements, in the workspace of a plan for as many rows and outputs
    /// or more; `ask` comes before the sums of a part. Where an earlier run has left the same x in the shared words, `held`,
    /// it is there all of it ([`Tiling::held_words`]).
    pub(crate) fn run_in(
        &self,
        plan: &Tiling,
        (shared, held): (&mut [u32], bool),
        slots: Vec<&mut [u32]>,
        ask: impl Fn(Part) + Sync,
        put: impl Fn(Part, &[f32]) + Sync,
    ) {
        assert!(!held || plan.held_words(self.shape.m) > 0, "tiles that stay");
        let slow = match plan.steps {
            0 => self.packed(plan, (shared, held), slots, ask, put),
            _ => self.streamed(plan, slots, put),
        };
        self.cpu.ledger().add(Counter::SlowPaths, slow);
    }

    /// How many tiles of rows of x and a panel will leave `VDPBF16PS`. Packing finds the same on its way, when parts of y are
    /// written already.
    pub(crate) fn slow_tiles(&self, plan: &Tiling) -> usize {
        if plan.steps > 0 || !plan.x_pairs {
            return 0;
        }
        let Product { cpu, shape: Gemm { m, n, k, .. }, x, w, .. } = *self;
        let height = plan.height;
        let rows: Vec<_> =
            (0..m).step_by(height).map(|first| least_of_rows(cpu, x, first, height.min(m - first))).collect();
        let slow = |panel: usize| {
            let least = match w {
                Weight::Packed(group) => group.panel(panel, &mut []).least,
                Weight::Plain(w) => w.least(cpu, k, panel * PANEL, PANEL.min(n - panel * PANEL)),
            };
            rows.iter().filter(|&&row| !dot_is_exact(row, least)).count()
        };
        (0..n.div_ceil(PANEL)).map(slow).sum()
    }

    /// Packs `rows` rows of x from `first` on, `stride` from one k to the next.
    pub(crate) fn pack_x(&self, first: usize, rows: usize, stride: usize, pairs: bool, out: &mut [u32]) {
        let operand = Packing { tf32: self.shape.tf32, pad: bf16::ZERO, pairs, stride };
        if rows < stride {
            out.fill(0);
        }
        pack_rows(self.cpu, self.x, first, rows, operand, out);
    }

    fn bias_of(&self, panel: usize) -> Option<[f32; PANEL]> {
        let bias = self.bias?;
        let mut wide = [0f32; PANEL];
        let columns = PANEL.min(self.shape.n - panel * PANEL);
        f32_row(self.cpu, &bias[panel * PANEL..][..columns], Tf32::Disabled, &mut wide);
        Some(wide)
    }

    /// Packs blocks of x and groups of w, and takes their tiles. Returns how many tiles took the slow path.
    fn packed(
        &self,
        plan: &Tiling,
        (shared, held): (&mut [u32], bool),
        slots: Vec<&mut [u32]>,
        ask: impl Fn(Part) + Sync,
        put: impl Fn(Part, &[f32]) + Sync,
    ) -> usize {
        let Product { cpu, shape: Gemm { m, n, k, tf32, .. }, .. } = *self;
        let height = plan.height;
        // Each with the panel that it holds.
        let mut slots: Vec<_> = slots.into_iter().map(|slot| (slot, None)).collect();
        let all = n.div_ceil(PANEL);
        let (x_area, w_area) = shared.split_at_mut(plan.x_words());
        let ran = Ran::default();
        for first_panel in (0..all).step_by(if plan.panels > 0 { plan.panels } else { all }) {
            let mut panels = all;
            let group = match self.w {
                Weight::Plain(w) if !plan.own => {
                    panels = plan.panels.min(all - first_panel);
                    let rows = (panels * PANEL).min(n - first_panel * PANEL);
                    let words = &mut w_area[..panels * panel_words(k, I::IS_BF16)];
                    let first = first_panel * PANEL;
                    pack_panels(cpu, w, k, first..first + rows, tf32, words);
                    Weight::Packed(Panels::plain(words, [rows, k], I::IS_BF16))
                }
                whole => whole,
            };
            for first_tile in (0..m.div_ceil(height)).step_by(plan.tiles) {
                let tiles = plan.tiles.min(m.div_ceil(height) - first_tile);
                let first_row = |t: usize| (first_tile + t) * height;
                let rows_of = |t: usize| height.min(m - first_row(t));
                let size = plan.tile_words();
                let packed = SharedOut::new(x_area);
                let pack = |t: usize| {
                    let rows = rows_of(t);
                    // SAFETY: each tile is packed once, into its own part, before any is read.
                    let out = unsafe { packed.part(t * size, size) };
                    let stride = if plan.block > 0 { height } else { rows };
                    self.pack_x(first_row(t), rows, stride, plan.x_pairs, out);
                };
                // One panel at a time stays in cache while the rows pass; few panels are cut along the rows so that all
                // threads have work. One tile alone is read once, by runs of panels that memory streams.
                let run = if tiles == 1 { (panels / (8 * cpu.threads())).max(1) } else { 1 };
                let runs = panels.div_ceil(run);
                // So many tasks that the one which ends last is a small part of all, where there are several threads.
                let enough = if cpu.threads() > 1 { 64 * cpu.threads() } else { 1 };
                let cuts = if tiles == 1 { 1 } else { enough.div_ceil(runs).clamp(1, tiles.div_ceil(4)) };
                let per_task = tiles.div_ceil(cuts);
                let cuts = tiles.div_ceil(per_task);
                let packs = if held { 0 } else { tiles };
                if plan.block > 0 {
                    let tasks = panels * tiles.div_ceil(plan.block);
                    cpu.each_after(slots.iter_mut().collect(), [packs, tasks], pack, |(slot, _), task| {
                        // All panels pass over a block, which stays in L2.
                        let (panel, from) = (task % panels, task / panels * plan.block);
                        let some = from..tiles.min(from + plan.block);
                        // SAFETY: all tiles are packed, and nobody writes them until the last task has ended.
                        let left = unsafe { packed.read(from * size, some.len() * size) };
                        let unpacked = if plan.unpack { panel_words(k, plan.w_pairs) } else { 0 };
                        let (slot, scratch) = slot.split_at_mut(unpacked);
                        let Weight::Packed(group) = group else { unreachable!("panels of blocks are packed for all") };
                        let mut operand = group.panel(panel, if plan.unpack { slot } else { &mut [] });
                        operand.unpack(cpu);
                        let right = operand.right;
                        let (left, scratch) = (as_floats(left), as_floats_mut(scratch));
                        let block =
                            Block { left, stride: size, tiles: some.len(), right, bounds: self.bounds, scratch };
                        let sums = fma_block(cpu, block);
                        for (t, sums) in some.zip(sums.chunks_exact(height * PANEL)) {
                            let part = Part { first: first_row(t), rows: rows_of(t), panel: first_panel + panel };
                            put(part, &sums[..part.rows * PANEL]);
                        }
                    });
                    continue;
                }
                cpu.each_after(slots.iter_mut().collect(), [packs, runs * cuts], pack, |(slot, held), task| {
                    let (first, cut) = (task / cuts * run, task % cuts);
                    let mut sums = [0f32; MAX_ROWS * PANEL];
                    let mut tally = Tally::default();
                    for panel in first..(first + run).min(panels) {
                        let number = first_panel + panel;
                        let mut operand = match group {
                            Weight::Packed(group) => {
                                let slot: &mut [u32] = if plan.unpack { slot } else { &mut [] };
                                let mut operand = group.panel(panel, slot);
                                operand.prepare(cpu, *held == Some(panel));
                                operand
                            }
                            Weight::Plain(w) => {
                                if held.replace(panel) != Some(panel) {
                                    let first = panel * PANEL;
                                    w.pack(cpu, k, first..n.min(first + PANEL), tf32, slot);
                                }
                                Panels::one(slot, k, I::IS_BF16).panel(0, &mut [])
                            }
                        };
                        for t in cut * per_task..((cut + 1) * per_task).min(tiles) {
                            let rows = rows_of(t);
                            let part = Part { first: first_row(t), rows, panel: number };
                            ask(part);
                            // SAFETY: all tiles are packed, and nobody writes them until the last task has ended.
                            let tile = unsafe { packed.read(t * size, size) };
                            let out = &mut sums[..rows * PANEL];
                            self.tile(tile, plan.x_pairs, &mut operand, number, first_row(t), rows, &mut tally, out);
                            put(part, out);
                        }
                        if plan.unpack && !operand.has_slot() {
                            *held = Some(panel);
                        }
                    }
                    ran.add(tally);
                });
            }
        }
        ran.record(cpu)
    }

    /// The sums of one packed tile of x, `rows` rows from `first`, and panel `number`. The panel stays where it is: what
    /// was written just before would have to leave the store buffer, behind the lines of y, before it can be read.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn tile(
        &self,
        tile: &[u32],
        pairs: bool,
        panel: &mut Panel,
        number: usize,
        first: usize,
        rows: usize,
        tally: &mut Tally,
        out: &mut [f32],
    ) {
        let cpu = self.cpu;
        let (tile, end) = tile.split_at(tile.len() - LINE);
        let (right, order) = (panel.right, Order::Tree(self.bounds));
        let dot = pairs && dot_is_exact(f32::from_bits(end[0]), panel.least);
        let reads = match right {
            Right::Dictionary(_) => cpu.isa().lanes() == 8,
            Right::Quantized(_) => false,
            _ => true,
        };
        if !pairs && reads {
            let left = Left { data: as_floats(tile), row_stride: 1, step: rows };
            fma_tile(cpu, Tile { left, right, order, rows, columns: PANEL, out, out_stride: PANEL });
        } else if dot {
            tally.fast += 1;
            let left = Left { data: tile, row_stride: 1, step: rows };
            let tile = Tile { left, right, order, rows, columns: PANEL, out, out_stride: PANEL };
            if rows == TILE_ROWS && !panel.slot.is_empty() {
                dot_unpacking(cpu, tile, panel.slot);
                panel.unpacked();
            } else {
                dot_tile(cpu, tile);
            }
        } else {
            // Instruction sets that no weight is coded for widen coded panels as they go; without dot products all do it with
            // integers.
            tally.slow += usize::from(pairs);
            self.slow_tile(right, number, first, out);
        }
    }

    /// [`Product::tile`] without `VDPBF16PS`. It stands apart for its room on the stack, which every tile would touch.
    #[inline(never)]
    fn slow_tile(&self, right: Right, panel: usize, first: usize, out: &mut [f32]) {
        let mut piece = [0u32; SLOW_STEPS * TILE_ROWS];
        for (part, out) in out.chunks_mut(TILE_ROWS * PANEL).enumerate() {
            let rows = out.len() / PANEL;
            self.pieces(rows, first + part * TILE_ROWS, panel, Some(right), SLOW_STEPS, &mut piece, out);
        }
    }

    /// Tiles whose operands are packed piece by piece, by every worker for itself.
    fn streamed(&self, plan: &Tiling, slots: Vec<&mut [u32]>, put: impl Fn(Part, &[f32]) + Sync) -> usize {
        let Product { cpu, shape: Gemm { m, n, .. }, .. } = *self;
        let panels = n.div_ceil(PANEL);
        cpu.each_in(slots, panels * m.div_ceil(plan.height), |slot, task| {
            let (panel, first) = (task % panels, task / panels * plan.height);
            let rows = plan.height.min(m - first);
            let right = match self.w {
                Weight::Packed(group) => Some(group.panel(panel, &mut []).right),
                Weight::Plain(_) => None,
            };
            let mut sums = [0f32; TILE_ROWS * PANEL];
            let sums = &mut sums[..rows * PANEL];
            self.pieces(rows, first, panel, right, plan.steps, slot, sums);
            put(Part { first, rows, panel }, sums);
        });
        cpu.ledger().ran(cpu.isa().without_dot().name());
        0
    }

    /// The sums of at most 12 rows from `first` and one panel, `steps` of k at a time: x, and w where `right` does not
    /// hold it packed, are packed into `piece`.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn pieces(
        &self,
        rows: usize,
        first: usize,
        panel: usize,
        right: Option<Right<'_>>,
        steps: usize,
        piece: &mut [u32],
        out: &mut [f32],
    ) {
        let Product { cpu, shape: Gemm { n, tf32, .. }, bounds, .. } = *self;
        let (left, wide) = as_floats_mut(piece).split_at_mut(steps * rows);
        let mut room;
        let (steps, decoded): (usize, &mut [f32]) = match right {
            Some(Right::Dictionary(_) | Right::Quantized(_)) => {
                room = [0f32; SLOW_STEPS * PANEL];
                (steps.min(SLOW_STEPS), &mut room)
            }
            _ => (steps, &mut []),
        };
        // Finished subtrees: a binary counter, one place per level of the tree.
        let mut stack = [[0f32; TILE_ROWS * PANEL]; 3];
        let segments = bounds.len() - 1;
        for i in 0..segments {
            out.fill(0.0);
            for from in (bounds[i]..bounds[i + 1]).step_by(steps) {
                let len = steps.min(bounds[i + 1] - from);
                f32_of_rows(cpu, rows, len, |r| &self.x.row(first + r)[from..], tf32, left, rows);
                if len % 2 == 1 {
                    // Beside the -0 that ends a row of pairs.
                    left[len * rows..][..rows].fill(0.0);
                }
                let right = match (right, self.w) {
                    (Some(Right::Vnni(words, _)), _) => Right::Vnni(&words[from / 2 * PANEL..], PANEL),
                    (Some(Right::Dictionary(coded)), _) => {
                        coded.widen(from, len, decoded);
                        Right::F32(decoded, PANEL)
                    }
                    (Some(Right::Quantized(panel)), _) => {
                        panel.widen(cpu, from, len, decoded);
                        Right::F32(decoded, PANEL)
                    }
                    (Some(Right::F32(floats, _)), _) => Right::F32(&floats[from * PANEL..], PANEL),
                    (None, Weight::Plain(w)) => {
                        let columns = PANEL.min(n - panel * PANEL);
                        w.widen(cpu, [from, len], [panel * PANEL, columns], tf32, wide);
                        Right::F32(wide, PANEL)
                    }
                    _ => unreachable!("a packed weight has panels of pairs or f32"),
                };
                let left = Left { data: &*left, row_stride: 1, step: rows };
                let order = Order::Chain(len);
                fma_tile(cpu, Tile { left, right, order, rows, columns: PANEL, out, out_stride: PANEL });
            }
            let mut level = 0;
            while i >> level & 1 == 1 {
                out.iter_mut().zip(&stack[level]).for_each(|(sum, earlier)| *sum += *earlier);
                level += 1;
            }
            if i + 1 < segments {
                stack[level][..out.len()].copy_from_slice(out);
            }
        }
    }
}

/// How many tiles of one task took which path. Tasks count for themselves: a locked instruction in every tile would wait
/// for the stores of the tile before.
#[derive(Clone, Copy, Default)]
pub(crate) struct Tally {
    pub fast: usize,
    pub slow: usize,
}

/// The tallies of all tasks.
#[derive(Default)]
pub(crate) struct Ran {
    fast: AtomicUsize,
    slow: AtomicUsize,
}

impl Ran {
    pub fn add(&self, tally: Tally) {
        self.fast.fetch_add(tally.fast, Ordering::Relaxed);
        self.slow.fetch_add(tally.slow, Ordering::Relaxed);
    }

    /// Records the kernels; returns how many tiles took the slow path.
    pub fn record(self, cpu: &Cpu) -> usize {
        let (fast, slow) = (self.fast.into_inner(), self.slow.into_inner());
        if fast > 0 {
            cpu.ledger().ran(cpu.isa().name());
        }
        if slow > 0 || fast == 0 {
            cpu.ledger().ran(cpu.isa().without_dot().name());
        }
        slow
    }
}

/// Steps of k at a time where a tile leaves `VDPBF16PS`.
const SLOW_STEPS: usize = 128;

/// `+ bias` and the last rounding of the rows of a tile, `stride` apart from `at` in y.
///
/// # Safety
/// No other thread touches these places of y.
pub(super) unsafe fn finish<O: Element>(
    cpu: &Cpu,
    sums: &[f32],
    bias: Option<&[f32; PANEL]>,
    y: &SharedOut<O>,
    at: usize,
    stride: usize,
    columns: usize,
) {
    cpu.dispatch(Finish { sums, bias, y, at, stride, columns });
}

struct Finish<'a, O> {
    sums: &'a [f32],
    bias: Option<&'a [f32; PANEL]>,
    y: &'a SharedOut<'a, O>,
    at: usize,
    stride: usize,
    columns: usize,
}

impl<O: Element> Kernel for Finish<'_, O> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (r, sums) in self.sums.chunks_exact(PANEL).enumerate() {
            // SAFETY: `finish`'s caller has these places to itself.
            let row = unsafe { self.y.part(self.at + r * self.stride, self.columns) };
            for column in (0..row.len()).step_by(S::LANES) {
                let mut sum = load_at(s, sums, column, 0.0);
                if let Some(bias) = self.bias {
                    sum = s.add(sum, load_at(s, bias, column, 0.0));
                }
                narrow_at(s, sum, row, column);
            }
        }
    }
}
