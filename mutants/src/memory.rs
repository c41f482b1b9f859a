//! Implementations that are right and hold memory as real programs do: `ours/cpu`, beside a cache or a collector.
//!
//! None of them leaks. The axis `soak` must leave them alone.

use samebits_contract::case::{Answer, Case};
use samebits_harness::implementation::{Implementation, Soaked, cpu::CpuImplementation};
use samebits_harness::{clock, side};
use samebits_ops::{Cpu, Isa};
use std::sync::Mutex;

/// A way to hold memory.
pub struct MemoryPattern {
    /// Its name, unique in [`MEMORY_PATTERNS`].
    pub name: &'static str,
    /// What is held, in one sentence.
    pub about: &'static str,
    /// What a call, by its number from 0 on, changes of what is held.
    hold: fn(usize, &mut Vec<Vec<u8>>),
}

/// All of them.
pub const MEMORY_PATTERNS: &[MemoryPattern] = &[
    MemoryPattern {
        name: "cache_filled_first",
        about: "The first 200 calls fill a cache of 4 MiB.",
        hold: |call, held| {
            if call < 200 {
                held.push(vec![1; 20 << 10]);
            }
        },
    },
    MemoryPattern {
        name: "cache_filled_late",
        about: "The 600th call takes a table of 8 MiB, once.",
        hold: |call, held| {
            if call == 600 {
                held.push(vec![1; 8 << 20]);
            }
        },
    },
    MemoryPattern {
        name: "cache_that_turns_over",
        about: "What the last 100 calls made is kept, 10 KiB each.",
        hold: |call, held| {
            if call >= 100 {
                held.remove(0);
            }
            held.push(vec![1; 10 << 10]);
        },
    },
    MemoryPattern {
        name: "scratch",
        about: "Every call takes 4 MiB and gives it back.",
        hold: |_, _| drop(std::hint::black_box(vec![1u8; 4 << 20])),
    },
    MemoryPattern {
        name: "collector",
        about: "What calls leave behind, 4 KiB each, is collected every 150 calls.",
        hold: |call, held| {
            if call % 150 == 0 {
                held.clear();
            }
            held.push(vec![1; 4 << 10]);
        },
    },
];

/// `ours/cpu` with one [`MemoryPattern`].
pub struct Holder {
    name: String,
    pattern: &'static MemoryPattern,
    ours: CpuImplementation,
    /// The calls so far, and what is held.
    held: Mutex<(usize, Vec<Vec<u8>>)>,
}

impl Holder {
    /// On the best instruction set and one thread.
    pub fn new(pattern: &'static MemoryPattern) -> Holder {
        let cpu = Cpu::new(Isa::best(), 1, usize::MAX).expect("the best instruction set is there");
        let name = format!("right/{}", pattern.name);
        Holder { name, pattern, ours: CpuImplementation::new(cpu), held: Mutex::default() }
    }
}

impl Implementation for Holder {
    fn name(&self) -> &str {
        &self.name
    }

    fn version(&self) -> &str {
        env!("CARGO_PKG_VERSION")
    }

    fn run(&self, case: &Case) -> Answer {
        let mut held = self.held.lock().expect("nothing panics under this lock");
        let (calls, kept) = &mut *held;
        (self.pattern.hold)(*calls, kept);
        *calls += 1;
        self.ours.run(case)
    }

    fn soak(&self, case: &Case, each: &mut Soaked) -> bool {
        while each(self.run(case), &held_here) {}
        true
    }
}

/// Bytes that this process holds. Freed ones go back first: what others left free must not serve a leak.
pub fn held_here() -> Option<u64> {
    clock::memory::give_back();
    side::resident(std::process::id())
}
