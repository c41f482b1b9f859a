//! Log-probability of one token per row straight from hidden states: `x[M,K], w[V,K], target[M] -> logprob[M], lse[M]`
//! (f32). The logits are never stored: the workspace does not grow with V.
//!
//! Formula: `logits = x w^T`, `logprob = log_softmax(logits / temperature)[target]`.
//! Order and rounding: those of `gemm` with an f32 output, then those of `logprob`; the bits are those of the two in a row.
//!
//! One pass: a row's reference point n is the largest exponent met so far, and its sums are rescaled by a power of two when
//! it moves. That is exact, except where a weight that was added would be cut under the final n (a range of more than 2^100
//! within the row): the tiles of such rows are summed again with n known, and the rows counted as slow paths. So are rows
//! that are far from zero: their largest logit is found, and they are summed from it.

pub(crate) mod device;

use crate::call::Entry;
use crate::element::typed;
use crate::gemm::gemm::{Product, Ran, SAYS, Tally, prepare};
use crate::gemm::packed::{PackedWeight, Panels, Weight};
use crate::gemm::shape::{Gemm, segment_length};
use crate::gemm::tile::{Block as Tiles, MAX_ROWS, TILE_ROWS, block_words, fma_block};
use crate::logprob::logprob::{FAR, Origin, check_targets, inverse, join};
use crate::math::{LOG2E_HI, LOG2E_LO, NEGLIGIBLE, exp_split, weight};
use crate::pack::matrix::{panel_words, row_words};
use crate::pack::{PANEL, as_floats, as_floats_mut};
use crate::parallel::SharedOut;
use crate::reduce::{LANES, Lanes};
use crate::simd::{Kernel, MAX_LANES, Simd, load_at};
use crate::workspace::memory::LINE;
use crate::workspace::{Need, Plan, choose};
use crate::{Counter, Cpu, Element, Error, TensorRef, check_len, value_error};
use std::iter::successors;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Words of the running sums of a row: its lanes and a line of what follows.
const STATE: usize = LANES + LINE;
/// The largest exponent met so far.
const N: usize = LANES;
/// The least exponent that was added.
const LEAST: usize = LANES + 1;
/// 1 when a logit is NaN or +inf.
const INVALID: usize = LANES + 2;
/// Exponents below this one may change `LEAST`.
const WATCH: usize = LANES + 3;
/// The lane of the target without the target.
const OTHERS: usize = LANES + 4;
/// The largest logit, of a row that is far from zero.
const TOP: usize = LANES + 5;
/// Rows whose sums are in hand at a time, at most.
const BLOCK_ROWS: usize = 512;

/// Dimensions and parameter of `linear_logprob`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinearLogprob {
    /// Rows M.
    pub rows: usize,
    /// Tokens of the vocabulary, V.
    pub vocab: usize,
    /// Columns of x and w, K.
    pub k: usize,
    /// What logits are divided by; positive and finite.
    pub temperature: f64,
}

impl LinearLogprob {
    /// At temperature 1.
    pub fn new(rows: usize, vocab: usize, k: usize) -> LinearLogprob {
        LinearLogprob { rows, vocab, k, temperature: 1.0 }
    }
}

/// `x[M,K], w[V,K], target[M] -> logprob[M], lse[M]`, row-major, natural logarithms. A negative target means none: its
/// `logprob` is 0. The weight is laid out anew in every call: pack it once and call [`linear_logprob_packed`] where it
/// is used again.
///
/// # Errors
/// As [`logprob`](crate::logprob()); [`Error::Budget`] below the smallest plan (about 4 KiB).
///
/// ```
/// use samebits_ops::{Cpu, LinearLogprob, linear_logprob};
///
/// // Both tokens have the logit 2.
/// let (x, w) = ([2f32, 3.0], [1f32, 0.0, 1.0, 0.0]);
/// let (mut logp, mut lse) = ([9f32], [9f32]);
/// linear_logprob(&Cpu::best(), &LinearLogprob::new(1, 2, 2), &x, &w, &[1], &mut logp, &mut lse)?;
/// assert!((logp[0] - 0.5f32.ln()).abs() < 1e-6);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn linear_logprob<I: Element>(
    cpu: &Cpu,
    shape: &LinearLogprob,
    x: &[I],
    w: &[I],
    target: &[i32],
    logprob: &mut [f32],
    lse: &mut [f32],
) -> Result<(), Error> {
    let LinearLogprob { rows, vocab, k, temperature } = *shape;
    check_len("linear_logprob", "x", "[M,K]", x.len(), &[rows, k])?;
    check_len("linear_logprob", "w", "[V,K]", w.len(), &[vocab, k])?;
    let row = Rows { temperature, target, logprob, lse };
    run(cpu, TensorRef::of(x, &[rows, k]), TensorRef::of(w, &[vocab, k]), row)
}

/// [`linear_logprob`] with a weight packed beforehand: the same bits.
///
/// # Errors
/// As [`linear_logprob`]; [`Error::Value`] when the weight is not `[V,K]`.
///
/// ```
/// use samebits_ops::{Cpu, LinearLogprob, PackedWeight, linear_logprob_packed};
///
/// let cpu = Cpu::best();
/// let w = PackedWeight::pack(&cpu, 2, 2, &[1f32, 0.0, 1.0, 0.0])?;
/// let (mut logp, mut lse) = ([9f32], [9f32]);
/// linear_logprob_packed(&cpu, &LinearLogprob::new(1, 2, 2), &[2f32, 3.0], &w, &[1], &mut logp, &mut lse)?;
/// assert!((logp[0] - 0.5f32.ln()).abs() < 1e-6);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn linear_logprob_packed<I: Element>(
    cpu: &Cpu,
    shape: &LinearLogprob,
    x: &[I],
    w: &PackedWeight,
    target: &[i32],
    logprob: &mut [f32],
    lse: &mut [f32],
) -> Result<(), Error> {
    let LinearLogprob { rows, vocab, k, temperature } = *shape;
    check_len("linear_logprob", "x", "[M,K]", x.len(), &[rows, k])?;
    if [w.n(), w.k()] != [vocab, k] {
        let what = format!("w is [{}, {}]; it must be [{vocab}, {k}]", w.n(), w.k());
        return Err(value_error("linear_logprob", what));
    }
    let row = Rows { temperature, target, logprob, lse };
    run(cpu, TensorRef::of(x, &[rows, k]), TensorRef::packed(w), row)
}

/// `x[M,K], w[V,K]` in any layout.
fn run(cpu: &Cpu, x: TensorRef, w: TensorRef, rows: Rows) -> Result<(), Error> {
    let [vocab, k] = *w.shape() else {
        return Err(value_error("linear_logprob", format!("w is {:?}; it must be [V, K]", w.shape())));
    };
    let shape = Gemm::new(x.layout().leading(1).count(), vocab, k);
    x.on_host("linear_logprob", "x")?;
    typed!(x.dtype() => I, {
        let w = Weight::of("linear_logprob", w)?;
        total(&Product { cpu, says: &SAYS, shape, x: x.rows::<I>(), w, bias: None, bounds: &shape.bounds()? }, rows)
    })
}

/// linear_logprob, by name.
pub(crate) const OP: Entry = Entry {
    name: "linear_logprob",
    cpu: |cpu, args| {
        let [logprob, lse] = ["logprob", "lse"].map(|name| args.output(name).host("linear_logprob", name));
        let (temperature, target) = (args.call.float("temperature"), args.integers("target")?);
        let rows = Rows { temperature, target, logprob: logprob?, lse: lse? };
        run(cpu, args.input("x"), args.input("w"), rows)
    },
    device: Some(|on, args| {
        const NAME: &str = "linear_logprob";
        let [rows, vocab, k] = ["M", "V", "K"].map(|axis| args.call.dim(axis));
        let shape = LinearLogprob { rows, vocab, k, temperature: args.call.float("temperature") };
        let ([x, w], target) = (["x", "w"].map(|name| args.input(name)), args.integers("target")?);
        let [logprob, lse] = ["logprob", "lse"].map(|name| args.output(name).device(NAME, name));
        typed!(x.dtype() => I, {
            let (x, w) = (x.device::<I>(NAME, "x")?, w.device::<I>(NAME, "w")?);
            device::linear_logprob(on, &shape, x, w, target, logprob?, lse?)
        })
    }),
    unit: Some(&device::UNIT),
    prepare: Some(prepare),
};

/// How the rows are cut.
#[derive(Clone, Copy)]
struct Blocks {
    k: usize,
    /// Rows of a tile, and tiles whose sums are in hand at a time.
    height: usize,
    tiles: usize,
    /// 0 when whole rows of x are packed; else steps of k packed at a time, again for every tile.
    steps: usize,
    workers: usize,
    x_pairs: bool,
    w_pairs: bool,
    w_packed: bool,
    /// Whether a worker unpacks coded panels.
    unpack: bool,
    /// Whether all tiles in hand pass over a panel together, by [`fma_block`].
    together: bool,
    /// All rows.
    rows: usize,
    /// Words for what all rows come to, where nothing is written before the whole call is known to be allowed; else 0.
    outputs: usize,
}

impl Blocks {
    fn tile_words(&self) -> usize {
        (self.height * row_words(self.k, self.x_pairs)).next_multiple_of(LINE) + LINE
    }

    fn x_words(&self) -> usize {
        if self.steps == 0 { self.tiles * self.tile_words() } else { 0 }
    }

    /// Words in which a worker lays operands out: a panel of w, or pieces.
    fn operand_words(&self) -> usize {
        match (self.steps, self.w_packed) {
            (0, true) if !self.unpack => 0,
            (0, _) => panel_words(self.k, self.w_pairs),
            (steps, packed) => steps * (self.height + if packed { 0 } else { PANEL }),
        }
    }

    fn states(&self) -> usize {
        self.tiles * self.height * STATE
    }

    /// Words in which a worker has the sums of tiles that pass over a panel together.
    fn sums(&self) -> usize {
        if self.together { block_words(self.tiles * self.height) } else { 0 }
    }

    /// Fewer tiles, then pieces of k, then fewer workers, then one row.
    fn smaller(&self) -> Option<Blocks> {
        let plan = *self;
        Some(match plan {
            Blocks { tiles: 2.., .. } => {
                let tiles = plan.tiles.div_ceil(2);
                Blocks { tiles, unpack: plan.unpack && (tiles > 1 || !plan.x_pairs), ..plan }
            }
            Blocks { steps: 0, .. } => {
                let (steps, height) = (plan.k.clamp(16, 1024).next_multiple_of(16), plan.height.min(TILE_ROWS));
                Blocks { steps, height, together: false, ..plan }
            }
            Blocks { steps: 17.., .. } => Blocks { steps: plan.steps.div_ceil(32) * 16, ..plan },
            Blocks { workers: 2.., .. } => Blocks { workers: plan.workers / 2, ..plan },
            Blocks { height: 2.., .. } => Blocks { height: plan.height / 2, ..plan },
            _ => return None,
        })
    }
}

impl Plan for Blocks {
    fn need(&self) -> Need {
        let x = self.x_words();
        let unpacked = if self.unpack { self.operand_words() * self.workers } else { 0 };
        let pairs = if self.x_pairs { x } else { 0 } + unpacked;
        let shared = x + self.tiles * self.height * 8 * FACTS + self.outputs;
        Need { shared, slot: self.states() + self.sums() + self.operand_words(), workers: self.workers, pairs }
    }

    fn tiles(&self) -> [(&'static str, usize); 3] {
        [("rows", (self.tiles * self.height).min(self.rows)), ("steps", self.steps), ("", 0)]
    }
}

/// What a segment of a row comes to: n, the sum of its weights, the same without the target, the least exponent that was
/// added, 1 when a logit is NaN or +inf, and the largest logit of a row that is far from zero.
const FACTS: usize = 6;

/// The sums of a row's segments, with and without the target, under its reference point n.
fn joined(segments: impl Iterator<Item = [f32; FACTS]>, n: f32) -> [f32; 2] {
    let (mut sums, mut rests) = ([0f32; 8], [0f32; 8]);
    for (i, [of_segment, sum, rest, ..]) in segments.enumerate() {
        // Exact: what is left is at least 2^-101. A segment that is far below has no weight at all.
        let shift = of_segment - n;
        if shift >= NEGLIGIBLE {
            (sums[i], rests[i]) = (sum * exp2(shift), rest * exp2(shift));
        }
    }
    [join(sums), join(rests)]
}

/// What belongs to each row beside x.
struct Rows<'a> {
    temperature: f64,
    target: &'a [i32],
    logprob: &'a mut [f32],
    lse: &'a mut [f32],
}

fn total<I: Element>(product: &Product<I>, rows: Rows) -> Result<(), Error> {
    let op = "linear_logprob";
    let Rows { temperature, target, logprob, lse: lse_out } = rows;
    let Product { cpu, shape: Gemm { m, n: vocab, k, .. }, .. } = *product;
    check_len(op, "target", "[M]", target.len(), &[m])?;
    check_len(op, "logprob", "[M]", logprob.len(), &[m])?;
    check_len(op, "lse", "[M]", lse_out.len(), &[m])?;
    let scale = inverse(op, temperature)?;
    check_targets(op, target, vocab)?;
    if m == 0 {
        return Ok(());
    }
    let w_packed = matches!(product.w, Weight::Packed(_));
    if !w_packed {
        let place = "linear_logprob lays its weight out; pack it once and call linear_logprob_packed";
        cpu.ledger().note(Counter::Layouts, 1, place)?;
    }
    let together = product.block_height();
    let height = together.unwrap_or(if m <= MAX_ROWS { m } else { TILE_ROWS });
    // Where multiply-adds are faster, many rows are left to them; rows of f32 take twice the room.
    let x_pairs = product.dots() && together.is_none() && (m <= MAX_ROWS || cpu.isa().dots_pay());
    let tiles = m.min(if x_pairs == product.dots() { BLOCK_ROWS } else { BLOCK_ROWS / 2 }).div_ceil(height);
    let preferred = Blocks {
        k,
        height,
        tiles,
        steps: 0,
        workers: cpu.threads().min(8),
        x_pairs,
        // Beside rows of f32 a weight that is laid out here is so, too.
        w_pairs: I::IS_BF16 && (x_pairs || w_packed || !product.dots()),
        w_packed,
        unpack: product.unpacks(if together.is_some() { usize::MAX } else { tiles }),
        together: together.is_some(),
        rows: m,
        // Whether rows are summed twice shows only when they were summed once.
        outputs: if cpu.ledger().forbids(Counter::SlowPaths) { 2 * m } else { 0 },
    };
    let (plan, mut workspace) = choose(cpu, op, successors(Some(preferred), Blocks::smaller))?;
    let (shared, mut slots) = workspace.split();
    let (shared, outputs) = shared.split_at_mut(shared.len() - plan.outputs);
    let (held, held_lse) = as_floats_mut(outputs).split_at_mut(plan.outputs / 2);
    let strict = plan.outputs > 0;
    let (ran, again) = (Ran::default(), AtomicUsize::new(0));
    let block_rows = plan.tiles * plan.height;
    for first in (0..m).step_by(block_rows) {
        let rows = block_rows.min(m - first);
        let range = first..first + rows;
        let block = Block { product, plan: &plan, first, rows, scale, target: &target[range.clone()], ran: &ran };
        let (logprob, lse_out) = match strict {
            true => (&mut held[range.clone()], &mut held_lse[range]),
            false => (&mut logprob[range.clone()], &mut lse_out[range]),
        };
        again.fetch_add(block.run(shared, &mut slots, logprob, lse_out), Ordering::Relaxed);
    }
    let (slow, again) = (ran.record(cpu), again.into_inner());
    if strict {
        let place = "linear_logprob: operands so small that VDPBF16PS would flush them";
        cpu.ledger().note(Counter::SlowPaths, slow, place)?;
        cpu.ledger().note(Counter::SlowPaths, again, SUMMED_TWICE)?;
        logprob.copy_from_slice(held);
        lse_out.copy_from_slice(held_lse);
        return Ok(());
    }
    cpu.ledger().add(Counter::SlowPaths, slow + again);
    Ok(())
}

/// What strict mode says of rows that lose weights they had added, or are far from zero.
pub(crate) const SUMMED_TWICE: &str =
    "linear_logprob: rows whose logits span more than 2^100 or are beyond 45000, summed twice";

/// Rows `first..first + rows`.
struct Block<'a, I> {
    product: &'a Product<'a, I>,
    plan: &'a Blocks,
    first: usize,
    rows: usize,
    scale: f32,
    target: &'a [i32],
    ran: &'a Ran,
}

impl<I: Element> Block<'_, I> {
    /// Returns how many rows were summed again.
    fn run(&self, shared: &mut [u32], slots: &mut [&mut [u32]], logprob: &mut [f32], lse_out: &mut [f32]) -> usize {
        let Block { product, plan, first, rows, .. } = *self;
        let (cpu, vocab) = (product.cpu, product.shape.n);
        let (x_area, facts) = shared.split_at_mut(plan.x_words());
        if plan.steps == 0 {
            let size = plan.tile_words();
            let tiles = rows.div_ceil(plan.height);
            cpu.chunks(&mut x_area[..tiles * size], size, |t, out| {
                let height = plan.height.min(rows - t * plan.height);
                let stride = if plan.together { plan.height } else { height };
                product.pack_x(first + t * plan.height, height, stride, plan.x_pairs, out);
            });
        }
        let x = &*x_area;
        // The logit of each row's target stands in `logprob` until the row is done.
        logprob.fill(f32::NAN);
        let facts = as_floats_mut(facts).as_chunks_mut::<FACTS>().0;
        let (facts_out, logprob_out) = (&SharedOut::new(facts), &SharedOut::new(logprob));
        let length = segment_length(vocab);
        let segments = vocab.div_ceil(length.max(1));
        let mut run = |pass: &Pass| {
            cpu.each_in(slots.iter_mut(), segments, |slot, segment| {
                // SAFETY: every segment has its own facts of every row, and a target is in one segment.
                let facts = unsafe { facts_out.part(segment * rows, rows) };
                self.segment(segment, pass, x, slot, facts, logprob_out);
            });
        };
        // SAFETY: the workers of a pass are done.
        let of_row = |r: usize| (0..segments).map(move |segment| unsafe { facts_out.part(segment * rows + r, 1)[0] });
        // SAFETY: as above, and each is let go before the next.
        let logprob = |r: usize| unsafe { &mut logprob_out.part(r, 1)[0] };
        let largest = |r: usize| of_row(r).map(|facts| facts[0]).fold(f32::NEG_INFINITY, f32::max);

        let mut pass = Pass { kind: Kind::First, by: [Some(f32::NEG_INFINITY); MOST_ROWS] };
        run(&pass);
        pass.kind = Kind::Known;
        for (r, by) in pass.by[..rows].iter_mut().enumerate() {
            // A weight that was added and is cut under the final n.
            let n = largest(r);
            let cut = |f: [f32; FACTS]| f[0] - n >= NEGLIGIBLE && f[3] - n < NEGLIGIBLE;
            *by = of_row(r).any(cut).then_some(n);
        }
        let mut again = pass.count(rows);
        if again > 0 {
            run(&pass);
        }
        pass.kind = Kind::Top;
        for (r, (by, lse)) in pass.by.iter_mut().zip(lse_out.iter_mut()).enumerate() {
            let (n, invalid) = (largest(r), of_row(r).any(|f| f[4] > 0.0));
            let ([sum, rest], origin) = (joined(of_row(r), n), Origin { n, top: None });
            *lse = if invalid || n.is_infinite() { f32::narrow(f32::NAN) } else { origin.ln(sum) as f32 };
            *by = (!invalid && n.abs() >= FAR).then_some(n);
            if by.is_none() {
                *logprob(r) = if invalid { f32::narrow(f32::NAN) } else { origin.logprob(*logprob(r), sum, rest) };
            }
        }
        let far = pass.count(rows);
        if far > 0 {
            run(&pass);
            pass.kind = Kind::FromTop;
            let mut exponents = [0f32; MOST_ROWS];
            for (r, (by, n)) in pass.by[..rows].iter_mut().zip(&mut exponents).enumerate() {
                if let Some(exponent) = by {
                    *n = *exponent;
                    *exponent = of_row(r).map(|f| f[5]).fold(f32::NEG_INFINITY, f32::max);
                }
            }
            run(&pass);
            for (r, lse) in lse_out.iter_mut().enumerate() {
                let Some(top) = pass.by[r] else { continue };
                let ([sum, rest], origin) = (joined(of_row(r), 0.0), Origin::top(top));
                *logprob(r) = origin.logprob(*logprob(r), sum, rest);
                if top.is_infinite() {
                    // No logit is finite, or one is +inf beside another whose exponent is.
                    let nan = f32::narrow(f32::NAN);
                    (*lse, *logprob(r)) = (if top < 0.0 { top } else { nan }, nan);
                } else if exponents[r].is_infinite() {
                    *lse = origin.ln(sum) as f32;
                }
            }
            again += far;
        }
        for (r, _) in self.target.iter().enumerate().filter(|(_, target)| **target < 0) {
            *logprob(r) = 0.0;
        }
        again
    }

    /// The facts of one segment of the vocabulary for the rows of the block that a pass takes.
    fn segment(
        &self,
        segment: usize,
        pass: &Pass,
        x: &[u32],
        slot: &mut [u32],
        facts: &mut [[f32; FACTS]],
        logits: &SharedOut<f32>,
    ) {
        let Block { product, plan, first, rows, scale, .. } = *self;
        let (cpu, Gemm { n: vocab, k, .. }) = (product.cpu, product.shape);
        let length = segment_length(vocab);
        let (start, end) = (segment * length, (segment + 1).saturating_mul(length).min(vocab));
        let (states, operand) = slot.split_at_mut(plan.states());
        let (scratch, operand) = operand.split_at_mut(plan.sums());
        let scratch = as_floats_mut(scratch);
        // A worker lays out a whole panel, or pieces of it.
        let (laid_out, pieces) = operand.split_at_mut(if plan.steps == 0 { operand.len() } else { 0 });
        let states = as_floats_mut(states);
        let tiles = || {
            let all = (0..rows).step_by(plan.height).map(|r| r..rows.min(r + plan.height));
            all.filter(|tile| pass.by[tile.clone()].iter().any(Option::is_some))
        };
        for (r, state) in states.chunks_exact_mut(STATE).enumerate().take(rows) {
            state.fill(0.0);
            (state[N], state[LEAST], state[WATCH], state[TOP]) = match pass.kind {
                Kind::First => (f32::NEG_INFINITY, f32::INFINITY, f32::INFINITY, 0.0),
                // Of rows that the pass does not take nothing is read.
                Kind::Known => (pass.by[r].unwrap_or(0.0), pass.by[r].unwrap_or(0.0), f32::NEG_INFINITY, 0.0),
                Kind::Top | Kind::FromTop => (0.0, 0.0, 0.0, f32::NEG_INFINITY),
            };
        }
        let mut tally = Tally::default();
        for panel in start / PANEL..end.div_ceil(PANEL) {
            let held;
            let mut operand = match product.w {
                Weight::Packed(group) if plan.unpack => {
                    let mut operand = group.panel(panel, laid_out);
                    if !plan.x_pairs || product.quantized() {
                        operand.unpack(cpu);
                    }
                    Some(operand)
                }
                Weight::Packed(group) => Some(group.panel(panel, &mut [])),
                Weight::Plain(_) if plan.steps > 0 => None,
                Weight::Plain(w) => {
                    let columns = PANEL.min(vocab - panel * PANEL);
                    let outputs = panel * PANEL..panel * PANEL + columns;
                    match plan.w_pairs || !I::IS_BF16 {
                        true => w.pack(cpu, k, outputs, product.shape.tf32, laid_out),
                        false => {
                            let wide = as_floats_mut(laid_out);
                            w.widen(cpu, [0, k], [outputs.start, columns], product.shape.tf32, wide);
                        }
                    }
                    held = Panels::one(laid_out, k, plan.w_pairs);
                    Some(held.panel(0, &mut []))
                }
            };
            // Columns of this panel that belong to the segment.
            let columns = start.max(panel * PANEL) - panel * PANEL..end.min((panel + 1) * PANEL) - panel * PANEL;
            let lane = (panel * PANEL + columns.start - start) % LANES;
            let together = plan.together.then(|| {
                let (stride, tiles) = (plan.tile_words(), rows.div_ceil(plan.height));
                let (left, right) = (as_floats(&x[..tiles * stride]), operand.as_ref().expect("a panel").right);
                fma_block(cpu, Tiles { left, stride, tiles, right, bounds: product.bounds, scratch })
            });
            let mut room = [0f32; MAX_ROWS * PANEL];
            for tile in tiles() {
                let (r, count) = (tile.start, tile.len());
                let room = &mut room[..count * PANEL];
                let sums = if let Some(sums) = together {
                    &sums[r * PANEL..][..count * PANEL]
                } else if plan.steps > 0 {
                    let right = operand.as_ref().map(|operand| operand.right);
                    product.pieces(count, first + r, panel, right, plan.steps, pieces, room);
                    room
                } else {
                    let x = &x[r / plan.height * plan.tile_words()..][..plan.tile_words()];
                    let operand = operand.as_mut().expect("a panel");
                    product.tile(x, plan.x_pairs, operand, panel, first + r, count, &mut tally, room);
                    room
                };
                let states = &mut states[r * STATE..][..count * STATE];
                if matches!(pass.kind, Kind::First | Kind::Known) {
                    let moving = matches!(pass.kind, Kind::First);
                    absorb(cpu, Absorb { sums, columns: columns.clone(), lane, scale, moving, states });
                }
                for (i, (sums, state)) in sums.chunks_exact(PANEL).zip(states.chunks_exact_mut(STATE)).enumerate() {
                    let Some(by) = pass.by[r + i] else { continue };
                    let x = columns.clone().map(|column| sums[column] * scale);
                    let origin = match pass.kind {
                        Kind::First | Kind::Known => Origin { n: state[N], top: None },
                        Kind::FromTop => {
                            let origin = Origin::top(by);
                            for (lane, x) in (lane..).zip(x) {
                                state[lane % LANES] += origin.weight(x);
                            }
                            origin
                        }
                        Kind::Top => {
                            state[TOP] = x.fold(state[TOP], f32::max);
                            continue;
                        }
                    };
                    let Ok(target) = usize::try_from(self.target[r + i]) else { continue };
                    if !(start..end).contains(&target) {
                        continue;
                    }
                    let column = target.wrapping_sub(panel * PANEL);
                    if columns.contains(&column) {
                        // SAFETY: a target is in one segment, and a segment has one worker.
                        unsafe { logits.part(r + i, 1)[0] = sums[column] * scale };
                        continue;
                    }
                    // Another one of its lane.
                    let column = columns.start + ((target - start) % LANES + LANES - lane) % LANES;
                    if columns.contains(&column) {
                        state[OTHERS] += origin.weight(sums[column] * scale);
                    }
                }
            }
        }
        self.ran.add(tally);
        for r in tiles().flatten() {
            if pass.by[r].is_none() {
                continue;
            }
            let state = &mut states[r * STATE..][..STATE];
            let sum = sum_lanes(cpu, state.first_chunk().expect("256 lanes"));
            let rest = match usize::try_from(self.target[r]) {
                Ok(target) if (start..end).contains(&target) => {
                    state[(target - start) % LANES] = state[OTHERS];
                    sum_lanes(cpu, state.first_chunk().expect("256 lanes"))
                }
                _ => sum,
            };
            facts[r] = [state[N], sum, rest, state[LEAST], state[INVALID], state[TOP]];
        }
    }
}

/// Rows of a block, at most.
const MOST_ROWS: usize = BLOCK_ROWS + MAX_ROWS;

/// Once over the vocabulary.
struct Pass {
    kind: Kind,
    /// What each row that it takes is measured by.
    by: [Option<f32>; MOST_ROWS],
}

impl Pass {
    /// How many of the first rows it takes.
    fn count(&self, rows: usize) -> usize {
        self.by[..rows].iter().flatten().count()
    }
}

/// What a pass finds.
enum Kind {
    /// The sums, while n follows the largest exponent met so far.
    First,
    /// The sums under an n that is known.
    Known,
    /// The largest logit.
    Top,
    /// The sums from the largest logit.
    FromTop,
}

/// `2^i` for integral i in [-126, 0].
fn exp2(i: f32) -> f32 {
    f32::from_bits(((i as i32 + 127) as u32) << 23)
}

fn sum_lanes(cpu: &Cpu, lanes: &[f32; LANES]) -> f32 {
    cpu.dispatch(Fold(lanes))
}

struct Fold<'a>(&'a [f32; LANES]);

impl Kernel for Fold<'_> {
    type Output = f32;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        Lanes::of(*self.0).fold(s, LANES)
    }
}

/// Runs [`Absorb`]. Not generic, so that it is compiled once.
fn absorb(cpu: &Cpu, absorb: Absorb) {
    cpu.dispatch(absorb);
}

/// Adds the weights of some logits of each row to the row's lanes.
struct Absorb<'a> {
    /// `[rows][32]` logits before the temperature.
    sums: &'a [f32],
    /// Which of the 32 count.
    columns: std::ops::Range<usize>,
    /// The lane of the first of them.
    lane: usize,
    scale: f32,
    /// Whether n follows the largest exponent.
    moving: bool,
    /// One state per row.
    states: &'a mut [f32],
}

impl Kernel for Absorb<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Absorb { sums, columns, lane, scale, moving, states } = self;
        // Segments and lanes start at multiples of 16, so whole vectors go to whole vectors but for the end of V.
        assert!(columns.start.is_multiple_of(MAX_LANES) && lane.is_multiple_of(MAX_LANES) && columns.end <= PANEL);
        for (sums, state) in sums.chunks_exact(PANEL).zip(states.chunks_exact_mut(STATE)) {
            for column in columns.clone().step_by(S::LANES) {
                let lane = (lane + column - columns.start) % LANES;
                let logits = load_at(s, &sums[..columns.end], column, f32::NEG_INFINITY);
                let x = s.mul(logits, s.splat(scale));
                let (m, i) = exp_split(s, x, s.splat(LOG2E_HI), s.splat(LOG2E_LO));
                if !s.all_within(s.splat(state[WATCH]), i, s.splat(state[N])) {
                    if s.any_nan_or_inf(x) {
                        state[INVALID] = 1.0;
                        continue;
                    }
                    if moving {
                        widen_range(s, i, state);
                    }
                }
                let w = weight(s, m, i, s.splat(state[N]));
                // SAFETY: lane + LANES <= 256: both are multiples of LANES.
                unsafe {
                    let place = state[lane..LANES][..S::LANES].as_mut_ptr();
                    s.store(s.add(s.load(place), w), place);
                }
            }
        }
    }
}

/// Raises a row's n to the largest of the exponents `i`, rescaling its lanes, and notes the least of those that are then
/// added.
#[cold]
#[inline(never)]
fn move_range(exponents: &[f32], state: &mut [f32]) {
    let n = exponents.iter().copied().fold(state[N], f32::max);
    if n > state[N] {
        let shift = state[N] - n;
        // Weights that all fall below the cut become +0; else the lanes keep every bit.
        if shift >= NEGLIGIBLE {
            let factor = exp2(shift);
            state[..LANES].iter_mut().for_each(|sum| *sum *= factor);
            state[OTHERS] *= factor;
        } else {
            state[..LANES].fill(0.0);
            state[OTHERS] = 0.0;
            state[LEAST] = f32::INFINITY;
        }
        state[N] = n;
    }
    let added = exponents.iter().copied().filter(|i| i - n >= NEGLIGIBLE);
    state[LEAST] = added.fold(state[LEAST], f32::min);
    // Under the cut nothing is added, so no later exponent is less.
    state[WATCH] = if state[LEAST] - n > NEGLIGIBLE { state[LEAST] } else { f32::NEG_INFINITY };
}

#[inline(always)]
fn widen_range<S: Simd>(s: S, i: S::F, state: &mut [f32]) {
    let mut exponents = [f32::NEG_INFINITY; MAX_LANES];
    // SAFETY: MAX_LANES >= LANES.
    unsafe { s.store(i, exponents.as_mut_ptr()) };
    move_range(&exponents[..S::LANES], state);
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests;
