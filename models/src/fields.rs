//! The fields of a JSON file, read strictly: whatever is asked for is checked, and whatever nobody asked for is refused.

use crate::ModelError;
use serde_json::{Map, Value};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Fields of `config.json` that cannot change what a forward computes: bookkeeping, training, and how texts are sampled.
const INERT: [&str; 66] = [
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_commit_hash",
    "_name_or_path",
    "add_cross_attention",
    "architectures",
    "attention_dropout",
    "attn_implementation",
    "auto_map",
    "aux_loss_alpha",
    "bad_words_ids",
    "begin_suppress_tokens",
    "cache_implementation",
    "chunk_size_feed_forward",
    "cross_attention_hidden_size",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "dtype",
    "early_stopping",
    "embd_pdrop",
    "encoder_no_repeat_ngram_size",
    "ep_size",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "id2label",
    "initializer_range",
    "is_decoder",
    "is_encoder_decoder",
    "label2id",
    "length_penalty",
    "max_length",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "output_scores",
    "prefix",
    "problem_type",
    "pruned_heads",
    "remove_invalid_values",
    "repetition_penalty",
    "resid_pdrop",
    "return_dict",
    "return_dict_in_generate",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "sep_token_id",
    "seq_aux",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "typical_p",
    "use_cache",
];

/// A JSON object and the file it stands in. A field that is null counts as absent, as it does for transformers.
pub(crate) struct Fields {
    path: PathBuf,
    map: Map<String, Value>,
    /// What has been asked for.
    asked: RefCell<BTreeSet<String>>,
}

impl Fields {
    pub fn read(path: PathBuf) -> Result<Fields, ModelError> {
        let map = read_object(&path)?;
        Ok(Fields::new(path, map))
    }

    /// The fields of an object in memory.
    pub fn parse(text: &str) -> Result<Fields, ModelError> {
        let path = PathBuf::from("config");
        match serde_json::from_str(text) {
            Ok(Value::Object(map)) => Ok(Fields::new(path, map)),
            Ok(_) => Err(ModelError::file(&path, "is not a JSON object")),
            Err(e) => Err(ModelError::file(&path, format!("is not JSON: {e}"))),
        }
    }

    pub fn new(path: PathBuf, map: Map<String, Value>) -> Fields {
        Fields { path, map, asked: RefCell::default() }
    }

    pub fn get(&self, field: &str) -> Option<&Value> {
        self.asked.borrow_mut().insert(field.into());
        self.map.get(field).filter(|value| !value.is_null())
    }

    /// An error unless the fields are there, if only as null: their absence means a default that no other family has.
    pub fn present(&self, fields: &[&str]) -> Result<(), ModelError> {
        match fields.iter().find(|field| !self.map.contains_key(**field)) {
            None => Ok(()),
            Some(field) => Err(self.refuse(*field, "is missing; write it, null for none")),
        }
    }

    /// Notes that the family's code does not read these fields, whatever they say.
    pub fn unread(&self, fields: &[&str]) {
        self.asked.borrow_mut().extend(fields.iter().map(|field| field.to_string()));
    }

    pub fn refuse(&self, field: impl Into<String>, why: impl Into<String>) -> ModelError {
        ModelError::field(&self.path, field, why)
    }

    /// A whole number of at least `least`, if present.
    fn count(&self, field: &str, least: u64) -> Result<Option<usize>, ModelError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        match value.as_u64().and_then(|n| i32::try_from(n).ok()) {
            Some(n) if n as u64 >= least => Ok(Some(n as usize)),
            _ => Err(self.refuse(field, format!("is {value}; it must be a whole number from {least} to {}", i32::MAX))),
        }
    }

    /// A size, if present.
    pub fn size(&self, field: &str) -> Result<Option<usize>, ModelError> {
        self.count(field, 1)
    }

    /// A size or 0; 0 where it is absent.
    pub fn size_or_zero(&self, field: &str) -> Result<usize, ModelError> {
        Ok(self.count(field, 0)?.unwrap_or(0))
    }

    pub fn required_size(&self, field: &str) -> Result<usize, ModelError> {
        self.size(field)?.ok_or_else(|| self.refuse(field, "is missing; it must be a whole number of at least 1"))
    }

    pub fn flag(&self, field: &str, default: bool) -> Result<bool, ModelError> {
        match self.get(field) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(value) => Err(self.refuse(field, format!("is {value}; it must be true or false"))),
        }
    }

    /// A finite number above 0, if present.
    pub fn positive(&self, field: &str) -> Result<Option<f64>, ModelError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        match value.as_f64().filter(|v| v.is_finite() && *v > 0.0) {
            Some(v) => Ok(Some(v)),
            None => Err(self.refuse(field, format!("is {value}; it must be a number above 0"))),
        }
    }

    /// An error unless the field is absent or one of `supported`.
    pub fn only(&self, field: &str, supported: &[Value]) -> Result<(), ModelError> {
        match self.get(field).filter(|value| !supported.contains(value)) {
            None => Ok(()),
            Some(value) => {
                let names: Vec<String> = supported.iter().map(Value::to_string).collect();
                Err(self.refuse(field, format!("is {value}; supported is {}", names.join(" or "))))
            }
        }
    }

    /// A token id, if present.
    pub fn token(&self, field: &str, vocab: usize) -> Result<Option<i32>, ModelError> {
        self.get(field).map(|value| self.token_value(field, value, vocab)).transpose()
    }

    fn token_value(&self, field: &str, value: &Value, vocab: usize) -> Result<i32, ModelError> {
        match value.as_u64().and_then(|n| i32::try_from(n).ok()) {
            Some(id) if (id as usize) < vocab => Ok(id),
            _ => Err(self.refuse(field, format!("is {value}; a token is a whole number below vocab_size {vocab}"))),
        }
    }

    /// `eos_token_id`: absent, one token or a list.
    pub fn eos(&self, vocab: usize) -> Result<Vec<i32>, ModelError> {
        match self.get("eos_token_id") {
            Some(Value::Array(ids)) => ids.iter().map(|id| self.token_value("eos_token_id", id, vocab)).collect(),
            _ => Ok(self.token("eos_token_id", vocab)?.into_iter().collect()),
        }
    }

    /// The fields of an object, if present; they are refused with the object's name before their own.
    pub fn object(&self, field: &str) -> Result<Option<&Map<String, Value>>, ModelError> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(map)),
            Some(value) => Err(self.refuse(field, format!("is {value}; it must be an object"))),
        }
    }

    /// An error when there is a field that nobody asked for and that is not known to be without effect.
    pub fn finish(&self) -> Result<(), ModelError> {
        let asked = self.asked.borrow();
        let unknown = |(field, value): &(&String, &Value)| {
            !value.is_null() && !asked.contains(*field) && !INERT.contains(&&***field)
        };
        match self.map.iter().find(unknown) {
            None => Ok(()),
            Some((field, value)) => {
                let text = value.to_string();
                let shown = if text.len() > 40 { "set".into() } else { text };
                let why = format!("is {shown}, which this family does not know; remove it if it changes nothing");
                Err(self.refuse(field.escape_debug().to_string(), why))
            }
        }
    }
}

/// The object in a JSON file.
pub(crate) fn read_object(path: &Path) -> Result<Map<String, Value>, ModelError> {
    let bytes = fs::read(path).map_err(|e| ModelError::file(path, format!("cannot be read: {e}")))?;
    match serde_json::from_slice(&bytes) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(ModelError::file(path, "is not a JSON object")),
        Err(e) => Err(ModelError::file(path, format!("is not JSON: {e}"))),
    }
}
