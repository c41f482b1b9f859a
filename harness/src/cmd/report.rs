use anyhow::Result;
use std::io::Write;
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

    /// Also prints the first red records as annotations for a GitHub workflow
    #[arg(long)]
    annotate: bool,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let code = super::check::report(&args.run)?;
    if args.annotate {
        let mut stdout = std::io::stdout().lock();
        for line in samebits_reports::annotations(&samebits_reports::read(&args.run)?, 10) {
            writeln!(stdout, "{line}")?;
        }
    }
    Ok(code)
}
