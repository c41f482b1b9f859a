//! Gradients of log-probabilities from hidden states: `x[M,K], w[V,K], target[M], lse[M], dlogprob[M], dlse[M]?, mask[M]?,
//! carry[V,K]? -> dx[M,K], dw[V,K]` (f32). Neither logits nor their gradients are stored: the workspace grows with K alone.
//!
//! Formula: `logits = x w^T`, `dz = logprob_backward(logits)`, `dx = dz w`, `dw += dz^T x` over the rows that are tokens.
//! Order and rounding: those of `gemm` with an f32 output, of `logprob_backward`, whose last rounding is to the type of x, of
//! `gemm_dx` and of `gemm_dw`; the bits are those of the four in a row.
//!
//! Some rows meet a tile of the vocabulary at a time, and what the four make of it stays in the caches. A chain of dw waits
//! in dw for the next rows, one of dx in the workspace for the next tile; a tile lies within one segment of V. As in
//! `gemm_dw`, both sums take pairs where `VDPBF16PS` pays, tile by tile, unless something could be flushed.

pub(crate) mod device;

use crate::call::Entry;
use crate::element::typed;
use crate::gemm::gemm::{Product, Says, Tiling};
use crate::gemm::gemm_dw::{Cut, Factors, GemmDw, Sums, goes_on_exactly};
use crate::gemm::packed::{PackedWeight, Weight};
use crate::gemm::shape::{Gemm, segment_length};
use crate::gemm::tile::dot_is_exact;
use crate::logprob::logprob::{check_targets, inverse};
use crate::logprob::logprob_backward::Given;
use crate::pack::matrix::{Matrix, Side};
use crate::pack::{PANEL, as_elements_mut, as_floats_mut, bf16_slice, f32_of_rows, least_of_all, pairs_of_rows};
use crate::parallel::SharedOut;
use crate::profile::IEEE;
use crate::simd::prefetch::Prefetch;
use crate::simd::{Kernel, Simd};
use crate::tensor::Rows;
use crate::through_f32::convert;
use crate::token::chains::mask_of;
use crate::workspace::memory::LINE;
use crate::workspace::{Need, Plan, choose};
use crate::{Counter, Cpu, Element, Error, LinearLogprob, LogprobGradients, TensorRef, Tf32, check_len, value_error};
use half::bf16;
use std::iter::successors;
use std::ops::Range;

const NAME: &str = "linear_logprob_backward";
/// Rows in hand at a time, at most: what is read and written of dw for them is then a small part of what is computed.
const MOST_ROWS: usize = 1024;
/// Columns of a tile of the vocabulary, at most.
const MOST_COLUMNS: usize = 1024;
/// Tiles are not made smaller than this as long as there is the other extent to give up.
const FEW: [usize; 2] = [64, 256];
/// Segments of the vocabulary; belongs to the contract.
const SEGMENTS: usize = IEEE.segments;
/// Sums of dx: those of a segment, and three finished subtrees that wait to be joined.
const LEVELS: usize = 1 + 3;

/// What [`linear_logprob_backward`] knows of each row.
#[derive(Clone, Copy, Debug)]
pub struct LogprobRows<'a> {
    /// The token, or none where it is negative.
    pub target: &'a [i32],
    /// What [`linear_logprob`](crate::linear_logprob()) returned.
    pub lse: &'a [f32],
    /// Gradients of what it returned.
    pub gradients: LogprobGradients<'a>,
    /// 0 for each row that is padding, which dw has nothing of; `None` where all are tokens.
    pub mask: Option<&'a [i32]>,
}

/// The gradient `dx[M,K]` of [`linear_logprob`](crate::linear_logprob())'s `x[M,K]`, and that of its `w[V,K]` added to
/// `dw[V,K]`, which goes on from what it holds, row-major. A negative target means none, and its dlogprob is not read.
///
/// # Errors
/// [`Error::Length`] when a slice does not match; [`Error::Value`] when `temperature` is not positive and finite or a
/// target is V or more; [`Error::Budget`] below the smallest plan (about 4 KiB and 16 bytes for each column of x).
///
/// ```
/// use samebits_ops::{Cpu, LinearLogprob, LogprobGradients, LogprobRows, linear_logprob, linear_logprob_backward};
///
/// // Two tokens, equally likely: the target's logit would rise, the other's fall.
/// let (cpu, shape) = (Cpu::best(), LinearLogprob::new(1, 2, 2));
/// let (x, w) = ([2f32, 3.0], [1f32, 0.0, 1.0, 0.0]);
/// let (mut logp, mut lse, mut dx, mut dw) = ([9f32], [9f32], [9f32; 2], [0f32; 4]);
/// linear_logprob(&cpu, &shape, &x, &w, &[1], &mut logp, &mut lse)?;
/// let gradients = LogprobGradients { dlogprob: &[1.0], dlse: None };
/// let rows = LogprobRows { target: &[1], lse: &lse, gradients, mask: None };
/// linear_logprob_backward(&cpu, &shape, &x, &w, &rows, &mut dx, &mut dw)?;
/// assert!(dx.iter().all(|dx| dx.abs() < 1e-6));
/// assert!((dw[2] - 1.0).abs() < 1e-6 && (dw[1] + 1.5).abs() < 1e-6);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn linear_logprob_backward<I: Element, O: Element>(
    cpu: &Cpu,
    shape: &LinearLogprob,
    x: &[I],
    w: &[I],
    rows: &LogprobRows,
    dx: &mut [O],
    dw: &mut [f32],
) -> Result<(), Error> {
    check_len(NAME, "w", "[V,K]", w.len(), &[shape.vocab, shape.k])?;
    let w = TensorRef::of(w, &[shape.vocab, shape.k]).rows();
    of_slices(cpu, shape, x, Source::Rows(w), rows, dx, dw)
}

/// [`linear_logprob_backward`] with a weight packed beforehand: the same bits.
///
/// # Errors
/// As [`linear_logprob_backward`]; [`Error::Value`] when the weight is not `[V,K]`, or not of the dtype of x.
///
/// ```
/// use samebits_ops::{Cpu, LinearLogprob, LogprobGradients, LogprobRows, PackedWeight};
/// use samebits_ops::{linear_logprob_backward_packed, linear_logprob_packed};
///
/// let (cpu, shape) = (Cpu::best(), LinearLogprob::new(1, 2, 2));
/// let (x, w) = ([2f32, 3.0], PackedWeight::pack(&cpu, 2, 2, &[1f32, 0.0, 1.0, 0.0])?);
/// let (mut logp, mut lse, mut dx, mut dw) = ([9f32], [9f32], [9f32; 2], [0f32; 4]);
/// linear_logprob_packed(&cpu, &shape, &x, &w, &[1], &mut logp, &mut lse)?;
/// let gradients = LogprobGradients { dlogprob: &[1.0], dlse: None };
/// let rows = LogprobRows { target: &[1], lse: &lse, gradients, mask: None };
/// linear_logprob_backward_packed(&cpu, &shape, &x, &w, &rows, &mut dx, &mut dw)?;
/// assert!((dw[2] - 1.0).abs() < 1e-6 && (dw[1] + 1.5).abs() < 1e-6);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn linear_logprob_backward_packed<I: Element, O: Element>(
    cpu: &Cpu,
    shape: &LinearLogprob,
    x: &[I],
    w: &PackedWeight,
    rows: &LogprobRows,
    dx: &mut [O],
    dw: &mut [f32],
) -> Result<(), Error> {
    if [w.n(), w.k()] != [shape.vocab, shape.k] {
        let what = format!("w is [{}, {}]; it must be [{}, {}]", w.n(), w.k(), shape.vocab, shape.k);
        return Err(value_error(NAME, what));
    }
    of_slices(cpu, shape, x, Source::of(TensorRef::packed(w))?, rows, dx, dw)
}

/// Of rows that stand one behind the other, with a weight that is `[V,K]`.
fn of_slices<I: Element, O: Element>(
    cpu: &Cpu,
    shape: &LinearLogprob,
    x: &[I],
    w: Source<I>,
    rows: &LogprobRows,
    dx: &mut [O],
    dw: &mut [f32],
) -> Result<(), Error> {
    let LinearLogprob { rows: m, vocab, k, temperature } = *shape;
    let LogprobRows { target, lse, gradients: LogprobGradients { dlogprob, dlse }, mask } = *rows;
    for (name, found, shape, extents) in
        [("x", x.len(), "[M,K]", [m, k]), ("dx", dx.len(), "[M,K]", [m, k]), ("dw", dw.len(), "[V,K]", [vocab, k])]
    {
        check_len(NAME, name, shape, found, &extents)?;
    }
    let optional = [("dlse", dlse.map(<[f32]>::len)), ("mask", mask.map(<[i32]>::len))];
    let optional = optional.into_iter().filter_map(|(name, found)| found.map(|found| (name, found)));
    let given = [("target", target.len()), ("lse", lse.len()), ("dlogprob", dlogprob.len())];
    for (name, found) in given.into_iter().chain(optional) {
        check_len(NAME, name, "[M]", found, &[m])?;
    }
    let x = TensorRef::of(x, &[m, k]).rows::<I>();
    let given = Given { target, lse, dlogprob, dlse };
    let (scale, bounds) = (inverse(NAME, temperature)?, Gemm::new(m, vocab, k).bounds()?);
    let call = Backward { cpu, sizes: [m, vocab, k], x, w, given, mask, scale, bounds };
    call.run(dx, dw, |_, _| false)
}

/// What it says of itself.
const SAYS: Says = Says {
    op: NAME,
    lays_out: "linear_logprob_backward lays its weight out, tile by tile",
    flushes: "linear_logprob_backward: operands so small that VDPBF16PS would flush them",
};

/// linear_logprob_backward, by name.
pub(crate) const OP: Entry = Entry {
    name: NAME,
    cpu: |cpu, args| {
        let (x, w, carry) = (args.input("x"), args.input("w"), args.optional("carry"));
        x.on_host(NAME, "x")?;
        carry.map_or(Ok(()), |carry| carry.on_host(NAME, "carry"))?;
        let per_row = |name| args.optional(name).map(|row| row.dense::<f32>(NAME, name));
        let [lse, dlogprob] = ["lse", "dlogprob"].map(|name| per_row(name).expect("the call was checked"));
        let (target, mask, dlse) = (args.integers("target")?, mask_of(args)?, per_row("dlse").transpose()?);
        let given = Given { target, lse: lse?, dlogprob: dlogprob?, dlse };
        let sizes = ["M", "V", "K"].map(|axis| args.call.dim(axis));
        let scale = inverse(NAME, args.call.float("temperature"))?;
        let (dx, dw) = (args.output("dx"), args.output("dw").host::<f32>(NAME, "dw")?);
        typed!(x.dtype() => I, {
            let w = Source::of(w)?;
            let bounds = Gemm::new(sizes[0], sizes[1], sizes[2]).bounds()?;
            let call = Backward { cpu, sizes, x: x.rows::<I>(), w, given, mask, scale, bounds };
            let begin = |rows: Range<usize>, dw: &mut [f32]| {
                if let Some(carry) = carry {
                    let (carry, k) = (carry.rows::<f32>(), sizes[2]);
                    cpu.chunks(dw, COPIED * k, |some, dw| {
                        let first = rows.start + some * COPIED;
                        dw.chunks_mut(k).enumerate().for_each(|(row, dw)| convert(cpu, carry.row(first + row), dw));
                    });
                }
                carry.is_none()
            };
            typed!(dx.dtype() => O, call.run(dx.host::<O>(NAME, "dx")?, dw, begin))
        })
    },
    device: Some(device::by_name),
    unit: Some(&device::UNIT),
    prepare: None,
};

/// Rows that a worker copies at a time.
const COPIED: usize = 16;

/// Where w is.
#[derive(Clone, Copy)]
enum Source<'a, I> {
    Rows(Rows<'a, I>),
    Packed(&'a PackedWeight),
}

impl<'a, I: Element> Source<'a, I> {
    fn of(w: TensorRef<'a>) -> Result<Source<'a, I>, Error> {
        // A weight that is packed for another op is refused.
        Weight::<I>::of(NAME, w)?;
        match w.as_prepared::<PackedWeight>() {
            None => Ok(Source::Rows(w.rows())),
            Some(packed) if packed.dtype() == I::slice(&[]).dtype() => Ok(Source::Packed(packed)),
            Some(packed) => Err(value_error(NAME, format!("`w` was packed from {}; x is {}", packed.dtype(), I::NAME))),
        }
    }
}

/// A call.
struct Backward<'a, I> {
    cpu: &'a Cpu,
    /// M, V and K.
    sizes: [usize; 3],
    x: Rows<'a, I>,
    w: Source<'a, I>,
    given: Given<'a>,
    mask: Option<&'a [i32]>,
    scale: f32,
    /// Of the segments of K.
    bounds: Vec<usize>,
}

/// How a call is cut: some rows and a tile of the vocabulary at a time, by a plan of each of the three products.
struct Tiles {
    rows: usize,
    columns: usize,
    logits: Tiling,
    dw: Cut,
    dx: Cut,
    /// Words of the rows of x, of the tile of w, of the gradients of the logits as they are and in tiles, of the sums of dx,
    /// and of x as dw and the logits read it, which are 0 where it is not kept.
    words: [usize; 7],
    /// Words in which a worker unpacks a panel of w.
    slot: usize,
    /// How many of the words hold bf16 as it is.
    narrow: usize,
}

impl Plan for Tiles {
    fn need(&self) -> Need {
        let products = [self.logits.need(), self.dw.need(), self.dx.need()];
        let most = |of: fn(&Need) -> usize| products.iter().map(of).max().unwrap_or(0);
        let [.., panels, tiles] = self.words;
        let dw = if panels > 0 { 0 } else { products[1].shared };
        let shared = (products[0].shared - tiles).max(dw).max(products[2].shared);
        Need {
            shared: self.words.iter().sum::<usize>().saturating_add(shared),
            slot: most(|need| need.slot).max(self.slot),
            workers: most(|need| need.workers),
            pairs: self.narrow + products[0].pairs,
        }
    }

    fn tiles(&self) -> [(&'static str, usize); 3] {
        [("rows", self.rows), ("columns", self.columns), ("", 0)]
    }
}

impl<I: Element> Backward<'_, I> {
    /// Writes dx and dw; `begin` puts into some rows of dw what they go on from, or says that it is +0.
    fn run<O: Element>(
        &self,
        dx: &mut [O],
        dw: &mut [f32],
        begin: impl Fn(Range<usize>, &mut [f32]) -> bool,
    ) -> Result<(), Error> {
        let &Backward { cpu, sizes: [m, vocab, k], given, .. } = self;
        check_targets(NAME, given.target, vocab)?;
        if k == 0 {
            return Ok(());
        }
        if m == 0 || vocab == 0 {
            dx.fill(O::default());
            if begin(0..vocab, dw) {
                dw.fill(0.0);
            }
            return Ok(());
        }
        let preferred = self.plan(m.min(MOST_ROWS), segment_length(vocab).min(MOST_COLUMNS));
        let (plan, mut workspace) = choose(cpu, NAME, successors(Some(preferred), |plan| self.smaller(plan)))?;
        let (mut rest, slots) = workspace.split();
        let [.., tiles_words] = plan.words;
        let [x_room, w, gradients, factors, sums, panels] = std::array::from_fn(|i| {
            let (part, others) = std::mem::take(&mut rest).split_at_mut(plan.words[i]);
            rest = others;
            part
        });
        let mut room = Room { w, gradients, factors, panels, tiles: tiles_words, shared: rest, slots };
        if cpu.ledger().forbids(Counter::SlowPaths) {
            let mut slow = 0;
            for first in (0..m).step_by(plan.rows) {
                let count = plan.rows.min(m - first);
                let x = dense_rows(cpu, self.x, first..first + count, x_room);
                for tile in tiles(vocab, plan.columns).flatten() {
                    let columns = tile.len();
                    let w = self.tile(tile, room.w, &mut room.slots);
                    slow += self.product(x, w, [count, columns]).slow_tiles(&plan.logits);
                }
            }
            cpu.ledger().note(Counter::SlowPaths, slow, SAYS.flushes)?;
        }
        let sums = as_floats_mut(sums);
        for first in (0..m).step_by(plan.rows) {
            let count = plan.rows.min(m - first);
            let x = dense_rows(cpu, self.x, first..first + count, x_room);
            let counted = self.mask.map(|mask| (0..count).filter(|&r| mask[first + r] != 0).collect::<Vec<_>>());
            let least = if self.pairs_pay() { self.least(x) } else { f32::INFINITY };
            let counted = counted.as_deref();
            let mut block = Block { plan: &plan, first, count, x, least, counted, held: false, held_pairs: None };
            let (sums, waiting) = sums[..LEVELS * count * k].split_at_mut(count * k);
            for (segment, tiles) in tiles(vocab, plan.columns).enumerate() {
                let (mut begins, mut exact) = (true, true);
                for tile in tiles {
                    let dw = &mut dw[tile.start * k..tile.end * k];
                    let dw_begins = first == 0 && begin(tile.clone(), dw);
                    exact = self.add(&mut block, tile, &mut room, (sums, begins, exact), (dw, dw_begins));
                    begins = false;
                }
                if begins {
                    sums.fill(0.0);
                }
                // Finished subtrees: a binary counter, one place per level of the tree.
                let mut waiting = waiting.chunks_exact_mut(count * k);
                let mut level = 0;
                while segment >> level & 1 == 1 {
                    let earlier = &*waiting.next().expect("three levels");
                    cpu.chunks(sums, COPIED * k, |some, sums| {
                        sums.iter_mut().zip(&earlier[some * COPIED * k..]).for_each(|(sum, earlier)| *sum += *earlier);
                    });
                    level += 1;
                }
                if segment + 1 < SEGMENTS {
                    let (sums, waits) = (&*sums, waiting.next().expect("three levels"));
                    cpu.chunks(waits, COPIED * k, |some, waits| {
                        waits.copy_from_slice(&sums[some * COPIED * k..][..waits.len()]);
                    });
                }
            }
            let dx = &mut dx[first * k..][..count * k];
            cpu.chunks(dx, COPIED * k, |some, dx| convert(cpu, &sums[some * COPIED * k..][..dx.len()], dx));
        }
        Ok(())
    }

    /// The plan for so many rows and columns at a time.
    fn plan(&self, rows: usize, columns: usize) -> Tiles {
        let &Backward { cpu, sizes: [.., k], .. } = self;
        let (dw, dx) = (GemmDw::new(rows, columns, k), GemmDw::new(columns, rows, k));
        let [dw, dx] = [(dw, rows), (dx, columns)].map(|(shape, tokens)| Cut::preferred(cpu, &shape, tokens));
        // Of its operands only the form counts.
        let none = TensorRef::of::<I>(&[], &[0, k]).rows();
        let logits = self.product(none, none, [rows, columns]).preferred();
        self.cut([rows, columns], logits, dw, dx)
    }

    fn cut(&self, [rows, columns]: [usize; 2], logits: Tiling, dw: Cut, dx: Cut) -> Tiles {
        let [.., k] = self.sizes;
        let elements = |count: usize| count.saturating_mul(size_of::<I>()).div_ceil(4);
        let x = if dense(self.x) { 0 } else { elements(rows.saturating_mul(k)) };
        let (w, slot) = match self.w {
            Source::Rows(w) if dense(w) => (0, 0),
            Source::Rows(_) => (elements(columns.saturating_mul(k)), 0),
            Source::Packed(packed) => (elements(columns.saturating_mul(k)), packed.slot()),
        };
        let gradients = elements(rows * columns);
        let factors = rows.next_multiple_of(dx.height) * columns;
        let sums = (LEVELS * rows).saturating_mul(k);
        let panels = if dw.holds(rows, k) { dw.need().shared } else { 0 };
        let words = [x, w, gradients, factors, sums, panels, logits.held_words(rows)];
        let words = words.map(|words| words.next_multiple_of(LINE));
        let narrow = if I::IS_BF16 { words[0] + words[1] + words[2] } else { 0 };
        Tiles { rows, columns, logits, dw, dx, words, slot, narrow }
    }

    /// Fewer columns, then fewer rows, of either as many as still keep the products busy first; then smaller plans of those.
    fn smaller(&self, plan: &Tiles) -> Option<Tiles> {
        let (fewer_rows, fewer_columns) = (plan.rows.div_ceil(2), plan.columns.div_ceil(32) * 16);
        for [few_rows, few_columns] in [FEW, [1, 16]] {
            if plan.columns > few_columns {
                return Some(self.plan(plan.rows, fewer_columns));
            }
            if plan.rows > few_rows {
                return Some(self.plan(fewer_rows, plan.columns));
            }
        }
        let (logits, dw, dx) = (plan.logits.smaller(), plan.dw.smaller(), plan.dx.smaller());
        if logits.is_none() && dw.is_none() && dx.is_none() {
            return None;
        }
        let (logits, dw, dx) = (logits.unwrap_or(plan.logits), dw.unwrap_or(plan.dw), dx.unwrap_or(plan.dx));
        Some(self.cut([plan.rows, plan.columns], logits, dw, dx))
    }

    /// The logits of some rows and a tile of the vocabulary.
    fn product<'p>(&'p self, x: Rows<'p, I>, w: Rows<'p, I>, [rows, columns]: [usize; 2]) -> Product<'p, I> {
        let shape = Gemm::new(rows, columns, self.sizes[2]);
        let w = Weight::Plain(Matrix::Weight { rows: w, side: Side::Rows });
        Product { cpu: self.cpu, says: &SAYS, shape, x, w, bias: None, bounds: &self.bounds }
    }

    /// Whether pairs pay where they are exact.
    fn pairs_pay(&self) -> bool {
        I::IS_BF16 && self.cpu.isa().dots_pay()
    }

    /// The smallest nonzero magnitude of rows of bf16 that stand one behind the other.
    fn least(&self, rows: Rows<I>) -> f32 {
        let all = rows.together(0, rows.count()).expect("they do");
        least_of_all(self.cpu, bf16_slice(all).expect("bf16"))
    }

    /// A tile of w, row by row.
    fn tile<'r>(&'r self, tile: Range<usize>, room: &'r mut [u32], slots: &mut [&mut [u32]]) -> Rows<'r, I> {
        let packed = match self.w {
            Source::Rows(w) => return dense_rows(self.cpu, w, tile, room),
            Source::Packed(packed) => packed,
        };
        let (count, k) = (tile.len(), self.sizes[2]);
        let rows = &mut as_elements_mut::<I>(room)[..count * k];
        packed.unpack_rows(self.cpu, slots, tile.start, rows);
        TensorRef::of(&*rows, &[count, k]).rows()
    }

    /// What a tile of the vocabulary adds to dx of some rows, as far as its segment has come, and to its rows of dw. Both
    /// may begin with +0. Takes whether the sums of dx are such as pairs make exactly, and returns whether they still are.
    fn add(
        &self,
        block: &mut Block<I>,
        tile: Range<usize>,
        room: &mut Room,
        (sums, begins, exact): (&mut [f32], bool, bool),
        (dw, dw_begins): (&mut [f32], bool),
    ) -> bool {
        let (&Backward { cpu, sizes: [.., k], given, scale, .. }, columns) = (self, tile.len());
        let Block { plan, first, count, x, counted, held, .. } = *block;
        let Room { w, gradients, factors, panels, tiles, shared, slots } = room;
        let w = self.tile(tile.clone(), w, slots);
        let product = self.product(x, w, [count, columns]);
        let gradients = &mut as_elements_mut::<I>(gradients)[..count * columns];
        let out = SharedOut::new(gradients);
        let workers = some_of(slots, plan.logits.workers);
        product.run_in(
            &plan.logits,
            (shared, held && *tiles > 0),
            workers,
            |_| (),
            |part, logits| {
                let (given, at) = (given.from(first + part.first), part.panel * PANEL);
                let (column, columns_here) = (tile.start + at, PANEL.min(columns - at));
                let at = (part.first * columns + at, columns);
                cpu.dispatch(OfLogits { logits, given, scale, column, out: &out, at, columns: columns_here });
            },
        );
        block.held = true;
        let shared = &mut shared[*tiles..];
        let gradients = TensorRef::of(&*gradients, &[count, columns]).rows::<I>();
        let pairs_pay = self.pairs_pay();
        let least = if pairs_pay { self.least(gradients) } else { f32::INFINITY };
        let tokens = counted.map_or(count, <[usize]>::len);
        if tokens > 0 {
            let (shape, dy) = (GemmDw::new(tokens, columns, k), Factors::Rows(gradients));
            let pairs = pairs_pay && dot_is_exact(block.least, least) && (dw_begins || goes_on_exactly(cpu, dw));
            let cut = if pairs { plan.dw.in_pairs(tokens) } else { plan.dw };
            let sums = Sums { cpu, shape, plan: cut, tokens, counted, x, dy, begins: dw_begins };
            let kept = !panels.is_empty();
            let held = kept && block.held_pairs.replace(pairs) == Some(pairs);
            let panels = if kept { &mut **panels } else { &mut *shared };
            sums.run(panels, held, some_of(slots, plan.dw.workers), dw);
        } else if dw_begins {
            dw.fill(0.0);
        }
        let pairs = exact && pairs_pay && dot_is_exact(self.least(w), least);
        let cut = if pairs { plan.dx.in_pairs(columns) } else { plan.dx };
        let (height, steps) = (cut.height, if pairs { columns.div_ceil(2) } else { columns });
        let stride = height * steps;
        let factors = &mut factors[..count.div_ceil(height) * stride];
        cpu.chunks(factors, stride, |number, out| {
            let (first, rows) = (number * height, height.min(count - number * height));
            let row = |r: usize| gradients.row(first + r);
            if pairs {
                let row = |r: usize| bf16_slice(row(r)).expect("bf16");
                return pairs_of_rows::<true>(cpu, rows, columns, row, bf16::ZERO, out, height, Prefetch::NONE);
            }
            f32_of_rows(cpu, rows, columns, row, Tf32::Disabled, as_floats_mut(out), height);
        });
        let (shape, dy) = (GemmDw::new(columns, count, k), Factors::Tiles(factors, stride));
        let dx = Sums { cpu, shape, plan: cut, tokens: columns, counted: None, x: w, dy, begins };
        dx.run(shared, false, some_of(slots, plan.dx.workers), sums);
        pairs
    }
}

/// The gradients of some rows and columns of logits, in rows of [`PANEL`].
struct OfLogits<'a, 'o, I> {
    logits: &'a [f32],
    /// From the first of the rows on.
    given: Given<'a>,
    scale: f32,
    /// The token of the first column, and how many there are.
    column: usize,
    columns: usize,
    out: &'a SharedOut<'o, I>,
    /// Where the first one stands, and how far it is from one row to the next.
    at: (usize, usize),
}

impl<I: Element> Kernel for OfLogits<'_, '_, I> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let OfLogits { logits, given, scale, column, columns, out, at: (at, stride) } = self;
        for (r, logits) in logits.chunks_exact(PANEL).enumerate() {
            // SAFETY: parts of the product differ in rows or in columns, so these places are disjoint.
            let gradients = unsafe { out.part(at + r * stride, columns) };
            given.row(r, scale, logits).all(s, 0, column, gradients);
        }
    }
}

/// Some rows of a call.
struct Block<'a, I> {
    plan: &'a Tiles,
    first: usize,
    count: usize,
    x: Rows<'a, I>,
    /// The smallest nonzero magnitude of x, where pairs pay.
    least: f32,
    /// Which of them are tokens, where some are padding.
    counted: Option<&'a [usize]>,
    /// Whether x stands where an earlier tile has left it as the logits read it.
    held: bool,
    /// As what an earlier tile has left x where dw reads it: as pairs or not.
    held_pairs: Option<bool>,
}

/// Where the parts of a tile stand.
struct Room<'a> {
    w: &'a mut [u32],
    /// The gradients of the logits, and tiles of them.
    gradients: &'a mut [u32],
    factors: &'a mut [u32],
    /// x as dw reads it, where it is kept.
    panels: &'a mut [u32],
    /// Those of the products; at the start, so many words are x as the logits read it, where it is kept.
    tiles: usize,
    shared: &'a mut [u32],
    slots: Vec<&'a mut [u32]>,
}

fn some_of<'s>(slots: &'s mut [&mut [u32]], count: usize) -> Vec<&'s mut [u32]> {
    slots.iter_mut().take(count).map(|slot| &mut **slot).collect()
}

/// The tiles of each segment of the vocabulary.
fn tiles(vocab: usize, columns: usize) -> impl Iterator<Item = impl Iterator<Item = Range<usize>>> {
    let length = segment_length(vocab);
    (0..SEGMENTS).map(move |segment| {
        let (from, to) = ((segment * length).min(vocab), ((segment + 1) * length).min(vocab));
        (from..to).step_by(columns).map(move |from| from..to.min(from + columns))
    })
}

/// Whether rows lie one behind the other.
fn dense<I>(rows: Rows<I>) -> bool {
    rows.together(0, rows.count()).is_some()
}

/// Some of the rows, one behind the other: as they stand, or else in `room`.
fn dense_rows<'r, I: Element>(cpu: &Cpu, all: Rows<'r, I>, rows: Range<usize>, room: &'r mut [u32]) -> Rows<'r, I> {
    let shape = [rows.len(), all.n()];
    if dense(all) {
        return TensorRef::of(all.together(rows.start, rows.len()).expect("all are"), &shape).rows();
    }
    let copy = &mut as_elements_mut::<I>(room)[..shape[0] * shape[1]];
    cpu.chunks(copy, COPIED * shape[1], |some, copy| {
        let row = |r: usize| all.row(rows.start + some * COPIED + r);
        copy.chunks_mut(shape[1]).enumerate().for_each(|(r, copy)| copy.copy_from_slice(row(r)));
    });
    TensorRef::of(&*copy, &shape).rows()
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests;
