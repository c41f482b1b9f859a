//! Matrix products.
use super::*;

/// `x[M,K], w[N,K], bias[N]? -> y[M,N]`
pub static OP: Op = Op {
    name: "gemm",
    about: "the matrix product x w^T + bias",
    inputs: &[
        Input::activation("x", &["M", "K"]),
        Input::weight("w", &["N", "K"]),
        Input::weight("bias", &["N"]).optional(),
    ],
    attributes: &[K_OFFSET, K_TOTAL, TF32],
    outputs: &[Output { dtype: OutputDType::OutOrFp32(is_partial), ..Output::out("y", &["M", "N"]) }],
    refused: "columns that are not whole segments forming a subtree of the eight of `k_total`",
    check,
    operations: |call| 2.0 * call.elements(&["M", "N", "K"]),
    ..Op::PLAIN
};

const K_OFFSET: Attribute =
    Attribute::count("k_offset", 0, "0", "first column that this tensor-parallel rank holds, of `k_total`");

const K_TOTAL: Attribute = Attribute::count("k_total", 0, "", "columns of the whole product")
    .default(DefaultValue::Of("K", |dims| Value::Count(dims["K"])));

/// Whether a call is one rank's part of a longer sum: its output is f32, and it adds no bias.
pub fn is_partial(call: &Call) -> bool {
    call.dim("K") != call.count("k_total")
}

/// Columns of a segment, an eighth of a sum of `total` columns: 16 * ceil(total / 128).
pub fn segment(total: usize) -> usize {
    total.div_ceil(128).saturating_mul(16)
}

/// A rank holds 8, 4, 2 or 1 whole segments that form a subtree: 4 to 7, but not 1 and 2.
fn check(call: &Call) -> Result<(), Error> {
    let (offset, k, total) = (call.count("k_offset"), call.dim("K"), call.count("k_total"));
    let Some(end) = offset.checked_add(k).filter(|&end| end <= total) else {
        return invalid(format!("param `k_total`: k_offset {offset} + K {k} is beyond k_total {total}"));
    };
    let bound = |border: usize| segment(total).saturating_mul(border).min(total);
    let subtree = |count: usize| {
        (0..8).step_by(count).any(|first| (segment(total).saturating_mul(first), bound(first + count)) == (offset, end))
    };
    if [8, 4, 2, 1].into_iter().any(subtree) {
        return Ok(());
    }
    invalid(format!(
        "param `k_offset`: columns {offset}..{end} of {total} are no subtree of its eight segments of {}; \
         use 1, 2, 4 or 8 equal ranks with k_total a multiple of 128",
        segment(total)
    ))
}
