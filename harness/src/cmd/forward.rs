use super::{Machine, Working};
use anyhow::{Context, Result, bail, ensure};
use safetensors::{Dtype, SafeTensors};
use samebits_contract::tensor::Tensor;
use samebits_contract::wire::File;
use samebits_harness::whole_file;
use samebits_models::{Grouping, Model, Precision, Schedule};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Runs a model over tokens and writes its logits
///
/// Reads `tokens`, i32 [B, T], from a safetensors file (other tensors in it are left alone) and writes a safetensors
/// file with `logits`, f32 [B, T, V]. The schedule, the batch, the instruction set and the threads move no bit of it.
#[derive(clap::Args)]
pub struct Args {
    /// Hugging Face folder: config.json, model.safetensors (or shards with an index)
    #[arg(long, value_name = "DIR")]
    model: PathBuf,

    /// Safetensors file with `tokens`, i32 [B, T]
    #[arg(long, value_name = "FILE")]
    tokens: PathBuf,

    /// Safetensors file to write; it appears whole or not at all
    #[arg(long, value_name = "FILE")]
    out: PathBuf,

    /// bf16: as the model is published; fp32: activations in fp32, the reference
    #[arg(long, default_value = "bf16", value_name = "bf16|fp32")]
    dtype: Precision,

    /// All tokens at once, one at a time with a KV cache, or N at a time
    #[arg(long, default_value = "prefill", value_name = "prefill|decode|chunk:N")]
    schedule: Schedule,

    /// The B sequences in one batch, or each alone
    #[arg(long, default_value = "together", value_name = "together|alone")]
    batch: Grouping,

    #[command(flatten)]
    machine: Machine,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let cpu = args.machine.cpu(None)?;
    check_place(&args.out)?;
    let Tokens { tokens, batch, len } = Tokens::read(&args.tokens)?;
    let working = Working::on(format!("loading {}", args.model.display()));
    let model = Model::load(&args.model, args.dtype, &cpu)?;
    drop(working);
    let working = Working::on(format!("{batch} sequences of {len} tokens"));
    let logits = model
        .forward(&cpu, &tokens, batch, len, args.schedule, args.batch)
        .with_context(|| args.tokens.display().to_string())?;
    drop(working);
    let vocab = model.config().vocab;
    ensure!(
        logits.len() == batch * len * vocab,
        "the model returned {} logits for [{batch}, {len}, {vocab}]",
        logits.len()
    );
    let logits = Tensor::fp32(&[batch, len, vocab], logits);
    let file = File { tensors: BTreeMap::from([("logits".into(), logits)]), metadata: BTreeMap::new() };
    whole_file::write(&args.out, &file.encode()).with_context(|| format!("--out {}", args.out.display()))?;
    Ok(ExitCode::SUCCESS)
}

/// Whether `out` can be written; asked before the work, so that a wrong path costs nothing.
fn check_place(out: &Path) -> Result<()> {
    let folder = match out.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    ensure!(folder.is_dir(), "--out {}: {} is not a folder; create it first", out.display(), folder.display());
    ensure!(!out.is_dir(), "--out {}: is a folder; name a file", out.display());
    ensure!(out.file_name().is_some(), "--out {}: name a file", out.display());
    Ok(())
}

/// `tokens` [B, T], row-major.
struct Tokens {
    tokens: Vec<i32>,
    batch: usize,
    len: usize,
}

impl Tokens {
    /// Reads `tokens` alone: the file may hold tensors of dtypes that are not the contract's.
    fn read(path: &Path) -> Result<Tokens> {
        let bytes = std::fs::read(path).with_context(|| path.display().to_string())?;
        Tokens::parse(&bytes).with_context(|| path.display().to_string())
    }

    fn parse(bytes: &[u8]) -> Result<Tokens> {
        let file = SafeTensors::deserialize(bytes).context("not a safetensors file")?;
        let Ok(tensor) = file.tensor("tokens") else {
            bail!("tensor `tokens`: missing; store the tokens as I32 [B, T] under that name");
        };
        ensure!(tensor.dtype() == Dtype::I32, "tensor `tokens`: dtype is {:?}; it must be I32", tensor.dtype());
        let &[batch, len] = tensor.shape() else {
            bail!("tensor `tokens`: shape {:?} must have the form [B, T]", tensor.shape());
        };
        ensure!(batch > 0 && len > 0, "tensor `tokens`: shape [{batch}, {len}] holds no tokens; give at least one");
        let word = |c: &[u8]| i32::from_le_bytes([c[0], c[1], c[2], c[3]]);
        Ok(Tokens { tokens: tensor.data().chunks_exact(4).map(word).collect(), batch, len })
    }
}
