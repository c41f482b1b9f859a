//! The gradient of an activation of one input.
use super::activate::ATTRIBUTES;
use super::*;

/// `x[..], dy[..] -> dx[..]`
pub static OP: Op = Op {
    name: "activate_backward",
    about: "the gradient of x from that of activate's y",
    inputs: &[Input::activation("x", &[REST]), Input::gradient("dy", &[REST])],
    attributes: ATTRIBUTES,
    outputs: &[Output::out("dx", &[REST])],
    operations: |call| 4.0 * call.elements(&[REST]),
    gradient_of: Some("activate"),
    ..Op::PLAIN
};
