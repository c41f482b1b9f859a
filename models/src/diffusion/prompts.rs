//! The tokens of a prompt as CLIP's tokenizer makes them: begun, ended, and filled up to the longest text.

use crate::ModelError;
use crate::files::{parse_object, read, read_object};
use crate::tokenizer_files::{named, one_line};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// The tokenizer of a folder.
pub(crate) struct Prompts {
    path: PathBuf,
    inner: tokenizers::Tokenizer,
    pad: i32,
    /// Tokens of the longest text that the folder allows.
    longest: Option<usize>,
}

/// How the class cuts a text.
const CUT: &str = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+";

impl Prompts {
    /// Reads `tokenizer.json`, of which the class takes vocabulary and merges alone, or `vocab.json` and `merges.txt`.
    pub fn load(dir: &Path) -> Result<Prompts, ModelError> {
        let whole = dir.join("tokenizer.json");
        let (path, vocab, merges) = if whole.exists() {
            let model = parse_object(&whole, &read(&whole)?)?.remove("model");
            let part = |name: &str| model.as_ref().and_then(|model| model.get(name)).cloned().unwrap_or_default();
            let (vocab, merges) = (part("vocab"), part("merges"));
            (whole, vocab, merges)
        } else {
            let path = dir.join("vocab.json");
            let text = String::from_utf8(read(&dir.join("merges.txt"))?)
                .map_err(|_| ModelError::file(&dir.join("merges.txt"), "is not UTF-8"))?;
            let lines = text.lines().filter(|line| !line.starts_with("#version") && !line.is_empty());
            let merges: Vec<Value> = lines.map(Value::from).collect();
            (path.clone(), Value::Object(read_object(&path)?), Value::Array(merges))
        };
        let mut settings = Map::new();
        for name in ["special_tokens_map.json", "tokenizer_config.json"] {
            if dir.join(name).exists() {
                settings.extend(read_object(&dir.join(name))?);
            }
        }
        let token = |key: &str, default: &str| named(&settings, key).unwrap_or(default.into());
        let (bos, eos) = (token("bos_token", "<|startoftext|>"), token("eos_token", "<|endoftext|>"));
        let (unk, pad) = (token("unk_token", "<|endoftext|>"), token("pad_token", "<|endoftext|>"));
        let id = |token: &str| {
            let id = vocab.get(token).and_then(Value::as_u64).and_then(|id| i32::try_from(id).ok());
            id.ok_or_else(|| ModelError::file(&path, format!("has no token `{token}`, which the tokenizer names")))
        };
        let (first, last, pad) = (id(&bos)?, id(&eos)?, id(&pad)?);
        let special = |token: &str, id: i32| {
            json!({"id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
                   "special": true})
        };
        let json = json!({
            "version": "1.0",
            "added_tokens": [special(&bos, first), special(&eos, last)],
            "normalizer": {"type": "Sequence", "normalizers": [
                {"type": "NFC"}, {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "}, {"type": "Lowercase"},
            ]},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": CUT}, "behavior": "Removed", "invert": true},
                {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
            ]},
            "post_processor": {"type": "RobertaProcessing", "sep": [eos, last], "cls": [bos, first], "trim_offsets": false,
                               "add_prefix_space": false},
            "model": {"type": "BPE", "vocab": vocab, "merges": merges, "unk_token": unk, "continuing_subword_prefix": "",
                      "end_of_word_suffix": "</w>", "fuse_unk": false},
        });
        let inner = json.to_string().parse::<tokenizers::Tokenizer>();
        let inner = inner.map_err(|e| ModelError::file(&path, format!("is not a tokenizer: {}", one_line(&e))))?;
        let longest = settings.get("model_max_length").and_then(Value::as_u64).filter(|n| *n < 1 << 20);
        Ok(Prompts { path, inner, pad, longest: longest.map(|n| n as usize) })
    }

    /// The tokens of a prompt, as many as the encoder has places for, and those of a vocabulary.
    pub fn tokens(&self, prompt: &str, places: usize, vocab: usize) -> Result<Vec<i32>, ModelError> {
        let places = self.longest.map_or(places, |longest| longest.min(places));
        let failed = |e: tokenizers::Error| ModelError::input("prompt", format!("cannot be encoded: {}", one_line(&e)));
        let encoding = self.inner.encode(prompt, true).map_err(failed)?;
        let mut tokens: Vec<i32> = encoding.get_ids().iter().map(|id| *id as i32).collect();
        if tokens.len() > places {
            let why = format!("has {} tokens with those at its ends; the text encoder reads {places}", tokens.len());
            return Err(ModelError::input("prompt", why));
        }
        tokens.resize(places, self.pad);
        match tokens.iter().find(|token| **token < 0 || **token as usize >= vocab) {
            Some(token) => {
                Err(ModelError::file(&self.path, format!("gives token {token}; the text encoder has {vocab}")))
            }
            None => Ok(tokens),
        }
    }
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;
    use safetensors::SafeTensors;

    pub(crate) fn tokens_are_those_of_the_class() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/components/pipeline");
        let bytes = std::fs::read(dir.join("recorded.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let prompts = Prompts::load(&dir.join("tokenizer")).unwrap();
        let texts =
            ["A lighthouse, in the  fog!", "it's 12 o'clock", "", "\u{c9}tude in C\u{2019}s key <|endoftext|> 3"];
        for (number, text) in texts.iter().enumerate() {
            let data = file.tensor(&format!("tokens.{number}")).unwrap().data();
            let wanted: Vec<i32> = data.as_chunks().0.iter().map(|bytes| i32::from_le_bytes(*bytes)).collect();
            assert_eq!(prompts.tokens(text, 40, 600).unwrap(), wanted, "{text}");
        }
        let long = prompts.tokens(&"lighthouse ".repeat(9), 40, 600).unwrap_err().to_string();
        assert!(long.contains("tokens with those at its ends; the text encoder reads 40"), "{long}");
    }
}
