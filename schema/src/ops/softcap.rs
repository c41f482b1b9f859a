//! Values bent below a cap.
use super::*;

/// `x[..] -> y[..]`
pub static OP: Op = Op {
    name: "softcap",
    about: "cap * tanh(x / cap)",
    inputs: &[Input::activation("x", &[REST])],
    attributes: &[CAP],
    outputs: &[Output::out("y", &[REST])],
    operations: |call| 2.0 * call.elements(&[REST]),
    ..Op::PLAIN
};

/// It and its inverse are finite in f32 and not 0.
pub(super) const CAP: Attribute =
    Attribute::float("cap", Included(1e-38), Included(1e38), "30", "no output is larger; read as f64");
