//! Sums over tokens, whose order belongs to the logical batch: any cut into calls has the same bits.

pub(crate) mod chains;
pub(crate) mod device;
pub(crate) mod fold;
pub(crate) mod token_sum;

use crate::call::Entry;

/// What is called by name.
pub(crate) const OPS: &[&Entry] = &[&fold::OP, &token_sum::OP];
