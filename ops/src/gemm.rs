//! Matrix product with a transposed weight: `x[M,K], w[N,K], bias[N]? -> y[M,N]`.
//!
//! Formula: `y[m][n] = sum over k of x[m][k] * w[n][k] + bias[n]`.
//! Order: k is cut in 8 segments of `16 * ceil(k_total / 128)`; a segment is a chain of fma from +0, k ascending; the
//! eight sums are joined as `((s0+s1)+(s2+s3)) + ((s4+s5)+(s6+s7))`.
//! Rounding: each fma and each join once to f32; `+ bias` once in f32; the last rounding to the output type.

use crate::lanes::{Kernel, Simd, load_at, narrow_at};
use crate::tile::{Left, MAX_ROWS, Order, PANEL, Right, Tile, dot_is_exact, fma_tile};
use crate::{Cpu, Element, Error, Isa, Tf32, check_len, value_error};

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
/// subtree of the segments, or the budget is below the smallest plan (one panel of 32 weight rows and 12 rows of x).
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
    row_tiles_in_budget(cpu, k, panel_bytes)?;
    let group = (cpu.budget() / 2 / panel_bytes.max(1)).clamp(1, n.div_ceil(PANEL).max(1)) * PANEL;
    for first in (0..n).step_by(group) {
        let count = group.min(n - first);
        let packed = PackedWeight::pack_as(cpu, count, k, &w[first * k..(first + count) * k], tf32)?;
        let row_tiles = row_tiles_in_budget(cpu, k, packed.bytes())?;
        let target = Columns { first, stride: n };
        product(cpu, m, x, &packed, bias.map(|b| &b[first..first + count]), y, &bounds, tf32, row_tiles, target);
    }
    Ok(())
}

/// [`gemm`] with a weight packed beforehand: the same bits. `x[M,K], bias[N]? -> y[M,N]`.
///
/// # Errors
/// As [`gemm`]; the budget must hold 12 rows of x.
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
    let row_tiles = row_tiles_in_budget(cpu, k, 0)?;
    product(cpu, m, x, w, bias, y, &bounds, Tf32::Disabled, row_tiles, Columns { first: 0, stride: n });
    Ok(())
}

/// Elements of one packed panel, padded to whole pairs of k.
fn panel_elements(k: usize) -> usize {
    PANEL * k.next_multiple_of(2)
}

/// How many tiles of 12 packed rows of x fit in the budget beside `taken` bytes.
fn row_tiles_in_budget(cpu: &Cpu, k: usize, taken: usize) -> Result<usize, Error> {
    let tile_bytes = (MAX_ROWS * k.next_multiple_of(2) * 4).max(1);
    match cpu.budget().saturating_sub(taken) / tile_bytes {
        0 => Err(value_error(
            "gemm",
            format!("a budget of {} bytes is below the smallest plan, {} bytes", cpu.budget(), taken + tile_bytes),
        )),
        tiles => Ok(tiles),
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
                    pack_pairs(row, 0x8000, out, j, PANEL);
                }
            });
            Panels::Pairs(pairs)
        } else {
            let mut wide = vec![0f32; count * size];
            cpu.chunks(&mut wide, size, |panel, out| {
                for (j, row) in rows(panel) {
                    pack_wide(row, tf32, out, j, PANEL);
                }
            });
            Panels::Wide(wide)
        };
        let mut least = vec![f32::INFINITY; count];
        if I::IS_BF16 {
            cpu.chunks(&mut least, 1, |panel, out| {
                out[0] = rows(panel).map(|(_, row)| least_magnitude(row)).fold(f32::INFINITY, f32::min);
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

/// Smallest nonzero |x|, or infinity; NaN is ignored.
pub(crate) fn least_magnitude<I: Element>(x: &[I]) -> f32 {
    x.iter().map(|v| v.widen().abs()).fold(f32::INFINITY, |least, v| if v > 0.0 && v < least { v } else { least })
}

/// Writes one row as pairs, `stride` apart from `offset`; an odd end is filled with the bf16 bits `pad`.
pub(crate) fn pack_pairs<I: Element>(row: &[I], pad: u32, out: &mut [u32], offset: usize, stride: usize) {
    let bits = |v: &I| v.widen().to_bits() >> 16;
    for (pair, slot) in row.chunks(2).zip(out.iter_mut().skip(offset).step_by(stride)) {
        *slot = bits(&pair[0]) << 16 | pair.get(1).map_or(pad, bits);
    }
}

/// Writes one row as f32, `stride` apart from `offset`.
pub(crate) fn pack_wide<I: Element>(row: &[I], tf32: Tf32, out: &mut [f32], offset: usize, stride: usize) {
    for (v, slot) in row.iter().zip(out.iter_mut().skip(offset).step_by(stride)) {
        *slot = tf32.operand(v.widen());
    }
}

/// Up to 12 rows of x, k by k.
enum Rows {
    Pairs(Vec<u32>),
    Wide(Vec<f32>),
}

/// The whole product of `x` with one packed weight. `row_tiles` bounds how many tiles of x are packed at a time.
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
    row_tiles: usize,
    target: Columns,
) {
    let k = w.k;
    let panels = w.n.div_ceil(PANEL);
    let least_weight = w.least.iter().copied().fold(f32::INFINITY, f32::min);
    let dot = cpu.isa() == Isa::Avx512Bf16 && matches!(w.panels, Panels::Pairs(_));
    let y = SharedOut { data: y.as_mut_ptr(), len: y.len() };
    for block in (0..m.div_ceil(MAX_ROWS)).step_by(row_tiles) {
        let tiles = row_tiles.min(m.div_ceil(MAX_ROWS) - block);
        let mut packed: Vec<Rows> = Vec::new();
        packed.resize_with(tiles, || Rows::Wide(Vec::new()));
        cpu.chunks(&mut packed, 1, |t, slot| {
            let first = (block + t) * MAX_ROWS;
            let height = MAX_ROWS.min(m - first);
            let rows = &x[first * k..(first + height) * k];
            // The flush of VDPBF16PS must be invisible for every panel, or the tile takes the plain fma kernel.
            slot[0] = if dot && dot_is_exact(least_magnitude(rows), least_weight) {
                let mut pairs = vec![0u32; height * k.div_ceil(2)];
                (0..height).for_each(|r| pack_pairs(&rows[r * k..][..k], 0, &mut pairs, r, height));
                Rows::Pairs(pairs)
            } else {
                let mut wide = vec![0f32; height * k.next_multiple_of(2)];
                (0..height).for_each(|r| pack_wide(&rows[r * k..][..k], tf32, &mut wide, r, height));
                Rows::Wide(wide)
            };
        });
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
                pack_wide(&bias[panel * PANEL..][..columns], Tf32::Disabled, &mut bias_wide, 0, 1);
            }
            let bias_wide = bias.map(|_| &bias_wide);
            let mut sums = [0f32; MAX_ROWS * PANEL];
            let mine = cut * tiles_per_task..((cut + 1) * tiles_per_task).min(tiles);
            for (t, rows) in mine.clone().zip(&packed[mine]) {
                let first = (block + t) * MAX_ROWS;
                let height = MAX_ROWS.min(m - first);
                let (right, order) = (w.right(panel), Order::Tree(bounds));
                match rows {
                    Rows::Pairs(pairs) => {
                        let left = Left { data: pairs, row_stride: 1, step: height };
                        let tile = Tile {
                            left,
                            right,
                            order,
                            rows: height,
                            columns: PANEL,
                            out: &mut sums,
                            out_stride: PANEL,
                        };
                        #[cfg(target_arch = "x86_64")]
                        // SAFETY: rows are packed as pairs only when `cpu` has Isa::Avx512Bf16, which `Cpu::new` checked.
                        unsafe {
                            crate::tile::dot_tile(tile)
                        };
                        #[cfg(not(target_arch = "x86_64"))]
                        drop(tile);
                    }
                    Rows::Wide(wide) => {
                        let left = Left { data: wide, row_stride: 1, step: height };
                        fma_tile(
                            cpu,
                            Tile {
                                left,
                                right,
                                order,
                                rows: height,
                                columns: PANEL,
                                out: &mut sums,
                                out_stride: PANEL,
                            },
                        );
                    }
                }
                for r in 0..height {
                    let at = (first + r) * target.stride + target.first + panel * PANEL;
                    // SAFETY: tasks differ in rows or in panel, so their ranges of y are disjoint; `part` checks bounds.
                    let row = unsafe { y.part(at, columns) };
                    cpu.dispatch(Finish { sums: &sums[r * PANEL..][..PANEL], bias: bias_wide, out: row });
                }
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

/// `+ bias` and the last rounding of one row of a tile.
struct Finish<'a, O> {
    sums: &'a [f32],
    bias: Option<&'a [f32; PANEL]>,
    out: &'a mut [O],
}

impl<O: Element> Kernel for Finish<'_, O> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for at in (0..self.out.len()).step_by(S::LANES) {
            let mut sum = load_at(s, self.sums, at, 0.0);
            if let Some(bias) = self.bias {
                sum = s.add(sum, load_at(s, bias, at, 0.0));
            }
            narrow_at(s, sum, self.out, at);
        }
    }
}
