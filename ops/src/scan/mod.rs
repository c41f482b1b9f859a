//! Scans of recurrent models: a state that every position of a sequence changes.

pub(crate) mod ssd;
pub(crate) mod ssd_scan;
pub(crate) mod ssd_scan_backward;

use crate::call::Entry;

/// What is called by name.
pub(crate) const OPS: &[&Entry] = &[&ssd_scan::OP, &ssd_scan_backward::OP];
