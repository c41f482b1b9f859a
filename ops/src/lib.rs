//! Neural network ops whose bits do not depend on batch, tile, thread count or instruction set.
//!
//! Every op takes plain row-major slices and a struct of dimensions, and a [`Cpu`] that says how to run, never what to
//! compute. Inputs and outputs are [`bf16`], [`struct@f16`] or `f32` ([`Element`]); arithmetic is IEEE binary32 in the
//! order written in `docs/NUMERICS.md`; outputs are rounded once, at the end. In signatures I is the type of inputs and
//! O that of outputs, not always the same. A length that does not match its dimensions is an [`Error`], before
//! anything is written.
//!
//! Another crate can [`register`] ops of its own: they are called by name as these are.

// The file of an op bears its name, also where its folder does.
#![allow(clippy::module_inception)]

mod attention;
mod backend;
mod call;
mod calls;
mod columns;
mod conv;
mod delta;
mod element;
mod elementwise;
mod gemm;
mod index;
mod ledger;
mod lengths;
mod logprob;
mod math;
mod moe;
mod norm;
mod pack;
mod parallel;
mod profile;
mod reduce;
mod registry;
mod rope;
mod sampling;
mod scan;
mod simd;
mod tensor;
mod through_f32;
mod token;
mod train;
#[cfg(feature = "unit-tests")]
mod unit_tests;
mod wkv;
mod workspace;

pub use attention::attention::attention;
pub use attention::attention_backward::{AttentionOutputs, QkvGradients, attention_backward};
pub use attention::backward_job::QueryRows;
pub use attention::index_score::{IndexScore, index_score};
pub use attention::job::{Attention, Keys, Qkv, Sequences};
pub use backend::cpu::{Cpu, Isa};
pub use backend::pool::{Team, work_on};
pub use call::{Arguments, Backend, Entry, Prepare, Run};
pub use calls::Calls;
pub use conv::causal_conv1d::{ConvInputs, causal_conv1d};
pub use conv::causal_conv1d_backward::{ConvGradients, causal_conv1d_backward};
pub use conv::causal_conv1d_dw::causal_conv1d_dw;
pub use conv::conv::conv;
pub use conv::conv_dw::conv_dw;
pub use conv::conv_dx::conv_dx;
pub use conv::taps::CausalConv1d;
pub use conv::window::{Conv, Window};
pub use delta::gated_delta_rule::{DeltaInputs, gated_delta_rule};
pub use delta::gated_delta_rule_backward::{DeltaGradients, gated_delta_rule_backward};
pub use delta::heads::GatedDeltaRule;
pub use element::{Element, Tf32};
pub use elementwise::activate::{Activation, Xielu, activate};
pub use elementwise::activate_backward::activate_backward;
pub use elementwise::add::add;
pub use elementwise::clamped_silu_mul::{Clamp, clamped_silu_mul};
pub use elementwise::clamped_silu_mul_backward::clamped_silu_mul_backward;
pub use elementwise::gelu_mul::gelu_mul;
pub use elementwise::gelu_mul_backward::gelu_mul_backward;
pub use elementwise::mul::mul;
pub use elementwise::scale::scale;
pub use elementwise::sigmoid_mul::{SigmoidMul, sigmoid_mul};
pub use elementwise::sigmoid_mul_backward::sigmoid_mul_backward;
pub use elementwise::silu_mul::silu_mul;
pub use elementwise::silu_mul_backward::silu_mul_backward;
pub use elementwise::softcap::softcap;
pub use elementwise::softcap_backward::softcap_backward;
pub use gemm::gemm::{gemm, gemm_packed};
pub use gemm::gemm_dw::{GemmDw, gemm_dw};
pub use gemm::gemm_dx::{GemmDx, gemm_dx, gemm_dx_packed};
pub use gemm::packed::PackedWeight;
pub use gemm::shape::Gemm;
pub use half::{bf16, f16};
pub use index::argmax::argmax;
pub use index::embedding::{embedding, embedding_packed};
pub use index::embedding_dw::embedding_dw;
pub use index::topk::{TopK, topk};
pub use ledger::{Allowance, Counter, Ledger, PlanRecord, Why};
pub use logprob::entropy::{Entropy, entropy};
pub use logprob::entropy_backward::{EntropyGradients, entropy_backward};
pub use logprob::linear_logprob::{LinearLogprob, linear_logprob, linear_logprob_packed};
pub use logprob::linear_logprob_backward::{LogprobRows, linear_logprob_backward, linear_logprob_backward_packed};
pub use logprob::logprob::{Logprob, logprob};
pub use logprob::logprob_backward::{LogprobGradients, logprob_backward};
pub use logprob::softmax::softmax;
pub use logprob::softmax_backward::softmax_backward;
pub use moe::combine::{Combine, combine};
pub use moe::combine_backward::combine_backward;
pub use moe::route::{ChosenBy, GroupWorth, Route, Scoring, route};
pub use moe::route_backward::route_backward;
pub use norm::add_rms_norm::add_rms_norm;
pub use norm::add_rms_norm_backward::add_rms_norm_backward;
pub use norm::group::GroupNorm;
pub use norm::group_norm::group_norm;
pub use norm::group_norm_backward::{GroupNormInputs, group_norm_backward};
pub use norm::layer_norm::{LayerNorm, layer_norm};
pub use norm::layer_norm_backward::layer_norm_backward;
pub use norm::layer_norm_dw::layer_norm_dw;
pub use norm::norm_rope::{NormRope, norm_rope};
pub use norm::norm_rope_backward::norm_rope_backward;
pub use norm::norm_rope_dw::norm_rope_dw;
pub use norm::rms_norm::{RmsNorm, Rounding, rms_norm};
pub use norm::rms_norm_backward::rms_norm_backward;
pub use norm::rms_norm_dw::rms_norm_dw;
pub use pack::quantized::{Offset, Quantized};
pub use profile::{IEEE, Profile};
pub use registry::register;
pub use rope::rope::{Pairing, Rope, RopeTable, inv_freq, rope};
pub use rope::rope_backward::rope_backward;
pub use samebits_schema as schema;
pub use samebits_schema::batch_loss::MOST_GROUPS;
pub use samebits_schema::{Attributes, DType};
pub use sampling::draw::{draw, random_halves};
pub use sampling::penalize::{Penalties, penalize};
pub use sampling::truncate::{Truncation, truncate};
pub use scan::selective::{SelectiveInputs, SelectiveScan};
pub use scan::selective_scan::selective_scan;
pub use scan::selective_scan_backward::{SelectiveGradients, SelectiveOutputGradients, selective_scan_backward};
pub use scan::ssd::{ScanInputs, SsdScan};
pub use scan::ssd_scan::ssd_scan;
pub use scan::ssd_scan_backward::{ScanGradients, ScanOutputGradients, ssd_scan_backward};
#[cfg(feature = "emulated-isa")]
pub use simd::emulated::emulation_differs;
pub use tensor::{Layout, MAX_RANK, Operand, Prepared, Rows, Scalar, Slice, SliceMut, Tensor, TensorMut, TensorRef};
pub use token::chains::{CHAINS, Tokens};
pub use token::fold::fold;
pub use token::token_sum::token_sum;
pub use train::adamw::{AdamW, adamw};
pub use train::batch_loss::{batch_loss, sequences_of_group};
pub use train::clip_factor::clip_factor;
pub use train::group_advantage::{Divide, group_advantage};
pub use train::nll::nll;
pub use train::policy_loss::{Kl, PolicyLoss, PolicyTokens, policy_loss};
pub use train::sequences::{LossShape, Reduction};
pub use train::square_sum::{NORM_BLOCK, square_sum};
#[cfg(feature = "unit-tests")]
pub use unit_tests::{UNIT_TESTS, UnitTest};
pub use wkv::heads::{Wkv7, Wkv7Inputs};
pub use wkv::wkv7::wkv7;
pub use wkv::wkv7_backward::{Wkv7Gradients, wkv7_backward};
pub use workspace::memory::{ask_for_huge_pages, keep_freed_memory};

/// The same ops on a device.
pub mod device {
    pub use crate::attention::attention_backward::on_device as attention_backward;
    pub use crate::attention::device::{AttentionMetadata, attention, attention_at};
    pub use crate::attention::index_score::on_device as index_score;
    pub use crate::backend::device::*;
    pub use crate::conv::causal_conv1d::{DeviceInputs as ConvInputs, on_device as causal_conv1d};
    pub use crate::conv::causal_conv1d_backward::{
        DeviceGradients as ConvGradients, on_device as causal_conv1d_backward,
    };
    pub use crate::conv::causal_conv1d_dw::on_device as causal_conv1d_dw;
    pub use crate::conv::conv::on_device as conv;
    pub use crate::conv::conv_dw::on_device as conv_dw;
    pub use crate::conv::conv_dx::on_device as conv_dx;
    pub use crate::delta::gated_delta_rule::{DeviceInputs as DeltaInputs, on_device as gated_delta_rule};
    pub use crate::delta::gated_delta_rule_backward::on_device as gated_delta_rule_backward;
    pub use crate::element::Stored;
    pub use crate::elementwise::activate::on_device as activate;
    pub use crate::elementwise::activate_backward::on_device as activate_backward;
    pub use crate::elementwise::add::on_device as add;
    pub use crate::elementwise::clamped_silu_mul::on_device as clamped_silu_mul;
    pub use crate::elementwise::clamped_silu_mul_backward::on_device as clamped_silu_mul_backward;
    pub use crate::elementwise::gelu_mul::on_device as gelu_mul;
    pub use crate::elementwise::gelu_mul_backward::on_device as gelu_mul_backward;
    pub use crate::elementwise::mul::on_device as mul;
    pub use crate::elementwise::scale::on_device as scale;
    pub use crate::elementwise::sigmoid_mul::on_device as sigmoid_mul;
    pub use crate::elementwise::sigmoid_mul_backward::on_device as sigmoid_mul_backward;
    pub use crate::elementwise::silu_mul::on_device as silu_mul;
    pub use crate::elementwise::silu_mul_backward::on_device as silu_mul_backward;
    pub use crate::elementwise::softcap::on_device as softcap;
    pub use crate::elementwise::softcap_backward::on_device as softcap_backward;
    pub use crate::gemm::device::{gemm, gemm_experts, gemm_rows};
    pub use crate::gemm::gemm_dw::on_device as gemm_dw;
    pub use crate::gemm::gemm_dx::on_device as gemm_dx;
    pub use crate::index::argmax::on_device as argmax;
    pub use crate::index::embedding::{embedding_at, on_device as embedding};
    pub use crate::index::embedding_dw::on_device as embedding_dw;
    pub use crate::index::topk::on_device as topk;
    pub use crate::logprob::entropy::on_device as entropy;
    pub use crate::logprob::entropy_backward::{DeviceGradients as EntropyGradients, on_device as entropy_backward};
    pub use crate::logprob::linear_logprob::device::linear_logprob;
    pub use crate::logprob::linear_logprob_backward::device::DeviceRows as Logproblinear_logprob_backward;
    pub use crate::logprob::logprob::on_device as logprob;
    pub use crate::logprob::logprob_backward::{DeviceGradients as LogprobGradients, on_device as logprob_backward};
    pub use crate::logprob::softmax::on_device as softmax;
    pub use crate::logprob::softmax_backward::on_device as softmax_backward;
    pub use crate::moe::combine::{combine_at, on_device as combine};
    pub use crate::moe::combine_backward::{combine_backward_at, on_device as combine_backward};
    pub use crate::moe::route::{on_device as route, route_to};
    pub use crate::moe::route_backward::{on_device as route_backward, route_backward_at};
    pub use crate::norm::add_rms_norm::on_device as add_rms_norm;
    pub use crate::norm::add_rms_norm_backward::on_device as add_rms_norm_backward;
    pub use crate::norm::group_norm::on_device as group_norm;
    pub use crate::norm::group_norm_backward::{DeviceInputs as GroupNormInputs, on_device as group_norm_backward};
    pub use crate::norm::layer_norm::on_device as layer_norm;
    pub use crate::norm::layer_norm_backward::on_device as layer_norm_backward;
    pub use crate::norm::layer_norm_dw::on_device as layer_norm_dw;
    pub use crate::norm::norm_rope::on_device as norm_rope;
    pub use crate::norm::norm_rope_backward::on_device as norm_rope_backward;
    pub use crate::norm::norm_rope_dw::on_device as norm_rope_dw;
    pub use crate::norm::rms_norm::on_device as rms_norm;
    pub use crate::norm::rms_norm_backward::on_device as rms_norm_backward;
    pub use crate::norm::rms_norm_dw::on_device as rms_norm_dw;
    pub use crate::registry::units;
    pub use crate::rope::rope::{Rotations, on_device as rope};
    pub use crate::rope::rope_backward::on_device as rope_backward;
    pub use crate::sampling::draw::on_device as draw;
    pub use crate::sampling::penalize::on_device as penalize;
    pub use crate::sampling::truncate::on_device as truncate;
    pub use crate::scan::selective_scan::{DeviceInputs as SelectiveInputs, on_device as selective_scan};
    pub use crate::scan::selective_scan_backward::{
        DeviceOutputGradients as SelectiveOutputGradients, on_device as selective_scan_backward,
    };
    pub use crate::scan::ssd_scan::{DeviceInputs as ScanInputs, on_device as ssd_scan};
    pub use crate::scan::ssd_scan_backward::{
        DeviceOutputGradients as ScanOutputGradients, on_device as ssd_scan_backward,
    };
    pub use crate::token::device::Tokens;
    pub use crate::token::fold::on_device as fold;
    pub use crate::token::token_sum::on_device as token_sum;
    pub use crate::train::adamw::on_device as adamw;
    pub use crate::train::batch_loss::on_device as batch_loss;
    pub use crate::train::clip_factor::on_device as clip_factor;
    pub use crate::train::group_advantage::on_device as group_advantage;
    pub use crate::train::nll::on_device as nll;
    pub use crate::train::policy_loss::{DeviceTokens as PolicyTokens, on_device as policy_loss};
    pub use crate::train::square_sum::on_device as square_sum;
    pub use crate::wkv::wkv7::{DeviceInputs as Wkv7Inputs, on_device as wkv7};
    pub use crate::wkv::wkv7_backward::on_device as wkv7_backward;
}

/// Why an op did not run. Nothing has been written when one is returned, except for [`Error::Device`]: what a device had
/// started when it failed may have been.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A slice's length does not match the dimensions.
    #[error("{op}: `{tensor}` has {found} elements; its shape {shape} needs {expected}")]
    Length {
        /// The op.
        op: &'static str,
        /// The slice.
        tensor: &'static str,
        /// Its shape in words, for example `[M,K]`.
        shape: &'static str,
        /// Elements found.
        found: usize,
        /// Elements needed.
        expected: usize,
    },
    /// A parameter or an index is outside its range.
    #[error("{op}: {what}")]
    Value {
        /// The op.
        op: &'static str,
        /// Which value, and what would be right.
        what: String,
    },
    /// The form of a call is wrong; the line names the field and the fix.
    #[error("{0}")]
    Request(String),
    /// The smallest plan does not fit the budget.
    #[error("{op}: a budget of {budget} bytes is below the smallest plan, {smallest} bytes; raise it to that")]
    Budget {
        /// The op.
        op: &'static str,
        /// The budget in bytes.
        budget: usize,
        /// What would do, in bytes.
        smallest: usize,
    },
    /// The system has no memory for a plan that fits the budget.
    #[error("{op}: no memory for a workspace of {bytes} bytes, the smallest that was tried")]
    Memory {
        /// The op.
        op: &'static str,
        /// Bytes asked for.
        bytes: usize,
    },
    /// A counter that strict mode forbids would have grown.
    #[error("strict: {counter} would grow by {amount}: {place}")]
    Forbidden {
        /// The counter's name.
        counter: &'static str,
        /// By how much.
        amount: usize,
        /// What did it, and what to do instead.
        place: &'static str,
    },
    /// A kernel could not be compiled for a device.
    #[error("{unit}: the kernel compiler refused {options}:\n{log}")]
    Compile {
        /// The kernel's file without `.cu`.
        unit: &'static str,
        /// The compiler's options.
        options: String,
        /// What the compiler said.
        log: String,
    },
    /// A device or its driver failed.
    #[error("device: {0}")]
    Device(String),
    /// The machine or the build cannot run what was asked for.
    #[error("{0}")]
    Unavailable(String),
}

/// Checks that `found` elements fill `dims`; the product is computed without overflow.
pub(crate) fn check_len(
    op: &'static str,
    tensor: &'static str,
    shape: &'static str,
    found: usize,
    dims: &[usize],
) -> Result<(), Error> {
    let expected = dims.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).unwrap_or(usize::MAX);
    if found == expected { Ok(()) } else { Err(Error::Length { op, tensor, shape, found, expected }) }
}

impl From<samebits_schema::Error> for Error {
    fn from(error: samebits_schema::Error) -> Error {
        match error {
            samebits_schema::Error::Unsupported(reason) => Error::Unavailable(reason),
            other => Error::Request(other.to_string()),
        }
    }
}

/// What is added to a mean of squares: finite and not negative.
pub(crate) fn check_eps(op: &'static str, eps: f32) -> Result<(), Error> {
    if eps >= 0.0 && eps.is_finite() {
        return Ok(());
    }
    Err(value_error(op, format!("eps is {eps}; it must be finite and not negative")))
}

/// An [`Error::Value`].
pub(crate) fn value_error(op: &'static str, what: impl Into<String>) -> Error {
    Error::Value { op, what: what.into() }
}
