//! Convolutions: of images, and causal ones of channels by themselves, as recurrent and hybrid models have before their scans.

pub(crate) mod causal_conv1d;
pub(crate) mod causal_conv1d_backward;
pub(crate) mod causal_conv1d_dw;
pub(crate) mod conv;
pub(crate) mod conv_dw;
pub(crate) mod conv_dx;
pub(crate) mod taps;
pub(crate) mod window;

use crate::call::Entry;

/// What is called by name.
pub(crate) const OPS: &[&Entry] =
    &[&causal_conv1d::OP, &causal_conv1d_backward::OP, &causal_conv1d_dw::OP, &conv::OP, &conv_dx::OP, &conv_dw::OP];
