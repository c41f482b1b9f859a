//! Few query rows to a key head (decode): keys and values are read once, in the order of memory, all heads of a block
//! together. Three passes, each over (sequence, block) side by side: scores, and what the softmax must know of them;
//! weights and the sums of every block; and the blocks joined, ascending.

use super::ahead::{Ahead, Next};
use crate::attention::dot_rows::{DIMENSIONS, Head, Keys, MAX_QUERIES, dot_rows, heads_at_once};
use crate::attention::job::{BLOCK, Job, Range, Row, Task, add_to, max_exponent};
use crate::gemm::tile::{Left, MAX_ROWS, Order, Right, Tile, dot_is_exact, dot_tile, fma_tile, fma_tile_on};
use crate::math::{is_small, tanh, weigh};
use crate::pack::{
    PANEL, RowsSideBySide, as_floats, as_floats_mut, bf16_slice, f32_of_rows, f32_row, least_magnitude, least_of_vnni,
    pairs_of_rows,
};
use crate::parallel::SharedOut;
use crate::simd::prefetch::Prefetch;
use crate::simd::scalar::Scalar;
use crate::simd::unroll::{eight, of_eight, vectors};
use crate::simd::{Kernel, MAX_LANES, Simd, load_at, narrow_at};
use crate::workspace::memory::LINE;
use crate::workspace::{Need, Plan};
use crate::{Cpu, Element};
use half::bf16;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Work for one worker is at least this many bytes of keys and values: less does not pay for waking it.
const WORTHWHILE: usize = 128 << 10;

/// Words of workspace that stay in the L2 of a worker: sequences wait for their turn rather than push out the
/// scores of others.
const KEPT: usize = 256 << 10;

/// How a call is cut: so many sequences at a time.
#[derive(Clone, Copy)]
pub struct Streams {
    /// Sequences at a time.
    sequences: usize,
    workers: usize,
    /// Facts of the call: query rows to a key head at most, key heads, blocks of keys that a sequence sees at most, words
    /// of a query and of a key, columns of the values, and whether those are read in place.
    rows: usize,
    kv_heads: usize,
    blocks: usize,
    query: usize,
    key: usize,
    columns: usize,
    in_place: bool,
    /// Whether queries are pairs of bf16, and keys.
    pairs: [bool; 2],
}

/// What is kept of a row's scores in one block: the largest, whether one is NaN or +inf (1), whether one is -inf (1), and
/// later the sum of the weights.
const STATISTICS: usize = 4;

impl Streams {
    /// `None` where there are too many query rows for a tile.
    pub fn preferred<I: Element>(job: &Job<I>) -> Option<Streams> {
        let shape = job.shape;
        let rows = job.most_queries() * job.group();
        if rows == 0 || rows > MAX_ROWS {
            return None;
        }
        let seen = |b: usize| {
            let Range { from, to } = job.seen(b);
            to.div_ceil(BLOCK) - from / BLOCK
        };
        let blocks = (0..shape.batch).map(seen).max().unwrap_or(0);
        let bytes = shape.batch * blocks * BLOCK * shape.kv_heads * (shape.head_dim + shape.value_dim) * size_of::<I>();
        let (d, pairs) = (shape.head_dim, [I::IS_BF16 && job.dots(), I::IS_BF16]);
        // Beside the -0 that ends an odd row of pairs stands a zero.
        let query = if pairs[0] { d.div_ceil(2) } else { d.next_multiple_of(2) };
        let all = Streams {
            sequences: shape.batch,
            workers: job.cpu.threads().min(bytes / WORTHWHILE + 1),
            rows,
            kv_heads: shape.kv_heads,
            blocks,
            query,
            key: if I::IS_BF16 { d.div_ceil(2) } else { d },
            columns: shape.value_dim.next_multiple_of(16),
            in_place: job.values_in_place(),
            pairs,
        };
        // As many at a time as the caches keep what stands between the passes of, evenly.
        let kept = KEPT * all.workers / all.sequence_words().max(1);
        let turns = shape.batch.div_ceil(kept.max(1)).max(1);
        Some(Streams { sequences: shape.batch.div_ceil(turns), ..all })
    }

    /// Fewer sequences at a time.
    pub fn smaller(&self) -> Option<Streams> {
        (self.sequences > 1).then(|| Streams { sequences: self.sequences.div_ceil(2), ..*self })
    }

    /// Words of the queries of one (sequence, key head): the rows side by side, then their smallest nonzero magnitude.
    fn query_words(&self) -> usize {
        (self.query * self.rows).next_multiple_of(LINE) + LINE
    }

    /// Words of what the softmax knows of the rows of one (sequence, key head).
    fn state_words(&self) -> usize {
        (2 * self.rows).next_multiple_of(LINE)
    }

    /// Words of one (sequence, block, key head): scores, sums of values, and statistics of each row.
    fn block_words(&self) -> usize {
        (self.rows * (BLOCK + self.columns + STATISTICS)).next_multiple_of(LINE)
    }

    /// Words of a sequence.
    fn sequence_words(&self) -> usize {
        let parts = self.blocks.saturating_mul(self.block_words());
        (self.query_words() + self.state_words()).saturating_add(parts).saturating_mul(self.kv_heads)
    }

    /// Words that a worker lays keys or values out in: a panel of keys, or as many values.
    fn panel_words(&self) -> usize {
        PANEL * self.key.max(if self.in_place { 0 } else { self.columns })
    }
}

impl Plan for Streams {
    fn need(&self) -> Need {
        let queries = self.sequences * self.kv_heads * self.query_words();
        let shared = self.sequences.saturating_mul(self.sequence_words());
        let [pairs_of_queries, pairs_of_keys] = self.pairs.map(usize::from);
        let pairs = pairs_of_queries * queries + pairs_of_keys * self.panel_words() * self.workers;
        Need { shared, slot: self.panel_words(), workers: self.workers, pairs }
    }

    fn tiles(&self) -> [(&'static str, usize); 3] {
        [("sequences", self.sequences), ("rows", self.rows), ("keys", BLOCK)]
    }
}

/// One (sequence, block, key head) of the workspace.
struct Part<'a> {
    /// `[rows][256]`, keys adjacent.
    scores: &'a mut [f32],
    /// `[rows][columns]`.
    sums: &'a mut [f32],
    statistics: &'a mut [[f32; STATISTICS]],
}

impl<'a> Part<'a> {
    #[inline(always)]
    fn new(words: &'a mut [u32], plan: &Streams) -> Part<'a> {
        let (scores, rest) = as_floats_mut(words).split_at_mut(plan.rows * BLOCK);
        let (sums, rest) = rest.split_at_mut(plan.rows * plan.columns);
        Part { scores, sums, statistics: &mut rest.as_chunks_mut().0[..plan.rows] }
    }
}

/// All parts of a pass.
struct Parts<'a> {
    words: SharedOut<'a, u32>,
    plan: &'a Streams,
}

impl Parts<'_> {
    /// The part of a key head in the block that stands at `place`.
    ///
    /// # Safety
    /// It belongs to this task, and no other `Part` of the same place and head is alive.
    #[inline(always)]
    unsafe fn of(&self, place: usize, head: usize) -> Part<'_> {
        let words = self.plan.block_words();
        // SAFETY: parts do not overlap; the rest is the caller's promise.
        Part::new(unsafe { self.words.part((place * self.plan.kv_heads + head) * words, words) }, self.plan)
    }
}

/// Runs all passes. Returns how many tiles of scores took the slow path.
pub fn run<I: Element, O: Element>(
    job: &Job<I>,
    plan: &Streams,
    shared: &mut [u32],
    mut slots: Vec<&mut [u32]>,
    out: &SharedOut<O>,
    lse: &SharedOut<f32>,
) -> usize {
    let slow = (0..job.shape.batch)
        .step_by(plan.sequences)
        .map(|first| {
            let count = plan.sequences.min(job.shape.batch - first);
            let heads = plan.sequences * plan.kv_heads;
            let (queries, rest) = shared.split_at_mut(heads * plan.query_words());
            let (states, parts) = rest.split_at_mut(heads * plan.state_words());
            Pass { job, plan, first, count }.run(queries, states, parts, &mut slots, out, lse)
        })
        .sum();
    if job.dots() {
        job.cpu.ledger().ran(job.cpu.isa().name());
    }
    if slow > 0 || !job.dots() {
        job.cpu.ledger().ran(job.cpu.isa().without_dot().name());
    }
    slow
}

/// Some sequences from `first` on.
struct Pass<'a, I> {
    job: &'a Job<'a, I>,
    plan: &'a Streams,
    first: usize,
    count: usize,
}

/// What a worker does with its slot, a task, and the task it will have next.
type Work<'w> = dyn Fn(&mut [u32], &Task, Option<&Task>) + Sync + 'w;

impl<I: Element> Pass<'_, I> {
    fn run<O: Element>(
        &self,
        queries: &mut [u32],
        states: &mut [u32],
        parts: &mut [u32],
        slots: &mut [&mut [u32]],
        out: &SharedOut<O>,
        lse: &SharedOut<f32>,
    ) -> usize {
        let Pass { job, plan, first, count } = *self;
        let kv_heads = plan.kv_heads;
        for (i, queries) in queries.chunks_exact_mut(plan.query_words()).enumerate().take(count * kv_heads) {
            self.lay_queries_out(first + i / kv_heads, i % kv_heads, queries);
        }
        let queries = &*queries;
        let parts = Parts { words: SharedOut::new(parts), plan };
        // Blocks are cut by key heads where workers without one would make the call a third longer: that much longer take cut ones
        // (a Zen 3 takes 1.4 times as long), whose rows are pieces of memory.
        let blocks = count * plan.blocks;
        let rounds = blocks.div_ceil(plan.workers);
        let cuts = if 3 * rounds * plan.workers <= 4 * blocks { 1 } else { kv_heads };
        // What a sequence does not see is no task: the one before it prefetches what comes after.
        let task = |i: usize| {
            let (b, block, cut) = (first + i / cuts / plan.blocks, i / cuts % plan.blocks, i % cuts);
            let seen = job.seen(b);
            let place = (b - first) * plan.blocks + block;
            let block = seen.from / BLOCK + block;
            let keys = seen.within(block * BLOCK, (block + 1) * BLOCK);
            let heads = if cuts == 1 { Range { from: 0, to: kv_heads } } else { Range { from: cut, to: cut + 1 } };
            (!keys.is_empty()).then_some(Task { b, block, place, heads, keys })
        };
        let tasks: Vec<Task> = (0..count * plan.blocks * cuts).filter_map(task).collect();
        let slow = AtomicUsize::new(0);
        // A worker prefetches its next block while it is at work on one.
        let each = |slots: &mut [&mut [u32]], work: &Work| {
            job.cpu.each_with_next(slots.iter_mut(), tasks.len(), |slot, i, following| {
                work(slot, &tasks[i], following.map(|i| &tasks[i]));
            });
        };
        each(slots, &|slot, task, following| {
            slow.fetch_add(self.scores(task, following, queries, slot, &parts), Ordering::Relaxed);
        });
        for (i, states) in states.chunks_exact_mut(plan.state_words()).enumerate().take(count * kv_heads) {
            self.states(first + i / kv_heads, i % kv_heads, states, &parts);
        }
        let states = as_floats(states);
        each(slots, &|slot, task, following| self.sums(task, following, states, slot, &parts));
        job.cpu.each_in(slots.iter_mut(), count * kv_heads, |_, i| {
            self.join(first + i / kv_heads, i % kv_heads, states, &parts, out, lse);
        });
        slow.into_inner()
    }

    /// The rows that sequence b has.
    fn rows(&self, b: usize) -> usize {
        self.job.queries(b).len() * self.job.group()
    }

    /// The row of q and the query head of row r.
    fn query_and_head(&self, b: usize, kv_head: usize, r: usize) -> (usize, usize) {
        let group = self.job.group();
        (self.job.queries(b).start + r / group, kv_head * group + r % group)
    }

    /// Lays the queries side by side as the kernels read them, behind pairs their smallest nonzero magnitude.
    fn lay_queries_out(&self, b: usize, kv_head: usize, out: &mut [u32]) {
        let (job, rows, d) = (self.job, self.rows(b), self.job.shape.head_dim);
        let query = |r: usize| {
            let (t, head) = self.query_and_head(b, kv_head, r);
            job.query(t, head)
        };
        let (out, end) = out.split_at_mut(self.plan.query_words() - LINE);
        if !job.dots() {
            let out = as_floats_mut(out);
            f32_of_rows(job.cpu, rows, d, query, job.shape.tf32, out, rows);
            out[d * rows..self.plan.query * rows].fill(0.0);
            return;
        }
        let query = |r: usize| bf16_slice(query(r)).expect("bf16");
        pairs_of_rows::<true>(job.cpu, rows, d, query, bf16::ZERO, out, rows, Prefetch::NONE);
        let least = |r: usize| least_magnitude(job.cpu, query(r));
        end[0] = (0..rows).map(least).fold(f32::INFINITY, f32::min).to_bits();
    }

    /// The scores of a task and their statistics. Returns how many tiles took the slow path.
    fn scores(&self, task: &Task, following: Option<&Task>, queries: &[u32], slot: &mut [u32], parts: &Parts) -> usize {
        let job = self.job;
        let &Task { b, block, place, heads, keys } = task;
        let (rows, d) = (self.rows(b), job.shape.head_dim);
        let mut slow = 0;
        let as_they_stand = job.dots() && rows <= MAX_QUERIES && d.is_multiple_of(DIMENSIONS);
        let at_once = if as_they_stand && job.k.heads_adjacent() { heads_at_once(rows) } else { 1 };
        // Pairs of all heads of a row begin on whole words.
        let in_a_row = !job.dots() && job.k.heads_adjacent() && d.is_multiple_of(2);
        let queries = &queries[(b - self.first) * self.plan.kv_heads * self.plan.query_words()..];
        let ahead = Ahead::new(job, &job.k, d, heads);
        for from in (keys.from / PANEL * PANEL..keys.to).step_by(PANEL) {
            let to = (from + PANEL).min(keys.to);
            let next = Next::after(from + PANEL, task, following);
            let rows_of_k = (from..to).map(|j| job.k.at(job.key_row(b, j), 0));
            // Past the last one it stands again.
            let (mut starts, count) = ([0; PANEL], to - from);
            starts.iter_mut().zip(rows_of_k).for_each(|(start, at)| *start = at);
            let last = starts[count - 1];
            starts[count..].fill(last);
            if let Some(k) = bf16_slice(job.k.data()).filter(|_| in_a_row) {
                let keys = &RowsSideBySide::new(count, |j| &k[starts[j]..][..self.plan.kv_heads * d]);
                let asks = &|head: usize| ahead.of(next, Range { from: head, to: head + 1 }, true);
                let (panel, column) = (&mut slot[..PANEL * self.plan.key], from % BLOCK);
                job.cpu.dispatch(PanelScores { keys, d, heads, rows, queries, asks, panel, parts, place, column });
                continue;
            }
            let mut head = heads.from;
            while head < heads.to {
                let some = Range { from: head, to: heads.to.min(head + at_once) };
                head = some.to;
                let mut ahead = ahead.of(next, some, I::IS_BF16);
                if as_they_stand && self.scores_as_they_stand(task, from, &starts, some, queries, &mut ahead, parts) {
                    continue;
                }
                for head in some.from..some.to {
                    let ahead = std::mem::take(&mut ahead);
                    slow += self.scores_laid_out(task, from, (&starts, count), head, queries, slot, ahead, parts);
                }
            }
        }
        for head in heads.from..heads.to {
            // SAFETY: a block and its heads are one task's, and the tiles of the scores are done.
            let part = unsafe { parts.of(place, head) };
            for r in 0..rows {
                let seen = job.range(b, self.query_and_head(b, head, r).0).within(block * BLOCK, (block + 1) * BLOCK);
                let scores = &mut part.scores[r * BLOCK..][seen.from - block * BLOCK..seen.to - block * BLOCK];
                part.statistics[r] = block_statistics(job.cpu, BlockStatistics { scores, cap: job.cap });
            }
        }
        slow
    }

    /// The queries of a head, of those of a sequence, and their smallest nonzero magnitude.
    fn laid_out<'q>(&self, head: usize, queries: &'q [u32]) -> (&'q [u32], f32) {
        let len = self.plan.query_words();
        let all = &queries[head * len..][..len];
        (all, f32::from_bits(all[len - LINE]))
    }

    /// Scores of the panel from `from` on where its keys stand, for one head or two; `false` where that is not exact.
    #[allow(clippy::too_many_arguments)]
    fn scores_as_they_stand(
        &self,
        task: &Task,
        from: usize,
        starts: &[usize; PANEL],
        some: Range,
        queries: &[u32],
        ahead: &mut Prefetch,
        parts: &Parts,
    ) -> bool {
        let (job, d) = (self.job, self.job.shape.head_dim);
        let queries = |head: usize| self.laid_out(head, queries);
        let least_query = (some.from..some.to).fold(f32::INFINITY, |least, head| least.min(queries(head).1));
        if !dot_is_exact(least_query, f32::MAX) {
            return false;
        }
        let keys = Keys { k: &bf16_slice(job.k.data()).expect("bf16")[job.k.at(0, some.from)..], starts, len: d };
        let (rows, ahead) = (self.rows(task.b), std::mem::take(ahead));
        let head = |head: usize| {
            // SAFETY: a block and its heads are one task's; two heads are two parts, and both are gone with the call.
            let scores = unsafe { parts.of(task.place, head) }.scores;
            Head { query: queries(head).0, out: &mut scores[from % BLOCK..] }
        };
        let least = match some.to - some.from {
            1 => dot_rows(job.cpu, &mut [head(some.from)], rows, &keys, BLOCK, ahead),
            _ => dot_rows(job.cpu, &mut [head(some.from), head(some.from + 1)], rows, &keys, BLOCK, ahead),
        };
        dot_is_exact(least_query, least)
    }

    /// Scores of the panel from `from` on, its keys laid out in `slot` first. Returns how many tiles took the slow path.
    #[allow(clippy::too_many_arguments)]
    fn scores_laid_out(
        &self,
        task: &Task,
        from: usize,
        (starts, count): (&[usize; PANEL], usize),
        head: usize,
        queries: &[u32],
        slot: &mut [u32],
        ahead: Prefetch,
        parts: &Parts,
    ) -> usize {
        let Pass { job, plan, .. } = *self;
        let (rows, d, cpu) = (self.rows(task.b), job.shape.head_dim, job.cpu);
        let (query, least_query) = self.laid_out(head, queries);
        // SAFETY: a block and its heads are one task's, and this is the only part in hand.
        let part = unsafe { parts.of(task.place, head) };
        let out = &mut part.scores[from % BLOCK..];
        let panel = &mut slot[..PANEL * plan.key];
        let chain = [0, d];
        let (order, columns, out_stride) = (Order::Tree(&chain), PANEL, BLOCK);
        let keys = &job.k.data()[job.k.at(0, head)..];
        let right = if let Some(keys) = bf16_slice(keys) {
            let (pairs, pad) = (|j: usize| &keys[starts[j]..][..d], bf16::NEG_ZERO);
            if job.dots() {
                pairs_of_rows::<true>(cpu, count, d, pairs, pad, panel, PANEL, ahead);
                let least = match count {
                    PANEL => least_of_vnni(cpu, panel),
                    _ => (0..count).map(|j| least_magnitude(cpu, pairs(j))).fold(f32::INFINITY, f32::min),
                };
                if !dot_is_exact(least_query, least) {
                    self.fma_tile(task.b, head, panel, out);
                    return 1;
                }
                let (left, right) = (Left { data: query, row_stride: 1, step: rows }, Right::Vnni(panel, PANEL));
                dot_tile(cpu, Tile { left, right, order, rows, columns, out, out_stride });
                return 0;
            }
            pairs_of_rows::<false>(cpu, count, d, pairs, pad, panel, PANEL, Prefetch::NONE);
            Right::PairsAsking(panel, PANEL, ahead)
        } else {
            let key = |j: usize| &keys[starts[j]..][..d];
            f32_of_rows(cpu, count, d, key, job.shape.tf32, as_floats_mut(panel), PANEL);
            Right::F32(as_floats(panel), PANEL)
        };
        let left = Left { data: as_floats(query), row_stride: 1, step: rows };
        fma_tile(cpu, Tile { left, right, order, rows, columns, out, out_stride });
        0
    }

    /// Scores of one panel where `VDPBF16PS` is not exact: the queries are widened some steps of d at a time.
    fn fma_tile(&self, b: usize, head: usize, panel: &[u32], out: &mut [f32]) {
        const STEPS: usize = 64;
        let (job, rows) = (self.job, self.rows(b));
        let mut wide = [0f32; STEPS * MAX_ROWS];
        (0..rows).for_each(|r| out[r * BLOCK..][..PANEL].fill(0.0));
        for from in (0..job.shape.head_dim).step_by(STEPS) {
            let len = STEPS.min(job.shape.head_dim - from);
            let query = |r: usize| {
                let (t, head) = self.query_and_head(b, head, r);
                &job.query(t, head)[from..]
            };
            f32_of_rows(job.cpu, rows, len, query, job.shape.tf32, &mut wide, rows);
            if len % 2 == 1 {
                // Beside the -0 that ends a row of pairs.
                wide[len * rows..][..rows].fill(0.0);
            }
            let left = Left { data: &wide[..], row_stride: 1, step: rows };
            let (right, order) = (Right::Vnni(&panel[from / 2 * PANEL..], PANEL), Order::Chain(len));
            fma_tile(job.cpu, Tile { left, right, order, rows, columns: PANEL, out: &mut *out, out_stride: BLOCK });
        }
    }

    /// Joins what the blocks know of the rows of a key head: `[code, n]` for each, code 0 for no key that counts, 1 for a
    /// score of NaN or +inf, 2 for weights relative to `2^n`.
    fn states(&self, b: usize, head: usize, out: &mut [u32], parts: &Parts) {
        let states = as_floats_mut(out).as_chunks_mut::<2>().0;
        for (r, state) in states.iter_mut().enumerate().take(self.rows(b)) {
            let (mut largest, mut invalid) = (f32::NEG_INFINITY, false);
            for place in self.places(b) {
                // SAFETY: the workers are done, and this part is gone before the next.
                let statistics = unsafe { parts.of(place, head) }.statistics[r];
                (largest, invalid) = (largest.max(statistics[0]), invalid || statistics[1] > 0.0);
            }
            let sink = self.job.sink(self.query_and_head(b, head, r).1);
            *state = match max_exponent(largest, invalid, self.job.c.0, sink) {
                Row::Empty => [0.0, 0.0],
                Row::Invalid => [1.0, 0.0],
                Row::Valid { n, .. } => [2.0, n],
            };
        }
    }

    /// The state of row r of a key head, and with it `l`.
    fn state(&self, b: usize, head: usize, r: usize, states: &[f32], l: f32) -> Row {
        let at = ((b - self.first) * self.plan.kv_heads + head) * self.plan.state_words() + 2 * r;
        match states[at] {
            0.0 => Row::Empty,
            1.0 => Row::Invalid,
            _ => Row::Valid { n: states[at + 1], l },
        }
    }

    /// The places of the blocks that sequence b sees, ascending.
    fn places(&self, b: usize) -> std::ops::Range<usize> {
        let Range { from, to } = self.job.seen(b);
        let first = (b - self.first) * self.plan.blocks;
        first..first + (to.div_ceil(BLOCK) - from / BLOCK)
    }

    /// The weights of a task, their sums, and the sums of the values.
    fn sums(&self, task: &Task, following: Option<&Task>, states: &[f32], slot: &mut [u32], parts: &Parts) {
        let Pass { job, plan, .. } = *self;
        let &Task { b, block, place, heads, keys } = task;
        let (e, columns, group, cpu) = (job.shape.value_dim, plan.columns, job.group(), job.cpu);
        let (first, end) = (block * BLOCK, (block + 1) * BLOCK);
        let rows = self.rows(b);
        let (mut waiting, mut count) = ([const { None }; MAX_LANES], 0);
        for head in heads.from..heads.to {
            // SAFETY: a block and its heads are one task's; each head has one part in this loop.
            let mine = unsafe { parts.of(place, head) };
            for r in 0..rows {
                let seen = job.range(b, self.query_and_head(b, head, r).0).within(first, end);
                let scores = &mut mine.scores[r * BLOCK..][..BLOCK];
                // What is not seen has weight +0, which changes no sum of weights.
                scores[..seen.from - first].fill(0.0);
                scores[seen.to - first..].fill(0.0);
                match self.state(b, head, r, states, 0.0) {
                    Row::Valid { n, .. } => {
                        let scores = &mut scores[seen.from - first..seen.to - first];
                        exponentiate(cpu, Exponentiate { scores, n, c: job.c });
                    }
                    _ => scores.fill(0.0),
                }
            }
            mine.sums[..rows * columns].fill(0.0);
            for row in
                mine.scores.as_chunks().0.iter().zip(mine.statistics.iter_mut().map(|of_row| &mut of_row[3])).take(rows)
            {
                waiting[count] = Some(row);
                count += 1;
                if count == MAX_LANES {
                    sum_rows(cpu, &mut waiting);
                    count = 0;
                }
            }
        }
        sum_rows(cpu, &mut waiting[..count]);
        if e == 0 {
            return;
        }
        let in_place = bf16_slice(job.v.data()).filter(|_| plan.in_place);
        let ahead = Ahead::new(job, &job.v, e, heads);
        let mut from = keys.from;
        while from < keys.to {
            let panel_end = (from / PANEL + 1) * PANEL;
            let to = if in_place.is_some() { job.run_end(from) } else { panel_end };
            let to = to.min(panel_end).min(keys.to);
            // At the start of a panel the next one is prefetched.
            let begins = from == keys.from || from.is_multiple_of(PANEL);
            let next = if begins { Next::after(panel_end, task, following) } else { Next::NOTHING };
            let whole = in_place.is_some() && to - from == PANEL;
            for head in heads.from..heads.to {
                let mut ahead = ahead.of(next, Range { from: head, to: head + 1 }, whole);
                if in_place.is_none() {
                    for (j, wide) in (from..to).zip(as_floats_mut(slot).chunks_exact_mut(columns)) {
                        f32_row(cpu, &job.value(b, j, head)[..e], job.shape.tf32, wide);
                    }
                }
                let wide = as_floats(slot);
                // SAFETY: as above; the parts of that loop are done with.
                let mine = unsafe { parts.of(place, head) };
                let mut accumulate = |first_row: usize, rows: usize, keys: Range| {
                    if keys.is_empty() {
                        return;
                    }
                    let right = match in_place {
                        Some(_) => {
                            let value = bf16_slice(job.value(b, keys.from, head)).expect("bf16");
                            Right::Bf16(value, job.v.row_stride(), std::mem::take(&mut ahead))
                        }
                        None => Right::F32(&wide[(keys.from - from) * columns..], columns),
                    };
                    let weights = &mine.scores[first_row * BLOCK + keys.from - first..];
                    let left = Left { data: weights, row_stride: BLOCK, step: 1 };
                    let (order, out) = (Order::Chain(keys.to - keys.from), &mut mine.sums[first_row * columns..]);
                    fma_tile(cpu, Tile { left, right, order, rows, columns, out, out_stride: columns });
                };
                // The heads of one query see the same keys.
                for (i, t) in job.queries(b).enumerate() {
                    let seen = job.range(b, t).within(from, to);
                    let heads = i * group..(i + 1) * group;
                    if !mine.statistics[heads.clone()].iter().any(|statistics| statistics[2] > 0.0) {
                        accumulate(heads.start, group, seen);
                        continue;
                    }
                    // Keys whose score is -inf have weight -0, and their values are not read.
                    for r in heads {
                        let counts = |j: &usize| mine.scores[r * BLOCK + j - first].is_sign_positive();
                        (seen.from..seen.to)
                            .filter(counts)
                            .for_each(|j| accumulate(r, 1, Range { from: j, to: j + 1 }));
                    }
                }
            }
            from = to;
        }
    }

    /// Adds the blocks of a key head, ascending from +0, and finishes its rows.
    fn join<O: Element>(
        &self,
        b: usize,
        head: usize,
        states: &[f32],
        parts: &Parts,
        out: &SharedOut<O>,
        lse: &SharedOut<f32>,
    ) {
        let Pass { job, plan, .. } = *self;
        let rows = self.rows(b);
        // SAFETY: the blocks of a sequence and key head are one task's, and each is taken once.
        let mut places = self.places(b).map(|place| unsafe { parts.of(place, head) });
        let mut l = [0f32; MAX_ROWS];
        let mut sum =
            |statistics: &[[f32; STATISTICS]]| l.iter_mut().zip(statistics).for_each(|(l, of_row)| *l += of_row[3]);
        // The first block becomes the total: +0 and it.
        let total = places.next().map_or(&mut [][..], |first| {
            first.sums.iter_mut().for_each(|v| *v += 0.0);
            sum(first.statistics);
            first.sums
        });
        for part in places {
            add_to(job.cpu, &mut total[..rows * plan.columns], &mut part.sums[..rows * plan.columns]);
            sum(part.statistics);
        }
        for (r, &l) in l.iter().enumerate().take(rows) {
            let (t, query_head) = self.query_and_head(b, head, r);
            let total = total.get(r * plan.columns..).unwrap_or(&[]);
            let all = Range { from: 0, to: job.shape.value_dim };
            let row = self.state(b, head, r, states, l);
            // SAFETY: each (sequence, key head, row) has its own index in [B,T,Hq].
            unsafe { job.finish(t * job.shape.q_heads + query_head, row, total, out, lse, all) };
        }
    }
}

/// The scores of a panel of bf16 keys, head after head: its keys are transposed, then come the products.
struct PanelScores<'a, 'p> {
    /// The keys of all heads, `d` elements each.
    keys: &'a RowsSideBySide<'a>,
    d: usize,
    heads: Range,
    /// The queries of a sequence, laid out.
    rows: usize,
    queries: &'a [u32],
    /// What a head prefetches.
    asks: &'a dyn Fn(usize) -> Prefetch,
    /// Where keys are laid out.
    panel: &'a mut [u32],
    /// Where the scores go: to this place and from this column on.
    parts: &'a Parts<'p>,
    place: usize,
    column: usize,
}

impl Kernel for PanelScores<'_, '_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let PanelScores { keys, d, heads, rows, queries, asks, panel, parts, place, column } = self;
        let (len, chain) = (parts.plan.query_words(), [0, d]);
        for head in heads.from..heads.to {
            let ahead = keys.pairs_on(s, head * d, d, panel, asks(head));
            let query = as_floats(&queries[head * len..][..len]);
            // SAFETY: a block and its heads are one task's, and this is the only part in hand.
            let out = &mut unsafe { parts.of(place, head) }.scores[column..];
            let (left, right) =
                (Left { data: query, row_stride: 1, step: rows }, Right::PairsAsking(panel, PANEL, ahead));
            let (order, columns, out_stride) = (Order::Tree(&chain), PANEL, BLOCK);
            fma_tile_on(s, Tile { left, right, order, rows, columns, out, out_stride });
        }
    }
}

static ZEROS: [f32; BLOCK] = [0.0; BLOCK];

/// A row of weights in one block, and its sum.
type WeightsOfRow<'a> = Option<(&'a [f32; BLOCK], &'a mut f32)>;

/// Runs [`SumRows`]. Not generic, so that it is compiled once.
fn sum_rows(cpu: &Cpu, rows: &mut [WeightsOfRow]) {
    cpu.dispatch(SumRows(rows));
}

/// Sums at most [`MAX_LANES`] rows, each as a chain. A chain waits for its own sum, so every row is a lane.
struct SumRows<'a, 'b>(&'a mut [WeightsOfRow<'b>]);

impl Kernel for SumRows<'_, '_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for rows in self.0.chunks_mut(S::LANES) {
            // Lanes without a row sum zeros.
            let mut from = [ZEROS.as_ptr().cast::<u32>(); MAX_LANES];
            from.iter_mut().zip(rows.iter().flatten()).for_each(|(from, row)| *from = row.0.as_ptr().cast());
            let mut columns = [0f32; MAX_LANES * MAX_LANES];
            let mut sum = s.splat(0.0);
            for at in (0..BLOCK).step_by(S::LANES) {
                // SAFETY: rows hold BLOCK words, a multiple of LANES, and `columns` as many as LANES times LANES.
                unsafe { s.transpose::<false>(&from, at, S::LANES, columns.as_mut_ptr().cast(), S::LANES) };
                for column in columns.chunks_exact(S::LANES).take(S::LANES) {
                    sum = s.add(sum, load_at(s, column, 0, 0.0));
                }
            }
            let mut sums = [0.0; MAX_LANES];
            // SAFETY: MAX_LANES >= LANES.
            unsafe { s.store(sum, sums.as_mut_ptr()) };
            rows.iter_mut().flatten().zip(sums).for_each(|((_, to), sum)| **to = sum);
        }
    }
}

/// Runs [`BlockStatistics`]. Not generic, so that it is compiled once.
fn block_statistics(cpu: &Cpu, kernel: BlockStatistics) -> [f32; STATISTICS] {
    cpu.dispatch(kernel)
}

/// Caps the visible scores of a row in one block and finds what the softmax must know of them.
struct BlockStatistics<'a> {
    scores: &'a mut [f32],
    cap: Option<(f32, f32)>,
}

impl Kernel for BlockStatistics<'_> {
    type Output = [f32; STATISTICS];
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> [f32; STATISTICS] {
        let (vectors, tail) = self.scores.split_at_mut(self.scores.len() / S::LANES * S::LANES);
        let (mut largest, mut least) = (s.splat(f32::NEG_INFINITY), s.splat(f32::INFINITY));
        let mut invalid = false;
        for scores in vectors.chunks_exact_mut(S::LANES) {
            let mut score = load_at(s, scores, 0, 0.0);
            if let Some((cap, factor)) = self.cap {
                score = s.mul(s.splat(cap), tanh(s, s.mul(score, s.splat(factor))));
                // SAFETY: the chunk holds LANES scores.
                unsafe { s.store(score, scores.as_mut_ptr()) };
            }
            invalid |= s.any_nan_or_inf(score);
            largest = s.max(score, largest);
            least = s.min(score, least);
        }
        let (mut high, mut low) = ([f32::NEG_INFINITY; MAX_LANES], [f32::INFINITY; MAX_LANES]);
        // SAFETY: MAX_LANES >= LANES.
        unsafe {
            s.store(largest, high.as_mut_ptr());
            s.store(least, low.as_mut_ptr());
        }
        let mut largest = high.into_iter().fold(f32::NEG_INFINITY, f32::max);
        let mut least = low.into_iter().fold(f32::INFINITY, f32::min);
        for score in tail {
            if let Some((cap, factor)) = self.cap {
                *score = cap * tanh(Scalar, *score * factor);
            }
            invalid |= Scalar.any_nan_or_inf(*score);
            (largest, least) = (largest.max(*score), least.min(*score));
        }
        let flag = |set: bool| if set { 1.0 } else { 0.0 };
        [largest, flag(invalid), flag(least == f32::NEG_INFINITY), 0.0]
    }
}

/// Runs [`Exponentiate`]. Not generic, so that it is compiled once.
fn exponentiate(cpu: &Cpu, kernel: Exponentiate) {
    cpu.dispatch(kernel);
}

/// Turns the scores of a row into weights; the weight of -inf is -0, which no sum sees.
struct Exponentiate<'a> {
    scores: &'a mut [f32],
    n: f32,
    c: (f32, f32),
}

impl Kernel for Exponentiate<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        if is_small(s, s.splat(self.n)) { self.all::<S, true>(s) } else { self.all::<S, false>(s) }
    }
}

impl Exponentiate<'_> {
    #[inline(always)]
    fn all<S: Simd, const SMALL: bool>(self, s: S) {
        let (n, c) = (self.n, self.c);
        let mut whole = self.scores.chunks_exact_mut(8 * S::LANES);
        for scores in &mut whole {
            let mut v = [s.splat(0.0); 8];
            for (v, scores) in v.iter_mut().zip(scores.chunks_exact(S::LANES)) {
                *v = load_at(s, scores, 0, 0.0);
            }
            let w = weight_of::<_, SMALL>(of_eight(s), eight::<S>(v), n, c);
            for (w, scores) in vectors::<S>(w).into_iter().zip(scores.chunks_exact_mut(S::LANES)) {
                // SAFETY: the chunk holds LANES scores.
                unsafe { s.store(w, scores.as_mut_ptr()) };
            }
        }
        let rest = whole.into_remainder();
        for at in (0..rest.len()).step_by(S::LANES) {
            let w = weight_of::<_, SMALL>(s, load_at(s, rest, at, 0.0), n, c);
            narrow_at(s, w, rest, at);
        }
    }
}

#[inline(always)]
fn weight_of<S: Simd, const SMALL: bool>(s: S, score: S::F, n: f32, c: (f32, f32)) -> S::F {
    let w = weigh::<S, SMALL>(s, score, s.splat(c.0), s.splat(c.1), s.splat(n));
    s.select_ge(score, s.splat(f32::MIN), w, s.splat(-0.0))
}
