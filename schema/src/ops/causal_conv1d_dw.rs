//! The gradient of the weight of a causal convolution.
use super::causal_conv1d::{BEFORE, check, operations};
use super::token_sum::TOKEN_OFFSET;
use super::*;

/// `x[B,T,C], dy[B,T,C], state[B,J,C]?, mask[B,T]?, carry[64,C,K] -> dw[64,C,K]`
pub static OP: Op = Op {
    name: "causal_conv1d_dw",
    about: "64 sums over tokens, which `fold` joins: the gradient of w from that of causal_conv1d's y, added to `carry`",
    inputs: &[
        Input::activation("x", &["B", "T", "C"]),
        Input::gradient("dy", &["B", "T", "C"]),
        Input::state("state", &["B", "J", "C"]).optional(),
        Input::mask(&["B", "T"]),
        // How many taps there are nothing else says.
        Input { optional: false, ..Input::carry(&["64", "C", "K"]) },
    ],
    attributes: &[TOKEN_OFFSET],
    outputs: &[Output::token_sum("dw", &["64", "C", "K"])],
    extents: BEFORE,
    refused: "K = 0; J other than K - 1",
    check,
    operations,
    gradient_of: Some("causal_conv1d"),
    ..Op::PLAIN
};
