//! Facts of this machine: what the axes can vary, and what a report says about where it was made.

use samebits_contract::axis::Machine;
use samebits_contract::table::{Implementation, Slice};
use std::collections::BTreeMap;

/// What the axes can vary for a program, as its entry says.
pub fn axes_of(entry: &Implementation) -> Machine {
    let isas = entry.isa.iter().map(|isa| isa.name.clone()).collect();
    let threads = entry.threads.clone().unwrap_or_else(threads);
    Machine { isas, threads, layouts: entry.layouts.clone(), ..of_slice(Slice::Default) }
}

/// Thread counts for the axis of that name, which go beyond the cores on purpose.
pub fn threads() -> Vec<usize> {
    let cores = cores();
    let mut threads = vec![1, 2, 3, cores, 2 * cores + 1];
    threads.sort_unstable();
    threads.dedup();
    threads
}

/// How far rows are added, by how much of the contract is asked.
pub fn of_slice(slice: Slice) -> Machine {
    let room = match slice {
        Slice::Quick => 1 << 12,
        Slice::Default => 1 << 15,
        Slice::Exhaustive => 1 << 22,
    };
    Machine { room, ..Machine::default() }
}

/// Processors that this process may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

/// The processor's own name, where the system tells it.
pub fn processor() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    name.map_or_else(|| std::env::consts::ARCH.to_string(), |(_, name)| name.trim().to_string())
}

/// What `run.json` keeps about the machine.
pub fn facts() -> BTreeMap<String, String> {
    BTreeMap::from([
        ("cores".to_string(), cores().to_string()),
        ("cpu".to_string(), processor()),
        ("os".to_string(), format!("{} {}", std::env::consts::OS, std::env::consts::ARCH)),
    ])
}
