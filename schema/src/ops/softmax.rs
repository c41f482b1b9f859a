//! Softmax of rows.
use super::*;

/// `x[R,N] -> y[R,N]`
pub static OP: Op = Op {
    name: "softmax",
    about: "the softmax of each row",
    inputs: &[Input::activation("x", &["R", "N"])],
    outputs: &[Output::out("y", &["R", "N"])],
    operations: |call| 2.0 * call.elements(&["R", "N"]),
    ..Op::PLAIN
};
