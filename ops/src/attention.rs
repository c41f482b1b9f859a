//! Attention: `q[B,T,Hq,D], k[B,S,Hkv,D], v[B,S,Hkv,E], q_pos[B,T], kv_len[B] -> out[B,T,Hq,E], lse[B,T,Hq]` (f32).
//!
//! Formula: `out = softmax(scale * q k^T over the visible keys) v`; query head h reads key head `h / (Hq/Hkv)`. Key j is
//! visible to position p when `j < kv_len`, `j <= p` if causal, and `j > p - window` if window > 0.
//! Order: a score is a chain over d. Scores become `m * 2^i` through `exp_split(s; c_hi, c_lo)` with
//! `c = scale * log2(e)`, `n = max i`. Keys are cut at absolute multiples of 256; inside a block `l += weight` and
//! `acc[e] = fma(weight, v[e], acc[e])`, keys ascending, invisible keys skipped; blocks are added ascending, from +0.
//! Rounding: every step once to f32; `out = acc / l`, last rounding; `lse(n, l)` in f64, rounded once.
//! Softcap: `s = cap * tanh(s * f32(scale/cap))`, then `c = log2(e)`.
//! Special: no visible key gives out +0 and lse -inf; a visible score of NaN or +inf gives NaN; -inf counts as invisible.
//!
//! Two passes over the scores of 32 query rows at a time, one row per lane: the first finds `n`, the second makes the
//! weights in place. Because `n` is an integer exponent, nothing is rescaled and no tile border can be seen.

use crate::gemm::SharedOut;
use crate::lanes::{Kernel, MAX_LANES, Simd, load_at, narrow_at};
use crate::math::{LOG2E_HI, LOG2E_LO, exp_split, lse, tanh, weight};
use crate::pack::{
    Scratch, bf16_slice, least_magnitude, pairs_of_row, prefetch, scatter_pairs, scatter_wide, wide_row,
};
use crate::tile::{Left, Order, Right, TILE_ROWS, Tile, dot_is_exact, dot_tile, fma_tile};
use crate::{Cpu, Element, Error, Isa, Tf32, check_len, value_error};
use half::bf16;

/// Dimensions and parameters of attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    /// Batch B.
    pub batch: usize,
    /// Queries per batch entry, T.
    pub queries: usize,
    /// Keys per batch entry, S; `kv_len` says how many of them hold data.
    pub keys: usize,
    /// Query heads Hq, a multiple of `kv_heads`.
    pub q_heads: usize,
    /// Key and value heads Hkv.
    pub kv_heads: usize,
    /// Dimension of queries and keys, D.
    pub head_dim: usize,
    /// Dimension of values, E.
    pub value_dim: usize,
    /// Factor of the scores; finite and not negative.
    pub scale: f64,
    /// Whether key j is visible to position p only when `j <= p`.
    pub causal: bool,
    /// Key j is visible to position p only when `j > p - window`; 0 means no window.
    pub window: usize,
    /// Scores become `softcap * tanh(score / softcap)`; 0 means none.
    pub softcap: f64,
    /// How f32 operands of q, k and v are read.
    pub tf32: Tf32,
}

/// Keys per block: belongs to the contract, not to the machine.
const BLOCK: usize = 256;
/// Keys between a key and the one asked of memory beside it.
const AHEAD: usize = 32;
/// Query rows per tile: one row of scores per lane of a panel.
const ROWS: usize = 32;

/// `q[B,T,Hq,D], k[B,S,Hkv,D], v[B,S,Hkv,E], q_pos[B,T], kv_len[B] -> out[B,T,Hq,E], lse[B,T,Hq]`, all row-major.
///
/// # Errors
/// [`Error::Length`] when a slice does not match; [`Error::Value`] when `q_heads` is not a multiple of `kv_heads`, a
/// `kv_len` is outside `0..=S`, `scale` or `softcap` is negative or not finite, S exceeds 2^24, or the budget is below
/// the smallest plan (the scores of 16 rows and one block of keys).
#[allow(clippy::too_many_arguments)]
pub fn attention<I: Element, O: Element>(
    cpu: &Cpu,
    shape: &Attention,
    q: &[I],
    k: &[I],
    v: &[I],
    q_pos: &[i32],
    kv_len: &[i32],
    out: &mut [O],
    lse: &mut [f32],
) -> Result<(), Error> {
    let Attention { batch, queries, keys, q_heads, kv_heads, head_dim, value_dim, .. } = *shape;
    let bad = |what: String| Err(value_error("attention", what));
    if kv_heads == 0 || !q_heads.is_multiple_of(kv_heads) {
        return bad(format!("{q_heads} query heads cannot share {kv_heads} key heads; Hq must be a multiple of Hkv"));
    }
    if !(shape.scale >= 0.0 && shape.scale.is_finite()) {
        return bad(format!("scale is {}; it must be finite and not negative", shape.scale));
    }
    if !(shape.softcap >= 0.0 && shape.softcap.is_finite()) {
        return bad(format!("softcap is {}; it must be finite and not negative", shape.softcap));
    }
    if keys > 1 << 24 {
        return bad(format!("S is {keys}; at most {} keys", 1 << 24));
    }
    check_len("attention", "q", "[B,T,Hq,D]", q.len(), &[batch, queries, q_heads, head_dim])?;
    check_len("attention", "k", "[B,S,Hkv,D]", k.len(), &[batch, keys, kv_heads, head_dim])?;
    check_len("attention", "v", "[B,S,Hkv,E]", v.len(), &[batch, keys, kv_heads, value_dim])?;
    check_len("attention", "q_pos", "[B,T]", q_pos.len(), &[batch, queries])?;
    check_len("attention", "kv_len", "[B]", kv_len.len(), &[batch])?;
    check_len("attention", "out", "[B,T,Hq,E]", out.len(), &[batch, queries, q_heads, value_dim])?;
    check_len("attention", "lse", "[B,T,Hq]", lse.len(), &[batch, queries, q_heads])?;
    if let Some(b) = kv_len.iter().position(|&len| usize::try_from(len).map_or(true, |len| len > keys)) {
        return bad(format!("kv_len[{b}] is {}; it must be in 0..={keys}", kv_len[b]));
    }
    if out.is_empty() && lse.is_empty() {
        return Ok(());
    }
    // Every thread holds one tile: its scores (16 or 32 rows wide) and one block of widened keys or values.
    let tile_bytes = |width: usize| {
        let columns = value_dim.next_multiple_of(16);
        4 * (keys * width + BLOCK * head_dim.next_multiple_of(2).max(columns) + width * (head_dim + 1 + 2 * columns))
    };
    let group = q_heads / kv_heads;
    let width = if queries * group <= 16 || tile_bytes(ROWS) * cpu.threads() > cpu.budget() { 16 } else { ROWS };
    if tile_bytes(width) * cpu.threads() > cpu.budget() {
        return bad(format!(
            "a budget of {} bytes is below the smallest plan, {} bytes",
            cpu.budget(),
            tile_bytes(width) * cpu.threads()
        ));
    }
    let tiles = (queries * group).div_ceil(width);
    // Keys that many tiles read are turned into pairs once, when there is room for them.
    let room = cpu.budget().saturating_sub(tile_bytes(width) * cpu.threads());
    let narrow = bf16_slice(k).filter(|_| cpu.isa() == Isa::Avx512Bf16 && tiles > 1);
    let paired = narrow.filter(|_| PairedKeys::bytes(shape) <= room).map(|k| PairedKeys::new(cpu, shape, k, kv_len));
    let out = SharedOut { data: out.as_mut_ptr(), len: out.len() };
    let lse = SharedOut { data: lse.as_mut_ptr(), len: lse.len() };
    cpu.each(batch * kv_heads * tiles, |task| {
        let (entry, tile) = (task / tiles, task % tiles);
        let (b, kv_head) = (entry / kv_heads, entry % kv_heads);
        let first = tile * width;
        let rows = width.min(queries * group - first);
        let paired = paired.as_ref().map(|paired| paired.entry(entry));
        RowTile { cpu, shape, width, b, kv_head, first, rows, q, k, v, q_pos, kv_len: kv_len[b] as usize, paired }
            .run(&out, &lse);
    });
    Ok(())
}

/// Up to `width` query rows that share one key head: row r is query `(first + r) / group`, head `(first + r) % group` of
/// the group.
struct RowTile<'a, I> {
    cpu: &'a Cpu,
    shape: &'a Attention,
    /// Lanes per row of scores: 16 or 32.
    width: usize,
    b: usize,
    kv_head: usize,
    first: usize,
    rows: usize,
    q: &'a [I],
    k: &'a [I],
    v: &'a [I],
    q_pos: &'a [i32],
    kv_len: usize,
    /// The keys as pairs, when other tiles read them too.
    paired: Option<Paired<'a>>,
}

/// The keys of one key head as pairs, key by key, and the smallest nonzero magnitude of each block.
#[derive(Clone, Copy)]
struct Paired<'a> {
    words: &'a [u32],
    least: &'a [f32],
}

/// [`Paired`] for every (batch entry, key head).
struct PairedKeys {
    words: Scratch,
    least: Vec<f32>,
    /// Words and blocks per entry.
    size: usize,
    blocks: usize,
}

impl PairedKeys {
    /// Workspace it takes.
    fn bytes(shape: &Attention) -> usize {
        let entries = shape.batch * shape.kv_heads;
        (4 * shape.keys.next_multiple_of(BLOCK) * shape.head_dim.div_ceil(2)).saturating_mul(entries)
    }

    fn new(cpu: &Cpu, shape: &Attention, k: &[bf16], kv_len: &[i32]) -> PairedKeys {
        let Attention { batch, keys, kv_heads, head_dim, .. } = *shape;
        let (step, blocks) = (head_dim.div_ceil(2), keys.div_ceil(BLOCK));
        let size = blocks * BLOCK * step;
        let mut words = Scratch::new(size * batch * kv_heads);
        let mut least = vec![f32::INFINITY; blocks * batch * kv_heads];
        let place = SharedOut { data: words.words().as_mut_ptr(), len: size * batch * kv_heads };
        cpu.chunks(&mut least, 1, |i, least| {
            let (entry, block) = (i / blocks, i % blocks);
            let (b, kv_head) = (entry / kv_heads, entry % kv_heads);
            // SAFETY: every (entry, block) has its own part, and `words` outlives the threads.
            let out = unsafe { place.part(i * BLOCK * step, BLOCK * step) };
            let count = BLOCK.min((kv_len[b] as usize).saturating_sub(block * BLOCK));
            for (j, out) in out.chunks_exact_mut(step.max(1)).enumerate().take(count) {
                let at = ((b * keys + block * BLOCK + j) * kv_heads + kv_head) * head_dim;
                least[0] = least[0].min(pairs_of_row(cpu, &k[at..][..head_dim], bf16::ZERO, out));
            }
        });
        PairedKeys { words, least, size, blocks }
    }

    fn entry(&self, entry: usize) -> Paired<'_> {
        Paired {
            words: &self.words.filled()[entry * self.size..][..self.size],
            least: &self.least[entry * self.blocks..][..self.blocks],
        }
    }
}

/// The keys a row sees: `from..to`.
#[derive(Clone, Copy, Default)]
struct Range {
    from: usize,
    to: usize,
}

impl<I: Element> RowTile<'_, I> {
    /// Row r's query index and query head.
    fn query_and_head(&self, r: usize) -> (usize, usize) {
        let group = self.shape.q_heads / self.shape.kv_heads;
        ((self.first + r) / group, self.kv_head * group + (self.first + r) % group)
    }

    /// Row r's index in `[B,T,Hq]`.
    fn index(&self, r: usize) -> usize {
        let (t, head) = self.query_and_head(r);
        (self.b * self.shape.queries + t) * self.shape.q_heads + head
    }

    fn range(&self, r: usize) -> Range {
        let (t, _) = self.query_and_head(r);
        let p = i64::from(self.q_pos[self.b * self.shape.queries + t]);
        let to = if self.shape.causal { (p + 1).clamp(0, self.kv_len as i64) as usize } else { self.kv_len };
        let window = i64::try_from(self.shape.window).unwrap_or(i64::MAX);
        let from = if window > 0 { p.saturating_sub(window).saturating_add(1).max(0) as usize } else { 0 };
        Range { from: from.min(to), to }
    }

    /// Key j's position in k, in elements; v likewise with its own dimension.
    fn key_at(&self, j: usize, dim: usize) -> usize {
        ((self.b * self.shape.keys + j) * self.shape.kv_heads + self.kv_head) * dim
    }

    fn run<O: Element>(&self, out: &SharedOut<O>, lse_out: &SharedOut<f32>) {
        let Attention { value_dim, scale, softcap, .. } = *self.shape;
        let mut ranges = [Range::default(); ROWS];
        (0..self.rows).for_each(|r| ranges[r] = self.range(r));
        let seen = || ranges[..self.rows].iter().filter(|range| range.from < range.to);
        let keys = Range {
            from: seen().map(|range| range.from).min().unwrap_or(0),
            to: seen().map(|range| range.to).max().unwrap_or(0),
        };
        let c = if softcap > 0.0 { std::f64::consts::LOG2_E } else { scale * std::f64::consts::LOG2_E };
        let c_hi = c as f32;
        let c_lo = (c - f64::from(c_hi)) as f32;
        debug_assert!(softcap == 0.0 || (c_hi, c_lo) == (LOG2E_HI, LOG2E_LO));

        let mut scores = Scratch::new((keys.to - keys.from) * self.width);
        let scores = scores.floats();
        self.score(keys, scores);
        let softmax = weights(
            self.cpu,
            Weights {
                scores: &mut *scores,
                width: self.width,
                rows: self.rows,
                keys,
                ranges: &ranges,
                cap: (softcap > 0.0).then(|| (softcap as f32, (scale / softcap) as f32)),
                c: (c_hi, c_lo),
            },
        );
        let columns = value_dim.next_multiple_of(16);
        let total = self.values(keys, &ranges, scores, softmax.skips);
        for r in 0..self.rows {
            // SAFETY: each (tile, row) has its own index in [B,T,Hq].
            let (row, lse_row) =
                unsafe { (out.part(self.index(r) * value_dim, value_dim), lse_out.part(self.index(r), 1)) };
            match softmax.rows[r] {
                Row::Empty => {
                    row.fill(O::narrow(0.0));
                    lse_row[0] = f32::NEG_INFINITY;
                }
                Row::Invalid => {
                    row.fill(O::narrow(f32::NAN));
                    lse_row[0] = f32::narrow(f32::NAN);
                }
                Row::Valid { n, l } => {
                    self.cpu.dispatch(Divide { total: &total[r * columns..][..value_dim], l, out: row });
                    lse_row[0] = lse(n, l);
                }
            }
        }
    }

    /// `scores[j - keys.from][r]`: a chain over d for every key of the tile, visible or not.
    fn score(&self, keys: Range, scores: &mut [f32]) {
        let d = self.shape.head_dim;
        let width = self.width;
        let query = |r: usize| &self.q[self.index(r) * d..][..d];
        let mut query_wide = Scratch::new(d * width);
        let query_wide = query_wide.floats();
        query_wide.fill(0.0);
        (0..self.rows).for_each(|r| scatter_wide(query(r), self.shape.tf32, query_wide, r, width));
        // The dot kernel, where the operands are bf16 and the machine has it.
        let narrow = bf16_slice(self.q).zip(bf16_slice(self.k)).filter(|_| self.cpu.isa() == Isa::Avx512Bf16);
        let mut query_pairs = Scratch::new(if narrow.is_some() { d.div_ceil(2) * width } else { 0 });
        let mut least_query = f32::INFINITY;
        if let Some((q, _)) = narrow {
            query_pairs.words().fill(0);
            for r in 0..self.rows {
                let query = &q[self.index(r) * d..][..d];
                least_query = least_query.min(least_magnitude(self.cpu, query));
                scatter_pairs(query, bf16::NEG_ZERO, query_pairs.words(), r, width);
            }
        }
        let query_pairs: &[u32] = query_pairs.words();
        // One chain is a tree of one segment.
        let chain = [0, d];
        let mut block = Scratch::new(BLOCK * d.next_multiple_of(2));
        let step = d.div_ceil(2);
        let mut from = keys.from;
        while from < keys.to {
            let to = (from / BLOCK + 1).saturating_mul(BLOCK).min(keys.to);
            let count = to - from;
            let out = &mut scores[(from - keys.from) * width..][..count * width];
            let least_key = match (self.paired, narrow) {
                (Some(paired), _) => paired.least[from / BLOCK],
                (None, Some((_, k))) => {
                    let mut least = f32::INFINITY;
                    for (j, pairs) in (from..to).zip(block.words().chunks_exact_mut(step.max(1))) {
                        prefetch(&k[self.key_at((j + AHEAD).min(keys.to - 1), d)..][..d]);
                        least = least.min(pairs_of_row(self.cpu, &k[self.key_at(j, d)..][..d], bf16::ZERO, pairs));
                    }
                    least
                }
                (None, None) => f32::NAN,
            };
            if dot_is_exact(least_query, least_key) {
                let key_pairs: &[u32] = match self.paired {
                    Some(paired) => &paired.words[from * step..],
                    None => block.words(),
                };
                for (first, out) in (0..count).step_by(TILE_ROWS).zip(out.chunks_mut(TILE_ROWS * width)) {
                    let tile = Tile {
                        left: Left { data: &key_pairs[first * step..], row_stride: step, step: 1 },
                        right: Right::Pairs(query_pairs, width),
                        order: Order::Tree(&chain),
                        rows: TILE_ROWS.min(count - first),
                        columns: width,
                        out,
                        out_stride: width,
                    };
                    dot_tile(self.cpu, tile);
                }
            } else {
                for (j, wide) in (from..to).zip(block.floats().chunks_exact_mut(d.max(1))) {
                    wide_row(&self.k[self.key_at(j, d)..][..d], self.shape.tf32, wide);
                }
                let key_wide: &[f32] = block.floats();
                for (first, out) in (0..count).step_by(TILE_ROWS).zip(out.chunks_mut(TILE_ROWS * width)) {
                    fma_tile(
                        self.cpu,
                        Tile {
                            left: Left { data: &key_wide[first * d..], row_stride: d, step: 1 },
                            right: Right::Wide(query_wide, width),
                            order: Order::Tree(&chain),
                            rows: TILE_ROWS.min(count - first),
                            columns: width,
                            out,
                            out_stride: width,
                        },
                    );
                }
            }
            from = to;
        }
    }

    /// `total[r][e]`: the weighted sum of the values each row sees, block by block. With `skips`, weights of visible
    /// keys whose score is -inf are marked NaN and those keys are skipped.
    fn values(&self, keys: Range, ranges: &[Range; ROWS], weights: &[f32], skips: bool) -> Vec<f32> {
        let e = self.shape.value_dim;
        let columns = e.next_multiple_of(16);
        let width = self.width;
        let mut total = vec![0f32; width * columns];
        let mut acc = vec![0f32; width * columns];
        let mut wide = Vec::new();
        if e == 0 {
            return total;
        }
        let first_block = keys.from / BLOCK * BLOCK;
        for block in (first_block..keys.to).step_by(BLOCK) {
            let from = block.max(keys.from);
            let to = (block + BLOCK).min(keys.to);
            // bf16 rows of whole vectors are read in place; others are widened and padded first.
            let in_place = bf16_slice(self.v).filter(|_| e == columns);
            if in_place.is_none() {
                wide.resize(BLOCK * columns, 0.0);
                (from..to).for_each(|j| {
                    wide_row(&self.v[self.key_at(j, e)..][..e], self.shape.tf32, &mut wide[(j - from) * columns..])
                });
            }
            acc.fill(0.0);
            let mut accumulate = |first: usize, rows: usize, part: Range| {
                if part.from >= part.to {
                    return;
                }
                let right = match in_place {
                    Some(v) => Right::Narrow(&v[self.key_at(part.from, e)..], self.shape.kv_heads * e),
                    None => Right::Wide(&wide[(part.from - from) * columns..], columns),
                };
                fma_tile(
                    self.cpu,
                    Tile {
                        left: Left {
                            data: &weights[(part.from - keys.from) * width + first..],
                            row_stride: 1,
                            step: width,
                        },
                        right,
                        order: Order::Chain(part.to - part.from),
                        rows,
                        columns,
                        out: &mut acc[first * columns..],
                        out_stride: columns,
                    },
                );
            };
            for first in (0..self.rows).step_by(TILE_ROWS) {
                let rows = TILE_ROWS.min(self.rows - first);
                let mine = &ranges[first..first + rows];
                let cut = |range: &Range| Range { from: range.from.clamp(from, to), to: range.to.clamp(from, to) };
                // Keys that all rows see go through one tile; what a row sees before and after them, row by row.
                let shared = Range {
                    from: mine.iter().map(|range| cut(range).from).max().unwrap_or(to),
                    to: mine.iter().map(|range| cut(range).to).min().unwrap_or(from),
                };
                if skips || shared.from >= shared.to {
                    for (r, range) in mine.iter().enumerate() {
                        let Range { from, to } = cut(range);
                        if !skips {
                            accumulate(first + r, 1, Range { from, to });
                            continue;
                        }
                        let skipped = |j: &usize| weights[(j - keys.from) * width + first + r].is_nan();
                        (from..to)
                            .filter(|j| !skipped(j))
                            .for_each(|j| accumulate(first + r, 1, Range { from: j, to: j + 1 }));
                    }
                } else {
                    for (r, range) in mine.iter().enumerate() {
                        accumulate(first + r, 1, Range { from: cut(range).from, to: shared.from });
                    }
                    // A tile that is the only reader of its values asks memory for them ahead, some keys at a time.
                    let part = if self.paired.is_none() && first == 0 { AHEAD } else { BLOCK };
                    for from in (shared.from..shared.to).step_by(part) {
                        let to = (from + part).min(shared.to);
                        if part == AHEAD {
                            let ahead = to..(to + AHEAD).min(keys.to);
                            ahead.for_each(|j| prefetch(&self.v[self.key_at(j, e)..][..e]));
                        }
                        accumulate(first, rows, Range { from, to });
                    }
                    for (r, range) in mine.iter().enumerate() {
                        accumulate(first + r, 1, Range { from: shared.to, to: cut(range).to });
                    }
                }
            }
            add_to(self.cpu, &mut total, &acc);
        }
        total
    }
}

/// What the softmax found for one row.
#[derive(Clone, Copy)]
enum Row {
    /// No key counts.
    Empty,
    /// A visible score is NaN or +inf.
    Invalid,
    /// Weights are relative to `2^n` and sum to `l`.
    Valid { n: f32, l: f32 },
}

struct Softmax {
    rows: [Row; ROWS],
    /// Some visible score is -inf; its weight is marked NaN.
    skips: bool,
}

/// Runs [`Weights`]. Not generic, so that it is compiled once.
fn weights(cpu: &Cpu, tile: Weights) -> Softmax {
    cpu.dispatch(tile)
}

/// Turns the scores of a tile into weights, in place.
struct Weights<'a> {
    scores: &'a mut [f32],
    width: usize,
    rows: usize,
    keys: Range,
    ranges: &'a [Range; ROWS],
    /// `(cap, f32(scale / cap))`.
    cap: Option<(f32, f32)>,
    c: (f32, f32),
}

impl Kernel for Weights<'_> {
    type Output = Softmax;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Softmax {
        let Weights { scores, width, rows, keys, ranges, cap, c } = self;
        let (mut from, mut to) = ([0f32; ROWS], [0f32; ROWS]);
        for r in 0..rows {
            // Positions are below 2^24, so f32 holds them; `to` is the last visible key.
            (from[r], to[r]) = (ranges[r].from as f32, ranges[r].to as f32 - 1.0);
        }
        for r in rows..ROWS {
            (from[r], to[r]) = (1.0, -1.0);
        }
        // Keys that every row sees need no mask.
        let mine = &ranges[..rows];
        let shared = Range {
            from: mine.iter().map(|range| range.from).max().unwrap_or(0),
            to: mine.iter().map(|range| range.to).min().unwrap_or(0),
        };
        let count = keys.to - keys.from;
        assert!(scores.len() >= count * width && width <= ROWS && width.is_multiple_of(S::LANES));
        let lowest = s.splat(f32::NEG_INFINITY);
        let (mut largest, mut finite) = ([f32::NEG_INFINITY; ROWS], [0f32; ROWS]);
        for lane in (0..width).step_by(S::LANES) {
            let (first, last) = (load_at(s, &from[..], lane, 0.0), load_at(s, &to[..], lane, 0.0));
            let (mut max, mut sum) = (lowest, s.splat(0.0));
            // Before, between and after the bounds of what all rows see; only the middle goes without a mask.
            let start = shared.from.clamp(keys.from, keys.to);
            let end = shared.to.clamp(start, keys.to);
            for (part, masked) in [(keys.from..start, true), (start..end, false), (end..keys.to, true)] {
                if !masked && cap.is_none() {
                    for j in part {
                        // SAFETY: j is below keys.to and lane + LANES at most width; the assertion bounds both.
                        let score = unsafe { s.load(scores.as_ptr().add((j - keys.from) * width + lane)) };
                        sum = s.fma(score, s.splat(0.0), sum);
                        max = s.max(score, max);
                    }
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
                    // SAFETY: as above.
                    unsafe { s.store(score, place) };
                }
            }
            // SAFETY: lane + LANES <= width <= ROWS.
            unsafe {
                s.store(max, largest[lane..][..S::LANES].as_mut_ptr());
                s.store(sum, finite[lane..][..S::LANES].as_mut_ptr());
            }
        }

        let mut result = Softmax { rows: [Row::Empty; ROWS], skips: false };
        let mut reference = [0f32; ROWS];
        for r in 0..rows {
            let mut score = (ranges[r].from..ranges[r].to).map(|j| scores[(j - keys.from) * width + r]);
            if finite[r].is_nan() {
                result.skips |= score.clone().any(|v| v == f32::NEG_INFINITY);
                if score.any(|v| v.is_nan() || v == f32::INFINITY) {
                    result.rows[r] = Row::Invalid;
                    continue;
                }
            }
            if largest[r] > f32::NEG_INFINITY {
                let n = (largest[r] * c.0).round_ties_even();
                if n.is_finite() {
                    result.rows[r] = Row::Valid { n, l: 0.0 };
                    reference[r] = n;
                } else {
                    // A finite score whose product with c overflows: inf - inf.
                    result.rows[r] = Row::Invalid;
                }
            }
        }

        let mut sums = [0f32; ROWS];
        for lane in (0..width).step_by(S::LANES) {
            let n = load_at(s, &reference[..], lane, 0.0);
            let mut total = s.splat(0.0);
            let (c_hi, c_lo) = (s.splat(c.0), s.splat(c.1));
            let mut from = keys.from;
            while from < keys.to {
                let to = (from / BLOCK + 1).saturating_mul(BLOCK).min(keys.to);
                let mut block = s.splat(0.0);
                for j in from..to {
                    // SAFETY: as above.
                    let place = unsafe { scores.as_mut_ptr().add((j - keys.from) * width + lane) };
                    // SAFETY: as above.
                    let score = unsafe { s.load(place) };
                    let (m, i) = exp_split(s, score, c_hi, c_lo);
                    // An invisible key has score -inf here and so weight +0, which changes no l.
                    let mut w = weight(s, m, i, n);
                    block = s.add(block, w);
                    if result.skips {
                        w = s.select_ge(score, s.splat(f32::MIN), w, s.splat(f32::NAN));
                    }
                    // SAFETY: as above.
                    unsafe { s.store(w, place) };
                }
                total = s.add(total, block);
                from = to;
            }
            // SAFETY: lane + LANES <= width <= ROWS.
            unsafe { s.store(total, sums[lane..][..S::LANES].as_mut_ptr()) };
        }
        for (row, sum) in result.rows.iter_mut().zip(sums) {
            if let Row::Valid { l, .. } = row {
                *l = sum;
            }
        }
        result
    }
}

/// `total += block`, element by element. Not generic, so that it is compiled once.
fn add_to(cpu: &Cpu, total: &mut [f32], block: &[f32]) {
    cpu.dispatch(AddTo { total, block });
}

struct AddTo<'a> {
    total: &'a mut [f32],
    block: &'a [f32],
}

impl Kernel for AddTo<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for at in (0..self.total.len()).step_by(S::LANES) {
            let sum = s.add(load_at(s, self.total, at, 0.0), load_at(s, self.block, at, 0.0));
            narrow_at(s, sum, self.total, at);
        }
    }
}

/// `total / l` and the last rounding of one row.
struct Divide<'a, O> {
    total: &'a [f32],
    l: f32,
    out: &'a mut [O],
}

impl<O: Element> Kernel for Divide<'_, O> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        const { assert!(ROWS.is_multiple_of(MAX_LANES)) };
        for at in (0..self.out.len()).step_by(S::LANES) {
            narrow_at(s, s.div(load_at(s, self.total, at, 0.0), s.splat(self.l)), self.out, at);
        }
    }
}
