//! Neural network ops whose bits do not depend on batch, tile, thread count or instruction set.
//!
//! Every op takes plain row-major slices and a struct of dimensions, and a [`Cpu`] that says how to run, never what to
//! compute. Inputs and outputs are [`bf16`], [`struct@f16`] or `f32` ([`Element`]); arithmetic is IEEE binary32 in the order
//! written in `docs/NUMERICS.md`; outputs are rounded once, at the end. A length that does not match its dimensions is
//! an [`Error`], before anything is written.

mod add;
mod add_rms_norm;
mod argmax;
mod attention;
mod coded;
mod combine;
mod cpu;
pub mod device;
mod dot_rows;
mod element;
mod elementwise;
mod embedding;
mod gelu_mul;
mod gemm;
mod lane_sum;
mod lanes;
mod ledger;
mod linear_logprob;
mod logprob;
mod math;
mod memory;
mod norm_rope;
mod pack;
mod plan;
mod rms_norm;
mod rope;
mod route;
mod scale;
mod silu_mul;
mod sink;
mod softcap;
mod softmax;
mod tile;

pub use add::add;
pub use add_rms_norm::add_rms_norm;
pub use argmax::argmax;
pub use attention::{Attention, Keys, Sequences, attention, attention_over};
pub use combine::{Combine, combine};
pub use cpu::{Cpu, Isa};
pub use element::{Element, Tf32};
pub use embedding::{embedding, embedding_packed};
pub use gelu_mul::gelu_mul;
pub use gemm::{Gemm, PackedWeight, gemm, gemm_packed};
pub use half::{bf16, f16};
pub use ledger::{Allowance, Counter, Ledger, PlanRecord, Why};
pub use linear_logprob::{linear_logprob, linear_logprob_packed};
pub use logprob::logprob;
pub use norm_rope::{NormRope, norm_rope};
pub use rms_norm::{RmsNorm, Rounding, rms_norm};
pub use rope::{Pairing, Rope, RopeTable, inv_freq, rope};
pub use route::{GroupWorth, Route, Scoring, route};
pub use scale::scale;
pub use silu_mul::silu_mul;
pub use softcap::softcap;
pub use softmax::softmax;

/// Why an op did not run. Nothing has been written when one is returned.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
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

/// An [`Error::Value`].
pub(crate) fn value_error(op: &'static str, what: impl Into<String>) -> Error {
    Error::Value { op, what: what.into() }
}
