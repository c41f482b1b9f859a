//! A tile of chains: `out[r][c] = sum over k of a[r][k] * b[k][c]`, each sum in its canonical order.
//!
//! Every output element is one accumulator lane, so tile height, vector width and panel width decide which outputs are
//! computed together and never the order of a sum. [`fma_tile`] is the plain form for every instruction set, [`fma_block`]
//! that of many rows, [`fma_chains`] the same without segments; [`dot_tile`] is the same arithmetic through `VDPBF16PS` where
//! [`dot_is_exact`] shows that its flush cannot be seen.

mod block;
mod dictionary;
mod dot;
mod fma;
mod quantized;

pub use block::{Block, Chains, block_rows, block_words, fma_block, fma_chains};
pub use dot::{dot_tile, dot_unpacking, unpack};
pub use fma::{fma_tile, fma_tile_on};
pub use quantized::unpack_quantized;

use crate::pack::PANEL;
use crate::pack::dictionary::DictionaryPanel;
use crate::pack::quantized::QuantizedPanel;
use crate::simd::prefetch::Prefetch;

/// Rows that fill the registers two vectors wide.
pub const TILE_ROWS: usize = 12;
/// Rows of the tallest tile: what passes while a panel is in the nearest caches.
pub const MAX_ROWS: usize = 24;

/// The left operand: element (r, k) stands at `data[r * row_stride + k * step]`.
#[derive(Clone, Copy)]
pub struct Left<'a, T> {
    /// The elements, or pairs of bf16 with the earlier k in the high half.
    pub data: &'a [T],
    /// Distance between rows; 1 when rows are adjacent.
    pub row_stride: usize,
    /// Distance between steps of k (or of pairs of k).
    pub step: usize,
}

/// The right operand: `columns` adjacent columns, `stride` elements from one k (or pair of k) to the next.
#[derive(Clone, Copy)]
pub enum Right<'a> {
    /// f32.
    F32(&'a [f32], usize),
    /// VNNI form: pairs of bf16 along k, the earlier k in the high half. An odd length ends in a -0 beside a +0 on the left: their
    /// product -0 changes no sum.
    Vnni(&'a [u32], usize),
    /// The same in 12 bits a weight, for whom [`crate::Isa::reads_coded`] names.
    Dictionary(DictionaryPanel<'a>),
    /// Integers with scales.
    Quantized(QuantizedPanel<'a>),
    /// Such pairs with the earlier k in the low half, as rows of bf16 hold it, and memory that is prefetched on the way; for
    /// [`fma_tile`] and one chain of adjacent rows.
    PairsAsking(&'a [u32], usize, Prefetch),
    /// bf16, and memory that is prefetched on the way.
    Bf16(&'a [half::bf16], usize, Prefetch),
}

/// How the products are summed.
#[derive(Clone, Copy)]
pub enum Order<'a> {
    /// Segments of chains between these bounds (2, 3, 5 or 9 of them), joined as a balanced tree.
    Tree(&'a [usize]),
    /// One chain over `0..len` that goes on from what `out` holds.
    Chain(usize),
}

impl Order<'_> {
    fn end(&self) -> usize {
        match self {
            Order::Tree(bounds) => *bounds.last().expect("a tree has bounds"),
            Order::Chain(len) => *len,
        }
    }
}

/// One tile: `rows` (at most [`MAX_ROWS`]) by `columns` (a multiple of 16, at most what the right operand holds).
pub struct Tile<'a, T> {
    /// Left operand.
    pub left: Left<'a, T>,
    /// Right operand.
    pub right: Right<'a>,
    /// Order of the sum.
    pub order: Order<'a>,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub columns: usize,
    /// Row-major results.
    pub out: &'a mut [f32],
    /// Distance between rows of `out`.
    pub out_stride: usize,
}

/// Where the last of so many rows and steps stands; what is beyond a word is beyond every slice.
fn last(rows: usize, row_stride: usize, steps: usize, step: usize) -> usize {
    (rows - 1).saturating_mul(row_stride).saturating_add((steps - 1).saturating_mul(step))
}

impl<T> Tile<'_, T> {
    /// Every address the kernels form, checked once per tile. `pairs` steps per two elements of k on each side.
    fn check(&self, left_pairs: bool) {
        let end = self.order.end();
        if let Order::Tree(bounds) = self.order {
            assert!(bounds.is_sorted(), "the bounds of segments ascend");
        }
        let left_steps = if left_pairs { end.div_ceil(2) } else { end };
        assert!(self.rows >= 1 && self.rows <= MAX_ROWS && self.columns.is_multiple_of(16) && self.columns >= 16);
        if end > 0 {
            let left_last = last(self.rows, self.left.row_stride, left_steps, self.left.step);
            assert!(left_last < self.left.data.len(), "left operand too short");
            let (right_len, right_steps, stride) = match self.right {
                Right::Dictionary(coded) => (coded.pairs() * PANEL, end.div_ceil(2), PANEL),
                Right::Quantized(panel) => (panel.terms() * PANEL, end, PANEL),
                Right::F32(data, stride) => (data.len(), end, stride),
                Right::Vnni(data, stride) | Right::PairsAsking(data, stride, _) => {
                    (data.len(), end.div_ceil(2), stride)
                }
                Right::Bf16(data, stride, _) => (data.len(), end, stride),
            };
            assert!(last(self.columns, 1, right_steps, stride) < right_len, "right operand too short");
        }
        assert!(last(self.rows, self.out_stride, self.columns, 1) < self.out.len(), "output too short");
    }
}

/// Whether `VDPBF16PS` gives the bits of two fused multiply-adds for operands whose smallest nonzero magnitudes are
/// these: none is subnormal, and every partial sum is a multiple of 2^-126, so nothing is flushed.
pub fn dot_is_exact(least_left: f32, least_right: f32) -> bool {
    let exponent = |x: f32| (x.to_bits() >> 23) as i32 - 127;
    let normal = |x: f32| x >= f32::MIN_POSITIVE;
    normal(least_left) && normal(least_right) && exponent(least_left) + exponent(least_right) >= -112
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests;
