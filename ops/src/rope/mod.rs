//! Rotary position embedding.

pub(crate) mod rope;
