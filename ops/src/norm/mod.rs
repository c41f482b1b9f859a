//! Normalisation of rows, alone or with the op beside it, and its gradients.

pub(crate) mod add_rms_norm;
pub(crate) mod add_rms_norm_backward;
mod gradient;
pub(crate) mod group;
pub(crate) mod group_norm;
pub(crate) mod group_norm_backward;
pub(crate) mod layer_norm;
pub(crate) mod layer_norm_backward;
pub(crate) mod layer_norm_dw;
pub(crate) mod norm_rope;
pub(crate) mod norm_rope_backward;
pub(crate) mod norm_rope_dw;
pub(crate) mod rms_norm;
pub(crate) mod rms_norm_backward;
pub(crate) mod rms_norm_dw;

use crate::call::Entry;

/// What is called by name.
pub(crate) const OPS: &[&Entry] = &[
    &add_rms_norm::OP,
    &add_rms_norm_backward::OP,
    &group_norm::OP,
    &group_norm_backward::OP,
    &layer_norm::OP,
    &layer_norm_backward::OP,
    &layer_norm_dw::OP,
    &norm_rope::OP,
    &norm_rope_backward::OP,
    &norm_rope_dw::OP,
    &rms_norm::OP,
    &rms_norm_backward::OP,
    &rms_norm_dw::OP,
];
