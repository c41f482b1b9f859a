//! Facts of this machine: what the axes can vary, and what a report says about where it was made.

use samebits_contract::axis::Machine;
use samebits_contract::table::{Implementation, Slice};
use samebits_ops::Isa;
use std::collections::BTreeMap;

/// The compiler that built this program, for example `rustc 1.95.0 (59807616e 2026-04-14)`.
pub const TOOLCHAIN: &str = env!("SAMEBITS_RUSTC");

/// Which of these instruction sets are real and which are emulated, in words.
pub fn covered(isas: &[Isa]) -> String {
    let names = |isas: Vec<Isa>| isas.into_iter().map(Isa::name).collect::<Vec<_>>().join(", ");
    let (emulated, real): (Vec<Isa>, Vec<Isa>) = isas.iter().partition(|isa| isa.emulates().is_some());
    match emulated.iter().filter_map(|isa| isa.emulates()).collect::<Vec<_>>() {
        emulated if emulated.is_empty() => format!("{} (real)", names(real)),
        emulated => format!("{} (real), {} (emulated: this machine lacks them)", names(real), names(emulated)),
    }
}

/// Instruction sets and thread counts for the axes; the first instruction set is where the base runs. The thread
/// counts go beyond the cores on purpose.
pub fn axes(base: Isa) -> Machine {
    let others = Isa::of_machine().filter(|isa| *isa != base);
    let isas = [base].into_iter().chain(others).map(|isa| isa.name().to_string()).collect();
    let cores = cores();
    let mut threads = vec![1, 2, 3, cores, 2 * cores + 1];
    threads.sort_unstable();
    threads.dedup();
    Machine {
        isas,
        threads,
        layouts: ["offset", "fused", "heads_first"].map(String::from).to_vec(),
        ..of_slice(Slice::Default)
    }
}

/// The same for a program, as its entry says.
pub fn axes_of(entry: &Implementation) -> Machine {
    let isas = entry.isa.iter().map(|isa| isa.name.clone()).collect();
    let threads = entry.threads.clone().unwrap_or(axes(Isa::Scalar).threads);
    Machine { isas, threads, layouts: entry.layouts.clone(), ..of_slice(Slice::Default) }
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

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

/// The processor's own name, where the system tells it.
pub fn processor() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    name.map_or_else(|| std::env::consts::ARCH.to_string(), |(_, name)| name.trim().to_string())
}

/// What `run.json` keeps about the machine and the build. `isas` are real; what a build emulates besides is named apart.
pub fn facts() -> BTreeMap<String, String> {
    let names = |isas: Vec<Isa>| isas.into_iter().map(Isa::name).collect::<Vec<_>>().join(" ");
    let (emulated, real): (Vec<Isa>, Vec<Isa>) = Isa::of_machine().partition(|isa| isa.emulates().is_some());
    let mut facts = BTreeMap::from([
        ("cores".to_string(), cores().to_string()),
        ("cpu".to_string(), processor()),
        ("isas".to_string(), names(real)),
        ("rustc".to_string(), TOOLCHAIN.to_string()),
        ("os".to_string(), format!("{} {}", std::env::consts::OS, std::env::consts::ARCH)),
    ]);
    if !emulated.is_empty() {
        facts.insert("isas-emulated".to_string(), names(emulated));
    }
    facts
}

/// How many programs were running or waiting to run in the last minute, where the system tells.
pub fn load() -> Option<f64> {
    std::fs::read_to_string("/proc/loadavg").ok()?.split(' ').next()?.parse().ok()
}
