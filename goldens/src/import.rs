//! Outputs that were made elsewhere, read piece by piece: a file may be larger than memory.

use crate::manifest::{self, Entry, Output};
use crate::{GoldenError, Store, Writes, sha256};
use samebits_contract::tensor::{DType, Tensor};
use samebits_contract::wire;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Bytes read at once.
const PIECE: usize = 64 << 10;

/// The header of the file that keeps a slice is within this many bytes.
const HEADER: usize = 4 << 10;

/// A file of outputs of one case, with where it comes from: metadata `case`, `maker`, `command` and `date`, and the outputs
/// as its tensors.
#[derive(Clone, Debug)]
pub struct Source {
    /// The file.
    pub path: PathBuf,
    /// SHA-256 of it as it was made, in hex.
    pub sha256: String,
}

/// What is wrong with a case and its outputs, if anything is.
pub type Holds<'a> = dyn Fn(&str, &BTreeMap<String, Output>) -> Result<(), String> + 'a;

impl Store {
    /// Takes over the outputs in `sources`. Of each file at most `keep` bytes stand in memory and are kept: a smaller one
    /// whole, of a larger one the first entries of the first axis of every output that fit, as many of each. All other
    /// elements are known by their hashes. `holds` says what is wrong with a case and its outputs, if anything is.
    ///
    /// # Errors
    /// A file that is not the one that was made, is no file of outputs, or lacks a word of where it comes from, by its
    /// path; and what `holds` refuses. The manifest is then as it was.
    pub fn import(
        &mut self,
        sources: &[Source],
        keep: usize,
        contract: &str,
        reason: &str,
        holds: &Holds,
    ) -> Result<Writes, GoldenError> {
        if reason.trim().is_empty() {
            return Err(GoldenError::Refused("the reason is empty; say why these outputs are kept".into()));
        }
        let mut next = self.entries.clone();
        let mut blessed = Vec::new();
        let mut written = self.write_data(&BTreeMap::new())?;
        for source in sources {
            let failed = |why: String| GoldenError::Refused(format!("{}: {why}", source.path.display()));
            let read = read(source, keep).map_err(failed)?;
            holds(&read.case, &read.outputs).map_err(failed)?;
            if blessed.contains(&read.case) {
                return Err(failed(format!("`{}` is in another file too", read.case)));
            }
            let file = read.kept.as_ref().map(|bytes| crate::bless::file_name(&read.case, &sha256(bytes)));
            let kept_sha256 = read.kept.as_ref().map_or(source.sha256.clone(), |bytes| sha256(bytes));
            if let (Some(file), Some(bytes)) = (&file, read.kept) {
                written.extend(self.write_data(&BTreeMap::from([(file.clone(), bytes)]))?);
            }
            let entry = Entry {
                case: read.case.clone(),
                file,
                sha256: Some(kept_sha256),
                rows: read.rows,
                contract: contract.into(),
                toolchain: read.maker,
                command: Some(read.command),
                reason: reason.into(),
                date: read.date,
                outputs: read.outputs,
            };
            blessed.push(read.case.clone());
            next.insert(read.case, entry);
        }
        let removed = self.replace(next)?;
        blessed.sort();
        Ok(Writes { blessed, dropped: Vec::new(), written, removed })
    }
}

/// What was read of a file.
struct Imported {
    case: String,
    maker: String,
    command: String,
    date: String,
    outputs: BTreeMap<String, Output>,
    /// The file that is kept, and how many entries of the first axis it has where these are not all.
    kept: Option<Vec<u8>>,
    rows: Option<usize>,
}

/// An output while its bytes go by.
struct Passing {
    name: String,
    dtype: DType,
    shape: Vec<usize>,
    bytes: usize,
    /// How many of them are kept.
    first: usize,
    kept: Vec<u8>,
    hash: Sha256,
}

fn read(source: &Source, keep: usize) -> Result<Imported, String> {
    let mut file = File::open(&source.path).map_err(|e| e.to_string())?;
    let size = file.metadata().map_err(|e| e.to_string())?.len();
    let mut whole = Sha256::new();
    let mut take = |bytes: &mut [u8]| -> Result<(), String> {
        file.read_exact(bytes).map_err(|_| "it ends too early".to_string())?;
        whole.update(&*bytes);
        Ok(())
    };

    let mut header = vec![0; 8];
    take(&mut header)?;
    let length = u64::from_le_bytes(header[..8].try_into().expect("eight bytes"));
    let most = keep.max(PIECE) as u64;
    if length > most || length > size {
        return Err(format!("its header claims {length} bytes; at most {most} are read"));
    }
    header.resize(8 + length as usize, 0);
    take(&mut header[8..])?;
    let header = wire::read_header(&header).map_err(|e| e.to_string())?;
    // A header may claim any size.
    let claimed = header.tensors.iter().fold(8 + length, |all, stored| all.saturating_add(stored.bytes as u64));
    if claimed != size {
        return Err(format!("it has {size} bytes; its header speaks of {claimed}"));
    }
    if header.tensors.is_empty() {
        return Err("it has no outputs".into());
    }
    let word = |field: &str| match header.metadata.get(field).filter(|text| !text.trim().is_empty()) {
        Some(text) => Ok(text.clone()),
        None => Err(format!("metadata `{field}` is missing; who makes goldens says case, maker, command and date")),
    };
    let (case, maker, command, date) = (word("case")?, word("maker")?, word("command")?, word("date")?);

    // Whole, or as many first rows as fit beside a header.
    let row = |stored: &wire::Stored| match stored.shape.first() {
        Some(&rows) if rows > 0 => stored.bytes / rows,
        _ => stored.bytes,
    };
    let per_row: usize = header.tensors.iter().map(row).sum();
    let all = header.tensors.iter().filter_map(|stored| stored.shape.first().copied()).max().unwrap_or(1);
    let fit = keep.saturating_sub(HEADER) / per_row.max(1);
    let (rows, kept_rows) = if size <= keep as u64 { (None, all) } else { (Some(fit), fit) };
    let mut outputs: Vec<Passing> = Vec::new();
    for stored in header.tensors {
        let mut hash = Sha256::new();
        hash.update(manifest::preamble(stored.dtype, &stored.shape));
        let first = row(&stored) * stored.shape.first().map_or(1, |&rows| rows.min(kept_rows));
        let wire::Stored { name, dtype, shape, bytes } = stored;
        outputs.push(Passing { name, dtype, shape, bytes, first, kept: Vec::new(), hash });
    }
    let mut piece = vec![0; PIECE];
    for output in &mut outputs {
        let mut left = output.bytes;
        while left > 0 {
            let part = &mut piece[..left.min(PIECE)];
            take(part)?;
            output.hash.update(&*part);
            let wanted = (output.first - output.kept.len()).min(part.len());
            output.kept.extend_from_slice(&part[..wanted]);
            left -= part.len();
        }
    }
    let found = crate::hex(&whole.finalize());
    if found != source.sha256 {
        return Err(format!("its SHA-256 is {found}, and {} when it was made: a bit of it has changed", source.sha256));
    }

    let mut tensors = BTreeMap::new();
    let mut listed = BTreeMap::new();
    for Passing { name, dtype, shape, kept, hash, .. } in outputs {
        let mut part = shape.clone();
        if let Some(first) = part.first_mut() {
            *first = (*first).min(kept_rows);
        }
        let tensor =
            Tensor::from_bytes(dtype, &part, &kept).ok_or_else(|| format!("`{name}` does not fit its shape"))?;
        tensors.insert(name.clone(), tensor);
        listed.insert(name, Output { dtype, shape, sha256: crate::hex(&hash.finalize()), rows: String::new() });
    }
    let rows = rows.filter(|&rows| rows > 0);
    let kept = (size <= keep as u64 || rows.is_some()).then(|| {
        let metadata = BTreeMap::from([("case".to_string(), case.clone())]);
        wire::File { tensors, metadata }.encode()
    });
    Ok(Imported { case, maker, command, date, outputs: listed, kept, rows })
}

/// The files in `folder` with their hashes, as its `SHA256SUMS` lists them; the list is what `sha256sum *.safetensors` writes.
///
/// # Errors
/// A list that is not there, a line that is not `<hash>  <name>.safetensors`, and a file that only one of list and folder has.
pub fn sources(folder: &Path) -> Result<Vec<Source>, GoldenError> {
    let list = folder.join("SHA256SUMS");
    let io = |path: &Path| {
        let path = path.to_path_buf();
        move |cause: std::io::Error| GoldenError::Io { path, cause }
    };
    let text = std::fs::read_to_string(&list).map_err(io(&list))?;
    let mut sources = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let wrong = |why: String| GoldenError::Manifest { path: list.clone(), line: number + 1, why };
        let (hash, name) = line.split_once("  ").unwrap_or((line, ""));
        manifest::is_sha256(hash)
            .map_err(|_| wrong(format!("`{hash:.80}` is no SHA-256; write the list with `sha256sum *.safetensors`")))?;
        if !name.ends_with(".safetensors") || name.contains(['/', '\\']) {
            return Err(wrong(format!("`{name}` is not the name of a .safetensors file in this folder")));
        }
        sources.push(Source { path: folder.join(name), sha256: hash.into() });
    }
    for found in std::fs::read_dir(folder).map_err(io(folder))? {
        let path = found.map_err(io(folder))?.path();
        if path.extension().is_some_and(|end| end == "safetensors") && sources.iter().all(|s| s.path != path) {
            return Err(GoldenError::Refused(format!("{} is not in {}", path.display(), list.display())));
        }
    }
    if sources.is_empty() {
        return Err(GoldenError::Refused(format!("{} lists nothing", list.display())));
    }
    Ok(sources)
}
