//! The gradient of a causal convolution.
use super::causal_conv1d::{BEFORE, LEN, check, operations};
use super::*;

/// `dy[B,T,C], w[C,K], dnext[B,J,C]?, len[B]? -> dx[B,T,C], dstate[B,J,C]`
pub static OP: Op = Op {
    name: "causal_conv1d_backward",
    about: "the gradients of x and state from those of causal_conv1d's y and next",
    inputs: &[
        Input::gradient("dy", &["B", "T", "C"]),
        Input::weight("w", &["C", "K"]),
        Input::gradient("dnext", &["B", "J", "C"]).fp32().optional(),
        LEN,
    ],
    outputs: &[Output::out("dx", &["B", "T", "C"]), Output::fixed("dstate", &["B", "J", "C"], DType::Fp32)],
    extents: BEFORE,
    refused: "K = 0; J other than K - 1",
    check,
    operations,
    gradient_of: Some("causal_conv1d"),
    ..Op::PLAIN
};
