//! The gradient of a residual added and the norm of the sum.
use super::rms_norm::{EPS, ROUNDING, WEIGHT_OFFSET};
use super::*;

/// `sum[R,N], w[N], dy[R,N], dsum[R,N]? -> dx[R,N]`
pub static OP: Op = Op {
    name: "add_rms_norm_backward",
    about: "the gradient of x and of residual from those of add_rms_norm's y and sum",
    inputs: &[
        Input::activation("sum", &["R", "N"]),
        Input::weight("w", &["N"]),
        Input::gradient("dy", &["R", "N"]),
        Input::gradient("dsum", &["R", "N"]).optional(),
    ],
    attributes: &[EPS, ROUNDING, WEIGHT_OFFSET],
    outputs: &[Output::out("dx", &["R", "N"])],
    operations: |call| 9.0 * call.elements(&["R", "N"]),
    gradient_of: Some("add_rms_norm"),
    ..Op::PLAIN
};
