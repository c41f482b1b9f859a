//! The gradient of the weight of the norm of each head and its rotation.
use super::rms_norm::{EPS, ROUNDING};
use super::rope::{PAIRING, THETA, check};
use super::token_sum::TOKEN_OFFSET;
use super::*;

/// `x[T,H,D], dy[T,H,D], pos[T], mask[T]?, carry[64,D]? -> dw[64,D]`
pub static OP: Op = Op {
    name: "norm_rope_dw",
    about: "64 sums over heads of tokens, which `fold` joins: the gradient of w from that of norm_rope's y",
    inputs: &[
        Input::activation("x", &["T", "H", "D"]),
        Input::gradient("dy", &["T", "H", "D"]),
        Input::index("pos", &["T"], Holds::Position),
        Input::mask(&["T"]),
        Input::carry(&["64", "D"]),
    ],
    attributes: &[EPS, ROUNDING, THETA, PAIRING, TOKEN_OFFSET],
    outputs: &[Output::token_sum("dw", &["64", "D"])],
    refused: "odd D",
    check,
    operations: |call| 8.0 * call.elements(&["T", "H", "D"]),
    gradient_of: Some("norm_rope"),
    ..Op::PLAIN
};
