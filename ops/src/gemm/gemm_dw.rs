//! The gradient of the weight of a matrix product: `x[T,K], dy[T,N], mask[T]?, carry[N,K]? (f32) -> dw[N,K]` (f32).
//!
//! Formula: `dw[n][k] += dy[t][n] * x[t][k]` over the rows that are tokens.
//! Order: a chain of fma for each element, tokens ascending, from carry or +0.
//! Rounding: every fma once to f32; a NaN becomes the canonical one.
//!
//! Some tokens at a time are laid out: x in panels of 32 columns, which all workers read, dy in tiles, by each worker for
//! itself. Between blocks of tokens a chain waits in dw, where nothing of it is lost. Where `VDPBF16PS` pays, both are pairs of
//! tokens, of which each is two steps of a chain, unless the operands of the call or what it goes on from are so small that
//! the instruction could flush something.

use super::device;
use super::gemm::finish;
use crate::backend::device::{Arguments, Buffer, Device, Unit};
use crate::call::Entry;
use crate::element::{Stored, typed};
use crate::gemm::tile::{
    Chains, Left, Order, Right, TILE_ROWS, Tile, block_rows, dot_is_exact, dot_tile, fma_chains, fma_tile,
};
use crate::pack::matrix::least_of_rows;
use crate::pack::{
    LOOKED_THROUGH, PANEL, as_floats, as_floats_mut, bf16_slice, f32_tiles, least_of_parts, vnni_of_columns,
};
use crate::parallel::SharedOut;
use crate::simd::{Kernel, Simd, load_at};
use crate::tensor::Rows;
use crate::token::chains::{carried, mask_of};
use crate::token::device::with_mask;
use crate::workspace::memory::LINE;
use crate::workspace::{Need, Plan, choose};
use crate::{Cpu, Element, Error, TensorRef, Tf32, check_len};
use half::bf16;
use samebits_schema::Call;
use std::iter::successors;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

const NAME: &str = "gemm_dw";
/// Tokens of a block, at most: what is read and written of dw for them is then a small part of what is computed.
const TOKENS: usize = 1024;
/// Tiles of dy that pass over a panel, at most.
const TILES: usize = 8;
/// From here on every f32 is a multiple of 2^-126.
pub(super) const WHOLE: f32 = 1.0 / (1u128 << 103) as f32;

/// Dimensions of `x[T,K], dy[T,N] -> dw[N,K]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemmDw {
    /// Rows of x and dy, T.
    pub tokens: usize,
    /// Columns of dy.
    pub n: usize,
    /// Columns of x.
    pub k: usize,
    /// How f32 operands are read.
    pub tf32: Tf32,
}

impl GemmDw {
    /// TF32 off.
    pub fn new(tokens: usize, n: usize, k: usize) -> GemmDw {
        GemmDw { tokens, n, k, tf32: Tf32::Disabled }
    }

    /// The dimensions of a call.
    fn of(call: &Call) -> GemmDw {
        let [tokens, n, k] = ["T", "N", "K"].map(|axis| call.dim(axis));
        GemmDw { tokens, n, k, tf32: if call.tf32() { Tf32::Enabled } else { Tf32::Disabled } }
    }
}

/// Adds the products of the rows of `dy[T,N]` and `x[T,K]` to `dw[N,K]`, which goes on from what it holds; rows where
/// `mask[T]` is 0 are padding. It is the gradient of w from that of [`gemm`](crate::gemm())'s y.
///
/// # Errors
/// [`Error::Length`] when a slice does not match; [`Error::Budget`] below the smallest plan (2 KiB).
///
/// ```
/// use samebits_ops::{Cpu, GemmDw, gemm_dw};
///
/// // Three tokens, of which the second is padding.
/// let (x, dy) = ([1f32, 2.0, f32::NAN, f32::NAN, 3.0, 4.0], [10f32, f32::NAN, 1.0]);
/// let mut dw = [0.5f32, 0.0];
/// gemm_dw(&Cpu::best(), &GemmDw::new(3, 1, 2), Some(&[1, 0, 1]), &x, &dy, &mut dw)?;
/// assert_eq!(dw, [13.5, 24.0]);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn gemm_dw<I: Element>(
    cpu: &Cpu,
    shape: &GemmDw,
    mask: Option<&[i32]>,
    x: &[I],
    dy: &[I],
    dw: &mut [f32],
) -> Result<(), Error> {
    let GemmDw { tokens, n, k, .. } = *shape;
    check_len(NAME, "x", "[T,K]", x.len(), &[tokens, k])?;
    check_len(NAME, "dy", "[T,N]", dy.len(), &[tokens, n])?;
    mask.map_or(Ok(()), |mask| check_len(NAME, "mask", "[T]", mask.len(), &[tokens]))?;
    check_len(NAME, "dw", "[N,K]", dw.len(), &[n, k])?;
    run(cpu, shape, mask, [TensorRef::of(x, &[tokens, k]), TensorRef::of(dy, &[tokens, n])], dw, |_| false)
}

/// Rows of x and dy of any layout. `begin` puts into dw what it goes on from, once nothing is refused any more, or says that
/// it is +0.
fn run(
    cpu: &Cpu,
    shape: &GemmDw,
    mask: Option<&[i32]>,
    [x, dy]: [TensorRef; 2],
    dw: &mut [f32],
    begin: impl FnOnce(&mut [f32]) -> bool,
) -> Result<(), Error> {
    let counted = mask.map(|mask| (0..mask.len()).filter(|&t| mask[t] != 0).collect::<Vec<_>>());
    let tokens = counted.as_ref().map_or(shape.tokens, Vec::len);
    if dw.is_empty() || tokens == 0 {
        if begin(dw) {
            dw.fill(0.0);
        }
        return Ok(());
    }
    let (plan, mut workspace) = choose(cpu, NAME, successors(Some(Cut::preferred(cpu, shape, tokens)), Cut::smaller))?;
    let begins = begin(dw);
    let (shared, slots) = workspace.split();
    typed!(x.dtype() => I, {
        let counted = counted.as_deref();
        let (x, dy) = (x.rows::<I>(), dy.rows::<I>());
        let row = |number: usize| counted.map_or(number, |counted| counted[number]);
        let pairs = in_pairs(cpu, [x, dy], tokens, row) && (begins || goes_on_exactly(cpu, dw));
        let (plan, dy) = (if pairs { plan.in_pairs(tokens) } else { plan }, Factors::Rows(dy));
        let sums = Sums { cpu, shape: *shape, plan, tokens, counted, x, dy, begins };
        sums.run(shared, false, slots, dw);
    });
    Ok(())
}

/// Whether pairs of tokens pay and are exact, as far as the operands know.
fn in_pairs<I: Element>(cpu: &Cpu, operands: [Rows<I>; 2], tokens: usize, row: impl Fn(usize) -> usize + Sync) -> bool {
    if !(I::IS_BF16 && cpu.isa().dots_pay()) {
        return false;
    }
    let [x, dy] = operands.map(|rows| {
        let some = LOOKED_THROUGH.div_ceil(rows.row(row(0)).len().max(1));
        least_of_parts(cpu, tokens.div_ceil(some), |i| {
            let of = |number: usize| least_of_rows(cpu, rows, row(number), 1);
            (i * some..tokens.min((i + 1) * some)).map(of).fold(f32::INFINITY, f32::min)
        })
    });
    dot_is_exact(x, dy)
}

/// Whether every sum that is gone on from is a multiple of 2^-126, as those of [`dot_is_exact`] operands are: none that is
/// nonzero is below [`WHOLE`].
pub(crate) fn goes_on_exactly(cpu: &Cpu, dw: &mut [f32]) -> bool {
    let small = AtomicBool::new(false);
    cpu.chunks(dw, LOOKED_THROUGH, |_, dw| {
        let any = dw.iter().fold(false, |any, sum| any | (sum.abs() < WHOLE) & (*sum != 0.0));
        small.fetch_or(any, Ordering::Relaxed);
    });
    !small.into_inner()
}

/// gemm_dw, by name.
pub(crate) const OP: Entry = Entry {
    name: NAME,
    cpu: |cpu, args| {
        let (mask, carry) = (mask_of(args)?, args.optional("carry"));
        let operands = ["x", "dy"].map(|name| args.input(name));
        for (tensor, name) in operands.iter().zip(["x", "dy"]).chain(carry.iter().map(|carry| (carry, "carry"))) {
            tensor.on_host(NAME, name)?;
        }
        let dw = args.output("dw").host::<f32>(NAME, "dw")?;
        run(cpu, &GemmDw::of(args.call), mask, operands, dw, |dw| {
            if carry.is_some() {
                carried(cpu, carry, dw);
            }
            carry.is_none()
        })
    },
    device: Some(|on, args| {
        let (x, dy, dw) = (args.input("x"), args.input("dy"), args.output("dw"));
        let carry = args.optional("carry").map(|carry| carry.device(NAME, "carry")).transpose()?;
        with_mask(on, args, |mask| {
            typed!(x.dtype() => I, {
                let (x, dy) = (x.device::<I>(NAME, "x")?, dy.device::<I>(NAME, "dy")?);
                on_device(on, &GemmDw::of(args.call), mask, x, dy, carry, dw.device(NAME, "dw")?)
            })
        })
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// Its kernels.
const UNIT: Unit = Unit {
    has_product: true,
    has_out: false,
    ..Unit::of(NAME, include_str!("gemm_dw.cu"), &["gemm_dw_tile128", "gemm_dw_tile64"])
};

/// [`gemm_dw`] on a device, from `carry[N,K]` or +0.
///
/// # Errors
/// [`Error::Length`] when a buffer does not match; errors of the device.
pub fn on_device<I: Stored>(
    on: &Device,
    shape: &GemmDw,
    mask: Option<&Buffer<i32>>,
    x: &Buffer<I>,
    dy: &Buffer<I>,
    carry: Option<&Buffer<f32>>,
    dw: &mut Buffer<f32>,
) -> Result<(), Error> {
    let GemmDw { tokens, n, k, .. } = *shape;
    check_len(NAME, "x", "[T,K]", x.len(), &[tokens, k])?;
    check_len(NAME, "dy", "[T,N]", dy.len(), &[tokens, n])?;
    mask.map_or(Ok(()), |mask| check_len(NAME, "mask", "[T]", mask.len(), &[tokens]))?;
    carry.map_or(Ok(()), |carry| check_len(NAME, "carry", "[N,K]", carry.len(), &[n, k]))?;
    check_len(NAME, "dw", "[N,K]", dw.len(), &[n, k])?;
    if dw.is_empty() {
        return Ok(());
    }
    let arguments = Arguments::new().buffer(x).buffer(dy);
    let arguments = match mask {
        Some(mask) => arguments.buffer(mask).int(1),
        None => arguments.null().int(0),
    };
    let arguments = match carry {
        Some(carry) => arguments.buffer(carry).int(1),
        None => arguments.null().int(0),
    };
    // SAFETY: lengths were checked, and these are the kernels' arguments.
    unsafe { launch::<I>(on, shape, arguments.buffer(dw)) }
}

/// Starts the kernels with x, dy, mask, carry and dw, of which the last two may be one; dw has elements.
///
/// # Safety
/// The operands are as long as the shape says.
pub(crate) unsafe fn launch<I: Stored>(on: &Device, shape: &GemmDw, operands: Arguments) -> Result<(), Error> {
    let GemmDw { tokens, n, k, tf32 } = *shape;
    let arguments = operands.long(tokens).long(n).long(k);
    // SAFETY: the caller's promise.
    unsafe { device::launch_squares(on, device::build::<I, f32>(NAME, tf32), UNIT.kernels, [n, k], &arguments) }
}

/// How much is laid out at a time.
#[derive(Clone, Copy)]
pub(crate) struct Cut {
    /// Tokens of a block.
    tokens: usize,
    /// Panels of x.
    panels: usize,
    /// Tiles of dy of each worker, and rows of a tile.
    tiles: usize,
    pub height: usize,
    pub workers: usize,
    /// Whether panels and tiles are pairs of tokens.
    pairs: bool,
}

impl Cut {
    pub fn preferred(cpu: &Cpu, shape: &GemmDw, tokens: usize) -> Cut {
        let height = shape.n.min(TILE_ROWS);
        let (tokens, tiles) = (tokens.min(TOKENS), shape.n.div_ceil(height).min(TILES));
        Cut { tokens, panels: shape.k.div_ceil(PANEL), tiles, height, workers: cpu.threads(), pairs: false }
    }

    /// Fewer tiles, panels, tokens, workers, then fewer rows.
    pub fn smaller(&self) -> Option<Cut> {
        let plan = *self;
        Some(match plan {
            Cut { panels: 65.., .. } => Cut { panels: plan.panels.div_ceil(2), ..plan },
            Cut { tiles: 2.., .. } => Cut { tiles: plan.tiles / 2, ..plan },
            Cut { panels: 2.., .. } => Cut { panels: plan.panels.div_ceil(2), ..plan },
            Cut { tokens: 17.., .. } => Cut { tokens: plan.tokens.div_ceil(32) * 16, ..plan },
            Cut { workers: 2.., .. } => Cut { workers: plan.workers / 2, ..plan },
            Cut { height: 2.., .. } => Cut { height: plan.height / 2, ..plan },
            _ => return None,
        })
    }

    /// The same room, with pairs of tokens in it: twice as many.
    pub fn in_pairs(&self, tokens: usize) -> Cut {
        Cut { tokens: tokens.min(2 * self.tokens), pairs: true, ..*self }
    }

    /// Whether the panels of so many columns of all tokens stay where they were laid out.
    pub fn holds(&self, tokens: usize, k: usize) -> bool {
        tokens <= self.tokens && k.div_ceil(PANEL) <= self.panels
    }

    /// Words of a panel of x.
    fn panel(&self) -> usize {
        PANEL * self.steps()
    }

    /// Words of a tile of dy, and room for a vector behind them.
    fn tile(&self) -> usize {
        (self.height * self.steps()).next_multiple_of(LINE) + LINE
    }

    /// Tokens, or pairs of them.
    fn steps(&self) -> usize {
        if self.pairs { self.tokens.div_ceil(2) } else { self.tokens }
    }
}

impl Plan for Cut {
    fn need(&self) -> Need {
        let (shared, slot) = (self.panels.saturating_mul(self.panel()), self.tiles * self.tile());
        Need { shared, slot, workers: self.workers, pairs: 0 }
    }

    fn tiles(&self) -> [(&'static str, usize); 3] {
        [("tokens", self.tokens), ("rows", self.tiles * self.height), ("panels", self.panels)]
    }
}

/// The sums of a call, ready to run.
pub(crate) struct Sums<'a, I> {
    pub cpu: &'a Cpu,
    pub shape: GemmDw,
    pub plan: Cut,
    /// How many tokens there are, and which rows they are where some are padding.
    pub tokens: usize,
    pub counted: Option<&'a [usize]>,
    pub x: Rows<'a, I>,
    pub dy: Factors<'a, I>,
    /// Whether the sums begin with +0, and not with what dw holds.
    pub begins: bool,
}

/// The factors of the rows of dw.
pub(crate) enum Factors<'a, I> {
    /// A row of them for each token.
    Rows(Rows<'a, I>),
    /// Tiles of the plan's height, `stride` apart, of all tokens, laid out as the plan says.
    Tiles(&'a [u32], usize),
}

impl<I: Element> Sums<'_, I> {
    /// Adds all tokens to dw. `held`: an earlier run has left the panels of the same x in `shared`, where the plan
    /// [holds](Cut::holds) them.
    pub fn run(&self, shared: &mut [u32], held: bool, mut slots: Vec<&mut [u32]>, dw: &mut [f32]) {
        let Sums { cpu, shape: GemmDw { k, .. }, plan, tokens, begins, .. } = *self;
        assert!(!held || plan.holds(tokens, k), "panels that stay");
        let dw = SharedOut::new(dw);
        for from in (0..tokens).step_by(plan.tokens) {
            let block = from..tokens.min(from + plan.tokens);
            let (steps, begins) = (block.len(), begins && from == 0);
            for first in (0..k.div_ceil(PANEL)).step_by(plan.panels) {
                let panels = plan.panels.min(k.div_ceil(PANEL) - first);
                let columns = |panel: usize| (first + panel) * PANEL..k.min((first + panel + 1) * PANEL);
                let packed = SharedOut::new(shared);
                // Four panels at a time share the lines and pages of the rows that they are pieces of.
                let pack = |four: usize| {
                    let these = 4 * four..panels.min(4 * four + 4);
                    let outputs = columns(these.start).start..columns(these.end - 1).end;
                    // SAFETY: these panels are laid out once, before any is read.
                    let out = unsafe { packed.part(these.start * plan.panel(), these.len() * plan.panel()) };
                    let row = |step: usize| &self.x.row(self.row(block.start + step))[outputs.clone()];
                    // Beside the +0 that ends an odd number of dy stands a -0: their product changes no sum.
                    self.lay_out(steps, row, bf16::NEG_ZERO, PANEL, out, plan.panel());
                };
                let tasks = Tasks::new(self, panels);
                let sum = |slot: &mut &mut [u32], task: usize| {
                    let (rows, panels) = tasks.of(self, task);
                    let tiles = self.tiles(block.clone(), rows.clone(), slot);
                    let read = |panel: usize| {
                        let words = if plan.pairs { steps.div_ceil(2) } else { steps } * PANEL;
                        // SAFETY: all panels are laid out, and nobody writes them until the last task has ended.
                        unsafe { packed.read(panel * plan.panel(), words) }
                    };
                    for panel in panels {
                        self.panel((steps, begins), rows.clone(), columns(panel), tiles, read(panel), &dw);
                    }
                };
                let counts = [if held { 0 } else { panels.div_ceil(4) }, tasks.count()];
                cpu.each_after(slots.iter_mut().collect(), counts, pack, |slot, task| sum(slot, task));
            }
        }
        let isa = cpu.isa();
        cpu.ledger().ran(if plan.pairs { isa } else { isa.without_dot() }.name());
    }

    /// Lays out rows of `steps` tokens in panels or tiles, `size` words from one to the next.
    fn lay_out<'a>(
        &self,
        steps: usize,
        row: impl Fn(usize) -> &'a [I],
        pad: bf16,
        width: usize,
        out: &mut [u32],
        size: usize,
    ) {
        if self.plan.pairs {
            let row = |step: usize| bf16_slice(row(step)).expect("bf16");
            return vnni_of_columns(self.cpu, steps, row, pad, width, out, size);
        }
        f32_tiles(self.cpu, steps, row, self.shape.tf32, width, as_floats_mut(out), size);
    }

    /// The row of token number `number`.
    fn row(&self, number: usize) -> usize {
        self.counted.map_or(number, |counted| counted[number])
    }

    /// The tiles of some rows of dw, of the tokens of a block, and from one to the next.
    fn tiles<'t>(&'t self, block: Range<usize>, rows: Range<usize>, slot: &'t mut [u32]) -> (&'t [u32], usize) {
        let (height, size) = (self.plan.height, self.plan.tile());
        match self.dy {
            Factors::Rows(dy) => {
                let row = |step: usize| &dy.row(self.row(block.start + step))[rows.clone()];
                self.lay_out(block.len(), row, bf16::ZERO, height, slot, size);
                (slot, size)
            }
            Factors::Tiles(all, stride) => {
                let steps = if self.plan.pairs { block.start / 2 } else { block.start };
                (&all[rows.start / height * stride + steps * height..], stride)
            }
        }
    }

    /// Adds the products of `steps` tokens to some columns of some rows of dw, which may begin with +0.
    fn panel(
        &self,
        (steps, begins): (usize, bool),
        rows: Range<usize>,
        columns: Range<usize>,
        (tiles, stride): (&[u32], usize),
        panel: &[u32],
        dw: &SharedOut<f32>,
    ) {
        let Sums { cpu, shape: GemmDw { k, .. }, plan: Cut { height, pairs, .. }, .. } = *self;
        let place = |row: usize| row * k + columns.start;
        // Many rows of whole vectors are summed by multiply-adds where they stand.
        let isa = cpu.isa();
        let whole = match !pairs && isa.lanes() == 16 && block_rows(isa) == Some(height) && columns.len() == PANEL {
            true => rows.len() / height,
            false => 0,
        };
        if whole > 0 {
            let out = (dw.rows(place(rows.start), [whole * height, PANEL], k), k);
            let (left, right) = (as_floats(tiles), as_floats(panel));
            let chains = Chains { left, stride, tiles: whole, right, steps, begins, out };
            // SAFETY: tasks differ in rows or in panels, so their places in dw are disjoint, and all are in it.
            unsafe { fma_chains(cpu, chains) };
        }
        let mut sums = [0f32; TILE_ROWS * PANEL];
        let ask = |first: usize| {
            // Both lines of each row arrive while the tile before is summed.
            let count = height.min(rows.end.saturating_sub(first));
            dw.prefetch_rows(place(first), count, k);
            dw.prefetch_rows(place(first) + LINE, count, k);
        };
        let rest = rows.start + whole * height;
        ask(rest);
        for (tile, first) in tiles.chunks(stride).skip(whole).zip((rest..rows.end).step_by(height)) {
            let count = height.min(rows.end - first);
            ask(first + height);
            let sums = &mut sums[..count * PANEL];
            match begins {
                true => sums.fill(0.0),
                false => {
                    cpu.dispatch(Begin { sums: &mut *sums, dw, at: place(first), stride: k, columns: columns.len() })
                }
            }
            let order = Order::Chain(steps);
            if pairs {
                let left = Left { data: &tile[..height * steps.div_ceil(2)], row_stride: 1, step: height };
                let right = Right::Vnni(panel, PANEL);
                dot_tile(cpu, Tile { left, right, order, rows: count, columns: PANEL, out: sums, out_stride: PANEL });
            } else {
                let left = Left { data: &as_floats(tile)[..height * steps], row_stride: 1, step: height };
                let right = Right::F32(as_floats(panel), PANEL);
                fma_tile(cpu, Tile { left, right, order, rows: count, columns: PANEL, out: sums, out_stride: PANEL });
            }
            // SAFETY: tasks differ in rows or in panels, so their places in dw are disjoint.
            unsafe { finish(cpu, sums, None, dw, place(first), k, columns.len()) };
        }
    }
}

/// How a block of tokens is dealt to workers: some tiles of dy and some panels of x to a task.
struct Tasks {
    panels: usize,
    /// How many tasks the tiles of dy are, and those of the panels.
    groups: usize,
    runs: usize,
}

impl Tasks {
    fn new<I>(sums: &Sums<I>, panels: usize) -> Tasks {
        let groups = sums.shape.n.div_ceil(sums.plan.tiles * sums.plan.height);
        // So many that the one which ends last is a small part of all, where there are several threads; each lays its tiles
        // out once more.
        let enough = if sums.cpu.threads() > 1 { 12 * sums.cpu.threads() } else { 1 };
        Tasks { panels, groups, runs: enough.div_ceil(groups).min(panels) }
    }

    fn count(&self) -> usize {
        self.groups * self.runs
    }

    /// Rows of dw and panels of a task.
    fn of<I>(&self, sums: &Sums<I>, task: usize) -> (Range<usize>, Range<usize>) {
        let (group, run) = (task / self.runs, task % self.runs);
        let rows = sums.plan.tiles * sums.plan.height;
        let panels = |run: usize| run * self.panels / self.runs;
        (group * rows..sums.shape.n.min((group + 1) * rows), panels(run)..panels(run + 1))
    }
}

/// Reads the rows of a tile, `stride` apart from `at` in dw.
struct Begin<'a, 'o> {
    sums: &'a mut [f32],
    dw: &'a SharedOut<'o, f32>,
    at: usize,
    stride: usize,
    columns: usize,
}

impl Kernel for Begin<'_, '_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (r, sums) in self.sums.chunks_exact_mut(PANEL).enumerate() {
            // SAFETY: the task that reads these places is the one that writes them.
            let row = unsafe { self.dw.read(self.at + r * self.stride, self.columns) };
            for column in (0..row.len()).step_by(S::LANES) {
                let sum = load_at(s, row, column, 0.0);
                // SAFETY: a row of sums has whole vectors.
                unsafe { s.store(sum, sums[column..][..S::LANES].as_mut_ptr()) };
            }
        }
    }
}
