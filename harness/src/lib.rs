//! The part of `samebits` that sees both sides: it asks implementations the contract's questions.
//!
//! The binary `samebits` is a thin command line over this library; the tests use the library directly.

pub mod checkpoints;
pub mod implementation;
pub mod judge;
pub mod machine;
pub mod measure;
pub mod run;
pub mod whole_file;
