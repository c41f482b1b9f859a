use super::{Folder, Machine, On, Working, place, warn};
use anyhow::Result;
use samebits_models::Precision;
use std::io::Write;
use std::process::ExitCode;

/// Continues a prompt, greedily, and prints the completion alone
///
/// Makes tokens of the prompt as the folder's tokenizer does, takes the likeliest token at every step (the lowest index among
/// equals), and stops at eos or after --max-tokens.
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
    let generation = model.generate(&cpu, &args.prompt, args.max_tokens)?;
    drop(working);
    if let Some(warning) = &generation.warning {
        warn(warning);
    }
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "{}", generation.text)?;
    stdout.flush()?;
    Ok(ExitCode::SUCCESS)
}
