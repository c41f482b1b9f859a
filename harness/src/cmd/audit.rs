use super::Loading;
use anyhow::Result;
use samebits_models::Audit;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// Looks through the weights of a model folder
///
/// Says what is missing, unused, of another shape or dtype than config.json asks for, stored twice, not finite, constant or
/// odd, and which dtypes there are; with --tensors each tensor with its range and SHA-256. Ends with 1 where something is
/// wrong: whatever the other verbs refuse in weights is.
#[derive(clap::Args)]
pub struct Args {
    /// Hugging Face folder: config.json, model.safetensors (or shards with an index)
    model: PathBuf,

    /// List every tensor
    #[arg(long)]
    tensors: bool,

    /// Count what is passed by as wrong: fields that no code reads, or that ask for nothing
    #[arg(long)]
    strict: bool,

    /// Print all of it as JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let loading = Loading::of(&args.model);
    let audit = Audit::of(&args.model, |done, total| loading.at(done, total))?;
    drop(loading);
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&audit)?)?;
    } else {
        let dtypes: Vec<String> = audit.dtypes.iter().map(|(dtype, count)| format!("{count} {dtype}")).collect();
        let head = if audit.tied { "output projection tied" } else { "output projection of its own" };
        writeln!(
            out,
            "{}: {} parameters, {} bytes in {} tensors ({}), {head}",
            audit.family,
            audit.parameters,
            audit.bytes,
            audit.tensors.len(),
            dtypes.join(", ")
        )?;
        if args.tensors {
            for t in &audit.tensors {
                let range = t.range.map_or("nothing finite".into(), |(low, high)| format!("{low:.4e} to {high:.4e}"));
                writeln!(
                    out,
                    "  {} {} {:?} {range}, rms {:.3e}, {}",
                    t.name.escape_debug(),
                    t.dtype,
                    t.shape,
                    t.rms,
                    t.sha256
                )?;
            }
        }
        for finding in &audit.findings {
            let kind = if finding.wrong { "wrong" } else { "odd" };
            writeln!(out, "{kind}: {} {}", finding.tensor, finding.what)?;
        }
        audit.passed.iter().try_for_each(|line| writeln!(out, "passed by: {line}"))?;
        let wrong = audit.findings.iter().filter(|finding| finding.wrong).count();
        writeln!(out, "{wrong} wrong, {} odd", audit.findings.len() - wrong)?;
    }
    Ok(ExitCode::from(u8::from(!audit.holds() || args.strict && !audit.passed.is_empty())))
}
