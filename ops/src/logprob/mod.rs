//! Softmax of rows, and what is made of its denominator.

pub(crate) mod linear_logprob;
pub(crate) mod logprob;
pub(crate) mod softmax;
