use super::Place;
use crate::clock::{Clock, spread};
use crate::implementation::cpu::CpuImplementation;
use crate::machine;
use crate::measured::{Measured, Program, SCHEMA};
use crate::pairs::{Comparison, Limits};
use crate::side::Side;
use crate::timing::{REPEATS, repeats};
use crate::workload::{Plan, Table, Workload};
use anyhow::{Context, Result, bail, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use samebits_contract::atomic_write;
use samebits_contract::case::{Config, Status};
use samebits_contract::tensor::DType;
use samebits_ops::{Cpu, Isa};
use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Times one of the built-in ops, or a table of them beside other programs
///
/// With --op, any of `samebits schema`: draws inputs, packs weights and allocates outputs before the clock starts, warms up
/// once, then runs the op again and again and prints the median, least and most seconds, the bytes that must move and the operations.
///
/// With --workloads: times every workload of a table on the built-in ops and, beside each, on the programs named
/// with --against, several times over. All of them get the same inputs over the wire, time themselves, and must come
/// to the same outputs. Prints a table, writes measure.json and measure.md, and compares with what the table asks. An
/// instruction set given with --isa holds the others to it as well, where the table says how.
#[derive(clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Args {
    /// The op
    #[arg(long, required_unless_present = "workloads", conflicts_with = "workloads")]
    op: Option<String>,

    /// An extent or a parameter, for example M=16; may be given again
    #[arg(long, value_name = "K=V", conflicts_with = "workloads")]
    param: Vec<String>,

    /// Dtype of the inputs: bf16, fp16 or fp32 [default: bf16]
    #[arg(long, value_name = "DTYPE", conflicts_with = "workloads")]
    dtype: Option<String>,

    /// With --op, dtype of the outputs [default: that of the inputs]; with --workloads, the folder for measure.json
    /// and measure.md [default: samebits-measure]
    #[arg(long, value_name = "DTYPE|DIR")]
    out: Option<String>,

    /// Instruction set: scalar, avx2, avx512 or avx512bf16 [default: the best of this machine]
    #[arg(long)]
    isa: Option<Isa>,

    /// Number of threads, 1 to 1024 [default: all cores]; with --workloads also several, as 1,2 [default: 1 and all
    /// cores]
    #[arg(long, value_name = "N", value_delimiter = ',')]
    threads: Vec<usize>,

    /// Timed runs [default: 11; with --workloads at least 5 for each answer, and more where they are short]
    #[arg(long, value_name = "N")]
    repeat: Option<usize>,

    /// One JSON object instead of text
    #[arg(long, conflicts_with = "workloads")]
    json: bool,

    /// A table of workloads [default: the one built into the program, harness/workloads.toml]
    #[arg(long, value_name = "FILE", num_args = 0..=1)]
    workloads: Option<Option<PathBuf>>,

    /// Only workloads with this text in their name; may be given again
    #[arg(long, value_name = "TEXT", conflicts_with = "op")]
    filter: Vec<String>,

    /// Compare with this program, named in the table or by --impl; may be given again
    #[arg(long, value_name = "NAME", conflicts_with = "op")]
    against: Vec<String>,

    /// The command line that starts a program, for a shell; may be given again
    #[arg(long = "impl", value_name = "NAME=COMMAND", conflicts_with = "op")]
    implementation: Vec<String>,

    /// How often all programs are asked in turn for one workload
    #[arg(long, value_name = "N", default_value_t = 5, conflicts_with = "op")]
    pairs: usize,

    /// How long one answer may take
    #[arg(long, value_name = "SECONDS", default_value_t = 300.0, conflicts_with = "op")]
    timeout: f64,
}

const EXAMPLES: &str = "\
Examples:
  samebits measure --op gemm --param M=16 --param N=4096 --param K=4096
  samebits measure --op attention --param B=1 --param T=1 --param S=4096 --param Hq=32 --param Hkv=8 --param D=128 \
      --param causal=1
  samebits measure --op rms_norm --param R=4096 --param N=4096 --dtype bf16 --threads 2 --json
  samebits measure --workloads --filter decode/
      the built-in table's decoding, without peers
  samebits measure --workloads --against torch --threads 1,2
      the whole table beside torch, by `python3 impls/torch/answer.py` in the repository
  samebits measure --workloads --against torch --impl torch='venv/bin/python impls/torch/answer.py' --filter gemm/
      with another Python
  samebits measure --workloads --against torch --isa avx2
      all of them held to AVX2
  samebits measure --workloads my.toml --against old --impl old='./samebits-0.1 answer'
      a table of your own beside an older build

`samebits schema OP` shows the axes and parameters of an op; R and N stand for any shape, E is D where it is not given, and
the name of an optional input with 1 asks for it.

With --workloads, exit code 0: every target was met; 1: one was not; 2: the run is broken, a program failed.
docs/METHOD.md says what the table's fields and those of measure.json mean.";

pub fn run(args: &Args) -> Result<ExitCode> {
    match (&args.workloads, &args.op) {
        (Some(file), _) => compare(args, file.as_deref()),
        (None, Some(op)) => one(args, op),
        (None, None) => bail!("give --op OP or --workloads"),
    }
}

fn repeat(args: &Args, default: usize) -> Result<usize> {
    let repeat = args.repeat.unwrap_or(default);
    ensure!(REPEATS.contains(&repeat), "--repeat {repeat}: use {}", repeats());
    Ok(repeat)
}

/// Times one op in this process.
fn one(args: &Args, op: &str) -> Result<ExitCode> {
    let repeat = repeat(args, 11)?;
    let dtype = |name: &str, option: &str| DType::parse(name).map_err(|e| anyhow::anyhow!("{option}: {e}"));
    let input = dtype(args.dtype.as_deref().unwrap_or("bf16"), "--dtype")?;
    let out = args.out.as_deref().map_or(Ok(input), |name| dtype(name, "--out"))?;
    ensure!(samebits_schema::find(op).is_some(), "--op {op}: not an op; `samebits schema` shows them");
    let mut given = BTreeMap::new();
    for param in &args.param {
        let (name, value) = param.split_once('=').with_context(|| format!("--param {param}: write NAME=VALUE"))?;
        ensure!(given.insert(name.to_string(), value.to_string()).is_none(), "--param {name}: given twice");
    }
    ensure!(args.threads.len() <= 1, "--threads: give one number with --op");
    let best = Cpu::best();
    let threads = args.threads.first().copied().unwrap_or(best.threads());
    let cpu = Cpu::new(args.isa.unwrap_or(best.isa()), threads, usize::MAX)?;
    let plan = Plan::new(op, input, out, &given, "--param ").map_err(anyhow::Error::msg)?;
    let clock = Clock::new(repeat);
    let answer = CpuImplementation::new(cpu.clone()).answer(&plan.case(op, Config::default()), Some(&clock));
    ensure!(answer.status == Status::Ok, "{}", answer.reason);
    let seconds =
        clock.reading().map(|reading| reading.seconds).with_context(|| format!("--op {op}: it is not timed"))?;
    let [median, least, most] = spread(&seconds);
    let (bytes, operations) = (plan.bytes / median / 1e9, plan.operations / median / 1e9);
    let mut stdout = std::io::stdout().lock();
    if args.json {
        let line = serde_json::json!({
            "op": op, "params": given, "dtype": input, "out": out, "isa": cpu.isa().name(),
            "threads": cpu.threads(), "repeat": repeat,
            "seconds": { "median": median, "min": least, "max": most },
            "bytes": plan.bytes, "operations": plan.operations,
            "gigabytes_per_second": bytes, "gigaoperations_per_second": operations,
        });
        writeln!(stdout, "{line}")?;
    } else {
        let facts: Vec<String> = given.iter().map(|(name, value)| format!("{name}={value}")).collect();
        writeln!(stdout, "{op} {} {input} -> {out}, {} x {}", facts.join(" "), cpu.threads(), cpu.isa())?;
        writeln!(stdout, "seconds: median {median:.6}, min {least:.6}, max {most:.6} of {repeat} runs")?;
        writeln!(stdout, "{bytes:.2} GB/s, {operations:.2} GFLOP/s (at the median)")?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Times a table of workloads beside other programs.
fn compare(args: &Args, file: Option<&std::path::Path>) -> Result<ExitCode> {
    let started = Instant::now();
    let repeat = repeat(args, 5)?;
    ensure!((1..=1000).contains(&args.pairs), "--pairs {}: use 1 to 1000", args.pairs);
    ensure!((0.001..=86400.0).contains(&args.timeout), "--timeout {}: use 0.001 to 86400 seconds", args.timeout);
    let table = Table::load(file).map_err(anyhow::Error::msg)?;
    let cores = Cpu::best().threads();
    let mut threads = if args.threads.is_empty() { vec![1, cores] } else { args.threads.clone() };
    threads.dedup();
    for &count in &threads {
        Cpu::new(Isa::Scalar, count, usize::MAX).with_context(|| "--threads")?;
    }
    for text in &args.filter {
        let found = table.workload.iter().any(|workload| workload.name.contains(text));
        let names = || table.workload.iter().map(|w| w.name.as_str()).collect::<Vec<_>>().join(", ");
        ensure!(found, "--filter {text}: no workload has that in its name; there are {}", names());
    }
    let chosen = |workload: &&Workload| args.filter.is_empty() || args.filter.iter().any(|t| workload.name.contains(t));
    let isa = args.isa.unwrap_or(Isa::best());
    let workloads: Vec<Workload> = table.workload.iter().filter(chosen).map(|workload| workload.on(isa)).collect();
    let dir = PathBuf::from(args.out.as_deref().unwrap_or("samebits-measure"));
    atomic_write::create_folder(&dir).with_context(|| format!("--out {}", dir.display()))?;

    let mut comparison = Comparison {
        ours: ours(args.isa)?,
        peers: peers(args, &table)?,
        pairs: args.pairs,
        repeat,
        patience: Duration::from_secs_f64(args.timeout),
        limits: Limits::of(isa),
    };
    let mut progress = Progress::new(threads.len() * workloads.len() * args.pairs);
    progress.at("starting the programs".into());
    let versions = comparison.greet().map_err(|e| anyhow::anyhow!("{}: {}", e.side, e.reason))?;
    let program = |side: &Side| Program {
        name: side.name.clone(),
        command: side.command.clone(),
        env: side.env().clone(),
        version: versions.get(&side.name).filter(|v| !v.is_empty()).unwrap_or(&side.name).clone(),
    };
    let mut measured = Measured {
        schema: SCHEMA,
        tool: format!("samebits {}", env!("CARGO_PKG_VERSION")),
        arguments: crate::command::arguments(),
        started: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
        seconds: 0.0,
        complete: false,
        machine: machine::facts(),
        load: machine::load(),
        pairs: args.pairs,
        repeat,
        held_to: args.isa.map(Isa::name),
        programs: [&comparison.ours].into_iter().chain(&comparison.peers).map(program).collect(),
        limits: Vec::new(),
        rows: Vec::new(),
    };
    for &count in &threads {
        for workload in &workloads {
            progress.at(format!("{} on {count}", workload.name));
            let agree = table.agree[&workload.dtype];
            let before = progress.done;
            let row = comparison.row(workload, count, agree, || progress.pair());
            progress.done_with(before + args.pairs);
            measured.rows.push(row);
            measured.limits = comparison.limits.measured();
            measured.seconds = started.elapsed().as_secs_f64();
            // Whatever was timed is kept when the run is interrupted.
            measured.write(&dir)?;
        }
    }
    measured.complete = true;
    measured.write(&dir)?;
    progress.finish();
    let mut stdout = std::io::stdout().lock();
    write!(stdout, "{}", measured.text())?;
    writeln!(stdout, "records: {}", dir.join("measure.json").display())?;
    stdout.flush()?;
    let broken = measured.broken();
    if let Some(first) = broken.first() {
        bail!("{} of {} rows could not be measured; the first: {first}", broken.len(), measured.rows.len());
    }
    let (all, met) = measured.targets();
    Ok(ExitCode::from(u8::from(met < all)))
}

/// This program as one that answers over the wire.
fn ours(isa: Option<Isa>) -> Result<Side> {
    let program = crate::command::program().context("this program does not know its own path")?;
    let path = program.to_str().context("this program's own path is not text; move it")?;
    let isa = isa.map_or(String::new(), |isa| format!(" --isa {isa}"));
    Ok(Side::new("samebits", &format!("'{}' answer{isa}", path.replace('\'', r"'\''")), None, BTreeMap::new()))
}

/// The programs of `--against`.
fn peers(args: &Args, table: &Table) -> Result<Vec<Side>> {
    let mut given = BTreeMap::new();
    for implementation in &args.implementation {
        let (name, command) = implementation
            .split_once('=')
            .filter(|(name, command)| !name.is_empty() && !command.trim().is_empty())
            .with_context(|| format!("--impl {implementation}: write NAME=COMMAND"))?;
        ensure!(
            args.against.iter().any(|n| n == name),
            "--impl {name}: nothing compares with it; add --against {name}"
        );
        ensure!(given.insert(name, command).is_none(), "--impl {name}: given twice");
    }
    let root = Place { root: None, contract: None }.root();
    let mut peers: Vec<Side> = Vec::new();
    for name in &args.against {
        ensure!(name != "samebits", "--against samebits: that is this program's own name; choose another");
        ensure!(peers.iter().all(|peer| peer.name != *name), "--against {name}: given twice");
        let peer = table.peer.get(name);
        let env = args.isa.and_then(|isa| peer?.isa.get(isa.name())).cloned().unwrap_or_default();
        peers.push(match (given.get(name.as_str()), peer) {
            (Some(command), _) => Side::new(name, command, None, env),
            (None, Some(peer)) => {
                let why = || format!("--against {name}: run this in the repository, or add --impl {name}=COMMAND");
                Side::new(name, &peer.command, Some(&root.clone().with_context(why)?), env)
            }
            (None, None) => {
                let known = table.peer.keys().cloned().collect::<Vec<_>>().join(", ");
                bail!("--against {name}: the table has {known}; for another program add --impl {name}=COMMAND");
            }
        });
    }
    Ok(peers)
}

/// A bar with the time to come on a terminal, a line every few seconds elsewhere.
struct Progress {
    bar: Option<ProgressBar>,
    total: usize,
    done: usize,
    at: String,
    said: Instant,
}

impl Progress {
    fn new(total: usize) -> Progress {
        let bar = std::io::stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template("{bar:30} {pos}/{len} pairs, {eta} left  {wide_msg}")
                .expect("the template is well formed");
            let bar = ProgressBar::new(total as u64).with_style(style);
            bar.enable_steady_tick(Duration::from_secs(1));
            bar
        });
        Progress { bar, total, done: 0, at: String::new(), said: Instant::now() }
    }

    fn at(&mut self, what: String) {
        if let Some(bar) = &self.bar {
            bar.set_message(what.clone());
        }
        self.at = what;
    }

    fn pair(&mut self) {
        self.done_with(self.done + 1);
    }

    fn done_with(&mut self, done: usize) {
        self.done = done;
        match &self.bar {
            Some(bar) => bar.set_position(done as u64),
            None if self.said.elapsed() > Duration::from_secs(5) => {
                self.said = Instant::now();
                eprintln!("{done}/{} pairs, at {}", self.total, self.at);
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
