use super::{Place, Select, Strict};
use crate::checkpoints::Checkpoints;
use crate::implementation::external::External;
use crate::implementation::{Implementation, cpu::CpuImplementation, cuda::CudaImplementation};
use crate::judge::{Judge, Trial, plan, stale_waivers};
use crate::machine;
use crate::run::{Journal, carry_out, sha256};
use anyhow::{Context, Result, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use samebits_contract::axis::Machine;
use samebits_contract::record::{Plan, Record, Run, SCHEMA};
use samebits_contract::table::Contract;
use samebits_goldens::Store;
use samebits_ops::{Cpu, Isa};
use std::collections::BTreeSet;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Holds implementations to the contract and writes a report
///
/// Judges accuracy (against the f64 oracle, within the row set's bounds), invariance (the same raw bits on every
/// setting of every axis), golden outputs (the same raw bits as blessed), arithmetic (what questions give away of it)
/// and coverage (whether the cases ask for every class of number), prints a table, and leaves report.html,
/// records.jsonl, junit.xml and summary.md in the report folder. Exit code 0: the contract holds; 1: it does not; 2:
/// the run itself is broken.
#[derive(clap::Args, Clone)]
pub struct Args {
    #[command(flatten)]
    select: Select,

    #[command(flatten)]
    place: Place,

    /// Whom to judge, by its name in impls.toml; may be given again [default: ours/cpu]
    #[arg(long = "impl", value_name = "NAME")]
    implementation: Vec<String>,

    /// A list of further implementations, written as contract/impls.toml; may be given again
    #[arg(long, value_name = "FILE")]
    impls: Vec<PathBuf>,

    /// Failures that are known and allowed until a day, each with reason, owner and expiry; may be given again
    #[arg(long, value_name = "FILE")]
    waivers: Vec<PathBuf>,

    /// Goldens to hold answers to [default: goldens/ of the repository]
    #[arg(long, value_name = "DIR")]
    goldens: Option<PathBuf>,

    /// Whatever this judged implementation does not offer of the required dtypes is red, also where its entry asks for
    /// less, and also for want of a device; without a name, all that are judged; may be given again
    #[arg(long, value_name = "NAME", num_args = 0..=1, default_missing_value = "", action = clap::ArgAction::Append)]
    require: Vec<String>,

    /// Row set that bounds accuracy [default: the contract's first, `tight`]
    #[arg(long, value_name = "NAME")]
    rows: Option<String>,

    /// Folder for the report; files of an earlier report there are replaced
    #[arg(long, value_name = "DIR", default_value = "samebits-report")]
    pub out: PathBuf,

    /// Go on with the interrupted run in the report folder
    #[arg(long)]
    pub resume: bool,

    #[command(flatten)]
    strict: Strict,

    /// Instruction set the base answers of ours/cpu run on [default: the best of this machine]; the isa axis varies it
    #[arg(long)]
    isa: Option<Isa>,

    /// Cases judged side by side [default: all cores]; the threads axis varies the threads inside an op
    #[arg(long, value_name = "N")]
    jobs: Option<usize>,
}

/// The implementation called `name` and what the axes can vary for it.
pub fn open(
    contract: &Contract,
    name: &str,
    place: &Place,
    cpu: Cpu,
    checkpoints: &Arc<Checkpoints>,
) -> Result<(Box<dyn Implementation>, Machine)> {
    let known = || contract.implementations.iter().map(|i| i.name.as_str()).collect::<Vec<_>>().join(", ");
    let entry = contract.implementation(name).with_context(|| format!("--impl {name}: use one of {}", known()))?;
    if entry.command.is_some() {
        let external = External::new(entry, place.root().as_deref()).map_err(anyhow::Error::msg)?;
        return Ok((Box::new(external), machine::axes_of(entry)));
    }
    if name == "ours/cuda" {
        let ours = CudaImplementation::first_gpu(cpu, usize::MAX).with_checkpoints(checkpoints.clone());
        return Ok((Box::new(ours), machine::axes_of(entry)));
    }
    ensure!(name == "ours/cpu", "--impl {name}: it has no `command` and is not built into this program");
    let axes = machine::axes(cpu.isa());
    let ours = CpuImplementation::new(cpu).with_checkpoints(checkpoints.clone());
    let ours = ours.with_program(crate::command::program().context("this program's own path")?);
    Ok((Box::new(ours), Machine { layouts: entry.layouts.clone(), ..axes }))
}

pub fn run(args: &Args) -> Result<ExitCode> {
    judge(args)?;
    report(&args.out)
}

/// Carries the run out, to the folder `args.out`.
pub fn judge(args: &Args) -> Result<()> {
    let started = Instant::now();
    let mut contract = args.place.contract()?;
    for list in &args.impls {
        contract.add_implementations(list)?;
    }
    for list in &args.waivers {
        contract.add_waivers(list)?;
    }
    let names = if args.implementation.is_empty() { vec!["ours/cpu".to_string()] } else { args.implementation.clone() };
    for required in &args.require {
        let known = required.is_empty() || names.contains(required);
        ensure!(known, "--require {required}: it is not judged; name it with --impl, or one of {}", names.join(", "));
        let named = contract.implementations.iter_mut().filter(|entry| required.is_empty() || entry.name == *required);
        named.for_each(|entry| entry.required = None);
    }
    let contract = contract;
    let rows = args.rows.as_deref().unwrap_or(contract.default_rows());
    ensure!(contract.row_set(rows).is_some(), "--rows {rows}: the contract has {}", row_sets(&contract));
    let isa = args.isa.unwrap_or(Isa::best());
    let checkpoints = args.place.checkpoints();
    let store = match &args.goldens {
        Some(dir) => Some(Store::open(dir)?),
        None => args.place.goldens()?,
    };
    let selection = args.select.selection(&contract)?;
    let room = machine::of_slice(selection.slice).room;
    let mut judged: Vec<(Box<dyn Implementation>, Machine)> = Vec::new();
    for (place, name) in names.iter().enumerate() {
        ensure!(!names[..place].contains(name), "--impl {name}: given twice");
        // Cases run side by side, so the base answers take one thread each.
        let cpu = args.strict.apply(Cpu::new(isa, 1, usize::MAX)?)?;
        let (implementation, machine) = open(&contract, name, &args.place, cpu, &checkpoints)?;
        let room = contract.implementation(name).and_then(|entry| entry.room).unwrap_or(room);
        judged.push((implementation, Machine { room, seed: selection.seed, ..machine }));
    }
    // Whom others must equal; on one thread each, as its own base answers.
    let mut references: Vec<Box<dyn Implementation>> = Vec::new();
    for (implementation, _) in &judged {
        let name = implementation.name();
        let others: BTreeSet<&str> = contract
            .cases(selection.slice)
            .filter(|case| selection.takes(case))
            .filter_map(|case| contract.same_as(name, case))
            .collect();
        for other in others {
            if references.iter().all(|known| known.name() != other) {
                references.push(open(&contract, other, &args.place, Cpu::new(isa, 1, usize::MAX)?, &checkpoints)?.0);
            }
        }
    }
    let judges: Vec<Judge> = judged
        .iter()
        .map(|(implementation, machine)| Judge {
            contract: &contract,
            rows,
            implementation: implementation.as_ref(),
            goldens: store.as_ref(),
            references: references.iter().map(Box::as_ref).collect(),
            recordings: checkpoints.recordings(),
            machine,
        })
        .collect();

    // What all parts together ask, so that parts of one run know each other.
    let mut whole = String::new();
    let mut groups: Vec<(usize, Vec<Trial>)> = Vec::new();
    for (place, judge) in judges.iter().enumerate() {
        let name = judge.implementation.name();
        let all = crate::judge::Selection { shard: (1, 1), ..selection.clone() };
        whole += &format!("{name} {:?}\n", judge.machine);
        plan(&contract, name, &all).iter().flatten().for_each(|trial| whole += &format!("{}\n", trial.name()));
        let mine = plan(&contract, name, &selection);
        ensure!(
            !mine.is_empty(),
            "{name}: the selection matches nothing of the contract; `samebits list` shows what there is"
        );
        groups.extend(mine.into_iter().map(|group| (place, group)));
    }
    let planned: usize = groups.iter().map(|(_, group)| group.len()).sum();
    let versions = judges.iter().map(|j| (j.implementation.name().to_string(), j.implementation.version().to_string()));
    let nobody_requires = |name: &str| {
        let empty =
            |entry: &samebits_contract::table::Implementation| entry.required.as_ref().is_some_and(Vec::is_empty);
        contract.implementation(name).is_some_and(empty)
    };
    let absent = judges.iter().filter_map(|j| {
        let name = j.implementation.name();
        j.implementation.absent().filter(|_| nobody_requires(name)).map(|why| (name.to_string(), why.to_string()))
    });
    let shard =
        if selection.shard == (1, 1) { String::new() } else { format!("{}/{}", selection.shard.0, selection.shard.1) };
    let run = Run {
        schema: SCHEMA,
        tool: format!("samebits {}", env!("CARGO_PKG_VERSION")),
        contract_name: format!("{} {}", contract.name, contract.version),
        contract: contract.digest().to_string(),
        rows: rows.to_string(),
        arguments: crate::command::arguments(),
        started: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
        complete: false,
        planned,
        seconds: 0.0,
        machine: machine::facts(),
        plan: Plan {
            digest: sha256(whole.as_bytes()),
            seed: selection.seed,
            shard: shard.clone(),
            implementations: versions.collect(),
            absent: absent.collect(),
            attempts: Vec::new(),
        },
        sealed: None,
    };
    let mut journal = match args.resume {
        false => Journal::start(&args.out, run)?,
        true => {
            let name =
                |place: usize, trial: &Trial| format!("{} {}", judges[place].implementation.name(), trial.name());
            let names = groups.iter().map(|(place, group)| group.iter().map(|trial| name(*place, trial)).collect());
            Journal::resume(&args.out, run, &names.collect::<Vec<_>>())?
        }
    };
    let jobs = args.jobs.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, |n| n.get()));
    let todo = journal.todo(groups.len());
    let mut progress = Progress::new(planned, journal.records());
    let work = |index: usize| judges[groups[index].0].group(&groups[index].1);
    carry_out(work, &todo, jobs, |index, records| {
        progress.advance(&records);
        journal.append(index, records)
    })?;
    let mut stale = Vec::new();
    // A part cannot know what another part needs.
    if shard.is_empty() {
        let records: Vec<Record> = journal.records().cloned().collect();
        for judge in &judges {
            stale.extend(stale_waivers(&contract, rows, judge.implementation.name(), &records));
        }
    }
    journal.finish(started.elapsed().as_secs_f64(), &stale)?;
    progress.finish();
    Ok(())
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
    /// When this attempt began, and what was done by then.
    since: (Instant, usize),
}

impl Progress {
    fn new<'a>(total: usize, before: impl Iterator<Item = &'a Record>) -> Progress {
        let (mut done, mut red) = (0, 0);
        for record in before {
            done += 1;
            red += usize::from(record.verdict.is_red());
        }
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
        Progress { bar, total, done, red, said: Instant::now(), since: (Instant::now(), done) }
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
                let (since, before) = self.since;
                let rate = (self.done - before) as f64 / since.elapsed().as_secs_f64();
                let left = Duration::from_secs(((self.total.saturating_sub(self.done)) as f64 / rate) as u64);
                eprintln!("{}/{} judgments, {} red, {left:?} left, at {case}", self.done, self.total, self.red);
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
