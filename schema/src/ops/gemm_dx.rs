//! The gradient of the activations of a matrix product.
use super::gemm::Sum;
use super::*;

/// `dy[M,N], w[N,K] -> dx[M,K]`
pub static OP: Op = Op {
    name: "gemm_dx",
    about: "the gradient of x from that of gemm's y: the matrix product dy w",
    inputs: &[Input::gradient("dy", &["M", "N"]), Input::weight("w", &["N", "K"])],
    attributes: &[N_OFFSET, N_TOTAL, TF32],
    outputs: &[Output { dtype: OutputDType::OutOrFp32(is_partial), ..Output::out("dx", &["M", "K"]) }],
    refused: "rows of w that are not whole segments forming a subtree of the eight of `n_total`",
    check,
    operations: |call| 2.0 * call.elements(&["M", "N", "K"]),
    gradient_of: Some("gemm"),
    ..Op::PLAIN
};

const N_OFFSET: Attribute =
    Attribute::count("n_offset", 0, "0", "first row of w that this tensor-parallel rank holds, of `n_total`");

const N_TOTAL: Attribute = Attribute::count("n_total", 0, "", "rows of the whole w")
    .default(DefaultValue::Of("N", |dims| Value::Count(dims["N"])));

/// The sum over N.
const SUM: Sum = Sum { axis: "N", of: "rows of w", offset: "n_offset", total: "n_total" };

/// Whether a call is one rank's part of a longer sum: its output is f32.
pub fn is_partial(call: &Call) -> bool {
    SUM.is_partial(call)
}

fn check(call: &Call) -> Result<(), Error> {
    SUM.check(call)
}
