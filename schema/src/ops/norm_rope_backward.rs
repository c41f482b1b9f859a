//! The gradient of the norm of each head and its rotation.
use super::rms_norm::{EPS, ROUNDING, WEIGHT_OFFSET};
use super::rope::{PAIRING, THETA, check};
use super::*;

/// `x[T,H,D], w[D], dy[T,H,D], pos[T] -> dx[T,H,D]`
pub static OP: Op = Op {
    name: "norm_rope_backward",
    about: "the gradient of x from that of norm_rope's y",
    inputs: &[
        Input::activation("x", &["T", "H", "D"]),
        Input::weight("w", &["D"]),
        Input::gradient("dy", &["T", "H", "D"]),
        Input::index("pos", &["T"], Holds::Position),
    ],
    attributes: &[EPS, ROUNDING, WEIGHT_OFFSET, THETA, PAIRING],
    outputs: &[Output::out("dx", &["T", "H", "D"])],
    refused: "odd D",
    check,
    operations: |call| 11.0 * call.elements(&["T", "H", "D"]),
    gradient_of: Some("norm_rope"),
    ..Op::PLAIN
};
