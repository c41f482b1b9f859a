//! A residual added, and the norm of the sum.
use super::rms_norm::{EPS, ROUNDING, WEIGHT_OFFSET};
use super::*;

/// `x[R,N], residual[R,N], w[N] -> sum[R,N], y[R,N]`
pub static OP: Op = Op {
    name: "add_rms_norm",
    about: "sum = x + residual, and the rms_norm of the sum as it is stored",
    inputs: &[
        Input::activation("x", &["R", "N"]),
        Input::activation("residual", &["R", "N"]),
        Input::weight("w", &["N"]),
    ],
    attributes: &[EPS, ROUNDING, WEIGHT_OFFSET],
    outputs: &[Output::out("sum", &["R", "N"]), Output::out("y", &["R", "N"])],
    operations: |call| 5.0 * call.elements(&["R", "N"]),
    ..Op::PLAIN
};
