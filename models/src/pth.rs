//! The tensors of a file that torch.save wrote: a zip without compression, with a pickle that says what stands where.
//!
//! A pickle is a program. Of this one only what rebuilds tensors is known: it makes values of [`Value`] and nothing else, and a
//! name of anything but the parts of a tensor is refused. Nothing of it is run, and data is read where the zip says it is.

use crate::ModelError;
use safetensors::tensor::Dtype;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::Path;
use std::rc::Rc;

/// A tensor of a file: its dtype, its shape, and its bytes in the file.
pub(crate) type Found = (Dtype, Vec<usize>, Range<u64>);

/// A directory or a pickle that is longer than this is none of a model's.
const MOST: u64 = 1 << 26;

/// Every tensor of the file, which has `length` bytes.
///
/// # Errors
/// What is no such file, or holds anything but a dictionary of tensors.
pub(crate) fn read(path: &Path, file: &mut File, length: u64) -> Result<BTreeMap<String, Found>, ModelError> {
    let bad = |why: String| ModelError::file(path, why);
    let entries = directory(file, length).map_err(bad)?;
    let (name, pickle) = entries
        .iter()
        .find(|(name, _)| name.ends_with("/data.pkl") && name.matches('/').count() == 1)
        .ok_or_else(|| bad("has no data.pkl; torch.save writes one".into()))?;
    let folder = name.trim_end_matches("data.pkl");
    if let Some(range) = entries.get(&format!("{folder}byteorder")) {
        let order = bytes(file, range.start, range.end - range.start).map_err(bad)?;
        if order != b"little" {
            return Err(bad("has numbers of another byte order; supported is little".into()));
        }
    }
    let program = bytes(file, pickle.start, pickle.end - pickle.start).map_err(bad)?;
    let Value::Dict(items) = Machine::new(&program).run().map_err(bad)? else {
        return Err(bad("holds no dictionary of tensors".into()));
    };
    let mut found = BTreeMap::new();
    for (name, tensor) in items {
        let refused = |why: String| ModelError::tensor(path, &name, why);
        let Some(data) = entries.get(&format!("{folder}data/{}", tensor.key)) else {
            return Err(refused(format!("has no data/{} in the file", tensor.key)));
        };
        let range = tensor.within(data).map_err(refused)?;
        let tensor = (tensor.dtype, tensor.shape.clone(), range);
        if found.insert(name.clone(), tensor).is_some() {
            return Err(ModelError::tensor(path, &name, "stands in it twice"));
        }
    }
    Ok(found)
}

/// `count` bytes from `at` on.
fn bytes(file: &mut File, at: u64, count: u64) -> Result<Vec<u8>, String> {
    if count > MOST {
        return Err(format!("has a part of {count} bytes; at most {MOST} are read"));
    }
    let mut read = vec![0; count as usize];
    let seek = file.seek(SeekFrom::Start(at)).and_then(|_| file.read_exact(&mut read));
    seek.map_err(|e| format!("cannot be read: {e}"))?;
    Ok(read)
}

/// A little-endian number of so many bytes.
fn number(bytes: &[u8], at: usize, count: usize) -> Result<u64, String> {
    let digits = at.checked_add(count).and_then(|end| bytes.get(at..end)).ok_or("ends in the middle")?;
    Ok(digits.iter().rev().fold(0, |n, digit| n << 8 | u64::from(*digit)))
}

/// The files of a zip and where their bytes stand, none of them compressed.
fn directory(file: &mut File, length: u64) -> Result<BTreeMap<String, Range<u64>>, String> {
    // A comment behind the end may be of any 64 KiB.
    let tail = length.min(22 + 0xFFFF);
    let end = bytes(file, length - tail, tail)?;
    let at = (0..end.len().saturating_sub(21)).rev().find(|at| end[*at..].starts_with(b"PK\x05\x06"));
    let at = at.ok_or("is no zip; torch.save writes one since torch 1.6")?;
    let mut size = number(&end, at + 12, 4)?;
    let mut first = number(&end, at + 16, 4)?;
    let mut count = number(&end, at + 10, 2)?;
    if let Some(locator) = at.checked_sub(20).filter(|at| end[*at..].starts_with(b"PK\x06\x07")) {
        let large = bytes(file, number(&end, locator + 8, 8)?, 56)?;
        if !large.starts_with(b"PK\x06\x06") {
            return Err("has no directory where it says".into());
        }
        (count, size, first) = (number(&large, 32, 8)?, number(&large, 40, 8)?, number(&large, 48, 8)?);
    }
    let (entries, mut at, mut found) = (bytes(file, first, size)?, 0, BTreeMap::new());
    for _ in 0..count {
        if number(&entries, at, 4)? != 0x0201_4B50 {
            return Err("has a directory that ends in the middle".into());
        }
        let [method, named, more, comment] =
            [(10, 2), (28, 2), (30, 2), (32, 2)].map(|(by, n)| number(&entries, at + by, n));
        let (named, more, comment) = (named? as usize, more? as usize, comment? as usize);
        let mut sizes = [number(&entries, at + 20, 4)?, number(&entries, at + 24, 4)?, number(&entries, at + 42, 4)?];
        let name = entries.get(at + 46..at + 46 + named).ok_or("ends in the middle")?;
        let name = String::from_utf8(name.to_vec()).map_err(|_| "has a name that is not UTF-8")?;
        let extra = entries.get(at + 46 + named..at + 46 + named + more).ok_or("ends in the middle")?;
        wide(extra, &mut sizes)?;
        let [packed, size, place] = sizes;
        if method? != 0 || packed != size {
            return Err(format!("has `{name}` compressed; torch.save does not"));
        }
        let local = bytes(file, place, 30)?;
        let start = place.saturating_add(30 + number(&local, 26, 2)? + number(&local, 28, 2)?);
        let range = start..start.checked_add(size).filter(|end| *end <= length).ok_or("ends in the middle")?;
        if number(&local, 0, 4)? != 0x0403_4B50 || found.insert(name.clone(), range).is_some() {
            return Err(format!("has `{name}` twice, or not where it says"));
        }
        at += 46 + named + more + comment;
    }
    Ok(found)
}

/// Sizes and a place of more than 32 bits, which stand behind the name: size, packed size and place, those that do not fit.
fn wide(extra: &[u8], [packed, size, place]: &mut [u64; 3]) -> Result<(), String> {
    let mut at = 0;
    while at + 4 <= extra.len() {
        let (kind, count) = (number(extra, at, 2)?, number(extra, at + 2, 2)? as usize);
        if kind == 1 {
            let mut next = at + 4;
            for field in [&mut *size, &mut *packed, &mut *place] {
                if *field == 0xFFFF_FFFF {
                    *field = number(extra, next, 8)?;
                    next += 8;
                }
            }
        }
        at += 4 + count;
    }
    Ok(())
}

/// What a pickle may make.
#[derive(Clone, Debug)]
enum Value {
    None,
    Bool,
    Int(i64),
    Text(Rc<str>),
    /// And how deep tuples stand in it.
    Tuple(Rc<Vec<Value>>, usize),
    /// Of texts and tensors alone.
    Dict(Vec<(String, Tensor)>),
    /// A name of torch or of Python.
    Global(Global),
    /// A file of numbers: which, and of what.
    Storage(Rc<str>, Dtype),
    Tensor(Tensor),
    /// Where a tuple or the items of a dictionary begin.
    Mark,
}

/// The names that tensors are rebuilt with.
#[derive(Clone, Copy, Debug)]
enum Global {
    Rebuild,
    Ordered,
    Storage(Dtype),
}

/// Elements of a file of numbers.
#[derive(Clone, Debug)]
struct Tensor {
    key: Rc<str>,
    dtype: Dtype,
    first: u64,
    shape: Vec<usize>,
}

impl Tensor {
    /// Its bytes in the file, within those of its numbers.
    fn within(&self, data: &Range<u64>) -> Result<Range<u64>, String> {
        let each = self.dtype.bitsize() as u64 / 8;
        let count = self.shape.iter().try_fold(1u64, |n, extent| n.checked_mul(*extent as u64));
        let start = self.first.checked_mul(each).and_then(|by| data.start.checked_add(by));
        let end = start.and_then(|start| count?.checked_mul(each)?.checked_add(start));
        match (start, end) {
            (Some(start), Some(end)) if end <= data.end => Ok(start..end),
            _ => Err(format!("has shape {:?}, for which data/{} is too short", self.shape, self.key)),
        }
    }
}

/// The machine that reads a pickle.
struct Machine<'a> {
    program: &'a [u8],
    at: usize,
    stack: Vec<Value>,
    memo: BTreeMap<u64, Value>,
}

impl<'a> Machine<'a> {
    fn new(program: &'a [u8]) -> Machine<'a> {
        Machine { program, at: 0, stack: Vec::new(), memo: BTreeMap::new() }
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8], String> {
        let end = self
            .at
            .checked_add(count)
            .filter(|end| *end <= self.program.len())
            .ok_or("has a pickle that ends early")?;
        let taken = &self.program[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn int(&mut self, count: usize) -> Result<u64, String> {
        number(self.take(count)?, 0, count)
    }

    /// Up to the end of the line.
    fn line(&mut self) -> Result<&'a str, String> {
        let end =
            self.program[self.at..].iter().position(|byte| *byte == b'\n').ok_or("has a pickle that ends early")?;
        let line = self.take(end)?;
        self.at += 1;
        std::str::from_utf8(line).map_err(|_| "has a name that is not UTF-8".into())
    }

    fn text(&mut self, count: u64) -> Result<Value, String> {
        let bytes = self.take(count as usize)?;
        Ok(Value::Text(std::str::from_utf8(bytes).map_err(|_| "has a text that is not UTF-8")?.into()))
    }

    fn pop(&mut self) -> Result<Value, String> {
        self.stack.pop().ok_or("has a pickle that takes what is not there".into())
    }

    /// What stands above the last mark, which goes too.
    fn marked(&mut self) -> Result<Vec<Value>, String> {
        let mark = self.stack.iter().rposition(|value| matches!(value, Value::Mark));
        let values = self.stack.split_off(mark.ok_or("has a pickle that takes what is not there")?);
        Ok(values.into_iter().skip(1).collect())
    }

    /// The last values, which go.
    fn last(&mut self, count: usize) -> Result<Vec<Value>, String> {
        let first = self.stack.len().checked_sub(count).ok_or("has a pickle that takes what is not there")?;
        Ok(self.stack.split_off(first))
    }

    fn put(&mut self, items: Vec<Value>) -> Result<(), String> {
        let Some(Value::Dict(dict)) = self.stack.last_mut() else {
            return Err("has a pickle that fills something other than a dictionary".into());
        };
        let mut items = items.into_iter();
        while let Some(name) = items.next() {
            let (Value::Text(name), Some(Value::Tensor(tensor))) = (name, items.next()) else {
                return Err("holds a dictionary of something other than tensors".into());
            };
            dict.push((name.to_string(), tensor));
        }
        Ok(())
    }

    fn run(mut self) -> Result<Value, String> {
        loop {
            let code = self.int(1)? as u8;
            let made = match code {
                b'.' => return self.pop(),
                // The version, and a frame, which changes nothing.
                0x80 => {
                    self.take(1)?;
                    continue;
                }
                0x95 => {
                    self.take(8)?;
                    continue;
                }
                b'q' | b'r' | 0x94 => {
                    let place = match code {
                        b'q' => self.int(1)?,
                        b'r' => self.int(4)?,
                        _ => self.memo.len() as u64,
                    };
                    let top = self.stack.last().ok_or("has a pickle that takes what is not there")?;
                    // What is kept of a dictionary is nothing that a tensor is rebuilt with.
                    let kept = if matches!(top, Value::Dict(_)) { Value::Dict(Vec::new()) } else { top.clone() };
                    self.memo.insert(place, kept);
                    continue;
                }
                b'h' | b'j' => {
                    let place = self.int(if code == b'h' { 1 } else { 4 })?;
                    self.memo.get(&place).cloned().ok_or("has a pickle that takes what is not there")?
                }
                b'(' => Value::Mark,
                b'N' => Value::None,
                0x88 | 0x89 => Value::Bool,
                b'K' => Value::Int(self.int(1)? as i64),
                b'M' => Value::Int(self.int(2)? as i64),
                b'J' => Value::Int(i64::from(self.int(4)? as u32 as i32)),
                0x8a => {
                    let count = self.int(1)?.min(9) as usize;
                    let digits = self.take(count)?;
                    let n = number(digits, 0, count)?;
                    match count < 8 || n <= i64::MAX as u64 && count == 8 {
                        true => Value::Int(n as i64),
                        false => return Err("has a number beyond 64 bits".into()),
                    }
                }
                b'X' | 0x8c => {
                    let count = self.int(if code == b'X' { 4 } else { 1 })?;
                    self.text(count)?
                }
                b')' => tuple(Vec::new())?,
                0x85..=0x87 => tuple(self.last(usize::from(code - 0x84))?)?,
                b't' => tuple(self.marked()?)?,
                b'}' => Value::Dict(Vec::new()),
                b's' => {
                    let item = self.last(2)?;
                    self.put(item)?;
                    continue;
                }
                b'u' => {
                    let items = self.marked()?;
                    self.put(items)?;
                    continue;
                }
                b'c' => {
                    let (module, name) = (self.line()?, self.line()?);
                    global(module, name)?
                }
                0x93 => match (self.pop()?, self.pop()?) {
                    (Value::Text(name), Value::Text(module)) => global(&module, &name)?,
                    _ => return Err("has a name that is no text".into()),
                },
                b'Q' => storage(self.pop()?)?,
                b'R' => {
                    let arguments = self.pop()?;
                    call(self.pop()?, arguments)?
                }
                code => {
                    return Err(format!("has a pickle with code {code:#04x}, which no dictionary of tensors needs"));
                }
            };
            self.stack.push(made);
        }
    }
}

/// A tuple: deep ones are made by nobody, and would not end.
fn tuple(values: Vec<Value>) -> Result<Value, String> {
    let depth = |value: &Value| if let Value::Tuple(_, depth) = value { *depth } else { 0 };
    let depth = 1 + values.iter().map(depth).max().unwrap_or(0);
    match depth > 8 {
        true => Err("has a pickle with tuples in tuples that no tensor has".into()),
        false => Ok(Value::Tuple(Rc::new(values), depth)),
    }
}

/// A name that tensors are rebuilt with.
fn global(module: &str, name: &str) -> Result<Value, String> {
    let known = match (module, name) {
        ("torch._utils", "_rebuild_tensor_v2") => Global::Rebuild,
        ("collections", "OrderedDict") => Global::Ordered,
        ("torch", "FloatStorage") => Global::Storage(Dtype::F32),
        ("torch", "HalfStorage") => Global::Storage(Dtype::F16),
        ("torch", "BFloat16Storage") => Global::Storage(Dtype::BF16),
        _ => {
            let named = format!("{module}.{name}");
            return Err(format!(
                "has a pickle that asks for `{named}`; supported are tensors of bf16, fp16 and fp32 alone"
            ));
        }
    };
    Ok(Value::Global(known))
}

/// `("storage", type, key, device, elements)`
fn storage(id: Value) -> Result<Value, String> {
    if let Value::Tuple(parts, _) = &id
        && let [
            Value::Text(word),
            Value::Global(Global::Storage(dtype)),
            Value::Text(key),
            Value::Text(_),
            Value::Int(_),
        ] = &parts[..]
        && **word == *"storage"
    {
        return Ok(Value::Storage(key.clone(), *dtype));
    }
    Err("has a pickle that refers to something other than numbers of a tensor".into())
}

fn call(what: Value, arguments: Value) -> Result<Value, String> {
    let (Value::Global(global), Value::Tuple(arguments, _)) = (what, arguments) else {
        return Err("has a pickle that calls something other than what rebuilds tensors".into());
    };
    match (global, &arguments[..]) {
        (Global::Ordered, []) => Ok(Value::Dict(Vec::new())),
        // Numbers, the first, shape, strides; then whether it has a gradient, and hooks.
        (
            Global::Rebuild,
            [Value::Storage(key, dtype), Value::Int(first), Value::Tuple(shape, _), Value::Tuple(strides, _), ..],
        ) => {
            let sizes = |values: &[Value]| {
                let size = |value: &Value| match value {
                    Value::Int(n) => usize::try_from(*n).ok(),
                    _ => None,
                };
                values.iter().map(size).collect::<Option<Vec<_>>>().ok_or("has a shape that is none")
            };
            let (shape, strides) = (sizes(shape)?, sizes(strides)?);
            let first = u64::try_from(*first).map_err(|_| "has a tensor that begins before its numbers")?;
            if shape.len() > 8 {
                return Err(format!("has a tensor of {} axes; no model does", shape.len()));
            }
            // Where an axis has one element its stride is nothing.
            let mut wanted = 1usize;
            for (extent, stride) in shape.iter().zip(&strides).rev() {
                if *extent > 1 && *stride != wanted || shape.len() != strides.len() {
                    return Err(format!(
                        "has a tensor of shape {shape:?} that is not one piece; supported are contiguous ones"
                    ));
                }
                wanted = wanted.saturating_mul(*extent);
            }
            Ok(Value::Tensor(Tensor { key: key.clone(), dtype: *dtype, first, shape }))
        }
        _ => Err("has a pickle that calls what rebuilds tensors with something else".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    /// `torch.save({"a.weight": bf16 [2,3], "b": fp32 [4], "c": the last two rows of a bf16 [3,2], "d": fp16 []}, ..)` of torch 2.15.
    const SMALL: &[u8] = include_bytes!("../tests/small.pth");

    fn read_bytes(content: &[u8]) -> Result<BTreeMap<String, Found>, ModelError> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(content).unwrap();
        read(Path::new("small.pth"), &mut file, content.len() as u64)
    }

    #[test]
    fn tensors_stand_where_torch_has_put_them() {
        let found = read_bytes(SMALL).unwrap();
        let of = |name: &str| {
            let (dtype, shape, range) = &found[name];
            (*dtype, shape.clone(), SMALL[range.start as usize..range.end as usize].to_vec())
        };
        let bf16 = |values: &[f32]| {
            values.iter().flat_map(|v| ((v.to_bits() >> 16) as u16).to_le_bytes()).collect::<Vec<u8>>()
        };
        let fp32: Vec<u8> = [-1.5f32, 0.0, 2.0, 1e-30].iter().flat_map(|v| v.to_le_bytes()).collect();
        assert_eq!(found.len(), 4);
        assert_eq!(of("a.weight"), (Dtype::BF16, vec![2, 3], bf16(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0])));
        assert_eq!(of("b"), (Dtype::F32, vec![4], fp32));
        assert_eq!(of("c"), (Dtype::BF16, vec![2, 2], bf16(&[2.0, 3.0, 4.0, 5.0])));
        assert_eq!(of("d"), (Dtype::F16, vec![], vec![0x00, 0x3C]));
    }

    /// Changed or cut anywhere, a file is read or refused.
    #[test]
    fn no_file_makes_a_reader_panic() {
        let mut refused = 0;
        for at in 0..SMALL.len() {
            refused += usize::from(read_bytes(&SMALL[..at]).is_err());
            for byte in [0, 1, 0x7F, 0xFF, SMALL[at] ^ 1, b'R', b'(', b't', 0x85] {
                let mut changed = SMALL.to_vec();
                changed[at] = byte;
                refused += usize::from(read_bytes(&changed).is_err());
            }
        }
        assert!(refused > SMALL.len(), "{refused}");
    }

    #[test]
    fn what_is_no_part_of_a_tensor_is_refused_by_name() {
        let run = |program: &[u8]| Machine::new(program).run().map(drop).unwrap_err();
        assert!(run(b"cposix\nsystem\n.").contains("asks for `posix.system`"));
        assert!(run(b"\x8c\x02os\x8c\x06system\x93.").contains("`os.system`"));
        assert!(run(b"}b.").contains("code 0x62"));
        assert!(run(b"}X\x01\0\0\0aK\x01s.").contains("other than tensors"));
        let deep = [&b")"[..], &[0x85; 100_000]].concat();
        assert!(run(&deep).contains("tuples in tuples"));
    }
}
