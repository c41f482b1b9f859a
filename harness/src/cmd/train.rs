use super::grad::How;
use super::{Folder, Loading, Machine, attribute, counting};
use crate::examples::{Examples, LossOptions, refusal};
use crate::run::sha256;
use anyhow::{Context, Result, bail, ensure};
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use samebits_contract::atomic_write::{self, AtomicFile};
use samebits_contract::wire::write_tensors;
use samebits_models::{
    ADAPTER_CONFIG, ADAPTER_TENSORS, Config, ModelError, Optimizer, PeftFolder, Precision, ROPE_LENGTH, StepReport,
    Trainer, folder_files, named_folder,
};
use samebits_ops::{self as ops, Cpu};
use samebits_schema::{adamw, clip_factor};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Component, Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

/// Trains a model: steps of AdamW over sequences in logical order
///
/// With --adapter the adapter is trained, in f32 whatever --dtype says, and the model stays: a PEFT folder is written. Of several
/// the metadata's `adapter` says which of them each sequence has; they are trained together, and each is written into a folder of its
/// name.
/// Reads sequences as `samebits grad` does, experts that were recorded too; step n has the B that follow those of step n - 1, from the first again
/// behind the last. Writes into a folder: steps.jsonl with loss, gradient norm and SHA-256 of all weights of each step,
/// state.safetensors with weights and moments in f32, and behind the last step a Hugging Face folder's files, or a PEFT
/// folder's. A run
/// that was killed goes on from the state when it is started again, and ends with the same bits; with more --steps a
/// finished one goes on too.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    folder: Folder,

    /// Safetensors file with `tokens`, i32 [B, T]
    #[arg(long, value_name = "FILE")]
    data: PathBuf,

    /// Steps in all
    #[arg(long, value_name = "N")]
    steps: usize,

    /// Sequences of a step
    #[arg(long, value_name = "B")]
    batch: usize,

    /// Folder to write
    #[arg(long, value_name = "DIR")]
    out: PathBuf,

    #[command(flatten)]
    loss: LossOptions,

    /// Learning rate
    #[arg(long, default_value_t = 1e-5, value_name = "X", value_parser = attribute(&adamw::OP, "lr"))]
    lr: f64,

    /// How much of the first moment is kept
    #[arg(long, default_value_t = 0.9, value_name = "X", value_parser = attribute(&adamw::OP, "beta1"))]
    beta1: f64,

    /// How much of the second moment is kept
    #[arg(long, default_value_t = 0.999, value_name = "X", value_parser = attribute(&adamw::OP, "beta2"))]
    beta2: f64,

    /// Added to the root of the second moment
    #[arg(long, default_value_t = 1e-8, value_name = "X", value_parser = attribute(&adamw::OP, "eps"))]
    eps: f64,

    /// Times --lr: the share of every weight that goes in a step
    #[arg(long, default_value_t = 0.0, value_name = "X", value_parser = attribute(&adamw::OP, "weight_decay"))]
    weight_decay: f64,

    /// Longer gradients are cut to this norm
    #[arg(long, default_value_t = 1.0, value_name = "X", value_parser = attribute(&clip_factor::OP, "max_norm"))]
    max_norm: f64,

    /// bf16: what forwards read is weights rounded to bf16; fp32: nothing is
    #[arg(long, default_value = "bf16", value_name = "bf16|fp32")]
    dtype: Precision,

    /// Steps from one write of the state to the next
    #[arg(long, default_value_t = 1, value_name = "N")]
    save_every: usize,

    /// Also seconds and tokens of each step, on stderr
    #[arg(long)]
    times: bool,

    #[command(flatten)]
    how: How,

    #[command(flatten)]
    machine: Machine,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let is_new = |folder: &&Path| !folder.as_os_str().is_empty() && !folder.exists();
    let new: Vec<&Path> = args.out.ancestors().take_while(is_new).collect();
    let found = train(args);
    if found.is_err() {
        // Where nothing was written, nothing stays: a folder that holds something is not removed.
        new.iter().for_each(|folder| drop(std::fs::remove_dir(folder)));
    }
    found
}

fn train(args: &Args) -> Result<ExitCode> {
    let cpu = args.machine.cpu(args.how.budget)?;
    ensure!(args.dtype != Precision::Fp16, "--dtype fp16: models are trained in bf16 or fp32");
    ensure!(args.save_every > 0, "--save-every 0: give at least 1");
    let place = |name: &str| args.out.join(name);
    let at_out = || format!("--out {}", args.out.display());
    atomic_write::create_folder(&args.out).with_context(at_out)?;
    let (state, lines) = (place("state.safetensors"), place("steps.jsonl"));
    let goes_on = state.exists();
    let holds = |name: &str| place(name).exists();
    ensure!(
        goes_on || !holds("config.json") && !holds(ADAPTER_CONFIG),
        "{}: holds a model and no run; name another folder",
        at_out()
    );
    atomic_write::remove_leftovers(&args.out).with_context(at_out)?;
    let examples = Examples::read(&args.data, args.loss, args.dtype)?;
    let [sequences, _] = examples.tokens.shape();
    ensure!((1..=sequences).contains(&args.batch), "--batch {}: the file has {sequences} sequences", args.batch);

    ops::keep_freed_memory();
    let dir = &args.folder.model;
    let earlier = if goes_on { rope_length_of(&state)? } else { None };
    let recorded = match (earlier, examples.tokens.rope_length) {
        (Some(length), _) => Some((&*state, length)),
        (None, length) => length.map(|length| (&*args.data, length)),
    };
    let length = args.folder.rope_length(&Config::load(dir)?, recorded)?;
    let loading = Loading::of(dir);
    let mut trainer = load(args, length, &cpu, |done, total| loading.at(done, total))?;
    drop(loading);
    args.folder.pass(trainer.config())?;
    examples.tokens.check(trainer.config(), &args.data)?;
    let settings = settings(args, &trainer, examples.temperature)?;
    let mut reports = Vec::new();
    if goes_on {
        reports = resume(&mut trainer, &cpu, &state, &lines, &settings)?;
    }
    let optimizer = Optimizer {
        lr: args.lr,
        beta1: args.beta1,
        beta2: args.beta2,
        eps: args.eps,
        weight_decay: args.weight_decay,
        max_norm: args.max_norm,
    };
    let (in_data, run) = (|e| refusal(e, &args.data), args.how.run());
    let of_step = |step: usize| (step * args.batch..(step + 1) * args.batch).map(|number| number % sequences);
    // A step's sequences by their numbers in the file.
    let in_step = |e: ModelError, step: usize| match e {
        ModelError::NotFinite { place, sequence, token, why } => {
            let sequence = of_step(step).nth(sequence).unwrap_or(sequence);
            in_data(examples.tokens.in_file(ModelError::NotFinite { place, sequence, token, why }))
        }
        e => in_data(e),
    };
    // All of the file, before a step that would stand for nothing behind a later one that is refused.
    trainer.check(&cpu, &examples.all.batch(args.how.groups), &run, &optimizer).map_err(in_data)?;
    // Behind as many steps as there are sequences the same ones come again.
    let mut ahead = trainer.step()..args.steps.min(trainer.step().saturating_add(sequences));
    if let Some(step) = ahead.find(|&step| !examples.all.any_counts(of_step(step))) {
        let (first, data) = (step * args.batch % sequences, args.data.display());
        let (step, batch) = (step + 1, args.batch);
        bail!(
            "{data}: mask: no token counts in step {step}, {batch} sequences from {first} on; raise --batch or mark one"
        );
    }
    let bar = counting(args.steps * args.batch);
    while trainer.step() < args.steps {
        let done = trainer.step() * args.batch;
        let step_before = trainer.step();
        let picked = examples.all.pick(&of_step(step_before).collect::<Vec<_>>());
        let at = |of_step: usize| bar.set_position((done + of_step) as u64);
        let started = Instant::now();
        let report = trainer.advance(&cpu, &picked.batch(args.how.groups), &run, &optimizer, at);
        let report = report.map_err(|e| in_step(e, step_before))?;
        let StepReport { step, loss, norm, sha256, flips } = &report;
        let flips = flips.map_or(String::new(), |[flips, choices]| format!(" flips {flips} of {choices}"));
        bar.suspend(|| {
            writeln!(std::io::stdout().lock(), "step {step} loss {loss} norm {norm} sha256 {sha256}{flips}")
        })?;
        if args.times {
            let (seconds, tokens) = (started.elapsed().as_secs_f64(), picked.tokens());
            let rate = tokens as f64 / seconds.max(1e-9);
            bar.suspend(|| eprintln!("step {step}: {tokens} tokens in {seconds:.3} s ({rate:.1}/s)"));
        }
        reports.push(line(&report));
        if step.is_multiple_of(args.save_every) || *step == args.steps {
            // The lines first: a state has those of all its steps.
            atomic_write::write(&lines, reports.concat().as_bytes()).with_context(at_out)?;
            let metadata = [("step".into(), step.to_string()), ("settings".into(), settings.to_string())];
            save(&state, &named_state(&trainer), &metadata.into()).with_context(at_out)?;
        }
    }
    bar.finish_and_clear();
    write(args, &trainer).with_context(at_out)?;
    Ok(ExitCode::SUCCESS)
}

/// The model, or the adapters of it that are trained.
fn load(args: &Args, length: Option<usize>, cpu: &Cpu, progress: impl FnMut(u64, u64)) -> Result<Trainer> {
    let dir = &args.folder.model;
    ensure!(args.folder.merge_adapter.is_none(), "--merge-adapter: is not trained; train an --adapter");
    match &args.folder.adapter[..] {
        [] => Ok(Trainer::load(dir, args.dtype, length, cpu, progress)?),
        adapters => {
            let adapters: Vec<_> = adapters.iter().map(|text| named_folder(text)).collect::<Result<_, _>>()?;
            let is_folder = |name: &str| Path::new(name).components().eq([Component::Normal(name.as_ref())]);
            if let Some((name, _)) = adapters.iter().find(|(name, _)| adapters.len() > 1 && !is_folder(name)) {
                bail!("--adapter {name}: several adapters are written into folders of their names, and this is none");
            }
            Ok(Trainer::load_adapters((dir, &adapters), args.dtype, length, cpu, progress)?)
        }
    }
}

/// What a run has made: the files of a Hugging Face folder, or of a PEFT folder; of several adapters, of one for each, of its name.
fn write(args: &Args, trainer: &Trainer) -> Result<()> {
    let (dir, place) = (&args.folder.model, |name: &str| args.out.join(name));
    let metadata = BTreeMap::from([("format".into(), "pt".into())]);
    let adapters = trainer.adapters();
    for (name, folder, tensors) in &adapters {
        let place = if adapters.len() > 1 { args.out.join(name) } else { args.out.clone() };
        atomic_write::create_folder(&place)?;
        let tensors = tensors.iter().map(|(name, tensor)| (name.clone(), &**tensor)).collect();
        save(&place.join(ADAPTER_TENSORS), &tensors, &metadata)?;
        // Last: with it the folder is whole.
        atomic_write::write(&place.join(ADAPTER_CONFIG), folder.config().as_bytes())?;
    }
    if !adapters.is_empty() {
        return Ok(());
    }
    let tensors = trainer.tensors().iter().map(|(name, tensor)| (name.clone(), &**tensor)).collect();
    save(&place("model.safetensors"), &tensors, &metadata)?;
    for (name, from) in folder_files(dir)? {
        let bytes = std::fs::read(&from).with_context(|| from.display().to_string())?;
        if let Some(folder) = place(&name).parent() {
            std::fs::create_dir_all(folder)?;
        }
        atomic_write::write(&place(&name), &bytes)?;
    }
    let depends = trainer.config().trained_length().is_some();
    let length = depends.then(|| trainer.config().longest());
    let config = trained_config(dir, args.dtype, length)?;
    Ok(atomic_write::write(&place("config.json"), &config)?)
}

/// The rope length of the run whose state this is, where it recorded one.
fn rope_length_of(state: &Path) -> Result<Option<usize>> {
    let at = || format!("{}: is no state of a run; remove it to begin anew", state.display());
    let (header, _) = read_header(&mut File::open(state).with_context(at)?).with_context(at)?;
    let settings = header.metadata().as_ref().and_then(|fields| fields.get("settings")).with_context(at)?;
    let settings: Value = serde_json::from_str(settings).with_context(at)?;
    Ok(settings["rope_length"].as_u64().map(|length| length as usize))
}

/// The config.json of a folder whose weights were trained: with their dtype, and the rope length that they were trained at; without
/// the packed form that the first ones may have had.
fn trained_config(dir: &Path, dtype: Precision, rope_length: Option<usize>) -> Result<Vec<u8>> {
    let text = Config::text(dir)?;
    let mut config: Map<String, Value> = serde_json::from_str(&text).with_context(|| dir.display().to_string())?;
    let name = if dtype == Precision::Fp32 { "float32" } else { "bfloat16" };
    let old = config.contains_key("torch_dtype");
    for field in [(old, "torch_dtype"), (!old || config.contains_key("dtype"), "dtype")] {
        if field.0 {
            config.insert(field.1.into(), name.into());
        }
    }
    config.remove("quantization_config");
    if let Some(Value::Object(text)) = config.get_mut("text_config") {
        text.remove("quantization_config");
    }
    if let Some(length) = rope_length {
        config.insert(ROPE_LENGTH.into(), length.into());
    }
    Ok(serde_json::to_vec_pretty(&config)?)
}

/// What decides the bits of adapters in training beside their tensors: the model's digest and that of a config, or of each by name.
fn adapted(model: &str, trainer: &Trainer) -> Value {
    let config = |folder: &PeftFolder| sha256(folder.config().as_bytes());
    match &trainer.adapters()[..] {
        [(_, folder, _)] => json!([model, config(folder)]),
        all => json!([model, all.iter().map(|(name, folder, _)| (*name, config(folder))).collect::<BTreeMap<_, _>>()]),
    }
}

/// What decides the bits of a run but for how many steps it has.
fn settings(args: &Args, trainer: &Trainer, temperature: f64) -> Result<Value> {
    let data = std::fs::read(&args.data).with_context(|| args.data.display().to_string())?;
    let depends = trainer.config().trained_length().is_some();
    let rope_length = depends.then(|| trainer.config().longest());
    let dir = &args.folder.model;
    let mut config: Value = serde_json::from_str(&Config::text(dir)?).with_context(|| dir.display().to_string())?;
    config.sort_all_objects();
    Ok(json!({
        "model": trainer.sha256(),
        "adapter": trainer.model_sha256().map(|model| adapted(model, trainer)),
        // As its fields have it, whatever stands between them.
        "config": sha256(config.to_string().as_bytes()),
        "rope_length": rope_length,
        "data": sha256(&data),
        "batch": args.batch,
        "groups": args.how.groups,
        // Where the temperature was said does not matter.
        "loss": format!("{:?}", args.loss.at(None)),
        "temperature": temperature,
        "dtype": args.dtype.name(),
        "optimizer": [args.lr, args.beta1, args.beta2, args.eps, args.weight_decay, args.max_norm],
    }))
}

/// A line of steps.jsonl.
fn line(report: &StepReport) -> String {
    let StepReport { step, loss, norm, sha256, flips } = report;
    let mut line = json!({"step": step, "loss": loss, "norm": norm, "sha256": sha256});
    if let Some([flips, choices]) = flips {
        line["flips"] = json!(flips);
        line["choices"] = json!(choices);
    }
    format!("{line}\n")
}

/// The letters of weights and moments in the state.
const LETTERS: [&str; 3] = ["w", "m", "v"];

fn named_state(trainer: &Trainer) -> BTreeMap<String, &ops::Tensor> {
    let named = trainer.state().iter().flat_map(|(name, state)| {
        LETTERS.iter().zip(state).map(move |(letter, tensor)| (format!("{letter}.{name}"), tensor))
    });
    named.collect()
}

/// Goes on from the state of a folder; the lines of its steps.
fn resume(trainer: &mut Trainer, cpu: &Cpu, path: &Path, lines: &Path, settings: &Value) -> Result<Vec<String>> {
    let at = || path.display().to_string();
    let mut file = File::open(path).with_context(at)?;
    let broken = || format!("{}: is no state of a run; remove it to begin anew", at());
    let (header, data) = read_header(&mut file).with_context(broken)?;
    let field = |name: &str| header.metadata().as_ref().and_then(|fields| fields.get(name)).with_context(broken);
    let step: usize = field("step")?.parse().with_context(broken)?;
    let earlier: Value = serde_json::from_str(field("settings")?).with_context(broken)?;
    for (name, value) in settings.as_object().into_iter().flatten() {
        let before = &earlier[name];
        ensure!(before == value, "{}: the run began with {name} {before}, not {value}; name another folder", at());
    }
    let mut state = BTreeMap::new();
    for name in trainer.state().keys() {
        let mut three = Vec::new();
        for letter in LETTERS {
            let info = header.info(&format!("{letter}.{name}")).with_context(broken)?;
            three.push(read_tensor(&mut file, data, info).with_context(broken)?);
        }
        state.insert(name.clone(), three.try_into().ok().expect("three letters"));
    }
    trainer.resume(cpu, step, state).with_context(at)?;
    let text = std::fs::read_to_string(lines).with_context(|| lines.display().to_string())?;
    let kept: Vec<String> = text.lines().take(step).map(|line| format!("{line}\n")).collect();
    ensure!(kept.len() == step, "{}: has {} of {step} steps", lines.display(), kept.len());
    Ok(kept)
}

/// The header of a safetensors file, and where its data begins.
fn read_header(file: &mut File) -> Result<(Metadata, u64)> {
    let mut length = [0; 8];
    file.read_exact(&mut length)?;
    let data = u64::from_le_bytes(length).checked_add(8).context("a header without end")?;
    ensure!(data <= file.metadata()?.len(), "its header does not end");
    let mut header = vec![0; (data - 8) as usize];
    file.read_exact(&mut header)?;
    Ok((serde_json::from_slice(&header)?, data))
}

/// A tensor of f32, a piece at a time.
fn read_tensor(file: &mut File, data: u64, info: &TensorInfo) -> Result<ops::Tensor> {
    let (start, end) = info.data_offsets;
    let count = info.shape.iter().try_fold(4usize, |bytes, &extent| bytes.checked_mul(extent));
    ensure!(info.dtype == Dtype::F32 && end.checked_sub(start) == count, "a tensor of another size than its shape");
    ensure!(end as u64 <= file.metadata()?.len() - data, "a tensor behind the end");
    file.seek(SeekFrom::Start(data + start as u64))?;
    let (mut values, mut bytes) = (Vec::with_capacity((end - start) / 4), vec![[0; 4]; 1 << 18]);
    while values.len() < (end - start) / 4 {
        let piece = ((end - start) / 4 - values.len()).min(bytes.len());
        file.read_exact(bytes[..piece].as_flattened_mut())?;
        values.extend(bytes[..piece].iter().map(|bytes| f32::from_le_bytes(*bytes)));
    }
    Ok(ops::Tensor::new(values, &info.shape)?)
}

/// Writes tensors that are on the host to a file, a piece at a time: there is no room for all of them twice.
fn save(path: &Path, tensors: &BTreeMap<String, &ops::Tensor>, metadata: &BTreeMap<String, String>) -> Result<()> {
    let mut file = AtomicFile::create(path)?;
    let forms = tensors.iter().map(|(name, tensor)| (&name[..], tensor.dtype(), tensor.shape())).collect();
    write_tensors(&mut file, forms, metadata, |name, file| tensors[name].view().write(file))?;
    Ok(file.commit()?)
}
