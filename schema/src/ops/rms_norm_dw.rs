//! The gradient of the weight of a root mean square normalisation.
use super::rms_norm::{EPS, ROUNDING};
use super::token_sum::TOKEN_OFFSET;
use super::*;

/// `x[R,N], dy[R,N], mask[R]?, carry[64,N]? -> dw[64,N]`
pub static OP: Op = Op {
    name: "rms_norm_dw",
    about: "64 sums over tokens, which `fold` joins: the gradient of w from that of rms_norm's y",
    inputs: &[
        Input::activation("x", &["R", "N"]),
        Input::gradient("dy", &["R", "N"]),
        Input::mask(&["R"]),
        Input::carry(&["64", "N"]),
    ],
    attributes: &[EPS, ROUNDING, TOKEN_OFFSET],
    outputs: &[Output::token_sum("dw", &["64", "N"])],
    operations: |call| 5.0 * call.elements(&["R", "N"]),
    gradient_of: Some("rms_norm"),
    ..Op::PLAIN
};
