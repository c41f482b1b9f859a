//! What a call of attention is made of: its parameters, where its sequences stand, and what every task reads.

use crate::math::{LOG2E_HI, LOG2E_LO, exp_split, lse, weight};
use crate::parallel::SharedOut;
use crate::profile::IEEE;
use crate::simd::scalar::Scalar;
use crate::simd::{Kernel, Simd, load_at, narrow_at};
use crate::tensor::Heads;
use crate::{Cpu, Element, Error, Tf32, check_len, value_error};
use samebits_schema::Call;

/// Dimensions and parameters of attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    /// Batch B.
    pub batch: usize,
    /// Queries per batch entry, T; where queries are packed, all of them.
    pub queries: usize,
    /// Keys per batch entry, S, of which `kv_len` say how many hold data; where keys are packed or paged, all rows of k.
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
    /// Key j is visible to position p only when `j > p - window`; at least 1.
    pub window: Option<usize>,
    /// Key j is visible to position p only when `j >= chunk * floor(p / chunk)`; at least 1.
    pub chunk: Option<usize>,
    /// Scores become `softcap * tanh(score / softcap)`; positive and finite. An f64, since `scale / softcap` is
    /// rounded once.
    pub softcap: Option<f64>,
    /// How f32 operands of q, k and v are read.
    pub tf32: Tf32,
}

impl Attention {
    /// Causal attention without window, chunks or softcap, values as wide as keys, scores times `1 / sqrt(head_dim)`.
    pub fn causal([batch, queries, keys]: [usize; 3], [q_heads, kv_heads]: [usize; 2], head_dim: usize) -> Attention {
        Attention {
            batch,
            queries,
            keys,
            q_heads,
            kv_heads,
            head_dim,
            value_dim: head_dim,
            scale: 1.0 / (head_dim as f64).sqrt(),
            causal: true,
            window: None,
            chunk: None,
            softcap: None,
            tf32: Tf32::Disabled,
        }
    }
}

/// Where the queries and keys of each sequence stand, in memory and in the sequence.
#[derive(Clone, Copy, Debug)]
pub struct Sequences<'a> {
    /// Position of each query in its sequence, which decides what it sees: `[B,T]`, or `[T]` where queries are packed.
    pub q_pos: &'a [i32],
    /// Keys of each sequence that hold data: `[B]`, each in `0..=S`, at most 2^24.
    pub kv_len: &'a [i32],
    /// Rows `q_start[b]..q_start[b + 1]` of `q[T,Hq,D]` are the queries of sequence b (B + 1 entries, ascending from 0 to
    /// T). `None`: `q[B,T,Hq,D]`, T for each.
    pub q_start: Option<&'a [i32]>,
    /// The keys and values.
    pub keys: Keys<'a>,
}

impl<'a> Sequences<'a> {
    /// Sequences of `q[B,T,Hq,D]` and `k[B,S,Hkv,D]`: as many rows for each; `kv_len` says how many keys hold data.
    pub fn padded(q_pos: &'a [i32], kv_len: &'a [i32]) -> Sequences<'a> {
        Sequences { q_pos, kv_len, q_start: None, keys: Keys::Padded }
    }
}

/// Queries, keys and values, row-major and of one dtype: `Qkv<[I]>` are slices, `Qkv<Buffer<I>>` stand on a device.
#[derive(Debug)]
pub struct Qkv<'a, X: ?Sized> {
    /// `q[B,T,Hq,D]`, or `[T,Hq,D]` where queries are packed.
    pub q: &'a X,
    /// `k[B,S,Hkv,D]`, or `[S,Hkv,D]` where keys are packed or paged.
    pub k: &'a X,
    /// `v[B,S,Hkv,E]`, in the order of k.
    pub v: &'a X,
}

impl<X: ?Sized> Clone for Qkv<'_, X> {
    fn clone(&self) -> Self {
        *self
    }
}

// Derived, it would ask for slices that are `Copy`.
impl<X: ?Sized> Copy for Qkv<'_, X> {}

/// Where the keys and values of each sequence stand.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub enum Keys<'a> {
    /// `k[B,S,Hkv,D]`: S rows for each sequence, the first `kv_len[b]` of them in use.
    #[default]
    Padded,
    /// `k[S,Hkv,D]`: sequence b has the rows from `k_start[b]` to `k_start[b + 1]` (B + 1 entries, ascending from 0 to S).
    Packed(&'a [i32]),
    /// `k[P,page_size,Hkv,D]`: key j of sequence b stands in page `table[b][j / page_size]`, row `j % page_size`. Pages may
    /// be shared and stand in any order; entries behind the last key in use are not read.
    Paged {
        /// Keys per page, at least 1.
        page_size: usize,
        /// `[B, pages per sequence]`.
        table: &'a [i32],
    },
}

/// Keys per block: belongs to the contract, not to the machine.
pub(super) const BLOCK: usize = IEEE.keys;

impl Attention {
    /// The keys that a position sees, of a sequence of `kv_len` of them.
    pub(super) fn seen_from(&self, position: i32, kv_len: i32) -> Range {
        let (p, len) = (i64::from(position), kv_len as usize);
        let to = if self.causal { (p + 1).clamp(0, len as i64) as usize } else { len };
        let wide = |size: usize| i64::try_from(size).unwrap_or(i64::MAX);
        let of_window = self.window.map_or(0, |window| p.saturating_sub(wide(window)).saturating_add(1));
        let of_chunk = self.chunk.map_or(0, |chunk| p - p.rem_euclid(wide(chunk)));
        let from = of_window.max(of_chunk).max(0) as usize;
        Range { from: from.min(to), to }
    }

    /// The parameters of a call.
    pub(crate) fn of(call: &Call, batch: usize, keys: usize) -> Attention {
        Attention {
            batch,
            queries: call.dim("T"),
            keys,
            q_heads: call.dim("Hq"),
            kv_heads: call.dim("Hkv"),
            head_dim: call.dim("D"),
            value_dim: call.dim("E"),
            scale: call.float("scale"),
            causal: call.flag("causal"),
            // In a call 0 says that there is none.
            window: Some(call.count("window")).filter(|&window| window > 0),
            chunk: Some(call.count("chunk")).filter(|&chunk| chunk > 0),
            softcap: Some(call.float("softcap")).filter(|&softcap| softcap != 0.0),
            tf32: if call.tf32() { Tf32::Enabled } else { Tf32::Disabled },
        }
    }
}

/// Lengths of the slices of a call.
pub(crate) struct Lens {
    pub q: usize,
    pub k: usize,
    pub v: usize,
    pub q_pos: usize,
    pub out: usize,
    pub lse: usize,
}

/// What scores are multiplied with.
#[derive(Clone, Copy)]
pub(crate) struct Factors {
    /// `(cap, f32(scale / cap))`.
    pub cap: Option<(f32, f32)>,
    /// `c_hi` and `c_lo`.
    pub c: (f32, f32),
}

/// Checks a call, whatever it runs on.
pub(crate) fn check(shape: &Attention, sequences: &Sequences, lens: &Lens) -> Result<Factors, Error> {
    let factors = check_tensors(shape, sequences.q_start.is_some(), matches!(sequences.keys, Keys::Padded), lens)?;
    check_places(shape, sequences)?;
    Ok(factors)
}

/// Checks the parameters and the lengths of tensors, and makes the factors. `packed` are the queries, `padded` the keys.
pub(crate) fn check_tensors(shape: &Attention, packed: bool, padded: bool, lens: &Lens) -> Result<Factors, Error> {
    let Attention { batch, queries, q_heads, kv_heads, head_dim, value_dim, .. } = *shape;
    let rows: &[usize] = if packed { &[queries] } else { &[batch, queries] };
    let of = |dims: &[usize]| [rows, dims].concat();
    let factors = factors(shape)?;
    check_len("attention", "q", "[B,T,Hq,D] or [T,Hq,D]", lens.q, &of(&[q_heads, head_dim]))?;
    check_len("attention", "q_pos", "[B,T] or [T]", lens.q_pos, rows)?;
    check_len("attention", "out", "[B,T,Hq,E] or [T,Hq,E]", lens.out, &of(&[q_heads, value_dim]))?;
    check_len("attention", "lse", "[B,T,Hq] or [T,Hq]", lens.lse, &of(&[q_heads]))?;
    let rows: &[usize] = if padded { &[batch, shape.keys] } else { &[shape.keys] };
    let of = |dim: usize| [rows, &[kv_heads, dim]].concat();
    check_len("attention", "k", "[B,S,Hkv,D] or [S,Hkv,D]", lens.k, &of(head_dim))?;
    check_len("attention", "v", "[B,S,Hkv,E] or [S,Hkv,E]", lens.v, &of(value_dim))?;
    Ok(factors)
}

/// Checks the parameters and makes the factors.
pub(crate) fn factors(shape: &Attention) -> Result<Factors, Error> {
    let Attention { q_heads, kv_heads, scale, window, chunk, softcap, .. } = *shape;
    let bad = |what: String| Err(value_error("attention", what));
    if kv_heads == 0 || !q_heads.is_multiple_of(kv_heads) {
        return bad(format!("{q_heads} query heads cannot share {kv_heads} key heads; Hq must be a multiple of Hkv"));
    }
    if !(scale >= 0.0 && scale.is_finite()) {
        return bad(format!("scale is {scale}; it must be finite and not negative"));
    }
    if let Some(softcap) = softcap.filter(|&softcap| !(softcap > 0.0 && softcap.is_finite())) {
        return bad(format!("softcap is {softcap}; it must be positive and finite"));
    }
    if let Some((name, _)) = [("window", window), ("chunk", chunk)].iter().find(|(_, size)| *size == Some(0)) {
        return bad(format!("{name} is 0; it must be at least 1"));
    }
    let c = if softcap.is_some() { std::f64::consts::LOG2_E } else { scale * std::f64::consts::LOG2_E };
    let c_hi = c as f32;
    Ok(Factors {
        cap: softcap.map(|softcap| (softcap as f32, (scale / softcap) as f32)),
        c: (c_hi, (c - f64::from(c_hi)) as f32),
    })
}

fn check_starts(name: &str, starts: &[i32], batch: usize, end: usize) -> Result<(), Error> {
    let bad = |what: String| Err(value_error("attention", what));
    if starts.len() != batch + 1 {
        return bad(format!("`{name}` has {} entries; {batch} sequences need {}", starts.len(), batch + 1));
    }
    if starts[0] != 0 || i64::from(starts[batch]) != end as i64 {
        return bad(format!("`{name}` goes from {} to {}; it must go from 0 to {end}", starts[0], starts[batch]));
    }
    match starts.windows(2).position(|two| two[0] > two[1]) {
        Some(b) => bad(format!("`{name}[{}]` is {} after {}; starts ascend", b + 1, starts[b + 1], starts[b])),
        None => Ok(()),
    }
}

/// Checks how many sinks there are, if any.
pub(crate) fn check_sinks(shape: &Attention, sinks: Option<usize>) -> Result<(), Error> {
    sinks.map_or(Ok(()), |len| check_len("attention", "sinks", "[Hq]", len, &[shape.q_heads]))
}

/// Checks where queries and keys stand: every place that `kv_len` admits is within `shape.keys` rows.
pub(crate) fn check_places(shape: &Attention, sequences: &Sequences) -> Result<(), Error> {
    let bad = |what: String| Err(value_error("attention", what));
    let Attention { batch, queries, .. } = *shape;
    let (q_pos, kv_len) = (sequences.q_pos.len(), sequences.kv_len);
    check_len("attention", "kv_len", "[B]", kv_len.len(), &[batch])?;
    match sequences.q_start {
        Some(q_start) => {
            check_len("attention", "q_pos", "[T]", q_pos, &[queries])?;
            check_starts("q_start", q_start, batch, queries)?;
        }
        None => check_len("attention", "q_pos", "[B,T]", q_pos, &[batch, queries])?,
    }
    let keys = &sequences.keys;
    if let Keys::Packed(k_start) = keys {
        check_starts("k_start", k_start, batch, shape.keys)?;
    }
    if let Keys::Paged { page_size, table } = *keys {
        if page_size == 0 || !shape.keys.is_multiple_of(page_size) {
            return bad(format!("{} rows of k are no whole number of pages of {page_size}", shape.keys));
        }
        if batch == 0 && !table.is_empty() || batch > 0 && !table.len().is_multiple_of(batch) {
            return bad(format!("a page table of {} entries is no whole number for {batch} sequences", table.len()));
        }
    }
    for (b, &len) in kv_len.iter().enumerate() {
        let room = match *keys {
            Keys::Padded => shape.keys,
            Keys::Packed(k_start) => (k_start[b + 1] - k_start[b]) as usize,
            Keys::Paged { page_size, table } => (table.len() / batch).saturating_mul(page_size),
        };
        let len = match usize::try_from(len) {
            Ok(len) if len <= room => len,
            _ => return bad(format!("kv_len[{b}] is {len}; it must be in 0..={room}")),
        };
        if len > 1 << 24 {
            return bad(format!("kv_len[{b}] is {len}; at most {} keys", 1 << 24));
        }
        if let Keys::Paged { page_size, table } = *keys {
            let (columns, pages) = (table.len() / batch, shape.keys / page_size);
            let used = &table[b * columns..][..len.div_ceil(page_size)];
            if let Some(i) = used.iter().position(|&page| usize::try_from(page).map_or(true, |page| page >= pages)) {
                return bad(format!("page table [{b}][{i}] is {}; there are pages 0 to {}", used[i], pages as i64 - 1));
            }
        }
    }
    Ok(())
}

/// The keys a row sees: `from..to`.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Range {
    pub(super) from: usize,
    pub(super) to: usize,
}

impl Range {
    pub(super) fn is_empty(&self) -> bool {
        self.from >= self.to
    }

    /// The part inside `from..to`.
    pub(super) fn within(&self, from: usize, to: usize) -> Range {
        Range { from: self.from.clamp(from, to), to: self.to.clamp(from, to) }
    }

    /// The parts between multiples of `size`.
    pub(super) fn cut(self, size: usize) -> impl Iterator<Item = Range> {
        let part = move |from: usize| self.within(from, from.saturating_add(size));
        (self.from / size * size..self.to).step_by(size).map(part)
    }

    /// The rows of `width` words, one for each key of `all`, that belong to this part of it.
    pub(super) fn of<T>(self, all: Range, width: usize, rows: &mut [T]) -> &mut [T] {
        &mut rows[(self.from - all.from) * width..(self.to - all.from) * width]
    }
}

/// One call: what every task reads.
pub(super) struct Job<'a, I> {
    pub(super) cpu: &'a Cpu,
    pub(super) shape: &'a Attention,
    pub(super) sequences: &'a Sequences<'a>,
    pub(super) q: Heads<'a, I>,
    pub(super) k: Heads<'a, I>,
    pub(super) v: Heads<'a, I>,
    pub(super) q_pos: &'a [i32],
    pub(super) kv_len: &'a [i32],
    /// `(cap, f32(scale / cap))`.
    pub(super) cap: Option<(f32, f32)>,
    /// `c_hi` and `c_lo`.
    pub(super) c: (f32, f32),
    /// Of each query head a logit that joins the softmax.
    pub(super) sinks: Option<&'a [f32]>,
    /// Whether everything is made and nothing written.
    pub(super) dry: bool,
}

/// A term `m * 2^i` of a softmax that has no value.
#[derive(Clone, Copy)]
pub(super) struct Sink {
    m: f32,
    i: f32,
}

impl<I: Element> Job<'_, I> {
    /// Query heads that share a key head.
    pub(super) fn group(&self) -> usize {
        self.shape.q_heads / self.shape.kv_heads
    }

    /// The sink of a query head; one that is no term where there is none.
    pub(super) fn sink(&self, head: usize) -> Sink {
        let none = Sink { m: 1.0, i: f32::NEG_INFINITY };
        self.sinks.map_or(none, |sinks| {
            let (m, i) = exp_split(Scalar, sinks[head], LOG2E_HI, LOG2E_LO);
            Sink { m, i }
        })
    }

    /// The rows of q that belong to sequence b.
    pub(super) fn queries(&self, b: usize) -> std::ops::Range<usize> {
        match self.sequences.q_start {
            Some(starts) => starts[b] as usize..starts[b + 1] as usize,
            None => b * self.shape.queries..(b + 1) * self.shape.queries,
        }
    }

    /// The most queries a sequence has.
    pub(super) fn most_queries(&self) -> usize {
        (0..self.shape.batch).map(|b| self.queries(b).len()).max().unwrap_or(0)
    }

    /// The row of k and v where key j of sequence b stands.
    pub(super) fn key_row(&self, b: usize, j: usize) -> usize {
        match self.sequences.keys {
            Keys::Padded => b * self.shape.keys + j,
            Keys::Packed(starts) => starts[b] as usize + j,
            Keys::Paged { page_size, table } => {
                let columns = table.len() / self.shape.batch;
                table[b * columns + j / page_size] as usize * page_size + j % page_size
            }
        }
    }

    /// The first key after j that need not stand behind the one before it.
    pub(super) fn run_end(&self, j: usize) -> usize {
        match self.sequences.keys {
            Keys::Paged { page_size, .. } => (j / page_size + 1) * page_size,
            _ => usize::MAX,
        }
    }

    /// Key j of sequence b for a key head.
    pub(super) fn key(&self, b: usize, j: usize, kv_head: usize) -> &[I] {
        self.k.get(self.key_row(b, j), kv_head)
    }

    /// Values from key j of sequence b on, for a key head.
    pub(super) fn value(&self, b: usize, j: usize, kv_head: usize) -> &[I] {
        &self.v.data()[self.v.at(self.key_row(b, j), kv_head)..]
    }

    /// Row t of q for a query head.
    pub(super) fn query(&self, t: usize, head: usize) -> &[I] {
        self.q.get(t, head)
    }

    /// The keys that row t of q sees, of sequence b.
    pub(super) fn range(&self, b: usize, t: usize) -> Range {
        self.shape.seen_from(self.q_pos[t], self.kv_len[b])
    }

    /// From the first to the last key that some query of sequence b sees.
    pub(super) fn seen(&self, b: usize) -> Range {
        let seen = || self.queries(b).map(|t| self.range(b, t)).filter(|range| !range.is_empty());
        Range {
            from: seen().map(|range| range.from).min().unwrap_or(0),
            to: seen().map(|range| range.to).max().unwrap_or(0),
        }
    }

    /// Whether scores may go through `VDPBF16PS`.
    pub(super) fn dots(&self) -> bool {
        self.cpu.isa().has_dot() && I::IS_BF16
    }

    /// Whether values are read where they stand: whole vectors of bf16, in runs worth a tile.
    pub(super) fn values_in_place(&self) -> bool {
        let runs = !matches!(self.sequences.keys, Keys::Paged { page_size, .. } if page_size < 8);
        runs && I::IS_BF16 && self.shape.value_dim.is_multiple_of(16)
    }

    /// `total / l` with the sink in l, the last rounding and the `lse` of one row, at its index in `[B,T,Hq]`.
    ///
    /// # Safety
    /// No other thread touches this row of the outputs.
    pub(super) unsafe fn finish<O: Element>(
        &self,
        at: usize,
        row: Row,
        total: &[f32],
        out: &SharedOut<O>,
        lse_out: &SharedOut<f32>,
        columns: Columns,
    ) {
        if self.dry {
            return;
        }
        // SAFETY: the caller's promise.
        let (out, lse_out) = unsafe {
            (out.part(at * self.shape.value_dim + columns.from, columns.to - columns.from), lse_out.part(at, 1))
        };
        match row {
            Row::Empty => {
                out.fill(O::narrow(0.0));
                lse_out[0] = f32::NEG_INFINITY;
            }
            Row::Invalid => {
                out.fill(O::narrow(f32::NAN));
                lse_out[0] = f32::narrow(f32::NAN);
            }
            Row::Valid { n, l } => {
                // Nothing was added where no key is seen.
                let Sink { m, i } = self.sink(at % self.shape.q_heads);
                let l = l + weight(Scalar, m, i, n);
                if total.is_empty() {
                    out.fill(O::narrow(0.0));
                    lse_out[0] = lse(n, l);
                    return;
                }
                lse_out[0] = self.cpu.dispatch(Divide { total: &total[..out.len()], n, l, out });
            }
        }
    }
}

/// Columns `from..to` of the values.
pub(super) type Columns = Range;

/// What the softmax found for one row.
#[derive(Clone, Copy)]
pub(super) enum Row {
    /// No key counts.
    Empty,
    /// A visible score is NaN or +inf.
    Invalid,
    /// Weights are relative to `2^n` and sum to `l`.
    Valid { n: f32, l: f32 },
}

/// What a row's weights are relative to, from its largest score and its sink; `invalid` when a score is NaN or +inf.
pub(super) fn max_exponent(largest: f32, invalid: bool, c_hi: f32, sink: Sink) -> Row {
    let of_keys = (largest * c_hi).round_ties_even();
    let no_key = largest == f32::NEG_INFINITY;
    // A finite score whose product with c overflows: inf - inf.
    if invalid || !no_key && !of_keys.is_finite() || sink.i.is_nan() {
        return Row::Invalid;
    }
    match if no_key { sink.i } else { of_keys.max(sink.i) } {
        f32::NEG_INFINITY => Row::Empty,
        f32::INFINITY => Row::Invalid,
        n => Row::Valid { n, l: 0.0 },
    }
}

/// `total += block`, element by element, and `block` becomes zeros, which the next one begins with; a NaN becomes the canonical one
/// when its row is finished. Not generic, so that it is compiled once.
pub(super) fn add_to(cpu: &Cpu, total: &mut [f32], block: &mut [f32]) {
    cpu.dispatch(AddTo { total, block });
}

struct AddTo<'a> {
    total: &'a mut [f32],
    block: &'a mut [f32],
}

impl Kernel for AddTo<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let AddTo { total, block } = self;
        let block = &mut block[..total.len()];
        let whole = total.len() / S::LANES * S::LANES;
        for at in (0..whole).step_by(S::LANES) {
            // SAFETY: both hold LANES elements from `at` on.
            unsafe {
                let at = (total.as_mut_ptr().add(at), block.as_mut_ptr().add(at));
                s.store(s.add(s.load(at.0), s.load(at.1)), at.0);
                s.store(s.splat(0.0), at.1);
            }
        }
        for (total, block) in total[whole..].iter_mut().zip(&mut block[whole..]) {
            *total += std::mem::take(block);
        }
    }
}

/// `total / l` and the last rounding of one row; then its `lse`, whose multiply-adds are instructions here and calls elsewhere.
struct Divide<'a, O> {
    total: &'a [f32],
    n: f32,
    l: f32,
    out: &'a mut [O],
}

impl<O: Element> Kernel for Divide<'_, O> {
    type Output = f32;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        let Divide { total, n, l, out } = self;
        let total = &total[..out.len()];
        let whole = out.len() / S::LANES * S::LANES;
        for at in (0..whole).step_by(S::LANES) {
            // SAFETY: both hold LANES elements from `at` on.
            unsafe { O::narrow_lanes(s, s.div(s.load(total.as_ptr().add(at)), s.splat(l)), out.as_mut_ptr().add(at)) };
        }
        if whole < out.len() {
            narrow_at(s, s.div(load_at(s, total, whole, 0.0), s.splat(l)), out, whole);
        }
        lse(n, l)
    }
}

/// A task: the key heads `heads` of a block of sequence b.
pub(super) struct Task {
    pub(super) b: usize,
    /// The block of keys, and where it stands among those of the workspace.
    pub(super) block: usize,
    pub(super) place: usize,
    pub(super) heads: Range,
    /// The keys of the block that some query sees.
    pub(super) keys: Range,
}
