//! What a request asks of its tokens, and what that makes of logits: docs/NUMERICS.md, section 6.

use crate::experts;
use crate::{AdapterChoice, Config, Model, ModelError, Recorded};
use samebits_ops::{
    Attributes, Backend, Cpu, Logprob, Penalties, Tensor, Truncation, argmax, draw, logprob, penalize, random_halves,
    truncate,
};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::ops::Range;

/// How a token comes from logits. What is not asked for changes no bit.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingRule {
    /// Logits are divided by it; 0 takes the likeliest token.
    pub temperature: f64,
    /// As many of the likeliest tokens may be sampled; 0 for all.
    pub top_k: usize,
    /// The likeliest tokens up to this share of the probability; 1 for all.
    pub top_p: f64,
    /// Tokens of at least this share of the probability of the likeliest; 0 for all.
    pub min_p: f64,
    /// Logits of tokens of the text so far are divided by it above 0, multiplied with it below; 1 for none.
    pub repetition_penalty: f64,
    /// What is taken off a logit for each time that the token was sampled.
    pub frequency_penalty: f64,
    /// What is taken off a logit where the token was sampled.
    pub presence_penalty: f64,
    /// What is added to logits.
    pub logit_bias: BTreeMap<i32, f64>,
    /// Tokens that may not be sampled.
    pub banned_tokens: Vec<i32>,
    /// The only ones that may, where there are any.
    pub allowed_tokens: Option<Vec<i32>>,
}

impl Default for SamplingRule {
    fn default() -> SamplingRule {
        SamplingRule {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            logit_bias: BTreeMap::new(),
            banned_tokens: Vec::new(),
            allowed_tokens: None,
        }
    }
}

/// How tokens of a text behind its prompt were sampled.
#[derive(Clone, Debug, PartialEq)]
pub struct Ruled {
    /// The settings.
    pub rule: SamplingRule,
    /// Tokens of the prompt, at least one.
    pub prompt: usize,
    /// The tokens that each token behind the prompt was drawn from, where a record says so: they stand in the place of what
    /// top-k, top-p and min-p of the settings leave.
    pub kept: Option<Vec<Vec<i32>>>,
    /// The experts that were recorded of its tokens.
    pub experts: Option<Recorded>,
    /// Its adapter.
    pub adapter: AdapterChoice,
}

impl Ruled {
    /// By settings behind so many tokens of a prompt, and nothing else is said.
    pub fn new(rule: SamplingRule, prompt: usize) -> Ruled {
        Ruled { rule, prompt, kept: None, experts: None, adapter: AdapterChoice::Only }
    }
}

/// What log-probabilities of sequences are those of.
#[derive(Clone, Copy, Debug)]
pub enum Sampled<'a> {
    /// All tokens, with logits divided by a temperature; 0 counts as 1.
    At(f64),
    /// In each sequence of what its rule leaves; in its prompt of all tokens at the temperature of the rule.
    By(&'a [Ruled]),
}

impl Sampled<'_> {
    /// What logits of the first sequence are divided by.
    pub(crate) fn temperature(&self) -> f64 {
        match self {
            Sampled::At(temperature) => divisor(*temperature),
            Sampled::By(rules) => rules.first().map_or(1.0, |ruled| divisor(ruled.rule.temperature)),
        }
    }

    /// Those of some of the sequences.
    pub(crate) fn of(&self, part: Range<usize>) -> Sampled<'_> {
        match self {
            Sampled::At(temperature) => Sampled::At(*temperature),
            Sampled::By(rules) => Sampled::By(&rules[part]),
        }
    }

    /// The adapters of sequences, as [`Adapters::find_all`](crate::adapters::Adapters::find_all) takes them.
    pub(crate) fn adapters(&self) -> Vec<AdapterChoice> {
        match self {
            Sampled::At(_) => Vec::new(),
            Sampled::By(rules) => rules.iter().map(|ruled| ruled.adapter.clone()).collect(),
        }
    }

    /// The experts that were recorded of a sequence.
    pub(crate) fn experts(&self, sequence: usize) -> Option<&Recorded> {
        match self {
            Sampled::At(_) => None,
            Sampled::By(rules) => rules.get(sequence)?.experts.as_ref(),
        }
    }

    /// Refuses what sequences cannot have been sampled by. `counts` says of a token whether its log-probability counts.
    pub(crate) fn check(
        &self,
        c: &Config,
        sequences: &[Vec<i32>],
        counts: impl Fn(usize, usize) -> bool,
    ) -> Result<(), ModelError> {
        let rules = match self {
            Sampled::At(temperature) => return check_temperature(*temperature),
            Sampled::By(rules) => *rules,
        };
        if rules.len() != sequences.len() {
            let why = format!("there are {} rules; give one for each of {} sequences", rules.len(), sequences.len());
            return Err(ModelError::input("sampling", why));
        }
        let mut complaints: Vec<ModelError> = Vec::new();
        for (b, (ruled, sequence)) in rules.iter().zip(sequences).enumerate() {
            if ruled.prompt == 0 || ruled.prompt > sequence.len() {
                let why = format!(
                    "that of sequence {b} has {} of its {} tokens; give 1 to all",
                    ruled.prompt,
                    sequence.len()
                );
                complaints.push(ModelError::input("prompt", why));
            } else if let Some(kept) = &ruled.kept {
                let counts = |place: usize| counts(b, ruled.prompt + place);
                complaints.extend(check_kept(c, &format!("sequence {b}"), kept, &sequence[ruled.prompt..], counts));
            }
            // What is wrong with the settings of all is said once.
            for complaint in ruled.rule.complaints(c) {
                if !complaints.iter().any(|other| other.to_string() == complaint.to_string()) {
                    complaints.push(complaint);
                }
            }
        }
        let texts = rules.iter().zip(sequences).enumerate();
        complaints.extend(experts::check(c, texts.map(|(b, (ruled, tokens))| (b, &ruled.experts, tokens.len()))).err());
        ModelError::all(complaints)
    }

    /// The rows of a forward over pieces, sequences by their numbers and their rows or padding, cut where log-probabilities begin
    /// to be made in another way.
    pub(crate) fn stretches(
        &self,
        c: &Config,
        sequences: &[Vec<i32>],
        pieces: &[(usize, usize)],
    ) -> Result<Vec<Stretch>, ModelError> {
        let rows = pieces.iter().map(|(_, length)| length).sum();
        let rules = match self {
            Sampled::At(t) => return Ok(vec![Stretch { rows: 0..rows, temperature: divisor(*t), text: None }]),
            Sampled::By(rules) => rules,
        };
        let (mut found, mut first): (Vec<Stretch>, usize) = (Vec::new(), 0);
        for &(label, length) in pieces {
            // Padding is of no sequence.
            let Some(Ruled { rule, prompt, kept, .. }) = rules.get(label) else {
                found.push(Stretch { rows: first..first + length, temperature: 1.0, text: None });
                first += length;
                continue;
            };
            // A row is about the token behind it; of the last one there is none.
            let (before, drawn) = (first + prompt - 1, first + length - 1);
            let temperature = divisor(rule.temperature);
            let plain = |rows: Range<usize>| Stretch { rows, temperature, text: None };
            if rule.is_plain() && kept.is_none() {
                found.push(plain(first..first + length));
            } else {
                let (rule, tokens) = (Checked::new(rule, c)?, sequences[label].clone());
                let text = Text { rule, tokens, prompt: *prompt, kept: kept.clone() };
                found.push(plain(first..before));
                found.push(Stretch { rows: before..drawn, temperature, text: Some(text) });
                found.push(plain(drawn..first + length));
            }
            first += length;
        }
        found.retain(|stretch| !stretch.rows.is_empty());
        Ok(found)
    }
}

/// Rows of a forward, side by side, whose log-probabilities are made in one way.
pub(crate) struct Stretch {
    pub rows: Range<usize>,
    /// What logits are divided by.
    pub temperature: f64,
    /// Where a rule leaves some of the tokens: the text whose places behind the prompt these rows are.
    pub text: Option<Text>,
}

/// A prompt and what was sampled behind it by a rule.
pub(crate) struct Text {
    rule: Checked,
    tokens: Vec<i32>,
    prompt: usize,
    kept: Option<Vec<Vec<i32>>>,
}

impl Text {
    /// Of the logits of some of the places behind the prompt, those that tokens are drawn from: over the temperature, and -inf
    /// for what the rule leaves out.
    pub fn truncated(&self, cpu: &Cpu, some: Range<usize>, logits: &Tensor) -> Result<Tensor, ModelError> {
        let shape = logits.shape();
        Ok(Tensor::new(self.places(some).truncated(cpu, shape[1], f32s(logits))?, shape)?)
    }

    /// From the gradient of what [`Text::truncated`] makes that of the logits it was made of.
    pub fn truncated_backward(
        &self,
        cpu: &Cpu,
        some: Range<usize>,
        logits: &Tensor,
        dy: &Tensor,
    ) -> Result<Tensor, ModelError> {
        let shape = dy.shape();
        let mut dx = Tensor::new(vec![0f32; shape.iter().product()], shape)?;
        let by = Attributes::new().with("factor", 1.0 / divisor(self.rule.rule.temperature));
        cpu.call("scale", by, &[("x", dy.view())], vec![("y", dx.view_mut())])?;
        let repetition = self.rule.rule.repetition_penalty as f32;
        if repetition == 1.0 {
            return Ok(dx);
        }
        // `penalize` multiplies what is below 0 and divides the rest, as it did the logits whose signs these sizes have here.
        let mut signed = f32s(&dx).to_vec();
        for (of_row, logits) in signed.chunks_mut(shape[1]).zip(f32s(logits).chunks(shape[1])) {
            for (token, (d, z)) in of_row.iter_mut().zip(logits).enumerate() {
                let z = self.rule.bias.as_ref().map_or(*z, |bias| z + bias[token]);
                *d = if z < 0.0 { -d.abs() } else { d.abs() };
            }
        }
        let places = self.places(some);
        let by = [repetition, 0.0, 0.0].map(|all| vec![all; shape[0]]);
        let sizes = places.penalised(cpu, shape[1], &signed, &by, None)?;
        let of_both = sizes.iter().zip(f32s(&dx)).map(|(size, d)| size.copysign(*d));
        Ok(Tensor::new(of_both.collect(), shape)?)
    }

    /// Some of the places behind the prompt.
    fn places(&self, some: Range<usize>) -> Places<'_> {
        let (prompt, output) = self.tokens.split_at(self.prompt);
        let mut places = Places::default();
        places.push(&self.rule, prompt, (&output[..some.end - 1], self.kept.as_deref()), some.start);
        places
    }
}

fn f32s(tensor: &Tensor) -> &[f32] {
    tensor.as_slice().expect("it is f32, and on the host")
}

/// What is sampled.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Texts per prompt.
    pub samples: usize,
    /// Most tokens of a text.
    pub max_tokens: usize,
    /// How tokens come from logits.
    pub rule: SamplingRule,
    /// Seed of the random numbers.
    pub seed: u64,
    /// Whether a text goes on behind an eos token.
    pub ignore_eos: bool,
    /// Texts behind which a text ends; the folder needs a tokenizer.
    pub stop: Vec<String>,
    /// Tokens behind which it ends.
    pub stop_token_ids: Vec<i32>,
    /// Whether the experts of all tokens are recorded.
    pub experts: bool,
    /// Which adapter each prompt has; one is for all, and none is [`AdapterChoice::Only`].
    pub adapters: Vec<AdapterChoice>,
}

impl Default for Sampling {
    fn default() -> Sampling {
        let rule = SamplingRule::default();
        let (stop, stop_token_ids, adapters) = (vec![], vec![], vec![]);
        let (ignore_eos, experts) = (false, false);
        Sampling { samples: 1, max_tokens: 64, rule, seed: 0, ignore_eos, stop, stop_token_ids, experts, adapters }
    }
}

/// Settings as they stand in a JSON object, and what is wrong with them.
struct Settings<'a> {
    fields: &'a Map<String, Value>,
    complaints: Vec<ModelError>,
}

impl Settings<'_> {
    /// Puts what a field says in the place of `to`; null and nothing leave it.
    fn read<T>(&mut self, name: &'static str, to: &mut T, form: &str, of: impl Fn(&Value) -> Option<T>) {
        match self.fields.get(name).filter(|value| !value.is_null()) {
            None => {}
            Some(value) => match of(value) {
                Some(value) => *to = value,
                None => self.complaints.push(ModelError::input(name, format!("is {value}; give {form}"))),
            },
        }
    }

    fn number(&mut self, name: &'static str, to: &mut f64) {
        self.read(name, to, "a number", Value::as_f64);
    }
}

fn tokens_of(value: &Value) -> Option<Vec<i32>> {
    value.as_array()?.iter().map(|token| i32::try_from(token.as_i64()?).ok()).collect()
}

/// A list of texts, or one alone.
fn texts_of(value: &Value) -> Option<Vec<String>> {
    match value {
        Value::String(text) => Some(vec![text.clone()]),
        _ => value.as_array()?.iter().map(|text| text.as_str().map(String::from)).collect(),
    }
}

impl SamplingRule {
    /// The names of all settings.
    pub const FIELDS: [&str; 10] = [
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "logit_bias",
        "banned_tokens",
        "allowed_tokens",
    ];

    /// At a temperature, and nothing else.
    pub fn at(temperature: f64) -> SamplingRule {
        SamplingRule { temperature, ..SamplingRule::default() }
    }

    /// Takes the settings that an object has by the names of the fields; what else it has is not read.
    ///
    /// # Errors
    /// Every field that does not have the form of its setting.
    pub fn read(&mut self, fields: &Map<String, Value>) -> Result<(), ModelError> {
        let mut settings = Settings { fields, complaints: Vec::new() };
        self.read_all(&mut settings);
        ModelError::all(settings.complaints)
    }

    fn read_all(&mut self, settings: &mut Settings) {
        settings.number("temperature", &mut self.temperature);
        let count = |value: &Value| value.as_u64().and_then(|k| usize::try_from(k).ok());
        settings.read("top_k", &mut self.top_k, "a whole number of at least 0", count);
        settings.number("top_p", &mut self.top_p);
        settings.number("min_p", &mut self.min_p);
        settings.number("repetition_penalty", &mut self.repetition_penalty);
        settings.number("frequency_penalty", &mut self.frequency_penalty);
        settings.number("presence_penalty", &mut self.presence_penalty);
        settings.read("logit_bias", &mut self.logit_bias, "an object of numbers by token", |value| {
            let each = value.as_object()?.iter();
            each.map(|(token, bias)| Some((token.parse().ok()?, bias.as_f64()?))).collect()
        });
        settings.read("banned_tokens", &mut self.banned_tokens, "a list of tokens", tokens_of);
        settings
            .read("allowed_tokens", &mut self.allowed_tokens, "a list of tokens", |value| tokens_of(value).map(Some));
    }

    /// The settings as [`SamplingRule::read`] takes them: the temperature, and what is asked for beside it.
    pub fn json(&self) -> Map<String, Value> {
        let of = |rule: &SamplingRule| {
            json!({
                "temperature": rule.temperature, "top_k": rule.top_k, "top_p": rule.top_p, "min_p": rule.min_p,
                "repetition_penalty": rule.repetition_penalty, "frequency_penalty": rule.frequency_penalty,
                "presence_penalty": rule.presence_penalty, "logit_bias": rule.logit_bias,
                "banned_tokens": rule.banned_tokens, "allowed_tokens": rule.allowed_tokens,
            })
        };
        let (all, default) = (of(self), of(&SamplingRule::default()));
        let asked = |name: &&str| *name == "temperature" || all[*name] != default[*name];
        SamplingRule::FIELDS.iter().copied().filter(asked).map(|name| (name.into(), all[name].clone())).collect()
    }

    /// Whether log-probabilities are those of the logits at the temperature, and of all tokens.
    pub fn is_plain(&self) -> bool {
        *self == SamplingRule::at(self.temperature)
    }

    /// Everything that is out of its range.
    fn complaints(&self, c: &Config) -> Vec<ModelError> {
        let mut found = Vec::new();
        let mut held = |holds: bool, field: &'static str, is: f64, range: &str| {
            if !holds {
                found.push(ModelError::input(field, format!("is {is}; use {range}")));
            }
        };
        let (p, finite) = (self.top_p as f32, |v: f64| (v as f32).is_finite());
        held(p > 0.0 && self.top_p <= 1.0, "top_p", self.top_p, "a number above 0 in f32, and at most 1");
        held((0.0..=1.0).contains(&self.min_p), "min_p", self.min_p, "a number from 0 to 1");
        let r = self.repetition_penalty;
        held(finite(r) && r as f32 > 0.0, "repetition_penalty", r, "a number above 0 and within f32");
        for (name, v) in [("frequency_penalty", self.frequency_penalty), ("presence_penalty", self.presence_penalty)] {
            held(finite(v), name, v, "a number within f32");
        }
        let biases = self.logit_bias.values().copied();
        biases.for_each(|v| held(finite(v), "logit_bias", v, "numbers within f32; `banned_tokens` bans a token"));
        found.extend(check_temperature(self.temperature).err());
        let allowed = self.allowed_tokens.as_deref().unwrap_or_default();
        let biased: Vec<i32> = self.logit_bias.keys().copied().collect();
        for (name, tokens) in
            [("logit_bias", &biased[..]), ("banned_tokens", &self.banned_tokens), ("allowed_tokens", allowed)]
        {
            found.extend(c.check_tokens(name, tokens, 0).err());
        }
        if found.is_empty() && self.bias(c.vocab).is_some_and(|bias| bias.iter().all(|b| *b == f32::NEG_INFINITY)) {
            let name = if self.allowed_tokens.is_some() { "allowed_tokens" } else { "banned_tokens" };
            found.push(ModelError::input(name, "leave no token that may be sampled"));
        }
        found
    }

    /// What is added to each logit; `None` for nothing. A bias of -0 changes no bit.
    fn bias(&self, vocab: usize) -> Option<Vec<f32>> {
        if self.logit_bias.is_empty() && self.banned_tokens.is_empty() && self.allowed_tokens.is_none() {
            return None;
        }
        let mut bias = vec![if self.allowed_tokens.is_some() { f32::NEG_INFINITY } else { -0.0 }; vocab];
        self.allowed_tokens.iter().flatten().for_each(|token| bias[*token as usize] = -0.0);
        self.logit_bias.iter().for_each(|(token, b)| bias[*token as usize] += *b as f32);
        self.banned_tokens.iter().for_each(|token| bias[*token as usize] = f32::NEG_INFINITY);
        Some(bias)
    }
}

impl Sampling {
    /// Takes the settings that an object has by the names of the fields of the rule, and `stop`, `stop_token_ids`, `experts` and
    /// `adapter` (a name, null for none, or a list of them, one for each prompt); what else it has is not read.
    ///
    /// # Errors
    /// Every field that does not have the form of its setting.
    pub fn read(&mut self, fields: &Map<String, Value>) -> Result<(), ModelError> {
        let mut settings = Settings { fields, complaints: Vec::new() };
        self.rule.read_all(&mut settings);
        settings.read("stop", &mut self.stop, "a text or a list of texts", texts_of);
        settings.read("stop_token_ids", &mut self.stop_token_ids, "a list of tokens", tokens_of);
        settings.read("experts", &mut self.experts, "true or false", Value::as_bool);
        // Null says something here.
        let adapters = fields.get("adapter").map(|value| match value {
            Value::Array(all) => all.iter().map(AdapterChoice::of).collect(),
            one => AdapterChoice::of(one).map(|one| vec![one]),
        });
        match adapters {
            None => {}
            Some(Some(adapters)) => self.adapters = adapters,
            Some(None) => settings.complaints.push(ModelError::input("adapter", "must be a name, or null for none")),
        }
        ModelError::all(settings.complaints)
    }

    /// Checks all settings for a model of `c`.
    ///
    /// # Errors
    /// Every one that is out of its range.
    pub fn check(&self, c: &Config) -> Result<(), ModelError> {
        let mut found = self.rule.complaints(c);
        found.extend(c.check_tokens("stop_token_ids", &self.stop_token_ids, 0).err());
        if self.experts && c.mixtures().is_empty() {
            found.push(ModelError::input("experts", "the model has no mixture of experts; nothing can be recorded"));
        }
        if self.stop.iter().any(String::is_empty) {
            found.push(ModelError::input("stop", "holds a text without characters; leave it out"));
        }
        ModelError::all(found)
    }

    /// How tokens come from logits, where all settings are right for a model of `c`.
    ///
    /// # Errors
    /// As [`Sampling::check`].
    pub(crate) fn checked(&self, c: &Config) -> Result<Checked, ModelError> {
        self.check(c)?;
        Ok(Checked { rule: self.rule.clone(), bias: self.rule.bias(c.vocab) })
    }

    /// Whether a text of these tokens holds one that it ends behind.
    pub(crate) fn ends(&self, model: &Model, tokens: &[i32]) -> Result<bool, ModelError> {
        if self.stop.is_empty() {
            return Ok(false);
        }
        let text = model.decode(tokens)?;
        Ok(self.stop.iter().any(|stop| text.contains(stop)))
    }
}

/// Refuses a temperature that logits cannot be divided by.
pub(crate) fn check_temperature(t: f64) -> Result<(), ModelError> {
    let inverse = (1.0 / t) as f32;
    if t == 0.0 || t > 0.0 && t.is_finite() && inverse > 0.0 && inverse.is_finite() {
        return Ok(());
    }
    let why = format!("is {t}; it must be 0 or a number above 0 whose inverse is within f32");
    Err(ModelError::input("temperature", why))
}

/// What logits are divided by for log-probabilities: at a temperature of 0, where the likeliest token is taken, they are those
/// at 1.
pub(crate) fn divisor(temperature: f64) -> f64 {
    if temperature == 0.0 { 1.0 } else { temperature }
}

/// A rule that has been checked, as ops take it.
pub(crate) struct Checked {
    rule: SamplingRule,
    bias: Option<Vec<f32>>,
}

impl Checked {
    /// # Errors
    /// Every setting that is out of its range.
    pub fn new(rule: &SamplingRule, c: &Config) -> Result<Checked, ModelError> {
        ModelError::all(rule.complaints(c))?;
        Ok(Checked { rule: rule.clone(), bias: rule.bias(c.vocab) })
    }

    fn looks_back(&self) -> bool {
        let SamplingRule { repetition_penalty, frequency_penalty, presence_penalty, .. } = self.rule;
        (repetition_penalty, frequency_penalty, presence_penalty) != (1.0, 0.0, 0.0)
    }
}

/// Refuses what tokens behind a prompt cannot have been drawn from: everything that is wrong with the lists of a text, each
/// thing once. A token that does not count need have none.
fn check_kept(
    c: &Config,
    who: &str,
    kept: &[Vec<i32>],
    drawn: &[i32],
    counts: impl Fn(usize) -> bool,
) -> Vec<ModelError> {
    let bad = |why: String| ModelError::input("sampling_mask", format!("{who} {why}"));
    if kept.len() != drawn.len() {
        let (lists, tokens) = (kept.len(), drawn.len());
        return vec![bad(format!("has {lists} lists of tokens for {tokens} behind its prompt; give one for each"))];
    }
    let lists = || kept.iter().zip(drawn).enumerate();
    let empty = lists().find(|(place, (list, _))| list.is_empty() && counts(*place));
    let outside = lists().find_map(|(place, (list, _))| {
        let token = list.iter().find(|token| usize::try_from(**token).map_or(true, |token| token >= c.vocab))?;
        Some(format!("has token {token} in list {place}, outside the vocabulary of {}", c.vocab))
    });
    let missing = lists().find(|(_, (list, token))| !list.is_empty() && !list.contains(token));
    let found = [
        empty.map(|(place, _)| format!("has an empty list {place}; a token is drawn from at least itself")),
        outside,
        missing.map(|(place, (_, token))| format!("leaves token {token} out of list {place}, which it was drawn from")),
    ];
    found.into_iter().flatten().map(bad).collect()
}

impl Config {
    /// Refuses what tokens behind a prompt cannot have been drawn from: everything that is wrong with the lists of the text `who`.
    ///
    /// # Errors
    /// Another number of lists than of tokens; a list that is empty, has a token outside the vocabulary, or leaves out the token that
    /// was drawn.
    pub fn check_sampling_mask(&self, who: &str, kept: &[Vec<i32>], drawn: &[i32]) -> Result<(), ModelError> {
        ModelError::all(check_kept(self, who, kept, drawn, |_| true))
    }
}

/// Rows of logits: the rule of each, the text before its token, and what a record says that the token was drawn from.
#[derive(Default)]
pub(crate) struct Places<'a> {
    rules: Vec<&'a Checked>,
    kept: Vec<Option<&'a [i32]>>,
    tokens: Vec<i32>,
    begin: Vec<i32>,
    prompt_end: Vec<i32>,
    end: Vec<i32>,
}

impl<'a> Places<'a> {
    /// The places of tokens behind a text of a prompt and an output: behind the first `from` of its output, and so on to all.
    /// With the output stands what each of its tokens and the next was drawn from, where a record says so; nothing says nothing.
    pub fn push(
        &mut self,
        rule: &'a Checked,
        prompt: &[i32],
        (output, kept): (&[i32], Option<&'a [Vec<i32>]>),
        from: usize,
    ) {
        let begin = self.tokens.len();
        let place = |at: usize| {
            // A text without tokens has no penalties.
            let at = if rule.looks_back() { at } else { 0 };
            i32::try_from(begin + at).expect("texts of a step have fewer tokens")
        };
        for len in from..=output.len() {
            self.rules.push(rule);
            self.kept.push(kept.map(|kept| &kept[len][..]).filter(|kept| !kept.is_empty()));
            self.begin.push(place(0));
            self.prompt_end.push(place(prompt.len()));
            self.end.push(place(prompt.len() + len));
        }
        if rule.looks_back() {
            self.tokens.extend_from_slice(prompt);
            self.tokens.extend_from_slice(output);
        }
    }

    fn each<T>(&self, of: impl Fn(&SamplingRule) -> T) -> Vec<T> {
        self.rules.iter().map(|checked| of(&checked.rule)).collect()
    }

    /// A setting of the truncation of each row, and `none` where all that is left is drawn from: where the likeliest token is
    /// taken, and where a record says what was left.
    fn truncation<T: Copy>(&self, none: T, of: impl Fn(&SamplingRule) -> T) -> Vec<T> {
        let of_row = |(checked, kept): (&&Checked, &Option<&[i32]>)| {
            if checked.rule.temperature == 0.0 || kept.is_some() { none } else { of(&checked.rule) }
        };
        self.rules.iter().zip(&self.kept).map(of_row).collect()
    }

    /// What is added to the logits of all rows: the biases of their rules, and -inf to what a record says was left out.
    fn biases(&self, vocab: usize) -> Option<Vec<f32>> {
        if self.rules.iter().all(|checked| checked.bias.is_none()) && self.kept.iter().all(Option::is_none) {
            return None;
        }
        let mut biases = vec![-0f32; self.rules.len() * vocab];
        for ((to, checked), kept) in biases.chunks_mut(vocab).zip(&self.rules).zip(&self.kept) {
            checked.bias.iter().for_each(|bias| to.copy_from_slice(bias));
            if let Some(kept) = kept {
                let of_kept: Vec<f32> = kept.iter().map(|token| to[*token as usize]).collect();
                to.fill(f32::NEG_INFINITY);
                kept.iter().zip(of_kept).for_each(|(token, bias)| to[*token as usize] = bias);
            }
        }
        Some(biases)
    }

    /// Logits with penalties and biases, divided by the temperature, and -inf for tokens that may not be sampled.
    pub fn truncated(&self, cpu: &Cpu, vocab: usize, logits: &[f32]) -> Result<Vec<f32>, ModelError> {
        let (rows, mut y) = (self.rules.len(), vec![0f32; logits.len()]);
        let (mut penalised, biases) = (None, self.biases(vocab));
        if biases.is_some() || self.rules.iter().any(|checked| checked.looks_back()) {
            let by = [
                self.each(|rule| rule.repetition_penalty as f32),
                self.each(|rule| rule.frequency_penalty as f32),
                self.each(|rule| rule.presence_penalty as f32),
            ];
            penalised = Some(self.penalised(cpu, vocab, logits, &by, biases.as_deref())?);
        }
        let scale = self.each(|rule| (1.0 / divisor(rule.temperature)) as f32);
        let top_k = self.truncation(0, |rule| i32::try_from(rule.top_k).unwrap_or(i32::MAX));
        let top_p = self.truncation(1.0, |rule| rule.top_p as f32);
        let min_p = self.truncation(0.0, |rule| rule.min_p as f32);
        let by = Truncation { scale: &scale[..], top_k: &top_k, top_p: &top_p, min_p: &min_p };
        let mut kept = vec![0; rows];
        truncate(cpu, vocab, penalised.as_deref().unwrap_or(logits), by, &mut y, &mut kept)?;
        match kept.iter().position(|kept| *kept == 0) {
            None => Ok(y),
            Some(row) if y[row * vocab].is_nan() => Err(self.beyond(row, &logits[row * vocab..][..vocab])),
            Some(_) => Err(ModelError::input("sampling", "no token is left whose logit is finite in f32")),
        }
    }

    /// Logits with a repetition, a frequency and a presence penalty of each row, and biases.
    fn penalised(
        &self,
        cpu: &Cpu,
        vocab: usize,
        logits: &[f32],
        [repetition, frequency, presence]: &[Vec<f32>; 3],
        biases: Option<&[f32]>,
    ) -> Result<Vec<f32>, ModelError> {
        let Places { tokens, begin, prompt_end, end, .. } = self;
        let by = Penalties { tokens, begin, prompt_end, end, repetition: &repetition[..], frequency, presence };
        let mut z = vec![0f32; logits.len()];
        penalize(cpu, vocab, logits, by, biases, &mut z)?;
        Ok(z)
    }

    /// Logits, over the temperature of a row or with its penalties, are beyond f32.
    fn beyond(&self, row: usize, logits: &[f32]) -> ModelError {
        let rule = &self.rules[row].rule;
        let largest = logits.iter().fold(0f32, |most, x| most.max(x.abs()));
        let why = format!(
            "is {}; logits as large as {largest:e} over it are beyond f32: raise it, or look at the weights{}",
            divisor(rule.temperature),
            if rule.is_plain() { "" } else { " and the penalties" },
        );
        ModelError::input("temperature", why)
    }

    /// A token of each row of `y`, and its log-probability; each row has a random number.
    pub fn sample(&self, cpu: &Cpu, y: &[f32], random: &[u64]) -> Result<Vec<i32>, ModelError> {
        let (rows, vocab) = (self.rules.len(), y.len() / self.rules.len().max(1));
        let (mut likeliest, mut drawn) = (vec![0; rows], vec![0; rows]);
        let greedy = self.each(|rule| rule.temperature == 0.0);
        if greedy.contains(&true) {
            argmax(cpu, rows, vocab, y, &mut likeliest)?;
        }
        if greedy.contains(&false) {
            let halves: Vec<i32> = random.iter().flat_map(|bits| random_halves(*bits)).collect();
            draw(cpu, vocab, y, &halves, &mut drawn)?;
        }
        Ok((0..rows).map(|row| if greedy[row] { likeliest[row] } else { drawn[row] }).collect())
    }

    /// The log-probability of a token of each row of `y`; -inf for one that may not be sampled.
    pub fn logprobs(&self, cpu: &Cpu, logits: &[f32], y: &[f32], tokens: &[i32]) -> Result<Vec<f32>, ModelError> {
        let (rows, vocab) = (tokens.len(), y.len() / tokens.len().max(1));
        let (mut scores, mut lse) = (vec![0f32; rows], vec![0f32; rows]);
        logprob(cpu, &Logprob::new(rows, vocab), y, tokens, &mut scores, &mut lse)?;
        let is_plain = |row: usize| self.rules[row].rule.is_plain() && self.kept[row].is_none();
        let wrong = |row: usize| scores[row].is_nan() || !scores[row].is_finite() && is_plain(row);
        match (0..rows).find(|row| wrong(*row)) {
            None => Ok(scores),
            Some(row) => Err(self.beyond(row, &logits[row * vocab..][..vocab])),
        }
    }
}

/// SplitMix64's step and finish.
pub(crate) fn mix(state: u64) -> u64 {
    let mut z = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// The random bits of a position: a hash of its three arguments.
pub(crate) fn random(seed: u64, sequence: u64, position: u64) -> u64 {
    mix(mix(mix(seed).wrapping_add(sequence)).wrapping_add(position))
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn random_numbers_are_even_and_differ_by_every_argument() {
        let share = |seed, sequence, position| (random(seed, sequence, position) >> 11) as f64 / (1u64 << 53) as f64;
        let mut buckets = [0; 16];
        for sequence in 0..40 {
            for position in 0..400 {
                buckets[(share(7, sequence, position) * 16.0) as usize] += 1;
            }
        }
        assert!(buckets.iter().all(|&count| (850..1150).contains(&count)), "{buckets:?}");
        let one = random(1, 2, 3);
        assert!([random(2, 2, 3), random(1, 3, 3), random(1, 2, 4), random(1, 3, 2)].iter().all(|&other| other != one));
        // Computed by another program from the page.
        assert_eq!(share(1, 2, 3), 0.4175580595044027);
    }

    /// What is written is read again, and nothing stands there that was not asked for.
    pub(crate) fn settings_are_read_as_they_are_written() {
        let rule = SamplingRule {
            temperature: 0.7,
            top_k: 5,
            min_p: 0.01,
            logit_bias: [(3, -1.5)].into(),
            allowed_tokens: Some(vec![1, 3]),
            ..SamplingRule::default()
        };
        let mut found = SamplingRule::default();
        found.read(&rule.json()).unwrap();
        assert_eq!((found, rule.json().len()), (rule, 5));
        assert_eq!(SamplingRule::at(0.5).json().len(), 1);
        let wrong = json!({"temperature": "hot", "top_k": -1, "logit_bias": [1], "stop": [3], "banned_tokens": [1e12], "of the user": {}});
        let found = Sampling::default().read(wrong.as_object().unwrap()).unwrap_err().to_string();
        for field in
            ["temperature: is \"hot\"", "top_k: is -1", "logit_bias: is [1]", "stop: is [3]", "banned_tokens: is"]
        {
            assert!(found.contains(field), "{found}");
        }
        assert!(!found.contains("user"), "{found}");
    }

    /// Draws follow the distribution that truncation leaves: chi-square of a million, of 7 degrees of freedom.
    pub(crate) fn draws_follow_their_distribution() {
        let (cpu, logits) = (Cpu::best(), [0.3f32, -1.0, 2.0, 1.1, 0.0, 1.9, -0.4, 0.8, 1.5, -3.0]);
        let rule = SamplingRule { temperature: 0.9, top_k: 8, ..SamplingRule::default() };
        let checked = Checked { rule, bias: None };
        let mut one = Places::default();
        one.push(&checked, &[], (&[], None), 0);
        let y = one.truncated(&cpu, 10, &logits).unwrap();
        let total: f64 = y.iter().map(|z| f64::from(*z).exp()).sum();
        let mut counts = [0u32; 10];
        let (mut rows, mut many) = (Places::default(), Vec::new());
        for _ in 0..1000 {
            rows.push(&checked, &[], (&[], None), 0);
            many.extend_from_slice(&y);
        }
        for sequence in 0..1000 {
            let bits: Vec<u64> = (0..1000).map(|position| random(5, sequence, position)).collect();
            rows.sample(&cpu, &many, &bits).unwrap().into_iter().for_each(|token| counts[token as usize] += 1);
        }
        let chi: f64 = y
            .iter()
            .zip(counts)
            .filter(|(z, _)| z.is_finite())
            .map(|(z, count)| {
                let expected = f64::from(*z).exp() / total * 1e6;
                (f64::from(count) - expected).powi(2) / expected
            })
            .sum();
        assert_eq!((counts[1], counts[9]), (0, 0));
        // Beyond it lies one of a thousand.
        assert!(chi < 24.3, "{chi}");
    }
}
