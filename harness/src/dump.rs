//! What a forward computed on the way, in a file: written as it is made, read again by token.
//!
//! A dump is a sequence of records, one for each site of each step: a line of JSON and then the values.
//!
//! ```text
//! {"site": "layers.0.q", "tokens": [[0, 3], [1, 7]], "width": 64}\n      sequence and position of each row
//! rows * width f32, little endian
//! ```
//!
//! The first line is `{"samebits": "dump"}`. Sites stand in the order in which they were computed.
//! `goldens/generate/dump.py` writes the same of a model in transformers.

use samebits_contract::atomic_write::AtomicFile;
use samebits_models::{ModelError, Probe, Seen};
use samebits_ops::TensorRef;
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

const FIRST: &str = r#"{"samebits": "dump"}"#;

/// Writes a dump. The file appears when it is whole.
pub struct Writer {
    path: PathBuf,
    file: BufWriter<AtomicFile>,
    written: u64,
    /// Most bytes.
    cap: u64,
}

impl Writer {
    /// A dump at `path` of at most `cap` bytes.
    ///
    /// # Errors
    /// When `path` cannot be written.
    pub fn create(path: &Path, cap: u64) -> std::io::Result<Writer> {
        let mut file = BufWriter::new(AtomicFile::create(path)?);
        writeln!(file, "{FIRST}")?;
        Ok(Writer { path: path.into(), file, written: FIRST.len() as u64 + 1, cap })
    }

    /// Puts the file in its place.
    ///
    /// # Errors
    /// When the disk is full or the place cannot be written; nothing is left behind.
    pub fn finish(self) -> std::io::Result<()> {
        self.file.into_inner().map_err(|e| e.into_error())?.commit()
    }

    fn refuse(&self, why: String) -> ModelError {
        ModelError::File { path: self.path.clone(), why }
    }
}

impl Probe for Writer {
    fn see(&mut self, seen: &mut Seen) -> Result<(), ModelError> {
        let width = seen.values.len() / seen.tokens.len().max(1);
        let tokens: Vec<[usize; 2]> = seen.tokens.iter().map(|&(sequence, position)| [sequence, position]).collect();
        let line = json!({"site": seen.name(), "tokens": tokens, "width": width}).to_string();
        let size = line.len() as u64 + 1 + 4 * seen.values.len() as u64;
        if self.written + size > self.cap {
            let why = format!("would exceed {} bytes at {}; raise --cap or pass fewer tokens", self.cap, seen.name());
            return Err(self.refuse(why));
        }
        let mut bytes = Vec::with_capacity(size as usize);
        bytes.extend_from_slice(line.as_bytes());
        bytes.push(b'\n');
        let values = TensorRef::new(seen.values, &[seen.values.len()]).expect("one axis");
        values.write(&mut bytes).expect("memory takes it");
        self.file.write_all(&bytes).map_err(|e| {
            self.refuse(format!("cannot be written: {e}; free some space, choose another place or pass fewer tokens"))
        })?;
        self.written += size;
        Ok(())
    }
}

/// A dump opened for reading.
pub struct Reader {
    path: PathBuf,
    file: File,
    /// Sites in the order in which they were computed first.
    pub sites: Vec<Site>,
}

/// Where the rows of a site stand.
pub struct Site {
    /// For example `layers.0.q`.
    pub name: String,
    /// Values of a row.
    pub width: usize,
    /// By sequence and position: where the row stands. A token that was computed twice counts the last time.
    pub rows: BTreeMap<(usize, usize), u64>,
}

impl Reader {
    /// Reads where everything stands.
    ///
    /// # Errors
    /// In words, when the file cannot be read or is no whole dump.
    pub fn open(path: &Path) -> Result<Reader, String> {
        let say = |why: String| format!("{}: {why}", path.display());
        let damaged = |why: &str| say(format!("is not a whole dump: {why}"));
        let file = File::open(path).map_err(|e| say(format!("cannot be read: {e}")))?;
        let size = file.metadata().map_err(|e| say(format!("cannot be read: {e}")))?.len();
        let mut reader = BufReader::new(file);
        let mut line = String::new();
        let next = |reader: &mut BufReader<File>, line: &mut String| {
            line.clear();
            // A line of JSON is not as long as this; other files may have no line at all.
            let read = reader.by_ref().take(1 << 28).read_line(line).map_err(|_| damaged("it holds no text"))?;
            Ok::<u64, String>(read as u64)
        };
        let mut at = next(&mut reader, &mut line)?;
        let first: Value = serde_json::from_str(&line).unwrap_or_default();
        if first["samebits"] != "dump" {
            return Err(damaged("its first line is not {\"samebits\": \"dump\"}"));
        }
        let mut sites: Vec<Site> = Vec::new();
        let mut places: HashMap<String, usize> = HashMap::new();
        loop {
            let read = next(&mut reader, &mut line)?;
            if read == 0 {
                break;
            }
            at += read;
            let record: Value = serde_json::from_str(&line).map_err(|e| damaged(&format!("byte {at}: {e}")))?;
            let (Some(name), Some(width), Some(tokens)) =
                (record["site"].as_str(), record["width"].as_u64(), record["tokens"].as_array())
            else {
                return Err(damaged(&format!("byte {at}: a record has no site, width or tokens")));
            };
            let place = *places.entry(name.into()).or_insert_with(|| {
                sites.push(Site { name: name.into(), width: width as usize, rows: BTreeMap::new() });
                sites.len() - 1
            });
            if sites[place].width != width as usize {
                return Err(damaged(&format!("{name} has rows of {width} and of {}", sites[place].width)));
            }
            for token in tokens {
                let pair = (token[0].as_u64(), token[1].as_u64());
                let (Some(sequence), Some(position)) = pair else {
                    return Err(damaged(&format!("{name}: a token is {token}, not a sequence and a position")));
                };
                sites[place].rows.insert((sequence as usize, position as usize), at);
                at = width.checked_mul(4).and_then(|row| at.checked_add(row)).unwrap_or(u64::MAX);
            }
            if at > size {
                return Err(damaged(&format!("{name} ends after the file does")));
            }
            reader.seek(SeekFrom::Start(at)).map_err(|e| say(format!("cannot be read: {e}")))?;
        }
        let file = reader.into_inner();
        Ok(Reader { path: path.into(), file, sites })
    }

    /// A row of a site.
    ///
    /// # Errors
    /// In words, when the file cannot be read.
    pub fn row(&mut self, site: usize, token: (usize, usize)) -> Result<Vec<f32>, String> {
        let Site { width, rows, .. } = &self.sites[site];
        let mut bytes = vec![0; 4 * width];
        let mut read = || -> std::io::Result<()> {
            self.file.seek(SeekFrom::Start(rows[&token]))?;
            self.file.read_exact(&mut bytes)
        };
        read().map_err(|e| format!("{}: cannot be read: {e}", self.path.display()))?;
        Ok(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
    }
}

/// The first site at which two dumps differ.
#[derive(Debug, PartialEq)]
pub struct Divergence {
    /// The site.
    pub site: String,
    /// Sites compared before it, all equal.
    pub before: Vec<String>,
    /// Sequence and position of the first token that differs there.
    pub token: (usize, usize),
    /// Its first element that differs, and both values.
    pub element: usize,
    /// In the first dump.
    pub a: f32,
    /// In the second.
    pub b: f32,
    /// How many values of the site differ, of how many.
    pub count: (usize, usize),
    /// The largest difference, over the largest value of the site in the first dump.
    pub relative: f64,
}

/// What a comparison found.
#[derive(Debug, PartialEq)]
pub struct Comparison {
    /// Sites that both have, up to where they part.
    pub sites: usize,
    /// Values compared.
    pub values: usize,
    /// Sites that only the first has.
    pub skipped: Vec<String>,
    /// Where they part.
    pub divergence: Option<Divergence>,
}

/// Compares two dumps site by site, in the order of the first; within `tolerance` times the largest value of a site, or bit
/// for bit where it is 0.
///
/// # Errors
/// In words, when a file cannot be read, the dumps have no site in common, or a site's rows have other widths.
pub fn compare(a: &mut Reader, b: &mut Reader, tolerance: f64) -> Result<Comparison, String> {
    let mut found = Comparison { sites: 0, values: 0, skipped: Vec::new(), divergence: None };
    let mut before = Vec::new();
    for site in 0..a.sites.len() {
        let name = a.sites[site].name.clone();
        let Some(other) = b.sites.iter().position(|site| site.name == name) else {
            found.skipped.push(name);
            continue;
        };
        let (width, theirs) = (a.sites[site].width, b.sites[other].width);
        if width != theirs {
            return Err(format!("{name} has {width} values for a token in the first dump and {theirs} in the second"));
        }
        let shared = |token: &&(usize, usize)| b.sites[other].rows.contains_key(token);
        let tokens: Vec<_> = a.sites[site].rows.keys().filter(shared).copied().collect();
        let mut rows = Vec::new();
        for &token in &tokens {
            rows.push((token, a.row(site, token)?, b.row(other, token)?));
        }
        let largest = rows.iter().flat_map(|(_, x, _)| x).fold(0f64, |m, v| m.max(f64::from(v.abs())));
        let mut divergence: Option<Divergence> = None;
        let (mut worst, mut differ) = (0f64, 0);
        for (token, x, y) in &rows {
            for (element, (&a, &b)) in x.iter().zip(y).enumerate() {
                let apart = f64::from((a - b).abs());
                // A NaN is beyond every tolerance.
                let same = if tolerance > 0.0 { apart <= tolerance * largest } else { a.to_bits() == b.to_bits() };
                if same {
                    continue;
                }
                (worst, differ) = (worst.max(apart), differ + 1);
                let (site, before, token) = (name.clone(), Vec::new(), *token);
                let new = Divergence { site, before, token, element, a, b, count: (0, 0), relative: 0.0 };
                divergence.get_or_insert(new);
            }
        }
        found.sites += 1;
        found.values += tokens.len() * width;
        if let Some(divergence) = divergence {
            let count = (differ, tokens.len() * width);
            found.divergence = Some(Divergence { before, count, relative: worst / largest, ..divergence });
            break;
        }
        before.push(name);
    }
    if found.values == 0 {
        return Err("the dumps have no token of any site in common".into());
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    type Record<'a> = (&'static str, Option<usize>, &'a [(usize, usize)], &'a [f32]);

    fn write(path: &Path, records: &[Record]) {
        let mut writer = Writer::create(path, 1 << 20).unwrap();
        for &(site, layer, tokens, values) in records {
            writer.see(&mut Seen { layer, site, op: None, tokens, values: &mut values.to_vec() }).unwrap();
        }
        writer.finish().unwrap();
    }

    #[test]
    fn the_first_site_that_differs_is_named_whatever_the_steps() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two) = (dir.path().join("one"), dir.path().join("two"));
        let (p, q) = ((0, 0), (0, 1));
        write(
            &one,
            &[
                ("embed", None, &[p, q], &[1.0, 2.0, 3.0, 4.0]),
                ("q", Some(3), &[p, q], &[5.0, -0.0]),
                ("k", Some(3), &[p, q], &[1.0, 1.0]),
            ],
        );
        let steps: [Record; 6] = [
            ("embed", None, &[p], &[1.0, 2.0]),
            ("q", Some(3), &[p], &[5.0]),
            ("k", Some(3), &[p], &[1.0]),
            ("embed", None, &[q], &[3.0, 4.0]),
            ("q", Some(3), &[q], &[-0.0]),
            ("k", Some(3), &[q], &[1.0]),
        ];
        write(&two, &steps);
        let compared =
            |tolerance| compare(&mut Reader::open(&one).unwrap(), &mut Reader::open(&two).unwrap(), tolerance).unwrap();
        assert_eq!(compared(0.0), Comparison { sites: 3, values: 8, skipped: vec![], divergence: None });
        let mut wrong = steps;
        wrong[4].3 = &[0.0];
        wrong[5].3 = &[9.0];
        write(&two, &wrong);
        let found = compared(0.0).divergence.unwrap();
        assert_eq!((found.site.as_str(), found.token, found.element, found.count), ("layers.3.q", q, 0, (1, 2)));
        assert_eq!(found.before, ["embed"]);
        assert_eq!(compared(0.5).divergence.unwrap().site, "layers.3.k");
    }

    #[test]
    fn a_dump_that_is_not_whole_is_refused_and_a_cap_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("dump");
        write(&path, &[("embed", None, &[(0, 0)], &[1.0, 2.0])]);
        let whole = std::fs::read(&path).unwrap();
        for length in [0, 5, whole.len() - 1, whole.len() - 9] {
            std::fs::write(&path, &whole[..length]).unwrap();
            let line = Reader::open(&path).err().unwrap();
            assert!(line.contains("is not a whole dump"), "{line}");
        }
        std::fs::remove_file(&path).unwrap();
        let mut writer = Writer::create(&path, 100).unwrap();
        let mut seen = Seen { layer: Some(2), site: "mlp", op: None, tokens: &[(0, 0)], values: &mut [0.0; 40] };
        let line = writer.see(&mut seen).unwrap_err().to_string();
        assert!(line.contains("would exceed 100 bytes at layers.2.mlp"), "{line}");
        drop(writer);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left behind");
    }
}
