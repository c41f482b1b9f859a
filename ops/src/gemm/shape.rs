//! Dimensions of a product, and the segments of its sums.

use crate::profile::IEEE;
use crate::{Error, Tf32, value_error};
use samebits_schema::Call;

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
    pub(crate) fn bounds(&self) -> Result<Vec<usize>, Error> {
        bounds("gemm", ["columns", "k_total"], [self.k_offset, self.k, self.k_total])
    }
}

/// The bounds of the segments between `offset` and `offset + count` of a sum of `total`, relative to `offset`. `names` are
/// what terms stand in and what says how many there are.
pub(super) fn bounds(
    op: &'static str,
    [terms, total_name]: [&str; 2],
    [offset, count, total]: [usize; 3],
) -> Result<Vec<usize>, Error> {
    let length = segment_length(total);
    let end = offset
        .checked_add(count)
        .filter(|&end| end <= total)
        .ok_or_else(|| value_error(op, format!("{terms} {offset}+{count} exceed {total_name} {total}")))?;
    let bound = |segment: usize| segment.saturating_mul(length).min(total);
    for count in [8, 4, 2, 1] {
        for first in (0..IEEE.segments).step_by(count) {
            if (first.saturating_mul(length), bound(first + count)) == (offset, end) {
                return Ok((first..=first + count).map(|segment| bound(segment).max(offset) - offset).collect());
            }
        }
    }
    Err(value_error(
        op,
        format!(
            "{terms} {offset}..{end} of {total} are not a subtree of the eight segments of {length}; \
             use 1, 2, 4 or 8 equal ranks with {total_name} a multiple of 128"
        ),
    ))
}

/// Elements per segment of a sum of `n`: `16 * ceil(n / 128)`.
pub(crate) fn segment_length(n: usize) -> usize {
    IEEE.segment_length(n)
}

impl Gemm {
    /// The dimensions of a call.
    pub(crate) fn of(call: &Call) -> Gemm {
        let tf32 = if call.tf32() { Tf32::Enabled } else { Tf32::Disabled };
        let (k_offset, k_total) = (call.count("k_offset"), call.count("k_total"));
        Gemm { m: call.dim("M"), n: call.dim("N"), k: call.dim("K"), k_offset, k_total, tf32 }
    }
}
