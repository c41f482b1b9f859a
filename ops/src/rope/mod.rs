//! Rotary position embedding.

pub(crate) mod rope;

use crate::call::Entry;

/// What is called by name.
pub(crate) static OPS: &[&Entry] = &[&rope::OP];
