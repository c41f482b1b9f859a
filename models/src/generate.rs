//! Greedy continuation of a text.

use crate::decoder::{Feed, Rows, Steps};
use crate::fields::read_object;
use crate::watch::Watch;
use crate::{Config, ModelError, PAGE_SIZE, PageOrder};
use samebits_ops::{Cpu, argmax};
use std::fs;
use std::path::{Path, PathBuf};

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
}

/// `tokenizer.json`, and whether bos is left to the model.
pub(crate) struct Tokenizer {
    path: PathBuf,
    inner: tokenizers::Tokenizer,
    add_bos: bool,
}

impl Tokenizer {
    pub fn load(dir: &Path) -> Result<Tokenizer, ModelError> {
        let path = dir.join("tokenizer.json");
        let bytes = fs::read(&path).map_err(|e| ModelError::file(&path, format!("cannot be read: {e}")))?;
        let mut inner = tokenizers::Tokenizer::from_bytes(bytes)
            .map_err(|e| ModelError::file(&path, format!("is not a tokenizer: {}", one_line(&e))))?;
        // Whatever the folder was prepared for, a prompt is neither cut nor filled up.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|e| ModelError::file(&path, one_line(&e)))?;
        let settings = dir.join("tokenizer_config.json");
        let add_bos = !settings.exists() || read_object(&settings)?.get("add_bos_token") != Some(&false.into());
        Ok(Tokenizer { path, inner, add_bos })
    }

    /// The tokens of `prompt` behind bos.
    pub fn encode(&self, config: &Config, prompt: &str) -> Result<Vec<i32>, ModelError> {
        let encoding = self
            .inner
            .encode(prompt, true)
            .map_err(|e| ModelError::input("prompt", format!("cannot be encoded: {}", one_line(&e))))?;
        let mut tokens = Vec::with_capacity(encoding.len() + 1);
        // The mask tells a bos that the tokenizer added from one that the prompt spells out.
        let added = |bos: i32| {
            encoding.get_ids().first() == Some(&(bos as u32)) && encoding.get_special_tokens_mask().first() == Some(&1)
        };
        tokens.extend(config.bos.filter(|&bos| self.add_bos && !added(bos)));
        for &id in encoding.get_ids() {
            let token = i32::try_from(id).ok().filter(|&token| (token as usize) < config.vocab).ok_or_else(|| {
                let why = format!("gives token {id}, but vocab_size in config.json is {}", config.vocab);
                ModelError::file(&self.path, why)
            })?;
            tokens.push(token);
        }
        Ok(tokens)
    }

    /// The text of `tokens` without special ones: those the tokenizer marks and those the config names.
    fn decode(&self, config: &Config, tokens: &[i32]) -> Result<String, ModelError> {
        let special = |token: &i32| config.eos.contains(token) || [config.bos, config.pad].contains(&Some(*token));
        let ids: Vec<u32> = tokens.iter().filter(|token| !special(token)).map(|&token| token as u32).collect();
        let text = self.inner.decode(&ids, true);
        text.map_err(|e| ModelError::file(&self.path, format!("cannot decode {ids:?}: {}", one_line(&e))))
    }
}

/// Continues `prompt` by the likeliest token until eos, `max_tokens` or the last position.
pub(crate) fn greedy<D: Steps>(
    decoder: &D,
    tokenizer: &Tokenizer,
    cpu: &Cpu,
    prompt: &str,
    max_tokens: usize,
) -> Result<Generation, ModelError> {
    let config = decoder.config();
    let prompt = tokenizer.encode(config, prompt)?;
    if prompt.is_empty() {
        return Err(ModelError::input("prompt", "has no tokens and the model has no bos; pass some text"));
    }
    config.check_tokens("prompt", &prompt, prompt.len())?;

    let mut cache = decoder.cache(PAGE_SIZE, PageOrder::Ascending)?;
    let sequence = cache.open(prompt.len().saturating_add(max_tokens).min(config.max_positions));
    let mut fed = prompt.clone();
    let mut tokens = Vec::new();
    let stop = loop {
        if tokens.len() >= max_tokens {
            break Stop::MaxTokens;
        }
        if cache.len(sequence) + fed.len() > config.max_positions {
            break Stop::MaxPositions;
        }
        let feed = Feed { sequence, label: 0, tokens: &fed };
        let logits = decoder.step(cpu, &[feed], &mut cache, Rows::Last, &mut Watch::default())?;
        let mut next = [0];
        argmax(cpu, 1, config.vocab, &logits, &mut next)?;
        // argmax ranks NaN highest, so one look tells.
        if logits[next[0] as usize].is_nan() {
            let why =
                format!("the logits after position {} are NaN; its weights overflow f32", cache.len(sequence) - 1);
            return Err(ModelError::input("model", why));
        }
        if config.eos.contains(&next[0]) {
            break Stop::Eos;
        }
        tokens.push(next[0]);
        fed = next.to_vec();
    };
    let text = tokenizer.decode(config, &tokens)?;
    Ok(Generation { prompt, tokens, text, stop })
}

fn one_line(error: &tokenizers::Error) -> String {
    error.to_string().lines().collect::<Vec<_>>().join(" ")
}
