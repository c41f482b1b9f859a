//! Carries a plan out: workers judge groups side by side, records are written in the plan's order as they come.
//!
//! A run folder holds `run.json` (facts of the run) and `records.jsonl` (one judgment a line). An interrupted run
//! leaves whole lines and `complete: false`.

use crate::judge::{Judge, Trial};
use crate::whole_file;
use anyhow::{Context, Result};
use samebits_contract::record::{Record, Run};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;

/// Judges all groups on `workers` threads and hands every group's records to `sink`, in the plan's order.
///
/// # Errors
/// The first error of `sink`; the workers then stop after the group in hand.
pub fn carry_out(
    judge: &Judge,
    plan: &[Vec<Trial>],
    workers: usize,
    mut sink: impl FnMut(Vec<Record>) -> Result<()>,
) -> Result<()> {
    let next = AtomicUsize::new(0);
    let stop = AtomicBool::new(false);
    let (sender, receiver) = mpsc::channel();
    std::thread::scope(|scope| {
        for _ in 0..workers.clamp(1, plan.len().max(1)) {
            let (sender, next, stop) = (sender.clone(), &next, &stop);
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(group) = plan.get(index) else { break };
                    if sender.send((index, judge.group(group))).is_err() {
                        break;
                    }
                }
            });
        }
        drop(sender);
        let mut waiting = BTreeMap::new();
        let mut written = 0;
        for (index, records) in receiver {
            waiting.insert(index, records);
            while let Some(records) = waiting.remove(&written) {
                if let Err(e) = sink(records) {
                    stop.store(true, Ordering::Relaxed);
                    return Err(e);
                }
                written += 1;
            }
        }
        Ok(())
    })
}

/// A run folder being written.
pub struct Journal {
    dir: PathBuf,
    run: Run,
    lines: BufWriter<File>,
}

impl Journal {
    /// Starts a run in `dir`, which is made if need be; the files of an earlier run there are replaced.
    ///
    /// # Errors
    /// When the folder cannot be written, naming it.
    pub fn start(dir: &Path, run: Run) -> Result<Journal> {
        std::fs::create_dir_all(dir).with_context(|| format!("--out {}", dir.display()))?;
        for old in ["report.html", "junit.xml", "summary.md"] {
            match std::fs::remove_file(dir.join(old)) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                    return Err(e).with_context(|| dir.join(old).display().to_string());
                }
                _ => {}
            }
        }
        let path = dir.join("records.jsonl");
        let lines = File::create(&path).with_context(|| path.display().to_string())?;
        let journal = Journal { dir: dir.to_path_buf(), run, lines: BufWriter::new(lines) };
        journal.write_run()?;
        Ok(journal)
    }

    fn write_run(&self) -> Result<()> {
        let path = self.dir.join("run.json");
        let mut text = serde_json::to_vec_pretty(&self.run)?;
        text.push(b'\n');
        whole_file::write(&path, &text).with_context(|| path.display().to_string())
    }

    /// Appends records; they are on their way to the disk, whole lines at a time, when this returns.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn append(&mut self, records: &[Record]) -> Result<()> {
        let mut lines = Vec::new();
        for record in records {
            serde_json::to_writer(&mut lines, record)?;
            lines.push(b'\n');
        }
        let path = || self.dir.join("records.jsonl").display().to_string();
        self.lines.write_all(&lines).and_then(|()| self.lines.flush()).with_context(path)?;
        Ok(())
    }

    /// Marks the run as complete after `seconds`. `unplanned` records came on top of the plan; any other difference
    /// between plan and records stays visible.
    ///
    /// # Errors
    /// When `run.json` cannot be written.
    pub fn finish(mut self, seconds: f64, unplanned: usize) -> Result<()> {
        self.run.complete = true;
        self.run.seconds = seconds;
        self.run.planned += unplanned;
        self.write_run()
    }
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
        };
        Journal::start(dir.path(), run).unwrap().finish(1.0, 1).unwrap();
        let text = std::fs::read(dir.path().join("run.json")).unwrap();
        let run: Run = serde_json::from_slice(&text).unwrap();
        assert_eq!((run.complete, run.planned), (true, 4), "three planned and one on top, though none was written");
    }
}
