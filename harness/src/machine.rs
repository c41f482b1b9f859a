//! Facts of this machine: what the axes can vary, and what a report says about where it was made.

use samebits_contract::axis::Machine;
use samebits_contract::table::Slice;
pub use samebits_judge::machine::{axes_of, of_slice, processor, threads};
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

/// Instruction sets and thread counts for the axes; the first instruction set is where the base runs.
pub fn axes(base: Isa) -> Machine {
    let others = Isa::of_machine().filter(|isa| *isa != base);
    let isas = [base].into_iter().chain(others).map(|isa| isa.name().to_string()).collect();
    Machine {
        isas,
        threads: threads(),
        layouts: ["offset", "fused", "heads_first"].map(String::from).to_vec(),
        ..of_slice(Slice::Default)
    }
}

/// What `run.json` keeps about the machine and the build. `isas` are real; what a build emulates besides is named apart.
pub fn facts() -> BTreeMap<String, String> {
    let names = |isas: Vec<Isa>| isas.into_iter().map(Isa::name).collect::<Vec<_>>().join(" ");
    let (emulated, real): (Vec<Isa>, Vec<Isa>) = Isa::of_machine().partition(|isa| isa.emulates().is_some());
    let mut facts = samebits_judge::machine::facts();
    facts.insert("isas".to_string(), names(real));
    facts.insert("rustc".to_string(), TOOLCHAIN.to_string());
    if !emulated.is_empty() {
        facts.insert("isas-emulated".to_string(), names(emulated));
    }
    facts
}

/// How many programs were running or waiting to run in the last minute, where the system tells.
pub fn load() -> Option<f64> {
    std::fs::read_to_string("/proc/loadavg").ok()?.split(' ').next()?.parse().ok()
}
