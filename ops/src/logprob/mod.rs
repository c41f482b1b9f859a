//! Softmax of rows, what is made of its denominator, and gradients of both.

pub(crate) mod entropy;
pub(crate) mod entropy_backward;
pub(crate) mod linear_logprob;
pub(crate) mod linear_logprob_backward;
pub(crate) mod logprob;
pub(crate) mod logprob_backward;
pub(crate) mod softmax;
pub(crate) mod softmax_backward;

use crate::call::Entry;

/// What is called by name.
pub(crate) const OPS: &[&Entry] = &[
    &entropy::OP,
    &entropy_backward::OP,
    &linear_logprob::OP,
    &linear_logprob_backward::OP,
    &logprob::OP,
    &logprob_backward::OP,
    &softmax::OP,
    &softmax_backward::OP,
];
