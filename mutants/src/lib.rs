//! What tests the harness: implementations that are wrong on purpose, and others that are right in another way.
//!
//! [`mutations`] are wrong in one thing each, and name the check that must turn red. [`PLAIN`], [`EQUIVALENTS`] and
//! [`MEMORY_PATTERNS`] are right, and no check may turn red. [`VIOLATIONS`] break the wire. Nothing that is shipped
//! holds any of them: a test asks them in its own process, or starts itself again as a program on the wire.

#![forbid(unsafe_code)]

mod attention;
mod chain;
mod convolutions;
mod delta;
mod elements;
mod equivalents;
mod gemm;
mod gradients;
mod images;
mod memory;
mod models;
mod mutation;
pub mod orders;
mod plain;
mod rows;
mod sampling;
mod scans;
mod tokens;
mod train;
mod violations;

pub use equivalents::{EQUIVALENTS, Equivalent};
pub use memory::{Holder, MEMORY_PATTERNS, MemoryPattern};
pub use models::{ModelMutant, ModelMutation};
pub use mutation::{Mutant, Mutation, Others, PLAIN, mutations};
pub use violations::{VIOLATIONS, Violation};

use libtest_mimic::{Arguments, Trial};
use samebits_contract::case::Answer;
use samebits_contract::wire::{decode_request, encode_answer, read_frame, write_frame};
use samebits_harness::implementation::Implementation;
use samebits_harness::implementation::cpu::CpuImplementation;
use samebits_ops::Cpu;
use std::error::Error;
use std::io::{BufReader, BufWriter, stdin, stdout};
use std::sync::Arc;

/// The argument before the name of what a test is to answer as.
const AS: &str = "--answer-as";

/// The command that starts this very test as a program on the wire: the mutant, memory pattern or violation called `name`.
/// The `main` of the test begins with [`serve_if_asked`].
pub fn command(name: &str) -> [String; 3] {
    let program = std::env::current_exe().expect("a test knows where it stands");
    [program.to_str().expect("test paths are UTF-8"), AS, name].map(String::from)
}

/// Answers requests on stdin until their end, and ends the process, where [`command`] started it.
pub fn serve_if_asked() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [asked, name] = &arguments[..]
        && asked == AS
    {
        serve(name).expect("requests are read and answers written");
        std::process::exit(0);
    }
}

/// The `main` of a test target whose tests start it again as a program on the wire.
pub fn run_tests(tests: &[(&str, fn())]) -> ! {
    run_trials(tests.iter().map(|&(name, test)| trial(name, test)).collect())
}

/// The same of trials, which [`trial`] makes.
pub fn run_trials(trials: Vec<Trial>) -> ! {
    serve_if_asked();
    libtest_mimic::run(&Arguments::from_args(), trials).exit()
}

/// A test that fails when it panics.
pub fn trial(name: impl Into<String>, test: impl FnOnce() + Send + 'static) -> Trial {
    Trial::test(name, move || {
        test();
        Ok(())
    })
}

/// A violation answers honestly but for cases called `*-edges-*`.
fn serve(name: &str) -> Result<(), Box<dyn Error>> {
    // What differs between processes, in place of an address or a clock.
    let process = std::process::id() as usize;
    let mutation = mutations().find(|known| known.name == name);
    let pattern = MEMORY_PATTERNS.iter().find(|known| known.name == name);
    let violation = VIOLATIONS.iter().find(|known| known.name == name);
    let implementation: Box<dyn Implementation> = match (mutation, pattern, violation) {
        (Some(mutation), ..) => Box::new(Mutant::new(mutation, Arc::default()).in_process(process)),
        (_, Some(pattern), _) => Box::new(Holder::new(pattern)),
        (.., Some(_)) => Box::new(CpuImplementation::new(Cpu::best())),
        _ => panic!("{AS} {name}: nothing is called so"),
    };
    let (mut input, mut output) = (BufReader::new(stdin().lock()), BufWriter::new(stdout().lock()));
    while let Some(frame) = read_frame(&mut input)? {
        let mut case = decode_request(&frame)?;
        let id = case.config.id.take();
        let answer = Answer { id, ..implementation.run(&case) };
        if violation.is_some() && case.name.contains("-edges-") {
            violations::violate(name, &case, answer, &mut output)?;
        } else {
            write_frame(&mut output, &encode_answer(&answer))?;
        }
    }
    Ok(())
}
