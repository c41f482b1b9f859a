//! Continuation of a text.

use crate::decoder::Runner;
use crate::step::{Rows, SequenceInput};
use crate::tokenizer::{Encoded, Tokenizer};
use crate::trace::{TraceHook, all_finite};
use crate::{Model, ModelError, PAGE_SIZE, PageOrder, Sample, Sampling, Serving};
use samebits_ops::{Cpu, argmax};

/// A continued prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Generation {
    /// The tokens fed to the model, bos included.
    pub prompt: Vec<i32>,
    /// The tokens after the prompt, without the eos that ended them.
    pub tokens: Vec<i32>,
    /// The text of `tokens`, special tokens left out.
    pub text: String,
    /// Why it ended.
    pub stop: Stop,
    /// One line that names the characters of the prompt in whose place the unknown token stands.
    pub warning: Option<String>,
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The model chose an eos token.
    Eos,
    /// As many tokens as were asked for.
    MaxTokens,
    /// The model has no further position.
    MaxPositions,
    /// A token behind which it was to end.
    StopToken,
    /// A text behind which it was to end.
    StopText,
    /// It was ended from outside.
    Ended,
}

impl Stop {
    /// `eos`, `max_tokens`, `max_positions`, `stop_token`, `stop_text` or `ended`.
    pub fn name(self) -> &'static str {
        match self {
            Stop::Eos => "eos",
            Stop::MaxTokens => "max_tokens",
            Stop::MaxPositions => "max_positions",
            Stop::StopToken => "stop_token",
            Stop::StopText => "stop_text",
            Stop::Ended => "ended",
        }
    }
}

/// Continues `prompt` as `sampling` says; what ends it is left out of the text.
pub(crate) fn sampled(model: &Model, cpu: &Cpu, prompt: &str, sampling: &Sampling) -> Result<Generation, ModelError> {
    let Encoded { tokens: prompt, warning } = model.encode(prompt)?;
    let mut samples = Vec::new();
    model.rollout(cpu, std::slice::from_ref(&prompt), sampling, &Serving::default(), |sample| {
        samples.push(sample);
        Ok(())
    })?;
    let Some(Sample { mut tokens, stop, .. }) = samples.pop() else {
        return Err(ModelError::input("samples", "is 0; a generation is one"));
    };
    if let Stop::Eos | Stop::StopToken = stop {
        tokens.pop();
    }
    let mut text = model.decode(&tokens)?;
    let ends = sampling.stop.iter().filter_map(|stop| text.find(stop));
    if let Some(end) = ends.min() {
        text.truncate(end);
    }
    Ok(Generation { prompt, tokens, text, stop, warning })
}

/// Continues `prompt` by the likeliest token until eos, `max_tokens` or the last position.
pub(crate) fn greedy(
    on: &Runner,
    tokenizer: &Tokenizer,
    prompt: &str,
    max_tokens: usize,
) -> Result<Generation, ModelError> {
    let config = on.config();
    let Encoded { tokens: prompt, warning } = tokenizer.encode(config, prompt)?;
    if prompt.is_empty() {
        return Err(ModelError::input("prompt", "has no tokens and the model has no bos; pass some text"));
    }
    config.check_tokens("prompt", &prompt, prompt.len())?;
    // Where the model ends a text ends; what was declared for a run is kept to.
    if config.longest() < config.max_positions {
        let who = format!("with {max_tokens} more tokens it");
        config.check_length("prompt", &who, prompt.len().saturating_add(max_tokens))?;
    }

    let adapter = on.decoder.adapters.only()?;
    let mut states = on.states(PAGE_SIZE, PageOrder::Ascending)?;
    let sequence = states.open(prompt.len().saturating_add(max_tokens).min(config.max_positions));
    let mut fed = prompt.clone();
    let mut tokens = Vec::new();
    let stop = loop {
        if tokens.len() >= max_tokens {
            break Stop::MaxTokens;
        }
        if states.len(sequence) + fed.len() > config.max_positions {
            break Stop::MaxPositions;
        }
        let input = SequenceInput { sequence, label: 0, tokens: &fed, adapter };
        let logits = on.step(&[input], &mut states, Rows::Last, &mut TraceHook::default())?;
        if !all_finite(&logits) {
            let fed = [&prompt[..], &tokens].concat();
            let limit = prompt.len().saturating_add(max_tokens).min(config.max_positions);
            return Err(on.why_not_finite((0, adapter), &fed, limit));
        }
        let mut next = [0];
        argmax(on.cpu, 1, config.vocab, &logits, &mut next)?;
        if config.eos.contains(&next[0]) {
            break Stop::Eos;
        }
        tokens.push(next[0]);
        fed = next.to_vec();
    };
    let text = tokenizer.decode(config, &tokens)?;
    Ok(Generation { prompt, tokens, text, stop, warning })
}
