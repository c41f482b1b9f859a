//! Softmax of rows, and what is made of its denominator.

pub(crate) mod linear_logprob;
pub(crate) mod logprob;
pub(crate) mod softmax;

use crate::call::Entry;

/// What is called by name.
pub(crate) const OPS: &[&Entry] = &[&linear_logprob::OP, &logprob::OP, &softmax::OP];
