//! Activations of one input.
use super::*;

/// `x[..] -> y[..]`
pub static OP: Op = Op {
    name: "activate",
    about: "an activation of x: its gelu, or the square of what of it is above 0",
    inputs: &[Input::activation("x", &[REST])],
    attributes: &[KIND],
    outputs: &[Output::out("y", &[REST])],
    operations: |call| 2.0 * call.elements(&[REST]),
    ..Op::PLAIN
};

pub(super) const KIND: Attribute = Attribute::choice(
    "kind",
    &["gelu", "gelu_tanh", "relu2"],
    "which: gelu by the error function, or by the hyperbolic tangent; the square of the positive part",
);
