//! Carries a plan out on several threads, and keeps what came of it in a run folder.
//!
//! Groups of judgments are handed to whichever thread is free. What a group gave goes into `journal.jsonl` as soon as it is
//! there, whatever its place in the plan, so that a run that is killed loses at most the groups in flight; `records.jsonl`
//! grows in the plan's order. A run that came to its end is sealed: `run.json` has the digest of its records.

use anyhow::{Context, Result, bail, ensure};
use samebits_contract::atomic_write;
use samebits_contract::record::{Attempt, Record, Run};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Seek, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;

/// Does `work` on every number of `todo`, on `workers` threads, and hands each result to `sink` as it comes.
///
/// # Errors
/// The first error of `sink`; the workers then stop after the group in hand.
pub fn carry_out<T: Send>(
    work: impl Fn(usize) -> T + Sync,
    todo: &[usize],
    workers: usize,
    mut sink: impl FnMut(usize, T) -> Result<()>,
) -> Result<()> {
    let next = AtomicUsize::new(0);
    let stop = AtomicBool::new(false);
    let (sender, receiver) = mpsc::channel();
    std::thread::scope(|scope| {
        for _ in 0..workers.clamp(1, todo.len().max(1)) {
            let (sender, next, stop, work) = (sender.clone(), &next, &stop, &work);
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let Some(&index) = todo.get(next.fetch_add(1, Ordering::Relaxed)) else { break };
                    if sender.send((index, work(index))).is_err() {
                        break;
                    }
                }
            });
        }
        drop(sender);
        for (index, result) in receiver {
            if let Err(e) = sink(index, result) {
                stop.store(true, Ordering::Relaxed);
                return Err(e);
            }
        }
        Ok(())
    })
}

/// The records of one group.
struct Done {
    /// Their lines, as they stand in both files.
    lines: Vec<u8>,
    records: Vec<Record>,
}

/// A run folder being written.
pub struct Journal {
    dir: PathBuf,
    run: Run,
    journal: File,
    lines: File,
    /// Groups that are done, by their place in the plan.
    done: BTreeMap<usize, Done>,
    /// Groups that `records.jsonl` has: all before this one.
    written: usize,
}

impl Journal {
    /// Starts a run in `dir`, which is made if need be; the files of an earlier run there are replaced.
    ///
    /// # Errors
    /// When the folder cannot be written, naming it.
    pub fn start(dir: &Path, run: Run) -> Result<Journal> {
        atomic_write::create_folder(dir).with_context(|| format!("--out {}", dir.display()))?;
        let [_, lines, journal] = kept(dir)?;
        // run.json first: killed anywhere below, the folder is no run, and not the old run with other records.
        for old in ["run.json", "report.html", "junit.xml", "summary.md", "records.csv"] {
            let old = dir.join(old);
            atomic_write::remove(&old).with_context(|| old.display().to_string())?;
        }
        let create = |path: &Path| File::create(path).with_context(|| path.display().to_string());
        let (lines, journal) = (create(&lines)?, create(&journal)?);
        let journal = Journal { dir: dir.to_path_buf(), run, journal, lines, done: BTreeMap::new(), written: 0 };
        journal.write_run()?;
        Ok(journal)
    }

    /// Goes on with the run in `dir` where it was interrupted. `names` are those of the judgments of every group, as
    /// [`name_of`] makes them of a record.
    ///
    /// # Errors
    /// When there is no run, when it is complete, when it is another one, and when its journal was changed.
    pub fn resume(dir: &Path, run: Run, names: &[Vec<String>]) -> Result<Journal> {
        kept(dir)?;
        let place = |file: &str| dir.join(file).display().to_string();
        let read = |file: &str| std::fs::read(dir.join(file)).with_context(|| place(file));
        let old: Run = serde_json::from_slice(&read("run.json")?).with_context(|| place("run.json"))?;
        ensure!(!old.complete, "{}: the run is complete; there is nothing to resume", place("run.json"));
        for (what, was, is) in [
            ("tool", &old.tool, &run.tool),
            ("contract", &old.contract, &run.contract),
            ("row set", &old.rows, &run.rows),
            ("part", &old.plan.shard, &run.plan.shard),
            ("plan", &old.plan.digest, &run.plan.digest),
        ] {
            ensure!(
                was == is,
                "{}: the {what} was `{was}` and is `{is}`; start anew without --resume",
                place("run.json")
            );
        }
        ensure!(
            old.plan.implementations == run.plan.implementations,
            "{}: the implementations were {:?} and are {:?}; start anew without --resume",
            place("run.json"),
            old.plan.implementations,
            run.plan.implementations
        );
        let bytes = read("journal.jsonl")?;
        for attempt in &old.plan.attempts {
            let sealed = bytes.get(..attempt.bytes as usize).map(sha256);
            if sealed.as_ref() != Some(&attempt.sha256) {
                bail!(
                    "{}: its first {} bytes were changed after they were sealed",
                    place("journal.jsonl"),
                    attempt.bytes
                );
            }
        }
        let (done, whole) = groups(&bytes, names).with_context(|| place("journal.jsonl"))?;
        let mut journal =
            File::options().write(true).open(dir.join("journal.jsonl")).with_context(|| place("journal.jsonl"))?;
        journal.set_len(whole as u64)?;
        journal.seek(std::io::SeekFrom::End(0))?;
        let mut attempts = old.plan.attempts;
        attempts.push(Attempt { bytes: whole as u64, sha256: sha256(&bytes[..whole]) });
        let run =
            Run { started: old.started, plan: samebits_contract::record::Plan { attempts, ..run.plan.clone() }, ..run };
        let lines = File::create(dir.join("records.jsonl")).with_context(|| place("records.jsonl"))?;
        let mut resumed = Journal { dir: dir.to_path_buf(), run, journal, lines, done, written: 0 };
        resumed.write_run()?;
        resumed.advance()?;
        Ok(resumed)
    }

    /// The groups of a plan of `groups` that are still to be done.
    pub fn todo(&self, groups: usize) -> Vec<usize> {
        (0..groups).filter(|group| !self.done.contains_key(group)).collect()
    }

    /// All records so far, in the plan's order.
    pub fn records(&self) -> impl Iterator<Item = &Record> {
        self.done.values().flat_map(|done| &done.records)
    }

    fn write_run(&self) -> Result<()> {
        let path = self.dir.join("run.json");
        let mut text = serde_json::to_vec_pretty(&self.run)?;
        text.push(b'\n');
        atomic_write::write(&path, &text).with_context(|| path.display().to_string())
    }

    /// Keeps what group number `group` gave; it is on its way to the disk when this returns.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn append(&mut self, group: usize, records: Vec<Record>) -> Result<()> {
        let lines = lines(&records)?;
        let mut entry =
            format!("{{\"group\":{group},\"bytes\":{},\"sha256\":\"{}\"}}\n", lines.len(), sha256(&lines)).into_bytes();
        entry.extend(&lines);
        self.journal.write_all(&entry).with_context(|| self.dir.join("journal.jsonl").display().to_string())?;
        self.done.insert(group, Done { lines, records });
        self.advance()
    }

    /// Writes the records whose place in the plan has come.
    fn advance(&mut self) -> Result<()> {
        while let Some(done) = self.done.get(&self.written) {
            let path = || self.dir.join("records.jsonl").display().to_string();
            self.lines.write_all(&done.lines).with_context(path)?;
            self.written += 1;
        }
        Ok(())
    }

    /// Marks the run as complete after `seconds`, with the records `unplanned` on top of the plan; any other difference
    /// between plan and records stays visible.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn finish(mut self, seconds: f64, unplanned: &[Record]) -> Result<()> {
        let path = self.dir.join("records.jsonl");
        let last = lines(unplanned)?;
        self.lines.write_all(&last).and_then(|()| self.lines.sync_all()).with_context(|| path.display().to_string())?;
        let all: Vec<u8> = self.done.values().flat_map(|done| done.lines.iter().copied()).chain(last).collect();
        self.run.complete = true;
        self.run.seconds = seconds;
        self.run.planned += unplanned.len();
        self.run.sealed = Some(sha256(&all));
        self.write_run()?;
        let journal = self.dir.join("journal.jsonl");
        atomic_write::remove(&journal).with_context(|| journal.display().to_string())
    }
}

/// The files of a run folder that are read again: `run.json`, `records.jsonl`, `journal.jsonl`.
fn kept(dir: &Path) -> Result<[PathBuf; 3]> {
    let regular = |name: &str| {
        let path = dir.join(name);
        atomic_write::regular(&path).with_context(|| path.display().to_string())
    };
    Ok([regular("run.json")?, regular("records.jsonl")?, regular("journal.jsonl")?])
}

fn lines(records: &[Record]) -> Result<Vec<u8>> {
    let mut lines = Vec::new();
    for record in records {
        serde_json::to_writer(&mut lines, record)?;
        lines.push(b'\n');
    }
    Ok(lines)
}

/// SHA-256 in hex.
pub fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What a record judges, unique in a plan.
pub fn name_of(record: &Record) -> String {
    let Record { implementation, case, judgment, axis, .. } = record;
    let axis = axis.as_ref().map_or(String::new(), |axis| format!(":{axis}"));
    format!("{implementation} {case}::{}{axis}", judgment.name())
}

/// The whole groups of a journal, and how many bytes they take; what follows is what a kill cut off.
fn groups(bytes: &[u8], names: &[Vec<String>]) -> Result<(BTreeMap<usize, Done>, usize)> {
    #[derive(serde::Deserialize)]
    struct Head {
        group: usize,
        bytes: usize,
        sha256: String,
    }
    let mut done = BTreeMap::new();
    let mut at = 0;
    while let Some(end) = bytes[at..].iter().position(|&byte| byte == b'\n') {
        let begin = at + end + 1;
        let head: Head =
            serde_json::from_slice(&bytes[at..begin]).with_context(|| format!("byte {at}: not a group"))?;
        let Some(lines) = begin.checked_add(head.bytes).and_then(|end| bytes.get(begin..end)) else { break };
        ensure!(sha256(lines) == head.sha256, "byte {begin}: group {} was changed", head.group);
        let parse = |line: &[u8]| samebits_reports::record(line).map_err(anyhow::Error::msg);
        let records: Vec<Record> = lines.split_inclusive(|&byte| byte == b'\n').map(parse).collect::<Result<_>>()?;
        let found: Vec<String> = records.iter().map(name_of).collect();
        ensure!(names.get(head.group) == Some(&found), "byte {begin}: group {} is not of this plan", head.group);
        at = begin + head.bytes;
        ensure!(
            done.insert(head.group, Done { lines: lines.to_vec(), records }).is_none(),
            "byte {begin}: group {} stands twice",
            head.group
        );
    }
    Ok((done, at))
}

#[cfg(test)]
mod tests {
    use super::*;
    use samebits_contract::record::SCHEMA;

    #[test]
    fn records_that_never_came_stay_visible() {
        let dir = tempfile::tempdir().unwrap();
        let run = Run {
            schema: SCHEMA,
            tool: "test".into(),
            contract_name: "test".into(),
            contract: "0".repeat(64),
            rows: "tight".into(),
            arguments: Vec::new(),
            started: 0,
            complete: false,
            planned: 3,
            seconds: 0.0,
            machine: BTreeMap::new(),
            plan: Default::default(),
            sealed: None,
            notes: Vec::new(),
        };
        Journal::start(dir.path(), run).unwrap().finish(1.0, &[]).unwrap();
        let text = std::fs::read(dir.path().join("run.json")).unwrap();
        let run: Run = serde_json::from_slice(&text).unwrap();
        assert_eq!((run.complete, run.planned), (true, 3), "three planned, though none was written");
    }
}
