//! What this program can hold to the contract: its own ops, and programs that speak the wire.

mod builtin;
pub mod cpu;
pub mod cuda;
pub mod external;

pub use samebits_judge::implementation::{Implementation, Soaked};
