//! Scans of recurrent models: a state that every position of a sequence changes.

mod reverse;
pub(crate) mod selective;
pub(crate) mod selective_scan;
pub(crate) mod selective_scan_backward;
pub(crate) mod ssd;
pub(crate) mod ssd_scan;
pub(crate) mod ssd_scan_backward;

use crate::call::Entry;

/// What is called by name.
pub(crate) const OPS: &[&Entry] =
    &[&selective_scan::OP, &selective_scan_backward::OP, &ssd_scan::OP, &ssd_scan_backward::OP];
