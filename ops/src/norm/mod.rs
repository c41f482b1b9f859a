//! Normalisation of rows, alone or with the op beside it.

pub(crate) mod add_rms_norm;
pub(crate) mod layer_norm;
pub(crate) mod norm_rope;
pub(crate) mod rms_norm;

use crate::call::Entry;

/// What is called by name.
pub(crate) const OPS: &[&Entry] = &[&add_rms_norm::OP, &layer_norm::OP, &norm_rope::OP, &rms_norm::OP];
