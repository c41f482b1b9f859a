//! Causal convolutions of channels by themselves, as recurrent and hybrid models have before their scans.

pub(crate) mod causal_conv1d;
pub(crate) mod causal_conv1d_backward;
pub(crate) mod causal_conv1d_dw;
pub(crate) mod taps;

use crate::call::Entry;

/// What is called by name.
pub(crate) const OPS: &[&Entry] = &[&causal_conv1d::OP, &causal_conv1d_backward::OP, &causal_conv1d_dw::OP];
