//! Matrix products, and the tiles that they and attention are made of.

pub(crate) mod gemm;
pub(crate) mod tile;
