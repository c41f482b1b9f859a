//! The only writer of a store.

use crate::manifest::{self, Entry, Output};
use crate::{GoldenError, HASHES, KEPT, MANIFEST, Outputs, Store, hashes, sha256};
use samebits_contract::atomic_write;
use samebits_contract::wire;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::Path;

/// What is written beside blessed outputs.
#[derive(Clone, Debug)]
pub struct Provenance {
    /// SHA-256 of the contract's files, in hex.
    pub contract: String,
    /// The toolchain that built what is blessed.
    pub toolchain: String,
    /// The day, `YYYY-MM-DD`.
    pub date: String,
    /// Why these outputs are now the right ones; must say something.
    pub reason: String,
}

/// What a blessing changed, all sorted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Writes {
    /// Cases whose entry is new or changed.
    pub blessed: Vec<String>,
    /// Cases whose entry was dropped.
    pub dropped: Vec<String>,
    /// Data files written, relative to the store.
    pub written: Vec<String>,
    /// Data files removed because no entry names them any more, relative to the store.
    pub removed: Vec<String>,
}

impl Store {
    /// Blesses `answers` and drops the entries of the cases in `dropped`; all other entries stay.
    ///
    /// An entry whose outputs, contract and toolchain are the ones it already has keeps its date and reason. Data files
    /// come first, then the manifest replaces the old one, then files that no entry names are removed: an interruption
    /// at any point leaves the old state or the new one readable. Refused, with nothing written: an empty reason, date
    /// or case name, an answer without outputs, a contract digest that is not a SHA-256, a dropped case that is not
    /// there or is also blessed.
    pub fn bless(
        &mut self,
        answers: &BTreeMap<String, Outputs>,
        dropped: &BTreeSet<String>,
        provenance: &Provenance,
    ) -> Result<Writes, GoldenError> {
        self.bless_as(answers, dropped, provenance, false)
    }

    /// The same for cases of which hashes are enough: a line in `hashes/<op>.toml` each, and no data. The name of such a
    /// case begins with its op, `<op>/..`.
    pub fn bless_hashes(
        &mut self,
        answers: &BTreeMap<String, Outputs>,
        dropped: &BTreeSet<String>,
        provenance: &Provenance,
    ) -> Result<Writes, GoldenError> {
        self.bless_as(answers, dropped, provenance, true)
    }

    fn bless_as(
        &mut self,
        answers: &BTreeMap<String, Outputs>,
        dropped: &BTreeSet<String>,
        provenance: &Provenance,
        hashes_alone: bool,
    ) -> Result<Writes, GoldenError> {
        let refused = |why: String| Err(GoldenError::Refused(why));
        let Provenance { contract, toolchain, date, reason } = provenance;
        if reason.trim().is_empty() {
            return refused("the reason is empty; say why these outputs are the right ones".into());
        }
        if date.trim().is_empty() {
            return refused("the date is empty; write YYYY-MM-DD".into());
        }
        if let Err(why) = manifest::is_sha256(contract) {
            return refused(format!("the contract's digest {why}"));
        }
        if let Some(case) = dropped.iter().find(|case| answers.contains_key(*case) || !self.entries.contains_key(*case))
        {
            return refused(format!("`{case}` is to be dropped, and is not in the store or is to be blessed too"));
        }

        let mut next = self.entries.clone();
        next.retain(|case, _| !dropped.contains(case));
        let mut files = BTreeMap::new();
        let mut blessed = Vec::new();
        for (case, outputs) in answers {
            if case.trim().is_empty() || outputs.is_empty() {
                return refused(format!("case `{case}` has no name or no outputs"));
            }
            let word = |name: &String| !name.is_empty() && !name.contains([' ', ';']);
            if hashes_alone && (hashes::op_of(case).is_none() || !outputs.keys().all(word)) {
                return refused(format!("case `{case}` is not called `<op>/..`, or an output's name is not a word"));
            }
            let (file, sha256) = if hashes_alone {
                (None, None)
            } else {
                let metadata = BTreeMap::from([("case".to_string(), case.clone())]);
                let bytes = wire::File { tensors: outputs.clone(), metadata }.encode();
                let sha256 = sha256(&bytes);
                let file = (bytes.len() <= KEPT).then(|| file_name(case, &sha256));
                // Also for an entry that stays: blessing again repairs a damaged file.
                files.extend(file.clone().map(|file| (file, bytes)));
                (file, Some(sha256))
            };
            let of = |tensor| match hashes_alone {
                true => Output { rows: hashes::rows(tensor), ..manifest::output(tensor) },
                false => manifest::output(tensor),
            };
            let entry = Entry {
                case: case.clone(),
                file,
                sha256,
                rows: None,
                contract: contract.clone(),
                toolchain: toolchain.clone(),
                command: None,
                reason: reason.clone(),
                date: date.clone(),
                outputs: outputs.iter().map(|(name, tensor)| (name.clone(), of(tensor))).collect(),
            };
            let same = |old: &Entry| {
                (&old.file, &old.sha256, &old.contract, &old.toolchain, &old.outputs)
                    == (&entry.file, &entry.sha256, &entry.contract, &entry.toolchain, &entry.outputs)
            };
            if !next.get(case).is_some_and(same) {
                blessed.push(case.clone());
                next.insert(case.clone(), entry);
            }
        }

        let written = self.write_data(&files)?;
        let removed = self.replace(next)?;
        Ok(Writes { blessed, dropped: dropped.iter().cloned().collect(), written, removed })
    }

    /// Makes `next` the entries, whose data files are there, and removes files that none of them names.
    pub(crate) fn replace(&mut self, next: BTreeMap<String, Entry>) -> Result<Vec<String>, GoldenError> {
        // No case may stand in the manifest and among the hashes: one that moves there leaves the manifest first.
        let in_manifest = |case: &String| self.entries.get(case).is_some_and(|entry| entry.sha256.is_some());
        self.write_hashes(next.values().filter(|entry| !in_manifest(&entry.case)))?;
        write(&self.dir, MANIFEST, manifest::encode(&next).as_bytes())?;
        self.write_hashes(next.values())?;
        self.entries = next;
        self.remove_unnamed()
    }

    /// Makes the files of `hashes/` those of `entries`.
    fn write_hashes<'a>(&self, entries: impl Iterator<Item = &'a Entry>) -> Result<(), GoldenError> {
        let mut ops: BTreeMap<&str, Vec<&Entry>> = BTreeMap::new();
        for entry in entries.filter(|entry| entry.sha256.is_none()) {
            ops.entry(hashes::op_of(&entry.case).expect("checked when it was blessed")).or_default().push(entry);
        }
        let folder = self.dir.join(HASHES);
        let failed = |path: &Path| {
            let path = path.to_path_buf();
            move |cause: io::Error| GoldenError::Io { path, cause }
        };
        if !ops.is_empty() {
            atomic_write::create_folder(&folder).map_err(failed(&folder))?;
        }
        for (op, entries) in &ops {
            let (file, bytes) = (format!("{HASHES}/{op}.toml"), hashes::encode(entries.iter().copied()));
            if fs::read(self.dir.join(&file)).ok().as_deref() != Some(bytes.as_bytes()) {
                write(&self.dir, &file, bytes.as_bytes())?;
            }
        }
        for op in self.ops_of_hashes()?.iter().filter(|op| !ops.contains_key(op.as_str())) {
            let path = folder.join(format!("{op}.toml"));
            atomic_write::remove(&path).map_err(failed(&path))?;
        }
        Ok(())
    }

    /// Writes those of `files` that are not there yet as they should be.
    pub(crate) fn write_data(&self, files: &BTreeMap<String, Vec<u8>>) -> Result<Vec<String>, GoldenError> {
        let data = self.dir.join("data");
        let folders = [&self.dir, &data];
        folders.into_iter().try_for_each(|folder| {
            atomic_write::create_folder(folder).map_err(|cause| GoldenError::Io { path: folder.clone(), cause })
        })?;
        let mut written = Vec::new();
        for (file, bytes) in files {
            if fs::read(self.dir.join(file)).is_ok_and(|there| there == *bytes) {
                continue;
            }
            write(&self.dir, file, bytes)?;
            written.push(file.clone());
        }
        Ok(written)
    }

    fn remove_unnamed(&self) -> Result<Vec<String>, GoldenError> {
        let data = self.dir.join("data");
        let failed = |path: &Path| {
            let path = path.to_path_buf();
            move |cause: io::Error| GoldenError::Io { path, cause }
        };
        let named: BTreeSet<&String> = self.entries.values().filter_map(|entry| entry.file.as_ref()).collect();
        let mut removed = Vec::new();
        for found in fs::read_dir(&data).map_err(failed(&data))? {
            let found = found.map_err(failed(&data))?;
            let name = found.file_name().to_string_lossy().into_owned();
            let file = format!("data/{name}");
            // Nothing but what a blessing wrote is touched.
            let ours = found.file_type().is_ok_and(|kind| kind.is_file());
            if ours && !named.contains(&file) && (name.ends_with(".safetensors") || name.ends_with(".tmp")) {
                fs::remove_file(data.join(&name)).map_err(failed(&data.join(&name)))?;
                removed.push(file);
            }
        }
        let hashes = self.dir.join(HASHES);
        for found in fs::read_dir(&hashes).into_iter().flatten() {
            let name = found.map_err(failed(&hashes))?.file_name().to_string_lossy().into_owned();
            if name.ends_with(".tmp") {
                fs::remove_file(hashes.join(&name)).map_err(failed(&hashes.join(&name)))?;
                removed.push(format!("{HASHES}/{name}"));
            }
        }
        removed.sort();
        Ok(removed)
    }
}

/// `data/<case>-<hash>.safetensors`, with every character that is not a letter, digit, `.`, `_` or `-` replaced.
pub(crate) fn file_name(case: &str, sha256: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-') { c } else { '-' };
    // File systems end names at 255 bytes; the hash keeps cut names apart.
    let name: String = case.trim_start_matches('.').chars().map(plain).take(160).collect();
    format!("data/{name}-{}.safetensors", &sha256[..16])
}

/// Writes `dir/file` so that it is there whole or not at all, also after a power cut.
fn write(dir: &Path, file: &str, bytes: &[u8]) -> Result<(), GoldenError> {
    let path = dir.join(file);
    // Data and manifest are read again.
    atomic_write::regular(&path)
        .and_then(|_| atomic_write::write(&path, bytes))
        .map_err(|cause| GoldenError::Io { path, cause })
}
