//! From the logits of a token to the token: penalties, which tokens may be sampled, and the draw.

pub(crate) mod draw;
pub(crate) mod penalize;
pub(crate) mod truncate;
pub(crate) mod weights;

use crate::call::Entry;

/// What is called by name.
pub(crate) const OPS: &[&Entry] = &[&draw::OP, &penalize::OP, &truncate::OP];
