//! Mixtures of experts: the choice, and the sum of what the chosen ones return.

pub(crate) mod combine;
pub(crate) mod route;
