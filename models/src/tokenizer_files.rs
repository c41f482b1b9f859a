//! The files of a tokenizer as one tokenizer: what `AutoTokenizer` of transformers 5 makes of a folder.
//!
//! What begins a text is the post-processor's word (`add_bos_token` is not read where there is a `tokenizer.json`). Some classes
//! keep of `tokenizer.json` only vocabulary, merges and post-processor, and normalise and cut as they do themselves. Tokens may
//! also be added by `tokenizer_config.json`, or `special_tokens_map.json` and `added_tokens.json` of older folders.

use crate::files::{parse_object, read, read_object};
use crate::{ModelError, gguf};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use tokenizers::AddedToken;

/// A class of tokenizers whose own code builds them.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Class {
    /// As `tokenizer.json` says.
    Backend,
    Llama,
    Gemma,
    Qwen2,
    Gpt2,
}

impl Class {
    /// The class of this name, with or without `Fast`.
    fn of(name: &str) -> Class {
        match name.strip_suffix("Fast").unwrap_or(name) {
            "LlamaTokenizer" | "Phi3Tokenizer" => Class::Llama,
            "GemmaTokenizer" => Class::Gemma,
            "Qwen2Tokenizer" => Class::Qwen2,
            "GPT2Tokenizer" => Class::Gpt2,
            _ => Class::Backend,
        }
    }

    /// What the class calls its tokens where the folder does not say.
    fn defaults(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Class::Backend => &[],
            Class::Llama => &[("unk_token", "<unk>"), ("bos_token", "<s>"), ("eos_token", "</s>")],
            Class::Gemma => &[
                ("unk_token", "<unk>"),
                ("bos_token", "<bos>"),
                ("eos_token", "<eos>"),
                ("pad_token", "<pad>"),
                ("mask_token", "<mask>"),
            ],
            Class::Qwen2 => &[("unk_token", END), ("eos_token", END), ("pad_token", END)],
            Class::Gpt2 => &[("unk_token", END), ("bos_token", END), ("eos_token", END)],
        }
    }
}

const END: &str = "<|endoftext|>";

/// How the code of Qwen2 cuts a text.
pub(crate) const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Tokens with a part to play, in the order in which they are added.
const NAMED: [&str; 7] = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// What a folder's tokenizer is.
pub(crate) struct Read {
    pub inner: tokenizers::Tokenizer,
    /// `tokenizer_config.json`, with what older files say.
    pub settings: Map<String, Value>,
}

/// Reads the tokenizer of the folder `dir`.
pub(crate) fn load(dir: &Path) -> Result<Read, ModelError> {
    if gguf::is_gguf(dir) {
        let (json, settings) = gguf::tokenizer(dir)?;
        let inner = json.to_string().parse::<tokenizers::Tokenizer>();
        let inner = inner.map_err(|e| ModelError::file(dir, format!("has a tokenizer that does not load: {e}")))?;
        return Ok(Read { inner, settings });
    }
    let path = dir.join("tokenizer.json");
    if !path.exists() {
        for other in ["tokenizer.model", "vocab.json", "tekken.json", "tiktoken.model", "spiece.model"] {
            if dir.join(other).exists() {
                let why = format!(
                    "is missing; make it of {other}: python -c \"from transformers import AutoTokenizer; \
                     AutoTokenizer.from_pretrained('DIR').save_pretrained('DIR')\""
                );
                return Err(ModelError::file(&path, why));
            }
        }
    }
    let bytes = read(&path)?;
    let mut file = parse_object(&path, &bytes)?;
    let optional = |name: &str| -> Result<Option<Map<String, Value>>, ModelError> {
        let path = dir.join(name);
        if path.exists() { read_object(&path).map(Some) } else { Ok(None) }
    };
    let config = optional("config.json")?.unwrap_or_default();
    let given = optional("tokenizer_config.json")?;
    let class = class_of(&config, given.as_ref(), &bytes);
    drop(bytes);
    let mut settings = given.unwrap_or_default();
    // BPE is what these classes are of; what is none of it is taken as the file says.
    let class = if file.get("model").and_then(|model| model.get("type")) == Some(&json!("BPE")) {
        class
    } else {
        Class::Backend
    };

    // Tokens by number, as the folder says them in one of two ways.
    let mut by_id: BTreeMap<u64, AddedToken> = BTreeMap::new();
    let wrong = |name: &str, why: &str| ModelError::file(&dir.join(name), why.to_string());
    if let Some(added) = settings.get("added_tokens_decoder") {
        let added =
            added.as_object().map(|map| map.iter().map(|(id, token)| Some((id.parse().ok()?, token_of(token)?))));
        let added: Option<Vec<(u64, AddedToken)>> = added.and_then(|all| all.collect());
        let why = "has an `added_tokens_decoder` that is no object of tokens by their numbers";
        by_id.extend(added.ok_or_else(|| wrong("tokenizer_config.json", why))?);
    } else {
        for (key, value) in optional("special_tokens_map.json")?.unwrap_or_default() {
            settings.insert(key, value);
        }
        let named = |token: &str| {
            let named = NAMED.iter().filter_map(|key| settings.get(*key));
            named.chain(extra(&settings)).filter_map(token_of).any(|named| named.content == token)
        };
        for (content, id) in optional("added_tokens.json")?.unwrap_or_default() {
            let id = id.as_u64().ok_or_else(|| wrong("added_tokens.json", "does not give each token a number"))?;
            let special = named(&content);
            by_id.insert(id, AddedToken::from(content, special).normalized(!special));
        }
        for token in file.get("added_tokens").and_then(Value::as_array).into_iter().flatten() {
            if let (Some(id), Some(token)) = (token.get("id").and_then(Value::as_u64), token_of(token)) {
                by_id.insert(id, token);
            }
        }
    }

    rebuild(class, &mut file, &settings);
    let text = Value::Object(file).to_string();
    let mut inner = tokenizers::Tokenizer::from_bytes(text)
        .map_err(|e| ModelError::file(&path, format!("is not a tokenizer: {}", one_line(&e))))?;
    // Whatever the folder was prepared for, a prompt is neither cut nor filled up.
    inner.with_padding(None);
    inner.with_truncation(None).map_err(|e| ModelError::file(&path, one_line(&e)))?;
    add(&mut inner, class, &settings, by_id);
    Ok(Read { inner, settings })
}

/// The class that `AutoTokenizer` takes.
fn class_of(config: &Map<String, Value>, given: Option<&Map<String, Value>>, file: &[u8]) -> Class {
    let word = |map: Option<&Map<String, Value>>| {
        map.and_then(|map| map.get("tokenizer_class")).and_then(Value::as_str).map(String::from)
    };
    let family = config.get("model_type").and_then(Value::as_str).unwrap_or("");
    let registered = match family {
        "qwen2" | "qwen3" | "qwen3_moe" => Some(Class::Qwen2),
        "gemma2" => Some(Class::Gemma),
        "mistral" | "mixtral" | "phi3" => Some(Class::Backend),
        _ => None,
    };
    // What these say of themselves is known to be wrong.
    let mistaken = ["phi3", "qwen2"].contains(&family);
    let of_bytes = file.windows(11).any(|window| window == b"\"ByteLevel\"");
    match (word(given).or_else(|| word(Some(config))), registered) {
        (Some(name), _) if name.strip_suffix("Fast").unwrap_or(&name) == "LlamaTokenizer" && of_bytes && !mistaken => {
            Class::Backend
        }
        (Some(_), Some(registered)) if mistaken || registered == Class::Backend => registered,
        (Some(name), _) => Class::of(&name),
        (None, registered) => registered.unwrap_or(Class::Backend),
    }
}

/// Lets the parts that a class makes itself take the place of those of the file.
fn rebuild(class: Class, file: &mut Map<String, Value>, settings: &Map<String, Value>) {
    if class == Class::Backend {
        return;
    }
    file.insert("added_tokens".into(), json!([]));
    let prefix = |default: bool| settings.get("add_prefix_space").and_then(Value::as_bool).unwrap_or(default);
    let legacy = settings.get("legacy").is_some_and(|legacy| *legacy == json!(true));
    let unk = settings.get("unk_token").and_then(token_of).map(|token| token.content);
    let (model, normalizer, splitter, decoder) = match class {
        Class::Backend => unreachable!("it is the file's"),
        Class::Llama => {
            let prefix = prefix(true);
            let scheme = if !prefix {
                "never"
            } else if legacy {
                "always"
            } else {
                "first"
            };
            let mut decoders = vec![
                json!({"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "}),
                json!({"type": "ByteFallback"}),
                json!({"type": "Fuse"}),
            ];
            if prefix {
                decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
            }
            (
                json!({"fuse_unk": true, "byte_fallback": true, "unk_token": null}),
                Value::Null,
                json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": scheme, "split": false}),
                json!({"type": "Sequence", "decoders": decoders}),
            )
        }
        Class::Gemma => (
            json!({"fuse_unk": true, "byte_fallback": true, "unk_token": unk.unwrap_or("<unk>".into())}),
            json!({"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"}),
            json!({"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false}),
            json!({"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
            ]}),
        ),
        Class::Qwen2 | Class::Gpt2 => {
            let level = |regex: bool| json!({"type": "ByteLevel", "add_prefix_space": prefix(false), "trim_offsets": true, "use_regex": regex});
            let split = json!({"type": "Split", "pattern": {"Regex": QWEN2}, "behavior": "Isolated", "invert": false});
            let decoder =
                json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
            let model = json!({"fuse_unk": false, "byte_fallback": false, "unk_token": null});
            match class {
                Class::Qwen2 => {
                    let splitter = json!({"type": "Sequence", "pretokenizers": [split, level(false)]});
                    (model, json!({"type": "NFC"}), splitter, decoder)
                }
                _ => (model, Value::Null, level(true), decoder),
            }
        }
    };
    let of_file = file.get_mut("model").and_then(Value::as_object_mut);
    if let (Some(of_file), Value::Object(model)) = (of_file, model) {
        of_file.retain(|key, _| ["type", "vocab", "merges"].contains(&&key[..]));
        of_file.extend(model);
    }
    file.insert("normalizer".into(), normalizer);
    file.insert("pre_tokenizer".into(), splitter);
    file.insert("decoder".into(), decoder);
}

/// Adds what the folder calls tokens and the tokenizer does not have.
fn add(
    inner: &mut tokenizers::Tokenizer,
    class: Class,
    settings: &Map<String, Value>,
    by_id: BTreeMap<u64, AddedToken>,
) {
    let there: Vec<AddedToken> = inner.get_added_tokens_decoder().into_values().collect();
    let same = |a: &AddedToken, b: &AddedToken| {
        let flags = |t: &AddedToken| [t.single_word, t.lstrip, t.rstrip, t.normalized, t.special];
        a.content == b.content && flags(a) == flags(b)
    };
    let mut new: Vec<AddedToken> =
        by_id.values().filter(|token| !there.iter().any(|other| same(token, other))).cloned().collect();
    // Tokens that have a part to play, and those that are special besides.
    let mut named: Vec<AddedToken> = Vec::new();
    let defaults: BTreeMap<&str, &str> = class.defaults().iter().copied().collect();
    let own: Vec<&String> =
        settings.keys().filter(|key| key.ends_with("_token") && !NAMED.contains(&&key[..])).collect();
    for key in NAMED.into_iter().chain(own.iter().map(|key| &key[..])) {
        let value = match (settings.get(key), defaults.get(key)) {
            (Some(value), _) => token_of(value),
            (None, Some(default)) => Some(AddedToken::from(*default, true)),
            (None, None) => None,
        };
        let Some(token) = value.filter(|token| !token.content.is_empty()) else { continue };
        // The folder's own flags of it, where it has any.
        let own = by_id.values().find(|other| other.content == token.content && NAMED.contains(&key));
        named.push(own.cloned().unwrap_or(token));
    }
    let extra: Vec<AddedToken> = extra(settings).filter_map(token_of).collect();
    for token in named.iter().chain(&extra) {
        let known = there.iter().chain(&new).any(|other| other.content == token.content);
        if !known {
            new.push(token.clone());
        }
    }
    for token in &mut new {
        token.special |= named.iter().any(|other| other.content == token.content);
    }
    inner.add_tokens(&new);
    if class == Class::Qwen2 {
        let all = named.iter().chain(&extra);
        let all: Vec<AddedToken> = all.map(|token| AddedToken::from(token.content.clone(), true)).collect();
        inner.add_tokens(&all);
    }
}

/// The special tokens without a part to play.
fn extra(settings: &Map<String, Value>) -> impl Iterator<Item = &Value> {
    let list = |key: &str| settings.get(key).and_then(Value::as_array).filter(|list| !list.is_empty());
    list("extra_special_tokens").or_else(|| list("additional_special_tokens")).into_iter().flatten()
}

/// A token by its text, which makes it special, or by an object.
fn token_of(value: &Value) -> Option<AddedToken> {
    match value {
        Value::String(content) => Some(AddedToken::from(content.clone(), true)),
        Value::Object(map) => {
            let flag = |key: &str, default: bool| map.get(key).and_then(Value::as_bool).unwrap_or(default);
            let special = flag("special", !map.contains_key("id") && !map.contains_key("special"));
            let token = AddedToken::from(map.get("content")?.as_str()?, special);
            let token = token.single_word(flag("single_word", false)).lstrip(flag("lstrip", false));
            Some(token.rstrip(flag("rstrip", false)).normalized(flag("normalized", !special)))
        }
        _ => None,
    }
}

/// The text of a token with a part to play.
pub(crate) fn named(settings: &Map<String, Value>, key: &str) -> Option<String> {
    settings.get(key).and_then(token_of).map(|token| token.content)
}

pub(crate) fn one_line(error: &tokenizers::Error) -> String {
    error.to_string().lines().collect::<Vec<_>>().join(" ")
}
