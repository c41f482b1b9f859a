use super::Place;
use anyhow::Result;
use samebits_contract::storage;
use std::io::Write;
use std::process::ExitCode;

/// Prints the contract: dtypes, policies, every bound with its provenance, and ways to store weights
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
        let ws2 = storage::ws2();
        writeln!(stdout, "\nstored weights, by contract {} {} over {}:", ws2.name, ws2.version, ws2.ops)?;
        for storage::Storage { format, elements, scales, admitted, reason } in &ws2.storage {
            writeln!(stdout, "  {format} ({admitted}): {elements}; scales: {scales}; {reason}")?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
