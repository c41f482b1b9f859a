use anyhow::Result;
use std::path::PathBuf;
use std::process::ExitCode;

/// Renders a run folder again and prints its table
///
/// Reads run.json and records.jsonl, also those of an interrupted run, and writes report.html, junit.xml and
/// summary.md beside them. The exit code is the one the run ended with: 0 or 1.
#[derive(clap::Args)]
pub struct Args {
    /// The run folder
    run: PathBuf,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    super::check::report(&args.run)
}
