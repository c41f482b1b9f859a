//! Many query rows to a key head: tiles of 16, 32 or 48 rows, one row per lane. A tile keeps the scores of all its keys, or,
//! where the budget has no room for them, makes them twice, some keys at a time.

use crate::attention::job::{BLOCK, Job, Range, Row, add_to, max_exponent};
use crate::gemm::gemm::{Ran, Tally};
use crate::gemm::tile::{Left, Order, Right, TILE_ROWS, Tile, dot_is_exact, dot_tile, fma_tile};
use crate::math::{is_small, near_coefficients, near_unit, near_weights, tanh, weigh};
use crate::pack::{
    as_floats, as_floats_mut, bf16_slice, f32_of_rows, f32_row, f32_rows, least_magnitude, pairs_of_rows, vnni_of_row,
};
use crate::parallel::SharedOut;
use crate::simd::prefetch::{Prefetch, prefetch_all, prefetch_at, prefetch_second};
use crate::simd::unroll::{Unrolled, eight, of_eight, vectors};
use crate::simd::{Kernel, Simd, load_at};
use crate::workspace::memory::LINE;
use crate::workspace::{Need, Plan};
use crate::{Cpu, Element};
use half::bf16;

/// Tiles for each worker, at least, between two layouts of shared keys and values.
const TILES_BETWEEN: usize = 8;
/// Most query rows of a tile: one row of scores per lane of a panel.
const ROWS: usize = 48;
/// Keys or values laid out at a time.
const PART: usize = 64;
/// How many keys ahead values are prefetched.
const AHEAD: usize = 32;

/// How a call is cut into tiles.
#[derive(Clone, Copy)]
pub struct Tiles {
    /// Lanes of a row of scores: 16, 32 or 48.
    width: usize,
    /// Query rows of a tile, at most `width`.
    rows: usize,
    /// Keys whose scores are held at a time; 0 for all.
    span: usize,
    /// Columns of the values at a time, a multiple of 16.
    columns: usize,
    workers: usize,
    /// Whether keys are laid out once, as pairs or f32, for the tiles to share, and values that are not read in place.
    shared: bool,
    /// (Sequence, key head) entries at a time: what is laid out for them should stay in the caches while their tiles run.
    entries: usize,
    /// Facts of the call: the most keys a sequence has, words of a query or key row as the
    /// kernels read it and widened, and whether values are read in place.
    keys: usize,
    query_words: usize,
    f32_words: usize,
    in_place: bool,
    /// Whether queries are laid out as pairs.
    query_pairs: bool,
}

impl Tiles {
    pub fn preferred<I: Element>(job: &Job<I>) -> Tiles {
        let shape = job.shape;
        let most = job.most_queries() * job.group();
        // The 12 rows at which values are summed fill 48; vectors of 16 lanes go over scores two by two.
        let width = match most {
            ..=16 => 16,
            33.. if job.cpu.isa().lanes() == 8 => ROWS,
            _ => 32,
        };
        let query_pairs = job.dots() && job.cpu.isa().dots_pay();
        Tiles {
            width,
            rows: width,
            span: 0,
            columns: shape.value_dim.next_multiple_of(16),
            workers: job.cpu.threads(),
            shared: most > width,
            entries: (TILES_BETWEEN * job.cpu.threads())
                .div_ceil(most.div_ceil(width).max(1))
                .min(shape.batch * shape.kv_heads),
            keys: job.kv_len.iter().map(|&len| len as usize).max().unwrap_or(0),
            query_words: if query_pairs { shape.head_dim.div_ceil(2) } else { shape.head_dim },
            f32_words: shape.head_dim.next_multiple_of(2),
            // Vectors of 8 lanes would widen a value again for every 6 rows.
            in_place: job.values_in_place() && job.cpu.isa().lanes() > 8,
            query_pairs,
        }
    }

    /// The next smaller plan: nothing shared, fewer queries, scores of fewer keys, fewer rows (queries, then heads), fewer
    /// columns of the values, fewer workers.
    pub fn smaller(&self) -> Option<Tiles> {
        let plan = *self;
        Some(match plan {
            Tiles { shared: true, .. } => Tiles { shared: false, ..plan },
            Tiles { width: 17.., .. } => Tiles { width: 16, rows: 16, ..plan },
            Tiles { span: 0, .. } => Tiles { span: plan.keys.clamp(16, BLOCK).next_power_of_two(), ..plan },
            Tiles { span: 17.., .. } => Tiles { span: plan.span / 2, ..plan },
            Tiles { rows: 2.., .. } => Tiles { rows: plan.rows / 2, ..plan },
            Tiles { columns: 17.., .. } => Tiles { columns: (plan.columns / 2).next_multiple_of(16), ..plan },
            Tiles { workers: 2.., .. } => Tiles { workers: plan.workers / 2, ..plan },
            _ => return None,
        })
    }

    /// Keys or values laid out at a time.
    fn part(&self) -> usize {
        if self.span == 0 { PART } else { PART.min(self.span) }
    }

    /// Keys whose scores are looked at while they are in L1. Dot products of pairs go block by block.
    fn scores_at_once(&self) -> usize {
        if self.query_pairs { usize::MAX } else { PART }
    }

    /// Keys whose weights are made before their values are added.
    fn weights_at_once(&self) -> usize {
        if self.in_place { usize::MAX } else { PART }
    }

    fn score_words(&self) -> usize {
        self.width * if self.span == 0 { self.keys } else { self.span }
    }

    /// Words of a part of keys as f32, in whole tiles.
    fn wide_words(&self) -> usize {
        self.part().next_multiple_of(TILE_ROWS) * self.f32_words
    }

    fn part_words(&self) -> usize {
        self.wide_words().max(if self.in_place { 0 } else { self.part() * self.columns })
    }

    /// Words of the shared keys of one entry, and of one block of them: the keys, then a line with the smallest nonzero
    /// magnitude of pairs.
    fn block_words(&self) -> usize {
        LINE + if self.query_pairs { BLOCK * self.query_words } else { BLOCK / PART * self.wide_words() }
    }

    fn entry_words(&self) -> usize {
        self.keys.div_ceil(BLOCK) * self.block_words()
    }

    /// Words of the shared values of one entry: a block that has its values at a distance would find little room in a cache.
    fn value_words(&self) -> usize {
        if self.shared && !self.in_place { self.keys.div_ceil(BLOCK) * BLOCK * self.columns } else { 0 }
    }
}

impl Plan for Tiles {
    fn need(&self) -> Need {
        let keys = if self.shared { self.entries.saturating_mul(self.entry_words()) } else { 0 };
        let query = self.width * self.query_words;
        let slot = self.score_words() + query + self.part_words() + 2 * self.rows * self.columns;
        let pairs = if self.query_pairs { keys + query * self.workers } else { 0 };
        let shared = keys.saturating_add(self.entries.saturating_mul(self.value_words()));
        Need { shared, slot, workers: self.workers, pairs }
    }

    fn tiles(&self) -> [(&'static str, usize); 3] {
        let keys = if self.span == 0 { self.keys } else { self.span };
        [("rows", self.rows), ("keys", keys), ("columns", self.columns)]
    }
}

/// Runs all tiles. Returns how many tiles of scores took the slow path.
pub fn run<I: Element, O: Element>(
    job: &Job<I>,
    plan: &Tiles,
    shared: &mut [u32],
    mut slots: Vec<&mut [u32]>,
    out: &SharedOut<O>,
    lse: &SharedOut<f32>,
) -> usize {
    let (kv_heads, all) = (job.shape.kv_heads, job.shape.batch * job.shape.kv_heads);
    let tiles = (job.most_queries() * job.group()).div_ceil(plan.rows);
    let ran = Ran::default();
    let at_a_time = if plan.shared { plan.entries.max(1) } else { all.max(1) };
    for from in (0..all).step_by(at_a_time) {
        let count = at_a_time.min(all - from);
        let keys = if plan.shared { count * plan.entry_words() } else { 0 };
        let (shared, values) = shared[..keys + count * plan.value_words()].split_at_mut(keys);
        let shared = (plan.shared && plan.block_words() > LINE).then(|| {
            lay_keys_out(job, plan, from, shared);
            &*shared
        });
        lay_values_out(job, plan, from, as_floats_mut(values));
        let values = as_floats(values);
        job.cpu.each_in(slots.iter_mut(), count * tiles, |slot, task| {
            // The tiles of an entry go one after another, while its keys and values are in L2; the last queries see
            // the most keys: they go first.
            let (entry, tile) = (task / tiles, tiles - 1 - task % tiles);
            let (b, kv_head) = ((from + entry) / kv_heads, (from + entry) % kv_heads);
            let first = tile * plan.rows;
            let all = job.queries(b).len() * job.group();
            if first < all {
                let rows = plan.rows.min(all - first);
                let keys = shared.map(|shared| &shared[entry * plan.entry_words()..][..plan.entry_words()]);
                let values = (!values.is_empty()).then(|| &values[entry * plan.value_words()..][..plan.value_words()]);
                RowTile { job, plan, b, kv_head, first, rows, keys, values, ran: &ran }.run(slot, out, lse);
            }
        });
    }
    ran.record(job.cpu)
}

/// Lays the keys of the (sequence, key head) entries from `first` on out: as pairs for dot products, else as f32.
fn lay_keys_out<I: Element>(job: &Job<I>, plan: &Tiles, first: usize, out: &mut [u32]) {
    let blocks = plan.keys.div_ceil(BLOCK);
    job.cpu.chunks(out, plan.block_words(), |i, out| {
        let (entry, block) = (first + i / blocks, i % blocks);
        let (b, kv_head) = (entry / job.shape.kv_heads, entry % job.shape.kv_heads);
        let (out, end) = out.split_at_mut(plan.block_words() - LINE);
        let count = BLOCK.min((job.kv_len[b] as usize).saturating_sub(block * BLOCK));
        // Rows of one head stand apart from each other.
        let last = (job.kv_len[b] as usize).max(1) - 1;
        let key = |j: usize| {
            prefetch_all(job.key(b, (block * BLOCK + j + AHEAD).min(last), kv_head));
            job.key(b, block * BLOCK + j, kv_head)
        };
        let mut least = f32::INFINITY;
        if plan.query_pairs {
            for (j, out) in out.chunks_exact_mut(plan.query_words).enumerate().take(count) {
                let key = bf16_slice(key(j)).expect("bf16");
                least = least.min(vnni_of_row(job.cpu, key, bf16::ZERO, out));
            }
        } else {
            let out = as_floats_mut(out).chunks_exact_mut(plan.wide_words());
            for (first, out) in (0..count).step_by(PART).zip(out) {
                lay_part_out(job, plan, PART.min(count - first), |j| key(first + j), out);
            }
        }
        end[0] = least.to_bits();
    });
}

/// Lays the keys of a part out as f32, side by side in every tile; behind the ends of odd keys stands 0.
fn lay_part_out<'k, I: Element>(
    job: &Job<I>,
    plan: &Tiles,
    count: usize,
    key: impl Fn(usize) -> &'k [I],
    out: &mut [f32],
) {
    let d = job.shape.head_dim;
    for (first, out) in (0..count).step_by(TILE_ROWS).zip(out.chunks_exact_mut((TILE_ROWS * plan.f32_words).max(1))) {
        // A store that misses holds up those behind it: the room of the next tile is found before it is written.
        prefetch_at(&*out, size_of_val(&*out));
        f32_of_rows(job.cpu, TILE_ROWS.min(count - first), d, |j| key(first + j), job.shape.tf32, out, TILE_ROWS);
        out[d * TILE_ROWS..].fill(0.0);
    }
}

/// Lays the values of the (sequence, key head) entries from `first` on out as f32, where tiles share them.
fn lay_values_out<I: Element>(job: &Job<I>, plan: &Tiles, first: usize, out: &mut [f32]) {
    let blocks = plan.keys.div_ceil(BLOCK);
    job.cpu.chunks(out, BLOCK * plan.columns, |i, out| {
        let (entry, block) = (first + i / blocks, i % blocks);
        let (b, kv_head) = (entry / job.shape.kv_heads, entry % job.shape.kv_heads);
        let count = BLOCK.min((job.kv_len[b] as usize).saturating_sub(block * BLOCK));
        let last = (job.kv_len[b] as usize).max(1) - 1;
        for (j, out) in out.chunks_exact_mut(plan.columns).enumerate().take(count) {
            // As in `lay_part_out`, four values ahead.
            prefetch_at(&*out, 4 * size_of_val(&*out));
            prefetch_all(&job.value(b, (block * BLOCK + j + AHEAD).min(last), kv_head)[..job.shape.value_dim]);
            let value = &job.value(b, block * BLOCK + j, kv_head)[..job.shape.value_dim];
            f32_row(job.cpu, value, job.shape.tf32, &mut out[..job.shape.value_dim]);
        }
    });
}

/// Up to `plan.rows` query rows that share one key head: row r is query `(first + r) / group` of the sequence, head
/// `(first + r) % group` of the group.
struct RowTile<'a, I> {
    job: &'a Job<'a, I>,
    plan: &'a Tiles,
    b: usize,
    kv_head: usize,
    first: usize,
    rows: usize,
    /// The keys and the values laid out, when other tiles read them too.
    keys: Option<&'a [u32]>,
    values: Option<&'a [f32]>,
    ran: &'a Ran,
}

impl<I: Element> RowTile<'_, I> {
    /// Row r's row of q and its query head.
    fn query_and_head(&self, r: usize) -> (usize, usize) {
        let group = self.job.group();
        (self.job.queries(self.b).start + (self.first + r) / group, self.kv_head * group + (self.first + r) % group)
    }

    fn run<O: Element>(&self, slot: &mut [u32], out: &SharedOut<O>, lse: &SharedOut<f32>) {
        let RowTile { job, plan, rows, .. } = *self;
        let (scores, rest) = slot.split_at_mut(plan.score_words());
        let (query, rest) = rest.split_at_mut(plan.width * plan.query_words);
        let (part, rest) = rest.split_at_mut(plan.part_words());
        let (total, acc) = as_floats_mut(rest).split_at_mut(plan.rows * plan.columns);
        let scores = as_floats_mut(scores);

        let mut ranges = [Range::default(); ROWS];
        (0..rows).for_each(|r| ranges[r] = job.range(self.b, self.query_and_head(r).0));
        let seen = || ranges[..rows].iter().filter(|range| !range.is_empty());
        let keys = Range {
            from: seen().map(|range| range.from).min().unwrap_or(0),
            to: seen().map(|range| range.to).max().unwrap_or(0),
        };
        let least_query = self.lay_queries_out(query);
        let pieces = || keys.cut(if plan.span == 0 { usize::MAX } else { plan.span });
        let statistics = |scores: &mut [f32], keys: Range, seen: &mut Seen| {
            block_statistics(
                job.cpu,
                BlockStatistics { scores, plan, rows, keys, ranges: &ranges, cap: job.cap, seen },
            );
        };
        let near_pays = near_pays(job.cpu.isa().lanes());
        let least = if near_pays { f32::INFINITY } else { f32::NEG_INFINITY };
        let mut seen_scores = Seen { largest: [f32::NEG_INFINITY; ROWS], least: [least; ROWS], sum: [0.0; ROWS] };
        for piece in pieces() {
            for keys in piece.cut(plan.scores_at_once()) {
                let scores = keys.of(piece, plan.width, scores);
                self.score(keys, &ranges, least_query, query, part, scores);
                statistics(scores, keys, &mut seen_scores);
            }
        }
        let mut softmax =
            Softmax { rows: [Row::Empty; ROWS], n: [0.0; ROWS], skips: false, units: [1.0; ROWS], near: None };
        let mut near = near_pays;
        for r in 0..rows {
            // A sum of zeros that is NaN has met NaN, +inf or -inf; the last alone does no harm.
            let (strange, sink) = (seen_scores.sum[r].is_nan(), job.sink(self.query_and_head(r).1));
            let invalid = strange && self.invalid(r, &ranges[r], pieces(), &ranges, least_query, query, part, scores);
            softmax.skips |= strange;
            softmax.rows[r] = max_exponent(seen_scores.largest[r], invalid, job.c.0, sink);
            if let Row::Valid { n, .. } = softmax.rows[r] {
                softmax.n[r] = n;
                let unit = near_unit(n, (seen_scores.least[r] * job.c.0).round_ties_even());
                near &= unit.is_some();
                softmax.units[r] = unit.unwrap_or(1.0);
            }
        }
        let by_all = seen_by_all(&ranges[..rows]);
        // Invisible keys have no exponent.
        softmax.near = (near && !softmax.skips).then_some(by_all);
        for from in (0..job.shape.value_dim.max(1)).step_by(plan.columns.max(1)) {
            let columns = Range { from, to: (from + plan.columns).min(job.shape.value_dim) };
            let mut sums = Sums { block: [0.0; ROWS], total: [0.0; ROWS] };
            total.fill(0.0);
            acc.fill(0.0);
            for piece in pieces() {
                let scores = &mut scores[..(piece.to - piece.from) * plan.width];
                if plan.span > 0 {
                    self.score(piece, &ranges, least_query, query, part, scores);
                    let mut again = Seen { largest: [0.0; ROWS], least: [0.0; ROWS], sum: [0.0; ROWS] };
                    statistics(scores, piece, &mut again);
                }
                let end = keys.to;
                for keys in piece.cut(plan.weights_at_once()) {
                    let scores = keys.of(piece, plan.width, scores);
                    if plan.span > 0 || from == 0 {
                        let (c, softmax, sums) = (job.c, &softmax, &mut sums);
                        let ahead = match self.values {
                            Some(values) => &values[keys.from * plan.columns..keys.to * plan.columns],
                            None => &[],
                        };
                        exponentiate(job.cpu, Exponentiate { scores, plan, keys, end, c, softmax, sums, ahead });
                    }
                    self.values(keys, end, columns, (&ranges, by_all), scores, softmax.skips, part, total, acc);
                }
            }
            if plan.span > 0 || from == 0 {
                for (row, sum) in softmax.rows.iter_mut().zip(sums.total) {
                    if let Row::Valid { l, .. } = row {
                        *l = sum;
                    }
                }
            }
            for r in 0..rows {
                let (t, head) = self.query_and_head(r);
                let at = t * job.shape.q_heads + head;
                // SAFETY: each (tile, row) has its own index in [B,T,Hq].
                unsafe { job.finish(at, softmax.rows[r], &total[r * plan.columns..], out, lse, columns) };
            }
        }
    }

    /// Lays the queries side by side as the kernels read them; returns their smallest nonzero magnitude.
    fn lay_queries_out(&self, out: &mut [u32]) -> f32 {
        let (width, d) = (self.plan.width, self.job.shape.head_dim);
        let query = |r: usize| {
            let (t, head) = self.query_and_head(r);
            self.job.query(t, head)
        };
        if self.rows < width {
            // Lanes without a row count for nothing; what was left there could be subnormal, and slow.
            out.fill(0);
        }
        if !self.plan.query_pairs {
            f32_of_rows(self.job.cpu, self.rows, d, query, self.job.shape.tf32, as_floats_mut(out), width);
            return f32::NAN;
        }
        let query = |r: usize| bf16_slice(query(r)).expect("bf16");
        pairs_of_rows::<true>(self.job.cpu, self.rows, d, query, bf16::NEG_ZERO, out, width, Prefetch::NONE);
        let least = |r: usize| least_magnitude(self.job.cpu, query(r));
        (0..self.rows).map(least).fold(f32::INFINITY, f32::min)
    }

    /// `scores[j - keys.from][r]`: a chain over d for every key, visible or not, but for the first rows where these see none
    /// of a tile.
    fn score(
        &self,
        keys: Range,
        ranges: &[Range; ROWS],
        least_query: f32,
        query: &[u32],
        part: &mut [u32],
        scores: &mut [f32],
    ) {
        let RowTile { job, plan, b, kv_head, .. } = *self;
        let (width, cpu) = (plan.width, job.cpu);
        // One chain is a tree of one segment.
        let chain = [0, job.shape.head_dim];
        let step = plan.query_words;
        let dots = plan.query_pairs && dot_is_exact(least_query, f32::MAX);
        let mut from = keys.from;
        while from < keys.to {
            // Shared keys come block by block, others part by part.
            let to = match self.keys {
                Some(_) => (from / BLOCK + 1) * BLOCK,
                None => from + plan.part(),
            };
            let to = to.min(keys.to);
            let count = to - from;
            let out = &mut scores[(from - keys.from) * width..][..count * width];
            let outs = || (0..count).step_by(TILE_ROWS);
            let mut least_key = f32::NAN;
            if let Some(keys) = self.keys {
                least_key = f32::from_bits(keys[(from / BLOCK + 1) * plan.block_words() - LINE]);
            } else if dots {
                least_key = f32::INFINITY;
                for (j, pairs) in (from..to).zip(part.chunks_exact_mut(step.max(1))) {
                    let key = |j: usize| bf16_slice(job.key(b, j, kv_head)).expect("bf16");
                    prefetch_all(key((j + AHEAD).min(keys.to - 1)));
                    least_key = least_key.min(vnni_of_row(cpu, key(j), bf16::ZERO, pairs));
                }
            }
            if dots && dot_is_exact(least_query, least_key) {
                let pairs = match self.keys {
                    Some(keys) => &keys[from / BLOCK * plan.block_words() + from % BLOCK * step..],
                    None => &*part,
                };
                for (first, out) in outs().zip(out.chunks_mut(TILE_ROWS * width)) {
                    let left = Left { data: &pairs[first * step..], row_stride: step, step: 1 };
                    let (right, order) = (Right::Vnni(query, width), Order::Tree(&chain));
                    let rows = TILE_ROWS.min(count - first);
                    dot_tile(cpu, Tile { left, right, order, rows, columns: width, out, out_stride: width });
                }
                self.ran.add(Tally { fast: 1, slow: 0 });
            } else {
                if plan.query_pairs {
                    self.ran.add(Tally { fast: 0, slow: 1 });
                }
                let shared = self.keys.filter(|_| !plan.query_pairs);
                for mine in (Range { from, to }).cut(plan.part()) {
                    // The key that the part begins with.
                    let start = if shared.is_some() { mine.from / PART * PART } else { mine.from };
                    let wide = match shared {
                        Some(keys) => {
                            let part = from / BLOCK * plan.block_words() + start % BLOCK / PART * plan.wide_words();
                            as_floats(&keys[part..][..plan.wide_words()])
                        }
                        None => {
                            let wide = as_floats_mut(part);
                            let key = |j: usize| {
                                prefetch_all(job.key(b, (start + j + AHEAD).min(keys.to - 1), kv_head));
                                job.key(b, start + j, kv_head)
                            };
                            lay_part_out(job, plan, mine.to - start, key, wide);
                            &*wide
                        }
                    };
                    for first in ((mine.from - start) / TILE_ROWS * TILE_ROWS..mine.to - start).step_by(TILE_ROWS) {
                        let tile = mine.within(start + first, start + first + TILE_ROWS);
                        let blind = ranges[..self.rows].iter().take_while(|range| range.to <= tile.from).count();
                        let blind = (blind / 16 * 16).min(width - 16);
                        let out = &mut tile.of(keys, width, scores)[blind..];
                        let data = &wide[first * plan.f32_words + tile.from - start - first..];
                        let left = Left { data, row_stride: 1, step: TILE_ROWS };
                        let right = match plan.query_pairs {
                            true => Right::Vnni(query.get(blind..).unwrap_or(&[]), width),
                            false => Right::F32(as_floats(query.get(blind..).unwrap_or(&[])), width),
                        };
                        let (order, rows, columns) = (Order::Tree(&chain), tile.to - tile.from, width - blind);
                        fma_tile(cpu, Tile { left, right, order, rows, columns, out, out_stride: width });
                    }
                }
            }
            from = to;
        }
    }

    /// Whether a visible score of row r is NaN or +inf. With scores made piece by piece they are made once more.
    #[allow(clippy::too_many_arguments)]
    fn invalid(
        &self,
        r: usize,
        range: &Range,
        pieces: impl Iterator<Item = Range>,
        ranges: &[Range; ROWS],
        least_query: f32,
        query: &[u32],
        part: &mut [u32],
        scores: &mut [f32],
    ) -> bool {
        let plan = self.plan;
        for piece in pieces {
            let scores = &mut scores[..(piece.to - piece.from) * plan.width];
            if plan.span > 0 {
                self.score(piece, ranges, least_query, query, part, scores);
                let seen = &mut Seen { largest: [0.0; ROWS], least: [0.0; ROWS], sum: [0.0; ROWS] };
                let (rows, cap) = (self.rows, self.job.cap);
                block_statistics(self.job.cpu, BlockStatistics { scores, plan, rows, keys: piece, ranges, cap, seen });
            }
            let Range { from, to } = range.within(piece.from, piece.to);
            let score = |j: usize| scores[(j - piece.from) * plan.width + r];
            if (from..to).any(|j| score(j).is_nan() || score(j) == f32::INFINITY) {
                return true;
            }
        }
        false
    }

    /// Adds the values that each row sees among `keys` to `acc`, and `acc` to `total` at the end of a block or of all keys
    /// (`end`). With `skips`, weights of visible keys whose score is -inf are marked NaN and those keys are skipped.
    #[allow(clippy::too_many_arguments)]
    fn values(
        &self,
        keys: Range,
        end: usize,
        value_columns: Range,
        (ranges, by_all): (&[Range; ROWS], Range),
        weights: &[f32],
        skips: bool,
        part: &mut [u32],
        total: &mut [f32],
        acc: &mut [f32],
    ) {
        let RowTile { job, plan, b, kv_head, .. } = *self;
        let (width, stride) = (plan.width, plan.columns);
        let count = value_columns.to - value_columns.from;
        let columns = count.next_multiple_of(16);
        if count == 0 {
            return;
        }
        let in_place = bf16_slice(job.v.data()).filter(|_| plan.in_place);
        let mut from = keys.from;
        while from < keys.to {
            let block_end = (from / BLOCK + 1) * BLOCK;
            // What lies in one piece of memory, and, where values are widened, in one part.
            let most = match (in_place, self.values) {
                (_, Some(_)) => usize::MAX,
                (Some(_), None) => job.run_end(from),
                (None, None) => job.run_end(from).min(from + plan.part()),
            };
            let to = most.min(block_end).min(keys.to);
            if in_place.is_none() && self.values.is_none() {
                let values = &job.value(b, from, kv_head)[value_columns.from..];
                let value = |j: usize| {
                    let value = &values[j * job.v.row_stride()..][..count];
                    // It may be any address: of values that lie elsewhere nothing is found ahead.
                    prefetch_at(value, AHEAD * job.v.row_stride() * size_of::<I>());
                    value
                };
                f32_rows(job.cpu, to - from, value, job.shape.tf32, as_floats_mut(part), columns);
            }
            let wide = match self.values {
                Some(values) => &values[from * columns..],
                None => as_floats(part),
            };
            let mut accumulate = |first: usize, rows: usize, keys_part: Range| {
                if keys_part.is_empty() {
                    return;
                }
                let right = match in_place {
                    Some(_) => {
                        let value = &job.value(b, keys_part.from, kv_head)[value_columns.from..];
                        Right::Bf16(bf16_slice(value).expect("bf16"), job.v.row_stride(), Prefetch::NONE)
                    }
                    None => Right::F32(&wide[(keys_part.from - from) * columns..], columns),
                };
                let left =
                    Left { data: &weights[(keys_part.from - keys.from) * width + first..], row_stride: 1, step: width };
                let (order, out) = (Order::Chain(keys_part.to - keys_part.from), &mut acc[first * stride..]);
                fma_tile(job.cpu, Tile { left, right, order, rows, columns, out, out_stride: stride });
            };
            for first in (0..self.rows).step_by(TILE_ROWS) {
                let rows = TILE_ROWS.min(self.rows - first);
                let mine = &ranges[first..first + rows];
                if !skips && by_all.from <= from && to <= by_all.to {
                    accumulate(first, rows, Range { from, to });
                } else if !skips {
                    together(mine, first, Range { from, to }, &mut accumulate);
                } else {
                    for (r, range) in mine.iter().enumerate() {
                        let seen = range.within(from, to);
                        let skipped = |j: &usize| weights[(j - keys.from) * width + first + r].is_nan();
                        (seen.from..seen.to)
                            .filter(|j| !skipped(j))
                            .for_each(|j| accumulate(first + r, 1, Range { from: j, to: j + 1 }));
                    }
                }
            }
            from = to;
            if from == block_end || from == end {
                add_to(job.cpu, total, acc);
            }
        }
    }
}

/// The keys that all rows see, of which there are some; row r sees `ranges[r]`.
fn seen_by_all(ranges: &[Range]) -> Range {
    Range {
        from: ranges.iter().map(|range| range.from).max().unwrap_or(0),
        to: ranges.iter().map(|range| range.to).min().unwrap_or(0),
    }
}

/// Calls `add(row, rows, keys)`, for `rows` rows from `row` on that all see these keys, until every row has had what it sees of
/// `keys`, in ascending order. Rows that do not all see the same are halved. Row `first + r` sees `ranges[r]`.
fn together(ranges: &[Range], first: usize, keys: Range, add: &mut impl FnMut(usize, usize, Range)) {
    if ranges.iter().all(|range| range.within(keys.from, keys.to).is_empty()) {
        return;
    }
    let shared = seen_by_all(ranges).within(keys.from, keys.to);
    if shared == keys || ranges.len() == 1 {
        return add(first, ranges.len(), shared);
    }
    let (upper, lower) = ranges.split_at(ranges.len() / 2);
    let halves = |keys: Range, add: &mut _| {
        together(upper, first, keys, add);
        together(lower, first + upper.len(), keys, add);
    };
    if shared.is_empty() {
        return halves(keys, add);
    }
    halves(Range { to: shared.from, ..keys }, add);
    add(first, ranges.len(), shared);
    halves(Range { from: shared.to, ..keys }, add);
}

/// Whether weights near to the largest are made as such on vectors of so many lanes; longer ones have instructions for all.
fn near_pays(lanes: usize) -> bool {
    lanes == 8
}

/// What is known of the scores of each row.
struct Seen {
    /// The largest visible score.
    largest: [f32; ROWS],
    /// The least score of the keys that all rows see, where [`near_pays`].
    least: [f32; ROWS],
    /// 0 while every visible score is finite, NaN from the first that is not.
    sum: [f32; ROWS],
}

struct Softmax {
    rows: [Row; ROWS],
    /// The exponent `n` of each valid row.
    n: [f32; ROWS],
    /// Some visible score is -inf; its weight is marked NaN.
    skips: bool,
    /// The [`near_unit`] of each row, where all have one, and the keys that all of them see.
    units: [f32; ROWS],
    near: Option<Range>,
}

/// Sums of weights: of the block in hand, and of the blocks before it.
struct Sums {
    block: [f32; ROWS],
    total: [f32; ROWS],
}

/// Runs [`BlockStatistics`]. Not generic, so that it is compiled once.
fn block_statistics(cpu: &Cpu, kernel: BlockStatistics) {
    cpu.dispatch(kernel);
}

/// Caps scores, makes invisible ones -inf, and finds what the softmax must know of the rest.
struct BlockStatistics<'a> {
    scores: &'a mut [f32],
    plan: &'a Tiles,
    rows: usize,
    keys: Range,
    ranges: &'a [Range; ROWS],
    cap: Option<(f32, f32)>,
    seen: &'a mut Seen,
}

impl Kernel for BlockStatistics<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // Each score waits for the one before it: two vectors of rows go side by side where there are as many.
        match (self.plan.width.is_multiple_of(2 * S::LANES), near_pays(S::LANES)) {
            (true, true) => self.all::<_, true>(Unrolled(s)),
            (true, false) => self.all::<_, false>(Unrolled(s)),
            (false, true) => self.all::<_, true>(s),
            (false, false) => self.all::<_, false>(s),
        }
    }
}

impl BlockStatistics<'_> {
    #[inline(always)]
    fn all<S: Simd, const LEAST: bool>(self, s: S) {
        let BlockStatistics { scores, plan, rows, keys, ranges, cap, seen } = self;
        let width = plan.width;
        let (mut from, mut to) = ([0f32; ROWS], [0f32; ROWS]);
        for r in 0..rows {
            // Positions are below 2^24, so f32 holds them; `to` is the last visible key.
            (from[r], to[r]) = (ranges[r].from as f32, ranges[r].to as f32 - 1.0);
        }
        for r in rows..ROWS {
            (from[r], to[r]) = (1.0, -1.0);
        }
        // Keys that every row sees need no mask.
        let Range { from: start, to: end } = seen_by_all(&ranges[..rows]).within(keys.from, keys.to);
        let end = end.max(start);
        let count = keys.to - keys.from;
        assert!(scores.len() >= count.saturating_mul(width) && width <= ROWS && width.is_multiple_of(S::LANES));
        let lowest = s.splat(f32::NEG_INFINITY);
        for lane in (0..width).step_by(S::LANES) {
            // SAFETY: lane + LANES <= width <= ROWS.
            let at = |rows: &[f32; ROWS]| unsafe { s.load(rows[lane..][..S::LANES].as_ptr()) };
            let (first, last) = (at(&from), at(&to));
            let (mut max, mut min, mut sum) = (at(&seen.largest), at(&seen.least), at(&seen.sum));
            // Before, between and after the bounds of what all rows see; only the middle goes without a mask.
            for (part, masked) in [(keys.from..start, true), (start..end, false), (end..keys.to, true)] {
                if !masked && cap.is_none() {
                    // Sums of zeros, which wait longest for themselves, of every other key.
                    let mut sums = [sum, s.splat(0.0)];
                    macro_rules! look {
                        ($j:expr, $sum:expr) => {
                            // SAFETY: the key is below keys.to and lane + LANES at most width; the assertion bounds both.
                            let score = unsafe { s.load(scores.as_ptr().add(($j - keys.from) * width + lane)) };
                            $sum = s.fma(score, s.splat(0.0), $sum);
                            max = s.max(score, max);
                            if LEAST {
                                min = s.min(score, min);
                            }
                        };
                    }
                    let pairs = part.start + part.len() / 2 * 2;
                    for j in (part.start..pairs).step_by(2) {
                        look!(j, sums[0]);
                        look!(j + 1, sums[1]);
                    }
                    for j in pairs..part.end {
                        look!(j, sums[0]);
                    }
                    sum = s.add(sums[0], sums[1]);
                    continue;
                }
                for j in part {
                    // SAFETY: as above.
                    let place = unsafe { scores.as_mut_ptr().add((j - keys.from) * width + lane) };
                    // SAFETY: as above.
                    let mut score = unsafe { s.load(place) };
                    if let Some((cap, factor)) = cap {
                        score = s.mul(s.splat(cap), tanh(s, s.mul(score, s.splat(factor))));
                    }
                    let mut visible = score;
                    if masked {
                        let position = s.splat(j as f32);
                        let inside = |yes, no| s.select_ge(position, first, s.select_ge(last, position, yes, no), no);
                        visible = inside(score, s.splat(0.0));
                        score = inside(score, lowest);
                    }
                    // Stays +-0 while every visible score is finite, and is NaN from the first that is not.
                    sum = s.fma(visible, s.splat(0.0), sum);
                    max = s.max(score, max);
                    if LEAST && !masked {
                        min = s.min(score, min);
                    }
                    // SAFETY: as above.
                    unsafe { s.store(score, place) };
                }
            }
            // SAFETY: lane + LANES <= width <= ROWS.
            unsafe {
                s.store(max, seen.largest[lane..][..S::LANES].as_mut_ptr());
                s.store(min, seen.least[lane..][..S::LANES].as_mut_ptr());
                s.store(sum, seen.sum[lane..][..S::LANES].as_mut_ptr());
            }
        }
    }
}

/// Runs [`Exponentiate`]. Not generic, so that it is compiled once.
fn exponentiate(cpu: &Cpu, kernel: Exponentiate) {
    cpu.dispatch(kernel);
}

/// Turns scores into weights, in place, and sums them block by block; `end` is the last key of all.
struct Exponentiate<'a> {
    scores: &'a mut [f32],
    plan: &'a Tiles,
    keys: Range,
    end: usize,
    c: (f32, f32),
    softmax: &'a Softmax,
    sums: &'a mut Sums,
    /// What is read next, prefetched to L2 while weights are computed. It may be empty.
    ahead: &'a [f32],
}

impl Kernel for Exponentiate<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let keys = self.keys;
        if near_pays(S::LANES) && self.softmax.near.is_some_and(|near| near.within(keys.from, keys.to) == keys) {
            return self.near(s);
        }
        // What the other lanes of n hold belongs to no row.
        let mut small = true;
        for lane in (0..self.plan.width).step_by(S::LANES) {
            small &= is_small(s, load_at(s, &self.softmax.n, lane, 0.0));
        }
        if small { self.all::<S, true>(s) } else { self.all::<S, false>(s) }
    }
}

impl Exponentiate<'_> {
    /// Where every row sees all keys and none of their weights is negligible.
    #[inline(always)]
    fn near<S: Simd>(self, s: S) {
        let Exponentiate { scores, plan, keys, end, c, softmax, sums, ahead } = self;
        let width = plan.width;
        // Lines for four keys of a vector of rows.
        let steps = ((keys.to - keys.from) / 4 * (width / S::LANES)).max(1);
        let lines = (ahead.len() / LINE).div_ceil(steps);
        let mut line = ahead.as_ptr();
        assert!(scores.len() >= (keys.to - keys.from).saturating_mul(width) && width.is_multiple_of(S::LANES));
        for lane in (0..width).step_by(S::LANES) {
            let coefficients = near_coefficients(s, load_at(s, &softmax.units, lane, 0.0));
            let mut total = load_at(s, &sums.total, lane, 0.0);
            let mut block = load_at(s, &sums.block, lane, 0.0);
            let mut j = keys.from;
            while j < keys.to {
                let to = ((j / BLOCK + 1) * BLOCK).min(keys.to);
                let mut place = |j: usize| scores[(j - keys.from) * width + lane..].as_mut_ptr();
                while j + 4 <= to {
                    for _ in 0..lines {
                        prefetch_second(line);
                        line = line.wrapping_add(LINE);
                    }
                    let at = place(j);
                    // SAFETY: j + 3 is below keys.to and lane + LANES at most width; the assertion bounds both.
                    unsafe {
                        let [x0, x1, x2, x3] =
                            [s.load(at), s.load(at.add(width)), s.load(at.add(2 * width)), s.load(at.add(3 * width))];
                        let w = near_weights::<_, 4, false>(s, [x0, x1, x2, x3], c, &coefficients);
                        for (v, w) in w.into_iter().enumerate() {
                            block = s.add(block, w);
                            s.store(w, at.add(v * width));
                        }
                    }
                    j += 4;
                }
                while j < to {
                    let at = place(j);
                    // SAFETY: as above, of j.
                    unsafe {
                        let [w] = near_weights::<_, 1, false>(s, [s.load(at)], c, &coefficients);
                        block = s.add(block, w);
                        s.store(w, at);
                    }
                    j += 1;
                }
                if to.is_multiple_of(BLOCK) || to == end {
                    total = s.add(total, block);
                    block = s.splat(0.0);
                }
            }
            // SAFETY: lane + LANES <= width <= ROWS.
            unsafe {
                s.store(block, sums.block[lane..][..S::LANES].as_mut_ptr());
                s.store(total, sums.total[lane..][..S::LANES].as_mut_ptr());
            }
        }
    }

    #[inline(always)]
    fn all<S: Simd, const SMALL: bool>(self, s: S) {
        let Exponentiate { scores, plan, keys, end, c, softmax, sums, .. } = self;
        let width = plan.width;
        let count = keys.to - keys.from;
        assert!(scores.len() >= count.saturating_mul(width) && width <= ROWS && width.is_multiple_of(S::LANES));
        let s8 = of_eight(s);
        for lane in (0..width).step_by(S::LANES) {
            let n = load_at(s, &softmax.n, lane, 0.0);
            let mut total = load_at(s, &sums.total, lane, 0.0);
            let mut block = load_at(s, &sums.block, lane, 0.0);
            let mut from = keys.from;
            while from < keys.to {
                let block_end = (from / BLOCK + 1) * BLOCK;
                let to = block_end.min(keys.to);
                let mut j = from;
                while j < to {
                    // SAFETY: j is below keys.to and lane + LANES at most width; the assertion bounds both.
                    let place = unsafe { scores.as_mut_ptr().add((j - keys.from) * width + lane) };
                    let many = if to - j < 8 { 1 } else { 8 };
                    let (mut score, mut w) = ([s.splat(0.0); 8], [s.splat(0.0); 8]);
                    if many == 8 {
                        for (v, score) in score.iter_mut().enumerate() {
                            // SAFETY: as above, of j + v.
                            *score = unsafe { s.load(place.add(v * width)) };
                        }
                        let n = eight::<S>([n; 8]);
                        w = vectors::<S>(weigh::<_, SMALL>(s8, eight::<S>(score), s8.splat(c.0), s8.splat(c.1), n));
                    } else {
                        // SAFETY: as above.
                        score[0] = unsafe { s.load(place) };
                        w[0] = weigh::<_, SMALL>(s, score[0], s.splat(c.0), s.splat(c.1), n);
                    }
                    for (v, (score, mut w)) in score.into_iter().zip(w).enumerate().take(many) {
                        // An invisible key has score -inf here and so weight +0, which changes no l.
                        block = s.add(block, w);
                        if softmax.skips {
                            w = s.select_ge(score, s.splat(f32::MIN), w, s.splat(f32::NAN));
                        }
                        // SAFETY: as above, of j + v.
                        unsafe { s.store(w, place.add(v * width)) };
                    }
                    j += many;
                }
                if to == block_end || to == end {
                    total = s.add(total, block);
                    block = s.splat(0.0);
                }
                from = to;
            }
            // SAFETY: lane + LANES <= width <= ROWS.
            unsafe {
                s.store(block, sums.block[lane..][..S::LANES].as_mut_ptr());
                s.store(total, sums.total[lane..][..S::LANES].as_mut_ptr());
            }
        }
    }
}
