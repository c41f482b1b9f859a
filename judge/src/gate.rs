//! The gate for Rust functions: one builder, and what it leads to.

use crate::function::{Call, Function};
use crate::judge::{Judge, Selection, Trial, hold, plan};
use crate::machine;
use crate::recordings::Recordings;
use crate::run::{Journal, carry_out};
use crate::waivers;
use samebits_contract::axis::{self, Machine};
use samebits_contract::case::Case;
use samebits_contract::record::{Judgment, Record, Run, SCHEMA};
use samebits_contract::spec::{self, Class};
use samebits_contract::table::{CaseSpec, Contract, Implementation, Slice};
use samebits_contract::tensor::DType;
use samebits_contract::verdict::Verdict;
use samebits_reports::{RunFolder, Summary};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Axes that a function in this process cannot be asked for.
const NOT_ASKED: [&str; 5] = ["isa", "layout", "budget", "restart", "soak"];

/// A function that is held to the contract of one op: what of it is asked, and how.
///
/// ```
/// use samebits_judge::Gate;
///
/// let scale = |x: &[f32], factor: f32, y: &mut [f32]| y.iter_mut().zip(x).for_each(|(y, x)| *y = x * factor);
/// let gate = Gate::new("mine", "scale", move |call| {
///     scale(call.input("x"), call.float("factor") as f32, call.output("y"));
/// });
/// println!("{}", gate.report());
/// ```
pub struct Gate {
    function: Function,
    dtypes: Vec<DType>,
    outs: Option<Vec<DType>>,
    slice: Slice,
    cases: Vec<String>,
    waivers: Vec<PathBuf>,
    out: Option<PathBuf>,
}

impl Gate {
    /// Holds `function` to the contract of `op`; `name` is what tables and waivers call it.
    ///
    /// The function asks the [`Call`] for inputs and attributes by their names and writes every output. An attribute (or an
    /// optional input) that it never asks for makes the case `unsupported` where it is not the default; a panic makes it an
    /// `error`. It may be called on several threads at a time.
    pub fn new(
        name: impl Into<String>,
        op: impl Into<String>,
        function: impl Fn(&mut Call) + Send + Sync + 'static,
    ) -> Gate {
        Gate {
            function: Function {
                name: name.into(),
                version: version(),
                op: op.into(),
                function: Box::new(function),
                threads: None,
                alone: Mutex::new(()),
            },
            dtypes: vec![DType::Fp32],
            outs: None,
            slice: Slice::Quick,
            cases: Vec::new(),
            waivers: Vec::new(),
            out: None,
        }
    }

    /// The dtypes of the inputs that are asked [default: fp32 alone].
    pub fn dtypes(mut self, dtypes: impl IntoIterator<Item = DType>) -> Gate {
        self.dtypes = dtypes.into_iter().collect();
        self
    }

    /// The dtypes of the outputs that are asked, with inputs of every dtype [default: that of the inputs, where the op has
    /// such outputs, else all].
    pub fn outs(mut self, outs: impl IntoIterator<Item = DType>) -> Gate {
        self.outs = Some(outs.into_iter().collect());
        self
    }

    /// How much of the contract is asked [default: the quick slice].
    pub fn slice(mut self, slice: Slice) -> Gate {
        self.slice = slice;
        self
    }

    /// Only the cases of these names; a final `*` stands for any ending [default: all].
    pub fn cases(mut self, cases: impl IntoIterator<Item = impl Into<String>>) -> Gate {
        self.cases = cases.into_iter().map(Into::into).collect();
        self
    }

    /// The thread counts that axis `threads` compares, and what sets the number for this process; the first holds for all
    /// other judgments. The function is then called by one thread at a time [default: threads are not asked].
    pub fn threads(
        mut self,
        counts: impl IntoIterator<Item = usize>,
        set: impl Fn(usize) + Send + Sync + 'static,
    ) -> Gate {
        self.function.threads = Some((counts.into_iter().collect(), Box::new(set)));
        self
    }

    /// Failures that are known and allowed until a day, in a file as docs/GATE.md describes; may be called again.
    pub fn waivers(mut self, file: impl Into<PathBuf>) -> Gate {
        self.waivers.push(file.into());
        self
    }

    /// A folder for the report: `report.html`, `summary.md`, `junit.xml`, `records.jsonl`; an earlier one there is replaced.
    pub fn out(mut self, folder: impl Into<PathBuf>) -> Gate {
        self.out = Some(folder.into());
        self
    }

    /// Judges everything, on all cores.
    ///
    /// # Panics
    /// When the gate asks for what there is not: a message with all that is wrong. When the folder of [`Gate::out`] cannot be
    /// written.
    pub fn report(self) -> Report {
        let started = Started::now();
        let asked = self.prepare().unwrap_or_else(|wrong| panic!("{wrong}"));
        let (judge, groups) = (asked.judge(), asked.groups());
        let mut done: Vec<Vec<Record>> = groups.iter().map(|_| Vec::new()).collect();
        let todo: Vec<usize> = (0..groups.len()).collect();
        carry_out(
            |index| judge.group(&groups[index]),
            &todo,
            machine::cores(),
            |index, records| {
                done[index] = records;
                Ok(())
            },
        )
        .expect("nothing is refused");
        asked.report(started, done.into_iter().flatten().collect())
    }

    /// [`run`](fn@crate::run) of this gate alone.
    #[cfg(feature = "trials")]
    pub fn run(self) -> ! {
        crate::trials::run([self])
    }

    /// Judges the answer to one call against the f64 oracle, within the bounds of the op's class: what the contract asks of
    /// inputs that are none of its cases, as those of `strategies` (feature `proptest`).
    pub fn judge(&self, case: &Case) -> Verdict {
        static CONTRACT: LazyLock<Contract> = LazyLock::new(|| Contract::load(None).expect("the tables are in order"));
        hold(&CONTRACT, &self.function, case)
    }

    /// What is asked, or everything that is wrong with it.
    pub(crate) fn prepare(self) -> Result<Asked, String> {
        let mut contract = Contract::load(None).expect("the tables are in order");
        let mut wrong = Vec::new();
        let Function { name, op, threads, .. } = &self.function;
        if name.is_empty() || !name.chars().all(|c| c.is_alphanumeric() || "-_./".contains(c)) {
            wrong.push(format!("name `{name}`: use letters, digits, `-`, `_`, `.` and `/`"));
        } else if contract.implementation(name).is_some() {
            wrong.push(format!("name `{name}`: the contract has an implementation of that name; use another"));
        }
        let ops = || spec::all().iter().filter(|spec| spec.class != Class::Chain);
        if !ops().any(|spec| spec.name == *op) {
            let known: Vec<&str> = ops().map(|spec| spec.name).collect();
            wrong.push(format!("op `{op}`: use one of {}", known.join(", ")));
        }
        for (what, list) in [("dtypes", Some(&self.dtypes)), ("outs", self.outs.as_ref())] {
            if list.is_some_and(|list| list.is_empty() || list.contains(&DType::I32)) {
                wrong.push(format!("{what}: use at least one of bf16, fp16 and fp32, and no other"));
            }
        }
        let counts = threads.as_ref().map_or(Vec::new(), |(counts, _)| counts.clone());
        if threads.is_some() && (counts.len() < 2 || counts.contains(&0)) {
            wrong.push("threads: name two counts or more, and no 0".into());
        }
        contract.implementations.push(entry(name, op, &counts));
        for file in &self.waivers {
            contract.add_waivers(file).unwrap_or_else(|e| wrong.push(e.to_string()));
        }
        let axes = axis::all().iter().map(|axis| axis.name).filter(|axis| !NOT_ASKED.contains(axis));
        let axes = axes.filter(|axis| *axis != "threads" || !counts.is_empty()).map(String::from).collect();
        let selection = Selection {
            ops: vec![op.clone()],
            dtypes: self.dtypes.clone(),
            cases: self.cases.clone(),
            axes,
            ..Selection::all(self.slice)
        };
        let machine = Machine { threads: counts, ..machine::of_slice(self.slice) };
        let asked = Asked {
            contract,
            function: self.function,
            selection,
            outs: self.outs,
            machine,
            recordings: Recordings::default(),
            out: self.out,
        };
        if wrong.is_empty() {
            wrong = asked.nothing_of();
        }
        match wrong.is_empty() {
            true => Ok(asked),
            false => Err(format!("Gate `{}`: {}", asked.name(), wrong.join("; "))),
        }
    }
}

/// The entry of a function among the implementations of the contract. It does not claim the canonical bits, and nothing is
/// required of it: what it has not is `unsupported`.
fn entry(name: &str, op: &str, threads: &[usize]) -> Implementation {
    let judgments = Judgment::ALL.into_iter().filter(|judgment| *judgment != Judgment::Golden);
    Implementation {
        name: name.into(),
        about: format!("a Rust function, as {op}"),
        command: None,
        version: Vec::new(),
        env: BTreeMap::new(),
        timeout: 60.0,
        isa: Vec::new(),
        threads: Some(threads.to_vec()),
        layouts: Vec::new(),
        room: None,
        judgments: Some(judgments.collect()),
        required: Some(Vec::new()),
        same_as: None,
        folder: None,
    }
}

/// The package that is tested, as cargo tells a test it runs.
fn version() -> String {
    let of = |name: &str| std::env::var(name).unwrap_or_default();
    format!("{} {}", of("CARGO_PKG_NAME"), of("CARGO_PKG_VERSION")).trim().to_string()
}

/// A gate whose questions are settled.
pub(crate) struct Asked {
    contract: Contract,
    function: Function,
    selection: Selection,
    outs: Option<Vec<DType>>,
    machine: Machine,
    recordings: Recordings,
    out: Option<PathBuf>,
}

/// When a run began.
#[derive(Clone, Copy)]
pub(crate) struct Started(Instant, SystemTime);

impl Started {
    pub fn now() -> Started {
        Started(Instant::now(), SystemTime::now())
    }
}

impl Asked {
    pub fn name(&self) -> &str {
        &self.function.name
    }

    pub fn judge(&self) -> Judge<'_> {
        Judge {
            contract: &self.contract,
            rows: self.contract.default_rows(),
            implementation: &self.function,
            goldens: None,
            references: Vec::new(),
            recordings: &self.recordings,
            machine: &self.machine,
        }
    }

    /// All trials, grouped by shared inputs.
    pub fn groups(&self) -> Vec<Vec<Trial<'_>>> {
        self.groups_of(&self.selection)
    }

    fn groups_of(&self, selection: &Selection) -> Vec<Vec<Trial<'_>>> {
        let mut groups = plan(&self.contract, self.name(), selection);
        groups.iter_mut().for_each(|group| group.retain(|trial| self.takes_out(trial.case)));
        groups.retain(|group| !group.is_empty());
        groups
    }

    fn takes_out(&self, case: &CaseSpec) -> bool {
        match &self.outs {
            Some(outs) => outs.contains(&case.out),
            None => case.out == case.dtype || !case.spec().outs().contains(&case.dtype),
        }
    }

    /// The dtypes of which there is no case, and the names of cases that nothing has.
    fn nothing_of(&self) -> Vec<String> {
        let op = &self.function.op;
        let all: Vec<&CaseSpec> = self.contract.cases(self.selection.slice).filter(|case| case.op == *op).collect();
        let mut wrong = Vec::new();
        for &dtype in &self.selection.dtypes {
            let mine = || all.iter().filter(|case| case.dtype == dtype);
            let outs: BTreeSet<&str> = mine().map(|case| case.out.name()).collect();
            let outs = outs.into_iter().collect::<Vec<_>>().join(", ");
            match &self.outs {
                _ if outs.is_empty() => wrong.push(format!("dtypes: {op} has no cases of {dtype} in this slice")),
                Some(asked) => {
                    let absent = asked.iter().filter(|out| !mine().any(|case| case.out == **out));
                    wrong.extend(
                        absent.map(|out| format!("outs: {op} of {dtype} has no cases of {out}, but of {outs}")),
                    );
                }
                None if mine().any(|case| self.takes_out(case)) => {}
                None => wrong.push(format!("outs: {op} of {dtype} has cases of {outs}; name which are meant")),
            }
        }
        for pattern in &self.selection.cases {
            let fits = |case: &&CaseSpec| {
                let only = Selection { cases: vec![pattern.clone()], ..self.selection.clone() };
                only.takes(case) && self.takes_out(case)
            };
            if !all.iter().any(fits) {
                wrong.push(format!("cases: `{pattern}` is none of what is asked"));
            }
        }
        wrong
    }

    /// The axes that rows ask for and this gate does not.
    pub fn not_asked(&self) -> Vec<&'static str> {
        let rows: Vec<_> = self.groups().iter().flatten().map(|trial| trial.row).collect();
        let left_out =
            axis::all().iter().map(|axis| axis.name).filter(|axis| !self.selection.axes.iter().any(|a| a == axis));
        left_out.filter(|axis| rows.iter().any(|row| row.invariant.contains(axis))).collect()
    }

    /// What a whole run came to; writes the folder where one is named.
    pub fn report(&self, started: Started, mut records: Vec<Record>) -> Report {
        uncompared(&mut records);
        let whole = || self.groups_of(&Selection { cases: Vec::new(), ..self.selection.clone() });
        let stale = waivers::stale(&self.contract, self.contract.default_rows(), self.name(), &records, whole);
        for record in records.iter_mut().filter(|record| record.verdict.is_red()) {
            record.again = Some(format!("the same Gate with .cases([{:?}])", record.case));
        }
        let run = Run {
            schema: SCHEMA,
            tool: format!("samebits-judge {}", env!("CARGO_PKG_VERSION")),
            contract_name: format!("{} {}", self.contract.name, self.contract.version),
            contract: self.contract.digest().to_string(),
            rows: self.contract.default_rows().to_string(),
            arguments: Vec::new(),
            started: started.1.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            complete: false,
            planned: records.len(),
            seconds: 0.0,
            machine: machine::facts(),
            plan: samebits_contract::record::Plan {
                implementations: BTreeMap::from([(self.name().to_string(), self.function.version.clone())]),
                ..Default::default()
            },
            sealed: None,
            notes: Vec::new(),
        };
        let seconds = started.0.elapsed().as_secs_f64();
        if let Some(folder) = &self.out {
            write(folder, &run, seconds, &records, &stale).unwrap_or_else(|e| panic!("{e:#}"));
        }
        let planned = records.len() + stale.len();
        records.extend(stale);
        let run = Run { complete: true, planned, seconds, ..run };
        Report { folder: RunFolder { run, records, torn: 0 }, not_asked: self.not_asked() }
    }
}

/// How the reason begins for which [`uncompared`] turns a record red.
const NOTHING: &str = "nothing was compared";

/// A pair of dtypes of which nothing was compared is red: what was `unsupported` everywhere is not what was asked for.
fn uncompared(records: &mut [Record]) {
    let pairs: BTreeSet<(&str, &str)> = records.iter().map(|record| (record.dtype.name(), record.out.name())).collect();
    let pairs: Vec<_> = pairs.into_iter().map(|(dtype, out)| (dtype.to_string(), out.to_string())).collect();
    for (dtype, out) in pairs {
        let of = |record: &Record| record.dtype.name() == dtype && record.out.name() == out;
        if !records.iter().any(|record| of(record) && was_compared(record)) {
            let unsupported =
                |record: &&mut Record| of(record) && matches!(record.verdict, Verdict::Unsupported { .. });
            if let Some(record) = records.iter_mut().find(unsupported)
                && let Verdict::Unsupported { reason } = &record.verdict
            {
                let reason = format!("{NOTHING} of {dtype} -> {out}: {reason}");
                record.verdict = Verdict::Untested { reason };
            }
        }
    }
}

/// Whether an answer of the function was held to something, or should have been there and was not.
pub(crate) fn was_compared(record: &Record) -> bool {
    record.judgment != Judgment::Coverage && !matches!(record.verdict, Verdict::Unsupported { .. })
}

fn write(folder: &Path, run: &Run, seconds: f64, records: &[Record], stale: &[Record]) -> anyhow::Result<()> {
    let mut journal = Journal::start(folder, run.clone())?;
    journal.append(0, records.to_vec())?;
    journal.finish(seconds, stale)?;
    samebits_reports::render(folder)?;
    Ok(())
}

/// What came of a gate. Its text is the table of `samebits check`, and what was not asked.
#[derive(Clone, Debug)]
pub struct Report {
    folder: RunFolder,
    not_asked: Vec<&'static str>,
}

impl Report {
    /// Whether the contract holds: no red record, and of every pair of dtypes something was compared.
    pub fn is_ok(&self) -> bool {
        Summary::of(&self.folder).is_green()
    }

    /// Every judgment.
    pub fn records(&self) -> &[Record] {
        &self.folder.records
    }

    /// The judgments that went against the contract.
    pub fn red(&self) -> impl Iterator<Item = &Record> {
        self.records().iter().filter(|record| record.verdict.is_red())
    }

    #[cfg(feature = "trials")]
    pub(crate) fn folder(&self) -> &RunFolder {
        &self.folder
    }

    /// What is red and is known only when all is judged: stale waivers, and that nothing was compared.
    #[cfg(feature = "trials")]
    pub(crate) fn unplanned(&self) -> impl Iterator<Item = &Record> {
        self.red().filter(|record| match &record.verdict {
            Verdict::StaleWaiver { .. } => true,
            Verdict::Untested { reason } => reason.starts_with(NOTHING),
            _ => false,
        })
    }

    /// # Panics
    /// With the whole text when the contract does not hold.
    #[track_caller]
    pub fn assert_ok(&self) {
        assert!(self.is_ok(), "the contract does not hold\n\n{self}");
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&samebits_reports::table(&self.folder))?;
        match self.not_asked.is_empty() {
            true => Ok(()),
            false => writeln!(f, "{}", not_asked(&self.not_asked)),
        }
    }
}

/// A line about axes that were left out.
pub(crate) fn not_asked(axes: &[&str]) -> String {
    let mut line =
        format!("not asked: invariance along {}; a program on the wire can be asked (docs/GATE.md)", axes.join(", "));
    if axes.contains(&"threads") {
        line += ", threads with `Gate::threads`";
    }
    line
}
