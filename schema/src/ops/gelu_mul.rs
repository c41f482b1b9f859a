//! GeGLU's product.
use super::*;

/// `gate[..], up[..] -> y[..]`
pub static OP: Op = Op {
    name: "gelu_mul",
    about: "gelu(gate), by the hyperbolic tangent, times up",
    inputs: &[Input::activation("gate", &[REST]), Input::activation("up", &[REST])],
    outputs: &[Output::out("y", &[REST])],
    operations: |call| 2.0 * call.elements(&[REST]),
    ..Op::PLAIN
};
