//! SwiGLU's product.
use super::*;

/// `gate[..], up[..] -> y[..]`
pub static OP: Op = Op {
    name: "silu_mul",
    about: "silu(gate) times up",
    inputs: &[Input::activation("gate", &[REST]), Input::activation("up", &[REST])],
    outputs: &[Output::out("y", &[REST])],
    ..Op::PLAIN
};
