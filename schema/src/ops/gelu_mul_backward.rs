//! The gradient of a product with a gelu.
use super::silu_mul_backward::{GATED_INPUTS, GATED_OUTPUTS};
use super::*;

/// `gate[..], up[..], dy[..] -> dgate[..], dup[..]`
pub static OP: Op = Op {
    name: "gelu_mul_backward",
    about: "the gradients of gate and up from that of gelu_mul's y",
    inputs: GATED_INPUTS,
    outputs: GATED_OUTPUTS,
    operations: |call| 11.0 * call.elements(&[REST]),
    gradient_of: Some("gelu_mul"),
    ..Op::PLAIN
};
