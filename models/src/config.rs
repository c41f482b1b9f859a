//! `config.json` and `generation_config.json`, read strictly.
//!
//! The supported families read a fixed set of fields. Each of them is either understood here or refused by name; a field
//! that none of the families reads cannot change what they compute and is left alone.

use crate::ModelError;
use serde_json::{Map, Value};
use std::fs;
use std::path::{Path, PathBuf};

/// Model families. They share one forward and differ in two details.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// RMS norm of every query and key head before the rotation.
    Qwen3,
    /// Biases on the query, key and value projections.
    Qwen2,
    /// Neither.
    Llama,
}

impl Family {
    /// Every supported family.
    pub const ALL: [Family; 3] = [Family::Qwen3, Family::Qwen2, Family::Llama];

    /// The `model_type` in `config.json`.
    pub fn name(self) -> &'static str {
        match self {
            Family::Qwen3 => "qwen3",
            Family::Qwen2 => "qwen2",
            Family::Llama => "llama",
        }
    }
}

/// Sizes and parameters of a model. Every size is at least 1 and at most `i32::MAX`.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Model family.
    pub family: Family,
    /// Tokens in the vocabulary.
    pub vocab: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the MLP.
    pub intermediate: usize,
    /// Decoder layers.
    pub layers: usize,
    /// Query heads, a multiple of `kv_heads`.
    pub q_heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements of a head, even.
    pub head_dim: usize,
    /// Longest sequence.
    pub max_positions: usize,
    /// Added under the root of every RMS norm.
    pub rms_eps: f32,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Whether the output projection is the embedding table.
    pub tied: bool,
    /// The token that begins a text.
    pub bos: Option<i32>,
    /// The tokens that end a text: those of `generation_config.json` where it names any, else those of `config.json`.
    pub eos: Vec<i32>,
    /// The token that fills up batches; never part of a text.
    pub pad: Option<i32>,
}

impl Config {
    /// Reads `config.json` and, where there is one, `generation_config.json` of the folder `dir`.
    ///
    /// # Errors
    /// A file that is missing or not a JSON object; a field that is missing, malformed, or asks for a computation that is
    /// not supported.
    pub fn load(dir: &Path) -> Result<Config, ModelError> {
        let fields = Fields::read(dir.join("config.json"))?;
        let mut config = fields.config()?;
        let generation = dir.join("generation_config.json");
        if generation.exists() {
            let eos = Fields::read(generation)?.eos(config.vocab)?;
            if !eos.is_empty() {
                config.eos = eos;
            }
        }
        Ok(config)
    }

    /// Elements of a token's queries: `q_heads * head_dim`.
    pub fn q_width(&self) -> usize {
        self.q_heads * self.head_dim
    }

    /// Elements of a token's keys: `kv_heads * head_dim`.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }
}

/// A JSON object and the file it stands in. A field that is null counts as absent, as it does for transformers.
struct Fields {
    path: PathBuf,
    map: Map<String, Value>,
}

impl Fields {
    fn read(path: PathBuf) -> Result<Fields, ModelError> {
        let map = read_object(&path)?;
        Ok(Fields { path, map })
    }

    fn get(&self, field: &str) -> Option<&Value> {
        self.map.get(field).filter(|value| !value.is_null())
    }

    fn refuse(&self, field: impl Into<String>, why: impl Into<String>) -> ModelError {
        ModelError::field(&self.path, field, why)
    }

    /// A size, if present.
    fn size(&self, field: &str) -> Result<Option<usize>, ModelError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        match value.as_u64().and_then(|n| i32::try_from(n).ok()) {
            Some(n) if n > 0 => Ok(Some(n as usize)),
            _ => Err(self.refuse(field, format!("is {value}; it must be a whole number from 1 to {}", i32::MAX))),
        }
    }

    fn required_size(&self, field: &str) -> Result<usize, ModelError> {
        self.size(field)?.ok_or_else(|| self.refuse(field, "is missing; it must be a whole number of at least 1"))
    }

    fn flag(&self, field: &str) -> Result<bool, ModelError> {
        match self.get(field) {
            None => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(value) => Err(self.refuse(field, format!("is {value}; it must be true or false"))),
        }
    }

    /// A token id, if present.
    fn token(&self, field: &str, vocab: usize) -> Result<Option<i32>, ModelError> {
        self.get(field).map(|value| self.token_value(field, value, vocab)).transpose()
    }

    fn token_value(&self, field: &str, value: &Value, vocab: usize) -> Result<i32, ModelError> {
        match value.as_u64().and_then(|n| i32::try_from(n).ok()) {
            Some(id) if (id as usize) < vocab => Ok(id),
            _ => Err(self.refuse(field, format!("is {value}; a token is a whole number below vocab_size {vocab}"))),
        }
    }

    /// `eos_token_id`: absent, one token or a list.
    fn eos(&self, vocab: usize) -> Result<Vec<i32>, ModelError> {
        match self.get("eos_token_id") {
            Some(Value::Array(ids)) => ids.iter().map(|id| self.token_value("eos_token_id", id, vocab)).collect(),
            _ => Ok(self.token("eos_token_id", vocab)?.into_iter().collect()),
        }
    }

    fn config(&self) -> Result<Config, ModelError> {
        let family = self.family()?;
        let layers = self.required_size("num_hidden_layers")?;
        self.refuse_unsupported(family, layers)?;

        let hidden = self.required_size("hidden_size")?;
        let q_heads = self.required_size("num_attention_heads")?;
        let kv_heads = match (self.size("num_key_value_heads")?, family) {
            (Some(heads), _) => heads,
            (None, Family::Llama) => q_heads,
            (None, _) => self.required_size("num_key_value_heads")?,
        };
        if !q_heads.is_multiple_of(kv_heads) {
            let why = format!("is {kv_heads}; it must divide num_attention_heads {q_heads}");
            return Err(self.refuse("num_key_value_heads", why));
        }
        let head_dim = match (self.size("head_dim")?, family) {
            (Some(dim), _) => dim,
            // This family's own default has nothing to do with its sizes: a folder without the field is ambiguous.
            (None, Family::Qwen3) => self.required_size("head_dim")?,
            (None, _) if hidden.is_multiple_of(q_heads) => hidden / q_heads,
            (None, _) => {
                let why = format!("is {q_heads}; without head_dim it must divide hidden_size {hidden}");
                return Err(self.refuse("num_attention_heads", why));
            }
        };
        if !head_dim.is_multiple_of(2) {
            return Err(self.refuse("head_dim", format!("is {head_dim}; rotary positions need an even number")));
        }
        if q_heads.checked_mul(head_dim).is_none_or(|width| width > i32::MAX as usize) {
            let why = format!("is {head_dim}; times num_attention_heads {q_heads} it exceeds {}", i32::MAX);
            return Err(self.refuse("head_dim", why));
        }
        let vocab = self.required_size("vocab_size")?;
        Ok(Config {
            family,
            vocab,
            hidden,
            intermediate: self.required_size("intermediate_size")?,
            layers,
            q_heads,
            kv_heads,
            head_dim,
            max_positions: self.required_size("max_position_embeddings")?,
            rms_eps: self.rms_eps()?,
            rope_theta: self.rope_theta(family)?,
            tied: self.flag("tie_word_embeddings")?,
            bos: self.token("bos_token_id", vocab)?,
            eos: self.eos(vocab)?,
            // Older folders write -1 for "none".
            pad: self.token("pad_token_id", vocab).unwrap_or(None),
        })
    }

    fn family(&self) -> Result<Family, ModelError> {
        let names = Family::ALL.map(Family::name).join(", ");
        let value = self
            .get("model_type")
            .ok_or_else(|| self.refuse("model_type", format!("is missing; supported are {names}")))?;
        Family::ALL
            .into_iter()
            .find(|family| value == family.name())
            .ok_or_else(|| self.refuse("model_type", format!("is {value}; supported are {names}")))
    }

    /// Refuses fields that ask for a computation the forward does not do.
    fn refuse_unsupported(&self, family: Family, layers: usize) -> Result<(), ModelError> {
        if let Some(value) = self.get("hidden_act").filter(|value| *value != "silu") {
            return Err(self.refuse("hidden_act", format!("is {value}; supported is \"silu\"")));
        }
        // qwen2 has its biases whatever `attention_bias` says: its code does not read the field.
        let attention_bias = if family == Family::Qwen2 { None } else { Some("attention_bias") };
        for field in ["use_sliding_window", "mlp_bias", "use_mrope"].into_iter().chain(attention_bias) {
            if self.flag(field)? {
                return Err(self.refuse(field, "is true; supported is false"));
            }
        }
        if let Some(value) = self.get("layer_types") {
            let types = value.as_array().ok_or_else(|| self.refuse("layer_types", "is not a list of layer types"))?;
            if let Some((i, other)) = types.iter().enumerate().find(|(_, value)| **value != "full_attention") {
                return Err(
                    self.refuse(format!("layer_types[{i}]"), format!("is {other}; supported is \"full_attention\""))
                );
            }
            if types.len() != layers {
                let why = format!("has {} entries; num_hidden_layers is {layers}", types.len());
                return Err(self.refuse("layer_types", why));
            }
        }
        for field in ["quantization_config", "compression_config"] {
            if self.get(field).is_some() {
                return Err(
                    self.refuse(field, "is set; supported are plain BF16 weights, so load an unquantised folder")
                );
            }
        }
        Ok(())
    }

    fn rms_eps(&self) -> Result<f32, ModelError> {
        let value = self
            .get("rms_norm_eps")
            .ok_or_else(|| self.refuse("rms_norm_eps", "is missing; it must be a number above 0"))?;
        match value.as_f64().map(|eps| eps as f32) {
            Some(eps) if eps > 0.0 && eps.is_finite() => Ok(eps),
            _ => Err(self.refuse("rms_norm_eps", format!("is {value}; it must be a number above 0 within f32"))),
        }
    }

    /// The rotary base from `rope_parameters` (new), `rope_theta` and `rope_scaling` (old): wherever it stands, it must be
    /// the same, and the kind must be `default`.
    fn rope_theta(&self, family: Family) -> Result<f64, ModelError> {
        let mut theta: Option<f64> = None;
        let mut read = |field: String, key: &str, value: &Value| -> Result<(), ModelError> {
            match key {
                _ if value.is_null() => Ok(()),
                "rope_theta" => match value.as_f64() {
                    Some(new) if (1.0..=f64::MAX).contains(&new) => match theta.replace(new) {
                        Some(old) if old != new => {
                            Err(self.refuse(field, format!("is {new}, but the folder also says {old}; keep one")))
                        }
                        _ => Ok(()),
                    },
                    _ => Err(self.refuse(field, format!("is {value}; it must be a number of at least 1"))),
                },
                "rope_type" | "type" if value == "default" => Ok(()),
                "rope_type" | "type" => Err(self.refuse(field, format!("is {value}; supported is \"default\""))),
                "partial_rotary_factor" if value.as_f64() == Some(1.0) => Ok(()),
                "partial_rotary_factor" => Err(self.refuse(field, format!("is {value}; supported is 1"))),
                _ => Err(self.refuse(field, "is not supported; supported are rope_theta and rope_type \"default\"")),
            }
        };
        for key in ["rope_theta", "partial_rotary_factor"] {
            if let Some(value) = self.get(key) {
                read(key.into(), key, value)?;
            }
        }
        for object in ["rope_parameters", "rope_scaling"] {
            match self.get(object) {
                None => {}
                Some(Value::Object(map)) => {
                    for (key, value) in map {
                        read(format!("{object}.{key}"), key, value)?;
                    }
                }
                Some(value) => return Err(self.refuse(object, format!("is {value}; it must be an object"))),
            }
        }
        match (theta, family) {
            (Some(theta), _) => Ok(theta),
            // Llama folders older than the field mean this value.
            (None, Family::Llama) => Ok(10_000.0),
            (None, _) => {
                Err(self.refuse("rope_parameters.rope_theta", "is missing; write the base of the rotary positions"))
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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// A minimal config of `family` with `changes` laid over it (null removes).
    fn read(family: &str, changes: Value) -> Result<Config, String> {
        let mut fields = json!({
            "model_type": family, "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
            "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        });
        for (field, value) in changes.as_object().unwrap() {
            fields[field] = value.clone();
        }
        let Value::Object(map) = fields else { unreachable!() };
        Fields { path: "config.json".into(), map }.config().map_err(|e| e.to_string())
    }

    #[test]
    fn families_and_defaults() {
        for family in Family::ALL {
            assert_eq!(read(family.name(), json!({})).unwrap().family, family);
        }
        let llama =
            read("llama", json!({"num_key_value_heads": null, "head_dim": null, "rope_parameters": null})).unwrap();
        assert_eq!((llama.kv_heads, llama.head_dim, llama.rope_theta), (4, 16, 10_000.0));
        assert_eq!((llama.tied, llama.bos, llama.eos.len()), (false, None, 0));
    }

    #[test]
    fn both_spellings_of_the_rotary_base() {
        let old = json!({"rope_parameters": null, "rope_theta": 5e5, "rope_scaling": {"type": "default"}});
        assert_eq!(read("qwen3", old).unwrap().rope_theta, 5e5);
        assert_eq!(read("qwen3", json!({"rope_theta": 10000})).unwrap().rope_theta, 1e4);
        assert_eq!(read("qwen3", json!({"rope_parameters": {"rope_theta": 7.5}})).unwrap().rope_theta, 7.5);
    }

    #[test]
    fn eos_is_a_token_or_a_list() {
        assert_eq!(read("llama", json!({"eos_token_id": 7})).unwrap().eos, [7]);
        assert_eq!(read("llama", json!({"eos_token_id": [7, 8]})).unwrap().eos, [7, 8]);
        assert_eq!(read("llama", json!({"pad_token_id": -1})).unwrap().pad, None);
    }

    #[test]
    fn what_is_not_supported_is_refused_by_name() {
        let cases = [
            ("qwen3", json!({"model_type": "gemma3"}), "`model_type` is \"gemma3\"; supported are qwen3, qwen2, llama"),
            ("qwen3", json!({"model_type": null}), "`model_type` is missing"),
            ("qwen3", json!({"model_type": 3}), "`model_type` is 3"),
            ("qwen3", json!({"hidden_act": "gelu"}), "`hidden_act` is \"gelu\"; supported is \"silu\""),
            ("qwen3", json!({"use_sliding_window": true}), "`use_sliding_window` is true"),
            ("qwen3", json!({"use_sliding_window": 1}), "`use_sliding_window` is 1; it must be true or false"),
            ("qwen2", json!({"use_mrope": true}), "`use_mrope` is true"),
            ("qwen3", json!({"attention_bias": true}), "`attention_bias` is true"),
            ("llama", json!({"attention_bias": true}), "`attention_bias` is true"),
            ("llama", json!({"mlp_bias": true}), "`mlp_bias` is true"),
            ("qwen3", json!({"quantization_config": {"bits": 4}}), "`quantization_config` is set"),
            (
                "qwen3",
                json!({"layer_types": ["full_attention", "sliding_attention"]}),
                "`layer_types[1]` is \"sliding_attention\"; supported is \"full_attention\"",
            ),
            (
                "qwen3",
                json!({"layer_types": ["full_attention"]}),
                "`layer_types` has 1 entries; num_hidden_layers is 2",
            ),
            ("qwen3", json!({"layer_types": "full_attention"}), "`layer_types` is not a list"),
            (
                "qwen3",
                json!({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}),
                "`rope_parameters.rope_type` is \"yarn\"; supported is \"default\"",
            ),
            (
                "llama",
                json!({"rope_parameters": null, "rope_scaling": {"type": "linear", "factor": 2.0}}),
                "`rope_scaling.type` is \"linear\"",
            ),
            ("llama", json!({"rope_scaling": {"factor": 2.0}}), "`rope_scaling.factor` is not supported"),
            ("llama", json!({"rope_scaling": "linear"}), "`rope_scaling` is \"linear\"; it must be an object"),
            ("llama", json!({"partial_rotary_factor": 0.5}), "`partial_rotary_factor` is 0.5; supported is 1"),
            ("llama", json!({"rope_theta": 5e5}), "is 10000, but the folder also says 500000; keep one"),
            ("llama", json!({"rope_theta": 0}), "`rope_theta` is 0; it must be a number of at least 1"),
            ("qwen2", json!({"rope_parameters": null}), "`rope_parameters.rope_theta` is missing"),
        ];
        for (family, changes, expected) in cases {
            let line = read(family, changes.clone()).unwrap_err();
            assert!(line.starts_with("config.json: ") && line.contains(expected), "{changes}: {line}");
        }
        assert!(read("qwen2", json!({"attention_bias": true})).is_ok(), "qwen2 does not read attention_bias");
    }

    #[test]
    fn sizes_are_checked() {
        let cases = [
            (json!({"hidden_size": null}), "`hidden_size` is missing"),
            (json!({"hidden_size": 0}), "`hidden_size` is 0"),
            (json!({"hidden_size": -64}), "`hidden_size` is -64"),
            (json!({"hidden_size": 64.5}), "`hidden_size` is 64.5"),
            (json!({"vocab_size": 1u64 << 31}), "`vocab_size` is 2147483648"),
            (json!({"num_hidden_layers": "2"}), "`num_hidden_layers` is \"2\""),
            (json!({"num_key_value_heads": 3}), "`num_key_value_heads` is 3; it must divide num_attention_heads 4"),
            (json!({"head_dim": 15}), "`head_dim` is 15; rotary positions need an even number"),
            (json!({"head_dim": 1 << 30}), "`head_dim` is 1073741824; times num_attention_heads 4"),
            (json!({"head_dim": null}), "`head_dim` is missing"),
            (json!({"rms_norm_eps": 0}), "`rms_norm_eps` is 0"),
            (json!({"rms_norm_eps": 1e-60}), "`rms_norm_eps` is 1e-60"),
            (json!({"rms_norm_eps": null}), "`rms_norm_eps` is missing"),
            (json!({"bos_token_id": 100}), "`bos_token_id` is 100; a token is a whole number below vocab_size 100"),
            (json!({"eos_token_id": [7, -1]}), "`eos_token_id` is -1"),
            (json!({"tie_word_embeddings": "yes"}), "`tie_word_embeddings` is \"yes\"; it must be true or false"),
        ];
        for (changes, expected) in cases {
            let line = read("qwen3", changes.clone()).unwrap_err();
            assert!(line.starts_with("config.json: ") && line.contains(expected), "{changes}: {line}");
        }
        let line = read("llama", json!({"head_dim": null, "hidden_size": 66})).unwrap_err();
        assert!(line.contains("`num_attention_heads` is 4; without head_dim it must divide hidden_size 66"), "{line}");
    }
}
