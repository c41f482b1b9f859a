//! Linear attention by delta rules: a state that every token of a sequence changes and reads.

pub(crate) mod gated_delta_rule;
pub(crate) mod gated_delta_rule_backward;
pub(crate) mod heads;

use crate::call::Entry;

/// What is called by name.
pub(crate) const OPS: &[&Entry] = &[&gated_delta_rule::OP, &gated_delta_rule_backward::OP];
