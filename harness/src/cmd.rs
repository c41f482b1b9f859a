//! One file per verb, and the options that several verbs share.

pub mod answer;
pub mod audit;
pub mod bless;
pub mod case;
pub mod check;
pub mod component;
pub mod contract;
pub mod devices;
pub mod diff;
pub mod forward;
pub mod generate;
pub mod goldens;
pub mod grad;
pub mod image;
pub mod list;
pub mod measure;
pub mod merge;
pub mod probe;
pub mod quantize;
pub mod report;
pub mod rollout;
pub mod sampling;
pub mod schema;
pub mod score;
pub mod sweep;
pub mod times;
pub mod trace;
pub mod train;
pub mod verify;

use crate::checkpoints::Checkpoints;
use crate::implementation::cuda::open_gpu;
use crate::judge::Selection;
use anyhow::{Context, Result, bail, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use samebits_contract::record::Judgment;
use samebits_contract::table::{Contract, Slice};
use samebits_contract::tensor::DType;
use samebits_contract::{axis, spec};
use samebits_goldens::Store;
use samebits_models::{Config, Model, ModelError, ModelFolder, Precision, RopeLength, StorageContract, named_folder};
use samebits_ops::device::Device;
use samebits_ops::{Counter, Cpu, Isa};
use samebits_schema::{Op, Value};
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Reads an option that is an attribute of an op, whose form says what it may be.
pub fn attribute(
    op: &'static Op,
    name: &'static str,
) -> impl Fn(&str) -> Result<f64, String> + Clone + Send + Sync + 'static {
    move |text| {
        let attribute = op.attribute(name).expect("an attribute of the op");
        let number = text.parse().ok().filter(|number| attribute.admits(&Value::Float(*number)));
        number.ok_or_else(|| format!("it must be {}", attribute.range()))
    }
}

/// How to run on this machine; no setting moves a bit.
#[derive(clap::Args)]
pub struct Machine {
    /// Instruction set: scalar, avx2, avx512 or avx512bf16 [default: the best of this machine]
    #[arg(long)]
    isa: Option<Isa>,

    /// Number of threads, 1 to 1024 [default: all cores]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
}

impl Machine {
    /// The CPU to run on, with at most `budget` bytes of workspace per op.
    pub fn cpu(&self, budget: Option<usize>) -> Result<Cpu> {
        let best = Cpu::best();
        let isa = self.isa.unwrap_or(best.isa());
        let threads = self.threads.unwrap_or(best.threads());
        Ok(Cpu::new(isa, threads, budget.unwrap_or(usize::MAX))?)
    }
}

/// The folder of a model, and what a run makes of it.
#[derive(clap::Args)]
pub struct Folder {
    /// Hugging Face folder: config.json, model.safetensors (or shards with an index), tokenizer files; or a GGUF file
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,

    /// PEFT folder of a low-rank adapter of the model, called NAME, else as the folder; may be given again. All texts have the only
    /// one; of several each says which it has (`rollout`)
    #[arg(long, value_name = "[NAME=]DIR")]
    pub adapter: Vec<String>,

    /// PEFT folder of a low-rank adapter that is added to the weights of the model as they are read, each sum rounded once
    #[arg(long, value_name = "DIR")]
    pub merge_adapter: Option<PathBuf>,

    /// Contract for how weights may be stored: ws2 also admits floats of 8 bits with a scale for each block (DeepSeek's fp8), which
    /// are rounded to --dtype as all others are
    #[arg(long, value_name = "ws1|ws2", default_value = "ws1")]
    storage: StorageContract,

    /// Refuse fields and tensors that are named on stderr and passed by else: what no code reads, or what asks for nothing
    #[arg(long)]
    strict: bool,

    /// Longest text of the run, which the frequencies of its positions belong to where their scaling depends on a length
    /// (longrope, dynamic) [default: the length that such a model was trained on, else all of its positions]
    #[arg(long, value_name = "N")]
    rope_length: Option<usize>,
}

impl Folder {
    /// The model, packed, with the rope length of `recorded` (a file and its number) where that has one.
    pub fn load(&self, dtype: Precision, cpu: &Cpu, recorded: Option<(&Path, usize)>) -> Result<Model> {
        let loading = Loading::of(&self.model);
        let progress = |done, total| loading.at(done, total);
        let folder = ModelFolder { dir: &self.model, merged: self.merge_adapter.as_deref(), contract: self.storage };
        let model = Model::open(&folder, dtype, cpu, progress)?;
        drop(loading);
        self.pass(model.config())?;
        let adapters: Vec<_> = self.adapter.iter().map(|text| named_folder(text)).collect::<Result<_, _>>()?;
        let model = model.with_adapters(cpu, &adapters)?;
        // What loading took goes back to the system; steps make the same tensors again and again.
        samebits_ops::keep_freed_memory();
        match self.rope_length(model.config(), recorded)? {
            Some(length) => Ok(model.with_rope_length(RopeLength::Declared(length))?),
            None => Ok(model),
        }
    }

    /// Names what was passed by, or refuses it.
    pub fn pass(&self, config: &Config) -> Result<()> {
        ensure!(!self.strict || config.passed.is_empty(), "--strict: {}", config.passed.join("; "));
        config.passed.iter().for_each(|line| warn(line));
        Ok(())
    }

    /// The declared length, where it is not the folder's own.
    ///
    /// # Errors
    /// Two that differ: frequencies of two lengths are not compared.
    pub fn rope_length(&self, config: &Config, recorded: Option<(&Path, usize)>) -> Result<Option<usize>> {
        if let (Some(asked), Some((path, length))) = (self.rope_length, recorded)
            && asked != length
            && config.trained_length().is_some()
        {
            let path = path.display();
            bail!("--rope-length {asked}: {path} was made with {length}; frequencies of two lengths are not compared");
        }
        Ok(self.rope_length.or(recorded.map(|(_, length)| length)))
    }
}

/// What may come out of a run.
#[derive(clap::Args, Clone, Copy)]
pub struct Nonfinite {
    /// Write NaN and infinities where a run makes them; without it that is an error, which names the layer, the op, the
    /// sequence and the token where it began
    #[arg(long)]
    pub allow_nonfinite: bool,
}

/// Adds how a result that is not finite is written all the same.
pub fn or_allow(e: ModelError) -> ModelError {
    match e {
        ModelError::NotFinite { place, sequence, token, why } => {
            ModelError::NotFinite { place, sequence, token, why: format!("{why}; or give --allow-nonfinite") }
        }
        e => e,
    }
}

/// Where a model runs; it moves no bit.
#[derive(clap::Args)]
pub struct On {
    /// Where the model runs: on the processor, or on the first CUDA device, which is an error where there is none
    #[arg(long, default_value = "cpu", value_name = "cpu|cuda")]
    device: Target,
}

/// Processor or device.
#[derive(Clone, Copy, clap::ValueEnum)]
pub enum Target {
    Cpu,
    Cuda,
}

impl On {
    /// The device, opened before anything is loaded; `None` for the processor.
    pub fn open(&self) -> Result<Option<Device>> {
        open_target(self.device).context("--device cuda")
    }
}

/// The device of a target; `None` for the processor.
pub fn open_target(target: Target) -> Result<Option<Device>> {
    match target {
        Target::Cpu => Ok(None),
        Target::Cuda => Ok(Some(open_gpu(usize::MAX)?)),
    }
}

/// `model` on `device`, where there is one.
pub fn place(model: Model, cpu: &Cpu, device: Option<&Device>) -> Result<Model> {
    match device {
        None => Ok(model),
        Some(device) => model.to_device(cpu, device).context("--device cuda"),
    }
}

/// What may not happen beside computing.
#[derive(clap::Args, Clone)]
pub struct Strict {
    /// A counter that must stay zero; an op that would raise it is an error that names the place: conversions, copies,
    /// layouts, plan_retries, slow_paths, allocated_bytes, workspace_bf16_bytes or workspace_f32_bytes; may be given again
    #[arg(long, value_name = "COUNTER")]
    forbid: Vec<String>,
}

impl Strict {
    /// `cpu`, on which the counters are forbidden.
    pub fn apply(&self, cpu: Cpu) -> Result<Cpu> {
        for name in &self.forbid {
            let counter = Counter::find(name).with_context(|| {
                let known: Vec<_> = Counter::ALL.into_iter().map(Counter::name).collect();
                format!("--forbid {name}: no such counter; use one of {}", known.join(", "))
            })?;
            cpu.ledger().forbid(counter);
        }
        Ok(cpu)
    }
}

/// A line on stderr about something that is no error and that the user should know.
pub fn warn(message: &str) {
    // Nothing is left to do when stderr is gone.
    let _ = writeln!(std::io::stderr(), "samebits: warning: {message}");
}

/// A line on stderr that shows work is going on, on a terminal only; it clears itself when dropped.
pub struct Working(ProgressBar);

impl Working {
    /// Shows `what` until dropped.
    pub fn on(what: String) -> Working {
        if !std::io::stderr().is_terminal() {
            return Working(ProgressBar::hidden());
        }
        let bar = ProgressBar::new_spinner().with_message(what);
        bar.enable_steady_tick(Duration::from_millis(100));
        Working(bar)
    }
}

impl Drop for Working {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// How much of a model has been read, on a terminal only; it clears itself when dropped.
pub struct Loading(ProgressBar);

impl Loading {
    /// Shows the loading of `dir` until dropped.
    pub fn of(dir: &Path) -> Loading {
        if !std::io::stderr().is_terminal() {
            return Loading(ProgressBar::hidden());
        }
        let style =
            ProgressStyle::with_template("{msg} {bar:32} {bytes} of {total_bytes}").expect("the template is fixed");
        Loading(ProgressBar::new(0).with_style(style).with_message(format!("loading {}", dir.display())))
    }

    /// Shows that `done` of `total` bytes have been read.
    pub fn at(&self, done: u64, total: u64) {
        self.0.set_length(total);
        self.0.set_position(done);
    }
}

impl Drop for Loading {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// A bar on stderr that counts to `total`, on a terminal only.
pub fn counting(total: usize) -> ProgressBar {
    if std::io::stderr().is_terminal() { ProgressBar::new(total as u64) } else { ProgressBar::hidden() }
}

/// Where the contract, the goldens and the checkpoints are.
#[derive(clap::Args, Clone)]
pub struct Place {
    /// The repository: goldens/ and tests/checkpoints/ are read there [default: the nearest folder upwards that has
    /// contract/ws1.toml]
    #[arg(long, value_name = "DIR")]
    root: Option<PathBuf>,

    /// Folder with the contract's tables (ws1.toml, ops/, impls.toml) [default: the tables built into the program]
    #[arg(long, value_name = "DIR")]
    contract: Option<PathBuf>,
}

impl Place {
    /// Loads the contract.
    pub fn contract(&self) -> Result<Contract> {
        Ok(Contract::load(self.contract.as_deref())?)
    }

    /// The repository: `--root`, or the nearest folder upwards that looks like it, or what the program carries of it.
    pub fn root(&self) -> Option<PathBuf> {
        let here = || std::env::current_dir().ok();
        self.root
            .clone()
            .or_else(|| here()?.ancestors().find(|dir| dir.join("contract/ws1.toml").is_file()).map(Path::to_path_buf))
            .or_else(|| crate::command::repository().map(Path::to_path_buf))
    }

    /// The folder of checkpoints that chain cases name.
    pub fn checkpoints(&self) -> Arc<Checkpoints> {
        Arc::new(Checkpoints::new(self.root().map(|root| root.join("tests/checkpoints"))))
    }

    /// The golden store; `None` when there is no repository at hand, or nothing has been blessed in it.
    pub fn goldens(&self) -> Result<Option<Store>> {
        match self.root().map(|root| root.join("goldens")) {
            Some(dir) if dir.join("MANIFEST.toml").exists() => Ok(Some(Store::open(&dir)?)),
            _ => Ok(None),
        }
    }
}

/// Which part of the contract.
#[derive(clap::Args, Clone)]
pub struct Select {
    /// How much: quick (every test run), default (every check) or exhaustive (nightly)
    #[arg(long, default_value = "default", value_name = "quick|default|exhaustive")]
    slice: String,

    /// Only this op; may be given again
    #[arg(long, value_name = "OP")]
    op: Vec<String>,

    /// Only this input dtype: bf16, fp16 or fp32; may be given again
    #[arg(long, value_name = "DTYPE")]
    dtype: Vec<String>,

    /// Only this case; a final * stands for any ending; may be given again
    #[arg(long, value_name = "NAME")]
    case: Vec<String>,

    /// Only this judgment: accuracy, invariance, golden, arithmetic, order or coverage; may be given again
    #[arg(long, value_name = "JUDGMENT")]
    judgment: Vec<String>,

    /// Only this axis of invariance, or only one setting on it, as records name it: batch=again:3; may be given again
    #[arg(long, value_name = "AXIS[=SETTING]")]
    axis: Vec<String>,

    /// Other inputs: every number draws its own; goldens hold those of 0 alone
    #[arg(long, default_value_t = 0, value_name = "N")]
    seed: u64,

    /// Only the i-th of n parts of the selection; `samebits merge` joins the parts
    #[arg(long, value_name = "i/n")]
    shard: Option<String>,
}

impl Select {
    /// Checks every name against what there is.
    pub fn selection(&self, contract: &Contract) -> Result<Selection> {
        let slice = Slice::parse(&self.slice)
            .with_context(|| format!("--slice {}: use quick, default or exhaustive", self.slice))?;
        for op in &self.op {
            let known: Vec<_> = spec::all().iter().map(|spec| spec.name).collect();
            ensure!(known.contains(&op.as_str()), "--op {op}: use one of {}", known.join(", "));
        }
        let (mut axes, mut settings) = (Vec::new(), Vec::new());
        for text in &self.axis {
            let (axis, setting) = axis_and_setting(text)?;
            axes.push(axis.name.to_string());
            settings.extend(setting.map(|setting| (axis.name.to_string(), setting.to_string())));
        }
        for case in &self.case {
            let fits = |name: &str| case.strip_suffix('*').map_or(case == name, |prefix| name.starts_with(prefix));
            ensure!(
                contract.cases(Slice::Exhaustive).any(|known| fits(&known.name)),
                "--case {case}: no such case; `samebits list` shows their names"
            );
        }
        let dtype = |name: &String| match DType::parse(name) {
            Ok(DType::I32) => bail!("--dtype i32: use bf16, fp16 or fp32"),
            Ok(dtype) => Ok(dtype),
            Err(e) => bail!("--dtype: {e}"),
        };
        let judgment = |name: &String| {
            Judgment::ALL
                .into_iter()
                .find(|judgment| judgment.name() == name)
                .with_context(|| format!("--judgment {name}: use one of {}", Judgment::names()))
        };
        let shard = match &self.shard {
            None => (1, 1),
            Some(text) => {
                let two = text.split_once('/').and_then(|(i, n)| Some((i.parse().ok()?, n.parse().ok()?)));
                let fits = |&(i, n): &(usize, usize)| (1..=n).contains(&i) && n <= 10_000;
                two.filter(fits).with_context(|| format!("--shard {text}: write i/n, from 1/n to n/n"))?
            }
        };
        Ok(Selection {
            seed: self.seed,
            shard,
            slice,
            ops: self.op.clone(),
            dtypes: self.dtype.iter().map(dtype).collect::<Result<_>>()?,
            cases: self.case.clone(),
            judgments: self.judgment.iter().map(judgment).collect::<Result<_>>()?,
            axes,
            settings,
            own_goldens: false,
        })
    }
}

/// An axis, and the setting behind its `=` where there is one.
fn axis_and_setting(text: &str) -> Result<(&'static axis::Axis, Option<&str>)> {
    let (name, setting) = text.split_once('=').map_or((text, None), |(name, setting)| (name, Some(setting)));
    let known = || axis::all().iter().map(|axis| axis.name).collect::<Vec<_>>().join(", ");
    Ok((axis::find(name).with_context(|| format!("--axis {text}: use one of {}", known()))?, setting))
}

/// `words` as a shell reads them back.
fn shell(words: &[String]) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,@%+".contains(c);
    let word = |word: &String| match word {
        word if !word.is_empty() && word.chars().all(plain) => word.clone(),
        word => format!("'{}'", word.replace('\'', "'\\''")),
    };
    words.iter().map(word).collect::<Vec<_>>().join(" ")
}
