use crate::decoder::{Decoder, Rows};
use crate::generate::{self, Generation, Tokenizer};
use crate::kv_cache::buffer;
use crate::weights::Weights;
use crate::{Config, Grouping, ModelError, Schedule};
use half::bf16;
use samebits_ops::{Cpu, Element};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::OnceLock;

/// What matrix products and attention read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// The weights as stored; activations are rounded to bf16 where a product reads them.
    Bf16,
    /// The weights widened exactly; nothing is rounded below f32.
    Fp32,
}

impl FromStr for Precision {
    type Err = ModelError;

    fn from_str(text: &str) -> Result<Precision, ModelError> {
        match text {
            "bf16" => Ok(Precision::Bf16),
            "fp32" => Ok(Precision::Fp32),
            _ => Err(ModelError::input("precision", format!("`{text}` is not bf16 or fp32"))),
        }
    }
}

/// A decoder language model with its weights in memory, packed for one [`Precision`].
pub struct Model {
    dir: PathBuf,
    config: Config,
    weights: Packed,
    tokenizer: OnceLock<Tokenizer>,
}

enum Packed {
    Bf16(Decoder<bf16>),
    Fp32(Decoder<f32>),
}

impl Model {
    /// Loads the Hugging Face folder `dir`; `cpu` packs the weights, which then run on any [`Cpu`].
    ///
    /// # Errors
    /// Any file, field or tensor that is missing, damaged, unexpected, not finite or asks for something unsupported.
    /// `tokenizer.json` is not needed before [`Model::generate`].
    pub fn load(dir: &Path, precision: Precision, cpu: &Cpu) -> Result<Model, ModelError> {
        let config = Config::load(dir)?;
        let files = Weights::open(dir)?;
        let weights = match precision {
            Precision::Bf16 => Packed::Bf16(Decoder::load(&config, files, cpu)?),
            Precision::Fp32 => Packed::Fp32(Decoder::load(&config, files, cpu)?),
        };
        Ok(Model { dir: dir.into(), config, weights, tokenizer: OnceLock::new() })
    }

    /// Sizes and parameters.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// `tokens[B,T] -> logits[B,T,V]` in f32, straight from the last product. `batch` is B and `len` is T.
    ///
    /// # Errors
    /// No tokens, a length that is not `batch * len`, a token outside the vocabulary, more tokens than the model has
    /// positions, or too little memory.
    pub fn forward(
        &self,
        cpu: &Cpu,
        tokens: &[i32],
        batch: usize,
        len: usize,
        schedule: Schedule,
        grouping: Grouping,
    ) -> Result<Vec<f32>, ModelError> {
        if tokens.is_empty() || batch.checked_mul(len) != Some(tokens.len()) {
            let why = format!("there are {}; pass batch {batch} times length {len}, at least 1", tokens.len());
            return Err(ModelError::input("tokens", why));
        }
        self.config.check_tokens("tokens", tokens, len)?;
        if let Schedule::Chunk(0) = schedule {
            return Err(ModelError::input("schedule", "chunk:0 makes no progress; use chunk:N with N at least 1"));
        }
        match &self.weights {
            Packed::Bf16(decoder) => forward(decoder, cpu, tokens, batch, self.config.vocab, schedule, grouping),
            Packed::Fp32(decoder) => forward(decoder, cpu, tokens, batch, self.config.vocab, schedule, grouping),
        }
    }

    /// Continues `prompt` greedily by at most `max_tokens` tokens.
    ///
    /// The prompt begins with the model's bos token where it has one, unless the tokenizer adds it itself or
    /// `tokenizer_config.json` says `"add_bos_token": false`. Generation ends at any of the model's eos tokens, after
    /// `max_tokens`, or at the model's last position.
    ///
    /// # Errors
    /// No usable `tokenizer.json`; a prompt without tokens, outside the vocabulary or longer than the model's positions;
    /// logits that are NaN.
    pub fn generate(&self, cpu: &Cpu, prompt: &str, max_tokens: usize) -> Result<Generation, ModelError> {
        let tokenizer = match self.tokenizer.get() {
            Some(tokenizer) => tokenizer,
            None => {
                let loaded = Tokenizer::load(&self.dir)?;
                self.tokenizer.get_or_init(|| loaded)
            }
        };
        match &self.weights {
            Packed::Bf16(decoder) => generate::greedy(decoder, &self.config, tokenizer, cpu, prompt, max_tokens),
            Packed::Fp32(decoder) => generate::greedy(decoder, &self.config, tokenizer, cpu, prompt, max_tokens),
        }
    }
}

impl Config {
    /// An error unless every token is in the vocabulary and `len` tokens fit the model's positions.
    pub(crate) fn check_tokens(&self, what: &'static str, tokens: &[i32], len: usize) -> Result<(), ModelError> {
        if len > self.max_positions {
            let why = format!("a sequence has {len}; max_position_embeddings is {}", self.max_positions);
            return Err(ModelError::input(what, why));
        }
        let inside = |&token: &i32| usize::try_from(token).is_ok_and(|token| token < self.vocab);
        match tokens.iter().position(|token| !inside(token)) {
            None => Ok(()),
            Some(i) => {
                let why = format!("element {i} is {}; the vocabulary is 0 to {}", tokens[i], self.vocab - 1);
                Err(ModelError::input(what, why))
            }
        }
    }
}

/// Feeds `tokens[B,T]` through the KV cache as scheduled: logits `[B,T,V]`.
fn forward<A: Element>(
    decoder: &Decoder<A>,
    cpu: &Cpu,
    tokens: &[i32],
    batch: usize,
    vocab: usize,
    schedule: Schedule,
    grouping: Grouping,
) -> Result<Vec<f32>, ModelError> {
    let len = tokens.len() / batch;
    let group = match grouping {
        Grouping::Together => batch,
        Grouping::Alone => 1,
    };
    let mut logits = buffer(&[tokens.len(), vocab])?;
    for (tokens, logits) in tokens.chunks(group * len).zip(logits.chunks_mut(group * len * vocab)) {
        let mut cache = decoder.cache(group, len)?;
        let step = schedule.step(len);
        for start in (0..len).step_by(step) {
            let end = len.min(start.saturating_add(step));
            let piece: Vec<i32> = tokens.chunks_exact(len).flat_map(|row| &row[start..end]).copied().collect();
            let found = decoder.forward(cpu, &piece, &mut cache, Rows::All)?;
            let rows = logits.chunks_exact_mut(len * vocab).zip(found.chunks_exact((end - start) * vocab));
            for (row, found) in rows {
                row[start * vocab..end * vocab].copy_from_slice(found);
            }
        }
    }
    Ok(logits)
}
