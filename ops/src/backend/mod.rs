//! Where ops run.

pub(crate) mod cpu;
pub mod device;
pub(crate) mod pool;
