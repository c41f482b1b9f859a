//! Matrix products, and the tiles that they and attention are made of.

pub(crate) mod device;
pub(crate) mod gemm;
pub(crate) mod gemm_dw;
pub(crate) mod gemm_dx;
pub(crate) mod packed;
pub(crate) mod shape;
pub(crate) mod tile;

use crate::call::Entry;

/// What is called by name.
pub(crate) const OPS: &[&Entry] = &[&gemm::OP, &gemm_dx::OP, &gemm_dw::OP];

#[cfg(feature = "unit-tests")]
pub(crate) mod tests;
