//! One file per op, and the registry.

use crate::attribute::{Attribute, DefaultValue, TF32, Value};
use crate::call::Call;
use crate::dtype::DType;
use crate::index::Holds;
use crate::op::{Extent, Input, Op, Output, OutputDType, REST, Role};
use crate::{Error, Kind};
use std::ops::Bound::{Excluded, Included, Unbounded};

pub mod activate;
pub mod activate_backward;
pub mod adamw;
pub mod add;
pub mod add_rms_norm;
pub mod add_rms_norm_backward;
pub mod argmax;
pub mod attention;
pub mod attention_backward;
pub mod batch_loss;
pub mod causal_conv1d;
pub mod causal_conv1d_backward;
pub mod causal_conv1d_dw;
pub mod chain;
pub mod chain_backward;
pub mod clamped_silu_mul;
pub mod clamped_silu_mul_backward;
pub mod clip_factor;
pub mod combine;
pub mod combine_backward;
pub mod conv;
pub mod conv_dw;
pub mod conv_dx;
pub mod draw;
pub mod embedding;
pub mod embedding_dw;
pub mod entropy;
pub mod entropy_backward;
pub mod fold;
pub mod gated_delta_rule;
pub mod gated_delta_rule_backward;
pub mod gelu_mul;
pub mod gelu_mul_backward;
pub mod gemm;
pub mod gemm_dw;
pub mod gemm_dx;
pub mod group_advantage;
pub mod group_norm;
pub mod group_norm_backward;
pub mod index_score;
pub mod layer_norm;
pub mod layer_norm_backward;
pub mod layer_norm_dw;
pub mod linear_logprob;
pub mod linear_logprob_backward;
pub mod logprob;
pub mod logprob_backward;
pub mod mul;
pub mod nll;
pub mod norm_rope;
pub mod norm_rope_backward;
pub mod norm_rope_dw;
pub mod packed_attention;
pub mod paged_attention;
pub mod penalize;
pub mod policy_loss;
pub mod rms_norm;
pub mod rms_norm_backward;
pub mod rms_norm_dw;
pub mod rope;
pub mod rope_backward;
pub mod route;
pub mod route_backward;
pub mod scale;
pub mod selective_scan;
pub mod selective_scan_backward;
pub mod sigmoid_mul;
pub mod sigmoid_mul_backward;
pub mod silu_mul;
pub mod silu_mul_backward;
pub mod softcap;
pub mod softcap_backward;
pub mod softmax;
pub mod softmax_backward;
pub mod square_sum;
pub mod ssd_scan;
pub mod ssd_scan_backward;
pub mod token_sum;
pub mod topk;
pub mod truncate;
pub mod wkv7;
pub mod wkv7_backward;

/// All ops, in the order tables print them.
pub static OPS: &[&Op] = &[
    &gemm::OP,
    &gemm_dx::OP,
    &gemm_dw::OP,
    &rms_norm::OP,
    &rms_norm_backward::OP,
    &rms_norm_dw::OP,
    &add_rms_norm::OP,
    &add_rms_norm_backward::OP,
    &layer_norm::OP,
    &layer_norm_backward::OP,
    &layer_norm_dw::OP,
    &group_norm::OP,
    &group_norm_backward::OP,
    &attention::OP,
    &paged_attention::OP,
    &packed_attention::OP,
    &attention_backward::OP,
    &index_score::OP,
    &conv::OP,
    &conv_dx::OP,
    &conv_dw::OP,
    &causal_conv1d::OP,
    &causal_conv1d_backward::OP,
    &causal_conv1d_dw::OP,
    &ssd_scan::OP,
    &ssd_scan_backward::OP,
    &selective_scan::OP,
    &selective_scan_backward::OP,
    &wkv7::OP,
    &wkv7_backward::OP,
    &gated_delta_rule::OP,
    &gated_delta_rule_backward::OP,
    &logprob::OP,
    &logprob_backward::OP,
    &linear_logprob::OP,
    &linear_logprob_backward::OP,
    &entropy::OP,
    &entropy_backward::OP,
    &softmax::OP,
    &softmax_backward::OP,
    &clamped_silu_mul::OP,
    &silu_mul::OP,
    &clamped_silu_mul_backward::OP,
    &silu_mul_backward::OP,
    &gelu_mul::OP,
    &gelu_mul_backward::OP,
    &sigmoid_mul::OP,
    &sigmoid_mul_backward::OP,
    &activate::OP,
    &activate_backward::OP,
    &softcap::OP,
    &softcap_backward::OP,
    &scale::OP,
    &rope::OP,
    &rope_backward::OP,
    &norm_rope::OP,
    &norm_rope_backward::OP,
    &norm_rope_dw::OP,
    &add::OP,
    &mul::OP,
    &embedding::OP,
    &embedding_dw::OP,
    &argmax::OP,
    &topk::OP,
    &penalize::OP,
    &truncate::OP,
    &draw::OP,
    &route::OP,
    &route_backward::OP,
    &combine::OP,
    &combine_backward::OP,
    &token_sum::OP,
    &fold::OP,
    &nll::OP,
    &policy_loss::OP,
    &batch_loss::OP,
    &group_advantage::OP,
    &square_sum::OP,
    &clip_factor::OP,
    &adamw::OP,
    &chain::OP,
    &chain_backward::OP,
];

fn invalid<T>(why: String) -> Result<T, Error> {
    Err(Error::Invalid(why))
}
