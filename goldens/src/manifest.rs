//! `MANIFEST.toml`: what was blessed. Written by [`Store::bless`](crate::Store::bless) and never by hand.
//!
//! Its second line is the SHA-256 of everything below it, so that a change of any bit is noticed, also of one that no
//! data file answers for.

use crate::sha256;
use samebits_contract::tensor::{DType, Tensor};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;
use toml::Spanned;

const FIRST_LINE: &str = "# Written by `samebits bless`; any other change is refused.\n";
pub const RESTORE: &str = "restore it from version control and use `samebits bless`";

/// One blessed case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The case's name.
    pub case: String,
    /// The data file relative to the store, `data/<name>.safetensors`; `None` where only hashes are kept.
    pub file: Option<String>,
    /// SHA-256 of that file, whether it is kept or not, in hex; `None` for an entry of hashes alone.
    pub sha256: Option<String>,
    /// How many entries of the outputs' first axis the file has; `None`: all.
    pub rows: Option<usize>,
    /// SHA-256 of the contract's files when it was blessed, in hex.
    pub contract: String,
    /// The toolchain that built what was blessed, or the program that made it elsewhere, with its version.
    pub toolchain: String,
    /// The command that made it, where it was made elsewhere.
    pub command: Option<String>,
    /// Why it was blessed.
    pub reason: String,
    /// The day it was blessed, `YYYY-MM-DD`.
    pub date: String,
    /// The outputs by name.
    pub outputs: BTreeMap<String, Output>,
}

/// One output tensor of a blessed case.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Output {
    /// Element type.
    pub dtype: DType,
    /// Extent of every axis.
    pub shape: Vec<usize>,
    /// SHA-256 of `<dtype> <shape>\n`, for example `bf16 [3, 40]\n`, followed by the little-endian elements; in hex.
    pub sha256: String,
    /// In an entry of hashes alone, the short hashes of the rows; elsewhere empty.
    #[serde(skip)]
    pub rows: String,
}

/// The manifest's line on a tensor.
pub fn output(tensor: &Tensor) -> Output {
    let (dtype, shape) = (tensor.dtype(), tensor.shape().to_vec());
    let mut bytes = preamble(dtype, &shape);
    bytes.extend(tensor.to_bytes());
    Output { dtype, shape, sha256: sha256(&bytes), rows: String::new() }
}

/// What is hashed before the elements.
pub fn preamble(dtype: DType, shape: &[usize]) -> Vec<u8> {
    format!("{dtype} {shape:?}\n").into_bytes()
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    #[serde(default, rename = "golden")]
    goldens: Vec<WrittenEntry>,
}

/// An [`Entry`] as it stands in the file, with the places that messages point to.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenEntry {
    case: Spanned<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    file: Option<Spanned<String>>,
    sha256: Spanned<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rows: Option<usize>,
    contract: Spanned<String>,
    toolchain: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    command: Option<String>,
    reason: Spanned<String>,
    date: Spanned<String>,
    outputs: Spanned<BTreeMap<String, Output>>,
}

/// The manifest's bytes: of the entries that have more than hashes.
pub fn encode(entries: &BTreeMap<String, Entry>) -> String {
    let spanned = |text: &String| Spanned::new(0..0, text.clone());
    let goldens = entries
        .values()
        .filter_map(|e| e.sha256.as_ref().map(|sha256| (e, sha256)))
        .map(|(e, sha256)| WrittenEntry {
            case: spanned(&e.case),
            file: e.file.as_ref().map(spanned),
            sha256: spanned(sha256),
            rows: e.rows,
            contract: spanned(&e.contract),
            toolchain: e.toolchain.clone(),
            command: e.command.clone(),
            reason: spanned(&e.reason),
            date: spanned(&e.date),
            outputs: Spanned::new(0..0, e.outputs.clone()),
        })
        .collect();
    seal(&toml::to_string(&Written { goldens }).expect("strings and lists are TOML"))
}

/// `body` under the two lines that a blessing writes.
pub fn seal(body: &str) -> String {
    format!("{FIRST_LINE}{}{body}", digest_line(body))
}

/// The text of a sealed file, whole, its lines as in the file; an error comes with its line.
pub fn unseal(bytes: &[u8]) -> Result<&str, (usize, String)> {
    let text = std::str::from_utf8(bytes)
        .map_err(|e| (line_of(bytes, e.valid_up_to()), format!("a byte that is not UTF-8; {RESTORE}")))?;
    let Some(rest) = text.strip_prefix(FIRST_LINE) else {
        return Err((1, format!("the first line is not the one that `samebits bless` writes; {RESTORE}")));
    };
    let (digest, body) = rest.split_at(rest.find('\n').map_or(rest.len(), |end| end + 1));
    if digest != digest_line(body) {
        return Err((2, format!("the digest does not match the lines below it; {RESTORE}")));
    }
    Ok(text)
}

/// The line of byte `at`, from 1 on.
pub fn line_of(bytes: &[u8], at: usize) -> usize {
    bytes[..at.min(bytes.len())].iter().filter(|&&byte| byte == b'\n').count() + 1
}

fn digest_line(body: &str) -> String {
    format!("# sha256 {}\n", sha256(body.as_bytes()))
}

/// Reads the manifest of the store in `dir`; an error comes with its line.
pub fn parse(bytes: &[u8], dir: &Path) -> Result<BTreeMap<String, Entry>, (usize, String)> {
    let line = |at: usize| line_of(bytes, at);
    let text = std::str::from_utf8(bytes)
        .map_err(|e| (line(e.valid_up_to()), format!("a byte that is not UTF-8; {RESTORE}")))?;
    let written: Written = toml::from_str(text).map_err(|e| {
        let message = e.message().split('\n').collect::<Vec<_>>().join(", ");
        (line(e.span().map_or(0, |span| span.start)), format!("{message}; {RESTORE}"))
    })?;

    let mut entries: BTreeMap<String, Entry> = BTreeMap::new();
    for written in written.goldens {
        let WrittenEntry { case, file, sha256, rows, contract, toolchain, command, reason, date, outputs } = written;
        for (field, text) in [("case", &case), ("reason", &reason), ("date", &date)] {
            if text.as_ref().trim().is_empty() {
                return Err((line(text.span().start), format!("`{field}` is empty; {RESTORE}")));
            }
        }
        for (field, hash) in [("sha256", &sha256), ("contract", &contract)] {
            is_sha256(hash.as_ref()).map_err(|why| (line(hash.span().start), format!("`{field}` {why}")))?;
        }
        // Only errors count lines: each time it is the whole text.
        let at = outputs.span().start;
        let outputs = outputs.into_inner();
        if outputs.is_empty() {
            return Err((line(at), format!("`{}` has no outputs; {RESTORE}", case.as_ref())));
        }
        for (name, output) in &outputs {
            is_sha256(&output.sha256).map_err(|why| (line(at), format!("`outputs.{name}.sha256` {why}")))?;
        }
        if let Some(file) = &file {
            is_data_file(file.as_ref(), dir).map_err(|why| (line(file.span().start), why))?;
        }
        let at = case.span().start;
        let case = case.into_inner();
        let entry = Entry {
            case: case.clone(),
            file: file.map(Spanned::into_inner),
            sha256: Some(sha256.into_inner()),
            rows,
            contract: contract.into_inner(),
            toolchain,
            command,
            reason: reason.into_inner(),
            date: date.into_inner(),
            outputs,
        };
        if entries.insert(case.clone(), entry).is_some() {
            return Err((line(at), format!("`{case}` stands here twice; {RESTORE}")));
        }
    }

    unseal(bytes)?;
    Ok(entries)
}

pub fn is_sha256(text: &str) -> Result<(), String> {
    let hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    if text.len() == 64 && text.bytes().all(hex) {
        return Ok(());
    }
    Err(format!("is not a SHA-256 in 64 lower-case hex digits; {RESTORE}"))
}

/// A data file is a plain file directly in `data/`: no other folder, no link.
fn is_data_file(file: &str, dir: &Path) -> Result<(), String> {
    let name = file.strip_prefix("data/").unwrap_or_default();
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if name.is_empty() || name.starts_with('.') || !name.chars().all(plain) || !name.ends_with(".safetensors") {
        return Err(format!("`file` is {file:?}, which is not `data/<name>.safetensors`; {RESTORE}"));
    }
    match dir.join(file).symlink_metadata() {
        Ok(metadata) if metadata.is_file() => Ok(()),
        Ok(_) => Err(format!("`{file}` is not a plain file; restore it from version control")),
        Err(_) => Err(format!("`{file}` is missing; restore it from version control")),
    }
}
