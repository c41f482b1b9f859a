use super::{Folder, Machine, Nonfinite, counting, or_allow};
use crate::dump::Writer;
use crate::examples::{Examples, LossOptions, refusal};
use anyhow::{Context, Result, ensure};
use samebits_contract::atomic_write;
use samebits_contract::tensor::Tensor;
use samebits_contract::wire::File;
use samebits_models::{Flips, GradientRun, Padding, Precision};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

/// Computes a model's loss on some sequences and the gradient of every parameter
///
/// Reads `tokens`, i32 [B, T], from a safetensors file, `attention_mask` and the metadata's `rope_length` as forward does.
/// Log-probabilities are those of how texts were sampled, as the metadata says: at a `temperature`, in a `dtype`, and by settings
/// of top-k, penalties and so on in `sampling`, one object for all or a list, behind prompts of `prompt_len`, i32 [B], tokens (or up
/// to the first that counts). A policy at another temperature or of another dtype is refused. With `mask`, i32 [B, T],
/// only the log-probabilities of tokens at a 1 count, each given the tokens before it; without it all but those of
/// first tokens do. With `routed_experts`, integers [B, T, layers, chosen] that a rollout recorded, the choices in which routers
/// differ from them are counted (`flips`, i32 [B, T]), and with `replay` = `experts` in the metadata those experts are chosen, and
/// the router's gradient goes through them. With `sampling_mask_counts`, i32 [B, T], and `sampling_mask_token_ids`, i32, one list behind
/// the other, log-probabilities are those among the tokens that each token was drawn from, which a record says. Of several adapters
/// the metadata's `adapter` says which each sequence has: a name, or a JSON list of a name or null for each. Writes a safetensors file
/// with the f32 gradient of every parameter under its name in the folder (with --adapter of the matrices of the adapter alone, under
/// theirs; of several each behind `NAME/`),
/// `loss` [1], `per_sequence` [B] and `logprob` [B, T]. Only the sequences, their order, the loss and --groups decide
/// its bits: micro-batches, padding, packing, ranks, recomputation, the instruction set, threads and the budget do not.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    folder: Folder,

    /// Safetensors file with `tokens`, i32 [B, T]
    #[arg(long, value_name = "FILE")]
    tokens: PathBuf,

    /// Safetensors file to write; it appears whole or not at all
    #[arg(long, value_name = "FILE")]
    out: PathBuf,

    #[command(flatten)]
    loss: LossOptions,

    /// bf16: weights and what products read in bf16, as models are trained; fp32: nothing below fp32, the reference
    #[arg(long, default_value = "bf16", value_name = "bf16|fp32")]
    dtype: Precision,

    #[command(flatten)]
    how: How,

    #[command(flatten)]
    nonfinite: Nonfinite,

    /// Also write everything that was computed on the way, forward and back, for `samebits trace`; it appears whole or not
    /// at all
    #[arg(long, value_name = "FILE")]
    dump: Option<PathBuf>,

    /// Most bytes of the dump
    #[arg(long, default_value_t = 8 << 30, value_name = "BYTES")]
    cap: u64,

    #[command(flatten)]
    machine: Machine,
}

/// How gradients are made: but for the groups, nothing here moves a bit.
#[derive(clap::Args, Clone)]
pub struct How {
    /// Sequences that share a forward and a reverse pass
    #[arg(long, default_value_t = 1, value_name = "N")]
    micro_batch: usize,

    /// Rows of padding for each sequence, their embeddings NaN
    #[arg(long, default_value = "none", value_name = "left:N|right:N|none")]
    pad: Padding,

    /// Let the sequences of a micro-batch stand one behind the other, padded once
    #[arg(long)]
    pack: bool,

    /// How many groups the sequences are dealt to, a power of two: each has sums of its own, joined as a tree
    #[arg(long, default_value_t = 1, value_name = "G")]
    pub groups: usize,

    /// How many ranks the groups are dealt to; they run one after the other
    #[arg(long, default_value_t = 1, value_name = "R")]
    ranks: usize,

    /// Run each layer again for its reverse pass instead of keeping what it computed
    #[arg(long)]
    recompute: bool,

    /// Most bytes of an op's workspace [default: no limit]
    #[arg(long, value_name = "BYTES")]
    pub budget: Option<usize>,
}

impl How {
    /// The same for the models.
    pub fn run(&self) -> GradientRun {
        let &How { micro_batch, pad: padding, pack, ranks, recompute, .. } = self;
        GradientRun { micro_batch, padding, pack, ranks, recompute, ..GradientRun::default() }
    }
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let cpu = args.machine.cpu(args.how.budget)?;
    let out = || format!("--out {}", args.out.display());
    // Before the work, so that a wrong path costs nothing.
    atomic_write::check(&args.out).with_context(out)?;
    if let Some(dump) = &args.dump {
        atomic_write::check(dump).with_context(|| format!("--dump {}", dump.display()))?;
    }
    ensure!(args.dtype != Precision::Fp16, "--dtype fp16: gradients are made in bf16 or fp32");
    let examples = Examples::read(&args.tokens, args.loss, args.dtype)?;
    let recorded = examples.tokens.rope_length.map(|length| (&*args.tokens, length));
    let model = args.folder.load(args.dtype, &cpu, recorded)?;
    examples.tokens.check(model.config(), &args.tokens)?;
    let [batch, len] = examples.tokens.shape();
    let mut writer = match &args.dump {
        None => None,
        Some(path) => Some(Writer::create(path, args.cap).with_context(|| format!("--dump {}", path.display()))?),
    };
    let probe = writer.as_mut().map(|writer| writer as _);
    let bar = counting(batch);
    let sequences = examples.all.batch(args.how.groups);
    let run = GradientRun { allow_nonfinite: args.nonfinite.allow_nonfinite, ..args.how.run() };
    let found = model
        .gradients(&cpu, &sequences, &run, probe, |done| bar.set_position(done as u64))
        .map_err(|e| refusal(examples.tokens.in_file(or_allow(e)), &args.tokens))?;
    bar.finish_and_clear();
    if let (Some(writer), Some(path)) = (writer, &args.dump) {
        writer.finish().with_context(|| format!("--dump {}", path.display()))?;
    }
    let mut tensors = BTreeMap::new();
    for (name, gradient) in found.parameters {
        let shape = gradient.shape().to_vec();
        tensors.insert(name, Tensor::fp32(&shape, gradient.into_vec().expect("gradients are f32")));
    }
    let logprob = examples.tokens.spread(&found.logprob.concat(), 1);
    tensors.insert("loss".into(), Tensor::fp32(&[1], vec![found.loss]));
    tensors.insert("per_sequence".into(), Tensor::fp32(&[batch], found.per_sequence));
    tensors.insert("logprob".into(), Tensor::fp32(&[batch, len], logprob));
    if found.flips.iter().any(Option::is_some) {
        // Of the last token of a sequence, which nothing follows, nothing was recorded.
        let of_sequence = |flips: &Option<Flips>| {
            let of_token = |choices: &[Option<bool>]| choices.iter().filter(|flip| **flip == Some(true)).count() as f32;
            flips.iter().flat_map(Flips::tokens).map(of_token).chain([0.0]).collect::<Vec<_>>()
        };
        let each: Vec<f32> = found.flips.iter().flat_map(of_sequence).collect();
        let flips = examples.tokens.spread(&each, 1).into_iter().map(|count| count as i32).collect();
        tensors.insert("flips".into(), Tensor::i32(&[batch, len], flips));
        let [flipped, choices] = Flips::sum(found.flips.iter().flatten());
        eprintln!("{flipped} of {choices} choices of experts are others than recorded");
    }
    let mut metadata = BTreeMap::from([
        ("rope_length".into(), model.config().longest().to_string()),
        ("temperature".into(), examples.temperature.to_string()),
        ("dtype".into(), args.dtype.name().into()),
    ]);
    metadata.extend(examples.all.sampling().map(|sampling| ("sampling".into(), sampling)));
    atomic_write::write(&args.out, &File { tensors, metadata }.encode()).with_context(out)?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        how: How,
    }

    /// What no bit of the file shows: that it is made as the options say.
    #[test]
    fn options_reach_the_run() {
        let run = |words: &[&str]| {
            let line = Line::try_parse_from([&["grad"], words].concat()).unwrap();
            let GradientRun { micro_batch, padding, pack, ranks, recompute, .. } = line.how.run();
            (micro_batch, padding, pack, ranks, recompute)
        };
        assert_eq!(run(&[]), (1, Padding::None, false, 1, false));
        assert_eq!(run(&["--micro-batch", "3", "--pad", "left:2"]), (3, Padding::Left(2), false, 1, false));
        assert_eq!(run(&["--pack", "--pad", "right:4"]), (1, Padding::Right(4), true, 1, false));
        assert_eq!(run(&["--recompute", "--ranks", "2"]), (1, Padding::None, false, 2, true));
    }
}
