//! The gradient of the weight of a matrix product.
use super::*;

/// `x[T,K], dy[T,N], mask[T]?, carry[N,K]? -> dw[N,K]`
pub static OP: Op = Op {
    name: "gemm_dw",
    about: "the gradient of w from that of gemm's y: the matrix product of the transpose of dy and x, added to `carry`",
    inputs: &[
        Input::activation("x", &["T", "K"]),
        Input::gradient("dy", &["T", "N"]),
        Input::mask(&["T"]),
        Input::carry(&["N", "K"]),
    ],
    attributes: &[TF32],
    outputs: &[Output::token_sum("dw", &["N", "K"])],
    operations: |call| 2.0 * call.elements(&["T", "N", "K"]),
    gradient_of: Some("gemm"),
    ..Op::PLAIN
};
