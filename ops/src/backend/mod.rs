//! Where ops run.

pub(crate) mod cpu;
pub mod device;
