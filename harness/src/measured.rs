//! What a comparison leaves: `measure.json` for programs, `measure.md` for pages, a table for the terminal.

use crate::ceilings::Ceiling;
use crate::pairs::{Limit, Row};
use anyhow::{Context, Result};
use samebits_contract::atomic_write;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

/// The form of `measure.json`, described in docs/METHOD.md.
pub const SCHEMA: u32 = 1;

/// A whole comparison.
#[derive(Serialize)]
pub struct Measured {
    /// [`SCHEMA`].
    pub schema: u32,
    /// This program and its version.
    pub tool: String,
    /// Its command line.
    pub arguments: Vec<String>,
    /// Seconds since 1970 when it began.
    pub started: u64,
    /// How many it took, until now.
    pub seconds: f64,
    /// Whether every row is there.
    pub complete: bool,
    /// Facts of the machine.
    pub machine: BTreeMap<String, String>,
    /// How many other programs ran in the minute before; `None` where the system does not tell.
    pub load: Option<f64>,
    /// Pairs per row.
    pub pairs: usize,
    /// Timed runs per answer.
    pub repeat: usize,
    /// The instruction set that `--isa` holds all sides to; `None` without it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub held_to: Option<&'static str>,
    /// What was timed: ours first.
    pub programs: Vec<Program>,
    /// The machine's limits.
    pub limits: Vec<Limit>,
    /// The rows, by threads and then in the order of the table.
    pub rows: Vec<Row>,
}

/// A program that was timed.
#[derive(Serialize)]
pub struct Program {
    /// The name in `rows`.
    pub name: String,
    /// How it was started.
    pub command: String,
    /// What was set in its environment to hold it to an instruction set.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// What it says of itself.
    pub version: String,
}

impl Measured {
    /// Writes `measure.json` and `measure.md` into `dir`, each whole or not at all.
    ///
    /// # Errors
    /// When the folder cannot be written.
    pub fn write(&self, dir: &Path) -> Result<()> {
        let json = serde_json::to_string_pretty(self)? + "\n";
        for (name, text) in [("measure.json", json), ("measure.md", self.markdown())] {
            let path = dir.join(name);
            atomic_write::write(&path, text.as_bytes()).with_context(|| path.display().to_string())?;
        }
        Ok(())
    }

    /// Targets, and how many of them were met.
    pub fn targets(&self) -> (usize, usize) {
        let targets = self.rows.iter().flat_map(|row| &row.targets);
        (targets.clone().count(), targets.filter(|target| target.met).count())
    }

    /// The rows that broke: workload, threads, program, reason.
    pub fn broken(&self) -> Vec<String> {
        let broken = self.rows.iter().filter_map(|row| {
            let failure = row.error.as_ref()?;
            Some(format!("{} on {}: {}: {}", row.workload.name, threads(row.threads), failure.side, failure.reason))
        });
        broken.collect()
    }

    /// The tables for a terminal.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for (count, rows) in self.blocks() {
            let table = [vec![self.head()], rows.iter().map(|row| self.cells(row)).collect()].concat();
            let columns = table[0].len();
            // What stands alone behind a name does not widen the columns.
            let width = |column: usize| {
                let rows = table.iter().filter(|row| column == 0 || row.len() == columns);
                rows.map(|row| row[column].chars().count()).max().unwrap_or(0)
            };
            let _ = writeln!(text, "{}", threads(count));
            for row in &table {
                let mut line = String::new();
                for (column, cell) in row.iter().enumerate() {
                    let width = width(column);
                    let _ = match column {
                        _ if column + 1 == row.len() => write!(line, "  {cell}"),
                        0 => write!(line, "  {cell:width$}"),
                        _ => write!(line, "  {cell:>width$}"),
                    };
                }
                let _ = writeln!(text, "{}", line.trim_end());
            }
            text.push('\n');
        }
        let notes = self.notes().into_iter();
        text + &notes.fold(String::new(), |text, line| text + &line + "\n") + &self.verdict()
    }

    /// One line: how many targets are met, and which rows are not.
    fn verdict(&self) -> String {
        let (all, met) = self.targets();
        let broken = self.broken().len();
        let broken = if broken == 0 { String::new() } else { format!("; {broken} rows could not be measured") };
        format!("{met} of {all} targets met{broken}\n")
    }

    /// What is said beside the tables.
    fn notes(&self) -> Vec<String> {
        self.held_lines().into_iter().chain(self.limit_lines()).chain(self.warning()).collect()
    }

    /// Who is held to the instruction set of `--isa` and by what, and who is not: the ratio to such a program says
    /// nothing of the instruction set.
    fn held_lines(&self) -> Vec<String> {
        let Some(isa) = self.held_to else { return Vec::new() };
        let (held, free): (Vec<&Program>, Vec<&Program>) =
            self.programs.iter().skip(1).partition(|peer| !peer.env.is_empty());
        let held = held.iter().map(|peer| {
            let env: Vec<String> = peer.env.iter().map(|(name, value)| format!("{name}={value}")).collect();
            format!(", {} ({})", peer.name, env.join(", "))
        });
        let mut lines = vec![format!("held to {isa}: samebits (--isa {isa}){}", held.collect::<String>())];
        let free = free.iter().map(|Program { name, .. }| {
            format!("{name} is not held to {isa}: the table has no isa.{isa} in [peer.{name}]")
        });
        lines.extend(free);
        lines
    }

    /// Said of a machine that was not idle.
    fn warning(&self) -> Option<String> {
        let load = self.load.filter(|load| *load >= 0.5)?;
        Some(format!("others were at work (load {load:.1} before the run): these times are not to be kept"))
    }

    /// The page.
    fn markdown(&self) -> String {
        let mut text = String::from("# Measured\n\n");
        let programs = self.programs.iter().map(|program| program.version.as_str());
        let fact = |name: &str| self.machine.get(name).map_or("", String::as_str);
        let _ = writeln!(
            text,
            "{}; {}, {} cores ({}), {}, {}. {} pairs, at least {} timed runs each. {}",
            programs.collect::<Vec<_>>().join(" beside "),
            fact("cpu"),
            fact("cores"),
            fact("isas"),
            fact("os"),
            fact("rustc"),
            self.pairs,
            self.repeat,
            if self.complete { "" } else { "**Not complete.**" }
        );
        let _ = writeln!(text, "\n{}", self.notes().join("  \n"));
        for (count, rows) in self.blocks() {
            let _ = writeln!(text, "\n## {}\n\n| {} |", capital(&threads(count)), self.head().join(" | "));
            let _ = writeln!(text, "|{}", "---|".repeat(self.head().len()));
            for row in rows {
                let mut cells = self.cells(row);
                // What stands alone takes the last column.
                let last = cells.pop().unwrap_or_default();
                cells.resize(self.head().len() - 1, String::new());
                cells.push(last);
                let cells: Vec<String> = cells.iter().map(|cell| cell.replace('|', "\\|")).collect();
                let _ = writeln!(text, "| {} |", cells.join(" | "));
            }
        }
        text + "\n" + &self.verdict()
    }

    /// The rows by threads.
    fn blocks(&self) -> Vec<(usize, &[Row])> {
        self.rows.chunk_by(|a, b| a.threads == b.threads).map(|rows| (rows[0].threads, rows)).collect()
    }

    fn peers(&self) -> impl Iterator<Item = &str> {
        self.programs.iter().skip(1).map(|program| program.name.as_str())
    }

    fn head(&self) -> Vec<String> {
        let mut head = vec!["workload".to_string(), "samebits".into()];
        for peer in self.peers() {
            head.extend([peer.to_string(), format!("{peer}/samebits")]);
        }
        head.extend(["rate", "of the limit", "asked"].map(String::from));
        head
    }

    /// The cells of a row: as many as [`Measured::head`] has, or the name and what went wrong.
    fn cells(&self, row: &Row) -> Vec<String> {
        let name = row.workload.name.clone();
        if let Some(failure) = &row.error {
            return vec![name, format!("ERROR {}: {}", failure.side, failure.reason)];
        }
        let Some(ours) = &row.ours else {
            // The first part of a reason says what; the rest, how to mend it, stands in the records.
            let reason =
                row.unsupported.values().next().map_or("", |reason| reason.split("; ").next().unwrap_or(reason));
            let missed = if row.targets.is_empty() { "" } else { "; its targets are MISSED" };
            return vec![name, format!("unsupported: {reason}{missed}")];
        };
        let mut cells = vec![name, duration(ours.median)];
        for peer in self.peers() {
            cells.extend(match row.peers.get(peer) {
                Some(beside) => {
                    let [median, least, most] = beside.ratio;
                    [duration(beside.times.median), format!("{median:.2} ({least:.2} to {most:.2})")]
                }
                None => ["unsupported".into(), String::new()],
            });
        }
        let (work, unit) = match row.workload.share_of {
            Some(Ceiling::Peak) => (row.operations, "GFLOP/s"),
            _ => (row.bytes, "GB/s"),
        };
        cells.push(format!("{:.1} {unit}", work / ours.median / 1e9));
        cells.push(match (row.share, row.workload.share_of) {
            (Some([median, ..]), Some(of)) => format!("{:.0}% of {}", 100.0 * median, of.name()),
            _ => String::new(),
        });
        let asked = row.targets.iter().map(|target| {
            let got = match target.got {
                Some(got) if target.wanted.starts_with("memory") => format!(" ({:.1}%)", 100.0 * got),
                _ => String::new(),
            };
            format!("{}{got} {}", target.wanted, if target.met { "met" } else { "MISSED" })
        });
        cells.push(asked.collect::<Vec<_>>().join(", "));
        cells
    }

    /// The machine's limits in words, a line for each number of threads.
    fn limit_lines(&self) -> Vec<String> {
        let mut lines: BTreeMap<usize, Vec<String>> = BTreeMap::new();
        for limit in &self.limits {
            let [median, least, most] = limit.per_second.map(|rate| rate / 1e9);
            let (name, unit) = match limit.limit {
                Ceiling::Peak => (format!("peak {}", limit.dtype), "GFLOP/s"),
                _ => (limit.limit.name().to_string(), "GB/s"),
            };
            let line = format!("{name} {median:.1} {unit} ({least:.1} to {most:.1})");
            lines.entry(limit.threads).or_default().push(line);
        }
        lines
            .into_iter()
            .map(|(count, limits)| format!("limits on {}: {}", threads(count), limits.join(", ")))
            .collect()
    }
}

fn threads(count: usize) -> String {
    format!("{count} thread{}", if count == 1 { "" } else { "s" })
}

fn capital(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or(String::new(), |first| first.to_uppercase().chain(chars).collect())
}

fn duration(seconds: f64) -> String {
    if seconds < 1e-4 { format!("{:.2} us", 1e6 * seconds) } else { format!("{:.3} ms", 1e3 * seconds) }
}
