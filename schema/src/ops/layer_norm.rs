//! Layer normalisation of rows.
use super::*;

/// `x[R,N], w[N]?, bias[N]? -> y[R,N]`
pub static OP: Op = Op {
    name: "layer_norm",
    about: "each row less its mean, over its standard deviation, times w, plus bias",
    inputs: &[
        Input::activation("x", &["R", "N"]),
        Input::weight("w", &["N"]).optional(),
        Input::weight("bias", &["N"]).optional(),
    ],
    attributes: &[EPS],
    outputs: &[Output::out("y", &["R", "N"])],
    operations: |call| 7.0 * call.elements(&["R", "N"]),
    ..Op::PLAIN
};

pub(super) const EPS: Attribute = Attribute::float(
    "eps",
    Included(0.0),
    Included(f32::MAX as f64),
    "1e-5",
    "added to the variance; read as f64, rounded to f32",
);
