use anyhow::{Result, ensure};
use samebits_reports::{Change, changes, read};
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// Compares two runs judgment by judgment: what changed, and what got worse
///
/// The gate for an upgrade: `samebits diff OLD NEW` ends with 1 when a judgment turned red, is gone, has a larger error or
/// fewer correctly rounded elements than before. `samebits cmp A B` lays two implementations side by side the same way.
#[derive(clap::Args)]
pub struct Args {
    /// The run folder before
    old: PathBuf,

    /// The run folder after
    new: PathBuf,

    /// How many changes to print of each kind
    #[arg(long, value_name = "N", default_value_t = 20)]
    show: usize,

    /// One JSON object a line, all changes
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
    if args.json {
        for Change { name, worse, what, .. } in &found.changes {
            writeln!(stdout, "{}", serde_json::json!({ "name": name, "worse": worse, "what": what }))?;
        }
        return Ok(ExitCode::from(u8::from(found.worse())));
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
    for (title, worse) in [("got worse", true), ("changed otherwise", false)] {
        let kind: Vec<_> = found.changes.iter().filter(|change| change.worse == worse).collect();
        if kind.is_empty() {
            continue;
        }
        writeln!(stdout, "\n{title} ({})", kind.len())?;
        for change in kind.iter().take(args.show) {
            writeln!(stdout, "  {}: {}", change.name, change.what)?;
        }
        if kind.len() > args.show {
            writeln!(stdout, "  and {} more (--show N)", kind.len() - args.show)?;
        }
    }
    let worse = found.changes.iter().filter(|change| change.worse).count();
    let (common, changed) = (found.common, found.changes.len());
    let colour = if worse > 0 { "WORSE" } else { "NOT WORSE" };
    writeln!(stdout, "\n{colour}: {common} judgments in common, {changed} changed, {worse} for the worse")?;
    Ok(ExitCode::from(u8::from(worse > 0)))
}
