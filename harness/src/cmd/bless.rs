use super::{Place, Select};
use anyhow::{Result, bail, ensure};
use samebits_contract::case::Status;
use samebits_goldens::Blessing;
use samebits_harness::implementation::{Implementation, cpu::CpuImplementation};
use samebits_ops::{Cpu, Isa};
use std::io::Write;
use std::process::ExitCode;

/// Writes the current outputs of the built-in ops as goldens
///
/// The only verb that writes goldens. Runs the selected cases on the scalar instruction set, one thread, and puts
/// their outputs into goldens/ with the reason in the manifest. Look at what changed before you commit it.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    select: Select,

    #[command(flatten)]
    place: Place,

    /// Why these outputs are right; kept in the manifest
    #[arg(long, value_name = "TEXT")]
    reason: String,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let contract = args.place.contract()?;
    let selection = args.select.selection(&contract)?;
    let Some(mut store) = args.place.goldens()? else {
        bail!("no goldens/MANIFEST.toml here or in a parent folder; give --root");
    };
    let checkpoints = args.place.checkpoints();
    // The reference: no vectors, no threads.
    let implementation = CpuImplementation::new(Cpu::new(Isa::Scalar, 1, usize::MAX)?).with_checkpoints(checkpoints.clone());
    let mut blessings = Vec::new();
    for spec in contract.cases(selection.slice).filter(|case| selection.takes(case)) {
        let case = checkpoints.fill(spec).map_err(anyhow::Error::msg)?;
        let answer = implementation.run(&case);
        ensure!(answer.status == Status::Ok, "{}: {}", spec.name, answer.reason);
        blessings.push(Blessing { case: spec.name.clone(), outputs: answer.outputs });
    }
    ensure!(!blessings.is_empty(), "the selection matches no case; `samebits list` shows their names");
    let count = blessings.len();
    store.bless(blessings, &args.reason, contract.digest())?;
    writeln!(std::io::stdout(), "blessed {count} cases")?;
    Ok(ExitCode::SUCCESS)
}
