use super::{Folder, Machine, On, counting, place};
use crate::experts::Form;
use crate::mismatch::{Found, check_gates};
use anyhow::{Context, Result, anyhow, bail, ensure};
use samebits_contract::atomic_write;
use samebits_contract::mismatch::{self, Threshold};
use samebits_models::{
    AdapterChoice, Config, Grouping, Model, PageOrder, Precision, Recorded, Routing, Run, SamplingRule, Schedule,
    ToScore,
};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// Computes the log-probabilities of a rollout again, in one forward, and compares them bit for bit
///
/// Says that the difference and the KL divergence are exactly zero, or how large they are and where in texts they begin. Ends
/// with 1 where a gate does not hold: by default where a log-probability of a rollout differs, or where records of another
/// project are further off than the thresholds of contract/mismatch.toml.
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

    /// Choose the experts that the rollout records in the place of those that routers choose: with weights of their own scores.
    /// Choices that would have been others are counted either way
    #[arg(long)]
    replay_experts: bool,

    /// A gate that must hold; may be given again [default: bitwise; for records of another project, which say `recorded_by`,
    /// nemo-rl]
    #[arg(long, value_name = "NAME")]
    gate: Vec<String>,

    /// Thresholds of gates in the place of the contract's
    #[arg(long, value_name = "FILE.toml")]
    thresholds: Option<PathBuf>,

    /// A page to write: metrics, gates, and where in texts the difference begins
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,

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
    /// The project whose records these are, if it is another one.
    recorded_by: Option<String>,
    /// How texts hold the experts of their tokens, where they do.
    routed_experts: Option<Form>,
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
    /// The tokens that each of its tokens was drawn from, where a record says so.
    sampling_mask: Option<Vec<Vec<i32>>>,
    /// The experts of its tokens in base64.
    routed_experts: Option<String>,
    #[serde(skip)]
    experts: Option<Recorded>,
    prompt_tokens: Vec<i32>,
    tokens: Vec<i32>,
    logprobs: Vec<f32>,
}

impl Text {
    fn to_score(&self) -> ToScore<'_> {
        (&self.prompt_tokens, &self.tokens, &self.rule, self.sampling_mask.as_deref())
    }
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
    let thresholds = thresholds(args)?;
    let gates = gates(args, &first, &thresholds, dtype)?;
    let model = args.folder.load(dtype, &cpu, first.rope_length.map(|length| (&*args.rollout, length)))?;
    // Of one that depends on it the length must be known.
    let depends = |config: &Config| config.trained_length().is_some();
    if first.rope_length.is_none() && depends(model.config()) {
        bail!("{}:1: has no `rope_length`, which this model's log-probabilities depend on", args.rollout.display());
    }
    check_adapters(args, &first, &model)?;
    check_records(args, &texts, &model)?;
    let model = place(model, &cpu, device.as_ref())?;
    let bar = counting(texts.len());
    let (mut found, name) = (Found::default(), dtype.name());
    let blocks: Vec<usize> = model.config().mixtures().into_iter().map(|mixture| mixture.block).collect();
    for group in texts.chunks(args.batch) {
        let asked: Vec<ToScore> = group.iter().map(Text::to_score).collect();
        let choice = |text: &Text| text.adapter.clone().map_or(AdapterChoice::Plain, AdapterChoice::Named);
        let adapters: Vec<AdapterChoice> = group.iter().map(choice).collect();
        let recorded: Vec<_> = group.iter().map(|text| text.experts.clone()).collect();
        let mut experts = recorded.iter().any(Option::is_some).then(|| Routing { recorded, own: Vec::new() });
        let run = Run {
            experts: experts.as_mut(),
            adapters: &adapters,
            schedule: args.schedule,
            grouping: Grouping::Together,
            page_size: args.page_size,
            page_order: args.page_order,
            ..Run::default()
        };
        let scores = model.score(&cpu, &asked, run).with_context(|| args.rollout.display().to_string())?;
        for (i, (text, scores)) in group.iter().zip(scores).enumerate() {
            let prompt = text.prompt_tokens.len();
            found.add(text.sequence, prompt, &text.tokens, &text.logprobs, &scores);
            if let (Some(recorded), Some(Routing { own, .. })) = (&text.experts, &experts) {
                let flips = recorded.experts.flips(model.config(), &own[i]);
                found.add_experts((prompt, text.tokens.len()), &flips, &blocks);
            }
        }
        bar.inc(group.len() as u64);
    }
    bar.finish_and_clear();
    let judged = found.judged(&thresholds, &gates, name);
    if let Some(gate) = gates.iter().find(|gate| !judged.iter().any(|(line, ..)| line.gate == **gate)) {
        bail!("--gate {gate}: judges experts, and {} records none", args.rollout.display());
    }
    if let Some(path) = &args.report {
        let page = found.page(&judged, &args.rollout.display().to_string());
        atomic_write::write(path, page.as_bytes()).with_context(|| format!("--report {}", path.display()))?;
    }
    let text = if args.json { found.json(&judged).to_string() } else { found.text(&judged) };
    writeln!(std::io::stdout().lock(), "{text}")?;
    Ok(ExitCode::from(u8::from(judged.iter().any(|(.., holds)| !holds))))
}

/// The thresholds that are asked for: the contract's, or those of a file.
fn thresholds(args: &Args) -> Result<Vec<Threshold>> {
    let Some(path) = &args.thresholds else { return Ok(mismatch::thresholds()) };
    let at = || format!("--thresholds {}", path.display());
    let text = std::fs::read_to_string(path).with_context(at)?;
    mismatch::parse(&text).map_err(|why| anyhow!("{}: {why}", at()))
}

/// The gates that must hold: each has a threshold, or nothing would be judged.
fn gates(args: &Args, first: &First, thresholds: &[Threshold], dtype: Precision) -> Result<Vec<String>> {
    let default = if first.recorded_by.is_some() { "nemo-rl" } else { "bitwise" };
    let gates = if args.gate.is_empty() { vec![default.to_string()] } else { args.gate.clone() };
    check_gates(thresholds, &gates, dtype.name()).map_err(|why| anyhow!("--gate {why}"))?;
    Ok(gates)
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

/// Refuses experts and lists of tokens that are not the model's: all that is wrong with those of any text, each thing once.
fn check_records(args: &Args, texts: &[Text], model: &Model) -> Result<()> {
    let mut complaints: Vec<String> = Vec::new();
    for text in texts {
        let (who, len) = (format!("sequence {}", text.sequence), text.prompt_tokens.len() + text.tokens.len());
        let experts = text.experts.as_ref().map(|of| of.experts.check(model.config(), &who, len));
        let mask = text.sampling_mask.as_ref();
        let mask = mask.map(|kept| model.config().check_sampling_mask(&who, kept, &text.tokens));
        for wrong in [experts, mask].into_iter().flatten().filter_map(|checked| Some(checked.err()?.to_string())) {
            if !complaints.contains(&wrong) {
                complaints.push(wrong);
            }
        }
    }
    ensure!(complaints.is_empty(), "{}: {}", args.rollout.display(), complaints.join("; "));
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
        text.experts =
            recorded(args, &first, text.routed_experts.as_deref()).with_context(|| format!("{path}:{}", i + 1))?;
        text.rule = rule(&first, text.sampling.as_ref()).with_context(|| format!("{path}:{}", i + 1))?;
        texts.push(text);
    }
    ensure!(texts.len() == first.sequences, "{path}: holds {} of {} texts; it was cut", texts.len(), first.sequences);
    texts.retain(|text| !text.tokens.is_empty());
    ensure!(
        !args.replay_experts || texts.iter().any(|text| text.experts.is_some()),
        "--replay-experts: {path} records none; sample with --experts"
    );
    ensure!(!texts.is_empty(), "{path}: holds no sampled token; nothing can be compared");
    Ok((first, texts))
}

/// The experts of a text.
fn recorded(args: &Args, first: &First, text: Option<&str>) -> Result<Option<Recorded>> {
    let Some(text) = text else { return Ok(None) };
    let form = first.routed_experts.as_ref().context("has `routed_experts`, and the first line does not say how")?;
    Ok(Some(Recorded { experts: form.decode(text)?, replay: args.replay_experts }))
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
