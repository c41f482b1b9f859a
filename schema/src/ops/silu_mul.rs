//! SwiGLU's product.
use super::*;

/// `gate[..], up[..] -> y[..]`
pub static OP: Op = Op {
    name: "silu_mul",
    about: "silu(gate) times up",
    inputs: &[Input::activation("gate", &[REST]), Input::activation("up", &[REST])],
    outputs: &[Output::out("y", &[REST])],
    operations: |call| 2.0 * call.elements(&[REST]),
    ..Op::PLAIN
};
