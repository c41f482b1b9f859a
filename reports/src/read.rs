//! Reads a run folder: strict about what is there, tolerant of a run that was cut off.

use samebits_contract::record::{Measure, Record, Run, SCHEMA};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use std::io;
use std::path::{Path, PathBuf};

/// Why a run folder cannot be read or its reports not be written. Each is one line naming the file.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// A file cannot be opened, read or written.
    #[error("{}: {cause}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        cause: io::Error,
    },
    /// `run.json` or `records.jsonl` is not there.
    #[error("{}: missing; name a run folder, which holds run.json and records.jsonl", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// A line does not hold what it should.
    #[error("{}:{line}: {why}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
        /// What is wrong and what to do.
        why: String,
    },
}

/// A run as it was found on disk.
#[derive(Clone, Debug)]
pub struct RunFolder {
    /// `run.json`.
    pub run: Run,
    /// Every whole line of `records.jsonl`, in order.
    pub records: Vec<Record>,
    /// Lines dropped because the write of them was cut off: 0 or 1, and only ever the last.
    pub torn: usize,
}

/// Reads the run folder `dir`.
///
/// A last line without its end is what an interrupted run leaves; it is dropped and counted. Anything else that is not
/// a record of this schema, or not of the contract and row set that `run.json` names, is an error naming file and line.
pub fn read(dir: &Path) -> Result<RunFolder, ReportError> {
    let path = dir.join("run.json");
    let bytes = load(&path)?;
    let run: Run = parse(&bytes).map_err(|(line, why)| ReportError::Line { path, line, why })?;

    let path = dir.join("records.jsonl");
    let bytes = load(&path)?;
    if let Some(sealed) = &run.sealed {
        let found: String = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        if found != *sealed {
            let why = format!("its SHA-256 is {found}; run.json sealed it as {sealed}, so it was changed since");
            return Err(ReportError::Line { path, line: 1, why });
        }
    }
    let mut records = Vec::new();
    let mut torn = 0;
    for (number, line) in bytes.split_inclusive(|&byte| byte == b'\n').enumerate() {
        let failed = |why| ReportError::Line { path: path.clone(), line: number + 1, why };
        let record = match record(line) {
            Ok(record) => record,
            Err(_) if !line.ends_with(b"\n") => {
                torn += 1;
                continue;
            }
            Err(why) => return Err(failed(why)),
        };
        for (name, its, runs) in [("contract", &record.contract, &run.contract), ("row set", &record.rows, &run.rows)] {
            if its != runs {
                return Err(failed(format!(
                    "{name} `{its}` is not `{runs}` of run.json; the folder mixes two runs, so run `check` again"
                )));
            }
        }
        records.push(record);
    }
    Ok(RunFolder { run, records, torn })
}

pub(crate) fn load(path: &Path) -> Result<Vec<u8>, ReportError> {
    let failed = |cause| ReportError::Io { path: path.into(), cause };
    match std::fs::metadata(path) {
        // A device may never come to its end.
        Ok(found) if !found.is_file() => Err(failed(io::Error::other("is no file; it must be a regular file"))),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Err(ReportError::Missing { path: path.into() }),
        _ => std::fs::read(path).map_err(failed),
    }
}

/// Reads JSON of schema [`SCHEMA`]. The schema is looked at first: a newer file may lack or add any field.
fn parse<T: for<'a> Deserialize<'a>>(bytes: &[u8]) -> Result<T, (usize, String)> {
    #[derive(Deserialize)]
    struct Version {
        schema: u32,
    }
    let failed = |e: serde_json::Error| (e.line().max(1), format!("{e}; the file is damaged, so run `check` again"));
    let Version { schema } = serde_json::from_slice(bytes).map_err(failed)?;
    if schema > SCHEMA {
        return Err((1, format!("schema {schema} is newer than {SCHEMA}, the newest this program reads; update it")));
    }
    serde_json::from_slice(bytes).map_err(failed)
}

/// Reads one line of `records.jsonl`; a measure that is not finite is NaN.
///
/// # Errors
/// Why it is no record.
pub fn record(line: &[u8]) -> Result<Record, String> {
    let error = match parse::<Record>(line) {
        Ok(record) => return Ok(record),
        Err((_, why)) => why,
    };
    // JSON has no infinity: a measure that is not finite was written as null. Such a record is just the one to show.
    let Ok(mut value) = serde_json::from_slice::<serde_json::Value>(line) else { return Err(error) };
    let Some(measure) = value.get_mut("measure").and_then(|m| m.as_object_mut()) else { return Err(error) };
    let mut not_finite = Vec::new();
    for (field, number) in measure.iter_mut().filter(|(field, number)| number.is_null() && *field != "samples") {
        not_finite.push(field.clone());
        *number = 0.0.into();
    }
    let bytes = serde_json::to_vec(&value).expect("a JSON value serialises");
    let mut record: Record = parse(&bytes).map_err(|_| error)?;
    if let Some(Measure { samples: _, max_ulp, p99_ulp, correctly_rounded, max_abs, of_bound, spread: _ }) =
        &mut record.measure
    {
        for (field, number) in [
            ("max_ulp", max_ulp),
            ("p99_ulp", p99_ulp),
            ("correctly_rounded", correctly_rounded),
            ("max_abs", max_abs),
            ("of_bound", of_bound),
        ] {
            if not_finite.iter().any(|f| f == field) {
                *number = f64::NAN;
            }
        }
    }
    Ok(record)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic;
    use std::fs;

    fn failed(dir: &Path) -> String {
        let message = read(dir).unwrap_err().to_string();
        assert!(!message.contains('\n'), "one line: {message}");
        message
    }

    #[test]
    fn round_trip() {
        let folder = synthetic::folder();
        let dir = synthetic::written(&folder);
        let found = read(dir.path()).unwrap();
        assert_eq!((found.run, found.records, found.torn), (folder.run, folder.records, 0));
    }

    #[test]
    fn every_cut_of_the_last_line_keeps_the_records_before_it() {
        let folder = synthetic::folder();
        let dir = synthetic::written(&folder);
        let path = dir.path().join("records.jsonl");
        let bytes = fs::read(&path).unwrap();
        let last = bytes[..bytes.len() - 1].iter().rposition(|&b| b == b'\n').unwrap() + 1;
        for end in last..=bytes.len() {
            fs::write(&path, &bytes[..end]).unwrap();
            let found = read(dir.path()).unwrap();
            // The record is whole once its closing brace is there, with or without the end of line.
            let whole = end >= bytes.len() - 1;
            assert_eq!(found.records.len(), folder.records.len() - usize::from(!whole), "cut at {end}");
            assert_eq!(found.torn, usize::from(!whole && end > last), "cut at {end}");
        }
    }

    #[test]
    fn garbage_in_the_middle_names_its_line() {
        let dir = synthetic::written(&synthetic::folder());
        let path = dir.path().join("records.jsonl");
        let text = fs::read_to_string(&path).unwrap();
        for garbage in ["", "{\"schema\":1}", "\u{0}\u{0}", "[]", "{\"schema\":1,\"measure\":{\"max_ulp\":null}}"] {
            let mut lines: Vec<&str> = text.lines().collect();
            lines[2] = garbage;
            fs::write(&path, lines.join("\n") + "\n").unwrap();
            assert!(failed(dir.path()).contains("records.jsonl:3: "), "{garbage:?}");
        }
    }

    #[test]
    fn newer_schema_is_refused_by_name() {
        let dir = synthetic::written(&synthetic::folder());
        let path = dir.path().join("records.jsonl");
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, text.replacen("\"schema\":2,", "\"schema\":3,\"new\":0,", 1)).unwrap();
        assert!(failed(dir.path()).contains("records.jsonl:1: schema 3 is newer than 2"));
        fs::write(dir.path().join("run.json"), "{\"schema\": 7}").unwrap();
        assert!(failed(dir.path()).contains("run.json:1: schema 7 is newer than 2"));
    }

    /// As it was written before a verdict was one word.
    #[test]
    fn runs_of_schema_1_are_read() {
        let folder = synthetic::folder();
        let dir = synthetic::written(&folder);
        let path = dir.path().join("records.jsonl");
        let mut old = String::new();
        for line in fs::read_to_string(&path).unwrap().lines() {
            let mut record: serde_json::Value = serde_json::from_str(line).unwrap();
            let fields = record.as_object_mut().unwrap();
            fields.insert("schema".into(), 1.into());
            let name = fields["verdict"].as_str().unwrap().to_string();
            let held = match (fields.remove("evidence"), fields.remove("reason")) {
                (Some(evidence), None) => serde_json::json!({ name: evidence }),
                (None, Some(reason)) => serde_json::json!({ name: { "reason": reason } }),
                _ => name.into(),
            };
            fields.insert("verdict".into(), held);
            old += &format!("{record}\n");
        }
        assert!(old.contains("\"verdict\":{\"fail\":{") && old.contains("\"verdict\":{\"stale_waiver\":{\"reason\":"));
        fs::write(&path, old).unwrap();
        let mut found = read(dir.path()).unwrap().records;
        assert!(found.iter().all(|record| record.schema == 1));
        found.iter_mut().for_each(|record| record.schema = SCHEMA);
        assert_eq!(found, folder.records);
    }

    #[test]
    fn missing_files_and_mixed_runs_are_named() {
        let dir = synthetic::written(&synthetic::folder());
        let path = dir.path().join("records.jsonl");
        let text = fs::read_to_string(&path).unwrap();
        let folder = synthetic::folder();
        fs::write(&path, text.replace(&folder.run.contract, "0000")).unwrap();
        assert!(failed(dir.path()).contains("records.jsonl:1: contract `0000` is not"));
        fs::remove_file(&path).unwrap();
        assert!(failed(dir.path()).contains("records.jsonl: missing"));
        fs::remove_file(dir.path().join("run.json")).unwrap();
        assert!(failed(dir.path()).contains("run.json: missing"));
    }

    #[test]
    fn a_measure_that_is_not_finite_is_read_as_nan() {
        let mut folder = synthetic::folder();
        let at = folder.records.iter().position(|r| r.measure.is_some()).unwrap();
        folder.records[at].measure.as_mut().unwrap().of_bound = f64::INFINITY;
        let found = read(synthetic::written(&folder).path()).unwrap();
        let measure = found.records[at].measure.as_ref().unwrap();
        assert!(measure.of_bound.is_nan());
        assert_eq!(measure.max_ulp, folder.records[at].measure.as_ref().unwrap().max_ulp);
    }
}
