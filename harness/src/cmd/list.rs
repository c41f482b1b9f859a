use super::{Place, Select};
use anyhow::{Result, ensure};
use samebits_contract::table::CaseSpec;
use std::io::Write;
use std::process::ExitCode;

/// Lists the contract's cases
///
/// One line a case: name, slice, shape and parameters; those of a vector stand in its file. `--json` prints one object a
/// line, of a vector with its inputs.
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
    let checkpoints = args.place.checkpoints();
    for case in cases {
        // What a vector asks stands in its file; without it the line says what the contract knows.
        let vector = case.vector.as_ref().and_then(|_| checkpoints.recordings().fill(case, 0).ok());
        let params = vector.as_ref().map_or(&case.params, |vector| &vector.params);
        if args.json {
            let mut line = serde_json::json!({
                "name": case.name, "op": case.op, "dtype": case.dtype, "out": case.out, "fill": case.fill.name(),
                "slice": case.slice.name(), "shape": case.shape, "params": params,
            });
            if let Some(vector) = &vector {
                line["inputs"] = vector.inputs.keys().cloned().collect();
            }
            writeln!(stdout, "{line}")?;
        } else {
            let shape = case.shape.iter().map(|(axis, extent)| format!("{axis}={extent}"));
            let params = params.iter().map(|(name, value)| format!("{name}={value}"));
            let facts: Vec<String> = shape.chain(params).collect();
            writeln!(stdout, "{:width$}  {:10}  {}", case.name, case.slice.name(), facts.join(" "))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
