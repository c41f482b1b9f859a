//! Mixtures of experts: the choice, and the sum of what the chosen ones return.

pub(crate) mod combine;
pub(crate) mod combine_backward;
pub(crate) mod route;

use crate::call::Entry;

/// What is called by name.
pub(crate) const OPS: &[&Entry] = &[&combine::OP, &combine_backward::OP, &route::OP];
