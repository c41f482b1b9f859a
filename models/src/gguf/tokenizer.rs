//! The tokenizer of a GGUF file as a folder has it: byte pair encoding over bytes, as Llama 3 and Qwen have it, or over characters by
//! scores, as SentencePiece has it.

use super::writing::Field;
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

/// Types of tokens: those that merges make, those that stand for something else than their text, and those that users added.
const NORMAL: u64 = 1;
const CONTROL: u64 = 3;
const ADDED: u64 = 4;
/// Type of a row of the table that no token reads.
const UNUSED: i32 = 5;

/// `tokenizer.json` and `tokenizer_config.json`.
type Files = (Value, Map<String, Value>);

/// The files of a folder.
pub(super) fn of(path: &Path, metadata: &Map<String, Value>) -> Result<Files, ModelError> {
    let get = |name: &str| metadata.get(&format!("tokenizer.ggml.{name}"));
    let bad = |name: &str, why: String| ModelError::field(path, format!("tokenizer.ggml.{name}"), why);
    let text = |name: &str| get(name).and_then(Value::as_str).unwrap_or_default();
    if text("model") == "llama" {
        return of_scores(metadata).map_err(|(name, why)| bad(name, why));
    }
    if text("model") != "gpt2" {
        let why =
            format!("is `{}`; supported are gpt2 and llama, so give tokens, or load the model's folder", text("model"));
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
    Ok((whole, settings(metadata, begins, named)))
}

/// `tokenizer_config.json`, of a tokenizer whose texts begin with bos or not; `named` gives the token that metadata number so.
fn settings<'a>(
    metadata: &Map<String, Value>,
    begins: bool,
    named: impl Fn(&str) -> Option<&'a str>,
) -> Map<String, Value> {
    let mut settings = Map::new();
    settings.insert("add_bos_token".into(), begins.into());
    for (theirs, ours) in [("bos", "bos_token"), ("eos", "eos_token"), ("padding", "pad_token")] {
        named(theirs).map(|token| settings.insert(ours.into(), token.into()));
    }
    metadata.get("tokenizer.chat_template").map(|template| settings.insert("chat_template".into(), template.clone()));
    settings
}

/// The same of a tokenizer of SentencePiece, which merges the two neighbours whose union has the best score: byte pairs whose
/// merges are all pairs of tokens that make one, the best score first. Or a field and what is wrong with it.
fn of_scores(metadata: &Map<String, Value>) -> Result<Files, (&'static str, String)> {
    let get = |name: &str| metadata.get(&format!("tokenizer.ggml.{name}"));
    let list = |name: &'static str| {
        let found = get(name).and_then(Value::as_array);
        found.ok_or_else(|| (name, "is missing; it must be a list".to_string()))
    };
    let (tokens, scores) = (list("tokens")?, list("scores")?);
    let kinds: &[Value] = get("token_type").and_then(Value::as_array).map_or(&[], Vec::as_slice);
    let (vocab, added) = vocabulary(tokens, kinds).map_err(|why| ("tokens", why))?;
    if scores.len() != tokens.len() {
        return Err(("scores", format!("has {} numbers; there are {} tokens", scores.len(), tokens.len())));
    }
    let merges = merges_of(tokens, scores, kinds, &vocab).map_err(|why| ("scores", why))?;
    let named = |name: &str| -> Option<&str> {
        let id = get(&format!("{name}_token_id"))?.as_u64()?;
        tokens.get(usize::try_from(id).ok()?)?.as_str()
    };
    let flag = |name: &str| get(name).and_then(Value::as_bool).unwrap_or(true);
    let begins = flag("add_bos_token");
    let post_processor = named("bos").filter(|_| begins).map(|bos| {
        json!({
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {bos: {"id": bos, "ids": [get("bos_token_id")], "tokens": [bos]}},
        })
    });
    let (spaces, prefix) = (
        json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE}),
        json!({"type": "Prepend", "prepend": SPACE}),
    );
    let begins_with_space = flag("add_space_prefix");
    let normalizers = if begins_with_space { vec![prefix, spaces] } else { vec![spaces] };
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if begins_with_space {
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    let unknown = named("unknown").or_else(|| vocab.contains_key("<unk>").then_some("<unk>"));
    let whole = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": null, "post_processor": post_processor,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": unknown, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
            "vocab": vocab, "merges": merges,
        },
    });
    Ok((whole, settings(metadata, begins, named)))
}

/// All pairs of tokens that make one, the best score first.
fn merges_of(
    tokens: &[Value],
    scores: &[Value],
    kinds: &[Value],
    vocab: &Map<String, Value>,
) -> Result<Vec<Value>, String> {
    let mut merges = Vec::new();
    for (id, (token, score)) in tokens.iter().zip(scores).enumerate() {
        let (text, kind) = (token.as_str().unwrap_or_default(), kinds.get(id).and_then(Value::as_u64).unwrap_or(1));
        let score = score.as_f64().ok_or_else(|| format!("has {score} at {id}, which is no number"))?;
        if kind != NORMAL {
            continue;
        }
        for (at, _) in text.char_indices().skip(1) {
            let (left, right) = text.split_at(at);
            if let (Some(of_left), Some(of_right)) = (vocab.get(left), vocab.get(right)) {
                merges.push((score, of_left.as_u64(), of_right.as_u64(), left, right));
            }
        }
    }
    // Of pairs that make one token, or tokens of one score, the one with the longer beginning comes first.
    merges.sort_by(|a, b| b.0.total_cmp(&a.0).then(b.3.len().cmp(&a.3.len())).then((a.1, a.2).cmp(&(b.1, b.2))));
    Ok(merges.iter().map(|(.., left, right)| json!([left, right])).collect())
}

/// What stands for a space in tokens of SentencePiece.
const SPACE: &str = "\u{2581}";

/// The way back: metadata of `tokenizer.json` and `tokenizer_config.json` of a model with so many tokens, or why there are none.
pub(super) fn metadata_of(
    json: &Value,
    settings: &Map<String, Value>,
    vocab: usize,
) -> Result<Vec<(String, Field)>, String> {
    let model = &json["model"];
    let of_pattern = |pattern: Option<&str>| CUTS.iter().find(|cut| cut.pattern == pattern);
    let splits = json["pre_tokenizer"]["pretokenizers"].as_array();
    let pattern = splits.and_then(|all| all.iter().find_map(|one| one["pattern"]["Regex"].as_str()));
    let with_its_own = json["pre_tokenizer"]["type"] == "ByteLevel" && json["pre_tokenizer"]["use_regex"] != false;
    let cut = if with_its_own { of_pattern(None) } else { pattern.and_then(|pattern| of_pattern(Some(pattern))) };
    let (Some(cut), true) = (cut, model["type"] == "BPE") else {
        return Err("is none of byte pairs as GPT-2, Llama 3 and Qwen 2 cut texts".into());
    };
    let mut tokens: Vec<Option<String>> = vec![None; vocab];
    let mut kinds = vec![1; vocab];
    let added = json["added_tokens"].as_array().map_or(&[][..], Vec::as_slice);
    let of_added = added.iter().map(|token| {
        let kind = if token["special"] == true { CONTROL } else { ADDED };
        (token["content"].as_str(), token["id"].as_u64(), kind)
    });
    let listed = model["vocab"].as_object().into_iter().flatten();
    let all = listed.map(|(text, id)| (Some(&text[..]), id.as_u64(), 1)).chain(of_added);
    for (text, id, kind) in all {
        let (Some(text), Some(id)) = (text, id.and_then(|id| usize::try_from(id).ok())) else {
            return Err("has a token without a text or a number".into());
        };
        let Some(place) = tokens.get_mut(id) else {
            return Err(format!("has token {id}; the model has {vocab}"));
        };
        (*place, kinds[id]) = (Some(text.into()), kind as i32);
    }
    // The model may have rows that no token reads.
    for (id, token) in tokens.iter().enumerate() {
        if token.is_none() {
            kinds[id] = UNUSED;
        }
    }
    let tokens = tokens.into_iter().enumerate().map(|(id, token)| token.unwrap_or(format!("[PAD{id}]"))).collect();
    let merge = |merge: &Value| match merge {
        Value::String(both) => Some(both.clone()),
        Value::Array(two) => Some(format!("{} {}", two.first()?.as_str()?, two.get(1)?.as_str()?)),
        _ => None,
    };
    let merges = model["merges"].as_array().map(|all| all.iter().map(merge).collect::<Option<Vec<String>>>());
    let Some(Some(merges)) = merges else { return Err("has no list of merges".into()) };
    let name = |name: &str| format!("tokenizer.ggml.{name}");
    let mut metadata = vec![
        (name("model"), Field::Text("gpt2".into())),
        (name("pre"), Field::Text(cut.names[0].into())),
        (name("tokens"), Field::Texts(tokens)),
        (name("token_type"), Field::Counts(kinds)),
        (name("merges"), Field::Texts(merges)),
    ];
    let begins = json["post_processor"]["type"] == "TemplateProcessing"
        || json["post_processor"]["processors"]
            .as_array()
            .is_some_and(|all| all.iter().any(|one| one["type"] == "TemplateProcessing"));
    metadata.push((name("add_bos_token"), Field::Flag(begins)));
    if let Some(template) = settings.get("chat_template").and_then(Value::as_str) {
        metadata.push(("tokenizer.chat_template".into(), Field::Text(template.into())));
    }
    Ok(metadata)
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
