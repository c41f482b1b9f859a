//! Attention: one op with two strategies, prefill and decode.

pub(crate) mod attention;
mod decode;
pub(crate) mod device;
pub(crate) mod dot_rows;
mod prefill;

use crate::call::Entry;

/// What is called by name.
pub(crate) const OPS: &[&Entry] = &[&attention::OP, &attention::PACKED, &attention::PAGED];

#[cfg(test)]
mod tests;
