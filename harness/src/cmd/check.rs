use super::{Place, Select, Strict};
use crate::checkpoints::Checkpoints;
use crate::implementation::external::External;
use crate::implementation::{Implementation, cpu::CpuImplementation, cuda::CudaImplementation};
use crate::judge::{Judge, Selection, Trial, plan};
use crate::machine;
use crate::run::{Journal, carry_out, sha256};
use crate::waivers::stale;
use anyhow::{Context, Result, bail, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use samebits_contract::axis::Machine;
use samebits_contract::record::{Judgment, Plan, Record, Run, SCHEMA};
use samebits_contract::table::{CaseSpec, Contract, Slice};
use samebits_contract::tensor::DType;
use samebits_contract::verdict::Verdict;
use samebits_goldens::Store;
use samebits_ops::{Cpu, Isa};
use samebits_reports::Summary;
use std::collections::BTreeSet;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Holds implementations to the contract and writes a report
///
/// Judges accuracy (against the f64 oracle, within the row set's bounds), invariance (the same raw bits on every
/// setting of every axis), golden outputs (the same raw bits as blessed), arithmetic (what questions give away of it),
/// order (whether a sum has one order for all batches, where golden is not claimed) and coverage (whether the cases ask
/// for every class of number), prints a table, and leaves report.html, summary.md, junit.xml, records.csv and
/// records.jsonl in the report folder. Exit code 0: the contract holds; 1: it does not; 2: the run itself is broken.
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

    /// Goldens to hold answers to, whatever `judgments` says of them [default: goldens/ of the repository, for
    /// implementations that claim the canonical bits]
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

    /// How the caller of this command asks a red judgment again, with {} for its case, judgment and axis
    #[arg(long, hide = true, value_name = "TEXT")]
    called: Option<String>,

    /// The caller was asked for a part of what it can ask
    #[arg(long, hide = true)]
    narrowed: bool,

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

impl Args {
    /// The command that asks a red judgment again: as this one, but for the parts that pick it, into a folder of its own.
    fn again(&self, record: &Record) -> String {
        // One setting shows the failure; memory is a matter of all requests.
        let one = matches!(record.verdict, Verdict::Fail(_) | Verdict::Error { .. })
            && record.axis.as_deref().is_some_and(|axis| axis != "soak");
        let setting = record.setting.as_ref().filter(|_| one).map(|setting| format!("={setting}")).unwrap_or_default();
        let axis = record.axis.as_ref().map(|axis| format!("{axis}{setting}"));
        if let Some(called) = &self.called {
            let list = |name: &str, value: &str| format!("{name}=[{}]", serde_json::Value::from(value));
            let mut picked = vec![list("cases", &record.case), list("judgments", record.judgment.name())];
            picked.extend(axis.map(|axis| list("axes", &axis)));
            return called.replacen("{}", &picked.join(", "), 1);
        }
        let mut words: Vec<String> = ["samebits", "check"].map(String::from).to_vec();
        let mut add = |option: &str, value: String| words.extend([option.to_string(), value]);
        let path = |path: &Path| path.display().to_string();
        self.place.root.iter().for_each(|dir| add("--root", path(dir)));
        self.place.contract.iter().for_each(|dir| add("--contract", path(dir)));
        self.impls.iter().for_each(|file| add("--impls", path(file)));
        add("--impl", record.implementation.clone());
        self.waivers.iter().for_each(|file| add("--waivers", path(file)));
        self.goldens.iter().for_each(|dir| add("--goldens", path(dir)));
        self.rows.iter().for_each(|rows| add("--rows", rows.clone()));
        self.isa.iter().for_each(|isa| add("--isa", isa.to_string()));
        self.strict.forbid.iter().for_each(|counter| add("--forbid", counter.clone()));
        if self.require.iter().any(|name| name.is_empty() || *name == record.implementation) {
            add("--require", record.implementation.clone());
        }
        // How many rows are added depends on the slice.
        if self.select.slice != Slice::Default.name() {
            add("--slice", self.select.slice.clone());
        }
        if self.select.seed != 0 {
            add("--seed", self.select.seed.to_string());
        }
        add("--case", record.case.clone());
        add("--judgment", record.judgment.name().into());
        axis.into_iter().for_each(|axis| add("--axis", axis));
        add("--out", "samebits-again".into());
        super::shell(&words)
    }
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
    let selection = Selection { own_goldens: args.goldens.is_some(), ..args.select.selection(&contract)? };
    let room = machine::of_slice(selection.slice).room;
    let mut judged: Vec<(Box<dyn Implementation>, Machine)> = Vec::new();
    for (place, name) in names.iter().enumerate() {
        ensure!(!names[..place].contains(name), "--impl {name}: given twice");
        // Cases run side by side, so the base answers take one thread each.
        let cpu = args.strict.apply(Cpu::new(isa, 1, usize::MAX)?)?;
        let (implementation, machine) = open(&contract, name, &args.place, cpu, &checkpoints)?;
        let room = contract.implementation(name).and_then(|entry| entry.room).unwrap_or(room);
        judged.push((
            implementation,
            Machine { room, seed: selection.seed, alone: selection.settings.clone(), ..machine },
        ));
    }
    // Whom others must equal; on one thread each, as its own base answers.
    let mut references: Vec<Box<dyn Implementation>> = Vec::new();
    for (implementation, _) in &judged {
        let name = implementation.name();
        let others: BTreeSet<&str> = contract
            .cases(selection.slice)
            .filter(|case| selection.takes(case) && contract.asks(name, case))
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
        ensure!(!mine.is_empty(), "{name}: {}", why_nothing(&contract, name, &selection));
        groups.extend(mine.into_iter().map(|group| (place, group)));
    }
    known_settings(&selection, &judges, &groups)?;
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
            narrowed: !shard.is_empty() && names.iter().any(|name| leaves_out(&contract, name, &selection)),
            implementations: versions.collect(),
            absent: absent.collect(),
            attempts: Vec::new(),
        },
        sealed: None,
        notes: notes(&contract, &names, &selection),
    };
    run.notes.iter().filter(|note| note.contains(": the waiver")).for_each(|note| super::warn(note));
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
    let mut progress = Progress::new(planned, journal.records(), args.resume);
    let again = |mut records: Vec<Record>| {
        let red = records.iter_mut().filter(|record| record.verdict.is_red());
        red.for_each(|record| record.again = Some(args.again(record)));
        records
    };
    let work = |index: usize| again(judges[groups[index].0].group(&groups[index].1));
    carry_out(work, &todo, jobs, |index, records| {
        progress.advance(&records);
        journal.append(index, records)
    })?;
    let mut unneeded = Vec::new();
    // A part cannot know what another part needs, nor a setting what the others do.
    if shard.is_empty() && selection.settings.is_empty() {
        let records: Vec<Record> = journal.records().cloned().collect();
        let of = |judge: &Judge| unneeded_by(args, &contract, &selection, judge, &records);
        unneeded.extend(judges.iter().flat_map(of));
    }
    journal.finish(started.elapsed().as_secs_f64(), &again(unneeded))?;
    progress.finish();
    Ok(())
}

/// Whether all parts of `selection` together leave out some of what its slice asks of `name`.
fn leaves_out(contract: &Contract, name: &str, selection: &Selection) -> bool {
    let trials = |of: &Selection| plan(contract, name, of).iter().map(Vec::len).sum::<usize>();
    let all = Selection { shard: (1, 1), ..selection.clone() };
    !selection.settings.is_empty() || trials(&all) < trials(&selection.whole())
}

/// Waivers that nothing needs. Who calls this program picks what can be asked, and says where less than that was.
fn unneeded_by(
    args: &Args,
    contract: &Contract,
    selection: &Selection,
    judge: &Judge,
    records: &[Record],
) -> Vec<Record> {
    let name = judge.implementation.name();
    let whole = if args.called.is_none() || args.narrowed { selection.whole() } else { selection.clone() };
    stale(contract, judge.rows, name, records, || plan(contract, name, &whole))
}

/// Renders a run folder, prints its table and turns it into an exit code.
pub fn report(dir: &Path) -> Result<ExitCode> {
    let folder = samebits_reports::render(dir)?;
    let table = samebits_reports::table(&folder);
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "{}", table.trim_end())?;
    writeln!(stdout, "report: {}", dir.join("report.html").display())?;
    Ok(ExitCode::from(Summary::of(&folder).exit_code()))
}

fn row_sets(contract: &Contract) -> String {
    contract.row_sets.iter().map(|set| format!("`{}`", set.name)).collect::<Vec<_>>().join(", ")
}

/// A waiver that has no more days than this says so.
const SOON: i64 = 14;

/// What a reader should know beside the records.
fn notes(contract: &Contract, names: &[String], selection: &Selection) -> Vec<String> {
    let mut notes = contract.ending(SOON);
    for name in names {
        let cases = || contract.cases(selection.slice).filter(|case| selection.takes(case));
        let left_out = cases().filter(|case| !contract.asks(name, case)).count();
        if left_out > 0 {
            let asked = asked(contract, name);
            notes.push(format!("{name}: asked what `required` names ({asked}); {left_out} other cases are not"));
        }
    }
    notes
}

/// What the entry of an implementation requires, in words.
fn asked(contract: &Contract, name: &str) -> String {
    let entry = contract.implementation(name).and_then(|entry| entry.required.as_ref());
    let dtypes = |dtypes: &[DType]| match dtypes {
        [] => "any dtype".to_string(),
        some => some.iter().map(|dtype| dtype.name()).collect::<Vec<_>>().join(" or "),
    };
    let combinations = entry.into_iter().flatten().map(|one| {
        let ops = if one.ops.is_empty() { "all ops".to_string() } else { one.ops.join(", ") };
        format!("{ops}: {} -> {}", dtypes(&one.dtypes), dtypes(&one.outs))
    });
    // Entries may differ in their stems alone.
    combinations.collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>().join("; ")
}

/// Which part of the selection, or of the implementation's entry, leaves nothing of the contract.
fn why_nothing(contract: &Contract, name: &str, selection: &Selection) -> String {
    let taken = |slice| contract.cases(slice).filter(|case| selection.takes(case)).collect::<Vec<&CaseSpec>>();
    let cases = taken(selection.slice);
    if cases.is_empty() {
        return match taken(Slice::Exhaustive).iter().map(|case| case.slice).min() {
            Some(slice) => format!(
                "--slice {}: what the selection names runs in slice {slice} and larger ones; add --slice {slice}",
                selection.slice.name(),
                slice = slice.name()
            ),
            None => "no case has the --op, --dtype and --case of the selection together; `samebits list` shows what there is".into(),
        };
    }
    if !cases.iter().any(|case| contract.asks(name, case)) {
        let asked = asked(contract, name);
        return format!("`required` of its entry leaves out all of the selection; it names {asked}");
    }
    let listed = contract.implementation(name).and_then(|entry| entry.judgments.as_ref());
    let names = |judgments: &[Judgment]| judgments.iter().map(|j| j.name()).collect::<Vec<_>>().join(", ");
    if let Some(listed) = listed.filter(|listed| selection.judgments.iter().all(|judgment| !listed.contains(judgment)))
        && !selection.judgments.is_empty()
    {
        let hint = match selection.judgments.contains(&Judgment::Golden) {
            true => "; with --goldens DIR its own goldens are judged whatever stands there",
            false => "",
        };
        let (has, wanted) = (names(listed), names(&selection.judgments));
        return format!("`judgments` of its entry leaves out {wanted}; it has {has}{hint}");
    }
    if selection.judgments == [Judgment::Golden] && selection.seed != 0 {
        return format!("--seed {}: goldens hold the inputs of seed 0 alone", selection.seed);
    }
    if !selection.axes.is_empty() {
        return format!(
            "--axis {}: not asked of these cases; `samebits contract` has the axes of each op",
            selection.axes.join(", ")
        );
    }
    if selection.shard != (1, 1) {
        return format!(
            "--shard {}/{}: this part has no cases; make fewer parts",
            selection.shard.0, selection.shard.1
        );
    }
    "the contract asks none of the selected judgments of these cases; `samebits contract` shows what it asks".into()
}

/// Refuses a setting that none of the cases has. Those of `budget` depend on what the implementation says.
fn known_settings(selection: &Selection, judges: &[Judge], groups: &[(usize, Vec<Trial>)]) -> Result<()> {
    for (name, setting) in selection.settings.iter().filter(|(name, _)| name != "budget") {
        let mut known: Option<Vec<String>> = None;
        let trials = groups.iter().flat_map(|(place, group)| group.iter().map(|trial| (&judges[*place], trial)));
        for (judge, trial) in trials.filter(|(_, trial)| trial.axis.is_some_and(|axis| axis.name == name)) {
            let Ok(case) = judge.recordings.fill(trial.case, selection.seed) else { continue };
            let axis = trial.axis.expect("it was looked at");
            let settings: Vec<String> = (axis.variants)(&case, judge.machine).into_iter().map(|v| v.setting).collect();
            if settings.contains(setting) {
                known = None;
                break;
            }
            known.get_or_insert(settings);
        }
        if let Some(known) = known {
            bail!("--axis {name}={setting}: no such setting here; the first case has {}", known.join(", "));
        }
    }
    Ok(())
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
    fn new<'a>(total: usize, before: impl Iterator<Item = &'a Record>, resumed: bool) -> Progress {
        let (mut done, mut red) = (0, 0);
        for record in before {
            done += 1;
            red += usize::from(record.verdict.is_red());
        }
        if resumed {
            eprintln!("resumed: {done} of {total} records are kept");
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
