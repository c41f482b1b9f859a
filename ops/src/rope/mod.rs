//! Rotary position embedding.

pub(crate) mod rope;
pub(crate) mod rope_backward;

use crate::call::Entry;

/// What is called by name.
pub(crate) const OPS: &[&Entry] = &[&rope::OP, &rope_backward::OP];
