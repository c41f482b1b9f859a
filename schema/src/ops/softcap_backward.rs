//! The gradient of a soft limit.
use super::softcap::CAP;
use super::*;

/// `x[..], dy[..] -> dx[..]`
pub static OP: Op = Op {
    name: "softcap_backward",
    about: "the gradient of x from that of softcap's y",
    inputs: &[Input::activation("x", &[REST]), Input::gradient("dy", &[REST])],
    attributes: &[CAP],
    outputs: &[Output::out("dx", &[REST])],
    operations: |call| 3.0 * call.elements(&[REST]),
    gradient_of: Some("softcap"),
    ..Op::PLAIN
};
