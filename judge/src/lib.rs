//! Holds an implementation of an op to the contract: which judgments there are, and what came of each.

#![forbid(unsafe_code)]

pub mod implementation;
pub mod judge;
pub mod machine;
pub mod probe;
pub mod recordings;
pub mod run;
