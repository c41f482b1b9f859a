//! The norm of each head, and its rotation.
use super::rms_norm::{EPS, ROUNDING, WEIGHT_OFFSET};
use super::rope::{PAIRING, THETA, check};
use super::*;

/// `x[T,H,D], w[D], pos[T] -> y[T,H,D]`
pub static OP: Op = Op {
    name: "norm_rope",
    about: "rope of the rms_norm of each head",
    inputs: &[
        Input::activation("x", &["T", "H", "D"]),
        Input::weight("w", &["D"]),
        Input::index("pos", &["T"], Holds::Position),
    ],
    attributes: &[EPS, ROUNDING, WEIGHT_OFFSET, THETA, PAIRING],
    outputs: &[Output::out("y", &["T", "H", "D"])],
    refused: "odd D",
    check,
    operations: |call| 7.0 * call.elements(&["T", "H", "D"]),
    ..Op::PLAIN
};
