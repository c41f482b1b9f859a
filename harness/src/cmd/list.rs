use super::{Place, Select};
use anyhow::{Result, ensure};
use samebits_contract::table::CaseSpec;
use std::io::Write;
use std::process::ExitCode;

/// Lists the contract's cases
///
/// One line a case: name, slice, shape and parameters. `--json` prints one object a line.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    select: Select,

    #[command(flatten)]
    place: Place,

    /// One JSON object a line
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let contract = args.place.contract()?;
    let selection = args.select.selection(&contract)?;
    let cases: Vec<&CaseSpec> = contract.cases(selection.slice).filter(|case| selection.takes(case)).collect();
    ensure!(!cases.is_empty(), "the selection matches no case; `samebits list` without filters shows all");
    let mut stdout = std::io::stdout().lock();
    let width = cases.iter().map(|case| case.name.len()).max().unwrap_or(0);
    for case in cases {
        if args.json {
            let line = serde_json::json!({
                "name": case.name, "op": case.op, "dtype": case.dtype, "out": case.out, "fill": case.fill.name(),
                "slice": case.slice.name(), "shape": case.shape, "params": case.params,
            });
            writeln!(stdout, "{line}")?;
        } else {
            let shape = case.shape.iter().map(|(axis, extent)| format!("{axis}={extent}"));
            let params = case.params.iter().map(|(name, value)| format!("{name}={value}"));
            let facts: Vec<String> = shape.chain(params).collect();
            writeln!(stdout, "{:width$}  {:10}  {}", case.name, case.slice.name(), facts.join(" "))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
