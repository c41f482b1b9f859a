//! The fields of a JSON file: whatever is asked for is checked, and what nobody asked for is refused where it could change
//! what is computed, else passed by and named.

use crate::ModelError;
use crate::error::escaped;
use crate::files::{parse_object, read_object};
use serde_json::{Map, Value};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Fields of `config.json` that cannot change what a forward computes: bookkeeping, training, and how texts are sampled.
const INERT: [&str; 69] = [
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
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "typical_p",
    "use_bfloat16",
    "use_cache",
];

/// Fields that the code of some decoder model in transformers reads, one a line (`goldens/generate/fields.py`). What a family
/// does not read of them it does not compute.
const READ: &str = include_str!("read_fields.txt");

/// A JSON object and the file it stands in. A field that is null counts as absent, as it does for transformers.
///
/// What is wrong is noted, and a value that lets the reader go on is given instead (0 for a size), so that all complaints
/// come together: [`Fields::end`].
pub(crate) struct Fields {
    path: PathBuf,
    map: Map<String, Value>,
    /// What has been asked for.
    asked: RefCell<BTreeSet<String>>,
    complaints: RefCell<Vec<ModelError>>,
    /// What is passed by, a line of each.
    passed: RefCell<Vec<String>>,
    /// Names that fields are asked for by, and those that they have here.
    renamed: &'static [(&'static str, &'static str)],
    /// Where they are those of an object within the file: its name, and which of them stand around it.
    within: Option<(&'static str, BTreeSet<String>)>,
}

impl Fields {
    pub fn read(path: PathBuf) -> Result<Fields, ModelError> {
        let map = read_object(&path)?;
        Ok(Fields::new(path, map))
    }

    /// The fields of an object in memory.
    pub fn parse(text: &str) -> Result<Fields, ModelError> {
        let path = PathBuf::from("config");
        let map = parse_object(&path, text.as_bytes())?;
        Ok(Fields::new(path, map))
    }

    pub fn new(path: PathBuf, map: Map<String, Value>) -> Fields {
        let (asked, complaints, passed) = Default::default();
        Fields { path, map, asked, complaints, passed, renamed: &[], within: None }
    }

    /// Those of the object `name`, and those around it that it does not have, but for some that belong to a model `beside` it; where
    /// both have one of which the code of a model could read either, they must be the same.
    pub fn within(mut self, name: &'static str, beside: &[&str]) -> Result<Fields, ModelError> {
        let Some(Value::Object(map)) = self.map.remove(name) else {
            return Err(ModelError::field(
                &self.path,
                name,
                "is missing; it must be an object, with the fields of the text model",
            ));
        };
        let around = std::mem::replace(&mut self.map, map);
        self.within = Some((name, BTreeSet::new()));
        for (field, value) in around.into_iter().filter(|(field, value)| !value.is_null() && field != "model_type") {
            match self.map.get(&field).filter(|own| !own.is_null()) {
                _ if beside.contains(&&*field) => {
                    let line = format!(
                        "{}: `{field}` is of a model beside that of texts; it is passed by",
                        self.path.display()
                    );
                    self.passed.borrow_mut().push(escaped(&line));
                }
                Some(own) if same(own, &value) || INERT.contains(&&*field) => {}
                // What begins and ends a text changes no number; folders of models of images say more of it outside.
                Some(own) if ["bos_token_id", "eos_token_id", "pad_token_id"].contains(&&*field) => {
                    let (path, value, own) = (self.path.display(), shown(&value), shown(own));
                    let line = format!("{path}: `{field}` is {value}, but {name} says {own}, which is taken");
                    self.passed.borrow_mut().push(escaped(&line));
                }
                Some(own) => {
                    let why = format!("is {}, but {name} says {}; keep one", shown(&value), shown(own));
                    self.complaints.borrow_mut().push(ModelError::field(&self.path, field, why));
                }
                None => {
                    self.within.as_mut().expect("it was just put there").1.insert(field.clone());
                    self.map.insert(field, value);
                }
            }
        }
        Ok(self)
    }

    /// What a field is called in messages.
    fn place(&self, field: &str) -> String {
        let (here, root) = (self.here(field), field.split(['.', '[']).next().unwrap_or(field));
        match &self.within {
            Some((name, around)) if !around.contains(root) => format!("{name}.{here}"),
            _ => here.into(),
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// From here on fields that are asked for by the first of two names are also found by the second.
    pub fn rename(&mut self, renamed: &'static [(&'static str, &'static str)]) {
        self.renamed = renamed;
    }

    /// The name that a field has here: its own, unless only the other is there.
    fn here<'f>(&self, field: &'f str) -> &'f str {
        let own = self.renamed.iter().find(|(name, _)| *name == field).map(|(_, own)| *own);
        own.filter(|own| self.map.contains_key(*own) || !self.map.contains_key(field)).unwrap_or(field)
    }

    pub fn get(&self, field: &str) -> Option<&Value> {
        let field = self.here(field);
        self.asked.borrow_mut().insert(field.into());
        self.map.get(field).filter(|value| !value.is_null())
    }

    /// Whether somebody asked for the field.
    pub fn was_asked(&self, field: &str) -> bool {
        self.asked.borrow().contains(field)
    }

    /// Whether the field is there, if only as null.
    pub fn has(&self, field: &str) -> bool {
        self.map.contains_key(self.here(field))
    }

    /// Complains unless the fields are there, if only as null: their absence means a default that no other family has.
    pub fn present(&self, fields: &[&str]) {
        for field in fields.iter().filter(|field| !self.has(field)) {
            self.refuse(*field, "is missing; write it, null for none");
        }
    }

    /// Notes that the family's code does not read these fields, whatever they say.
    pub fn unread(&self, fields: &[&str]) {
        self.asked.borrow_mut().extend(fields.iter().map(|field| field.to_string()));
    }

    /// Notes what is wrong with a field.
    pub fn refuse(&self, field: impl Into<String>, why: impl Into<String>) {
        let field = field.into();
        self.complaints.borrow_mut().push(ModelError::field(&self.path, self.place(&field), why));
    }

    /// Whether nothing was refused so far.
    pub fn is_clean(&self) -> bool {
        self.complaints.borrow().is_empty()
    }

    /// Notes that nobody reads a field, or that its value asks for nothing.
    pub fn pass(&self, field: &str, value: &Value, why: &str) {
        let line = format!("{}: `{}` is {}, {why}", self.path.display(), self.place(field), shown(value));
        self.passed.borrow_mut().push(escaped(&line));
    }

    /// A whole number of at least `least`, if present.
    fn count(&self, field: &str, least: u64) -> Option<usize> {
        let value = self.get(field)?;
        match value.as_u64().and_then(|n| i32::try_from(n).ok()) {
            Some(n) if n as u64 >= least => Some(n as usize),
            _ => {
                self.refuse(field, format!("is {value}; it must be a whole number from {least} to {}", i32::MAX));
                Some(0)
            }
        }
    }

    /// A size, if present; 0 where it was refused.
    pub fn size(&self, field: &str) -> Option<usize> {
        self.count(field, 1)
    }

    /// A size or 0; 0 where it is absent.
    pub fn size_or_zero(&self, field: &str) -> usize {
        self.count(field, 0).unwrap_or(0)
    }

    /// A size; 0 where it was refused.
    pub fn required_size(&self, field: &str) -> usize {
        self.size(field).unwrap_or_else(|| {
            self.refuse(field, "is missing; it must be a whole number of at least 1");
            0
        })
    }

    pub fn flag(&self, field: &str, default: bool) -> bool {
        match self.get(field) {
            None => default,
            Some(Value::Bool(flag)) => *flag,
            Some(value) => {
                self.refuse(field, format!("is {value}; it must be true or false"));
                default
            }
        }
    }

    /// A finite number above 0, if present.
    pub fn positive(&self, field: &str) -> Option<f64> {
        let value = self.get(field)?;
        let number = value.as_f64().filter(|v| v.is_finite() && *v > 0.0);
        if number.is_none() {
            self.refuse(field, format!("is {value}; it must be a number above 0"));
        }
        number
    }

    /// Complains unless the field is absent or one of `supported`.
    pub fn only(&self, field: &str, supported: &[Value]) {
        if let Some(value) = self.get(field).filter(|value| !supported.iter().any(|one| same(one, value))) {
            let names: Vec<String> = supported.iter().map(Value::to_string).collect();
            self.refuse(field, format!("is {value}; supported is {}", names.join(" or ")));
        }
    }

    /// A token id, if present.
    pub fn token(&self, field: &str, vocab: usize) -> Option<i32> {
        self.get(field).and_then(|value| self.token_value(field, value, vocab))
    }

    /// The token that fills up batches; older folders write -1 for none.
    pub fn pad(&self, vocab: usize) -> Option<i32> {
        let id = self.get("pad_token_id")?.as_u64().and_then(|id| i32::try_from(id).ok());
        id.filter(|id| (*id as usize) < vocab)
    }

    fn token_value(&self, field: &str, value: &Value, vocab: usize) -> Option<i32> {
        let id = value.as_u64().and_then(|n| i32::try_from(n).ok()).filter(|id| (*id as usize) < vocab || vocab == 0);
        if id.is_none() {
            self.refuse(field, format!("is {value}; a token is a whole number below vocab_size {vocab}"));
        }
        id
    }

    /// `eos_token_id`: absent, one token or a list.
    pub fn eos(&self, vocab: usize) -> Vec<i32> {
        match self.get("eos_token_id") {
            Some(Value::Array(ids)) => {
                ids.iter().filter_map(|id| self.token_value("eos_token_id", id, vocab)).collect()
            }
            _ => self.token("eos_token_id", vocab).into_iter().collect(),
        }
    }

    /// The fields of an object, if present; they are refused with the object's name before their own.
    pub fn object(&self, field: &str) -> Option<&Map<String, Value>> {
        match self.get(field)? {
            Value::Object(map) => Some(map),
            value => {
                self.refuse(field, format!("is {value}; it must be an object"));
                None
            }
        }
    }

    /// Looks at the fields that nobody asked for. `neutral` gives what asks for nothing where that is not plain to see.
    pub fn look_at_the_rest(&self, neutral: impl Fn(&str, &Value) -> Option<bool>) {
        let asked = self.asked.borrow().clone();
        for (field, value) in self
            .map
            .iter()
            .filter(|(field, value)| !value.is_null() && !asked.contains(*field) && !INERT.contains(&&***field))
        {
            if !is_read(field) {
                self.pass(field, value, "which no model's code reads; it is passed by");
            } else if neutral(field, value).unwrap_or_else(|| asks_for_nothing(value)) {
                self.pass(field, value, "which asks for nothing here; it is passed by");
            } else {
                let why =
                    format!("is {}, which this family does not know; remove it if it changes nothing", shown(value));
                self.refuse(field, why);
            }
        }
    }

    /// Refuses the fields that nobody asked for, unless they ask for nothing.
    pub fn refuse_the_rest(&self) {
        let asked = self.asked.borrow().clone();
        for (field, value) in
            self.map.iter().filter(|(field, _)| !asked.contains(*field) && !INERT.contains(&&***field))
        {
            if asks_for_nothing(value) {
                self.pass(field, value, "which asks for nothing here; it is passed by");
            } else {
                let why = format!("is {}, which is not known here; remove it if it changes nothing", shown(value));
                self.refuse(field, why);
            }
        }
    }

    /// What was passed by; an error with all complaints where there are any.
    pub fn end(self) -> Result<Vec<String>, ModelError> {
        ModelError::all(self.complaints.into_inner())?;
        Ok(self.passed.into_inner())
    }
}

/// Whether the code of some decoder model reads a field of this name.
pub(crate) fn is_read(field: &str) -> bool {
    READ.lines().any(|name| name == field)
}

/// What asks for nothing whoever reads it.
pub(crate) fn asks_for_nothing(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => false,
    }
}

/// Whether two values are the same, 1 and 1.0 included.
pub(crate) fn same(a: &Value, b: &Value) -> bool {
    a == b || a.as_f64().is_some_and(|number| Some(number) == b.as_f64())
}

/// A value for a message.
pub(crate) fn shown(value: &Value) -> String {
    let text = value.to_string();
    if text.chars().count() > 40 { "set".into() } else { text }
}
