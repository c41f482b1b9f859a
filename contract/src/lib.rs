//! What is right: specifications, f64 oracles, cases, axes, bounds, verdicts and the wire.
//!
//! This crate knows no implementation. Facts move one way through its types:
//! TOML -> [`case::Case`] -> [`case::Answer`] -> [`verdict::Verdict`] -> [`record::Record`].
#![forbid(unsafe_code)]

pub mod atomic_write;
pub mod axis;
pub mod case;
pub mod compare;
pub mod coverage;
pub mod fill;
pub mod gradients;
mod load;
pub mod mismatch;
pub mod number_class;
pub mod orders;
mod power;
mod print;
pub mod record;
pub mod round;
mod sharp;
pub mod soak;
pub mod spec;
pub mod storage;
pub mod table;
pub mod tensor;
pub mod verdict;
pub mod wire;
