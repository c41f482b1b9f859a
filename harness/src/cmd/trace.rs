use super::forward::Tokens;
use super::{Folder, Machine, Target, open_target, place};
use crate::dump::{Comparison, Reader, Writer, compare};
use crate::examples::{Examples, LossKind, LossOptions};
use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::ValueEnum;
use samebits_models::{GradientRun, Grouping, PageOrder, Precision, Run, Schedule, StorageContract};
use samebits_ops::{Cpu, Isa};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Compares two runs of a model and names the first place where they part
///
/// A and B are dumps (of `samebits forward --dump` or `samebits grad --dump`, or of goldens/generate/dump.py for transformers),
/// or settings of a run over --model and --tokens: words joined by commas, such as `schedule=chunk:3,isa=scalar`; `default` for
/// none. With `loss=nll` or `loss=policy` it is a run of gradients, such as `loss=nll,micro-batch=3,pad=left:2`. They are
/// compared site by site, in the order in which they were computed, gradients of parameters last: the first one that differs is
/// where the difference was made, because everything it was made from is equal. Ends with 1 where they differ.
#[derive(clap::Args)]
pub struct Args {
    /// A dump, or settings: schedule, batch, pages, order, isa, threads, dtype, device; of gradients loss, entropy, micro-batch,
    /// pad, pack, groups, ranks, recompute, budget, isa, threads, dtype
    a: String,

    /// The same for the other run
    b: String,

    /// Hugging Face folder; for settings
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,

    /// Safetensors file with `tokens`, i32 [B, T]; for settings
    #[arg(long, value_name = "FILE")]
    tokens: Option<PathBuf>,

    /// Longest text of the runs, as for the other verbs; for settings
    #[arg(long, value_name = "N")]
    rope_length: Option<usize>,

    /// PEFT folder of a low-rank adapter of the model, which all texts have; for settings
    #[arg(long, value_name = "DIR")]
    adapter: Option<String>,

    /// Values may differ by so much of the largest value at a site; 0: not by a bit
    #[arg(long, default_value_t = 0.0, value_name = "SHARE")]
    tolerance: f64,

    /// Most bytes of a dump that is made for the comparison
    #[arg(long, default_value_t = 8 << 30, value_name = "BYTES")]
    cap: u64,

    /// Print what was found as JSON
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    machine: Machine,
}

impl Args {
    /// The folder of settings.
    fn folder(&self, model: &Path) -> Folder {
        let adapter = self.adapter.iter().cloned().collect();
        Folder {
            model: model.into(),
            adapter,
            merge_adapter: None,
            storage: StorageContract::Ws1,
            strict: false,
            rope_length: self.rope_length,
        }
    }
}

pub fn run(args: &Args) -> Result<ExitCode> {
    ensure!(args.tolerance >= 0.0, "--tolerance {}: give 0 or more", args.tolerance);
    let dir = tempfile::tempdir().context("a folder for dumps")?;
    let open = |text: &str, name: &str| -> Result<Reader> {
        let path = Path::new(text);
        let made = dir.path().join(name);
        let path = if path.is_file() {
            path
        } else {
            dump(args, text, &made)?;
            &made
        };
        Reader::open(path).map_err(|e| anyhow!(e))
    };
    let (mut a, mut b) = (open(&args.a, "a")?, open(&args.b, "b")?);
    let found = compare(&mut a, &mut b, args.tolerance).map_err(|e| anyhow!(e))?;
    let text = if args.json { json(&found).to_string() } else { text(&found) };
    writeln!(std::io::stdout().lock(), "{text}")?;
    Ok(ExitCode::from(u8::from(found.divergence.is_some())))
}

/// Runs the model as `settings` say and dumps it.
fn dump(args: &Args, settings: &str, path: &Path) -> Result<()> {
    if settings.split(',').any(|word| word.starts_with("loss=")) {
        return dump_gradients(args, settings, path);
    }
    let default = args.machine.cpu(None)?;
    let (mut isa, mut threads, mut dtype) = (default.isa(), default.threads(), Precision::Bf16);
    let (mut run, mut target) = (Run::default(), Target::Cpu);
    for word in settings.split(',').filter(|word| *word != "default") {
        let (key, value) = word.split_once('=').with_context(|| {
            format!("{settings}: `{word}` is neither a dump nor a setting; use schedule=chunk:3, isa=scalar, ..")
        })?;
        let count =
            || value.parse::<usize>().ok().filter(|&n| n > 0).with_context(|| format!("{word}: give 1 or more"));
        match key {
            "schedule" => run.schedule = value.parse::<Schedule>()?,
            "batch" => run.grouping = value.parse::<Grouping>()?,
            "pages" => run.page_size = count()?,
            "order" => run.page_order = value.parse::<PageOrder>()?,
            "isa" => isa = value.parse::<Isa>()?,
            "threads" => threads = count()?,
            "dtype" => dtype = value.parse()?,
            "device" => target = Target::from_str(value, false).map_err(|_| anyhow!("{word}: use cpu or cuda"))?,
            _ => bail!(
                "{word}: no such setting; use schedule, batch, pages, order, isa, threads, dtype or device; with \
                     loss=nll or loss=policy those of gradients"
            ),
        }
    }
    let (Some(model), Some(tokens)) = (&args.model, &args.tokens) else {
        bail!("{settings}: is not a file; for settings give --model and --tokens");
    };
    let cpu = Cpu::new(isa, threads, usize::MAX)?;
    let device = open_target(target).with_context(|| settings.to_string())?;
    let read = Tokens::read(tokens)?;
    let folder = args.folder(model);
    let model = folder.load(dtype, &cpu, read.rope_length.map(|length| (&**tokens, length)))?;
    let model = place(model, &cpu, device.as_ref())?;
    let sequences = read.sequences();
    let sequences: Vec<&[i32]> = sequences.iter().map(Vec::as_slice).collect();
    let mut writer = Writer::create(path, args.cap).with_context(|| path.display().to_string())?;
    // Dumps are compared as they are.
    run.allow_nonfinite = true;
    run.probe = Some(&mut writer);
    model.forward_run(&cpu, &sequences, run).with_context(|| settings.to_string())?;
    writer.finish().with_context(|| path.display().to_string())
}

/// The same for gradients.
fn dump_gradients(args: &Args, settings: &str, path: &Path) -> Result<()> {
    let default = args.machine.cpu(None)?;
    let (mut isa, mut threads, mut budget, mut dtype) = (default.isa(), default.threads(), usize::MAX, Precision::Bf16);
    let (mut run, mut groups, mut loss, mut entropy) = (GradientRun::default(), 1, LossKind::Nll, 0.0);
    let mut temperature = None;
    run.allow_nonfinite = true;
    for word in settings.split(',') {
        let (key, value) = word.split_once('=').with_context(|| {
            format!("{settings}: `{word}` is no setting of gradients; use loss=nll, micro-batch=3, ..")
        })?;
        let count =
            || value.parse::<usize>().ok().filter(|&n| n > 0).with_context(|| format!("{word}: give 1 or more"));
        let flag = || value.parse::<bool>().with_context(|| format!("{word}: give true or false"));
        match key {
            "loss" => loss = LossKind::from_str(value, false).map_err(|_| anyhow!("{word}: use nll or policy"))?,
            "entropy" => entropy = value.parse().with_context(|| format!("{word}: give a number"))?,
            "temperature" => temperature = Some(value.parse().with_context(|| format!("{word}: give a number"))?),
            "micro-batch" => run.micro_batch = count()?,
            "pad" => run.padding = value.parse()?,
            "pack" => run.pack = flag()?,
            "groups" => groups = count()?,
            "ranks" => run.ranks = count()?,
            "recompute" => run.recompute = flag()?,
            "budget" => budget = count()?,
            "isa" => isa = value.parse::<Isa>()?,
            "threads" => threads = count()?,
            "dtype" => dtype = value.parse()?,
            _ => bail!(
                "{word}: no such setting of gradients; use loss, entropy, temperature, micro-batch, pad, pack, groups, ranks, \
                 recompute, budget, isa, threads or dtype"
            ),
        }
    }
    ensure!(dtype != Precision::Fp16, "{settings}: gradients are made in bf16 or fp32");
    let (Some(model), Some(tokens)) = (&args.model, &args.tokens) else {
        bail!("{settings}: is not a file; for settings give --model and --tokens");
    };
    let cpu = Cpu::new(isa, threads, budget)?;
    let examples = Examples::read(tokens, LossOptions::of(loss, entropy).at(temperature), dtype)?;
    let folder = args.folder(model);
    let model = folder.load(dtype, &cpu, examples.tokens.rope_length.map(|length| (&**tokens, length)))?;
    let mut writer = Writer::create(path, args.cap).with_context(|| path.display().to_string())?;
    let batch = examples.all.batch(groups);
    model.gradients(&cpu, &batch, &run, Some(&mut writer), |_| {}).with_context(|| settings.to_string())?;
    writer.finish().with_context(|| path.display().to_string())
}

/// Where in a site something stands.
fn place_of(site: &str, (sequence, position): (usize, usize)) -> String {
    match site.starts_with("parameters.") {
        true => format!("row {position}"),
        false => format!("sequence {sequence}, position {position}"),
    }
}

fn text(found: &Comparison) -> String {
    let mut text = match &found.divergence {
        None => format!("the same: {} sites, {} values", found.sites, found.values),
        Some(d) => {
            let before = match d.before.last() {
                None => "nothing was compared before it".to_string(),
                Some(last) => format!("what it was made from is equal: {} sites, the last {last}", d.before.len()),
            };
            [
                format!("first difference: {}", d.site),
                format!("  {}, element {}: {:e} and {:e}", place_of(&d.site, d.token), d.element, d.a, d.b),
                format!(
                    "  {} of {} values there differ, by at most {:.3e} of the largest",
                    d.count.0, d.count.1, d.relative
                ),
                format!("  {before}"),
            ]
            .join("\n")
        }
    };
    if !found.skipped.is_empty() {
        text += &format!("\nonly in the first: {}", found.skipped.join(", "));
    }
    text
}

fn json(found: &Comparison) -> serde_json::Value {
    let divergence = found.divergence.as_ref().map(|d| {
        serde_json::json!({
            "site": d.site, "sequence": d.token.0, "position": d.token.1, "element": d.element, "a": d.a, "b": d.b,
            "differ": d.count.0, "values": d.count.1, "relative": d.relative, "equal_before": d.before,
        })
    });
    serde_json::json!({
        "sites": found.sites, "values": found.values, "skipped": found.skipped, "divergence": divergence,
    })
}
