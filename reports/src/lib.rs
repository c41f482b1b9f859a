//! What a run says, for people and for CI: a text table, `summary.md`, `junit.xml`, `records.csv` and `report.html`.
//!
//! A run folder holds `run.json` ([`Run`](samebits_contract::record::Run)) and `records.jsonl` (one
//! [`Record`](samebits_contract::record::Record) per line). This crate reads nothing else, so an old run renders
//! without building a kernel. [`Summary`] decides whether a run is green; every format prints that one decision.
#![forbid(unsafe_code)]

mod annotate;
mod compare;
mod csv;
mod describe;
mod errors;
mod grid;
mod html;
mod junit;
mod markdown;
mod narrow;
mod read;
mod summary;
#[cfg(test)]
mod synthetic;
mod text;

pub use annotate::annotations;
pub use compare::{Change, Changes, Kind, changes};
pub use html::escaped;
pub use narrow::notes;
pub use read::{ReportError, RunFolder, read, record};
pub use summary::{Counts, Summary};
pub use text::table;

use samebits_contract::atomic_write;
use std::path::Path;

/// Reads the run folder `dir`, writes `report.html`, `junit.xml`, `summary.md` and `records.csv` into it, and gives what was read.
///
/// Each file appears whole or not at all. Fails where [`read`] fails,
/// and when a file cannot be written.
pub fn render(dir: &Path) -> Result<RunFolder, ReportError> {
    let folder = read(dir)?;
    // Of a hundred thousand records each takes half a second and more.
    std::thread::scope(|scope| {
        let lists = scope.spawn(|| {
            write(&dir.join("records.csv"), &csv::document(&folder))?;
            write(&dir.join("junit.xml"), &junit::document(&folder))
        });
        write(&dir.join("summary.md"), &markdown::document(&folder))?;
        write(&dir.join("report.html"), &html::document(&folder))?;
        lists.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })?;
    Ok(folder)
}

/// Whether `dir` holds a run that did not come to its end.
pub fn interrupted(dir: &Path) -> bool {
    read::load(&dir.join("run.json"))
        .ok()
        .and_then(|bytes| serde_json::from_slice::<samebits_contract::record::Run>(&bytes).ok())
        .is_some_and(|run| !run.complete)
}

fn write(path: &Path, text: &str) -> Result<(), ReportError> {
    atomic_write::write(path, text.as_bytes()).map_err(|cause| ReportError::Io { path: path.into(), cause })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn render_writes_every_file_and_leaves_no_temporary() {
        let dir = synthetic::written(&synthetic::folder());
        let folder = render(dir.path()).unwrap();
        assert_eq!(Summary::of(&folder).exit_code(), 1);
        let mut names: Vec<_> =
            std::fs::read_dir(dir.path()).unwrap().map(|f| f.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        assert_eq!(names, ["junit.xml", "records.csv", "records.jsonl", "report.html", "run.json", "summary.md"]);
        let first: Vec<_> = names.iter().map(|n| std::fs::read(dir.path().join(n)).unwrap()).collect();
        render(dir.path()).unwrap();
        let second: Vec<_> = names.iter().map(|n| std::fs::read(dir.path().join(n)).unwrap()).collect();
        assert_eq!(first, second, "rendering twice gives the same bytes");
    }

    #[test]
    fn an_unreadable_run_leaves_the_old_report() {
        let dir = synthetic::written(&synthetic::folder());
        render(dir.path()).unwrap();
        let old = std::fs::read(dir.path().join("report.html")).unwrap();
        std::fs::write(dir.path().join("run.json"), "{").unwrap();
        assert!(render(dir.path()).is_err());
        assert_eq!(std::fs::read(dir.path().join("report.html")).unwrap(), old);
    }
}
