//! Files of a model folder, which may come from anywhere: none is trusted to be a file, to end, or to say a thing once.
//!
//! Symbolic links are followed, out of the folder too: the hub's cache is made of them.

use crate::ModelError;
use serde::de::{self, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::Read;
use std::path::Path;

/// A JSON file that is longer than this is none of a model's.
const MOST_JSON: u64 = 1 << 28;

/// Opens a regular file and tells its length: a pipe is not waited for, and no device is read.
pub(crate) fn open(path: &Path) -> Result<(File, u64), ModelError> {
    let unreadable = |e: std::io::Error| ModelError::file(path, format!("cannot be read: {e}"));
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_NONBLOCK);
    let file = options.open(path).map_err(unreadable)?;
    // The handle is asked, not the path, behind which another file may stand by now.
    let metadata = file.metadata().map_err(unreadable)?;
    if !metadata.is_file() {
        return Err(ModelError::file(path, "is not a regular file"));
    }
    Ok((file, metadata.len()))
}

/// All bytes of a JSON file.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>, ModelError> {
    let (file, length) = open(path)?;
    let too_long = || ModelError::file(path, format!("is longer than {MOST_JSON} bytes, the most that is read"));
    if length > MOST_JSON {
        return Err(too_long());
    }
    let mut bytes = Vec::new();
    let read = file.take(MOST_JSON + 1).read_to_end(&mut bytes);
    read.map_err(|e| ModelError::file(path, format!("cannot be read: {e}")))?;
    if bytes.len() as u64 > MOST_JSON {
        return Err(too_long());
    }
    Ok(bytes)
}

/// The object in a JSON file.
pub(crate) fn read_object(path: &Path) -> Result<Map<String, Value>, ModelError> {
    parse_object(path, &read(path)?)
}

/// The object in a JSON text.
pub(crate) fn parse_object(path: &Path, bytes: &[u8]) -> Result<Map<String, Value>, ModelError> {
    match parse(&without_bare_numbers(bytes)) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(ModelError::file(path, "is not a JSON object")),
        Err(e) => Err(ModelError::file(path, format!("is not JSON: {e}"))),
    }
}

/// Infinities and NaN, which Python writes as words that JSON does not have, in the form that transformers 5 writes.
fn without_bare_numbers(bytes: &[u8]) -> Cow<'_, [u8]> {
    let words = ["-Infinity", "Infinity", "NaN"];
    let (mut text, mut kept, mut at, mut quoted) = (Vec::new(), 0, 0, false);
    while at < bytes.len() {
        match bytes[at] {
            b'\\' if quoted => at += 1,
            b'"' => quoted = !quoted,
            _ if quoted => {}
            _ => {
                if let Some(word) = words.into_iter().find(|word| bytes[at..].starts_with(word.as_bytes())) {
                    text.extend_from_slice(&bytes[kept..at]);
                    text.extend_from_slice(format!("{{\"{FLOAT}\":\"{word}\"}}").as_bytes());
                    at += word.len();
                    kept = at;
                    continue;
                }
            }
        }
        at += 1;
    }
    if kept == 0 {
        return Cow::Borrowed(bytes);
    }
    text.extend_from_slice(&bytes[kept..]);
    Cow::Owned(text)
}

/// The key of an object that stands for a number which JSON does not have.
pub(crate) const FLOAT: &str = "__float__";

/// A JSON value in which no object has a key twice: readers differ in which of the two they take.
pub(crate) fn parse(bytes: &[u8]) -> Result<Value, serde_json::Error> {
    let mut from = serde_json::Deserializer::from_slice(bytes);
    let value = Once.deserialize(&mut from)?;
    from.end()?;
    Ok(value)
}

/// Reads a [`Value`] whose objects have every key once.
struct Once;

impl<'de> DeserializeSeed<'de> for Once {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Value, D::Error> {
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Once {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(value) = from.next_element_seed(Once)? {
            list.push(value);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = from.next_key::<String>()? {
            let value = from.next_value_seed(Once)?;
            if map.contains_key(&key) {
                return Err(de::Error::custom(format_args!("`{key}` stands in it twice; keep one")));
            }
            map.insert(key, value);
        }
        Ok(Value::Object(map))
    }
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn a_key_stands_once() {
        let text = r#"{"a": [1, -2, 2.5, "x\n", null, true, {"b": {}}], "c": {"a": false}}"#;
        assert_eq!(parse(text.as_bytes()).unwrap(), serde_json::from_str::<Value>(text).unwrap());
        for text in [r#"{"a": 1, "a": 1}"#, r#"[{"b": {"a": 1, "c": 2, "a": 1}}]"#, r#"{"a": 1, "\u0061": 2}"#] {
            assert!(parse(text.as_bytes()).unwrap_err().to_string().contains("`a` stands in it twice"), "{text}");
        }
        assert!(parse(b"{} {}").is_err() && parse(b"").is_err());
    }

    pub(crate) fn what_never_ends_is_not_read() {
        let refused = |path: &Path| read(path).unwrap_err().to_string();
        assert!(refused(Path::new("/dev/zero")).ends_with("is not a regular file"));
        let dir = tempfile::tempdir().unwrap();
        let long = dir.path().join("long.json");
        File::create(&long).unwrap().set_len(MOST_JSON + 1).unwrap();
        assert!(refused(&long).contains("is longer than 268435456 bytes"), "{}", refused(&long));
    }
}
