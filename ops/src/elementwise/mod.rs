//! Ops that make one element of one or two.

pub(crate) mod add;
pub(crate) mod frame;
pub(crate) mod gelu_mul;
pub(crate) mod scale;
pub(crate) mod silu_mul;
pub(crate) mod softcap;

use crate::call::Entry;

/// What is called by name.
pub(crate) const OPS: &[&Entry] = &[&add::OP, &gelu_mul::OP, &scale::OP, &silu_mul::OP, &softcap::OP];
