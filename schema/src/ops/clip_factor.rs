//! The norm of a gradient, and what it is scaled by so that it becomes no longer than it may.
use super::*;

/// `sum[P] -> norm[1], factor[1]`
pub static OP: Op = Op {
    name: "clip_factor",
    about: "the norm of a gradient from the sums of squares of its blocks, and the factor that clips it",
    inputs: &[Input::gradient("sum", &["P"]).fp32()],
    attributes: &[MAX_NORM],
    outputs: &[
        Output { rows: 0, ..Output::fixed("norm", &["1"], DType::Fp32) },
        Output { rows: 0, ..Output::fixed("factor", &["1"], DType::Fp32) },
    ],
    operations: |call| call.elements(&["P"]),
    ..Op::PLAIN
};

const MAX_NORM: Attribute = Attribute::float(
    "max_norm",
    Included(1e-30),
    Included(1e30),
    "1",
    "the norm that is left as it is; read as f64, rounded to f32",
);
