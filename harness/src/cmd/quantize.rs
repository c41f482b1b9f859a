use super::counting;
use anyhow::{Context, Result, ensure};
use samebits_contract::atomic_write::{self, AtomicFile};
use samebits_models::{Quantizing, Scheme};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Writes a model's weights as integers with scales
///
/// int8 writes a folder for compressed-tensors (`int-quantized`), of any family that stores matrices by their rows: each
/// row of a matrix has a scale in bf16; output projection, embeddings, routers and vectors stay as they are. q8_0 and q4_k
/// write a GGUF file, of families that such files name, with metadata and tokenizer: every matrix is quantised whose rows
/// its blocks fill, with q4_k those that 256 does not divide as q8_0. What such a file cannot say of a model is refused by
/// name. How a number becomes an integer is fixed (docs/NUMERICS.md, section 9): the same folder gives the same bytes
/// everywhere. The result goes wherever `--model` goes.
#[derive(clap::Args)]
pub struct Args {
    /// Hugging Face folder: config.json, model.safetensors (or shards with an index), tokenizer files
    #[arg(long, value_name = "DIR")]
    model: PathBuf,

    /// What weights become
    #[arg(long, value_name = "int8|q8_0|q4_k")]
    to: Scheme,

    /// Folder to write (int8), which must be new or empty, or file (q8_0, q4_k: FILE.gguf)
    #[arg(long, value_name = "PATH")]
    out: PathBuf,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let out = &args.out;
    let is_folder = args.to == Scheme::Int8;
    if is_folder {
        let is_empty = !out.exists() || out.is_dir() && fs::read_dir(out)?.next().is_none();
        ensure!(is_empty, "--out {}: is there; give a folder that is new or empty", out.display());
    } else {
        let is_named = out.extension().is_some_and(|end| end == "gguf");
        ensure!(is_named, "--out {}: must end in .gguf, by which such files are known", out.display());
        atomic_write::check(out).with_context(|| format!("--out {}", out.display()))?;
    }
    let mut quantizing = Quantizing::of(&args.model, args.to)?;
    let files = std::mem::take(&mut quantizing.files);
    if is_folder {
        fs::create_dir_all(out).with_context(|| format!("--out {}", out.display()))?;
        tensors(&mut quantizing, &out.join("model.safetensors"))?;
        // config.json last: with it the folder is whole.
        for (name, bytes) in files.iter().rev() {
            let place = out.join(name);
            if let Some(folder) = place.parent() {
                fs::create_dir_all(folder)?;
            }
            atomic_write::write(&place, bytes).with_context(|| place.display().to_string())?;
        }
    } else {
        tensors(&mut quantizing, out)?;
    }
    quantizing.notes.iter().try_for_each(|note| writeln!(std::io::stderr(), "{note}"))?;
    Ok(ExitCode::SUCCESS)
}

/// Writes the tensors to a file, one at a time.
fn tensors(quantizing: &mut Quantizing, path: &Path) -> Result<()> {
    let at = || path.display().to_string();
    let mut file = AtomicFile::create(path).with_context(at)?;
    file.write_all(&quantizing.header).with_context(at)?;
    let bar = counting(quantizing.len());
    for number in 0..quantizing.len() {
        let mut bytes = quantizing.bytes(number)?;
        bytes.resize(bytes.len().next_multiple_of(quantizing.align), 0);
        file.write_all(&bytes).with_context(at)?;
        bar.inc(1);
    }
    bar.finish_and_clear();
    file.commit().with_context(at)
}
