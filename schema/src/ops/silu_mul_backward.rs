//! The gradient of SwiGLU's product.
use super::*;

/// `gate[..], up[..], dy[..] -> dgate[..], dup[..]`
pub static OP: Op = Op {
    name: "silu_mul_backward",
    about: "the gradients of gate and up from that of silu_mul's y",
    inputs: GATED_INPUTS,
    outputs: GATED_OUTPUTS,
    operations: |call| 7.0 * call.elements(&[REST]),
    gradient_of: Some("silu_mul"),
    ..Op::PLAIN
};

pub(super) const GATED_INPUTS: &[Input] =
    &[Input::activation("gate", &[REST]), Input::activation("up", &[REST]), Input::gradient("dy", &[REST])];

pub(super) const GATED_OUTPUTS: &[Output] = &[Output::out("dgate", &[REST]), Output::out("dup", &[REST])];
