//! Rotary position embedding.

pub(crate) mod rope;

use crate::call::Entry;

/// What is called by name.
pub(crate) const OPS: &[&Entry] = &[&rope::OP];
