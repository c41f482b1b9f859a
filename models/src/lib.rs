//! Decoder language models built from the public ops of `samebits-ops` and nothing else.
//!
//! [`Model::load`] reads a Hugging Face folder (`config.json`, `model.safetensors` whole or in shards, `tokenizer.json`)
//! of the families qwen3, qwen2 and llama. [`Model::forward`] returns logits and [`Model::generate`] continues a text.
//! However the same tokens are scheduled, batched, threaded or vectorised, the logits have the same bits: every op keeps
//! its order of summation, and the forward adds no arithmetic of its own.
//!
//! Nothing in a folder is trusted: a file that is missing, damaged or asks for something this crate does not compute is
//! a [`ModelError`], one line naming the file, the field or tensor, and what would be right.

mod config;
mod decoder;
mod error;
mod generate;
mod kv_cache;
mod model;
#[cfg(test)]
mod reference;
mod schedule;
mod weights;

pub use config::{Config, Family};
pub use error::ModelError;
pub use generate::{Generation, Stop};
pub use model::{Model, Precision};
pub use schedule::{Grouping, Schedule};
