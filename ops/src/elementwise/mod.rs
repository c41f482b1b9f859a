//! Ops that make one element of one or two.

pub(crate) mod activate;
pub(crate) mod activate_backward;
pub(crate) mod add;
pub(crate) mod clamped_silu_mul;
pub(crate) mod clamped_silu_mul_backward;
pub(crate) mod frame;
mod gated;
pub(crate) mod gelu_mul;
pub(crate) mod gelu_mul_backward;
pub(crate) mod mul;
pub(crate) mod scale;
pub(crate) mod sigmoid_mul;
pub(crate) mod sigmoid_mul_backward;
pub(crate) mod silu_mul;
pub(crate) mod silu_mul_backward;
pub(crate) mod softcap;
pub(crate) mod softcap_backward;

use crate::call::Entry;

/// What is called by name.
pub(crate) const OPS: &[&Entry] = &[
    &activate::OP,
    &activate_backward::OP,
    &add::OP,
    &clamped_silu_mul::OP,
    &clamped_silu_mul_backward::OP,
    &gelu_mul::OP,
    &gelu_mul_backward::OP,
    &mul::OP,
    &scale::OP,
    &sigmoid_mul::OP,
    &sigmoid_mul_backward::OP,
    &silu_mul::OP,
    &silu_mul_backward::OP,
    &softcap::OP,
    &softcap_backward::OP,
];
