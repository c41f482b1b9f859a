//! Attention: one op with two strategies, prefill and decode.

pub(crate) mod attention;
mod decode;
pub(crate) mod dot_rows;
mod prefill;
