use super::{Folder, Machine, On, counting, place};
use anyhow::{Context, Result, bail, ensure};
use samebits_models::{AdapterChoice, Config, Grouping, Model, PageOrder, Precision, Run, SamplingRule, Schedule};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// Computes the log-probabilities of a rollout again, in one forward, and compares them bit for bit
///
/// Says that the difference and the KL divergence are exactly zero, or where they are not. Ends with 1 where a
/// log-probability differs.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    folder: Folder,

    /// What `samebits rollout` wrote
    #[arg(long, value_name = "FILE")]
    rollout: PathBuf,

    /// Another dtype than that of the rollout
    #[arg(long, value_name = "DTYPE")]
    dtype: Option<Precision>,

    /// How tokens are fed
    #[arg(long, default_value = "prefill", value_name = "prefill|decode|mixed|chunk:N|speculative:N|prefix:N")]
    schedule: Schedule,

    /// Texts that share a forward
    #[arg(long, default_value_t = 4, value_name = "N")]
    batch: usize,

    /// Positions in a page of the cache
    #[arg(long, default_value_t = samebits_models::PAGE_SIZE, value_name = "N")]
    page_size: usize,

    /// Which page is taken next
    #[arg(long, default_value = "ascending", value_name = "ascending|descending|scattered")]
    page_order: PageOrder,

    /// Print what was found as JSON
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    on: On,

    #[command(flatten)]
    machine: Machine,
}

/// The first line of a rollout.
#[derive(Deserialize)]
struct First {
    samebits: String,
    dtype: String,
    /// Rollouts of older versions have none.
    rope_length: Option<usize>,
    temperature: f64,
    sequences: usize,
    /// The adapters of the run by name, and the SHA-256 of each.
    #[serde(default)]
    adapters: BTreeMap<String, String>,
    /// The SHA-256 of the adapter that was added to the weights.
    merged: Option<String>,
    /// Settings of all texts that say no other, beside what is not read.
    #[serde(flatten)]
    others: Map<String, Value>,
}

/// Every other line.
#[derive(Deserialize)]
struct Text {
    sequence: usize,
    /// The name of its adapter.
    adapter: Option<String>,
    /// Rollouts of older versions have none: all texts have the temperature of the first line.
    sampling: Option<Map<String, Value>>,
    #[serde(skip)]
    rule: SamplingRule,
    prompt_tokens: Vec<i32>,
    tokens: Vec<i32>,
    logprobs: Vec<f32>,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let cpu = args.machine.cpu(None)?;
    let device = args.on.open()?;
    ensure!(args.batch > 0 && args.page_size > 0, "--batch and --page-size: give at least 1");
    let (first, texts) = read(args)?;
    let dtype = match args.dtype {
        Some(dtype) => dtype,
        None => first.dtype.parse().with_context(|| format!("{}:1: dtype", args.rollout.display()))?,
    };
    let model = args.folder.load(dtype, &cpu, first.rope_length.map(|length| (&*args.rollout, length)))?;
    // Of one that depends on it the length must be known.
    let depends = |config: &Config| config.trained_length().is_some();
    if first.rope_length.is_none() && depends(model.config()) {
        bail!("{}:1: has no `rope_length`, which this model's log-probabilities depend on", args.rollout.display());
    }
    check_adapters(args, &first, &model)?;
    let model = place(model, &cpu, device.as_ref())?;
    let bar = counting(texts.len());
    let mut found = Found::default();
    for group in texts.chunks(args.batch) {
        let asked: Vec<_> = group.iter().map(|text| (&text.prompt_tokens[..], &text.tokens[..], &text.rule)).collect();
        let choice = |text: &Text| text.adapter.clone().map_or(AdapterChoice::Plain, AdapterChoice::Named);
        let adapters: Vec<AdapterChoice> = group.iter().map(choice).collect();
        let run = Run {
            adapters: &adapters,
            schedule: args.schedule,
            grouping: Grouping::Together,
            page_size: args.page_size,
            page_order: args.page_order,
            ..Run::default()
        };
        let scores = model.score(&cpu, &asked, run);
        for (text, scores) in group.iter().zip(scores.with_context(|| args.rollout.display().to_string())?) {
            found.compare(text, &scores);
        }
        bar.inc(group.len() as u64);
    }
    bar.finish_and_clear();
    let text = if args.json { found.json(texts.len()).to_string() } else { found.text(texts.len()) };
    writeln!(std::io::stdout().lock(), "{text}")?;
    Ok(ExitCode::from(u8::from(found.differ > 0)))
}

/// Refuses adapters that are not those of the rollout: log-probabilities of two are not compared.
fn check_adapters(args: &Args, first: &First, model: &Model) -> Result<()> {
    let (path, given) = (args.rollout.display(), model.adapters().collect::<BTreeMap<_, _>>());
    let or_none = |sha256: Option<&str>| sha256.map_or("none".into(), |sha256| format!("the one of SHA-256 {sha256}"));
    let (made, here) = (first.merged.as_deref(), model.merged());
    ensure!(made == here, "--merge-adapter: is {}; {path} was made with {}", or_none(here), or_none(made));
    for (name, made) in &first.adapters {
        match given.get(&name[..]) {
            None => bail!("{path}:1: texts were made with the adapter `{name}`; give it with --adapter {name}=DIR"),
            Some(sha256) if sha256 != made => {
                bail!(
                    "--adapter {name}: its SHA-256 is {sha256}; {path} was made with {made}, and two are not compared"
                )
            }
            Some(_) => {}
        }
    }
    if let Some(name) = given.keys().find(|name| !first.adapters.contains_key(**name)) {
        bail!("--adapter {name}: {path} was made without an adapter of this name; leave it out");
    }
    Ok(())
}

/// The texts of a rollout that have tokens.
fn read(args: &Args) -> Result<(First, Vec<Text>)> {
    let path = args.rollout.display();
    let file = std::fs::read_to_string(&args.rollout).with_context(|| format!("--rollout {path}"))?;
    let mut lines = file.lines().enumerate();
    let (_, first) = lines.next().with_context(|| format!("{path}: is empty"))?;
    let first: First =
        serde_json::from_str(first).with_context(|| format!("{path}:1: not the first line of a rollout"))?;
    ensure!(first.samebits == "rollout", "{path}:1: is a {}, not a rollout", first.samebits);
    let mut texts: Vec<Text> = Vec::new();
    for (i, line) in lines {
        let mut text: Text = serde_json::from_str(line).with_context(|| format!("{path}:{}: not a text", i + 1))?;
        let (tokens, logprobs) = (text.tokens.len(), text.logprobs.len());
        ensure!(tokens == logprobs, "{path}:{}: {tokens} tokens have {logprobs} log-probabilities", i + 1);
        ensure!(!text.prompt_tokens.is_empty(), "{path}:{}: the prompt is empty", i + 1);
        text.rule = rule(&first, text.sampling.as_ref()).with_context(|| format!("{path}:{}", i + 1))?;
        texts.push(text);
    }
    ensure!(texts.len() == first.sequences, "{path}: holds {} of {} texts; it was cut", texts.len(), first.sequences);
    texts.retain(|text| !text.tokens.is_empty());
    ensure!(!texts.is_empty(), "{path}: holds no sampled token; nothing can be compared");
    Ok((first, texts))
}

/// How a text says that it was sampled.
fn rule(first: &First, sampling: Option<&Map<String, Value>>) -> Result<SamplingRule> {
    let mut rule = SamplingRule::at(first.temperature);
    rule.read(&first.others)?;
    if let Some(fields) = sampling {
        rule.read(fields)?;
        if let Some(name) = fields.keys().find(|name| !SamplingRule::FIELDS.contains(&name.as_str())) {
            bail!("sampling: `{name}` is no setting of this version; use {}", SamplingRule::FIELDS.join(", "));
        }
    }
    Ok(rule)
}

/// What the comparison found.
#[derive(Default)]
struct Found {
    tokens: usize,
    differ: usize,
    max: f64,
    sum: f64,
    kl: f64,
    clipped: usize,
    /// Sequence, position, token and both values of the first that differs.
    first: Option<(usize, usize, i32, f32, f32)>,
}

impl Found {
    fn compare(&mut self, text: &Text, scores: &[f32]) {
        for (i, (&a, &b)) in text.logprobs.iter().zip(scores).enumerate() {
            self.tokens += 1;
            if a.to_bits() == b.to_bits() {
                continue;
            }
            self.differ += 1;
            let position = text.prompt_tokens.len() + i;
            self.first.get_or_insert((text.sequence, position, text.tokens[i], a, b));
            let d = f64::from(b) - f64::from(a);
            self.max = self.max.max(d.abs());
            self.sum += d.abs();
            self.kl += d.exp_m1() - d;
            self.clipped += usize::from(!(0.8..=1.2).contains(&d.exp()));
        }
    }

    /// Mean |dlogp|, approximate KL, clip fraction.
    fn means(&self) -> [f64; 3] {
        [self.sum, self.kl, self.clipped as f64].map(|sum| sum / self.tokens as f64)
    }

    fn text(&self, texts: usize) -> String {
        let Found { tokens, differ, max, .. } = self;
        let Some((sequence, position, token, a, b)) = self.first else {
            return format!(
                "0 of {tokens} log-probabilities of {texts} texts differ\n  the difference is exactly zero, and so is the KL divergence"
            );
        };
        let [mean, kl, clip] = self.means();
        [
            format!("{differ} of {tokens} log-probabilities of {texts} texts differ"),
            format!("  max |dlogp| {max:.3e}, mean |dlogp| {mean:.3e}, approx KL {kl:.3e}, clip fraction {clip}"),
            format!("  first: sequence {sequence}, position {position}, token {token}: {a} in the rollout, {b} now"),
        ]
        .join("\n")
    }

    fn json(&self, texts: usize) -> serde_json::Value {
        let [mean, kl, clip] = self.means();
        let first = self.first.map(|(sequence, position, token, a, b)| {
            serde_json::json!({"sequence": sequence, "position": position, "token": token, "rollout": a, "score": b})
        });
        serde_json::json!({
            "texts": texts, "tokens": self.tokens, "differ": self.differ, "max_dlogp": self.max, "mean_dlogp": mean,
            "approx_kl": kl, "clip_fraction": clip, "first": first,
        })
    }
}
