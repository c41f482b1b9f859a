//! Matrices and rows packed: whole panels, and what stands behind each.

use super::patches::Patches;
use super::{
    PANEL, as_floats_mut, bf16_slice, f32_of_columns, f32_of_rows, f32_rows, least_magnitude, least_of_vnni,
    pairs_of_rows, vnni_of_columns,
};
use crate::simd::prefetch::Prefetch;
use crate::tensor::Rows;
use crate::workspace::memory::LINE;
use crate::{Cpu, Element, Tf32};
use half::bf16;
use std::ops::Range;

/// Words of one packed panel: 32 columns of k elements, then a line that starts with the smallest nonzero magnitude of
/// pairs (infinity when there is none).
pub(crate) fn panel_words(k: usize, pairs: bool) -> usize {
    PANEL.saturating_mul(row_words(k, pairs)).saturating_add(LINE)
}

/// Words of one packed row, whole pairs of k.
pub(crate) fn row_words(k: usize, pairs: bool) -> usize {
    if pairs { k.div_ceil(2) } else { k.div_ceil(2).saturating_mul(2) }
}

/// What the outputs of a product are of its weight: in the rows or the columns of w stand the factors of one.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Side {
    /// gemm: `w[outputs, terms]`.
    Rows,
    /// gemm_dx: `w[terms, outputs]`.
    Columns,
}

impl Side {
    /// Rows and columns of the matrix from outputs and terms of the product; or the other way round.
    pub(crate) fn of(self, a: usize, b: usize) -> [usize; 2] {
        if self == Side::Rows { [a, b] } else { [b, a] }
    }
}

/// The right operand of a product as it stands in memory.
#[derive(Clone, Copy)]
pub(crate) enum Matrix<'a, I> {
    /// A weight.
    Weight { rows: Rows<'a, I>, side: Side },
    /// An image, whose patches are the outputs.
    Patches(&'a Patches<'a, I>),
}

/// Terms of patches that are laid out at a time, an even number.
const TERMS: usize = 32;

impl<'a, I: Element> Matrix<'a, I> {
    /// Packs the panels of some outputs, of all `terms`.
    pub(crate) fn pack(&self, cpu: &Cpu, terms: usize, outputs: Range<usize>, tf32: Tf32, out: &mut [u32]) {
        let size = panel_words(terms, I::IS_BF16);
        match *self {
            Matrix::Weight { rows, side: Side::Rows } => {
                let panels = outputs.clone().step_by(PANEL).zip(out.chunks_exact_mut(size));
                let operand = Packing { tf32, pad: bf16::NEG_ZERO, pairs: I::IS_BF16, stride: PANEL };
                panels.for_each(|(at, out)| pack_rows(cpu, rows, at, PANEL.min(outputs.end - at), operand, out));
                return;
            }
            Matrix::Weight { rows, side: Side::Columns } if I::IS_BF16 => {
                // What stands beside the last outputs is no weight.
                let panels = outputs.clone().step_by(PANEL).zip(out.chunks_exact_mut(size));
                panels.filter(|(at, _)| outputs.end - at < PANEL).for_each(|(_, panel)| panel.fill(0));
                let row = |term: usize| bf16_slice(piece(rows, term, outputs.clone())).expect("bf16");
                vnni_of_columns(cpu, terms, row, bf16::NEG_ZERO, PANEL, out, size);
            }
            Matrix::Weight { rows, side: Side::Columns } => {
                f32_of_columns(cpu, terms, |term| piece(rows, term, outputs.clone()), tf32, as_floats_mut(out), size);
            }
            Matrix::Patches(patches) => {
                for (at, panel) in outputs.clone().step_by(PANEL).zip(out.chunks_exact_mut(size)) {
                    pack_patches(cpu, patches, terms, at..outputs.end.min(at + PANEL), tf32, panel);
                }
            }
        }
        let end = size - LINE;
        for panel in out.chunks_exact_mut(size) {
            if I::IS_BF16 {
                panel[end] = least_of_vnni(cpu, &panel[..end]).to_bits();
                continue;
            }
            if terms % 2 == 1 {
                panel[terms * PANEL..][..PANEL].fill(0);
            }
            panel[end] = f32::NAN.to_bits();
        }
    }

    /// Lays `steps` terms from `from` on of the outputs from `first` on side by side as f32.
    pub(crate) fn widen(
        &self,
        cpu: &Cpu,
        [from, steps]: [usize; 2],
        [first, columns]: [usize; 2],
        tf32: Tf32,
        out: &mut [f32],
    ) {
        match *self {
            Matrix::Weight { rows, side: Side::Rows } => {
                f32_of_rows(cpu, columns, steps, |c| &rows.row(first + c)[from..], tf32, out, PANEL);
            }
            Matrix::Weight { rows, side: Side::Columns } => {
                let row = |step: usize| piece(rows, from + step, first..first + columns);
                f32_of_columns(cpu, steps, row, tf32, out, out.len());
            }
            Matrix::Patches(patches) => widen_patches(cpu, patches, [from, steps], first..first + columns, tf32, out),
        }
    }

    /// The smallest nonzero magnitude of the bf16 factors of `columns` outputs from `first` on.
    pub(crate) fn least(&self, cpu: &Cpu, terms: usize, first: usize, columns: usize) -> f32 {
        let of_row = |row: &[I]| least_magnitude(cpu, bf16_slice(row).expect("bf16"));
        let of_terms = |least: &dyn Fn(usize) -> f32| (0..terms).map(least).fold(f32::INFINITY, f32::min);
        match *self {
            Matrix::Weight { rows, side: Side::Rows } => least_of_rows(cpu, rows, first, columns),
            Matrix::Weight { rows, side: Side::Columns } => {
                of_terms(&|term| of_row(piece(rows, term, first..first + columns)))
            }
            Matrix::Patches(patches) => of_terms(&|term| {
                let mut row = [I::default(); PANEL];
                patches.write(term, first..first + columns, &mut row);
                of_row(&row[..columns])
            }),
        }
    }

    /// Whether a worker packs a panel by itself when its tiles come to it.
    pub(crate) fn packs_alone(&self) -> bool {
        !matches!(self, Matrix::Weight { side: Side::Columns, .. })
    }

    /// How many of so many panels are packed at a time at most, where they are packed for all. Those of an image are more than
    /// the image.
    pub(crate) fn at_a_time(&self, panels: usize, threads: usize) -> usize {
        match self {
            Matrix::Weight { .. } => panels,
            Matrix::Patches(_) => panels.min(16 * threads),
        }
    }
}

/// Factors of some outputs that stand in one row.
#[inline(always)]
fn piece<I>(rows: Rows<'_, I>, term: usize, outputs: Range<usize>) -> &'_ [I] {
    &rows.row(term)[outputs]
}

/// Lays the patches of some places, at most a panel, side by side: some terms at a time, which `put` takes with their number.
fn each_terms<I: Element>(
    patches: &Patches<I>,
    [from, steps]: [usize; 2],
    places: Range<usize>,
    mut put: impl FnMut(usize, &[[I; PANEL]]),
) {
    let mut rows = [[I::default(); PANEL]; TERMS];
    for first in (0..steps).step_by(TERMS) {
        let rows = &mut rows[..TERMS.min(steps - first)];
        for (i, row) in rows.iter_mut().enumerate() {
            patches.write(from + first + i, places.clone(), row);
        }
        put(first, rows);
    }
}

fn widen_patches<I: Element>(
    cpu: &Cpu,
    patches: &Patches<I>,
    steps: [usize; 2],
    places: Range<usize>,
    tf32: Tf32,
    out: &mut [f32],
) {
    each_terms(patches, steps, places, |first, rows| {
        f32_rows(cpu, rows.len(), |i| &rows[i][..], tf32, &mut out[first * PANEL..], PANEL);
    });
}

/// A panel of patches, without what stands behind it. Places that are missing are +0.
fn pack_patches<I: Element>(
    cpu: &Cpu,
    patches: &Patches<I>,
    terms: usize,
    places: Range<usize>,
    tf32: Tf32,
    out: &mut [u32],
) {
    if !I::IS_BF16 {
        return widen_patches(cpu, patches, [0, terms], places, tf32, as_floats_mut(out));
    }
    each_terms(patches, [0, terms], places, |first, rows| {
        let row = |i: usize| bf16_slice(&rows[i][..]).expect("bf16");
        vnni_of_columns(cpu, rows.len(), row, bf16::NEG_ZERO, PANEL, &mut out[first / 2 * PANEL..], 0);
    });
}

/// Packs the panels of some outputs of w into `out`, in parallel.
pub(crate) fn pack_panels<I: Element>(
    cpu: &Cpu,
    w: Matrix<I>,
    terms: usize,
    outputs: Range<usize>,
    tf32: Tf32,
    out: &mut [u32],
) {
    // Several panels share the lines and pages of the rows that they are pieces of.
    let together = if w.packs_alone() { 1 } else { 4 };
    cpu.chunks(out, together * panel_words(terms, I::IS_BF16), |number, out| {
        let first = outputs.start + number * together * PANEL;
        w.pack(cpu, terms, first..outputs.end.min(first + together * PANEL), tf32, out);
    });
}

/// How rows are packed.
#[derive(Clone, Copy)]
pub(crate) struct Packing {
    pub tf32: Tf32,
    /// What ends pairs of an odd k.
    pub pad: bf16,
    pub pairs: bool,
    /// From one k to the next.
    pub stride: usize,
}

/// Packs `rows` rows of x from `first` on side by side, and writes their smallest nonzero magnitude behind, at the start
/// of the last line of `out`.
pub(crate) fn pack_rows<I: Element>(
    cpu: &Cpu,
    x: Rows<I>,
    first: usize,
    rows: usize,
    operand: Packing,
    out: &mut [u32],
) {
    let Packing { tf32, pad, pairs, stride } = operand;
    let k = x.n();
    let (out, end) = out.split_at_mut(out.len() - LINE);
    if I::IS_BF16 && pairs {
        let row = |r: usize| bf16_slice(x.row(first + r)).expect("bf16");
        // First, as it reads the rows in order, which memory answers faster than pieces of all rows in turn.
        end[0] = least_of_rows(cpu, x, first, rows).to_bits();
        pairs_of_rows::<true>(cpu, rows, k, row, pad, out, stride, Prefetch::NONE);
    } else {
        let out = as_floats_mut(out);
        if k % 2 == 1 {
            out[k * stride..][..rows].fill(0.0);
        }
        f32_of_rows(cpu, rows, k, |r| x.row(first + r), tf32, out, stride);
        end[0] = f32::NAN.to_bits();
    }
}

/// The smallest nonzero magnitude of `rows` rows of bf16 from `first` on.
pub(crate) fn least_of_rows<I: Element>(cpu: &Cpu, x: Rows<I>, first: usize, rows: usize) -> f32 {
    let least = |x: &[I]| least_magnitude(cpu, bf16_slice(x).expect("bf16"));
    match x.together(first, rows) {
        Some(all) => least(all),
        None => (first..first + rows).map(|r| least(x.row(r))).fold(f32::INFINITY, f32::min),
    }
}
