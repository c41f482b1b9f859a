use super::{Place, Select, Strict};
use anyhow::{Result, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use samebits_contract::record::{Record, Run, SCHEMA};
use samebits_contract::table::Contract;
use samebits_harness::implementation::{Implementation, cpu::CpuImplementation};
use samebits_harness::judge::{Judge, plan};
use samebits_harness::machine;
use samebits_harness::run::{Journal, carry_out};
use samebits_ops::{Cpu, Isa};
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Holds the built-in CPU ops to the contract and writes a report
///
/// Judges accuracy (against the f64 oracle, within the row set's bounds), invariance (the same raw bits on every
/// setting of every axis) and golden outputs (the same raw bits as blessed), prints a table, and leaves report.html,
/// records.jsonl, junit.xml and summary.md in the report folder. Exit code 0: the contract holds; 1: it does not;
/// 2: the run itself is broken.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    select: Select,

    #[command(flatten)]
    place: Place,

    /// Row set that bounds accuracy [default: the contract's first, `tight`]
    #[arg(long, value_name = "NAME")]
    rows: Option<String>,

    /// Folder for the report; files of an earlier report there are replaced
    #[arg(long, value_name = "DIR", default_value = "samebits-report")]
    out: PathBuf,

    #[command(flatten)]
    strict: Strict,

    /// Instruction set the base answers run on [default: the best of this machine]; the isa axis varies it
    #[arg(long)]
    isa: Option<Isa>,

    /// Cases judged side by side [default: all cores]; the threads axis varies the threads inside an op
    #[arg(long, value_name = "N")]
    jobs: Option<usize>,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let started = Instant::now();
    let contract = args.place.contract()?;
    let rows = args.rows.as_deref().unwrap_or(contract.default_rows());
    ensure!(contract.row_set(rows).is_some(), "--rows {rows}: the contract has {}", row_sets(&contract));
    let isa = args.isa.unwrap_or(Isa::best());
    // Cases run side by side, so the base answers take one thread each.
    let checkpoints = args.place.checkpoints();
    let implementation =
        CpuImplementation::new(args.strict.apply(Cpu::new(isa, 1, usize::MAX)?)?).with_checkpoints(checkpoints.clone());
    let store = args.place.goldens()?;
    let selection = args.select.selection(&contract)?;
    let plan = plan(&contract, implementation.name(), &selection);
    let planned: usize = plan.iter().map(Vec::len).sum();
    ensure!(planned > 0, "the selection matches nothing of the contract; `samebits list` shows what there is");

    let machine = machine::axes(isa);
    let judge = Judge {
        contract: &contract,
        rows,
        implementation: &implementation,
        goldens: store.as_ref(),
        checkpoints: &checkpoints,
        machine: &machine,
    };
    let run = Run {
        schema: SCHEMA,
        tool: format!("samebits {}", env!("CARGO_PKG_VERSION")),
        contract_name: format!("{} {}", contract.name, contract.version),
        contract: contract.digest().to_string(),
        rows: rows.to_string(),
        arguments: std::env::args().skip(1).collect(),
        started: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
        complete: false,
        planned,
        seconds: 0.0,
        machine: machine::facts(),
    };
    let mut journal = Journal::start(&args.out, run)?;
    let jobs = args.jobs.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, |n| n.get()));
    let mut progress = Progress::new(planned);
    let mut records: Vec<Record> = Vec::with_capacity(planned);
    carry_out(&judge, &plan, jobs, |group| {
        journal.append(&group)?;
        progress.advance(&group);
        records.extend(group);
        Ok(())
    })?;
    let stale = judge.stale_waivers(&plan, &records);
    journal.append(&stale)?;
    journal.finish(started.elapsed().as_secs_f64(), stale.len())?;
    progress.finish();
    report(&args.out)
}

/// Renders a run folder, prints its table and turns it into an exit code.
pub fn report(dir: &Path) -> Result<ExitCode> {
    let summary = samebits_reports::render(dir)?;
    let table = samebits_reports::table(&samebits_reports::read(dir)?);
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "{}", table.trim_end())?;
    writeln!(stdout, "report: {}", dir.join("report.html").display())?;
    Ok(ExitCode::from(summary.exit_code()))
}

fn row_sets(contract: &Contract) -> String {
    contract.row_sets.iter().map(|set| format!("`{}`", set.name)).collect::<Vec<_>>().join(", ")
}

/// A bar with the time to come on a terminal, a line every few seconds elsewhere.
struct Progress {
    bar: Option<ProgressBar>,
    total: usize,
    done: usize,
    red: usize,
    said: Instant,
}

impl Progress {
    fn new(total: usize) -> Progress {
        let bar = std::io::stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template("{bar:30} {pos}/{len} judgments, {eta} left  {wide_msg}")
                .expect("the template is well formed");
            let bar = ProgressBar::new(total as u64).with_style(style);
            bar.enable_steady_tick(Duration::from_millis(200));
            bar
        });
        if bar.is_none() {
            eprintln!("checking {total} judgments");
        }
        Progress { bar, total, done: 0, red: 0, said: Instant::now() }
    }

    fn advance(&mut self, records: &[Record]) {
        self.done += records.len();
        self.red += records.iter().filter(|record| record.verdict.is_red()).count();
        let case = records.last().map_or("", |record| record.case.as_str());
        match &self.bar {
            Some(bar) => {
                bar.set_position(self.done as u64);
                bar.set_message(format!("{} red  {case}", self.red));
            }
            None if self.said.elapsed() > Duration::from_secs(5) => {
                self.said = Instant::now();
                eprintln!("{}/{} judgments, {} red, at {case}", self.done, self.total, self.red);
            }
            None => {}
        }
    }

    fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
