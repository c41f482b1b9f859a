//! The gradient of rows times sigmoids of gates.
use super::sigmoid_mul::{REFUSED, check};
use super::*;

/// `gate[R,G], x[R,N], dy[R,N] -> dgate[R,G], dx[R,N]`
pub static OP: Op = Op {
    name: "sigmoid_mul_backward",
    about: "the gradients of gate and x from that of sigmoid_mul's y",
    inputs: &[
        Input::activation("gate", &["R", "G"]),
        Input::activation("x", &["R", "N"]),
        Input::gradient("dy", &["R", "N"]),
    ],
    outputs: &[Output::out("dgate", &["R", "G"]), Output::out("dx", &["R", "N"])],
    refused: REFUSED,
    check,
    operations: |call| 3.0 * call.elements(&["R", "N"]),
    gradient_of: Some("sigmoid_mul"),
    ..Op::PLAIN
};
