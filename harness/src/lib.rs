//! The part of `samebits` that sees both sides: it asks implementations the contract's questions.
//!
//! The command line (`command`, `cmd/`) is a part of it; the tests use both.

pub mod ceilings;
pub mod checkpoints;
pub mod clock;
mod cmd;
pub mod command;
pub mod dump;
mod examples;
mod experts;
mod gradients;
pub mod implementation;
pub mod machine;
pub mod measured;
pub mod mismatch;
pub mod pairs;
mod png;
pub mod side;
pub mod timing;
pub mod workload;

pub use samebits_judge::{judge, probe, run, waivers};
