//! The part of `samebits` that sees both sides: it asks implementations the contract's questions.
//!
//! The binary `samebits` is a thin command line over this library; the tests use the library directly.

pub mod ceilings;
pub mod checkpoints;
pub mod clock;
pub mod dump;
pub mod implementation;
pub mod judge;
pub mod machine;
pub mod measured;
pub mod pairs;
pub mod probe;
pub mod run;
pub mod side;
pub mod timing;
pub mod workload;
