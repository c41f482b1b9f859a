//! `hashes/<op>.toml`: goldens of which only hashes are kept, a line a case. Written by
//! [`Store::bless_hashes`](crate::Store::bless_hashes) and never by hand.
//!
//! A line has for every output its name, dtype, extents, SHA-256, and short hashes of its rows (see [`rows`]), so that a
//! row that differs can be named without its data.

use crate::manifest::{Entry, Output, RESTORE, is_sha256, line_of, seal, unseal};
use samebits_contract::tensor::{DType, Tensor};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use toml::Spanned;

/// An output has at most so many short hashes; in a longer one several rows share one.
const MOST: usize = 64;

/// Hex digits of a short hash.
const DIGITS: usize = 4;

/// How the rows of a tensor are hashed: a row is all of the last axis, or one element of a tensor with one axis.
pub struct Rows {
    /// How many rows the tensor has.
    pub count: usize,
    /// How many rows share a short hash; the last ones may be fewer.
    pub together: usize,
}

impl Rows {
    /// Those of a tensor of `shape`.
    pub fn of(shape: &[usize]) -> Rows {
        let leading = &shape[..shape.len().saturating_sub(usize::from(shape.len() > 1))];
        let count: usize = leading.iter().product();
        Rows { count, together: count.div_ceil(MOST).max(1) }
    }

    /// How many short hashes there are: none where one would stand for the whole tensor.
    pub fn hashes(&self) -> usize {
        match self.count.div_ceil(self.together) {
            1 => 0,
            n => n,
        }
    }
}

/// The short hashes of the rows of `tensor`, one behind the other: each the first two bytes of the SHA-256 of the
/// little-endian elements, in hex.
pub fn rows(tensor: &Tensor) -> String {
    let rows = Rows::of(tensor.shape());
    if rows.hashes() == 0 {
        return String::new();
    }
    let bytes = tensor.to_bytes();
    let piece = bytes.len() / rows.count * rows.together;
    let short = |piece: &[u8]| crate::hex(&Sha256::digest(piece)[..DIGITS / 2]);
    if piece == 0 { short(&[]).repeat(rows.hashes()) } else { bytes.chunks(piece).map(short).collect() }
}

/// The rows of a tensor of `shape` whose short hashes differ, in order, as ranges.
pub fn differing(shape: &[usize], blessed: &str, found: &str) -> Vec<std::ops::Range<usize>> {
    let rows = Rows::of(shape);
    let pairs = blessed.as_bytes().chunks(DIGITS).zip(found.as_bytes().chunks(DIGITS)).enumerate();
    let range = |i: usize| i * rows.together..((i + 1) * rows.together).min(rows.count);
    pairs.filter(|(_, (a, b))| a != b).map(|(i, _)| range(i)).collect()
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    blessing: Vec<Blessing>,
}

/// Cases that were blessed together.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Blessing {
    contract: Spanned<String>,
    toolchain: Spanned<String>,
    reason: Spanned<String>,
    date: Spanned<String>,
    cases: BTreeMap<String, Spanned<String>>,
}

/// The op of a case whose name begins with it: what its file is called. `None` for other names.
pub fn op_of(case: &str) -> Option<&str> {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    case.split_once('/').map(|(op, _)| op).filter(|op| !op.is_empty() && op.chars().all(plain))
}

/// The bytes of the file of one op.
pub fn encode<'a>(entries: impl Iterator<Item = &'a Entry>) -> String {
    let mut blessings: BTreeMap<[&str; 4], BTreeMap<String, Spanned<String>>> = BTreeMap::new();
    for entry in entries {
        let key = [&*entry.date, &*entry.reason, &*entry.contract, &*entry.toolchain];
        let text = |(name, output): (&String, &Output)| {
            let Output { dtype, shape, sha256, rows } = output;
            let shape = shape.iter().map(usize::to_string).collect::<Vec<_>>().join("x");
            format!("{name} {dtype} {shape} {sha256} {rows}").trim_end().to_string()
        };
        let outputs = entry.outputs.iter().map(text).collect::<Vec<_>>().join("; ");
        blessings.entry(key).or_default().insert(entry.case.clone(), Spanned::new(0..0, outputs));
    }
    let spanned = |text: &str| Spanned::new(0..0, text.to_string());
    let blessing = blessings
        .into_iter()
        .map(|([date, reason, contract, toolchain], cases)| Blessing {
            contract: spanned(contract),
            toolchain: spanned(toolchain),
            reason: spanned(reason),
            date: spanned(date),
            cases,
        })
        .collect();
    seal(&toml::to_string(&Written { blessing }).expect("strings are TOML"))
}

/// Reads the file of `op`; an error comes with its line.
pub fn parse(bytes: &[u8], op: &str) -> Result<Vec<Entry>, (usize, String)> {
    let text = unseal(bytes)?;
    let written: Written = toml::from_str(text).map_err(|e| {
        let message = e.message().split('\n').collect::<Vec<_>>().join(", ");
        (line_of(bytes, e.span().map_or(0, |span| span.start)), format!("{message}; {RESTORE}"))
    })?;
    let mut entries = Vec::new();
    for Blessing { contract, toolchain, reason, date, cases } in written.blessing {
        let fields = [("contract", &contract), ("toolchain", &toolchain), ("reason", &reason), ("date", &date)];
        for (field, text) in fields {
            if text.as_ref().trim().is_empty() {
                return Err((line_of(bytes, text.span().start), format!("`{field}` is empty; {RESTORE}")));
            }
        }
        is_sha256(contract.as_ref())
            .map_err(|why| (line_of(bytes, contract.span().start), format!("`contract` {why}")))?;
        for (case, outputs) in cases {
            // Only errors count lines: each time it is the whole text.
            let line = || line_of(bytes, outputs.span().start);
            if op_of(&case) != Some(op) {
                return Err((line(), format!("`{case}` is no case of {op}; {RESTORE}")));
            }
            entries.push(Entry {
                outputs: outputs.as_ref().split("; ").map(output).collect::<Option<_>>().ok_or_else(|| {
                    (line(), format!("`{case}`: not `<output> <dtype> <shape> <sha256> <rows>`; {RESTORE}"))
                })?,
                case,
                file: None,
                sha256: None,
                rows: None,
                contract: contract.as_ref().clone(),
                toolchain: toolchain.as_ref().clone(),
                command: None,
                reason: reason.as_ref().clone(),
                date: date.as_ref().clone(),
            });
        }
    }
    Ok(entries)
}

fn output(text: &str) -> Option<(String, Output)> {
    let mut words = text.split(' ');
    let (name, dtype, shape, sha256) = (words.next()?, words.next()?, words.next()?, words.next()?);
    let rows = words.next().unwrap_or_default();
    let shape = shape.split('x').map(|extent| extent.parse().ok()).collect::<Option<Vec<usize>>>()?;
    let dtype = DType::parse(dtype).ok()?;
    is_sha256(sha256).ok()?;
    let whole = !name.is_empty() && words.next().is_none() && rows.len() == DIGITS * Rows::of(&shape).hashes();
    whole.then(|| (name.into(), Output { dtype, shape, sha256: sha256.into(), rows: rows.into() }))
}
