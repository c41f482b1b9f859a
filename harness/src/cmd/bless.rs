use super::{Place, Select};
use anyhow::{Result, bail, ensure};
use samebits_contract::case::Status;
use samebits_contract::table::{Slice, today};
use samebits_goldens::{Provenance, Store};
use samebits_harness::implementation::{Implementation, cpu::CpuImplementation};
use samebits_harness::machine;
use samebits_ops::{Cpu, Isa};
use std::collections::BTreeMap;
use std::io::Write;
use std::process::ExitCode;

/// Writes the current outputs of the built-in ops as goldens
///
/// The only verb that writes goldens. Runs the selected cases of slice quick on the scalar instruction set, one thread, and puts
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
    let mut store = match (args.place.goldens()?, args.place.root()) {
        (Some(store), _) => store,
        (None, Some(root)) => Store::create(&root.join("goldens"))?,
        (None, None) => bail!("no repository here or in a parent folder; give --root"),
    };
    let checkpoints = args.place.checkpoints();
    // The reference: no vectors, no threads.
    let implementation =
        CpuImplementation::new(Cpu::new(Isa::Scalar, 1, usize::MAX)?).with_checkpoints(checkpoints.clone());
    let mut answers = BTreeMap::new();
    for spec in contract.cases(Slice::Quick).filter(|case| selection.takes(case)) {
        let case = checkpoints.fill(spec, 0).map_err(anyhow::Error::msg)?;
        let answer = implementation.run(&case);
        ensure!(answer.status == Status::Ok, "{}: {}", spec.name, answer.reason);
        answers.insert(spec.name.clone(), answer.outputs);
    }
    ensure!(
        !answers.is_empty(),
        "the selection matches no case of slice quick; `samebits list --slice quick` shows them"
    );
    let known = |case: &str| contract.case(case).is_some_and(|case| case.slice == Slice::Quick);
    let dropped = store.entries().map(|entry| entry.case.clone()).filter(|case| !known(case)).collect();
    let provenance = Provenance {
        contract: contract.digest().to_string(),
        toolchain: machine::TOOLCHAIN.to_string(),
        date: today(),
        reason: args.reason.clone(),
    };
    let writes = store.bless(&answers, &dropped, &provenance)?;
    let mut stdout = std::io::stdout().lock();
    for case in &writes.blessed {
        writeln!(stdout, "blessed {case}")?;
    }
    for case in &writes.dropped {
        writeln!(stdout, "dropped {case}")?;
    }
    let unchanged = answers.len() - writes.blessed.len();
    writeln!(stdout, "{} blessed, {} dropped, {unchanged} unchanged", writes.blessed.len(), writes.dropped.len())?;
    Ok(ExitCode::SUCCESS)
}
