//! What ops did besides computing: memory taken, tensors rewritten, plans made smaller, guards that bit. Counters of a
//! [`Cpu`](crate::Cpu); in strict mode the forbidden ones turn into errors that name the place.

use crate::Error;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// Something that is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
#[repr(usize)]
pub enum Counter {
    /// Bytes of workspace for bf16 operands.
    WorkspaceBf16,
    /// Bytes of workspace for f32 operands, scores and sums.
    WorkspaceF32,
    /// Bytes asked of the system, because the workspace kept from the last call was too small.
    Allocated,
    /// Whole tensors converted to another dtype, for example fp16 weights widened while they are packed.
    Conversions,
    /// Whole tensors copied unchanged.
    Copies,
    /// Whole tensors laid out anew inside a call, for example a weight that was not packed beforehand.
    Layouts,
    /// Plans given up because the system had no memory for them.
    Retries,
    /// Tiles that took the plain `fma` kernel because `VDPBF16PS` would have flushed an operand or a sum; rows that
    /// were summed a second time because a weight would have been lost.
    SlowPaths,
    /// Bytes of bf16 tensors made on a device.
    DeviceBf16,
    /// Bytes of fp16 tensors made on a device.
    DeviceFp16,
    /// Bytes of fp32 tensors made on a device, declared fp32 outputs and tables among them.
    DeviceFp32,
    /// Bytes of indices, positions and lengths made on a device.
    DeviceI32,
    /// Bytes copied between the host and a device, either way.
    Staged,
    /// Kernels started on a device.
    Launches,
    /// Captured graphs started on a device; their kernels count as launches.
    Replays,
}

impl Counter {
    /// Every counter.
    pub const ALL: [Counter; 15] = [
        Counter::WorkspaceBf16,
        Counter::WorkspaceF32,
        Counter::Allocated,
        Counter::Conversions,
        Counter::Copies,
        Counter::Layouts,
        Counter::Retries,
        Counter::SlowPaths,
        Counter::DeviceBf16,
        Counter::DeviceFp16,
        Counter::DeviceFp32,
        Counter::DeviceI32,
        Counter::Staged,
        Counter::Launches,
        Counter::Replays,
    ];

    /// The counter called `name`.
    pub fn find(name: &str) -> Option<Counter> {
        Counter::ALL.into_iter().find(|counter| counter.name() == name)
    }

    /// The name in records and messages.
    pub fn name(self) -> &'static str {
        match self {
            Counter::WorkspaceBf16 => "workspace_bf16_bytes",
            Counter::WorkspaceF32 => "workspace_f32_bytes",
            Counter::Allocated => "allocated_bytes",
            Counter::Conversions => "conversions",
            Counter::Copies => "copies",
            Counter::Layouts => "layouts",
            Counter::Retries => "plan_retries",
            Counter::SlowPaths => "slow_paths",
            Counter::DeviceBf16 => "device_bf16_bytes",
            Counter::DeviceFp16 => "device_fp16_bytes",
            Counter::DeviceFp32 => "device_fp32_bytes",
            Counter::DeviceI32 => "device_i32_bytes",
            Counter::Staged => "staged_bytes",
            Counter::Launches => "launches",
            Counter::Replays => "replays",
        }
    }
}

const COUNTERS: usize = Counter::ALL.len();

/// How an op chose to use its workspace.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PlanRecord {
    /// The op.
    pub op: &'static str,
    /// Bytes of workspace.
    pub bytes: usize,
    /// Workers it runs on.
    pub workers: usize,
    /// Tile extents by name.
    pub tiles: [(&'static str, usize); 3],
    /// Why this plan and none before it.
    pub why: Why,
}

/// Why a plan was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Why {
    /// It is the one the op prefers.
    Preferred,
    /// Larger ones exceed the budget.
    Budget,
    /// The system had no memory for larger ones.
    Memory,
}

impl std::fmt::Display for PlanRecord {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {} bytes, {} workers", self.op, self.bytes, self.workers)?;
        for (name, extent) in self.tiles.iter().filter(|(name, _)| !name.is_empty()) {
            write!(f, ", {name} {extent}")?;
        }
        match self.why {
            Why::Preferred => Ok(()),
            Why::Budget => write!(f, " (larger ones exceed the budget)"),
            Why::Memory => write!(f, " (no memory for larger ones)"),
        }
    }
}

/// The counters of one or more [`Cpu`](crate::Cpu)s.
#[derive(Debug, Default)]
pub struct Ledger {
    counts: [AtomicU64; COUNTERS],
    forbidden: [AtomicBool; COUNTERS],
    /// Allowances in force.
    allowed: [AtomicU32; COUNTERS],
    /// The last plan of each op.
    plans: Mutex<Vec<PlanRecord>>,
    kernels: Mutex<Vec<&'static str>>,
}

/// While it lives, a forbidden counter may grow.
pub struct Allowance<'a> {
    ledger: &'a Ledger,
    counter: Counter,
}

impl Drop for Allowance<'_> {
    fn drop(&mut self) {
        self.ledger.allowed[self.counter as usize].fetch_sub(1, Ordering::Relaxed);
    }
}

impl Ledger {
    /// The value of one counter.
    pub fn count(&self, counter: Counter) -> u64 {
        self.counts[counter as usize].load(Ordering::Relaxed)
    }

    /// Every counter that is not zero.
    pub fn counts(&self) -> Vec<(Counter, u64)> {
        Counter::ALL.into_iter().map(|c| (c, self.count(c))).filter(|(_, count)| *count > 0).collect()
    }

    /// The last plan of each op that has a workspace.
    pub fn plans(&self) -> Vec<PlanRecord> {
        self.plans.lock().expect("no panic while holding the lock").clone()
    }

    /// Instruction sets that kernels of matrix products really used, in the order of their first use.
    pub fn kernels(&self) -> Vec<&'static str> {
        self.kernels.lock().expect("no panic while holding the lock").clone()
    }

    /// From now on an op that would raise `counter` is an [`Error::Forbidden`], except under an [`Allowance`].
    pub fn forbid(&self, counter: Counter) {
        self.forbidden[counter as usize].store(true, Ordering::Relaxed);
    }

    /// Lets `counter` grow until the result is dropped, for all users of this ledger.
    pub fn allow(&self, counter: Counter) -> Allowance<'_> {
        self.allowed[counter as usize].fetch_add(1, Ordering::Relaxed);
        Allowance { ledger: self, counter }
    }

    /// Counters at zero that forbid the same.
    pub(crate) fn successor(&self) -> Ledger {
        let next = Ledger::default();
        for (next, forbidden) in next.forbidden.iter().zip(&self.forbidden) {
            next.store(forbidden.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        next
    }

    /// Counts `amount`; an error when `counter` is forbidden. `place` names what did it and how to avoid it.
    ///
    /// # Errors
    /// [`Error::Forbidden`] in strict mode.
    pub fn note(&self, counter: Counter, amount: usize, place: &'static str) -> Result<(), Error> {
        if amount == 0 {
            return Ok(());
        }
        if self.forbids(counter) {
            return Err(Error::Forbidden { counter: counter.name(), amount, place });
        }
        self.add(counter, amount);
        Ok(())
    }

    /// Whether `counter` may not grow. An op that finds out only on its way asks before it writes anything.
    pub(crate) fn forbids(&self, counter: Counter) -> bool {
        let at = counter as usize;
        self.forbidden[at].load(Ordering::Relaxed) && self.allowed[at].load(Ordering::Relaxed) == 0
    }

    /// Counts `amount` of what has happened.
    pub(crate) fn add(&self, counter: Counter, amount: usize) {
        self.counts[counter as usize].fetch_add(amount as u64, Ordering::Relaxed);
    }

    pub(crate) fn plan(&self, plan: PlanRecord) {
        let mut plans = self.plans.lock().expect("no panic while holding the lock");
        match plans.iter_mut().find(|known| known.op == plan.op) {
            Some(known) => *known = plan,
            None => plans.push(plan),
        }
    }

    pub(crate) fn ran(&self, kernel: &'static str) {
        let mut kernels = self.kernels.lock().expect("no panic while holding the lock");
        if !kernels.contains(&kernel) {
            kernels.push(kernel);
        }
    }
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn a_forbidden_counter_is_an_error_outside_its_allowance() {
        let ledger = Ledger::default();
        ledger.note(Counter::Copies, 1, "before").unwrap();
        ledger.forbid(Counter::Copies);
        let error = ledger.note(Counter::Copies, 2, "here").unwrap_err().to_string();
        assert!(error.contains("copies") && error.contains("here"), "{error}");
        ledger.note(Counter::Layouts, 1, "another counter").unwrap();
        {
            let _scope = ledger.allow(Counter::Copies);
            ledger.note(Counter::Copies, 4, "allowed").unwrap();
        }
        ledger.note(Counter::Copies, 1, "after").unwrap_err();
        assert_eq!(ledger.counts(), [(Counter::Copies, 5), (Counter::Layouts, 1)]);
    }
}
