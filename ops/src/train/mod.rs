//! Losses and the step of training.

pub(crate) mod adamw;
pub(crate) mod batch_loss;
pub(crate) mod clip_factor;
pub(crate) mod group_advantage;
pub(crate) mod nll;
pub(crate) mod policy_loss;
pub(crate) mod sequences;
pub(crate) mod square_sum;

use crate::call::Entry;

/// What is called by name.
pub(crate) const OPS: &[&Entry] =
    &[&nll::OP, &policy_loss::OP, &batch_loss::OP, &group_advantage::OP, &square_sum::OP, &clip_factor::OP, &adamw::OP];

#[cfg(feature = "unit-tests")]
pub(crate) mod tests;
