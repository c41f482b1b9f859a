//! The gradient of a root mean square normalisation.
use super::rms_norm::{EPS, ROUNDING, WEIGHT_OFFSET};
use super::*;

/// `x[R,N], w[N], dy[R,N] -> dx[R,N]`
pub static OP: Op = Op {
    name: "rms_norm_backward",
    about: "the gradient of x from that of rms_norm's y",
    inputs: &[Input::activation("x", &["R", "N"]), Input::weight("w", &["N"]), Input::gradient("dy", &["R", "N"])],
    attributes: &[EPS, ROUNDING, WEIGHT_OFFSET],
    outputs: &[Output::out("dx", &["R", "N"])],
    operations: |call| 8.0 * call.elements(&["R", "N"]),
    gradient_of: Some("rms_norm"),
    ..Op::PLAIN
};
