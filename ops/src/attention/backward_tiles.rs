//! The gradient of attention in tiles of query rows and blocks of keys: a tile has p and g of its pairs in the second
//! cache, and three products go over them, `dv += p^T dout`, `dk += g^T q` and `dq += g k`.
//!
//! A chain of dk or dv goes on from tile to tile, rows ascending; one of dq ends with its block of 256 keys. Where a
//! call has enough (sequence, key head) pairs for the threads, each is one task, which makes all three from one p and
//! g. Where it has not, or the budget is small, some keys are a task that makes dk and dv, and a tile of rows one that
//! makes dq: p and g are made twice, and nothing is kept beside a tile.
//!
//! Where `VDPBF16PS` pays, scores and the chains of `dout * v` are made with it, unless an operand of the call is so small that it
//! could flush something.
//!
//! Pairs that are not visible have +0 for p and g. As a sum begins with +0 and its last step adds to +0, such a step
//! changes nothing, unless it multiplies an infinity or NaN: then they are left out one by one.

use crate::attention::backward_job::{Gradients, Job};
use crate::attention::job::{BLOCK, Range, add_to};
use crate::gemm::tile::{Left, Order, Right, Tile, dot_is_exact, dot_tile, fma_tile};
use crate::math::{exp_or_nothing, tanh};
use crate::pack::{PANEL, as_floats_mut, as_words, as_words_mut, bf16_slice, f32_of_rows, least_of_all, pairs_of_rows};
use crate::simd::prefetch::Prefetch;
use crate::simd::unroll::Unrolled;
use crate::simd::{Kernel, MAX_LANES, Simd, load_at, narrow_at};
use crate::workspace::{Need, Plan};
use crate::{Cpu, Element, Tf32};
use half::bf16;

/// Most query rows of a tile.
const ROWS: usize = 96;
/// Rows, or keys, of a product: twice as many as fill the registers.
const GROUP: usize = 24;
/// Words from one row of p or g to the next, beside its keys: rows a power of two apart would meet in the cache.
const BESIDE: usize = 16;
/// Elements that [`deltas`] lays out at a time.
const STEPS: usize = 64;

/// How a call is cut into tiles.
#[derive(Clone, Copy)]
pub struct Tiles {
    /// Whether a (sequence, key head) pair is one task.
    whole: bool,
    /// Query rows of a tile.
    rows: usize,
    /// Keys at a time, a multiple of [`PANEL`]; a block where tasks are whole.
    keys: usize,
    workers: usize,
    /// Whether scores and the chains of `dout * v` are made of pairs of bf16.
    pairs: bool,
    /// Facts of the call: query heads of a group, D and E, T and S, and how many rows have a delta.
    group: usize,
    head_dim: usize,
    value_dim: usize,
    all_rows: usize,
    all_keys: usize,
    deltas: usize,
}

impl Tiles {
    pub fn preferred<I: Element>(job: &Job<I>) -> Tiles {
        let (shape, threads) = (job.shape, job.cpu.threads());
        let tasks = shape.batch * shape.kv_heads;
        Tiles {
            whole: tasks.is_multiple_of(threads) || tasks > 4 * threads,
            rows: ROWS.min(shape.queries.next_multiple_of(GROUP)).max(1),
            keys: BLOCK.min(shape.keys.next_multiple_of(PANEL)).max(PANEL),
            workers: threads,
            pairs: I::IS_BF16 && job.cpu.isa().dots_pay(),
            group: shape.q_heads / shape.kv_heads,
            head_dim: shape.head_dim,
            value_dim: shape.value_dim,
            all_rows: shape.queries,
            all_keys: shape.keys,
            deltas: shape.batch * shape.q_heads * shape.queries,
        }
    }

    /// The next smaller plan: nothing kept beside a tile, fewer rows, fewer keys, fewer workers.
    pub fn smaller(&self) -> Option<Tiles> {
        let plan = *self;
        Some(match plan {
            Tiles { whole: true, .. } => Tiles { whole: false, ..plan },
            Tiles { rows: 2.., .. } => Tiles { rows: plan.rows / 2, ..plan },
            Tiles { keys: 33.., .. } => Tiles { keys: (plan.keys / 2).next_multiple_of(PANEL), ..plan },
            Tiles { workers: 2.., .. } => Tiles { workers: plan.workers / 2, ..plan },
            _ => return None,
        })
    }

    /// Columns of rows of D and of E elements: whole vectors.
    fn columns(&self) -> [usize; 2] {
        [self.head_dim, self.value_dim].map(|dim| dim.next_multiple_of(16))
    }

    fn stride(&self) -> usize {
        self.keys + BESIDE
    }

    /// Words of what a tile takes, in the order of [`Room`], and of what is kept beside it.
    fn words(&self) -> [usize; 15] {
        let Tiles { rows, keys, head_dim, value_dim, .. } = *self;
        let [d, e] = self.columns();
        // Totals: of all rows and keys, or of a tile. A head by itself needs none for keys.
        let (all_rows, all_keys) = if self.whole { (self.all_rows, self.all_keys) } else { (rows, keys) };
        let all_keys = if self.group == 1 { 0 } else { all_keys };
        let weights = rows * self.stride();
        let pairs = |dim: usize| if self.pairs { rows * dim.div_ceil(2) } else { 0 };
        [
            keys * head_dim,
            keys * value_dim,
            keys * d,
            rows * d,
            rows * e,
            pairs(head_dim),
            pairs(value_dim),
            weights,
            weights,
            rows * d,
            keys * d,
            keys * e,
            all_rows.saturating_mul(d),
            all_keys.saturating_mul(d),
            all_keys.saturating_mul(e),
        ]
    }
}

impl Plan for Tiles {
    fn need(&self) -> Need {
        let slot = self.words().into_iter().fold(0usize, usize::saturating_add);
        Need { shared: self.deltas, slot, workers: self.workers, pairs: 0 }
    }

    fn tiles(&self) -> [(&'static str, usize); 3] {
        [("rows", self.rows), ("keys", self.keys), ("whole", usize::from(self.whole))]
    }
}

/// The workspace of a task, f32; rows of D and E elements are filled up to whole vectors.
struct Room<'a> {
    /// Panels of [`PANEL`] keys, and of values: element c of key j at `c * PANEL + j`; or pairs of elements.
    keys_across: &'a mut [f32],
    values_across: &'a mut [f32],
    /// Rows of keys, of queries, of dout.
    keys: &'a mut [f32],
    queries: &'a mut [f32],
    douts: &'a mut [f32],
    /// The same as pairs, [`GROUP`] rows side by side.
    query_pairs: &'a mut [f32],
    dout_pairs: &'a mut [f32],
    /// Scores, then p; dp, then g: a row for each query.
    p: &'a mut [f32],
    g: &'a mut [f32],
    /// Chains that are not over: of a tile of dq, of some keys of dk and dv.
    dq: &'a mut [f32],
    dk: &'a mut [f32],
    dv: &'a mut [f32],
    /// What chains are added to.
    all_dq: &'a mut [f32],
    all_dk: &'a mut [f32],
    all_dv: &'a mut [f32],
}

impl<'a> Room<'a> {
    fn of(plan: &Tiles, slot: &'a mut [u32]) -> Room<'a> {
        let mut rest = as_floats_mut(slot);
        let parts = plan.words().map(|words| {
            let (part, behind) = std::mem::take(&mut rest).split_at_mut(words);
            rest = behind;
            part
        });
        let [keys_across, values_across, keys, queries, douts, query_pairs, dout_pairs, rest @ ..] = parts;
        let [p, g, dq, dk, dv, all_dq, all_dk, all_dv] = rest;
        Room {
            keys_across,
            values_across,
            keys,
            queries,
            douts,
            query_pairs,
            dout_pairs,
            p,
            g,
            dq,
            dk,
            dv,
            all_dq,
            all_dk,
            all_dv,
        }
    }
}

/// Runs all tasks.
pub fn run<I: Element, O: Element>(
    job: &Job<I>,
    plan: &Tiles,
    shared: &mut [u32],
    slots: Vec<&mut [u32]>,
    gradients: &Gradients<O>,
) {
    let (batch, kv_heads, q_heads) = (job.shape.batch, job.shape.kv_heads, job.shape.q_heads);
    let (queries, keys) = (job.shape.queries, job.shape.keys);
    let plan = &Tiles { pairs: plan.pairs && dots_are_exact(job), ..*plan };
    let isa = job.cpu.isa();
    job.cpu.ledger().ran(if plan.pairs { isa } else { isa.without_dot() }.name());
    let deltas = deltas(job, as_floats_mut(shared));
    let (all_rows, all_keys) = (0..queries, 0..keys);
    if plan.whole {
        job.cpu.each_in(slots, batch * kv_heads, |slot, task| {
            let (b, kv_head) = (task / kv_heads, task % kv_heads);
            let (rows, keys) = (all_rows.clone(), all_keys.clone());
            let heads = heads_of(job, kv_head);
            Task { job, plan, deltas, b, kv_head, heads, rows, keys, dq: true, dkv: true }.run(slot, gradients);
        });
        return;
    }
    let (tiles, pieces) = (queries.div_ceil(plan.rows), keys.div_ceil(plan.keys));
    let of_keys = batch * kv_heads * pieces;
    job.cpu.each_in(slots, of_keys + batch * q_heads * tiles, |slot, task| {
        let task = if task < of_keys {
            // The first keys are seen by the most rows.
            let (piece, entry) = (task / (batch * kv_heads), task % (batch * kv_heads));
            let (b, kv_head, from) = (entry / kv_heads, entry % kv_heads, piece * plan.keys);
            let (rows, keys) = (all_rows.clone(), from..keys.min(from + plan.keys));
            Task { job, plan, deltas, b, kv_head, heads: heads_of(job, kv_head), rows, keys, dq: false, dkv: true }
        } else {
            // And the last rows see the most keys.
            let (tile, entry) = ((task - of_keys) / (batch * q_heads), (task - of_keys) % (batch * q_heads));
            let (b, head, from) = (entry / q_heads, entry % q_heads, (tiles - 1 - tile) * plan.rows);
            let (kv_head, heads) = (head / (q_heads / kv_heads), head..head + 1);
            let (rows, keys) = (from..queries.min(from + plan.rows), all_keys.clone());
            Task { job, plan, deltas, b, kv_head, heads, rows, keys, dq: true, dkv: false }
        };
        task.run(slot, gradients);
    });
}

/// Whether `VDPBF16PS` flushes nothing of scores and of `dout * v`.
fn dots_are_exact<I: Element>(job: &Job<I>) -> bool {
    let least = |operand: &[I]| least_of_all(job.cpu, bf16_slice(operand).expect("bf16"));
    dot_is_exact(least(job.q.data()), least(job.k.data())) && dot_is_exact(least(job.dout.data()), least(job.v.data()))
}

/// The query heads of a key head.
fn heads_of<I>(job: &Job<I>, kv_head: usize) -> std::ops::Range<usize> {
    let group = job.shape.q_heads / job.shape.kv_heads;
    kv_head * group..(kv_head + 1) * group
}

/// `delta[b][head][t]`: a chain of `dout * out`.
fn deltas<'a, I: Element>(job: &Job<I>, deltas: &'a mut [f32]) -> &'a [f32] {
    let (queries, heads) = (job.shape.queries, job.shape.q_heads);
    job.cpu.chunks(deltas, queries, |entry, deltas| {
        let (b, head) = (entry / heads, entry % heads);
        let (mut dout, mut out) = ([0f32; STEPS * MAX_LANES], [0f32; STEPS * MAX_LANES]);
        for (i, deltas) in deltas.chunks_mut(MAX_LANES).enumerate() {
            let row = |r: usize| b * queries + i * MAX_LANES + r;
            let mut sums = [0f32; MAX_LANES];
            for from in (0..job.shape.value_dim).step_by(STEPS) {
                let steps = STEPS.min(job.shape.value_dim - from);
                let of_dout = |r: usize| &job.dout.get(row(r), head)[from..from + steps];
                let of_out = |r: usize| &job.out.get(row(r), head)[from..from + steps];
                f32_of_rows(job.cpu, deltas.len(), steps, of_dout, job.tf32(), &mut dout, MAX_LANES);
                f32_of_rows(job.cpu, deltas.len(), steps, of_out, Tf32::Disabled, &mut out, MAX_LANES);
                let [dout, out] = [&dout, &out].map(|side| &side[..steps * MAX_LANES]);
                job.cpu.dispatch(Chains { dout, out, sums: &mut sums });
            }
            deltas.copy_from_slice(&sums[..deltas.len()]);
        }
    });
    deltas
}

/// A chain in each lane.
struct Chains<'a> {
    dout: &'a [f32],
    out: &'a [f32],
    sums: &'a mut [f32; MAX_LANES],
}

impl Kernel for Chains<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for lane in (0..MAX_LANES).step_by(S::LANES) {
            let mut sum = load_at(s, &self.sums[..], lane, 0.0);
            for at in (0..self.dout.len()).step_by(MAX_LANES) {
                let (dout, out) = (load_at(s, self.dout, at + lane, 0.0), load_at(s, self.out, at + lane, 0.0));
                sum = s.fma(dout, out, sum);
            }
            narrow_at(s, sum, &mut self.sums[..], lane);
        }
    }
}

/// Some rows and some keys of a (sequence, key head) pair.
struct Task<'a, I> {
    job: &'a Job<'a, I>,
    plan: &'a Tiles,
    deltas: &'a [f32],
    b: usize,
    kv_head: usize,
    heads: std::ops::Range<usize>,
    /// In the order of the call.
    rows: std::ops::Range<usize>,
    /// From a multiple of `plan.keys` on.
    keys: std::ops::Range<usize>,
    /// What is made.
    dq: bool,
    dkv: bool,
}

/// A row of a tile: what its p and g are made with, and the keys it sees, from the first of the piece on.
#[derive(Clone, Copy, Default)]
struct Row {
    lse: f32,
    delta: f32,
    sees: Range,
}

/// The rows of a tile.
struct Seen {
    rows: [Row; ROWS],
    /// How many there are, and how many of them are tokens: these stand first.
    count: usize,
    tokens: usize,
}

impl Seen {
    /// From the first to the last key that one of these rows sees.
    fn keys(&self, rows: std::ops::Range<usize>) -> Range {
        let sees = || self.rows[rows.clone()].iter().map(|row| row.sees).filter(|sees| !sees.is_empty());
        let to = sees().map(|sees| sees.to).max().unwrap_or(0);
        Range { from: sees().map(|sees| sees.from).min().unwrap_or(0), to }
    }

    /// From the first to the last token that sees one of these keys.
    fn tokens(&self, keys: std::ops::Range<usize>) -> std::ops::Range<usize> {
        let sees = |row: &Row| row.sees.from.max(keys.start) < row.sees.to.min(keys.end);
        let rows = &self.rows[..self.tokens];
        match rows.iter().position(sees) {
            Some(first) => first..rows.iter().rposition(sees).expect("there is one") + 1,
            None => 0..0,
        }
    }
}

impl<I: Element> Task<'_, I> {
    fn run<O: Element>(&self, slot: &mut [u32], gradients: &Gradients<O>) {
        let Task { job, plan, .. } = *self;
        let mut room = Room::of(plan, slot);
        let shape = job.shape;
        let [d, e] = plan.columns();
        let (rows, end) = (self.rows.len(), self.keys.end.min(job.keys(self.b)));
        room.all_dk.fill(0.0);
        room.all_dv.fill(0.0);
        for head in self.heads.clone() {
            if self.dq {
                room.all_dq[..rows * d].fill(0.0);
                room.dq.fill(0.0);
            }
            // Keys that hold no data have gradients as well, where those are made.
            let keys = self.keys.start..if self.dkv { self.keys.end } else { end };
            for from in keys.clone().step_by(plan.keys) {
                let to = keys.end.min(from + plan.keys);
                if self.dkv {
                    room.dk.fill(0.0);
                    room.dv.fill(0.0);
                }
                if from < end {
                    self.piece(head, from..to.min(end), end, &mut room);
                }
                let (at, count) = (from - self.keys.start, to - from);
                if self.dkv && self.heads.len() == 1 {
                    self.finish_keys(from..to, room.dk, room.dv, gradients);
                } else if self.dkv {
                    add_to(job.cpu, &mut room.all_dk[at * d..][..count * d], &mut room.dk[..count * d]);
                    add_to(job.cpu, &mut room.all_dv[at * e..][..count * e], &mut room.dv[..count * e]);
                }
            }
            for (i, total) in self.rows.clone().zip(room.all_dq.chunks(d.max(1))).filter(|_| self.dq && d > 0) {
                let row = self.b * shape.queries + job.order.row(self.b, i);
                let at = (row * shape.q_heads + head) * shape.head_dim;
                // SAFETY: each (row, head) is one task's.
                let out = unsafe { gradients.dq.part(at, shape.head_dim) };
                job.cpu.dispatch(Finish { total, factor: job.parameters.scale.0, out });
            }
        }
        if self.dkv && self.heads.len() != 1 {
            self.finish_keys(self.keys.clone(), room.all_dk, room.all_dv, gradients);
        }
    }

    /// Writes dk and dv of some keys.
    fn finish_keys<O: Element>(&self, keys: std::ops::Range<usize>, dk: &[f32], dv: &[f32], gradients: &Gradients<O>) {
        let (shape, [d, e]) = (self.job.shape, self.plan.columns());
        for (i, j) in keys.enumerate() {
            let at = (self.b * shape.keys + j) * shape.kv_heads + self.kv_head;
            // SAFETY: each (key, key head) is one task's.
            let [dk_out, dv_out] = unsafe {
                [
                    gradients.dk.part(at * shape.head_dim, shape.head_dim),
                    gradients.dv.part(at * shape.value_dim, shape.value_dim),
                ]
            };
            let factor = self.job.parameters.scale.0;
            self.job.cpu.dispatch(Finish { total: &dk[i * d..][..d], factor, out: dk_out });
            // A product with 1 is exact.
            self.job.cpu.dispatch(Finish { total: &dv[i * e..][..e], factor: 1.0, out: dv_out });
        }
    }

    /// What the rows of a head make of some keys: chains of dk and dv, and terms of dq. The last key of all is before
    /// `end`.
    fn piece(&self, head: usize, piece: std::ops::Range<usize>, end: usize, room: &mut Room) {
        let Task { job, plan, .. } = *self;
        let [d, e] = plan.columns();
        // Laid out when a tile sees one of them.
        let mut keys_are_finite = None;
        for first in self.rows.clone().step_by(plan.rows) {
            let rows = first..self.rows.end.min(first + plan.rows);
            let seen = self.seen(head, rows.clone(), &piece);
            let sees = seen.keys(0..seen.count);
            let tile = (first - self.rows.start) * d;
            if !sees.is_empty() && (self.dq || seen.tokens > 0) {
                let keys_are_finite = *keys_are_finite.get_or_insert_with(|| self.lay_keys_out(&piece, room));
                let rows_are_finite = self.lay_rows_out(head, first, &seen, room);
                self.products(&seen, room);
                let finite = (keys_are_finite || !self.dq) && (rows_are_finite || !self.dkv);
                let skipped = (!finite).then(|| self.skipped(&seen, room));
                let (p, g, stride) = (&mut *room.p, &mut *room.g, plan.stride());
                let (cap, scale) = (job.parameters.cap, job.parameters.scale);
                weigh(job.cpu, Weigh { p, g, stride, rows: &seen.rows[..seen.count], columns: sees, cap, scale });
                if let Some(skipped) = &skipped {
                    let (dq, dkv) = (self.dq, self.dkv);
                    one_by_one(job.cpu, OneByOne { seen: &seen, skipped, room, stride, columns: [d, e], dq, dkv });
                } else {
                    self.add_tiles(&seen, room);
                }
            } else if plan.whole {
                continue;
            }
            // A chain of dq ends with its block.
            if self.dq && (piece.end.is_multiple_of(BLOCK) || piece.end == end) {
                let len = rows.len() * d;
                add_to(job.cpu, &mut room.all_dq[tile..][..len], &mut room.dq[..len]);
            }
        }
    }

    /// What each row of a tile sees of a piece, and what its weights are made with.
    fn seen(&self, head: usize, rows: std::ops::Range<usize>, piece: &std::ops::Range<usize>) -> Seen {
        let Task { job, b, .. } = *self;
        let (queries, heads) = (job.shape.queries, job.shape.q_heads);
        let tokens = job.order.tokens(b).clamp(rows.start, rows.end) - rows.start;
        let count = if self.dq { rows.len() } else { tokens };
        let mut seen = Seen { rows: [Row::default(); ROWS], count, tokens };
        for (i, row) in rows.zip(&mut seen.rows).take(count) {
            let t = job.order.row(b, i);
            let sees = job.range(b, t).within(piece.start, piece.end);
            let sees = Range { from: sees.from - piece.start, to: sees.to - piece.start };
            let (lse, delta) = (job.lse.row(b * queries + t)[head], self.deltas[(b * heads + head) * queries + t]);
            *row = Row { lse, delta, sees };
        }
        seen
    }

    /// Lays the keys and values of a piece out; whether the keys are finite.
    fn lay_keys_out(&self, piece: &std::ops::Range<usize>, room: &mut Room) -> bool {
        let Task { job, plan, b, kv_head, .. } = *self;
        let (shape, tf32) = (job.shape, job.tf32());
        let row = |j: usize| b * shape.keys + piece.start + j;
        let [d, _] = plan.columns();
        for first in (0..piece.len()).step_by(PANEL) {
            let count = PANEL.min(piece.len() - first);
            let of = |dim: usize| panel(first / PANEL, dim, plan.pairs);
            let (key, value) =
                (|j: usize| job.k.get(row(first + j), kv_head), |j: usize| job.v.get(row(first + j), kv_head));
            let keys = &mut room.keys_across[of(shape.head_dim)];
            let values = &mut room.values_across[of(shape.value_dim)];
            if plan.pairs {
                pairs_of_bf16_rows(job.cpu, count, shape.head_dim, key, bf16::NEG_ZERO, keys, PANEL);
                pairs_of_bf16_rows(job.cpu, count, shape.value_dim, value, bf16::NEG_ZERO, values, PANEL);
                continue;
            }
            f32_of_rows(job.cpu, count, shape.head_dim, key, tf32, keys, PANEL);
            f32_of_rows(job.cpu, count, shape.value_dim, value, tf32, values, PANEL);
        }
        if !self.dq {
            return true;
        }
        lay_out(job.cpu, [piece.len(); 2], |j: usize| job.k.get(row(j), kv_head), tf32, d, room.keys)
    }

    /// Lays the queries and gradients of a tile out; whether those of tokens are finite.
    fn lay_rows_out(&self, head: usize, first: usize, seen: &Seen, room: &mut Room) -> bool {
        let Task { job, plan, b, .. } = *self;
        let [d, e] = plan.columns();
        let row = |r: usize| b * job.shape.queries + job.order.row(b, first + r);
        let Seen { count, tokens, .. } = *seen;
        let (query, gradient) = (|r: usize| job.q.get(row(r), head), |r: usize| job.dout.get(row(r), head));
        for first in (0..count).step_by(GROUP).filter(|_| plan.pairs) {
            // Beside the -0 that ends an odd key stands +0.
            let (rows, [d, e]) = (GROUP.min(count - first), [job.shape.head_dim, job.shape.value_dim]);
            let (queries, douts) =
                (&mut room.query_pairs[first * d.div_ceil(2)..], &mut room.dout_pairs[first * e.div_ceil(2)..]);
            pairs_of_bf16_rows(job.cpu, rows, d, |r: usize| query(first + r), bf16::ZERO, queries, rows);
            pairs_of_bf16_rows(job.cpu, rows, e, |r: usize| gradient(first + r), bf16::ZERO, douts, rows);
        }
        // Both, whatever the first says.
        lay_out(job.cpu, [count, tokens], query, job.tf32(), d, room.queries)
            & lay_out(job.cpu, [count, tokens], gradient, job.tf32(), e, room.douts)
    }

    /// Scores, and the chains of `dout * v`, of all pairs that may be visible.
    fn products(&self, seen: &Seen, room: &mut Room) {
        let Task { job, plan, .. } = *self;
        let (dims, columns, stride) = ([job.shape.head_dim, job.shape.value_dim], plan.columns(), plan.stride());
        for first in (0..seen.count).step_by(GROUP) {
            let rows = GROUP.min(seen.count - first);
            let sees = seen.keys(first..first + rows);
            for number in sees.from / PANEL..sees.to.div_ceil(PANEL) {
                let sides = [
                    (&*room.queries, &*room.query_pairs, &*room.keys_across, &mut *room.p),
                    (&*room.douts, &*room.dout_pairs, &*room.values_across, &mut *room.g),
                ];
                for ((rows_of, pairs_of, across, out), (dim, columns)) in
                    sides.into_iter().zip(dims.into_iter().zip(columns))
                {
                    let across = &across[panel(number, dim, plan.pairs)];
                    let out = &mut out[first * stride + number * PANEL..];
                    // One chain is a tree of one segment.
                    let (bounds, out_stride) = ([0, dim], stride);
                    let order = Order::Tree(&bounds);
                    if plan.pairs {
                        let data = as_words(&pairs_of[first * dim.div_ceil(2)..]);
                        let left = Left { data, row_stride: 1, step: rows };
                        let right = Right::Vnni(as_words(across), PANEL);
                        dot_tile(job.cpu, Tile { left, right, order, rows, columns: PANEL, out, out_stride });
                        continue;
                    }
                    // Without elements the left operand is never read.
                    let left =
                        Left { data: rows_of.get(first * columns..).unwrap_or(&[]), row_stride: columns, step: 1 };
                    let right = Right::F32(across, PANEL);
                    fma_tile(job.cpu, Tile { left, right, order, rows, columns: PANEL, out, out_stride });
                }
            }
        }
    }

    /// Visible pairs whose score is -inf; with softcap there are none.
    fn skipped(&self, seen: &Seen, room: &Room) -> Skipped {
        let mut skipped = Skipped([[0; BLOCK / 64]; ROWS]);
        for (r, row) in seen.rows[..seen.count].iter().enumerate().filter(|_| self.job.parameters.cap.is_none()) {
            let scores = &room.p[r * self.plan.stride()..];
            for j in (row.sees.from..row.sees.to).filter(|&j| scores[j] == f32::NEG_INFINITY) {
                skipped.0[r][j / 64] |= 1 << (j % 64);
            }
        }
        skipped
    }

    /// Adds a tile to the chains of dk and dv, of tokens, and to that of dq.
    fn add_tiles(&self, seen: &Seen, room: &mut Room) {
        let (cpu, stride, [d, e]) = (self.job.cpu, self.plan.stride(), self.plan.columns());
        let all = seen.keys(0..seen.count);
        for from in (all.from..all.to).step_by(GROUP).filter(|_| self.dkv) {
            let keys = from..all.to.min(from + GROUP);
            let rows = seen.tokens(keys.clone());
            let sides = [(&*room.p, &*room.douts, &mut *room.dv, e), (&*room.g, &*room.queries, &mut *room.dk, d)];
            for (weights, of_rows, out, columns) in sides.into_iter().filter(|side| side.3 > 0 && !rows.is_empty()) {
                let left = Left { data: &weights[rows.start * stride + from..], row_stride: 1, step: stride };
                let right = Right::F32(&of_rows[rows.start * columns..], columns);
                let (order, out) = (Order::Chain(rows.len()), &mut out[from * columns..]);
                fma_tile(cpu, Tile { left, right, order, rows: keys.len(), columns, out, out_stride: columns });
            }
        }
        for first in (0..seen.count).step_by(GROUP).filter(|_| self.dq && d > 0) {
            let rows = GROUP.min(seen.count - first);
            let keys = seen.keys(first..first + rows);
            if keys.is_empty() {
                continue;
            }
            let left = Left { data: &room.g[first * stride + keys.from..], row_stride: stride, step: 1 };
            let right = Right::F32(&room.keys[keys.from * d..], d);
            let (order, out) = (Order::Chain(keys.to - keys.from), &mut room.dq[first * d..]);
            fma_tile(cpu, Tile { left, right, order, rows, columns: d, out, out_stride: d });
        }
    }
}

/// Where a panel of rows of `dim` elements stands.
fn panel(number: usize, dim: usize, pairs: bool) -> std::ops::Range<usize> {
    let words = PANEL * if pairs { dim.div_ceil(2) } else { dim };
    number * words..(number + 1) * words
}

/// [`pairs_of_rows`] of any elements that are bf16.
fn pairs_of_bf16_rows<'a, I: Element>(
    cpu: &Cpu,
    rows: usize,
    dim: usize,
    row: impl Fn(usize) -> &'a [I],
    pad: bf16,
    out: &mut [f32],
    stride: usize,
) {
    let row = |r: usize| bf16_slice(row(r)).expect("bf16");
    pairs_of_rows::<true>(cpu, rows, dim, row, pad, as_words_mut(out), stride, Prefetch::NONE);
}

/// A bit for each row of a tile and key of a piece.
struct Skipped([[u64; BLOCK / 64]; ROWS]);

/// Lays rows out as f32, each filled up with +0 to `columns`; whether the first `counts[1]` of `counts[0]` have no NaN
/// and no infinity.
fn lay_out<'a, I: Element>(
    cpu: &Cpu,
    counts: [usize; 2],
    row: impl Fn(usize) -> &'a [I],
    tf32: Tf32,
    columns: usize,
    out: &mut [f32],
) -> bool {
    cpu.dispatch(LayOut { counts, row, tf32, columns, out })
}

struct LayOut<'o, F> {
    counts: [usize; 2],
    row: F,
    tf32: Tf32,
    columns: usize,
    out: &'o mut [f32],
}

impl<'a, I: Element, F: Fn(usize) -> &'a [I]> Kernel for LayOut<'_, F> {
    type Output = bool;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> bool {
        let LayOut { counts: [count, checked], row, tf32, columns, out } = self;
        let mut finite = true;
        for r in 0..count {
            let (row, out) = (row(r), &mut out[r * columns..][..columns]);
            assert!(row.len() <= columns);
            let whole = row.len() - row.len() % S::LANES;
            for at in (0..whole).step_by(S::LANES) {
                // SAFETY: at + LANES <= whole, which is at most the length of both.
                unsafe { s.store(I::load_lanes(s, row.as_ptr().add(at)), out.as_mut_ptr().add(at)) };
            }
            for (v, out) in row[whole..].iter().zip(&mut out[whole..]) {
                *out = v.widen();
            }
            out[row.len()..].fill(0.0);
            if tf32 == Tf32::Enabled {
                out.iter_mut().for_each(|v| *v = tf32.operand(*v));
            }
            for at in (0..columns).step_by(S::LANES).take_while(|_| r < checked) {
                finite &= !s.any_nan_or_inf(s.abs(load_at(s, out, at, 0.0)));
            }
        }
        finite
    }
}

/// Runs [`Weigh`]. Not generic, so that it is compiled once.
fn weigh(cpu: &Cpu, kernel: Weigh) {
    cpu.dispatch(kernel);
}

/// Makes p of scores and g of `dout * v`, in place, where rows see keys, and +0 elsewhere in `columns`.
struct Weigh<'a> {
    p: &'a mut [f32],
    g: &'a mut [f32],
    stride: usize,
    rows: &'a [Row],
    columns: Range,
    /// `(cap, f32(scale / cap))`.
    cap: Option<(f32, f32)>,
    /// `hi` and `lo`.
    scale: (f32, f32),
}

impl Kernel for Weigh<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Weigh { p, g, stride, rows, columns, cap, scale } = self;
        let four = Unrolled(Unrolled(s));
        for ((row, p), g) in rows.iter().zip(p.chunks_mut(stride)).zip(g.chunks_mut(stride)) {
            let Range { from, to } = row.sees;
            if row.sees.is_empty() {
                p[columns.from..columns.to].fill(0.0);
                g[columns.from..columns.to].fill(0.0);
                continue;
            }
            // Whole vectors: what they make of other keys is overwritten.
            assert!(to <= stride - BESIDE && p.len() == stride && g.len() == stride);
            let mut at = from - from % S::LANES;
            while at < to {
                // SAFETY: `at` is a multiple of LANES below `to`, and BESIDE at least LANES.
                unsafe {
                    if to - at > S::LANES && at + 4 * S::LANES <= stride {
                        row.weigh(four, p.as_mut_ptr().add(at), g.as_mut_ptr().add(at), cap, scale);
                        at += 4 * S::LANES;
                    } else {
                        row.weigh(s, p.as_mut_ptr().add(at), g.as_mut_ptr().add(at), cap, scale);
                        at += S::LANES;
                    }
                }
            }
            for side in [p, g] {
                side[columns.from..from].fill(0.0);
                side[to..columns.to].fill(0.0);
            }
        }
    }
}

impl Row {
    /// p and g of a vector of keys.
    ///
    /// # Safety
    /// A vector starts at both places.
    #[inline(always)]
    unsafe fn weigh<S: Simd>(&self, s: S, p: *mut f32, g: *mut f32, cap: Option<(f32, f32)>, (hi, lo): (f32, f32)) {
        // SAFETY: the caller's promise.
        let (score, dp) = unsafe { (s.load(p), s.load(g)) };
        let difference = s.sub(dp, s.splat(self.delta));
        let (weight, change) = match cap {
            Some((cap, factor)) => {
                let t = tanh(s, s.mul(score, s.splat(factor)));
                let weight = exp_or_nothing(s, s.sub(s.mul(s.splat(cap), t), s.splat(self.lse)));
                (weight, s.mul(s.mul(weight, difference), s.fma(s.neg(t), t, s.splat(1.0))))
            }
            None => {
                let d = s.fma(score, s.splat(lo), s.fma(score, s.splat(hi), s.splat(-self.lse)));
                let weight = exp_or_nothing(s, d);
                // A score of -inf counts as invisible.
                let lowest = s.splat(f32::NEG_INFINITY);
                let visible = |v: S::F| s.select_ge(lowest, score, s.splat(0.0), v);
                (visible(weight), visible(s.mul(weight, difference)))
            }
        };
        // SAFETY: the caller's promise.
        unsafe {
            s.store(weight, p);
            s.store(change, g);
        }
    }
}

/// Runs [`OneByOne`]. Not generic, so that it is compiled once.
fn one_by_one(cpu: &Cpu, kernel: OneByOne) {
    cpu.dispatch(kernel);
}

/// Adds a tile to its chains pair by pair, those that are visible alone.
struct OneByOne<'a, 'r> {
    seen: &'a Seen,
    skipped: &'a Skipped,
    room: &'a mut Room<'r>,
    stride: usize,
    /// Of rows of D and of E elements.
    columns: [usize; 2],
    dq: bool,
    dkv: bool,
}

impl Kernel for OneByOne<'_, '_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let OneByOne { seen, skipped, room, stride, columns: [d, e], dq, dkv } = self;
        for (r, row) in seen.rows[..seen.count].iter().enumerate() {
            for j in row.sees.from..row.sees.to {
                if skipped.0[r][j / 64] >> (j % 64) & 1 == 1 {
                    continue;
                }
                let (p, g) = (room.p[r * stride + j], room.g[r * stride + j]);
                if dq {
                    step(s, g, &room.keys[j * d..][..d], &mut room.dq[r * d..][..d]);
                }
                if dkv && r < seen.tokens {
                    step(s, g, &room.queries[r * d..][..d], &mut room.dk[j * d..][..d]);
                    step(s, p, &room.douts[r * e..][..e], &mut room.dv[j * e..][..e]);
                }
            }
        }
    }
}

/// `sums = fma(weight, row, sums)`.
#[inline(always)]
fn step<S: Simd>(s: S, weight: f32, row: &[f32], sums: &mut [f32]) {
    for at in (0..row.len()).step_by(S::LANES) {
        let sum = s.fma(s.splat(weight), load_at(s, row, at, 0.0), load_at(s, sums, at, 0.0));
        narrow_at(s, sum, sums, at);
    }
}

/// `total * factor`, last rounding.
struct Finish<'a, O> {
    total: &'a [f32],
    factor: f32,
    out: &'a mut [O],
}

impl<O: Element> Kernel for Finish<'_, O> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let total = &self.total[..self.out.len()];
        for at in (0..total.len()).step_by(S::LANES) {
            // A chain that nothing was added to may be -0.
            let total = s.add(s.splat(0.0), load_at(s, total, at, 0.0));
            narrow_at(s, s.mul(total, s.splat(self.factor)), self.out, at);
        }
    }
}
