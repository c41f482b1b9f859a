//! The gradient of the weight of a layer normalisation.
use super::layer_norm::EPS;
use super::token_sum::TOKEN_OFFSET;
use super::*;

/// `x[R,N], dy[R,N], mask[R]?, carry[64,N]? -> dw[64,N]`
pub static OP: Op = Op {
    name: "layer_norm_dw",
    about: "64 sums over tokens, which `fold` joins: the gradient of w from that of layer_norm's y",
    inputs: &[
        Input::activation("x", &["R", "N"]),
        Input::gradient("dy", &["R", "N"]),
        Input::mask(&["R"]),
        Input::carry(&["64", "N"]),
    ],
    attributes: &[EPS, TOKEN_OFFSET],
    outputs: &[Output::token_sum("dw", &["64", "N"])],
    operations: |call| 7.0 * call.elements(&["R", "N"]),
    gradient_of: Some("layer_norm"),
    ..Op::PLAIN
};
