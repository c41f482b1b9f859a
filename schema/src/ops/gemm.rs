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

/// The sum over K.
const SUM: Sum = Sum { axis: "K", of: "columns", offset: "k_offset", total: "k_total" };

/// Whether a call is one rank's part of a longer sum: its output is f32, and it adds no bias.
pub fn is_partial(call: &Call) -> bool {
    SUM.is_partial(call)
}

fn check(call: &Call) -> Result<(), Error> {
    SUM.check(call)
}

/// Terms of a segment, an eighth of a sum of `total` terms: 16 * ceil(total / 128).
pub fn segment(total: usize) -> usize {
    total.div_ceil(128).saturating_mul(16)
}

/// The sum of a matrix product, of which one tensor-parallel rank may hold a part.
pub(super) struct Sum {
    /// The axis that it runs over.
    pub axis: &'static str,
    /// What its terms stand in, in words.
    pub of: &'static str,
    /// The attribute that says where the part begins.
    pub offset: &'static str,
    /// The attribute that says how many terms the whole has.
    pub total: &'static str,
}

impl Sum {
    /// Whether a call has a part of the sum.
    pub fn is_partial(&self, call: &Call) -> bool {
        call.dim(self.axis) != call.count(self.total)
    }

    /// A rank holds 8, 4, 2 or 1 whole segments that form a subtree: 4 to 7, but not 1 and 2.
    pub fn check(&self, call: &Call) -> Result<(), Error> {
        let Sum { axis, of, offset: offset_name, total: total_name } = *self;
        let (offset, count, total) = (call.count(offset_name), call.dim(axis), call.count(total_name));
        let Some(end) = offset.checked_add(count).filter(|&end| end <= total) else {
            let beyond = format!("{offset_name} {offset} + {axis} {count} is beyond {total_name} {total}");
            return invalid(format!("param `{total_name}`: {beyond}"));
        };
        let bound = |border: usize| segment(total).saturating_mul(border).min(total);
        let subtree = |count: usize| {
            let first = |first: usize| (segment(total).saturating_mul(first), bound(first + count));
            (0..8).step_by(count).any(|number| first(number) == (offset, end))
        };
        if [8, 4, 2, 1].into_iter().any(subtree) {
            return Ok(());
        }
        invalid(format!(
            "param `{offset_name}`: {of} {offset}..{end} of {total} are no subtree of its eight segments of {}; \
             use 1, 2, 4 or 8 equal ranks with {total_name} a multiple of 128",
            segment(total)
        ))
    }
}
