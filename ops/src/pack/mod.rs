//! Operands of products as their kernels read them: bf16 in VNNI form, that is in pairs along k, everything else as f32.

pub mod dictionary;
pub mod matrix;
pub mod patches;
pub mod quantized;

use crate::simd::prefetch::{Prefetch, prefetch, prefetch_all};
use crate::simd::{Kernel, MAX_LANES, Simd, load_at};
use crate::{Cpu, Element, Tf32};
use half::bf16;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU32, Ordering};

/// Columns of a packed panel.
pub const PANEL: usize = 32;

/// `x` as bf16 when that is what it is.
pub fn bf16_slice<I: Element>(x: &[I]) -> Option<&[bf16]> {
    // SAFETY: `Element` is sealed and IS_BF16 is true for bf16 alone, so the types are the same.
    I::IS_BF16.then(|| unsafe { std::slice::from_raw_parts(x.as_ptr().cast::<bf16>(), x.len()) })
}

/// Two elements as one pair: the earlier in the high half, where `VDPBF16PS` takes it first.
#[inline(always)]
fn pair(earlier: bf16, later: bf16) -> u32 {
    u32::from(earlier.to_bits()) << 16 | u32::from(later.to_bits())
}

/// Lays `rows` rows of `k` bf16 side by side as pairs: `out[p * stride + r]` is pair p of row r, the earlier element in the
/// high half as products of pairs take it, or, without `SWAP`, in the low half as rows hold it, which saves an exchange; an odd
/// end is filled with `pad`. Other places of `out` keep what they hold. `ahead` is prefetched on the way.
#[allow(clippy::too_many_arguments)]
pub fn pairs_of_rows<'a, const SWAP: bool>(
    cpu: &Cpu,
    rows: usize,
    k: usize,
    row: impl Fn(usize) -> &'a [bf16],
    pad: bf16,
    out: &mut [u32],
    stride: usize,
    ahead: Prefetch,
) {
    if k % 2 == 1 {
        for r in 0..rows {
            let last = row(r)[k - 1];
            out[k / 2 * stride + r] = if SWAP { pair(last, pad) } else { pair(pad, last) };
        }
    }
    let words = |r: usize| row(r)[..k].as_ptr().cast::<u32>();
    interleave::<SWAP>(cpu, rows, k / 2, words, out, stride, ahead);
}

/// Lays `rows` rows of `k` elements side by side as f32: `out[p * stride + r]` is element p of row r.
pub fn f32_of_rows<'a, I: Element>(
    cpu: &Cpu,
    rows: usize,
    k: usize,
    row: impl Fn(usize) -> &'a [I],
    tf32: Tf32,
    out: &mut [f32],
    stride: usize,
) {
    if size_of::<I>() == size_of::<f32>() && tf32 == Tf32::Disabled {
        let words = |r: usize| row(r)[..k].as_ptr().cast::<u32>();
        interleave::<false>(cpu, rows, k, words, as_words_mut(out), stride, Prefetch::NONE);
        return;
    }
    // Some steps at a time are widened into rows of their own, which are then transposed.
    let mut wide = [[0f32; STEPS]; PANEL];
    for first in (0..rows).step_by(PANEL) {
        let rows = PANEL.min(rows - first);
        for from in (0..k).step_by(STEPS) {
            let len = STEPS.min(k - from);
            for (r, wide) in wide.iter_mut().enumerate().take(rows) {
                f32_row(cpu, &row(first + r)[from..from + len], tf32, wide);
            }
            let (row, out) = (|r: usize| wide[r].as_ptr().cast::<u32>(), &mut out[from * stride + first..]);
            interleave::<false>(cpu, rows, len, row, as_words_mut(out), stride, Prefetch::NONE);
        }
    }
}

/// At most [`PANEL`] rows of bf16, of which parts are laid side by side.
pub struct RowsSideBySide<'a> {
    from: RowStarts,
    rows: usize,
    len: usize,
    borrowed: PhantomData<&'a [bf16]>,
}

impl<'a> RowsSideBySide<'a> {
    /// There is a row, and all have one length.
    pub fn new(rows: usize, row: impl Fn(usize) -> &'a [bf16]) -> RowsSideBySide<'a> {
        let len = row(0).len();
        let from = row_starts(rows, |r| row(r)[..len].as_ptr().cast());
        RowsSideBySide { from, rows, len, borrowed: PhantomData }
    }

    /// [`pairs_of_rows`] of `k` elements of each row from `at` on, both even, without an exchange, as part of a kernel; `out` is a
    /// panel of [`PANEL`] columns. `ahead` is prefetched on the way, a line at a time; returns what is left of it.
    #[inline(always)]
    pub fn pairs_on<S: Simd>(&self, s: S, at: usize, k: usize, out: &mut [u32], ahead: Prefetch) -> Prefetch {
        assert!(at.is_multiple_of(2) && k.is_multiple_of(2), "whole pairs");
        assert!(at.saturating_add(k) <= self.len, "elements that rows hold");
        let (first, rest) = ahead.split_at(self.rows.div_ceil(S::LANES) * (k / 2 / S::LANES));
        let part = Part { from: &self.from, rows: self.rows, at: at / 2, words: k / 2 };
        // The rows, which are borrowed, hold these elements.
        if k > 0 {
            Interleave::<false> { part, out, stride: PANEL, ahead: first }.run(s);
        }
        rest
    }
}

/// Writes some columns of a panel of `steps` words each as rows, one behind the other: what [`f32_of_rows`] and
/// [`pairs_of_rows`] (with `SWAP`) made of them.
pub fn rows_of_panel<const SWAP: bool>(
    cpu: &Cpu,
    panel: &[u32],
    steps: usize,
    columns: std::ops::Range<usize>,
    out: &mut [u32],
) {
    let row = |step: usize| panel[step * PANEL..][columns.clone()].as_ptr();
    interleave::<SWAP>(cpu, steps, columns.len(), row, out, steps, Prefetch::NONE);
}

/// Steps of k that [`f32_of_rows`] widens at a time.
const STEPS: usize = 64;

/// `out[p * stride + r] = row(r)[p]` for words p, their halves exchanged with `SWAP`; `row` points to `words` words,
/// aligned or not. `ahead` is prefetched on the way of the first [`PANEL`] rows.
fn interleave<const SWAP: bool>(
    cpu: &Cpu,
    rows: usize,
    words: usize,
    row: impl Fn(usize) -> *const u32,
    out: &mut [u32],
    stride: usize,
    mut ahead: Prefetch,
) {
    if rows == 0 || words == 0 {
        ahead.ask(usize::MAX);
        return;
    }
    assert!(rows <= stride, "rows that overlap");
    for first in (0..rows).step_by(PANEL) {
        let count = PANEL.min(rows - first);
        let from = row_starts(count, |i| row(first + i));
        let (part, out, ahead) =
            (Part { from: &from, rows: count, at: 0, words }, &mut out[first..], std::mem::take(&mut ahead));
        cpu.dispatch(Interleave::<SWAP> { part, out, stride, ahead });
    }
}

/// Where the rows of a panel stand; behind the last one it stands again, for lanes that have none.
type RowStarts = [*const u32; PANEL + MAX_LANES];

fn row_starts(count: usize, row: impl Fn(usize) -> *const u32) -> RowStarts {
    let mut from = [std::ptr::null(); PANEL + MAX_LANES];
    from.iter_mut().zip(0..count).for_each(|(from, i)| *from = row(i));
    let last = from[count - 1];
    from[count..].fill(last);
    from
}

/// `words` words of each of at most [`PANEL`] rows, from `at` on.
struct Part<'a> {
    from: &'a RowStarts,
    rows: usize,
    at: usize,
    words: usize,
}

/// [`interleave`] of a part of rows, whose starts point to `at + words` words; there is a row and a word.
struct Interleave<'a, const SWAP: bool> {
    part: Part<'a>,
    out: &'a mut [u32],
    stride: usize,
    ahead: Prefetch,
}

impl<const SWAP: bool> Kernel for Interleave<'_, SWAP> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match (self.part.rows, self.stride) {
            // A panel, whose columns stand where the compiler knows.
            (PANEL, PANEL) => self.lay_out(s, PANEL, PANEL),
            (rows, stride) => self.lay_out(s, rows, stride),
        }
    }
}

impl<const SWAP: bool> Interleave<'_, SWAP> {
    #[inline(always)]
    fn lay_out<S: Simd>(self, s: S, rows: usize, stride: usize) {
        let Interleave { part: Part { from, at, words, .. }, out, mut ahead, .. } = self;
        let end = (words - 1).saturating_mul(stride).saturating_add(rows);
        assert!(rows <= PANEL && end <= out.len(), "output too short");
        let whole = words / S::LANES * S::LANES;
        let steps = rows.div_ceil(S::LANES) * (whole / S::LANES);
        let share = ahead.lines().div_ceil(steps.max(1));
        // A line that is near is prefetched where nothing else is.
        let (mut line, last) = ahead.bounds().unwrap_or((from[0].cast(), from[0].cast()));
        for first in (0..rows).step_by(S::LANES) {
            let count = S::LANES.min(rows - first);
            let from: [*const u32; MAX_LANES] = std::array::from_fn(|i| from[first + i].wrapping_add(at));
            for p in (0..whole).step_by(S::LANES) {
                if share <= 1 {
                    // No loop in the loop, which would leave the rows no registers.
                    prefetch(line);
                    line = line.wrapping_add(64).min(last);
                } else {
                    ahead.ask(share);
                }
                // SAFETY: the rows hold `words` words from `at` on, of which these are LANES; the assertion bounds the output.
                unsafe { s.transpose::<SWAP>(&from, p, count, out.as_mut_ptr().add(p * stride + first), stride) };
            }
            for p in whole..words {
                for i in 0..count {
                    // SAFETY: as above.
                    let word = unsafe { from[i].add(p).read_unaligned() };
                    out[p * stride + first + i] = if SWAP { word.rotate_left(16) } else { word };
                }
            }
        }
    }
}

/// Lays rows of one length, one for each of `k` steps, as pairs of steps, in panels of `width` columns, `size` words from
/// one panel to the next: `out[c / width * size + p * width + c % width]` is pair p of column c; an odd end is filled with
/// `pad`. Other places of `out` keep what they hold.
pub fn vnni_of_columns<'a>(
    cpu: &Cpu,
    k: usize,
    row: impl Fn(usize) -> &'a [bf16],
    pad: bf16,
    width: usize,
    out: &mut [u32],
    size: usize,
) {
    if k % 2 == 1 {
        for (c, last) in row(k - 1).iter().enumerate() {
            out[c / width * size + k / 2 * width + c % width] = pair(*last, pad);
        }
    }
    cpu.dispatch(PairsOfColumns { pairs: k / 2, row, width, out, size });
}

struct PairsOfColumns<'a, F> {
    pairs: usize,
    row: F,
    width: usize,
    out: &'a mut [u32],
    size: usize,
}

impl<'a, F: Fn(usize) -> &'a [bf16]> Kernel for PairsOfColumns<'_, F> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let PairsOfColumns { pairs, row, width, out, size } = self;
        for p in 0..pairs {
            // As in `f32_tiles`.
            for ahead in [2 * p + ROWS_AHEAD, 2 * p + ROWS_AHEAD + 1] {
                if ahead < 2 * pairs {
                    prefetch_all(row(ahead));
                }
            }
            let (earlier, later) = (row(2 * p), row(2 * p + 1));
            for (panel, at) in (0..earlier.len()).step_by(width).enumerate() {
                let columns = width.min(earlier.len() - at);
                let (earlier, later) = (&earlier[at..][..columns], &later[at..][..columns]);
                let out = &mut out[panel * size + p * width..][..columns];
                out.iter_mut()
                    .zip(earlier)
                    .zip(later)
                    .for_each(|((out, earlier), later)| *out = pair(*earlier, *later));
            }
        }
    }
}

/// Lays rows of one length, one for each of `k` steps, as f32, in panels as [`vnni_of_columns`] does:
/// `out[c / PANEL * size + p * PANEL + c % PANEL]` is element c of row p.
pub fn f32_of_columns<'a, I: Element>(
    cpu: &Cpu,
    k: usize,
    row: impl Fn(usize) -> &'a [I],
    tf32: Tf32,
    out: &mut [f32],
    size: usize,
) {
    for p in 0..k {
        for (panel, piece) in row(p).chunks(PANEL).enumerate() {
            f32_row(cpu, piece, tf32, &mut out[panel * size + p * PANEL..]);
        }
    }
}

/// Lays rows of one length, one for each of `k` steps, as f32, in tiles of `width` columns, `size` words from one tile to the
/// next: `out[c / width * size + p * width + c % width]` is element c of row p. Behind the last step of a tile there is room
/// for a vector; places that no element has, there and in columns that are missing, are overwritten.
pub fn f32_tiles<'a, I: Element>(
    cpu: &Cpu,
    k: usize,
    row: impl Fn(usize) -> &'a [I],
    tf32: Tf32,
    width: usize,
    out: &mut [f32],
    size: usize,
) {
    cpu.dispatch(WideTiles { k, row: &row, width, out: &mut *out, size });
    if tf32 == Tf32::Enabled && k > 0 {
        let tiles = out.chunks_mut(size).take(row(0).len().div_ceil(width));
        tiles.flat_map(|tile| &mut tile[..k * width]).for_each(|v| *v = tf32.operand(*v));
    }
}

/// The prefetch distance of [`f32_tiles`], in rows.
const ROWS_AHEAD: usize = 8;

struct WideTiles<'a, F> {
    k: usize,
    row: F,
    width: usize,
    out: &'a mut [f32],
    size: usize,
}

impl<'a, I: Element, F: Fn(usize) -> &'a [I]> Kernel for WideTiles<'_, F> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let WideTiles { k, row, width, out, size } = self;
        for p in 0..k {
            // Pieces of rows are too far from each other for the processor to guess.
            if p + ROWS_AHEAD < k {
                prefetch_all(row(p + ROWS_AHEAD));
            }
            let row = row(p);
            for (tile, first) in (0..row.len()).step_by(width).enumerate() {
                // A vector may reach into the next step, which comes after it.
                let out = &mut out[tile * size + p * width..];
                for c in (0..width.min(row.len() - first)).step_by(S::LANES) {
                    let v = load_at(s, row, first + c, I::default());
                    // SAFETY: the slice has a vector.
                    unsafe { s.store(v, out[c..][..S::LANES].as_mut_ptr()) };
                }
            }
        }
    }
}

/// Writes one row as adjacent pairs, an odd end filled with `pad`, and returns its [`least_magnitude`].
pub fn vnni_of_row(cpu: &Cpu, row: &[bf16], pad: bf16, out: &mut [u32]) -> f32 {
    let whole = row.len() / 2;
    let least = cpu.dispatch(PairsOfRow { row: &row[..2 * whole], out: &mut out[..whole] });
    match row.get(2 * whole) {
        None => least,
        Some(&last) => {
            out[whole] = pair(last, pad);
            least.min(if last.widen().abs() > 0.0 { last.widen().abs() } else { f32::INFINITY })
        }
    }
}

struct PairsOfRow<'a> {
    row: &'a [bf16],
    out: &'a mut [u32],
}

impl Kernel for PairsOfRow<'_> {
    type Output = f32;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        let mut least = s.splat(f32::INFINITY);
        let vectors = self.out.len() / S::LANES;
        for at in (0..vectors * S::LANES).step_by(S::LANES) {
            // SAFETY: 2 * LANES bf16 of the row and LANES words of the output start here; pairs are read unaligned.
            unsafe {
                let from = self.row.as_ptr().add(2 * at).cast::<u32>();
                s.swap_pairs(from, self.out.as_mut_ptr().add(at));
                let (a, b) = s.load_pairs(from);
                least = s.min(nonzero(s, a), s.min(nonzero(s, b), least));
            }
        }
        let mut smallest = reduce_min(s, least);
        for at in vectors * S::LANES..self.out.len() {
            self.out[at] = pair(self.row[2 * at], self.row[2 * at + 1]);
            smallest = smallest.min(reduce_min(s, nonzero(s, s.splat(self.row[2 * at].widen()))));
            smallest = smallest.min(reduce_min(s, nonzero(s, s.splat(self.row[2 * at + 1].widen()))));
        }
        smallest
    }
}

/// |v| where it is not zero or NaN, else infinity.
#[inline(always)]
fn nonzero<S: Simd>(s: S, v: S::F) -> S::F {
    let v = s.abs(v);
    s.select_ge(v, s.splat(f32::from_bits(1)), v, s.splat(f32::INFINITY))
}

/// The smallest lane.
#[inline(always)]
fn reduce_min<S: Simd>(s: S, v: S::F) -> f32 {
    let mut lanes = [f32::INFINITY; MAX_LANES];
    // SAFETY: MAX_LANES >= LANES.
    unsafe { s.store(v, lanes.as_mut_ptr()) };
    lanes.into_iter().fold(f32::INFINITY, f32::min)
}

/// Writes one row as adjacent f32.
pub fn f32_row<I: Element>(cpu: &Cpu, row: &[I], tf32: Tf32, out: &mut [f32]) {
    f32_rows(cpu, 1, |_| row, tf32, out, row.len());
}

/// Writes rows of one length as adjacent f32, row r from `out[r * stride]` on.
pub fn f32_rows<'a, I: Element>(
    cpu: &Cpu,
    rows: usize,
    row: impl Fn(usize) -> &'a [I],
    tf32: Tf32,
    out: &mut [f32],
    stride: usize,
) {
    cpu.dispatch(Widen { rows, row, tf32, out, stride });
}

/// [`f32_rows`].
struct Widen<'a, F> {
    rows: usize,
    row: F,
    tf32: Tf32,
    out: &'a mut [f32],
    stride: usize,
}

impl<'a, I: Element, F: Fn(usize) -> &'a [I]> Kernel for Widen<'_, F> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Widen { rows, row, tf32, out, stride } = self;
        for r in 0..rows {
            let row = row(r);
            let out = &mut out[r * stride..][..row.len()];
            let whole = row.len() - row.len() % S::LANES;
            for at in (0..whole).step_by(S::LANES) {
                // SAFETY: at + LANES <= whole, which is at most the length of both.
                unsafe { s.store(I::load_lanes(s, row.as_ptr().add(at)), out.as_mut_ptr().add(at)) };
            }
            for (v, out) in row[whole..].iter().zip(&mut out[whole..]) {
                *out = v.widen();
            }
            if tf32 == Tf32::Enabled {
                out.iter_mut().for_each(|v| *v = tf32.operand(*v));
            }
        }
    }
}

/// Smallest nonzero |x|, or infinity; NaN is ignored.
pub fn least_magnitude(cpu: &Cpu, x: &[bf16]) -> f32 {
    cpu.dispatch(Least { x })
}

/// [`least_magnitude`] of all elements of pairs.
pub fn least_of_vnni(cpu: &Cpu, pairs: &[u32]) -> f32 {
    // SAFETY: a word is two bf16 in some order, and every bit pattern is a bf16.
    cpu.dispatch(Least { x: unsafe { std::slice::from_raw_parts(pairs.as_ptr().cast::<bf16>(), 2 * pairs.len()) } })
}

/// Elements that a worker looks through at a time.
pub const LOOKED_THROUGH: usize = 1 << 16;

/// The least of so many parts, which the threads share; none is negative or NaN.
pub fn least_of_parts(cpu: &Cpu, parts: usize, least: impl Fn(usize) -> f32 + Sync) -> f32 {
    let all = AtomicU32::new(f32::INFINITY.to_bits());
    // They are in the order of their bits.
    cpu.each(parts, |part| _ = all.fetch_min(least(part).to_bits(), Ordering::Relaxed));
    f32::from_bits(all.into_inner())
}

/// [`least_magnitude`] of what the threads share.
pub fn least_of_all(cpu: &Cpu, x: &[bf16]) -> f32 {
    let part = |i: usize| &x[i * LOOKED_THROUGH..x.len().min((i + 1) * LOOKED_THROUGH)];
    least_of_parts(cpu, x.len().div_ceil(LOOKED_THROUGH), |i| least_magnitude(cpu, part(i)))
}

struct Least<'a> {
    x: &'a [bf16],
}

impl Kernel for Least<'_> {
    type Output = f32;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        let (vectors, tail) = self.x.split_at(self.x.len() / (2 * S::LANES) * (2 * S::LANES));
        // SAFETY: the length is a multiple of 2 * LANES.
        let mut least = unsafe { s.least_bf16(vectors.as_ptr(), vectors.len()) };
        for x in tail {
            // +-0 becomes the largest of all.
            least = least.min((x.to_bits() & 0x7FFF).wrapping_sub(1));
        }
        from_biased(least)
    }
}

/// The magnitude that stands one below its bits, so that zero became the largest.
pub fn from_biased(least: u16) -> f32 {
    // NaN and what stands for "none" are above infinity.
    bf16::from_bits(least.saturating_add(1).min(0x7F80)).widen()
}

/// The same words as f32.
pub fn as_floats(words: &[u32]) -> &[f32] {
    // SAFETY: u32 and f32 have the same size and alignment, and every bit pattern is a value of both.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast::<f32>(), words.len()) }
}

/// The same f32 as words.
pub fn as_words_mut(floats: &mut [f32]) -> &mut [u32] {
    // SAFETY: u32 and f32 have the same size and alignment, and every bit pattern is a value of both.
    unsafe { std::slice::from_raw_parts_mut(floats.as_mut_ptr().cast::<u32>(), floats.len()) }
}

/// The same words as f32.
pub fn as_floats_mut(words: &mut [u32]) -> &mut [f32] {
    // SAFETY: as above.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast::<f32>(), words.len()) }
}

/// f32 as words.
pub fn as_words(floats: &[f32]) -> &[u32] {
    // SAFETY: as above.
    unsafe { std::slice::from_raw_parts(floats.as_ptr().cast::<u32>(), floats.len()) }
}

/// The same words as elements of any type.
pub fn as_elements_mut<T: Element>(words: &mut [u32]) -> &mut [T] {
    let len = size_of_val(words) / size_of::<T>();
    // SAFETY: a storage type is no larger than a word and not more aligned, and every bit pattern is a value of it.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast::<T>(), len) }
}

/// Elements that begin and end with a word, as words.
pub fn as_words_of<T: Element>(elements: &mut [T]) -> &mut [u32] {
    // SAFETY: storage types have no padding, and every bit pattern is a value of both.
    let (before, words, behind) = unsafe { elements.align_to_mut::<u32>() };
    assert!(before.is_empty() && behind.is_empty(), "elements that begin and end with a word");
    words
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests;
