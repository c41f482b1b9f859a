//! Ops that move rows or find them, and compute nothing.

pub(crate) mod argmax;
pub(crate) mod embedding;
pub(crate) mod embedding_dw;
pub(crate) mod topk;

use crate::call::Entry;

/// What is called by name.
pub(crate) const OPS: &[&Entry] = &[&argmax::OP, &embedding::OP, &embedding_dw::OP, &topk::OP];
