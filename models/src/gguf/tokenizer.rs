//! The tokenizer of a GGUF file as a folder has it: byte pair encoding over bytes, as Llama 3 and Qwen have it.

use super::*;
use crate::tokenizer_files::QWEN2;
use serde_json::json;

/// How the texts of a vocabulary are cut before they are merged, by `tokenizer.ggml.pre`.
struct Cut {
    names: &'static [&'static str],
    /// `None` for that of GPT-2.
    pattern: Option<&'static str>,
    /// Whether texts are composed first.
    composed: bool,
    /// Whether a piece that is a token is one without merges.
    whole: bool,
    /// Whether a text begins with bos where the file does not say.
    begins: bool,
}

const CUTS: [Cut; 3] = [
    Cut { names: &["llama-bpe", "llama3"], pattern: Some(LLAMA3), composed: false, whole: true, begins: true },
    Cut { names: &["qwen2"], pattern: Some(QWEN2), composed: true, whole: false, begins: false },
    Cut { names: &["gpt-2"], pattern: None, composed: false, whole: false, begins: false },
];

const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Types of tokens: those that stand for something else than their text, and those that users added.
const CONTROL: u64 = 3;
const ADDED: u64 = 4;

/// `tokenizer.json` and `tokenizer_config.json`.
pub(super) fn of(path: &Path, metadata: &Map<String, Value>) -> Result<(Value, Map<String, Value>), ModelError> {
    let get = |name: &str| metadata.get(&format!("tokenizer.ggml.{name}"));
    let bad = |name: &str, why: String| ModelError::field(path, format!("tokenizer.ggml.{name}"), why);
    let text = |name: &str| get(name).and_then(Value::as_str).unwrap_or_default();
    if text("model") != "gpt2" {
        let why = format!("is `{}`; supported is gpt2, so give tokens, or load the model's folder", text("model"));
        return Err(bad("model", why));
    }
    let Some(cut) = CUTS.iter().find(|cut| cut.names.contains(&text("pre"))) else {
        let names: Vec<&str> = CUTS.iter().flat_map(|cut| cut.names).copied().collect();
        let why = format!(
            "is `{}`; supported are {}, so give tokens, or load the model's folder",
            text("pre"),
            names.join(", ")
        );
        return Err(bad("pre", why));
    };
    let list = |name: &'static str| {
        let found = get(name).and_then(Value::as_array);
        found.ok_or_else(|| bad(name, "is missing; it must be a list".into()))
    };
    let (tokens, merges) = (list("tokens")?, list("merges")?);
    let kinds: &[Value] = get("token_type").and_then(Value::as_array).map_or(&[], Vec::as_slice);
    let (vocab, added) = vocabulary(tokens, kinds).map_err(|why| bad("tokens", why))?;
    let (bytes, pre_tokenizer) = cut.steps();
    let named = |name: &str| -> Option<&str> {
        let id = get(&format!("{name}_token_id"))?.as_u64()?;
        tokens.get(usize::try_from(id).ok()?)?.as_str()
    };
    let begins = get("add_bos_token").and_then(Value::as_bool).unwrap_or(cut.begins);
    let post_processor = match named("bos").filter(|_| begins) {
        None => bytes.clone(),
        Some(bos) => json!({
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {bos: {"id": bos, "ids": [get("bos_token_id")], "tokens": [bos]}},
        }),
    };
    let whole = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": if cut.composed { json!({"type": "NFC"}) } else { Value::Null },
        "pre_tokenizer": pre_tokenizer, "post_processor": post_processor, "decoder": bytes,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": cut.whole,
            "vocab": vocab, "merges": merges,
        },
    });
    let mut settings = Map::new();
    settings.insert("add_bos_token".into(), begins.into());
    for (theirs, ours) in [("bos", "bos_token"), ("eos", "eos_token"), ("padding", "pad_token")] {
        named(theirs).map(|token| settings.insert(ours.into(), token.into()));
    }
    metadata.get("tokenizer.chat_template").map(|template| settings.insert("chat_template".into(), template.clone()));
    Ok((whole, settings))
}

/// The numbers of all tokens, and those that are found before a text is cut.
fn vocabulary(tokens: &[Value], kinds: &[Value]) -> Result<(Map<String, Value>, Vec<Value>), String> {
    let (mut vocab, mut added) = (Map::new(), Vec::new());
    for (id, token) in tokens.iter().enumerate() {
        let text = token.as_str().ok_or_else(|| format!("has {token} at {id}, which is no text"))?;
        let kind = kinds.get(id).and_then(Value::as_u64).unwrap_or(1);
        if [CONTROL, ADDED].contains(&kind) {
            added.push(json!({
                "id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
                "special": kind == CONTROL,
            }));
        }
        if vocab.insert(text.into(), id.into()).is_some() {
            return Err(format!("has `{text}` twice"));
        }
    }
    Ok((vocab, added))
}

impl Cut {
    /// What makes characters of bytes, and how texts are cut before.
    fn steps(&self) -> (Value, Value) {
        let with_its_own = self.pattern.is_none();
        let bytes = json!({
            "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": with_its_own,
        });
        let cut = self.pattern.map(|pattern| {
            let split =
                json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
            json!({"type": "Sequence", "pretokenizers": [split, bytes]})
        });
        (bytes.clone(), cut.unwrap_or(bytes))
    }
}
