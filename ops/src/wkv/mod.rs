//! The recurrence of RWKV-7: a state that every token of a sequence decays, corrects, adds to and reads.

pub(crate) mod heads;
pub(crate) mod wkv7;
pub(crate) mod wkv7_backward;

use crate::call::Entry;

/// What is called by name.
pub(crate) const OPS: &[&Entry] = &[&wkv7::OP, &wkv7_backward::OP];
