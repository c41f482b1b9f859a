//! The tensors of a file that torch.save wrote: a zip without compression, with a pickle that says what stands where.
//!
//! Of the pickle only what rebuilds tensors is known ([`pickle`]): nothing of it is run, and data is read where the zip says it is.

mod pickle;

use crate::ModelError;
use pickle::Tensor;
use safetensors::tensor::Dtype;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::Path;

/// A tensor of a file: its dtype, its shape, and its bytes in the file.
pub(crate) type Found = (Dtype, Vec<usize>, Range<u64>);

/// A directory or a pickle that is longer than this is none of a model's, and would take many times the memory.
const MOST: u64 = 1 << 22;

/// Every tensor of the file, which has `length` bytes.
///
/// # Errors
/// What is no such file, or holds anything but a dictionary of tensors.
pub(crate) fn read(path: &Path, file: &mut File, length: u64) -> Result<BTreeMap<String, Found>, ModelError> {
    let bad = |why: String| ModelError::file(path, why);
    let entries = directory(file, length).map_err(bad)?;
    let pickles = |(name, _): &(&String, &Range<u64>)| name.ends_with("/data.pkl") && name.matches('/').count() == 1;
    let (name, place) =
        entries.iter().find(pickles).ok_or_else(|| bad("has no data.pkl; torch.save writes one".into()))?;
    let folder = name.trim_end_matches("data.pkl");
    if let Some(range) = entries.get(&format!("{folder}byteorder")) {
        let order = bytes(file, range.start, range.end - range.start).map_err(bad)?;
        if order != b"little" {
            return Err(bad("has numbers of another byte order; supported is little".into()));
        }
    }
    let program = bytes(file, place.start, place.end - place.start).map_err(bad)?;
    let mut found = BTreeMap::new();
    for (name, tensor) in pickle::read(&program).map_err(bad)? {
        let refused = |why: String| ModelError::tensor(path, &name, why);
        let tensor =
            tensor.ok_or_else(|| refused("is no tensor; supported is a dictionary of tensors alone".into()))?;
        let Some(data) = entries.get(&format!("{folder}data/{}", tensor.key)) else {
            return Err(refused(format!("has no data/{} in the file", tensor.key)));
        };
        let range = within(&tensor, data).map_err(refused)?;
        if found.insert(name.to_string(), (tensor.dtype, tensor.shape, range)).is_some() {
            return Err(refused("stands in it twice".into()));
        }
    }
    Ok(found)
}

/// The bytes of a tensor in the file, within those of its numbers.
fn within(tensor: &Tensor, data: &Range<u64>) -> Result<Range<u64>, String> {
    let shape = &tensor.shape;
    if !tensor.is_one_piece {
        return Err(format!("of shape {shape:?} is not one piece; supported are contiguous ones"));
    }
    let each = tensor.dtype.bitsize() as u64 / 8;
    let count = shape.iter().try_fold(1u64, |n, extent| n.checked_mul(*extent as u64));
    let start = tensor.first.checked_mul(each).and_then(|by| data.start.checked_add(by));
    let end = start.and_then(|start| count?.checked_mul(each)?.checked_add(start));
    match (start, end) {
        (Some(start), Some(end)) if end <= data.end => Ok(start..end),
        _ => Err(format!("has shape {shape:?}, for which data/{} is too short", tensor.key)),
    }
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

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;
    use std::io::Write;

    /// A file with these tensors, as torch.save writes it.
    pub(crate) fn saved(tensors: &BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>) -> Vec<u8> {
        let (mut program, mut entries) = (b"\x80\x02}(".to_vec(), Vec::new());
        let int = |n: usize| [&b"J"[..], &(n as u32).to_le_bytes()].concat();
        for (number, (name, (dtype, shape, data))) in tensors.iter().enumerate() {
            let kind = match dtype {
                Dtype::BF16 => "BFloat16Storage",
                Dtype::F16 => "HalfStorage",
                _ => "FloatStorage",
            };
            let strides = (0..shape.len()).map(|axis| shape[axis + 1..].iter().product());
            let extents: Vec<u8> = shape.iter().flat_map(|n| int(*n)).collect();
            let strides: Vec<u8> = strides.flat_map(int).collect();
            program.extend([text(name), global("torch._utils", "_rebuild_tensor_v2"), b"((".to_vec()].concat());
            let storage = [text("storage"), global("torch", kind), text(&number.to_string()), text("cpu")].concat();
            let sizes = [&b"K\0tQK\0("[..], &extents, b"t(", &strides, b"t\x89"].concat();
            program.extend([storage, sizes, global("collections", "OrderedDict"), b")RtR".to_vec()].concat());
            entries.push((format!("archive/data/{number}"), &data[..]));
        }
        program.extend(b"u.");
        entries.insert(0, ("archive/data.pkl".into(), &program));
        zip(&entries.iter().map(|(name, data)| (&name[..], *data)).collect::<Vec<_>>())
    }

    /// `torch.save({"a.weight": bf16 [2,3], "b": fp32 [4], "c": the last two rows of a bf16 [3,2], "d": fp16 []}, ..)` of torch 2.15.
    const SMALL: &[u8] = include_bytes!("../tests/small.pth");

    fn read_bytes(content: &[u8]) -> Result<BTreeMap<String, Found>, ModelError> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(content).unwrap();
        read(Path::new("small.pth"), &mut file, content.len() as u64)
    }

    fn refusal(content: &[u8]) -> String {
        read_bytes(content).unwrap_err().to_string()
    }

    /// A file of torch.save with this pickle and 8 bytes of numbers.
    fn with_pickle(program: &[u8]) -> Vec<u8> {
        zip(&[("m/data.pkl", program), ("m/data/0", &[0; 8])])
    }

    fn zip(entries: &[(&str, &[u8])]) -> Vec<u8> {
        let (mut file, mut directory) = (Vec::new(), Vec::new());
        for (name, data) in entries {
            let (place, size, named) = (file.len() as u32, data.len() as u32, name.len() as u16);
            let sizes = [size.to_le_bytes(), size.to_le_bytes()].concat();
            file.extend([&b"PK\x03\x04"[..], &[0; 14], &sizes, &named.to_le_bytes(), &[0; 2]].concat());
            file.extend([name.as_bytes(), data].concat());
            directory.extend([&b"PK\x01\x02"[..], &[0; 16], &sizes, &named.to_le_bytes(), &[0; 12]].concat());
            directory.extend([&place.to_le_bytes()[..], name.as_bytes()].concat());
        }
        let (count, first, size) = (entries.len() as u16, file.len() as u32, directory.len() as u32);
        file.extend(directory);
        file.extend([&b"PK\x05\x06"[..], &[0; 4], &count.to_le_bytes(), &count.to_le_bytes()].concat());
        file.extend([&size.to_le_bytes()[..], &first.to_le_bytes(), &[0; 2]].concat());
        file
    }

    /// A text, a small number, a global and a call of a pickle.
    fn text(text: &str) -> Vec<u8> {
        [&b"X"[..], &(text.len() as u32).to_le_bytes(), text.as_bytes()].concat()
    }

    fn global(module: &str, name: &str) -> Vec<u8> {
        format!("c{module}\n{name}\n").into_bytes()
    }

    /// A dictionary with a tensor `x` in numbers of fp32: from `first` on, of this shape and these strides, with what follows.
    fn tensor(first: &[u8], shape: &[u8], strides: &[u8], more: &[u8]) -> Vec<u8> {
        let storage =
            [b"(".to_vec(), text("storage"), global("torch", "FloatStorage"), text("0"), text("cpu")].concat();
        let rebuild = [b"}".to_vec(), text("x"), global("torch._utils", "_rebuild_tensor_v2"), b"(".to_vec()].concat();
        let hooks = [&b"\x89"[..], &global("collections", "OrderedDict"), b")R"].concat();
        [&b"\x80\x02"[..], &rebuild, &storage, b"K\x02tQ", first, shape, strides, &hooks, more, b"tRs."].concat()
    }

    pub(crate) fn tensors_stand_where_torch_has_put_them() {
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

    /// `torch.save(torch.nn.LayerNorm(2).state_dict(), ..)`: an ordered dictionary, which has versions of modules beside it.
    pub(crate) fn state_dictionaries_of_modules_are_read() {
        let found = read_bytes(include_bytes!("../tests/module.pth")).unwrap();
        assert_eq!(found.keys().collect::<Vec<_>>(), ["bias", "weight"]);
        assert!(found.values().all(|(dtype, shape, _)| (*dtype, &shape[..]) == (Dtype::F32, &[2][..])));
    }

    /// Changed or cut anywhere, a file is read or refused.
    pub(crate) fn no_file_makes_a_reader_panic() {
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

    pub(crate) fn what_is_no_part_of_a_tensor_is_refused_by_name() {
        let long = [&b"\x8a\x09"[..], &[1; 9], b"."].concat();
        let deep = [&b")"[..], &[0x85; 100_000], b"."].concat();
        let of_lists = [&b"}"[..], &text("optimizer"), b"}s."].concat();
        for (program, said) in [
            (&b"cposix\nsystem\n."[..], "asks for `posix.system`"),
            (b"ctorch\nLongStorage\n.", "asks for `torch.LongStorage`"),
            (b"cbuiltins\neval\nX\x01\0\0\x001\x85R.", "asks for `builtins.eval`"),
            (b"\x8c\x02os\x8c\x06system\x93.", "code 0x8c"),
            (b"\x80\x04.", "protocol 4"),
            (b"]b.", "code 0x5d"),
            (b"K\x01}b.", "changes something other than a dictionary"),
            (b")K\x01\x86Q.", "refers to something other"),
            (b"}K\x01K\x02s.", "a name that is no text"),
            (b"N.", "no dictionary of tensors"),
            (b"}q\0h\0.", "no dictionary of tensors"),
            (b"R.", "takes what is not there"),
            (b"(", "ends early"),
            (b"X\xff\xff\xff\xff.", "ends early"),
            (&long, "beyond 64 bits"),
            (&deep, "tuples in tuples"),
            (&of_lists, "tensor `optimizer` is no tensor"),
        ] {
            let found = refusal(&with_pickle(program));
            assert!(found.contains(said), "{said}: {found}");
        }
    }

    pub(crate) fn tensors_beyond_their_numbers_are_refused_by_name() {
        let shape =
            |extents: &[u8]| [&[b'('][..], &extents.iter().flat_map(|n| [b'K', *n]).collect::<Vec<_>>(), b"t"].concat();
        let read = |first: &[u8], extents: &[u8], strides: &[u8], more: &[u8]| {
            read_bytes(&with_pickle(&tensor(first, &shape(extents), &shape(strides), more))).map_err(|e| e.to_string())
        };
        assert_eq!(read(b"K\0", &[2, 1], &[1, 9], b"").unwrap()["x"].1, [2, 1]);
        for (first, extents, strides, more, said) in [
            (&b"K\0"[..], &[3][..], &[1][..], &b""[..], "data/0 is too short"),
            (b"K\x02", &[1], &[1], b"", "data/0 is too short"),
            (b"J\xff\xff\xff\xff", &[1], &[1], b"", "begins before its numbers"),
            (b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f", &[1], &[1], b"", "data/0 is too short"),
            (b"K\0", &[1, 2], &[1], b"", "2 axes and 1 strides"),
            (b"K\0", &[2, 2], &[1, 2], b"", "tensor `x` of shape [2, 2] is not one piece"),
            (b"K\0", &[1; 9], &[1; 9], b"", "9 axes"),
            (b"K\0", &[1], &[1], b"}", "with something else"),
        ] {
            let found = read(first, extents, strides, more).unwrap_err();
            assert!(found.contains(said), "{said}: {found}");
        }
        // Sizes whose product leaves 64 bits.
        let large = [&b"("[..], &b"J\xff\xff\xff\x7f".repeat(3), b"t"].concat();
        let strides = [&b"("[..], b"\x8a\x08\x01\0\0\0\xff\xff\xff\x3f", b"J\xff\xff\xff\x7f", b"K\x01t"].concat();
        let found = refusal(&with_pickle(&tensor(b"K\0", &large, &strides, b"")));
        assert!(found.contains("data/0 is too short"), "{found}");
    }

    pub(crate) fn entries_of_a_zip_stand_within_it() {
        let good = with_pickle(&tensor(b"K\0", b"K\x02\x85", b"K\x01\x85", b""));
        assert_eq!(read_bytes(&good).unwrap().len(), 1);
        let of = |name: &[u8]| good.windows(name.len()).rposition(|part| part == name).unwrap();
        let numbers = of(b"m/data/0") - 46;
        let local = good.windows(8).position(|part| part == b"m/data/0").unwrap() - 30;
        let end = of(b"PK\x05\x06");
        let changed = |at: usize, bytes: &[u8]| {
            let mut file = good.clone();
            file[at..at + bytes.len()].copy_from_slice(bytes);
            refusal(&file)
        };
        let large = 0xFFFF_FFF0u32.to_le_bytes();
        for (at, bytes, said) in [
            (numbers + 42, &large[..], "cannot be read"),
            (local, b"PK\x03\x05", "not where it says"),
            (numbers + 20, &[large, large].concat(), "ends in the middle"),
            (numbers + 20, &[9], "compressed"),
            (numbers + 10, &[8], "compressed"),
            (numbers + 28, &[0xFF, 0xFF], "ends in the middle"),
            (end + 10, &[0xFF, 0xFF], "ends in the middle"),
            (end + 12, &large, "at most"),
            (end + 16, &large, "cannot be read"),
            (end, b"PK\x05\x05", "is no zip"),
        ] {
            let found = changed(at, bytes);
            assert!(found.contains(said), "{said}: {found}");
        }
        assert!(refusal(&zip(&[("m/data.pkl", b"}."), ("m/data.pkl", b"}.")])).contains("twice"));
        assert!(refusal(&zip(&[("m/version", b"3")])).contains("no data.pkl"));
        assert!(refusal(&zip(&[("m/data.pkl", b"}."), ("m/byteorder", b"big")])).contains("byte order"));
        assert!(refusal(&zip(&[("m/data.pkl", &vec![b'N'; MOST as usize + 1])])).contains("at most"));
    }
}
