//! The gradient of SwiGLU's product within limits.
use super::clamped_silu_mul::ATTRIBUTES;
use super::silu_mul_backward::{GATED_INPUTS, GATED_OUTPUTS};
use super::*;

/// `gate[..], up[..], dy[..] -> dgate[..], dup[..]`
pub static OP: Op = Op {
    name: "clamped_silu_mul_backward",
    about: "the gradients of gate and up from that of clamped_silu_mul's y",
    inputs: GATED_INPUTS,
    attributes: ATTRIBUTES,
    outputs: GATED_OUTPUTS,
    operations: |call| 9.0 * call.elements(&[REST]),
    gradient_of: Some("clamped_silu_mul"),
    ..Op::PLAIN
};
