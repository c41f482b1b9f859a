//! Blessed outputs: find, verify, bless.
//!
//! A store is a folder with `MANIFEST.toml`, which names blessed cases with the SHA-256 of their outputs, `data/`, which
//! holds small ones of these outputs whole, and `hashes/`, a file for every op with one line for every case of which
//! hashes are enough. Reading never writes; only [`Store::bless`], [`Store::bless_hashes`] and [`Store::import`] do.
#![forbid(unsafe_code)]

mod bless;
mod hashes;
mod import;
mod manifest;

pub use bless::{Provenance, Writes};
pub use import::{Holds, Source, sources};
pub use manifest::{Entry, Output};

use samebits_contract::compare;
use samebits_contract::tensor::Tensor;
use samebits_contract::verdict::Evidence;
use samebits_contract::wire;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{fs, io};

/// Outputs of one case by their names in the specification.
pub type Outputs = BTreeMap<String, Tensor>;

/// Outputs whose file would be larger than this many bytes are kept as hashes only.
pub const KEPT: usize = 64 << 10;

/// The manifest's file name.
const MANIFEST: &str = "MANIFEST.toml";

/// The folder of the files of hashes.
const HASHES: &str = "hashes";

/// Why a store cannot be opened or written. Each is one line that names the file.
#[derive(Debug, thiserror::Error)]
pub enum GoldenError {
    /// A file cannot be opened, read or written.
    #[error("{}: {cause}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        cause: io::Error,
    },
    /// The manifest does not hold what it should.
    #[error("{}:{line}: {why}", path.display())]
    Manifest {
        /// The manifest.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
        /// What is wrong and what to do.
        why: String,
    },
    /// A blessing was refused; nothing was written.
    #[error("not blessed: {0}")]
    Refused(String),
}

/// A data file that does not hold what the manifest says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// The file.
    pub path: PathBuf,
    /// What is wrong with it and what to do.
    pub why: String,
}

impl std::fmt::Display for Damage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.path.display(), self.why)
    }
}

/// How an answer compares with what was blessed.
#[derive(Clone, Debug, PartialEq)]
pub enum Verified {
    /// The same outputs, bit for bit.
    Match,
    /// Other outputs; with the first differing element where the data is kept.
    Mismatch(Box<Evidence>),
    /// The store's own file is damaged, so nothing was compared.
    Damaged(Damage),
    /// The case was never blessed.
    Absent,
}

/// An open store.
#[derive(Debug)]
pub struct Store {
    dir: PathBuf,
    entries: BTreeMap<String, Entry>,
}

impl Store {
    /// Opens the store in `dir`, which must have a manifest.
    ///
    /// The manifest is refused, with its line, when it has an unknown field, a case twice, a malformed hash, a path
    /// that leaves `data/`, a file that is not there, or bytes that do not match its own digest; so is a file of hashes.
    /// Data files are looked into by [`verify`](Store::verify) and [`verify_files`](Store::verify_files).
    pub fn open(dir: &Path) -> Result<Store, GoldenError> {
        let path = dir.join(MANIFEST);
        let bytes = read(&path)?;
        let entries = manifest::parse(&bytes, dir).map_err(|(line, why)| GoldenError::Manifest { path, line, why })?;
        let mut store = Store { dir: dir.into(), entries };
        for op in store.ops_of_hashes()? {
            let path = dir.join(HASHES).join(format!("{op}.toml"));
            let bytes = read(&path)?;
            let wrong = |(line, why)| GoldenError::Manifest { path: path.clone(), line, why };
            for entry in hashes::parse(&bytes, &op).map_err(wrong)? {
                let case = entry.case.clone();
                if store.entries.insert(case.clone(), entry).is_some() {
                    let why = format!("`{case}` stands twice, here and in {MANIFEST} or above; {}", manifest::RESTORE);
                    return Err(wrong((1, why)));
                }
            }
        }
        Ok(store)
    }

    /// The ops that have a file of hashes, in order.
    fn ops_of_hashes(&self) -> Result<Vec<String>, GoldenError> {
        let folder = self.dir.join(HASHES);
        let failed = |cause| GoldenError::Io { path: folder.clone(), cause };
        let listing = match fs::read_dir(&folder) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            listing => listing.map_err(failed)?,
        };
        let mut ops = Vec::new();
        for found in listing {
            let name = found.map_err(failed)?.file_name().to_string_lossy().into_owned();
            // What an interrupted blessing left is cleared by the next one.
            if let Some(op) = name.strip_suffix(".toml") {
                ops.push(op.to_string());
            } else if !name.ends_with(".tmp") {
                let why = format!("`{name}` is no file of hashes, `<op>.toml`; remove it");
                return Err(GoldenError::Manifest { path: folder, line: 1, why });
            }
        }
        ops.sort();
        Ok(ops)
    }

    /// A store without entries in the folder `dir`, for the first blessing. Writes nothing; refuses a folder that has a
    /// manifest already.
    pub fn create(dir: &Path) -> Result<Store, GoldenError> {
        let path = dir.join(MANIFEST);
        match path.metadata() {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Store { dir: dir.into(), entries: BTreeMap::new() }),
            Err(cause) => Err(GoldenError::Io { path, cause }),
            Ok(_) => Err(GoldenError::Refused(format!("{} is there already; open it instead", path.display()))),
        }
    }

    /// All entries, by case name.
    pub fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.entries.values()
    }

    /// The entry of a case.
    pub fn find(&self, case: &str) -> Option<&Entry> {
        self.entries.get(case)
    }

    /// Compares `outputs` with what was blessed for `case`: names, dtypes, shapes and bits; -0 is not +0.
    pub fn verify(&self, case: &str, outputs: &Outputs) -> Verified {
        let Some(entry) = self.find(case) else { return Verified::Absent };
        let kept = match self.kept(entry) {
            Ok(kept) => kept,
            Err(damage) => return Verified::Damaged(damage),
        };
        let mismatch = |output: &str, message: String| {
            let output = output.to_string();
            Verified::Mismatch(Box::new(Evidence { message, output, count: 1, total: 1, ..Evidence::default() }))
        };
        for (name, blessed) in &entry.outputs {
            let Some(found) = outputs.get(name) else {
                return mismatch(name, format!("{name}: blessed for this case, and the answer does not have it"));
            };
            if blessed.sha256 == manifest::output(found).sha256 {
                continue;
            }
            let form = (blessed.dtype, &blessed.shape) == (found.dtype(), &found.shape().to_vec());
            let expected = kept.as_ref().map(|kept| &kept[name]);
            if let (Some(expected), Some(_), true) = (expected, entry.rows, form)
                && let Some(&rows) = expected.shape().first()
                && let Err(evidence) = compare::bits(name, 0, expected, &found.range(0, 0, rows), &[(0, 0)])
            {
                return Verified::Mismatch(evidence);
            }
            if let (Some(expected), None) = (expected, entry.rows) {
                return match compare::bits(name, 0, expected, found, &[(0, 0)]) {
                    Err(evidence) => Verified::Mismatch(evidence),
                    Ok(_) => mismatch(name, format!("{name}: the hash differs, and the elements do not")),
                };
            }
            let Output { dtype, shape, sha256, rows } = blessed;
            let (short, found) = (hashes::rows(found), manifest::output(found));
            return if (*dtype, shape) == (found.dtype, &found.shape) {
                let rows = match rows.is_empty() {
                    true => String::new(),
                    false => format!("{}; ", where_rows_differ(shape, rows, &short)),
                };
                let message = format!("{name}: {rows}SHA-256 {} where {sha256} was blessed", found.sha256);
                let mut evidence = mismatch(name, message);
                if let Verified::Mismatch(evidence) = &mut evidence {
                    (evidence.expected, evidence.found) = (sha256.clone(), found.sha256);
                }
                evidence
            } else {
                let have = format!("{} {:?}", found.dtype, found.shape);
                mismatch(name, format!("{name}: {have} where {dtype} {shape:?} was blessed"))
            };
        }
        match outputs.keys().find(|name| !entry.outputs.contains_key(*name)) {
            Some(name) => mismatch(name, format!("{name}: in the answer, and not blessed for this case")),
            None => Verified::Match,
        }
    }

    /// Reads every data file and returns those that do not hold what the manifest says, in the order of their cases.
    pub fn verify_files(&self) -> Vec<Damage> {
        self.entries().filter_map(|entry| self.kept(entry).err()).collect()
    }

    /// The outputs kept whole for `entry`, checked against its hashes; `None` where only hashes are kept.
    fn kept(&self, entry: &Entry) -> Result<Option<Outputs>, Damage> {
        let Some(file) = &entry.file else { return Ok(None) };
        let path = self.dir.join(file);
        let damaged = |why: String| Damage {
            path: path.clone(),
            why: format!("{why}; restore it from version control or bless `{}`", entry.case),
        };
        let bytes = fs::read(&path).map_err(|e| damaged(e.to_string()))?;
        let sha256 = sha256(&bytes);
        if Some(&sha256) != entry.sha256.as_ref() {
            let says = entry.sha256.as_deref().unwrap_or("none");
            return Err(damaged(format!("SHA-256 is {sha256}, and {MANIFEST} says {says}")));
        }
        let tensors = wire::File::decode(&bytes).map_err(|e| damaged(e.to_string()))?.tensors;
        let found: BTreeMap<String, Output> = tensors.iter().map(|(n, t)| (n.clone(), manifest::output(t))).collect();
        let listed = |(name, output): (&String, &Output)| {
            let kept = tensors.get(name).map(|tensor| (tensor.dtype(), tensor.shape().to_vec()));
            let mut shape = output.shape.clone();
            if let (Some(first), Some(rows)) = (shape.first_mut(), entry.rows) {
                *first = (*first).min(rows);
            }
            kept == Some((output.dtype, shape))
        };
        let whole = match entry.rows {
            None => found == entry.outputs,
            Some(_) => tensors.len() == entry.outputs.len() && entry.outputs.iter().all(listed),
        };
        if !whole {
            return Err(damaged(format!("its tensors are not those that {MANIFEST} lists")));
        }
        Ok(Some(tensors))
    }
}

/// Which rows of an output have other short hashes, in words.
fn where_rows_differ(shape: &[usize], blessed: &str, found: &str) -> String {
    let differing = hashes::differing(shape, blessed, found);
    let rows = hashes::Rows::of(shape);
    let Some(first) = differing.first() else {
        return "no row is told apart by its short hash".into();
    };
    let place = |row: usize| {
        let leading = &shape[..shape.len().saturating_sub(1).max(1)];
        let mut rest = row;
        let mut at: Vec<usize> = leading.iter().rev().map(|extent| (rest % extent, rest /= extent).0).collect();
        at.reverse();
        format!("{at:?}")
    };
    let of =
        |n: usize| if rows.together > 1 { format!("{n} runs of {} rows", rows.together) } else { format!("{n} rows") };
    let last = if first.len() > 1 { format!(" to {}", place(first.end - 1)) } else { String::new() };
    format!("{} of {} differ, first {}{last}", differing.len(), of(rows.hashes()), place(first.start))
}

/// The bytes of a regular file: a device may never come to its end.
fn read(path: &Path) -> Result<Vec<u8>, GoldenError> {
    let bytes = match path.metadata() {
        Ok(found) if !found.is_file() => Err(io::Error::other("is no file; it must be a regular file")),
        _ => fs::read(path),
    };
    bytes.map_err(|cause| GoldenError::Io { path: path.into(), cause })
}

/// SHA-256 in lower-case hex.
fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

fn hex(hash: &[u8]) -> String {
    hash.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests;
