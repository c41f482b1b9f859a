//! Tokens that may be sampled.
use super::*;

/// `x[R,V], scale[R], top_k[R], top_p[R], min_p[R] -> y[R,V], kept[R]`
pub static OP: Op = Op {
    name: "truncate",
    about: "each row times its `scale`, and -inf in the place of tokens that may not be sampled; how many may",
    inputs: &[
        Input::activation("x", &["R", "V"]),
        Input::activation("scale", &["R"]).fp32(),
        Input::index("top_k", &["R"], Holds::Position),
        Input::activation("top_p", &["R"]).fp32(),
        Input::activation("min_p", &["R"]).fp32(),
    ],
    outputs: &[Output::fixed("y", &["R", "V"], DType::Fp32), Output::fixed("kept", &["R"], DType::I32)],
    refused: "V above 2^22",
    check: |call| check_vocabulary(call),
    ..Op::PLAIN
};

/// The largest V whose weights, integers of up to 2^40, have a sum within 63 bits.
pub const MOST_VOCAB: usize = 1 << 22;

pub(super) fn check_vocabulary(call: &Call) -> Result<(), Error> {
    match call.dim("V") {
        v if v > MOST_VOCAB => invalid(format!("input `x`: V = {v}; sums of weights are exact up to {MOST_VOCAB}")),
        _ => Ok(()),
    }
}
