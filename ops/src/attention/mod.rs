//! Attention: one op with two strategies, prefill and decode; and its gradient; and the scores by which a sparse one chooses its keys.

mod ahead;
pub(crate) mod attention;
pub(crate) mod attention_backward;
pub(crate) mod backward_job;
mod backward_tiles;
mod decode;
pub(crate) mod device;
pub(crate) mod dot_rows;
pub(crate) mod index_score;
pub(crate) mod job;
mod prefill;

use crate::call::Entry;

/// What is called by name.
pub(crate) const OPS: &[&Entry] =
    &[&attention::OP, &attention::PACKED, &attention::PAGED, &attention_backward::OP, &index_score::OP];

#[cfg(feature = "unit-tests")]
pub(crate) mod backward_tests;
#[cfg(feature = "unit-tests")]
pub(crate) mod tests;
