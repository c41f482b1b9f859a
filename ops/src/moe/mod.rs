//! Mixtures of experts: the choice, the sum of what the chosen ones return, and their gradients.

pub(crate) mod combine;
pub(crate) mod combine_backward;
pub(crate) mod route;
pub(crate) mod route_backward;

use crate::call::Entry;

/// What is called by name.
pub(crate) const OPS: &[&Entry] = &[&combine::OP, &combine_backward::OP, &route::OP, &route_backward::OP];
