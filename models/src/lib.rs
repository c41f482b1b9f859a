//! Decoder language models built from the public ops of `samebits-ops` and nothing else.
//!
//! [`Model::load`] reads a Hugging Face folder (`config.json`, `model.safetensors` whole or in shards, `tokenizer.json`) of
//! one of the families of [`Family`]. [`Model::forward`] returns logits, [`Model::generate`] continues a text.
//! However the same tokens are scheduled, batched, threaded or vectorised, and in whatever pages their keys stand, the
//! logits have the same bits: every op keeps its order of summation, and the forward adds no arithmetic of its own.
//!
//! Nothing in a folder is trusted: a file that is missing, damaged or asks for something this crate does not compute is
//! a [`ModelError`], one line naming the file, the field or tensor, and what would be right.

/// What a [`Config`] is made of: layers, as data.
pub mod plan {
    pub use crate::layers::LayerPlan as Layer;
    pub use crate::layers::attend::Heads;
    pub use crate::layers::attention::{Names as AttentionNames, Plan as Attention, QkvNames};
    pub use crate::layers::branch::{Beside, Place, Plan as Branch};
    pub use crate::layers::delta::{Gate as DeltaGate, Names as DeltaNames, Plan as DeltaRule};
    pub use crate::layers::head::Finish;
    pub use crate::layers::heads::{NormOf, QkNorm, Rope};
    pub use crate::layers::latent_attention::Plan as LatentAttention;
    pub use crate::layers::mamba::{Norms as ScanNorms, Plan as Mamba};
    pub use crate::layers::mamba2::{Gate as ScanGate, Plan as Mamba2};
    pub use crate::layers::mlp::{Activation, Names as MlpNames, Plan as Mlp};
    pub use crate::layers::moe::{Plan as Moe, Weighs};
    pub use crate::layers::norm::{Kind as NormKind, Plan as Norm};
    pub use crate::layers::shared::{Plan as Shared, Use};
}

mod adapters;
mod audit;
mod backward;
mod chat;
mod config;
mod decoder;
pub mod diffusion;
mod engine;
mod error;
mod experts;
mod families;
mod fields;
mod files;
mod generate;
mod gguf;
mod gradients;
mod layers;
mod machine;
mod memory;
mod model;
mod mxfp4;
mod pass;
mod pth;
mod quantised;
mod quantize;
#[cfg(feature = "unit-tests")]
mod reference;
mod rollout;
mod rotary;
mod sampling;
mod schedule;
mod state;
mod step;
mod sums;
mod tokenizer;
mod tokenizer_files;
mod trace;
mod train;
#[cfg(feature = "unit-tests")]
mod unit_tests;
mod weights;

pub use adapters::{ADAPTER_CONFIG, ADAPTER_TENSORS, AdapterChoice, PeftFolder, named_folder};
pub use audit::{Audit, Finding, TensorReport};
pub use config::{Config, ROPE_LENGTH, StorageContract};
pub use engine::Engine;
pub use error::ModelError;
pub use experts::{Experts, Flips, Mixture, Recorded, Routing};
pub use families::Family;
pub use generate::{Generation, Stop};
pub use gradients::{Accumulator, Batch, Forward, GradientRun, Gradients, Loss, Padding};
pub use model::{Model, ModelFolder, Precision, folder_files};
pub use quantize::{Quantizing, Scheme};
pub use rollout::{Event, Sample, Serving, Timing, ToScore};
pub use rotary::{RopeLength, Rotary, Scaling};
pub use sampling::{Ruled, Sampled, Sampling, SamplingRule};
pub use schedule::{Grouping, PAGE_SIZE, Run, Schedule};
pub use state::PageOrder;
pub use sums::Partial;
pub use tokenizer::Encoded;
pub use trace::{Probe, Seen, Tripwire};
pub use train::{Optimizer, StepReport, Trainer};
#[cfg(feature = "unit-tests")]
pub use unit_tests::{UNIT_TESTS, UnitTest};
