use super::{Place, Select};
use crate::implementation::{Implementation, cpu::CpuImplementation};
use crate::machine;
use anyhow::{Result, bail, ensure};
use samebits_contract::case::Status;
use samebits_contract::table::{CaseSpec, today};
use samebits_goldens::{Provenance, Store};
use samebits_ops::{Cpu, Isa};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::process::ExitCode;

/// Writes the current outputs of the built-in ops as goldens
///
/// The only verb that writes goldens. Runs the selected cases of slices quick and default on the scalar instruction set, one
/// thread, and puts their outputs into goldens/ with the reason: those of quick cases whole, of the others hashes. Look at
/// what changed before you commit it.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    select: Select,

    #[command(flatten)]
    place: Place,

    /// Only cases that have no golden yet; what is blessed stays as it is
    #[arg(long)]
    new: bool,

    /// Why these outputs are right; kept beside them
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
    let (mut whole, mut hashed) = (BTreeMap::new(), BTreeMap::new());
    let wanted =
        |case: &CaseSpec| case.blessed() && selection.takes(case) && !(args.new && store.find(&case.name).is_some());
    for spec in contract.cases(selection.slice).filter(|case| wanted(case)) {
        let case = checkpoints.recordings().fill(spec, 0).map_err(anyhow::Error::msg)?;
        let answer = implementation.run(&case);
        ensure!(answer.status == Status::Ok, "{}: {}", spec.name, answer.reason);
        let answers = if spec.kept_whole() { &mut whole } else { &mut hashed };
        answers.insert(spec.name.clone(), answer.outputs);
    }
    let asked = whole.len() + hashed.len();
    ensure!(
        asked > 0,
        "the selection matches no case {}; `samebits list` shows them",
        if args.new { "without a golden" } else { "that goldens are blessed for" }
    );
    let known = |case: &str| contract.case(case).is_some_and(CaseSpec::blessed);
    let dropped = store.entries().map(|entry| entry.case.clone()).filter(|case| !known(case)).collect();
    let provenance = Provenance {
        contract: contract.digest().to_string(),
        toolchain: machine::TOOLCHAIN.to_string(),
        date: today(),
        reason: args.reason.clone(),
    };
    let writes =
        [store.bless(&whole, &dropped, &provenance)?, store.bless_hashes(&hashed, &BTreeSet::new(), &provenance)?];
    let mut stdout = std::io::stdout().lock();
    let (mut blessed, mut dropped) = (0, 0);
    for writes in &writes {
        for case in &writes.blessed {
            writeln!(stdout, "blessed {case}")?;
        }
        for case in &writes.dropped {
            writeln!(stdout, "dropped {case}")?;
        }
        (blessed, dropped) = (blessed + writes.blessed.len(), dropped + writes.dropped.len());
    }
    writeln!(stdout, "{blessed} blessed, {dropped} dropped, {} unchanged", asked - blessed)?;
    Ok(ExitCode::SUCCESS)
}
