//! Sampling from diffusion and flow models: which noise levels lie on the way from noise to an image, and the step from one to
//! the next, as the folder's `scheduler_config.json` says.
//!
//! A [`Sampler`] is a pure function of numbers. What it makes of a config and a number of steps (noise levels, coefficients) is f64,
//! by functions that have the same bits on every machine; what it keeps of images is f32, each element of a step one f64 expression,
//! rounded once. Images do not meet: each has the bits that it has alone, and so has the [noise](noise()) that is drawn for it.

mod clip;
mod component;
mod config;
mod layers;
mod moves;
pub(crate) mod noise;
mod pipeline;
pub(crate) mod prompts;
mod run;
mod sampler;
mod schedule;
mod unet;
mod vae;

pub use component::Component;
pub use noise::noise;
pub use pipeline::{Images, Pipeline, Request};
pub use sampler::Sampler;
pub use schedule::Scheduler;
