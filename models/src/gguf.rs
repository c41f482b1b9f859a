//! GGUF, the files of llama.cpp: metadata, and tensors of which most are stored as blocks of a few bits a number.
//!
//! A number of a block is one f32 (docs/NUMERICS.md, section 9): products of a scale and a small integer are exact, what is taken
//! off or added is rounded once. Every size and offset is checked against the file before it is used.

use crate::ModelError;
use crate::files::open;
use samebits_ops::{Element, bf16, f16};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::Path;

mod blocks;
mod names;
mod tokenizer;
mod writing;

pub(crate) use blocks::Format;
pub(crate) use names::{Place, ROPE_FACTORS, places};
pub(crate) use writing::{Field, Writing, vocabulary_of};

/// Metadata and tensors longer than this are none of a model's.
const MOST: u64 = 1 << 30;

/// Most tensors, fields, and values of a list: each takes many times its bytes in memory.
const MOST_LISTED: u64 = 1 << 22;

/// Most dimensions of a tensor.
const MOST_DIMS: u32 = 4;

/// A tensor of a file.
#[derive(Debug, PartialEq)]
pub(crate) struct Found {
    pub format: Format,
    pub shape: Vec<usize>,
    /// Bytes in the file.
    pub bytes: Range<u64>,
}

/// What a file holds.
pub(crate) struct Contents {
    /// By the names of the file.
    pub metadata: Map<String, Value>,
    pub tensors: BTreeMap<String, Found>,
}

/// Whether a path is that of such a file.
pub(crate) fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|end| end == "gguf") && path.is_file()
}

/// The `config.json` of a folder with the model of a file.
///
/// # Errors
/// As [`read`]; a model of which something is not known.
pub(crate) fn config(path: &Path) -> Result<Map<String, Value>, ModelError> {
    let (mut file, length) = open(path)?;
    let contents = read(path, &mut file, length)?;
    let factors = contents.tensors.get(names::ROPE_FACTORS).map(|tensor| -> Result<Vec<f32>, ModelError> {
        // As many as a head has pairs.
        let length = (tensor.bytes.end - tensor.bytes.start).min(1 << 16);
        let mut bytes = vec![0; length as usize];
        file.seek(SeekFrom::Start(tensor.bytes.start))
            .and_then(|_| file.read_exact(&mut bytes))
            .map_err(|e| ModelError::tensor(path, names::ROPE_FACTORS, format!("cannot be read: {e}")))?;
        let (numbers, size) = tensor.format.block();
        let mut factors = vec![0.0; bytes.len() / size * numbers];
        tensor.format.expand(&bytes, &mut factors);
        Ok(factors)
    });
    names::config(path, &contents, factors.transpose()?.as_deref())
}

/// The same of what stands before the tensors of a file, and of what divides frequencies.
///
/// # Errors
/// As [`config`].
pub(crate) fn config_of(path: &Path, header: &[u8], factors: Option<&[f32]>) -> Result<Map<String, Value>, ModelError> {
    let mut header = Header { inner: header, left: header.len() as u64, read: 0 };
    let contents = contents(path, &mut header, u64::MAX).map_err(|e| e.of(path))?;
    names::config(path, &contents, factors)
}

/// The `tokenizer.json` and `tokenizer_config.json` of a folder with the tokenizer of a file.
///
/// # Errors
/// As [`read`]; a tokenizer of which something is not known.
pub(crate) fn tokenizer(path: &Path) -> Result<(Value, Map<String, Value>), ModelError> {
    let (mut file, length) = open(path)?;
    tokenizer::of(path, &read(path, &mut file, length)?.metadata)
}

/// Reads the header of a file of `length` bytes.
///
/// # Errors
/// What is no whole GGUF file of version 2 or 3; a tensor of a type that is not known, by name.
pub(crate) fn read(path: &Path, file: &mut File, length: u64) -> Result<Contents, ModelError> {
    let mut header = Header { inner: BufReader::new(file), left: length.min(MOST), read: 0 };
    contents(path, &mut header, length).map_err(|e| e.of(path))
}

/// What is wrong with a file.
enum Bad {
    Whole(String),
    Told(ModelError),
}

impl Bad {
    fn of(self, path: &Path) -> ModelError {
        match self {
            Bad::Whole(why) => ModelError::file(path, format!("is not a whole GGUF file: {why}")),
            Bad::Told(error) => error,
        }
    }
}

impl From<String> for Bad {
    fn from(why: String) -> Bad {
        Bad::Whole(why)
    }
}

fn contents(path: &Path, header: &mut Header<impl Read>, length: u64) -> Result<Contents, Bad> {
    if header.bytes::<4>()? != *b"GGUF" {
        return Err("it does not begin with GGUF".to_string().into());
    }
    let version = header.u32()?;
    if ![2, 3].contains(&version) {
        return Err(Bad::Told(ModelError::file(path, format!("has version {version} of GGUF; supported are 2 and 3"))));
    }
    let (tensors, fields) = (header.count()?, header.count()?);
    let mut metadata = Map::new();
    for _ in 0..fields {
        let key = header.text()?;
        let kind = header.u32()?;
        let value = header.value(kind, 0)?;
        if metadata.insert(key.clone(), value).is_some() {
            return Err(Bad::Told(ModelError::field(path, key, "stands in it twice")));
        }
    }
    let mut listed = Vec::new();
    for _ in 0..tensors {
        let name = header.text()?;
        let dims = header.u32()?;
        if dims > MOST_DIMS {
            return Err(Bad::Told(ModelError::tensor(
                path,
                &name,
                format!("has {dims} dimensions; at most 4 are read"),
            )));
        }
        let mut shape = (0..dims).map(|_| header.u64()).collect::<Result<Vec<u64>, _>>()?;
        // The file has the dimension first along which numbers stand side by side.
        shape.reverse();
        listed.push((name, shape, header.u32()?, header.u64()?));
    }
    let align = match metadata.get("general.alignment") {
        None => 32,
        Some(value) => {
            value.as_u64().filter(|align| align.is_power_of_two() && *align <= 1 << 20).ok_or_else(|| {
                Bad::Told(ModelError::field(
                    path,
                    "general.alignment",
                    format!("is {value}; it must be a power of two"),
                ))
            })?
        }
    };
    let start = header.read.next_multiple_of(align);
    let (mut found, mut complaints) = (BTreeMap::new(), Vec::new());
    for (name, shape, kind, offset) in listed {
        match place(&shape, kind, start, offset, align, length) {
            Ok(tensor) if !found.contains_key(&name) => drop(found.insert(name, tensor)),
            Ok(_) => complaints.push(ModelError::tensor(path, &name, "stands in it twice")),
            Err(why) => complaints.push(ModelError::tensor(path, &name, why)),
        }
    }
    ModelError::all(crate::weights::few(complaints)).map_err(Bad::Told)?;
    Ok(Contents { metadata, tensors: found })
}

/// Where a tensor stands, within the file.
fn place(shape: &[u64], kind: u32, start: u64, offset: u64, align: u64, length: u64) -> Result<Found, String> {
    let format = Format::of(kind)?;
    let (numbers, bytes) = format.block();
    let row = shape.last().copied().unwrap_or(1);
    if !row.is_multiple_of(numbers as u64) {
        return Err(format!("has rows of {row} numbers, which blocks of {numbers} ({}) do not fill", format.name()));
    }
    let count = shape.iter().try_fold(1u64, |n, extent| n.checked_mul(*extent));
    let size = count.and_then(|count| (count / numbers as u64).checked_mul(bytes as u64));
    let begin = start.checked_add(offset).filter(|_| offset.is_multiple_of(align));
    match (begin, size) {
        (Some(begin), Some(size)) if begin.checked_add(size).is_some_and(|end| end <= length) => {
            let shape = shape.iter().map(|extent| *extent as usize).collect();
            Ok(Found { format, shape, bytes: begin..begin + size })
        }
        _ => Err(format!("of shape {shape:?} in {} at {offset} goes beyond the file of {length} bytes", format.name())),
    }
}

/// A reader that knows how much may come.
struct Header<R> {
    inner: R,
    left: u64,
    read: u64,
}

impl<R: Read> Header<R> {
    fn take(&mut self, count: u64) -> Result<Vec<u8>, String> {
        if count > self.left {
            return Err(format!("{count} bytes are said to follow, {} do", self.left));
        }
        let mut bytes = vec![0; count as usize];
        self.inner.read_exact(&mut bytes).map_err(|e| format!("it cannot be read: {e}"))?;
        (self.left, self.read) = (self.left - count, self.read + count);
        Ok(bytes)
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], String> {
        self.take(N as u64).map(|bytes| bytes.try_into().expect("N bytes"))
    }

    fn u32(&mut self) -> Result<u32, String> {
        self.bytes().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, String> {
        self.bytes().map(u64::from_le_bytes)
    }

    /// How many of something follow, each of a byte at least.
    fn count(&mut self) -> Result<u64, String> {
        match self.u64()? {
            count if count > self.left => Err(format!("a list of {count} is said to follow, {} bytes do", self.left)),
            count if count > MOST_LISTED => {
                Err(format!("a list of {count} is said to follow; at most {MOST_LISTED} are read"))
            }
            count => Ok(count),
        }
    }

    fn text(&mut self) -> Result<String, String> {
        let length = self.u64()?;
        let bytes = self.take(length)?;
        // Vocabularies may hold pieces that are no text.
        Ok(String::from_utf8(bytes).unwrap_or_else(|e| String::from_utf8_lossy(e.as_bytes()).into_owned()))
    }

    /// A value of a type of metadata, lists in lists to a depth.
    fn value(&mut self, kind: u32, depth: usize) -> Result<Value, String> {
        Ok(match kind {
            0 => self.bytes::<1>()?[0].into(),
            1 => i8::from_le_bytes(self.bytes()?).into(),
            2 => u16::from_le_bytes(self.bytes()?).into(),
            3 => i16::from_le_bytes(self.bytes()?).into(),
            4 => self.u32()?.into(),
            5 => i32::from_le_bytes(self.bytes()?).into(),
            6 => of_float(f32::from_le_bytes(self.bytes()?)),
            7 => (self.bytes::<1>()?[0] != 0).into(),
            8 => self.text()?.into(),
            9 if depth < 4 => {
                let (kind, count) = (self.u32()?, self.count()?);
                (0..count).map(|_| self.value(kind, depth + 1)).collect::<Result<Vec<_>, _>>()?.into()
            }
            10 => self.u64()?.into(),
            11 => i64::from_le_bytes(self.bytes()?).into(),
            12 => f64::from_le_bytes(self.bytes()?).into(),
            _ => return Err(format!("metadata of type {kind} is not known")),
        })
    }
}

/// The shortest number in f64 that is this one in f32: 1e-5 and not what f32 makes of it.
fn of_float(x: f32) -> Value {
    x.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}
