//! What a folder's model is in a GGUF file: the way of `names.rs` and `tokenizer.rs` back.

use super::names::{ARCHITECTURES, Architecture, FIELDS, PARTS, of_llama3};
use super::*;
use crate::Config;

/// A value of metadata.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Field {
    Count(u32),
    Number(f32),
    Flag(bool),
    Text(String),
    Texts(Vec<String>),
    Counts(Vec<i32>),
}

impl Field {
    fn put(&self, to: &mut Vec<u8>) {
        let kind = |to: &mut Vec<u8>, number: u32| to.extend(number.to_le_bytes());
        match self {
            Field::Count(x) => {
                kind(to, 4);
                to.extend(x.to_le_bytes());
            }
            Field::Number(x) => {
                kind(to, 6);
                to.extend(x.to_le_bytes());
            }
            Field::Flag(x) => {
                kind(to, 7);
                to.push(u8::from(*x));
            }
            Field::Text(x) => {
                kind(to, 8);
                put_text(to, x);
            }
            Field::Texts(all) => {
                kind(to, 9);
                kind(to, 8);
                to.extend((all.len() as u64).to_le_bytes());
                all.iter().for_each(|x| put_text(to, x));
            }
            Field::Counts(all) => {
                kind(to, 9);
                kind(to, 5);
                to.extend((all.len() as u64).to_le_bytes());
                all.iter().for_each(|x| to.extend(x.to_le_bytes()));
            }
        }
    }
}

fn put_text(to: &mut Vec<u8>, text: &str) {
    to.extend((text.len() as u64).to_le_bytes());
    to.extend(text.as_bytes());
}

/// A tensor of a file: its name, the tensors of the folder that stand in it one behind the other, and in how many heads their
/// rows are stored pair by pair.
pub(crate) type Written = (String, Vec<String>, Option<usize>);

/// A model that is to be written.
pub(crate) struct Writing {
    of: &'static Architecture,
    pub metadata: Vec<(String, Field)>,
    /// What divides frequencies, where something does.
    pub factors: Option<Vec<f32>>,
    heads: [usize; 2],
}

impl Writing {
    /// What metadata say of the model in the folder `dir`.
    ///
    /// # Errors
    /// A family, or a field of it, that files have no name for.
    pub fn of(dir: &Path, config: &Config, fields: &Map<String, Value>) -> Result<Writing, ModelError> {
        let family = config.family.name();
        let path = dir.join("config.json");
        let Some(of) = ARCHITECTURES.iter().find(|of| of.model_types.contains(&Some(family))) else {
            let all: Vec<&str> = ARCHITECTURES.iter().flat_map(|of| of.model_types).flatten().collect();
            let why = format!("is `{family}`; GGUF files are written of {}; --to int8 writes a folder", all.join(", "));
            return Err(ModelError::field(&path, "model_type", why));
        };
        let mut writing = Writing { of, metadata: Vec::new(), factors: None, heads: [0; 2] };
        writing.put("general.architecture", Field::Text(of.name.into()));
        let rope = fields.get("rope_parameters").or(fields.get("rope_scaling")).and_then(Value::as_object);
        for (theirs, ours) in FIELDS {
            // Experts are counted under either name.
            let other = if ours == "num_experts" { "num_local_experts" } else { ours };
            let found = fields.get(ours).or_else(|| fields.get(other)).or_else(|| rope?.get(ours));
            let stored = found.filter(|value| !value.is_null());
            let field = match stored {
                Some(Value::Number(number)) if number.is_u64() && theirs != "rope.freq_base" => {
                    number.as_u64().and_then(|x| u32::try_from(x).ok()).map(Field::Count)
                }
                Some(value) => value.as_f64().map(|x| Field::Number(x as f32)),
                None => None,
            };
            if let Some(field) = field {
                writing.put(&format!("{}.{theirs}", of.name), field);
            }
        }
        let size = |name: &str| fields.get(name).and_then(Value::as_u64).unwrap_or(0) as usize;
        let heads = size("num_attention_heads");
        writing.heads = [heads, Some(size("num_key_value_heads")).filter(|keys| *keys > 0).unwrap_or(heads)];
        writing.scaling(&path, rope, fields, size("head_dim").max(config.hidden / heads.max(1)))?;
        for (theirs, ours) in [("bos", "bos_token_id"), ("padding", "pad_token_id")] {
            if let Some(token) = fields.get(ours).and_then(Value::as_u64) {
                writing.put(&format!("tokenizer.ggml.{theirs}_token_id"), Field::Count(token as u32));
            }
        }
        if let Some(token) = config.eos.first() {
            writing.put("tokenizer.ggml.eos_token_id", Field::Count(*token as u32));
        }
        Ok(writing)
    }

    fn put(&mut self, name: &str, field: Field) {
        self.metadata.push((name.into(), field));
    }

    /// How positions are stretched.
    fn scaling(
        &mut self,
        path: &Path,
        rope: Option<&Map<String, Value>>,
        fields: &Map<String, Value>,
        width: usize,
    ) -> Result<(), ModelError> {
        let get = |name: &str| rope.and_then(|rope| rope.get(name));
        let number = |name: &str| get(name).and_then(Value::as_f64);
        let kind = get("rope_type").or(get("type")).and_then(Value::as_str).unwrap_or("default");
        let name = |rest: &str| format!("{}.rope.scaling.{rest}", self.of.name);
        match kind {
            "default" => {}
            "linear" | "yarn" => {
                let mut all = vec![(name("type"), Field::Text(kind.into()))];
                all.extend(number("factor").map(|x| (name("factor"), Field::Number(x as f32))));
                let original = number("original_max_position_embeddings");
                all.extend(original.map(|x| (name("original_context_length"), Field::Count(x as u32))));
                self.metadata.extend(all);
            }
            "llama3" => {
                let base =
                    number("rope_theta").or(fields.get("rope_theta").and_then(Value::as_f64)).unwrap_or(10_000.0);
                let factor = number("factor").unwrap_or(1.0);
                self.factors = Some(of_llama3(base, width / 2, factor).map(|x| x as f32).collect());
            }
            other => {
                let why = format!("is `{other}`; GGUF files say linear, yarn and that of Llama 3");
                return Err(ModelError::field(path, "rope_parameters.rope_type", why));
            }
        }
        Ok(())
    }

    /// The tensors of a file that hold those of a folder, of which there are `names` with their shapes.
    ///
    /// # Errors
    /// Tensors that files have no name for.
    pub fn tensors(&self, dir: &Path, names: &BTreeMap<String, Vec<usize>>) -> Result<Vec<Written>, ModelError> {
        let mut all: BTreeMap<String, (BTreeMap<usize, String>, Option<usize>)> = BTreeMap::new();
        let mut complaints = Vec::new();
        for name in names.keys() {
            match self.place(name) {
                Some((place, number, heads)) => {
                    let (of, of_heads) = all.entry(place).or_default();
                    (*of_heads, _) = (heads, of.insert(number, name.clone()));
                }
                None => {
                    let why = format!("has no place in a GGUF file of `{}`", self.of.name);
                    complaints.push(ModelError::tensor(dir, name, why));
                }
            }
        }
        ModelError::all(crate::weights::few(complaints))?;
        Ok(all.into_iter().map(|(name, (of, heads))| (name, of.into_values().collect(), heads)).collect())
    }

    /// The tensor of a file in which one of a folder stands, as which of several, and the heads of rows that are stored in pairs.
    fn place(&self, name: &str) -> Option<(String, usize, Option<usize>)> {
        match name {
            "model.embed_tokens.weight" => return Some(("token_embd.weight".into(), 0, None)),
            "model.norm.weight" => return Some(("output_norm.weight".into(), 0, None)),
            "lm_head.weight" => return Some(("output.weight".into(), 0, None)),
            _ => {}
        }
        let (block, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
        let (part, kind) = rest.rsplit_once('.')?;
        let mixture = part.strip_prefix("block_sparse_moe.").or_else(|| part.strip_prefix("mlp."));
        if let Some((number, which)) = mixture.and_then(|part| part.strip_prefix("experts.")?.split_once('.')) {
            let which = match which {
                "w1" | "gate_proj" => "gate",
                "w3" | "up_proj" => "up",
                "w2" | "down_proj" => "down",
                _ => return None,
            };
            return Some((format!("blk.{block}.ffn_{which}_exps.{kind}"), number.parse().ok()?, None));
        }
        let part = if part == "block_sparse_moe.gate" { "mlp.gate" } else { part };
        let (theirs, _) = PARTS.iter().find(|(_, ours)| *ours == part)?;
        let heads = match *theirs {
            "attn_q" if self.of.paired => Some(self.heads[0]),
            "attn_k" if self.of.paired => Some(self.heads[1]),
            _ => None,
        };
        Some((format!("blk.{block}.{theirs}.{kind}"), 0, heads))
    }

    /// What stands before the bytes of these tensors, each with where they begin behind it.
    pub fn header(&self, tensors: &[(&str, &[usize], Format, u64)], align: u64) -> Vec<u8> {
        let mut to = b"GGUF".to_vec();
        to.extend(3u32.to_le_bytes());
        to.extend((tensors.len() as u64).to_le_bytes());
        to.extend((self.metadata.len() as u64 + 1).to_le_bytes());
        let align_field = ("general.alignment".to_string(), Field::Count(align as u32));
        for (name, field) in self.metadata.iter().chain([&align_field]) {
            put_text(&mut to, name);
            field.put(&mut to);
        }
        for (name, shape, format, begin) in tensors {
            put_text(&mut to, name);
            to.extend((shape.len() as u32).to_le_bytes());
            shape.iter().rev().for_each(|extent| to.extend((*extent as u64).to_le_bytes()));
            to.extend(format.number().to_le_bytes());
            to.extend(begin.to_le_bytes());
        }
        to.resize(to.len().next_multiple_of(align as usize), 0);
        to
    }
}

/// The tokenizer of a folder as metadata have it, or why files cannot say it.
///
/// # Errors
/// Files that cannot be read.
pub(crate) fn vocabulary_of(dir: &Path, vocab: usize) -> Result<Result<Vec<(String, Field)>, String>, ModelError> {
    let path = dir.join("tokenizer.json");
    if !path.exists() {
        return Ok(Err("has no tokenizer.json".into()));
    }
    let json = Value::Object(crate::files::read_object(&path)?);
    let settings = dir.join("tokenizer_config.json");
    let settings = if settings.exists() { crate::files::read_object(&settings)? } else { Map::new() };
    Ok(super::tokenizer::metadata_of(&json, &settings, vocab))
}
