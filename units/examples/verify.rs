//! What reproduces each name of a dump: `cargo run --release --example verify FILE..`

use samebits_units::Isa;
use samebits_units::dump::Dump;
use samebits_units::search::Machine;
use samebits_units::verify::verify;

fn main() {
    let machine = Machine { isa: Isa::best(), threads: std::thread::available_parallelism().map_or(1, usize::from) };
    for path in std::env::args().skip(1) {
        match Dump::parse(&std::fs::read(&path).expect("a file")) {
            Ok(dump) => dump.entries.iter().for_each(|entry| println!("{}", verify(entry, machine, &|_, _| ()).line())),
            Err(complaints) => complaints.iter().for_each(|complaint| println!("{path}: {complaint}")),
        }
    }
}
