use super::{Folder, Machine, On, Working, place, sampling, warn};
use anyhow::Result;
use samebits_models::{Precision, Sampling};
use std::io::Write;
use std::process::ExitCode;

/// Continues a prompt, greedily or as is asked for, and prints the completion alone
///
/// Makes tokens of the prompt as the folder's tokenizer does, takes the likeliest token at every step (the lowest index among
/// equals) unless a --temperature is given, and stops at eos, before a --stop, or after --max-tokens.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    folder: Folder,

    /// Text to continue
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: String,

    /// Most tokens to produce
    #[arg(long, value_name = "N")]
    max_tokens: usize,

    #[command(flatten)]
    sampling: sampling::Options,

    #[command(flatten)]
    on: On,

    #[command(flatten)]
    machine: Machine,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let cpu = args.machine.cpu(None)?;
    let device = args.on.open()?;
    let model = args.folder.load(Precision::Bf16, &cpu, None)?;
    let model = place(model, &cpu, device.as_ref())?;
    let working = Working::on(format!("at most {} tokens", args.max_tokens));
    let sampling = Sampling { max_tokens: args.max_tokens, ..args.sampling.sampling(0.0) };
    let generation = model.generate_by(&cpu, &args.prompt, &sampling)?;
    drop(working);
    if let Some(warning) = &generation.warning {
        warn(warning);
    }
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "{}", generation.text)?;
    stdout.flush()?;
    Ok(ExitCode::SUCCESS)
}
