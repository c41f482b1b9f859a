use super::Place;
use crate::run::Journal;
use crate::waivers::stale;
use anyhow::{Context, Result, bail, ensure};
use samebits_contract::record::{Record, Run};
use samebits_reports::{RunFolder, read};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

/// Joins the parts of one run, made with `--shard i/n`, into a whole one
///
/// All parts must be there, each once and complete, of one plan, contract and program; the records are then those that the
/// run without `--shard` would have written. Waivers that nothing needed are judged here.
#[derive(clap::Args)]
pub struct Args {
    /// The parts' run folders
    #[arg(required = true)]
    parts: Vec<PathBuf>,

    #[command(flatten)]
    place: Place,

    /// A list of further implementations that the parts were given; may be given again
    #[arg(long, value_name = "FILE")]
    impls: Vec<PathBuf>,

    /// The waivers that the parts were given; may be given again
    #[arg(long, value_name = "FILE")]
    waivers: Vec<PathBuf>,

    /// Folder for the joined run
    #[arg(long, value_name = "DIR", default_value = "samebits-report")]
    out: PathBuf,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let mut parts: BTreeMap<usize, RunFolder> = BTreeMap::new();
    let mut count = 0;
    for dir in &args.parts {
        ensure!(*dir != args.out, "--out {}: a part cannot be the place of the whole", dir.display());
        let folder = read(dir)?;
        let place = dir.join("run.json").display().to_string();
        ensure!(folder.run.complete && folder.torn == 0, "{place}: the run is not complete; resume it first");
        let two = folder.run.plan.shard.split_once('/').and_then(|(i, n)| Some((i.parse().ok()?, n.parse().ok()?)));
        let Some((part, of)): Option<(usize, usize)> = two else {
            bail!("{place}: the run is whole, no part of one; make parts with --shard i/n");
        };
        if let Some(first) = parts.values().next() {
            alike(&first.run, &folder.run).with_context(|| place.clone())?;
            ensure!(of == count, "{place}: it is part {part} of {of}, the first one of {count}");
        }
        count = of;
        ensure!(parts.insert(part, folder).is_none(), "{place}: part {part} is there twice");
    }
    if let Some(missing) = (1..=count).find(|part| !parts.contains_key(part)) {
        bail!("part {missing} of {count} is missing");
    }
    let first = parts.values().next().expect("a part is required").run.clone();
    let mut contract = args.place.contract()?;
    for list in &args.impls {
        contract.add_implementations(list)?;
    }
    for list in &args.waivers {
        contract.add_waivers(list)?;
    }
    ensure!(
        contract.digest() == first.contract,
        "the parts were judged by contract {}, this one is {}; give theirs with --contract",
        first.contract,
        contract.digest()
    );

    // Groups of shared inputs are dealt to the parts in turn, for one implementation after the other.
    let mut whole: Vec<Record> = Vec::new();
    for name in implementations(&parts) {
        let mut hands: Vec<_> = parts.values().map(|part| groups(&part.records, &name).into_iter()).collect();
        loop {
            let dealt = whole.len();
            hands.iter_mut().for_each(|hand| whole.extend(hand.next().into_iter().flatten().cloned()));
            if whole.len() == dealt {
                break;
            }
        }
    }
    let mut unneeded = Vec::new();
    // Parts that leave something out together do not know what that needs.
    for name in first.plan.implementations.keys().filter(|_| !first.plan.narrowed) {
        unneeded.extend(stale(&contract, &first.rows, name, &whole, Vec::new));
    }
    let seconds = parts.values().map(|part| part.run.seconds).sum();
    let mut run = Run { complete: false, sealed: None, arguments: crate::command::arguments(), ..first };
    run.plan.shard = String::new();
    run.plan.narrowed = false;
    run.planned = parts.values().map(|part| part.run.planned).sum();
    for (number, part) in &parts {
        for (fact, value) in
            part.run.machine.iter().filter(|(fact, value)| run.machine.get(*fact) != Some(value)).collect::<Vec<_>>()
        {
            run.machine.insert(format!("{fact} (part {number})"), value.clone());
        }
    }
    let mut journal = Journal::start(&args.out, run)?;
    journal.append(0, whole)?;
    journal.finish(seconds, &unneeded)?;
    super::check::report(&args.out)
}

/// Both are parts of one run.
fn alike(a: &Run, b: &Run) -> Result<()> {
    for (what, a, b) in [
        ("contract", &a.contract, &b.contract),
        ("row set", &a.rows, &b.rows),
        ("tool", &a.tool, &b.tool),
        ("plan", &a.plan.digest, &b.plan.digest),
    ] {
        ensure!(a == b, "its {what} is `{b}`, that of the first part `{a}`");
    }
    ensure!(
        a.plan.implementations == b.plan.implementations,
        "it judged {:?}, the first part {:?}",
        b.plan.implementations,
        a.plan.implementations
    );
    Ok(())
}

/// The implementations in the order they were judged.
fn implementations(parts: &BTreeMap<usize, RunFolder>) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for record in parts.values().flat_map(|part| &part.records) {
        if !names.contains(&record.implementation) {
            names.push(record.implementation.clone());
        }
    }
    names
}

/// The records of one implementation, cut where the inputs change: cases of a group differ in their output dtype alone.
fn groups<'a>(records: &'a [Record], name: &str) -> Vec<Vec<&'a Record>> {
    let of = |record: &Record| record.case.rsplit_once('-').map_or(String::new(), |(group, _)| group.to_string());
    let mut all: Vec<(String, Vec<&Record>)> = Vec::new();
    for record in records.iter().filter(|record| record.implementation == name) {
        match all.last_mut() {
            Some((group, records)) if *group == of(record) => records.push(record),
            _ => all.push((of(record), vec![record])),
        }
    }
    all.into_iter().map(|(_, records)| records).collect()
}
