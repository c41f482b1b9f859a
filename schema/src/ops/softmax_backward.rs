//! The gradient of a softmax of rows.
use super::*;

/// `x[R,N], dy[R,N] -> dx[R,N]`
pub static OP: Op = Op {
    name: "softmax_backward",
    about: "the gradient of x from that of softmax's y",
    inputs: &[Input::activation("x", &["R", "N"]), Input::gradient("dy", &["R", "N"])],
    outputs: &[Output::out("dx", &["R", "N"])],
    operations: |call| 6.0 * call.elements(&["R", "N"]),
    gradient_of: Some("softmax"),
    ..Op::PLAIN
};
