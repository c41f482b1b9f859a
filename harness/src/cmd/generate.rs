use super::{Loading, Machine, On, Working, place, warn};
use anyhow::Result;
use samebits_models::{Model, Precision};
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// Continues a prompt, greedily, and prints the completion alone
///
/// Puts the model's bos token before the prompt where it has one, takes the likeliest token at every step (the lowest
/// index among equals), and stops at eos or after --max-tokens.
#[derive(clap::Args)]
pub struct Args {
    /// Hugging Face folder: config.json, tokenizer.json, model.safetensors (or shards with an index)
    #[arg(long, value_name = "DIR")]
    model: PathBuf,

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
    let loading = Loading::of(&args.model);
    let model = Model::load_with(&args.model, Precision::Bf16, &cpu, |done, total| loading.at(done, total))?;
    drop(loading);
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
