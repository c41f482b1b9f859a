use super::{Folder, Machine, On, counting, place, sampling, warn};
use crate::experts::Form;
use anyhow::{Context, Result, bail, ensure};
use samebits_contract::atomic_write;
use samebits_models::{AdapterChoice, Encoded, Model, ModelError, PageOrder, Precision, Sample, Sampling, Serving};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Samples texts with a paged cache and continuous batches, and writes their tokens and log-probabilities
///
/// A sample does not depend on the batch it was made in: its random numbers belong to the seed, its number and its position.
/// Log-probabilities are those of the distribution that was sampled, behind penalties and truncation; `samebits score` computes
/// them again.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    folder: Folder,

    /// Prompts, one in each line. FILE.txt: texts, whatever they look like. FILE.jsonl: {"prompt": "a text"}, {"tokens": [1, 2]}, or
    /// {"messages": [{"role": "user", "content": ".."}]} for the folder's chat template; beside them a line may have settings of
    /// its own: temperature, top_k, top_p, min_p, repetition_penalty, frequency_penalty, presence_penalty, logit_bias
    /// ({"17": -2.5}), banned_tokens, allowed_tokens, stop, stop_token_ids, experts; and adapter, the name of an --adapter, null for none
    #[arg(long, value_name = "FILE")]
    prompts: PathBuf,

    /// File to write, one JSON object in each line; it appears whole or not at all [default: stdout]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,

    /// Texts for each prompt
    #[arg(long, default_value_t = 1, value_name = "N")]
    samples: usize,

    /// Most tokens of a text
    #[arg(long, default_value_t = 64, value_name = "N")]
    max_tokens: usize,

    #[command(flatten)]
    sampling: sampling::Options,

    /// Go on behind an eos token
    #[arg(long)]
    ignore_eos: bool,

    /// Also record the experts that each token goes through, for `samebits score`
    #[arg(long)]
    experts: bool,

    /// bf16, fp16 or fp32
    #[arg(long, default_value = "bf16", value_name = "DTYPE")]
    dtype: Precision,

    /// Most texts in a step
    #[arg(long, default_value_t = 16, value_name = "N")]
    batch: usize,

    /// Most tokens of a prompt in a step
    #[arg(long, default_value_t = 256, value_name = "N")]
    chunk: usize,

    /// Positions in a page of the cache
    #[arg(long, default_value_t = samebits_models::PAGE_SIZE, value_name = "N")]
    page_size: usize,

    /// Which page is taken next
    #[arg(long, default_value = "ascending", value_name = "ascending|descending|scattered")]
    page_order: PageOrder,

    /// Compute a prompt again for each of its samples
    #[arg(long)]
    no_prefix_cache: bool,

    /// Say on stderr how long prompts and sampled tokens took
    #[arg(long)]
    times: bool,

    #[command(flatten)]
    on: On,

    #[command(flatten)]
    machine: Machine,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let cpu = args.machine.cpu(None)?;
    let device = args.on.open()?;
    if let Some(out) = &args.out {
        atomic_write::check(out).with_context(|| format!("--out {}", out.display()))?;
    }
    let model = args.folder.load(args.dtype, &cpu, None)?;
    let model = place(model, &cpu, device.as_ref())?;
    let sampling = Sampling {
        samples: args.samples,
        max_tokens: args.max_tokens,
        ignore_eos: args.ignore_eos,
        experts: args.experts,
        ..args.sampling.sampling(1.0)
    };
    sampling.check(model.config())?;
    let prompts = prompts(&model, &args.prompts, &sampling)?;
    let serving = Serving {
        batch: args.batch,
        chunk: args.chunk,
        page_size: args.page_size,
        page_order: args.page_order,
        share_prompts: !args.no_prefix_cache,
    };
    let bar = counting(prompts.len().saturating_mul(args.samples));
    let mut samples: Vec<Sample> = Vec::new();
    let timing = model.rollout_each(&cpu, &prompts, &serving, |sample| {
        bar.inc(1);
        samples.push(sample);
        Ok(())
    })?;
    bar.finish_and_clear();
    if args.times {
        let rate = |tokens: usize, seconds: f64| {
            format!("{tokens} in {seconds:.3} s ({:.1}/s)", tokens as f64 / seconds.max(1e-9))
        };
        eprintln!("prompt tokens: {}", rate(timing.prompt_tokens, timing.prompt_seconds));
        eprintln!("sampled tokens: {}", rate(timing.sampled_tokens, timing.sampled_seconds));
    }
    samples.sort_by_key(|sample| sample.sequence);

    let adapters: BTreeMap<&str, &str> = model.adapters().collect();
    let mut first = json!({
        "samebits": "rollout", "version": env!("CARGO_PKG_VERSION"), "dtype": args.dtype.name(),
        "rope_length": model.config().longest(), "temperature": sampling.rule.temperature, "seed": sampling.seed, "samples": args.samples, "sequences": samples.len(),
    });
    if !adapters.is_empty() {
        first["adapters"] = json!(adapters);
    }
    if let Some(sha256) = model.merged() {
        first["merged"] = json!(sha256);
    }
    let form = Form::of(model.config()).filter(|_| samples.iter().any(|sample| sample.experts.is_some()));
    if let Some(form) = &form {
        first["routed_experts"] = json!(form);
    }
    let mut text = format!("{first}\n");
    for sample in &samples {
        let (prompt, sampling) = &prompts[sample.prompt];
        let mut line = json!({
            "sequence": sample.sequence, "prompt": sample.prompt, "limit": sample.limit, "sampling": sampling.rule.json(),
            "prompt_tokens": prompt, "tokens": sample.tokens, "logprobs": sample.logprobs, "stop": sample.stop.name(),
        });
        if !adapters.is_empty() {
            line["adapter"] = json!(adapter_of(&model, sampling)?);
        }
        if let (Some(form), Some(experts)) = (&form, &sample.experts) {
            line["routed_experts"] = json!(form.encode(experts)?);
        }
        text += &format!("{line}\n");
    }
    match &args.out {
        Some(out) => atomic_write::write(out, text.as_bytes()).with_context(|| format!("--out {}", out.display()))?,
        None => std::io::stdout().lock().write_all(text.as_bytes())?,
    }
    Ok(ExitCode::SUCCESS)
}

/// The name of the adapter of a prompt, where it has one.
fn adapter_of<'m>(model: &'m Model, sampling: &Sampling) -> Result<Option<&'m str>, ModelError> {
    model.adapter(sampling.adapters.first().unwrap_or(&AdapterChoice::Only))
}

/// A line of a .jsonl file; what else it says is the user's.
#[derive(Deserialize)]
struct Line {
    prompt: Option<Value>,
    tokens: Option<Vec<i32>>,
    messages: Option<Value>,
    #[serde(flatten)]
    settings: Map<String, Value>,
}

/// The prompts of a file, and how each is sampled: as `sampling`, but for what its line says. All settings that are wrong are
/// named in one run.
fn prompts(model: &Model, path: &Path, sampling: &Sampling) -> Result<Vec<(Vec<i32>, Sampling)>> {
    let of = || format!("--prompts {}", path.display());
    let is_jsonl = match path.extension().and_then(|name| name.to_str()) {
        Some("txt") => false,
        Some("jsonl") => true,
        _ => bail!("{}: call it .txt, a text in each line, or .jsonl, an object in each line", of()),
    };
    let text = std::fs::read_to_string(path).with_context(of)?;
    ensure!(!text.starts_with('\u{feff}'), "{}: begins with a byte order mark; save it without", of());
    let (mut prompts, mut complaints) = (Vec::new(), Vec::new());
    for (i, line) in text.lines().enumerate() {
        let at = || format!("{}:{}", path.display(), i + 1);
        ensure!(!line.trim().is_empty(), "{}: is blank; prompts are numbered by their lines, so leave it out", at());
        let mut sampling = sampling.clone();
        let found = match is_jsonl {
            false => model.encode(line).map_err(Into::into),
            true => of_line(model, line, |settings| {
                let read = sampling.read(settings).and_then(|()| sampling.check(model.config()));
                let read = read.and_then(|()| adapter_of(model, &sampling).map(drop));
                complaints.extend(read.err().map(|wrong| format!("{}: {wrong}", at())));
            }),
        };
        let Encoded { tokens, warning } = found.with_context(at)?;
        if let Some(warning) = warning {
            warn(&format!("{}: {warning}", at()));
        }
        prompts.push((tokens, sampling));
    }
    ensure!(complaints.is_empty(), "{}", complaints.join("; "));
    ensure!(!prompts.is_empty(), "{}: holds no prompt; write one in each line", of());
    Ok(prompts)
}

/// The tokens of a line of a .jsonl file; `take` gets what else it says.
fn of_line(model: &Model, line: &str, take: impl FnOnce(&Map<String, Value>)) -> Result<Encoded> {
    let forms =
        r#"give one of {"prompt": "a text"}, {"tokens": [1, 2]} and {"messages": [{"role": .., "content": ..}]}"#;
    let Line { prompt, tokens, messages, settings } =
        serde_json::from_str(line).with_context(|| format!("not an object; {forms}"))?;
    take(&settings);
    Ok(match (prompt, tokens, messages) {
        (Some(Value::String(text)), None, None) => model.encode(&text)?,
        // As data sets of conversations have it.
        (Some(messages @ Value::Array(_)), None, None) => model.encode_chat(&messages)?,
        (None, Some(tokens), None) => Encoded { tokens, warning: None },
        (None, None, Some(messages)) => model.encode_chat(&messages)?,
        _ => bail!("{forms}"),
    })
}
