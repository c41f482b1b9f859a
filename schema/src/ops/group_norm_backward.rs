//! The gradient of a group normalisation.
use super::group_norm::{ATTRIBUTES, REFUSED, check};
use super::*;

/// `x[B,C,P], w[C]?, bias[C]?, dy[B,C,P] -> dx[B,C,P], dw[B,C], dbias[B,C]`
pub static OP: Op = Op {
    name: "group_norm_backward",
    about: "the gradients of x, w and bias from that of group_norm's y; those of w and bias are sums over each image, \
            which `token_sum` adds",
    inputs: &[
        Input::activation("x", &["B", "C", "P"]),
        Input::weight("w", &["C"]).optional(),
        Input::weight("bias", &["C"]).optional(),
        Input::gradient("dy", &["B", "C", "P"]),
    ],
    attributes: ATTRIBUTES,
    outputs: &[
        Output::out("dx", &["B", "C", "P"]),
        Output::fixed("dw", &["B", "C"], DType::Fp32),
        Output::fixed("dbias", &["B", "C"], DType::Fp32),
    ],
    refused: REFUSED,
    check,
    operations: |call| 17.0 * call.elements(&["B", "C", "P"]),
    gradient_of: Some("group_norm"),
    ..Op::PLAIN
};
