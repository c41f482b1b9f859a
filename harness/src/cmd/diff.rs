use anyhow::{Result, ensure};
use samebits_reports::{Change, Kind, changes, read};
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// Compares two runs judgment by judgment: what turned red, what turned green, and what moved within its bound
///
/// The gate for an upgrade: `samebits diff OLD NEW` ends with 1 when a judgment is red that was not, or is no longer judged
/// that was: gone, or unsupported now. An error that is larger within its bound, or a share of correctly rounded elements that
/// is smaller, is told and changes the exit code with --strict alone. `samebits cmp A B` lays two implementations side by side
/// the same way.
#[derive(clap::Args)]
pub struct Args {
    /// The run folder before
    old: PathBuf,

    /// The run folder after
    new: PathBuf,

    /// How many changes to print of each kind
    #[arg(long, value_name = "N", default_value_t = 20)]
    show: usize,

    /// Whatever got worse counts, also within its bound
    #[arg(long)]
    strict: bool,

    /// One JSON object a line, all changes: name, kind (turned_red, turned_green or moved), worse, what
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let (old, new) = (read(&args.old)?, read(&args.new)?);
    for (dir, folder) in [(&args.old, &old), (&args.new, &new)] {
        ensure!(folder.run.complete, "{}: the run is not complete; resume it first", dir.join("run.json").display());
        ensure!(!folder.records.is_empty(), "{}: the run has no records", dir.join("records.jsonl").display());
    }
    let found = changes(&old, &new);
    ensure!(found.common > 0, "the two runs have no judgment in common");
    let mut stdout = std::io::stdout().lock();
    let stops = found.of(Kind::TurnedRed).next().is_some() || (args.strict && found.worse());
    if args.json {
        for Change { name, kind, worse, what, .. } in &found.changes {
            let line = serde_json::json!({ "name": name, "kind": kind.name(), "worse": worse, "what": what });
            writeln!(stdout, "{line}")?;
        }
        return Ok(ExitCode::from(u8::from(stops)));
    }
    for (what, was, is) in [
        ("contract", &old.run.contract, &new.run.contract),
        ("tool", &old.run.tool, &new.run.tool),
        ("row set", &old.run.rows, &new.run.rows),
    ] {
        if was != is {
            writeln!(stdout, "{what}: {was} -> {is}")?;
        }
    }
    let versions = |run: &samebits_contract::record::Run| {
        let all = run.plan.implementations.iter().map(|(name, version)| format!("{name} {version}"));
        all.collect::<Vec<_>>().join(", ")
    };
    let (was, is) = (versions(&old.run), versions(&new.run));
    if was != is {
        writeln!(stdout, "implementations: {was} -> {is}")?;
    }
    for kind in Kind::ALL {
        let all: Vec<_> = found.of(kind).collect();
        if all.is_empty() {
            continue;
        }
        writeln!(stdout, "\n{} ({})", title(kind), all.len())?;
        for change in all.iter().take(args.show) {
            let worse = if kind == Kind::Moved && change.worse { " (worse)" } else { "" };
            writeln!(stdout, "  {}: {}{worse}", change.name, change.what)?;
        }
        if all.len() > args.show {
            writeln!(stdout, "  and {} more (--show N)", all.len() - args.show)?;
        }
    }
    let [red, green, moved] = Kind::ALL.map(|kind| found.of(kind).count());
    let word = match (red, stops) {
        (0, false) => "NOT WORSE",
        (0, true) => "WORSE WITHIN BOUNDS",
        _ => "WORSE",
    };
    let common = found.common;
    writeln!(stdout, "\n{word}: {common} judgments in common, {red} turned red, {green} turned green, {moved} moved")?;
    Ok(ExitCode::from(u8::from(stops)))
}

fn title(kind: Kind) -> &'static str {
    match kind {
        Kind::TurnedRed => "turned red, or no longer judged",
        Kind::TurnedGreen => "turned green",
        Kind::Moved => "moved within its bound, or changed otherwise",
    }
}
