#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod function;
mod gate;
pub mod implementation;
pub mod judge;
pub mod machine;
pub mod probe;
pub mod recordings;
pub mod run;
#[cfg(feature = "proptest")]
pub mod strategies;
#[cfg(feature = "trials")]
mod trials;
pub mod waivers;

pub use function::{Call, Element};
pub use gate::{Gate, Report};
pub use half::{bf16, f16};
pub use samebits_contract::table::Slice;
pub use samebits_contract::tensor::DType;
#[cfg(feature = "trials")]
pub use trials::run;

pub use samebits_contract as contract;
pub use samebits_schema as schema;
