//! Texts as tokens and back, with a look at what a tokenizer leaves out.
//!
//! A normalizer changes a text by rule (lower case, no accents), and a pre-tokenizer cuts it into pieces, often at spaces that it
//! leaves out. The pieces are what has to be encoded. A BPE model without an unknown token drops what it does not know; the
//! others read it as their unknown token.

use crate::chat;
use crate::tokenizer_files::{self, Read, one_line};
use crate::{Config, ModelError};
use serde_json::{Map, Value};
use std::cell::RefCell;
use std::collections::HashSet;
use std::ops::Range;
use std::path::{Path, PathBuf};
use tokenizers::models::bpe::BPE;
use tokenizers::{
    Model, ModelWrapper, NormalizedString, OffsetReferential, OffsetType, PreTokenizer, Token,
    normalizer::Range as Referential,
};

/// A text as tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Encoded {
    /// The tokens, those included that the tokenizer puts around the text, such as bos.
    pub tokens: Vec<i32>,
    /// One line that names the characters that were left out or read as the unknown token.
    pub warning: Option<String>,
}

/// The tokenizer of a folder.
pub(crate) struct Tokenizer {
    path: PathBuf,
    inner: tokenizers::Tokenizer,
    /// The folder, and what its `tokenizer_config.json` says.
    dir: PathBuf,
    settings: Map<String, Value>,
}

impl Tokenizer {
    pub fn load(dir: &Path) -> Result<Tokenizer, ModelError> {
        let Read { inner, settings } = tokenizer_files::load(dir)?;
        Ok(Tokenizer { path: dir.join("tokenizer.json"), inner, dir: dir.into(), settings })
    }

    /// The tokens of `prompt`, those included that the tokenizer itself puts around it.
    pub fn encode(&self, config: &Config, prompt: &str) -> Result<Encoded, ModelError> {
        self.encode_with(config, prompt, true)
    }

    /// The tokens of messages by the folder's chat template, which writes all special tokens itself.
    pub fn chat(&self, config: &Config, messages: &Value) -> Result<Encoded, ModelError> {
        let text = chat::render(&self.dir, &self.settings, messages)?;
        self.encode_with(config, &text, false)
    }

    fn encode_with(&self, config: &Config, prompt: &str, with_special: bool) -> Result<Encoded, ModelError> {
        let failed = |e: tokenizers::Error| ModelError::input("prompt", format!("cannot be encoded: {}", one_line(&e)));
        let (encoding, lost) = encode(&self.inner, prompt, with_special).map_err(failed)?;
        let warning = self.judge(config, &lost)?;
        let mut tokens = Vec::with_capacity(encoding.len());
        for &id in encoding.get_ids() {
            let token = i32::try_from(id).ok().filter(|&token| (token as usize) < config.vocab).ok_or_else(|| {
                let why = format!("gives token {id}, but vocab_size in config.json is {}", config.vocab);
                ModelError::file(&self.path, why)
            })?;
            tokens.push(token);
        }
        Ok(Encoded { tokens, warning })
    }

    /// An error for characters that no token stands for, a warning for those that the unknown token stands for.
    fn judge(&self, config: &Config, lost: &Lost) -> Result<Option<String>, ModelError> {
        if !lost.dropped.is_empty() {
            let why =
                "and it has no unknown token; leave them out, or use the tokenizer that the model was trained with";
            return Err(ModelError::input("prompt", format!("{}, {why}", self.without(&lost.dropped))));
        }
        let mut warnings = Vec::new();
        if !lost.left_out.is_empty() {
            let all = listed(&lost.left_out);
            warnings.push(format!("{all} left out by the pre-tokenizer of {}", self.path.display()));
        }
        if let Some(unknown) = self.unknown(config, lost)? {
            warnings.push(unknown);
        }
        Ok(Some(warnings.join("; ")).filter(|warning| !warning.is_empty()).map(|warning| format!("prompt: {warning}")))
    }

    fn without(&self, texts: &[String]) -> String {
        let verb = if texts.len() == 1 { "has" } else { "have" };
        format!("{} {verb} no token in {}", listed(texts), self.path.display())
    }

    /// What is to be said of the unknown token where it stands for something.
    fn unknown(&self, config: &Config, lost: &Lost) -> Result<Option<String>, ModelError> {
        let Some((id, name)) = &lost.unknown_token else { return Ok(None) };
        let token = i32::try_from(*id).ok();
        let meaning = [("padding", config.pad == token), ("bos", config.bos == token)];
        let eos = ("eos", token.is_some_and(|token| config.eos.contains(&token)));
        // Nothing in such a token says that a character stood there.
        if let Some((meaning, _)) = meaning.into_iter().chain([eos]).find(|(_, holds)| *holds) {
            let why = format!("which reads them as `{name}`, the model's {meaning} token; leave them out");
            return Err(ModelError::input("prompt", format!("{}, {why}", self.without(&lost.unknown))));
        }
        let place = format!("the model reads its unknown token `{name}` in their place");
        Ok(Some(format!("{}; {place}", self.without(&lost.unknown))))
    }

    /// The text of `tokens` without those that the tokenizer says are special.
    pub fn decode(&self, config: &Config, tokens: &[i32]) -> Result<String, ModelError> {
        config.check_tokens("tokens", tokens, 0)?;
        let ids: Vec<u32> = tokens.iter().map(|&token| token as u32).collect();
        let text = self.inner.decode(&ids, true);
        text.map_err(|e| ModelError::file(&self.path, format!("cannot decode {ids:?}: {}", one_line(&e))))
    }
}

/// Parts of a text that its tokens do not hold, as the text has them, each once and in the order of the text.
#[derive(Debug, Default, PartialEq, Eq)]
struct Lost {
    /// The pre-tokenizer left them out; without whitespace, which only says where pieces end.
    left_out: Vec<String>,
    /// No token stands for them.
    dropped: Vec<String>,
    /// The unknown token stands for them.
    unknown: Vec<String>,
    /// The unknown token, where it stands for something.
    unknown_token: Option<(u32, String)>,
}

/// What `tokenizers::Tokenizer::encode` does, step by step, and what gets lost on the way from pieces to tokens.
fn encode(
    tokenizer: &tokenizers::Tokenizer,
    text: &str,
    with_special: bool,
) -> tokenizers::Result<(tokenizers::Encoding, Lost)> {
    let mut pieces = tokenizer.get_added_vocabulary().extract_and_normalize(tokenizer.get_normalizer(), text);
    let mut lost = Lost::default();
    if let Some(splitter) = tokenizer.get_pre_tokenizer() {
        let before = RefCell::new(Vec::new());
        // Changes nothing: the way to see each piece that is no added token.
        pieces.normalize(|piece| {
            before.borrow_mut().extend(places(piece));
            Ok(())
        })?;
        splitter.pre_tokenize(&mut pieces)?;
        let mut held = vec![false; text.len()];
        for (_, (start, end), _) in pieces.get_splits(OffsetReferential::Original, OffsetType::Byte) {
            held[start..end].fill(true);
        }
        for place in before.into_inner().into_iter().filter(|place| !held[place.clone()].contains(&true)) {
            let text = text[place].to_string();
            if !text.trim().is_empty() && !lost.left_out.contains(&text) {
                lost.left_out.push(text);
            }
        }
    }
    let model = tokenizer.get_model();
    let lost = RefCell::new(lost);
    pieces.tokenize(|piece| {
        // A model refuses a piece only for want of a token and of an unknown token.
        let tokens = model.tokenize(piece.get()).ok();
        lost.borrow_mut().look(model, piece, tokens.as_deref());
        Ok(tokens.unwrap_or_default())
    })?;
    let encoding = tokenizer.post_process(pieces.into_encoding(None, 0, OffsetType::Byte)?, None, with_special)?;
    Ok((encoding, lost.into_inner()))
}

/// Where in the whole text the characters of `piece` come from.
fn places(piece: &NormalizedString) -> Vec<Range<usize>> {
    let start = piece.offsets_original().0;
    let one = |(at, c): (usize, char)| piece.convert_offsets(Referential::Normalized(at..at + c.len_utf8()));
    let places = piece.get().char_indices().filter_map(one);
    places.map(|place| start + place.start..start + place.end).collect()
}

impl Lost {
    /// Adds what `tokens` do not hold of `piece`; `None` where the model refused the piece.
    fn look(&mut self, model: &ModelWrapper, piece: &NormalizedString, tokens: Option<&[Token]>) {
        let text = piece.get();
        let end = |tokens: &[Token]| tokens.iter().map(|token| token.offsets.1).max().unwrap_or(0);
        if tokens.is_none_or(|tokens| end(tokens) < text.len()) {
            let mut ranges = unencodable(model, text);
            if ranges.is_empty() {
                ranges.push(0..text.len());
            }
            add(&mut self.dropped, piece, ranges);
        }
        for token in tokens.unwrap_or_default().iter().filter(|token| is_unknown(model, token)) {
            let range = token.offsets.0..token.offsets.1;
            let (range, read) = text.get(range.clone()).map_or((0..text.len(), text), |read| (range, read));
            let name = model.id_to_token(token.id).unwrap_or_default();
            if read == name {
                continue;
            }
            let ranges = match model {
                // They look at characters one by one, and join what they do not know.
                ModelWrapper::BPE(_) | ModelWrapper::Unigram(_) => {
                    read.char_indices().map(|(at, c)| range.start + at..range.start + at + c.len_utf8()).collect()
                }
                ModelWrapper::WordPiece(_) | ModelWrapper::WordLevel(_) => vec![range],
            };
            if add(&mut self.unknown, piece, ranges) {
                self.unknown_token.get_or_insert((token.id, name));
            }
        }
    }
}

/// Puts what the text had at `ranges` of `piece` into `found`; whether it had anything there.
fn add(found: &mut Vec<String>, piece: &NormalizedString, ranges: Vec<Range<usize>>) -> bool {
    let before: Vec<String> = ranges.into_iter().filter_map(|range| origin(piece, range)).collect();
    let any = !before.is_empty();
    for text in before {
        if !found.contains(&text) {
            found.push(text);
        }
    }
    any
}

/// What the text had at `range` of the normalized `piece`; `None` where the tokenizer itself put something there.
fn origin(piece: &NormalizedString, range: Range<usize>) -> Option<String> {
    let text = &piece.get()[range.clone()];
    let of = |range: Range<usize>| piece.get_range_original(Referential::Normalized(range));
    let original = match of(range.clone()) {
        None => return Some(text.into()),
        Some("") => return None,
        Some(original) => original,
    };
    // A space set before the text, or what stands for one, shares the place of the character behind it.
    let space = |c: char| c == '\u{2581}' || c == '\u{120}' || c == ' ';
    if text.chars().all(space) {
        let next = piece.get()[range.end..].chars().next().map(|c| range.end..range.end + c.len_utf8());
        let place = |range: Range<usize>| piece.convert_offsets(Referential::Normalized(range));
        let shares = next.is_some_and(|next| place(next) == place(range));
        if shares || !original.chars().any(|c| c.is_whitespace() || text.contains(c)) {
            return None;
        }
    }
    Some(original.into())
}

/// Whether `token` is the unknown one.
fn is_unknown(model: &ModelWrapper, token: &Token) -> bool {
    match model {
        ModelWrapper::BPE(bpe) => bpe.unk_token.as_ref() == Some(&token.value),
        ModelWrapper::WordPiece(words) => words.unk_token == token.value,
        ModelWrapper::WordLevel(words) => words.unk_token == token.value,
        // It keeps what it read as the value of the token.
        ModelWrapper::Unigram(_) => model.id_to_token(token.id).as_ref() != Some(&token.value),
    }
}

/// What of `text` the model has no token for, where that can be told from single characters.
fn unencodable(model: &ModelWrapper, text: &str) -> Vec<Range<usize>> {
    let those = |lacks: &dyn Fn(usize, char) -> bool| {
        let all = text.char_indices().filter(|&(at, c)| lacks(at, c));
        all.map(|(at, c)| at..at + c.len_utf8()).collect()
    };
    match model {
        ModelWrapper::BPE(bpe) => those(&|at, c| !has_symbol(bpe, text, at, c)),
        ModelWrapper::Unigram(_) => {
            let vocab = model.get_vocab();
            let known: HashSet<char> = vocab.keys().flat_map(|token| token.chars()).collect();
            those(&|_, c| !known.contains(&c))
        }
        ModelWrapper::WordPiece(_) | ModelWrapper::WordLevel(_) => Vec::new(),
    }
}

/// Whether a BPE model has what it begins with for the character at byte `at` of `text`.
fn has_symbol(bpe: &BPE, text: &str, at: usize, c: char) -> bool {
    let prefix = bpe.continuing_subword_prefix.as_deref().filter(|_| at > 0).unwrap_or("");
    let last = at + c.len_utf8() == text.len();
    let suffix = bpe.end_of_word_suffix.as_deref().filter(|_| last).unwrap_or("");
    let symbol = format!("{prefix}{c}{suffix}");
    let byte = |b: u8| bpe.token_to_id(&format!("<{b:#04X}>")).is_some();
    bpe.token_to_id(&symbol).is_some() || bpe.byte_fallback && symbol.bytes().all(byte)
}

/// Most texts that a message lists.
const LISTED: usize = 10;

/// Texts for a message: quoted, what cannot be seen escaped, and by code point what is not plain ASCII.
fn listed(texts: &[String]) -> String {
    let name = |text: &String| {
        let (mut chars, quote) = (text.chars(), if text.chars().count() == 1 { '\'' } else { '"' });
        let alone = chars.next().is_some() && chars.next().is_none();
        let points = text.chars().filter(|c| alone || !c.is_ascii_graphic());
        let points: Vec<String> = points.map(|c| format!("U+{:04X}", u32::from(c))).collect();
        let quoted = format!("{quote}{}{quote}", text.escape_debug());
        if points.is_empty() { quoted } else { format!("{quoted} ({})", points.join(" ")) }
    };
    let mut names: Vec<String> = texts.iter().take(LISTED).map(name).collect();
    if texts.len() > LISTED {
        names.push(format!("and {} more", texts.len() - LISTED));
    }
    names.join(", ")
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;
    use serde_json::json;

    /// A tokenizer of `model`, with `more` fields of tokenizer.json.
    fn tokenizer(model: Value, more: Value) -> tokenizers::Tokenizer {
        let mut file = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
            "pre_tokenizer": null, "post_processor": null, "decoder": null, "model": model,
        });
        for (field, value) in more.as_object().unwrap() {
            file[field] = value.clone();
        }
        tokenizers::Tokenizer::from_bytes(file.to_string()).unwrap()
    }

    fn vocab<'a>(tokens: impl IntoIterator<Item = &'a str>) -> Value {
        Value::Object(Map::from_iter(tokens.into_iter().enumerate().map(|(id, token)| (token.into(), json!(id)))))
    }

    fn bpe(tokens: &[&str], merges: &[&str], more: Value) -> Value {
        let mut model = json!({"type": "BPE", "vocab": vocab(tokens.iter().copied()), "merges": merges});
        for (field, value) in more.as_object().unwrap() {
            model[field] = value.clone();
        }
        model
    }

    fn digits(more: Value) -> Value {
        bpe(&["<unk>", "0", "1", "2", "12", "+", " ", "e"], &["1 2"], more)
    }

    /// The characters that byte-level BPE has for the bytes 0 to 255.
    fn byte_level() -> Vec<String> {
        let plain = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
        let mut next = 0x100;
        let mut other = || {
            next += 1;
            char::from_u32(next - 1).unwrap()
        };
        (0..=255).map(|b: u8| if plain(b) { char::from(b) } else { other() }.to_string()).collect()
    }

    fn byte_fallback(tokens: &[&str]) -> Vec<String> {
        let bytes = (0..=255).map(|b: u8| format!("<0x{b:02X}>"));
        ["<unk>"].iter().chain(tokens).map(|token| token.to_string()).chain(bytes).collect()
    }

    fn strs(texts: &[String]) -> Vec<&str> {
        texts.iter().map(String::as_str).collect()
    }

    /// What gets lost of `text`: left out, dropped, unknown.
    #[track_caller]
    fn lost(tokenizer: &tokenizers::Tokenizer, text: &str, expected: [&[&str]; 3]) {
        let (found, lost) = encode(tokenizer, text, true).unwrap();
        let Lost { left_out, dropped, unknown, unknown_token } = &lost;
        assert_eq!([strs(left_out), strs(dropped), strs(unknown)], expected.map(<[&str]>::to_vec), "{text:?}");
        assert_eq!(unknown_token.is_some(), !unknown.is_empty());
        match tokenizer.encode(text, true) {
            Ok(theirs) => assert_eq!(found.get_ids(), theirs.get_ids(), "{text:?}"),
            Err(e) => assert!(!dropped.is_empty(), "{text:?}: {e}"),
        }
    }

    const NOTHING: [&[&str]; 3] = [&[], &[], &[]];

    pub(crate) fn bpe_without_an_unknown_token_drops() {
        let tokenizer = tokenizer(digits(json!({})), json!({}));
        lost(&tokenizer, "12+2", NOTHING);
        lost(&tokenizer, "", NOTHING);
        lost(&tokenizer, "héé", [&[], &["h", "é"], &[]]);
        // Behind dropped characters the offsets of tokens are wrong.
        lost(&tokenizer, "h1é2\u{200b}e", [&[], &["h", "é", "\u{200b}"], &[]]);
        // It even joins what stood on both sides of them: this is 12 to the model.
        assert_eq!(encode(&tokenizer, "h1é2", true).unwrap().0.get_ids(), [4]);
    }

    pub(crate) fn bpe_with_an_unknown_token_reads_it() {
        for fuse in [false, true] {
            let tokenizer = tokenizer(digits(json!({"unk_token": "<unk>", "fuse_unk": fuse})), json!({}));
            lost(&tokenizer, "12+2", NOTHING);
            lost(&tokenizer, "1hé2éh", [&[], &[], &["h", "é"]]);
        }
        let absent = tokenizer(digits(json!({"unk_token": "<none>"})), json!({}));
        lost(&absent, "12+2", NOTHING);
        lost(&absent, "1é2", [&[], &["é"], &[]]);
    }

    pub(crate) fn prefixes_and_suffixes_belong_to_symbols() {
        let model = bpe(
            &["1", "2", "##2", "2</w>", "##2</w>", "1</w>", "ab"],
            &[],
            json!({
                "continuing_subword_prefix": "##", "end_of_word_suffix": "</w>", "ignore_merges": true,
            }),
        );
        let tokenizer = tokenizer(model, json!({"pre_tokenizer": {"type": "WhitespaceSplit"}}));
        lost(&tokenizer, "122 1 2 ab", NOTHING);
        // 1 has no token but at the beginning, a and b none but together.
        lost(&tokenizer, "12 21", [&[], &["1"], &[]]);
        lost(&tokenizer, "ab1b", [&[], &["a", "b", "1"], &[]]);
    }

    pub(crate) fn bytes_lose_nothing() {
        let odd = "héé \u{0}\t\n\u{301}🦀한 e\u{301}";
        let all = byte_level();
        let all: Vec<&str> = strs(&all);
        for prefix in [false, true] {
            let splitter =
                json!({"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": true, "use_regex": true});
            let level = tokenizer(bpe(&all, &[], json!({})), json!({"pre_tokenizer": splitter}));
            lost(&level, odd, NOTHING);
            // Without the byte 0xA9 there is no é.
            let some: Vec<&str> = all.iter().copied().filter(|&token| token != "\u{a9}" && token != "h").collect();
            let some = tokenizer(bpe(&some, &[], json!({})), json!({"pre_tokenizer": splitter}));
            lost(&some, "1héé2", [&[], &["h", "é"], &[]]);
            // Without the byte of a space, one that the tokenizer adds is not the text's.
            let dense: Vec<&str> = all.iter().copied().filter(|&token| token != "Ġ").collect();
            let dense = tokenizer(bpe(&dense, &[], json!({})), json!({"pre_tokenizer": splitter}));
            lost(&dense, "12", NOTHING);
            lost(&dense, "1 2", [&[], &[" "], &[]]);
        }
        let all = byte_fallback(&["1", "2", "\u{2581}"]);
        let all = strs(&all);
        let fallback = json!({"unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true});
        // As Llama 2 does it.
        let normalizer = json!({"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "\u{2581}"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"},
        ]});
        let llama = tokenizer(bpe(&all, &[], fallback.clone()), json!({"normalizer": normalizer}));
        lost(&llama, odd, NOTHING);
        lost(&llama, " 1 2", NOTHING);
        let some: Vec<&str> = all.iter().copied().filter(|&token| token != "<0xA9>").collect();
        lost(&tokenizer(bpe(&some, &[], fallback), json!({"normalizer": normalizer})), "1é2", [&[], &[], &["é"]]);
    }

    pub(crate) fn unigram() {
        let model = |unknown: Value, bytes: bool| {
            let mut vocab: Vec<Value> =
                ["<unk>", "\u{2581}", "1", "2", "\u{2581}12", "ab"].iter().map(|t| json!([t, -1.0])).collect();
            if bytes {
                vocab.extend((0..=255).map(|b: u8| json!([format!("<0x{b:02X}>"), -9.0])));
            }
            json!({"type": "Unigram", "unk_id": unknown, "vocab": vocab, "byte_fallback": bytes})
        };
        let splitter =
            json!({"pre_tokenizer": {"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always"}});
        let with = tokenizer(model(json!(0), false), splitter.clone());
        lost(&with, "12 1 ab", NOTHING);
        lost(&with, "12 hé1é", [&[], &[], &["h", "é"]]);
        lost(&tokenizer(model(json!(0), true), splitter.clone()), "12 hé1é🦀", NOTHING);
        // The model's own error has no character in it.
        lost(&tokenizer(model(Value::Null, false), splitter), "12 hé1é", [&[], &["h", "é"], &[]]);
    }

    pub(crate) fn words() {
        let splitter = json!({"pre_tokenizer": {"type": "Whitespace"}});
        let model = |unknown: &str| json!({"type": "WordLevel", "vocab": vocab(["<unk>", "one", "two", "+"]), "unk_token": unknown});
        let with = tokenizer(model("<unk>"), splitter.clone());
        lost(&with, "one + two\n", NOTHING);
        lost(&with, "one + héé \u{2028} three", [&[], &[], &["héé", "three"]]);
        lost(&tokenizer(model("none"), splitter.clone()), "one + héé", [&[], &["héé"], &[]]);
        let spelled = tokenizer(model("<unk>"), json!({"pre_tokenizer": {"type": "WhitespaceSplit"}}));
        lost(&spelled, "one <unk> two", NOTHING);
        let pieces = json!({
            "type": "WordPiece", "vocab": vocab(["[UNK]", "on", "##e", "two", "##s"]), "unk_token": "[UNK]",
            "continuing_subword_prefix": "##", "max_input_chars_per_word": 10,
        });
        let pieces = tokenizer(pieces, splitter);
        lost(&pieces, "one twos", NOTHING);
        lost(&pieces, "one twoé ononononone", [&[], &[], &["twoé", "ononononone"]]);
    }

    pub(crate) fn what_normalizers_change_is_no_loss() {
        let of = |normalizer: Value| tokenizer(digits(json!({})), json!({"normalizer": normalizer}));
        let sequence = |kinds: &[&str]| {
            let kinds: Vec<Value> = kinds.iter().map(|kind| json!({"type": kind})).collect();
            json!({"type": "Sequence", "normalizers": kinds})
        };
        lost(&of(sequence(&["NFD", "StripAccents", "Lowercase"])), "1É2é", NOTHING);
        lost(&of(sequence(&["NFKC"])), "\u{ff11}\u{2461}\u{a0}2", NOTHING);
        lost(&of(json!({"type": "Strip", "strip_left": true, "strip_right": true})), "\t12\n", NOTHING);
        lost(&of(json!({"type": "Replace", "pattern": {"String": "é"}, "content": "e"})), "1é2", NOTHING);
        let bert = json!({"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null, "lowercase": true});
        lost(&of(bert), "1\u{0}\u{200b}É2", NOTHING);
        // What is lost behind a normalizer is named as the text has it.
        lost(&of(json!({"type": "Lowercase"})), "1É2", [&[], &["É"], &[]]);
        lost(&of(json!({"type": "NFD"})), "1É2é", [&[], &["É", "é"], &[]]);
        let nfc = of(json!({"type": "NFC"}));
        let (_, found) = encode(&nfc, "1e\u{301}2", true).unwrap();
        assert!(found.dropped[0].starts_with('e'), "{found:?}");
        let composed = bpe(&["1", "é", "한"], &[], json!({}));
        lost(
            &tokenizer(composed, json!({"normalizer": {"type": "NFC"}})),
            "1e\u{301}1\u{1112}\u{1161}\u{11ab}1",
            NOTHING,
        );
    }

    pub(crate) fn a_space_before_the_text_is_the_tokenizers_own() {
        for scheme in ["always", "first", "never"] {
            for split in [true, false] {
                let splitter =
                    json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": scheme, "split": split});
                let of = |unknown: Value| tokenizer(digits(unknown), json!({"pre_tokenizer": splitter}));
                lost(&of(json!({})), "12", NOTHING);
                lost(&of(json!({})), "12 1", [&[], &[" "], &[]]);
                lost(&of(json!({})), "1\u{2581}2", [&[], &["\u{2581}"], &[]]);
                lost(&of(json!({"unk_token": "<unk>"})), "12", NOTHING);
                lost(&of(json!({"unk_token": "<unk>"})), "é1", [&[], &[], &["é"]]);
            }
        }
    }

    pub(crate) fn added_tokens_are_tokens() {
        let added = |id: u32, content: &str, special: bool, normalized: bool| {
            json!({
                "id": id, "content": content, "single_word": false, "lstrip": true, "rstrip": true, "normalized": normalized,
                "special": special,
            })
        };
        let tokenizer = tokenizer(
            digits(json!({})),
            json!({
                "added_tokens": [added(8, "<|é|>", true, false), added(9, "straße", false, true)],
                "normalizer": {"type": "Lowercase"},
                "post_processor": {
                    "type": "TemplateProcessing",
                    "single": [{"SpecialToken": {"id": "<|é|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                    "special_tokens": {"<|é|>": {"id": "<|é|>", "ids": [8], "tokens": ["<|é|>"]}},
                },
            }),
        );
        lost(&tokenizer, "1 <|é|> Straße 2", NOTHING);
        lost(&tokenizer, "1 <|é|> Straß 2", [&[], &["S", "t", "r", "a", "ß"], &[]]);
        assert_eq!(encode(&tokenizer, "1 <|é|>2", true).unwrap().0.get_ids(), [8, 2, 8, 3]);
    }

    pub(crate) fn what_a_pre_tokenizer_leaves_out_is_seen() {
        let of = |splitter: Value| tokenizer(digits(json!({})), json!({"pre_tokenizer": splitter}));
        lost(&of(json!({"type": "Whitespace"})), " 12\t+ 2\u{3000}", NOTHING);
        lost(&of(json!({"type": "CharDelimiterSplit", "delimiter": "+"})), "12+2", [&["+"], &[], &[]]);
        let only = json!({"type": "Split", "pattern": {"Regex": "[0-9]"}, "behavior": "Removed", "invert": true});
        lost(&of(only), "1 héé2", [&["h", "é"], &[], &[]]);
    }

    pub(crate) fn names_can_be_read() {
        let texts = |texts: &[&str]| listed(&texts.iter().map(|text| text.to_string()).collect::<Vec<_>>());
        assert_eq!(texts(&["h", "é"]), "'h' (U+0068), 'é' (U+00E9)");
        assert_eq!(
            texts(&["\n", "\u{200b}", "\u{202e}"]),
            "'\\n' (U+000A), '\\u{200b}' (U+200B), '\\u{202e}' (U+202E)"
        );
        assert_eq!(texts(&["three", "héé"]), "\"three\", \"héé\" (U+00E9 U+00E9)");
        let many: Vec<String> = ('a'..='z').map(String::from).collect();
        assert!(listed(&many).ends_with("'j' (U+006A), and 16 more"), "{}", listed(&many));
    }
}
