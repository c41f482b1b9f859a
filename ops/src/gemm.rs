//! Matrix product with a transposed weight: `x[M,K], w[N,K], bias[N]? -> y[M,N]`.
//!
//! Formula: `y[m][n] = sum over k of x[m][k] * w[n][k] + bias[n]`.
//! Order: k is cut in 8 segments of `16 * ceil(k_total / 128)`; a segment is a chain of fma from +0, k ascending; the
//! eight sums are joined as `((s0+s1)+(s2+s3)) + ((s4+s5)+(s6+s7))`.
//! Rounding: each fma and each join once to f32; `+ bias` once in f32; the last rounding to the output type.

use crate::lanes::{Kernel, Simd, load_at, narrow_at};
use crate::pack::{
    Scratch, as_floats, as_floats_mut, bf16_slice, least_magnitude, pairs_of_rows, scatter_pairs, scatter_wide,
    wide_row,
};
use crate::tile::{Left, MAX_ROWS, Order, PANEL, Right, TILE_ROWS, Tile, dot_is_exact, dot_tile, fma_tile};
use crate::{Cpu, Element, Error, Isa, Tf32, check_len, value_error};
use half::bf16;

/// Dimensions of `x[M,K] * w[N,K]^T -> y[M,N]`, and the part of a longer sum that one tensor-parallel rank holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gemm {
    /// Rows of x.
    pub m: usize,
    /// Rows of w.
    pub n: usize,
    /// Columns of both that are here.
    pub k: usize,
    /// First column that is here.
    pub k_offset: usize,
    /// Columns of the whole product; segments are cut by it.
    pub k_total: usize,
    /// How f32 operands are read.
    pub tf32: Tf32,
}

impl Gemm {
    /// The whole product: no tensor parallelism, TF32 off.
    pub fn new(m: usize, n: usize, k: usize) -> Gemm {
        Gemm { m, n, k, k_offset: 0, k_total: k, tf32: Tf32::Disabled }
    }

    /// Whether this is one rank's part of a longer sum: no bias is added, and the output should be f32.
    pub fn is_partial(&self) -> bool {
        self.k != self.k_total
    }

    /// The bounds of the segments here, relative to `k_offset`: 9 for the whole, 5, 3 or 2 for a subtree.
    fn bounds(&self) -> Result<Vec<usize>, Error> {
        let length = segment_length(self.k_total);
        let end = self.k_offset.checked_add(self.k).filter(|&end| end <= self.k_total).ok_or_else(|| {
            value_error("gemm", format!("columns {}+{} exceed k_total {}", self.k_offset, self.k, self.k_total))
        })?;
        let bound = |segment: usize| segment.saturating_mul(length).min(self.k_total);
        for count in [8, 4, 2, 1] {
            for first in (0..8usize).step_by(count) {
                if (first.saturating_mul(length), bound(first + count)) == (self.k_offset, end) {
                    return Ok((first..=first + count)
                        .map(|segment| bound(segment).max(self.k_offset) - self.k_offset)
                        .collect());
                }
            }
        }
        Err(value_error(
            "gemm",
            format!(
                "columns {}..{end} of {} are not a subtree of the eight segments of {length}; \
                 use 1, 2, 4 or 8 equal ranks with k_total a multiple of 128",
                self.k_offset, self.k_total
            ),
        ))
    }
}

/// Elements per segment of a sum of `n`: `16 * ceil(n / 128)`.
pub(crate) fn segment_length(n: usize) -> usize {
    16 * n.div_ceil(128)
}

/// `x[M,K], w[N,K], bias[N]? -> y[M,N]`, all row-major.
///
/// # Errors
/// [`Error::Length`] when a slice does not match; [`Error::Value`] when `k_offset`, `k` and `k_total` do not name a
/// subtree of the segments, or the budget is below the smallest plan (one panel of 32 weight rows and one row of x).
pub fn gemm<I: Element, O: Element>(
    cpu: &Cpu,
    shape: &Gemm,
    x: &[I],
    w: &[I],
    bias: Option<&[I]>,
    y: &mut [O],
) -> Result<(), Error> {
    let Gemm { m, n, k, tf32, .. } = *shape;
    check_len("gemm", "x", "[M,K]", x.len(), &[m, k])?;
    check_len("gemm", "w", "[N,K]", w.len(), &[n, k])?;
    check_len("gemm", "y", "[M,N]", y.len(), &[m, n])?;
    let bias = bias.filter(|_| !shape.is_partial());
    if let Some(bias) = bias {
        check_len("gemm", "bias", "[N]", bias.len(), &[n])?;
    }
    let bounds = shape.bounds()?;
    // Weights are packed in groups of panels, half the budget at a time.
    let panel_bytes = panel_elements(k) * if I::IS_BF16 { 4 } else { 8 } / 2;
    rows_in_budget(cpu, k, panel_bytes)?;
    let group = (cpu.budget() / 2 / panel_bytes.max(1)).clamp(1, n.div_ceil(PANEL).max(1)) * PANEL;
    for first in (0..n).step_by(group) {
        let count = group.min(n - first);
        let packed = PackedWeight::pack_as(cpu, count, k, &w[first * k..(first + count) * k], tf32)?;
        let rows = rows_in_budget(cpu, k, packed.bytes())?;
        let target = Columns { first, stride: n };
        product(cpu, m, x, &packed, bias.map(|b| &b[first..first + count]), y, &bounds, tf32, rows, target);
    }
    Ok(())
}

/// [`gemm`] with a weight packed beforehand: the same bits. `x[M,K], bias[N]? -> y[M,N]`.
///
/// # Errors
/// As [`gemm`]; the budget must hold one row of x.
pub fn gemm_packed<I: Element, O: Element>(
    cpu: &Cpu,
    m: usize,
    x: &[I],
    w: &PackedWeight,
    bias: Option<&[I]>,
    y: &mut [O],
) -> Result<(), Error> {
    let (n, k) = (w.n, w.k);
    check_len("gemm", "x", "[M,K]", x.len(), &[m, k])?;
    check_len("gemm", "y", "[M,N]", y.len(), &[m, n])?;
    if let Some(bias) = bias {
        check_len("gemm", "bias", "[N]", bias.len(), &[n])?;
    }
    let bounds = Gemm::new(m, n, k).bounds()?;
    let rows = rows_in_budget(cpu, k, 0)?;
    product(cpu, m, x, w, bias, y, &bounds, Tf32::Disabled, rows, Columns { first: 0, stride: n });
    Ok(())
}

/// Elements of one packed panel, padded to whole pairs of k.
fn panel_elements(k: usize) -> usize {
    PANEL * k.next_multiple_of(2)
}

/// How many packed rows of x fit in the budget beside `taken` bytes.
fn rows_in_budget(cpu: &Cpu, k: usize, taken: usize) -> Result<usize, Error> {
    let row_bytes = (k.next_multiple_of(2) * 4).max(1);
    match cpu.budget().saturating_sub(taken) / row_bytes {
        0 => Err(value_error(
            "gemm",
            format!("a budget of {} bytes is below the smallest plan, {} bytes", cpu.budget(), taken + row_bytes),
        )),
        rows => Ok(rows),
    }
}

/// Where a group of weight rows lands in y.
#[derive(Clone, Copy)]
struct Columns {
    first: usize,
    stride: usize,
}

/// A weight matrix `w[N,K]` packed once, for any [`Cpu`]: panels of 32 rows of w, k by k; bf16 as pairs along k with the
/// earlier k in the high half.
pub struct PackedWeight {
    n: usize,
    k: usize,
    panels: Panels,
    /// Smallest nonzero magnitude of each panel (infinity when there is none).
    least: Vec<f32>,
}

enum Panels {
    Pairs(Vec<u32>),
    Wide(Vec<f32>),
}

impl PackedWeight {
    /// Packs `w[N,K]`, in parallel. bf16 keeps its size; fp16 is widened to f32.
    ///
    /// # Errors
    /// [`Error::Length`] when `w` is not N * K long.
    pub fn pack<I: Element>(cpu: &Cpu, n: usize, k: usize, w: &[I]) -> Result<PackedWeight, Error> {
        PackedWeight::pack_as(cpu, n, k, w, Tf32::Disabled)
    }

    fn pack_as<I: Element>(cpu: &Cpu, n: usize, k: usize, w: &[I], tf32: Tf32) -> Result<PackedWeight, Error> {
        check_len("gemm", "w", "[N,K]", w.len(), &[n, k])?;
        let size = panel_elements(k);
        let count = n.div_ceil(PANEL);
        let rows =
            |panel: usize| (0..PANEL.min(n - panel * PANEL)).map(move |j| (j, &w[(panel * PANEL + j) * k..][..k]));
        let panels = if I::IS_BF16 {
            let mut pairs = vec![0u32; count * size / 2];
            cpu.chunks(&mut pairs, size / 2, |panel, out| {
                for (j, row) in rows(panel) {
                    scatter_pairs(bf16_slice(row).expect("bf16"), bf16::NEG_ZERO, out, j, PANEL);
                }
            });
            Panels::Pairs(pairs)
        } else {
            let mut wide = vec![0f32; count * size];
            cpu.chunks(&mut wide, size, |panel, out| {
                for (j, row) in rows(panel) {
                    scatter_wide(row, tf32, out, j, PANEL);
                }
            });
            Panels::Wide(wide)
        };
        let mut least = vec![f32::INFINITY; count];
        if I::IS_BF16 {
            cpu.chunks(&mut least, 1, |panel, out| {
                let row = |row| least_magnitude(cpu, bf16_slice(row).expect("bf16"));
                out[0] = rows(panel).map(|(_, x)| row(x)).fold(f32::INFINITY, f32::min);
            });
        }
        Ok(PackedWeight { n, k, panels, least })
    }

    /// Rows N.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Columns K.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Memory it holds, in bytes.
    pub fn bytes(&self) -> usize {
        4 * match &self.panels {
            Panels::Pairs(pairs) => pairs.len(),
            Panels::Wide(wide) => wide.len(),
        }
    }

    fn right(&self, panel: usize) -> Right<'_> {
        let size = panel_elements(self.k);
        match &self.panels {
            Panels::Pairs(pairs) => Right::Pairs(&pairs[panel * size / 2..][..size / 2], PANEL),
            Panels::Wide(wide) => Right::Wide(&wide[panel * size..][..size], PANEL),
        }
    }
}

/// The whole product of `x` with one packed weight. At most `rows_in_budget` rows of x are packed at a
/// time.
#[allow(clippy::too_many_arguments)]
fn product<I: Element, O: Element>(
    cpu: &Cpu,
    m: usize,
    x: &[I],
    w: &PackedWeight,
    bias: Option<&[I]>,
    y: &mut [O],
    bounds: &[usize],
    tf32: Tf32,
    rows_in_budget: usize,
    target: Columns,
) {
    let k = w.k;
    let panels = w.n.div_ceil(PANEL);
    let least_weight = w.least.iter().copied().fold(f32::INFINITY, f32::min);
    // Few rows are one tall tile, so that each weight is read once.
    let height = if m <= MAX_ROWS { m.max(1) } else { TILE_ROWS };
    let height = height.min(rows_in_budget);
    let row_tiles = rows_in_budget / height;
    let y = SharedOut { data: y.as_mut_ptr(), len: y.len() };
    for block in (0..m.div_ceil(height)).step_by(row_tiles) {
        let tiles = row_tiles.min(m.div_ceil(height) - block);
        let first_row = |t: usize| (block + t) * height;
        let rows_of = |t: usize| height.min(m - first_row(t));
        let x_of = |t: usize| &x[first_row(t) * k..][..rows_of(t) * k];
        // A tile goes through VDPBF16PS where its flush cannot be seen in any panel, else through the plain fma kernel.
        let mut exact = vec![false; tiles];
        if cpu.isa() == Isa::Avx512Bf16 && matches!(w.panels, Panels::Pairs(_)) {
            cpu.chunks(&mut exact, 8, |chunk, exact| {
                for (i, exact) in exact.iter_mut().enumerate() {
                    let rows = bf16_slice(x_of(chunk * 8 + i)).expect("pairs are of bf16");
                    *exact = dot_is_exact(least_magnitude(cpu, rows), least_weight);
                }
            });
        }
        let all_exact = exact.iter().all(|exact| *exact);
        let tile_words = height * if all_exact { k.div_ceil(2) } else { k.next_multiple_of(2) };
        let mut scratch = Scratch::new(tiles * tile_words);
        cpu.chunks(scratch.words(), tile_words, |t, out| {
            let rows = rows_of(t);
            if exact[t] {
                pairs_of_rows(bf16_slice(x_of(t)).expect("pairs are of bf16"), k, rows, bf16::ZERO, out);
            } else {
                let out = as_floats_mut(out);
                if k % 2 == 1 {
                    out[k * rows..][..rows].fill(0.0);
                }
                x_of(t).chunks(k.max(1)).enumerate().for_each(|(r, row)| scatter_wide(row, tf32, out, r, rows));
            }
        });
        let packed: &[u32] = scratch.words();
        // One panel at a time stays in cache while the rows pass; few panels are cut along the rows so that all
        // threads have work.
        let cuts = (4 * cpu.threads()).div_ceil(panels.max(1)).clamp(1, tiles.max(1));
        let tiles_per_task = tiles.div_ceil(cuts).max(1);
        let cuts = tiles.div_ceil(tiles_per_task);
        cpu.each(panels * cuts, |task| {
            let (panel, cut) = (task / cuts, task % cuts);
            let columns = PANEL.min(w.n - panel * PANEL);
            let mut bias_wide = [0f32; PANEL];
            if let Some(bias) = bias {
                wide_row(&bias[panel * PANEL..][..columns], Tf32::Disabled, &mut bias_wide);
            }
            let mut sums = [0f32; MAX_ROWS * PANEL];
            for t in cut * tiles_per_task..((cut + 1) * tiles_per_task).min(tiles) {
                let rows = rows_of(t);
                let (right, order) = (w.right(panel), Order::Tree(bounds));
                let (out, out_stride) = (&mut sums[..rows * PANEL], PANEL);
                let at = first_row(t) * target.stride + target.first + panel * PANEL;
                // The lines of y arrive while the tile is summed.
                (0..rows).for_each(|r| y.prefetch(at + r * target.stride));
                let slot = &packed[t * tile_words..][..tile_words.min(packed.len() - t * tile_words)];
                if exact[t] {
                    let left = Left { data: slot, row_stride: 1, step: rows };
                    let tile = Tile { left, right, order, rows, columns: PANEL, out, out_stride };
                    dot_tile(cpu, tile);
                } else {
                    let left = Left { data: as_floats(slot), row_stride: 1, step: rows };
                    fma_tile(cpu, Tile { left, right, order, rows, columns: PANEL, out, out_stride });
                }
                // SAFETY: tasks differ in rows or in panel, so their places in y are disjoint.
                unsafe { finish(cpu, &sums[..rows * PANEL], bias.map(|_| &bias_wide), &y, at, target.stride, columns) };
            }
        });
    }
}

/// A slice that tasks write to in disjoint parts.
pub(crate) struct SharedOut<O> {
    pub(crate) data: *mut O,
    pub(crate) len: usize,
}

// SAFETY: the only access is `part`, whose callers promise disjoint ranges.
unsafe impl<O: Send> Sync for SharedOut<O> {}

impl<O> SharedOut<O> {
    /// Asks for the cache line of element `at`.
    pub(crate) fn prefetch(&self, at: usize) {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: a prefetch reads nothing and may name any address.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(self.data.wrapping_add(at).cast::<i8>()) };
        }
    }

    /// The elements `at..at + len`.
    ///
    /// # Safety
    /// The slice outlives the result, and no two live parts overlap.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn part(&self, at: usize, len: usize) -> &mut [O] {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.len), "part outside the output");
        // SAFETY: in bounds by the assertion, exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(at), len) }
    }
}

/// `+ bias` and the last rounding of the rows of a tile, `stride` apart from `at` in y.
///
/// # Safety
/// No other thread touches these places of y.
unsafe fn finish<O: Element>(
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
    y: &'a SharedOut<O>,
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
