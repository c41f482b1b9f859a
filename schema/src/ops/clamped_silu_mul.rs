//! SwiGLU's product within limits.
use super::*;

/// `gate[..], up[..] -> y[..]`
pub static OP: Op = Op {
    name: "clamped_silu_mul",
    about: "g times sigmoid(alpha g) times up and 1, of a gate and an up within limits",
    inputs: &[Input::activation("gate", &[REST]), Input::activation("up", &[REST])],
    attributes: ATTRIBUTES,
    outputs: &[Output::out("y", &[REST])],
    operations: |call| 3.0 * call.elements(&[REST]),
    ..Op::PLAIN
};

pub(super) const ATTRIBUTES: &[Attribute] = &[
    Attribute::float("alpha", Included(1e-38), Included(1e38), "1.702", "the factor of the gate in the sigmoid"),
    Attribute::float(
        "limit",
        Included(1e-38),
        Included(1e38),
        "7",
        "no gate is above it, no up above it or below its negative",
    ),
];
