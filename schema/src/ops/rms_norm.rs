//! Root mean square normalisation of rows.
use super::*;

/// `x[R,N], w[N] -> y[R,N]`
pub static OP: Op = Op {
    name: "rms_norm",
    about: "each row over its root mean square, times w",
    inputs: &[Input::activation("x", &["R", "N"]), Input::weight("w", &["N"])],
    attributes: &[EPS, ROUNDING, WEIGHT_OFFSET],
    outputs: &[Output::out("y", &["R", "N"])],
    operations: |call| 4.0 * call.elements(&["R", "N"]),
    ..Op::PLAIN
};

pub(super) const EPS: Attribute = Attribute::float(
    "eps",
    Included(0.0),
    Included(f32::MAX as f64),
    "1e-6",
    "added to the mean of the squares; read as f64, rounded to f32",
);

pub(super) const ROUNDING: Attribute = Attribute::choice(
    "rounding",
    &["once", "hf"],
    "`once`: one rounding at the end; `hf`: the normalised value is rounded to bf16 before the weight",
);

pub(super) const WEIGHT_OFFSET: Attribute = Attribute::flag("weight_offset", "`1`: use w + 1 for w");
