//! Ops that make one element of one or two.

pub(crate) mod add;
pub(crate) mod frame;
pub(crate) mod gelu_mul;
pub(crate) mod scale;
pub(crate) mod silu_mul;
pub(crate) mod softcap;
