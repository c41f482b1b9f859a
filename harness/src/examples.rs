//! What a model is trained on: a file of sequences, which of their tokens count, and what policies need of them.

use crate::cmd::forward::{Tokens, words};
use crate::cmd::{attribute, warn};
use crate::experts;
use anyhow::{Context, Result, anyhow, bail, ensure};
use safetensors::{Dtype, SafeTensors};
use samebits_models::{
    AdapterChoice, Batch, Experts, Loss, ModelError, Precision, Recorded, Ruled, Sampled, SamplingRule,
};
use samebits_schema::policy_loss;
use serde_json::{Map, Value};
use std::path::Path;

/// What is made of log-probabilities.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum LossKind {
    /// minus the mean of the log-probabilities that count
    Nll,
    /// the clipped policy gradient
    Policy,
}

/// A log-probability may be above 0 by so much: other programs round it.
const ROUNDED: f32 = 0.01;

/// How far ratios may be from 1 where nothing else is said.
const CLIP: f64 = 0.2;

/// The options of the loss.
#[derive(clap::Args, Clone, Copy, Debug)]
pub struct LossOptions {
    /// Minus the mean of the log-probabilities that count, or the clipped policy gradient, which reads `advantages`,
    /// f32 [B], and `old_logprob`, f32 [B, T]
    #[arg(long, default_value = "nll", value_name = "nll|policy")]
    loss: LossKind,

    /// policy: ratios count as at least 1 - X
    #[arg(long, default_value_t = CLIP, value_name = "X", value_parser = attribute(&policy_loss::OP, "low"))]
    clip_low: f64,

    /// policy: ratios count as at most 1 + X
    #[arg(long, default_value_t = CLIP, value_name = "X", value_parser = attribute(&policy_loss::OP, "high"))]
    clip_high: f64,

    /// policy: C times the mean entropy of the distributions that tokens that count were drawn from is subtracted
    #[arg(long, default_value_t = 0.0, value_name = "C", allow_negative_numbers = true, value_parser = coefficient)]
    entropy: f64,

    /// What logits are divided by, as they were where the texts were sampled; 0, where the likeliest tokens were taken, counts
    /// as 1 [default: `temperature` of the file's metadata, else 1]
    #[arg(long, value_name = "T")]
    temperature: Option<f64>,
}

fn coefficient(text: &str) -> Result<f64, &'static str> {
    text.parse().ok().filter(|c| (*c as f32).is_finite()).ok_or("it must be a finite number")
}

impl LossOptions {
    /// A loss with this coefficient of the entropy, and ratios that are clipped as by default.
    pub fn of(loss: LossKind, entropy: f64) -> LossOptions {
        LossOptions { loss, clip_low: CLIP, clip_high: CLIP, entropy, temperature: None }
    }

    /// At a temperature.
    pub fn at(self, temperature: Option<f64>) -> LossOptions {
        LossOptions { temperature, ..self }
    }
}

/// A file of sequences.
pub struct Examples {
    /// Where they stand in it.
    pub tokens: Tokens,
    /// All of them.
    pub all: Sequences,
    /// What logits are divided by.
    pub temperature: f64,
    /// Names of tensors that look like a mask and are none.
    unread: Vec<String>,
    /// What is odd about old log-probabilities.
    odd: Option<String>,
}

/// Sequences in logical order.
pub struct Sequences {
    tokens: Vec<Vec<i32>>,
    count: Vec<Vec<i32>>,
    /// Advantages, and log-probabilities when they were sampled.
    policy: Option<(Vec<f32>, Vec<Vec<f32>>)>,
    options: LossOptions,
    temperature: f64,
    /// How each was sampled, where that is not at the temperature from all tokens.
    rules: Vec<Ruled>,
}

impl Sequences {
    /// Those with these numbers.
    pub fn pick(&self, numbers: &[usize]) -> Sequences {
        let rows = |all: &[Vec<i32>]| numbers.iter().map(|&number| all[number].clone()).collect();
        let policy = self.policy.as_ref().map(|(advantages, old)| {
            let old = numbers.iter().map(|&number| old[number].clone()).collect();
            (numbers.iter().map(|&number| advantages[number]).collect(), old)
        });
        let (options, temperature) = (self.options, self.temperature);
        let rules = numbers.iter().filter_map(|&number| self.rules.get(number).cloned()).collect();
        Sequences { tokens: rows(&self.tokens), count: rows(&self.count), policy, options, temperature, rules }
    }

    /// Whether a token of those with these numbers counts.
    pub fn any_counts(&self, mut numbers: impl Iterator<Item = usize>) -> bool {
        numbers.any(|number| self.count[number].contains(&1))
    }

    /// Tokens of all of them.
    pub fn tokens(&self) -> usize {
        self.tokens.iter().map(Vec::len).sum()
    }

    /// How they were sampled, where that is not at one temperature from all tokens: settings of each, as JSON.
    pub fn sampling(&self) -> Option<String> {
        let settings = self.rules.iter().map(|ruled| ruled.rule.json());
        (!self.rules.is_empty()).then(|| Value::from(settings.collect::<Vec<_>>()).to_string())
    }

    /// All of them as a batch of `groups` groups.
    pub fn batch(&self, groups: usize) -> Batch<'_> {
        let LossOptions { clip_low: low, clip_high: high, entropy, .. } = self.options;
        let loss = match &self.policy {
            None => Loss::Nll,
            Some((advantages, old_logprob)) => Loss::Policy { advantages, old_logprob, low, high, entropy },
        };
        let sampled = if self.rules.is_empty() { Sampled::At(self.temperature) } else { Sampled::By(&self.rules) };
        Batch { sequences: &self.tokens, count: &self.count, loss, sampled, groups }
    }
}

/// The tokens that were left to sample from, of each token of each sequence.
type Kept = Vec<Vec<Vec<i32>>>;

/// How each sequence was sampled behind its prompt, where that is not at `temperature` from all tokens.
fn rules(
    tokens: &Tokens,
    prompts: &[usize],
    (kept, experts): (Option<Kept>, Option<Vec<Experts>>),
    (temperature, options): (f64, LossOptions),
) -> Result<Vec<Ruled>> {
    let (replay, mut experts) = (tokens.replays_experts, experts.map(Vec::into_iter));
    ensure!(
        !replay || experts.is_some(),
        "metadata `replay`: asks for experts, and there is no tensor `routed_experts`"
    );
    let nothing = Map::new();
    let mut rules = Vec::new();
    for (b, &prompt) in prompts.iter().enumerate() {
        let mut rule = SamplingRule::at(temperature);
        let own = tokens.settings_of_each.as_ref().map_or(&nothing, |each| &each[b]);
        rule.read(&tokens.settings).and_then(|()| rule.read(own)).context("metadata `sampling`")?;
        let says = tokens.settings.contains_key("temperature") || own.contains_key("temperature");
        if let Some(asked) = options.temperature.filter(|_| says) {
            ensure!(
                at(rule.temperature) == at(asked),
                "metadata `sampling`: sequence {b} was sampled at {}, and --temperature is {asked}; ratios of two temperatures \
                 are not compared: leave --temperature out",
                rule.temperature
            );
        }
        let experts = experts.as_mut().and_then(Iterator::next).map(|experts| Recorded { experts, replay });
        let kept = kept.as_ref().map(|kept| kept[b][prompt..].to_vec());
        let adapter = tokens.adapters.get(b).or(tokens.adapters.first()).cloned().unwrap_or_default();
        rules.push(Ruled { rule, prompt, kept, experts, adapter });
    }
    let is_plain = |ruled: &Ruled| {
        let Ruled { rule, kept, experts, adapter, .. } = ruled;
        let is_alone = kept.is_none() && experts.is_none() && *adapter == AdapterChoice::Only;
        is_alone && rule.is_plain() && at(rule.temperature) == temperature
    };
    Ok(if rules.iter().all(is_plain) { Vec::new() } else { rules })
}

/// What logits are divided by: where the likeliest tokens were taken, log-probabilities are those at 1.
fn at(temperature: f64) -> f64 {
    if temperature == 0.0 { 1.0 } else { temperature }
}

impl Examples {
    /// Reads `tokens` and `attention_mask` as `samebits forward`, `mask`, and what the loss needs besides.
    ///
    /// # Errors
    /// A file that cannot be read; tensors that are missing, or of another dtype or shape; texts that were sampled at another
    /// temperature, and of a policy in another dtype than that of the run.
    pub fn read(path: &Path, options: LossOptions, dtype: Precision) -> Result<Examples> {
        let bytes = std::fs::read(path).with_context(|| path.display().to_string())?;
        let examples = Examples::parse(&bytes, options, dtype).with_context(|| path.display().to_string())?;
        let [temperature, of_dtype] = &examples.tokens.sampled;
        let says = |settings: &Map<String, Value>| settings.contains_key("temperature");
        let each_says = examples.tokens.settings_of_each.as_ref().is_some_and(|each| each.iter().all(says));
        let is_said = temperature.is_some() || says(&examples.tokens.settings) || each_says;
        if options.loss == LossKind::Policy && options.temperature.is_none() && !is_said {
            let dtype = if of_dtype.is_some() { String::new() } else { format!(", and {} as `dtype`", dtype.name()) };
            warn(&format!(
                "{}: does not say at what `temperature` its old_logprob was sampled (in its metadata, or --temperature): 1 is \
                 taken{dtype}",
                path.display()
            ));
        }
        if let Some(odd) = &examples.odd {
            warn(&format!("{}: {odd}; are these probabilities or ratios?", path.display()));
        }
        if !examples.unread.is_empty() {
            let (path, names) = (path.display(), examples.unread.join("`, `"));
            warn(&format!(
                "{path}: tensor `{names}` has a whole number for each token and is not read; which tokens count stands in `mask`"
            ));
        }
        Ok(examples)
    }

    fn parse(bytes: &[u8], options: LossOptions, dtype: Precision) -> Result<Examples> {
        ensure!(options.loss == LossKind::Policy || options.entropy == 0.0, "--entropy: only --loss policy has one");
        let file = SafeTensors::deserialize(bytes).context("not a safetensors file")?;
        let tokens = Tokens::of(&file, bytes)?;
        let [sampled_at, sampled_in] = &tokens.sampled;
        let of_settings = tokens.settings.get("temperature").map(ToString::to_string);
        if let (Some(of_settings), Some(alone)) = (&of_settings, sampled_at) {
            let [a, b] = [of_settings, alone].map(|text| text.parse::<f64>().ok());
            ensure!(
                a == b,
                "metadata: `sampling` has a temperature of {of_settings}, and `temperature` is {alone}; say one"
            );
        }
        let temperature = temperature(options, sampled_at.as_deref().or(of_settings.as_deref()))?;
        let sampled_in = sampled_in.as_ref().filter(|_| options.loss == LossKind::Policy);
        let sampled_in = sampled_in.map(|text| text.parse::<Precision>()).transpose().context("metadata `dtype`")?;
        if let Some(sampled) = sampled_in.filter(|sampled| *sampled != dtype) {
            let (sampled, dtype) = (sampled.name(), dtype.name());
            bail!(
                "metadata `dtype`: old_logprob was sampled in {sampled}, and this run is in {dtype}; ratios of two dtypes are \
                 not compared: give --dtype {sampled}, or sample in {dtype}"
            );
        }
        let [batch, len] = tokens.shape();
        let sequences = tokens.sequences();
        let count = counts(&file, &tokens, &sequences)?;
        let mut odd = None;
        let policy = match options.loss {
            LossKind::Nll => None,
            LossKind::Policy => {
                let advantages = words(tensor(&file, "advantages", Dtype::F32, &[batch])?, f32::from_le_bytes);
                let old = words(tensor(&file, "old_logprob", Dtype::F32, &[batch, len])?, f32::from_le_bytes);
                let counted = tokens.places().zip(count.iter().flatten()).filter(|(_, counts)| **counts == 1);
                if let Some((place, _)) = counted.into_iter().find(|&(place, _)| !old[place].is_finite()) {
                    let at = [place / len, place % len];
                    bail!("tensor `old_logprob`: element {at:?} is {}; it must be finite", old[place]);
                }
                let counted = tokens.places().zip(count.iter().flatten()).filter(|(_, counts)| **counts == 1);
                if let Some((place, _)) = counted.into_iter().find(|&(place, _)| old[place] > ROUNDED) {
                    let at = [place / len, place % len];
                    odd = Some(format!(
                        "tensor `old_logprob`: element {at:?} is {}, and no log-probability is above 0",
                        old[place]
                    ));
                }
                Some((advantages, tokens.of_sequences(&old)))
            }
        };
        let prompts = match file.tensor("prompt_len") {
            // Its first token that counts was sampled.
            Err(_) => count.iter().map(|count| count.iter().position(|c| *c == 1).unwrap_or(count.len())).collect(),
            Ok(_) => prompts(words(tensor(&file, "prompt_len", Dtype::I32, &[batch])?, i32::from_le_bytes), &count)?,
        };
        let experts = experts::of_file(&file, [batch, len], &tokens.places_of_sequences())?;
        let kept = kept(&file, &tokens)?;
        let rules = rules(&tokens, &prompts, (kept, experts), (temperature, options))?;
        let all = Sequences { tokens: sequences, count, policy, options, temperature, rules };
        let unread = file.iter().filter(|(name, tensor)| {
            let whole =
                [Dtype::BOOL, Dtype::U8, Dtype::I8, Dtype::I16, Dtype::I32, Dtype::I64].contains(&tensor.dtype());
            whole
                && tensor.shape() == [batch, len]
                && !["tokens", "attention_mask", "mask", "prompt_len", KEPT[0]].contains(name)
        });
        let unread = unread.map(|(name, _)| name.escape_default().to_string()).collect();
        Ok(Examples { tokens, all, temperature, unread, odd })
    }
}

/// What logits are divided by: what was asked for, or what the file says that its texts were sampled at.
fn temperature(options: LossOptions, sampled: Option<&str>) -> Result<f64> {
    let sampled = sampled.map(str::parse::<f64>).transpose().context("metadata `temperature`: it must be a number")?;
    if let (Some(asked), Some(sampled)) = (options.temperature, sampled) {
        ensure!(
            at(asked) == at(sampled),
            "metadata `temperature`: its texts were sampled at {sampled}, and --temperature is {asked}; ratios of two temperatures \
             are not compared: leave --temperature out"
        );
    }
    Ok(at(options.temperature.or(sampled).unwrap_or(1.0)))
}

/// What a model refuses of the file at `path`, or of an option beside it, which is named then.
pub fn refusal(e: ModelError, path: &Path) -> anyhow::Error {
    match e {
        ModelError::Input { what: what @ ("groups" | "ranks" | "micro batch"), why } => {
            anyhow!("--{}: {why}", what.replace(' ', "-"))
        }
        ModelError::Input { what: "temperature", why } => anyhow!("--temperature: {why}"),
        // A dump names itself; memory and budget are no matter of the file.
        ModelError::File { .. } | ModelError::Op(_) => e.into(),
        _ => anyhow::Error::new(e).context(path.display().to_string()),
    }
}

/// Which tokens of each sequence count: what `mask` says, or all but the first ones.
fn counts(file: &SafeTensors, tokens: &Tokens, sequences: &[Vec<i32>]) -> Result<Vec<Vec<i32>>> {
    let [batch, len] = tokens.shape();
    match tensor(file, "mask", Dtype::I32, &[batch, len]) {
        Ok(data) => {
            let mask = words(data, i32::from_le_bytes);
            // By the places of the file; behind this nobody knows of padding.
            if let Some(place) = mask.iter().position(|counts| ![0, 1].contains(counts)) {
                let at = [place / len, place % len];
                bail!("tensor `mask`: element {at:?} is {}; it must be 0 or 1", mask[place]);
            }
            if let Some(place) = tokens.firsts().find(|&place| mask[place] != 0) {
                let at = [place / len, place % len];
                bail!("tensor `mask`: element {at:?} is 1; nothing stands before a first token, so it must be 0");
            }
            if let Some(place) = tokens.outside(|place| mask[place] != 0) {
                let at = [place / len, place % len];
                bail!("tensor `mask`: element {at:?} counts a token that attention_mask leaves out; write 0 there");
            }
            Ok(tokens.of_sequences(&mask))
        }
        Err(_) if file.tensor("mask").is_err() => {
            Ok(sequences.iter().map(|tokens| (0..tokens.len()).map(|t| i32::from(t > 0)).collect()).collect())
        }
        Err(e) => Err(e),
    }
}

/// What a file calls the tokens that each token was drawn from: how many, and which, one behind the other.
const KEPT: [&str; 2] = ["sampling_mask_counts", "sampling_mask_token_ids"];

/// Of each token of each sequence those that it was drawn from, where a file says so; none of one that was not sampled.
fn kept(file: &SafeTensors, tokens: &Tokens) -> Result<Option<Kept>> {
    let there = KEPT.map(|name| file.tensor(name).ok());
    let ids = match &there {
        [None, None] => return Ok(None),
        [_, Some(ids)] => ids.shape().iter().product(),
        _ => 0,
    };
    let [batch, len] = tokens.shape();
    let counts = words(tensor(file, KEPT[0], Dtype::I32, &[batch, len])?, i32::from_le_bytes);
    let ids = words(tensor(file, KEPT[1], Dtype::I32, &[ids])?, i32::from_le_bytes);
    let (mut all, mut first) = (Vec::with_capacity(counts.len()), 0usize);
    for (place, &count) in counts.iter().enumerate() {
        let end = usize::try_from(count).ok().and_then(|count| first.checked_add(count));
        let Some(own) = end.and_then(|end| ids.get(first..end)) else {
            let (name, at, left) = (KEPT[1], [place / len, place % len], ids.len() - first);
            bail!("tensor `{}`: element {at:?} is {count}; `{name}` has {left} for it and all behind it", KEPT[0]);
        };
        first += own.len();
        all.push(own);
    }
    let left = ids.len() - first;
    ensure!(left == 0, "tensor `{}`: has {left} tokens more than `{}` say", KEPT[1], KEPT[0]);
    let own = |all: Vec<&[i32]>| all.into_iter().map(<[i32]>::to_vec).collect();
    Ok(Some(tokens.of_sequences(&all).into_iter().map(own).collect()))
}

/// Lengths of prompts as a file has them: no token of one counts, for none was sampled.
fn prompts(given: Vec<i32>, count: &[Vec<i32>]) -> Result<Vec<usize>> {
    let of = |(b, (given, count)): (usize, (i32, &Vec<i32>))| {
        let len = usize::try_from(given).ok().filter(|len| (1..=count.len()).contains(len));
        let len = len.with_context(|| {
            format!("tensor `prompt_len`: element [{b}] is {given}; the sequence has {}", count.len())
        })?;
        let counted = count[..len].iter().position(|c| *c == 1);
        ensure!(counted.is_none(), "tensor `prompt_len`: element [{b}] is {len}, and `mask` counts a token before it");
        Ok(len)
    };
    given.into_iter().zip(count).enumerate().map(of).collect()
}

/// The data of a tensor of this form.
fn tensor<'d>(file: &SafeTensors<'d>, name: &str, dtype: Dtype, shape: &[usize]) -> Result<&'d [u8]> {
    let Ok(tensor) = file.tensor(name) else {
        bail!("tensor `{name}`: missing; store {dtype:?} {shape:?} under that name")
    };
    ensure!(tensor.dtype() == dtype, "tensor `{name}`: dtype is {:?}; it must be {dtype:?}", tensor.dtype());
    ensure!(tensor.shape() == shape, "tensor `{name}`: shape {:?} must be {shape:?}", tensor.shape());
    Ok(tensor.data())
}
