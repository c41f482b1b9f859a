use anyhow::Result;
use std::process::ExitCode;

/// A run of `check` that may take hours: it goes on where it was interrupted
///
/// As `check`. A report folder that holds an interrupted run of the same plan
/// is resumed; one of another plan is refused.
#[derive(clap::Args)]
#[group(id = "sweep")]
pub struct Args {
    #[command(flatten)]
    check: super::check::Args,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let mut check = args.check.clone();
    check.resume |= samebits_reports::interrupted(&check.out);
    super::check::judge(&check)?;
    super::check::report(&check.out)
}
