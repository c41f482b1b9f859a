//! Ops of samebits as `CustomOp`s of candle, and a model of candle-transformers that is told which of the two to use.
//!
//! [`RmsNorm`], [`MatMul`] and [`Attention`] read their inputs where candle's `Layout` says that they lie: a view of
//! heads, a slice of fused projections or a broadcast axis goes in without a copy. Only the last axis must be
//! contiguous; where it is not, the error names it. Forward only: asking for a gradient is candle's
//! `BackwardNotSupported`.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use samebits_candle::MatMul;
//! use samebits_ops::Cpu;
//!
//! let x = Tensor::new(&[[1f32, 2.], [3., 4.], [5., 6.]], &Device::Cpu)?;
//! let w = Tensor::new(&[[1f32, 0.], [1., 1.]], &Device::Cpu)?;
//! let y = x.narrow(0, 1, 2)?.apply_op2(&w, MatMul { cpu: Cpu::best() })?; // x w^T
//! assert_eq!(y.to_vec2::<f32>()?, [[3., 7.], [5., 11.]]);
//! # Ok::<(), candle_core::Error>(())
//! ```

#![forbid(unsafe_code)]

mod ops;
pub mod qwen3;

use candle_core::{DType, Result, Tensor};

pub use ops::{Attention, MatMul, RmsNorm};

/// The forward of a model: tokens `[B, T]` and their offset in their sequences, 0 to begin anew, to logits.
pub type Forward<'a> = &'a mut dyn FnMut(&Tensor, usize) -> Result<Tensor>;

/// The logits behind the sequences `tokens[B, T]` together, and behind each alone, row behind row: the first `prompt`
/// tokens go in at once, and the others one by one. They are widened to f32: what differs before differs then.
///
/// # Errors
/// Those of `forward`.
pub fn together_and_alone(tokens: &Tensor, prompt: usize, forward: Forward) -> Result<(Vec<f32>, Vec<f32>)> {
    let mut logits = |rows: &Tensor| {
        let mut logits = forward(&rows.narrow(1, 0, prompt)?, 0)?;
        for offset in prompt..rows.dim(1)? {
            logits = forward(&rows.narrow(1, offset, 1)?, offset)?;
        }
        logits.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()
    };
    let together = logits(tokens)?;
    let alone: Result<Vec<_>> = (0..tokens.dim(0)?).map(|row| logits(&tokens.narrow(0, row, 1)?)).collect();
    Ok((together, alone?.concat()))
}
