//! Normalisation of rows, alone or with the op beside it.

pub(crate) mod add_rms_norm;
pub(crate) mod norm_rope;
pub(crate) mod rms_norm;
