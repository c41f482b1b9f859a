//! Ops that move rows or find them, and compute nothing.

pub(crate) mod argmax;
pub(crate) mod embedding;
