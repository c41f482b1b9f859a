use super::Place;
use anyhow::Result;
use std::io::Write;
use std::process::ExitCode;

/// Prints the contract: dtypes, policies, and every bound with its provenance
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    place: Place,

    /// Only the SHA-256 over the contract's files
    #[arg(long)]
    digest: bool,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let contract = args.place.contract()?;
    let mut stdout = std::io::stdout().lock();
    if args.digest {
        writeln!(stdout, "{}", contract.digest())?;
    } else {
        writeln!(stdout, "{}", contract.to_string().trim_end())?;
    }
    Ok(ExitCode::SUCCESS)
}
