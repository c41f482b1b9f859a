use super::{Folder, Machine, Nonfinite, On, Working, or_allow, place, warn};
use crate::dump::Writer;
use anyhow::{Context, Result, bail, ensure};
use safetensors::{Dtype, SafeTensors};
use samebits_contract::atomic_write;
use samebits_contract::tensor::Tensor;
use samebits_contract::wire::File;
use samebits_models::{AdapterChoice, Config, Grouping, ModelError, PageOrder, Precision, Run, SamplingRule, Schedule};
use samebits_ops::Cpu;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Runs a model over tokens and writes its logits, or a component of images over what its forward takes
///
/// Reads `tokens`, i32 [B, T], from a safetensors file (other tensors in it are left alone) and writes a safetensors
/// file with `logits`, f32 [B, T, V]. Where the file's metadata has a `rope_length`, that is the run's. With `attention_mask`, i32 [B, T], only tokens at a 1 belong to their sequence: the
/// padding may stand on either side, and its logits are 0. Of several adapters the metadata's `adapter` says which each sequence has: a
/// name, or a JSON list of a name or null for each. The schedule, the batch, the pages, the instruction set and the
/// threads move no bit of it.
///
/// With --inputs the folder is a component of diffusers or transformers (AutoencoderKL, UNet2DConditionModel, CLIPTextModel,
/// CLIPTextModelWithProjection), and the file names its tensors as the arguments of that forward: `z` to decode or `sample` to
/// encode; `sample`, `timestep`, `encoder_hidden_states` (`text_embeds`, `time_ids`); `input_ids` (`attention_mask`). The answer is
/// `out`, f32: of an encoded image the moments, of which the first half are means.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    folder: Folder,

    /// Safetensors file with `tokens`, i32 [B, T]
    #[arg(long, value_name = "FILE", required_unless_present = "inputs")]
    tokens: Option<PathBuf>,

    /// Safetensors file with what a component of images takes, by the names of its arguments
    #[arg(long, value_name = "FILE", conflicts_with_all = OF_TOKENS)]
    inputs: Option<PathBuf>,

    /// Safetensors file to write; it appears whole or not at all
    #[arg(long, value_name = "FILE")]
    out: PathBuf,

    /// bf16 or fp16: as models are published; fp32: activations in fp32, the reference
    #[arg(long, default_value = "bf16", value_name = "bf16|fp16|fp32")]
    dtype: Precision,

    /// All tokens at once, one at a time, N at a time, some sequences this way and some that, N at a time with wrong guesses
    /// among them, or behind N tokens that another sequence computed
    #[arg(long, default_value = "prefill", value_name = "prefill|decode|chunk:N|mixed|speculative:N|prefix:N")]
    schedule: Schedule,

    /// The B sequences in one batch, or each alone
    #[arg(long, default_value = "together", value_name = "together|alone")]
    batch: Grouping,

    /// Positions in a page of the KV cache
    #[arg(long, default_value_t = samebits_models::PAGE_SIZE, value_name = "N")]
    page_size: usize,

    /// Which page is taken next
    #[arg(long, default_value = "ascending", value_name = "ascending|descending|scattered")]
    page_order: PageOrder,

    /// Also write everything that was computed on the way, for `samebits trace`; it appears whole or not at all
    #[arg(long, value_name = "FILE")]
    dump: Option<PathBuf>,

    /// Most bytes of the dump
    #[arg(long, default_value_t = 8 << 30, value_name = "BYTES")]
    cap: u64,

    #[command(flatten)]
    nonfinite: Nonfinite,

    #[command(flatten)]
    on: On,

    /// Most bytes of workspace of an op [default: no limit]
    #[arg(long, value_name = "BYTES")]
    budget: Option<usize>,

    #[command(flatten)]
    machine: Machine,
}

/// Options that say something of tokens alone.
const OF_TOKENS: [&str; 14] = [
    "tokens",
    "adapter",
    "merge_adapter",
    "storage",
    "strict",
    "rope_length",
    "schedule",
    "batch",
    "page_size",
    "page_order",
    "dump",
    "cap",
    "allow_nonfinite",
    "device",
];

pub fn run(args: &Args) -> Result<ExitCode> {
    let cpu = args.machine.cpu(args.budget)?;
    let out = || format!("--out {}", args.out.display());
    // Before the work, so that a wrong path costs nothing.
    atomic_write::check(&args.out).with_context(out)?;
    let tensors = match (&args.inputs, &args.tokens) {
        (Some(inputs), _) => super::component::forward(&args.folder.model, inputs, args.dtype, &cpu)?,
        (None, Some(tokens)) => BTreeMap::from([("logits".into(), logits(args, tokens, &cpu)?)]),
        (None, None) => bail!("neither --tokens nor --inputs is given"),
    };
    let file = File { tensors, metadata: BTreeMap::new() };
    atomic_write::write(&args.out, &file.encode()).with_context(out)?;
    Ok(ExitCode::SUCCESS)
}

/// `[B,T,V]` of a model over the tokens of a file.
fn logits(args: &Args, path: &Path, cpu: &Cpu) -> Result<Tensor> {
    let device = args.on.open()?;
    if let Some(dump) = &args.dump {
        atomic_write::check(dump).with_context(|| format!("--dump {}", dump.display()))?;
    }
    ensure!(args.page_size > 0, "--page-size 0: give at least 1");
    let tokens = Tokens::read(path)?;
    let Tokens { batch, len, .. } = tokens;
    let model = args.folder.load(args.dtype, cpu, tokens.rope_length.map(|length| (path, length)))?;
    tokens.check(model.config(), path)?;
    let model = place(model, cpu, device.as_ref())?;
    let working = Working::on(format!("{batch} sequences of {len} tokens"));
    let sequences = tokens.sequences();
    let sequences: Vec<&[i32]> = sequences.iter().map(Vec::as_slice).collect();
    let mut writer = match &args.dump {
        None => None,
        Some(path) => Some(Writer::create(path, args.cap).with_context(|| format!("--dump {}", path.display()))?),
    };
    let run = Run {
        schedule: args.schedule,
        grouping: args.batch,
        page_size: args.page_size,
        page_order: args.page_order,
        allow_nonfinite: args.nonfinite.allow_nonfinite,
        adapters: &tokens.adapters,
        experts: None,
        probe: writer.as_mut().map(|writer| writer as _),
    };
    let found = model.forward_run(cpu, &sequences, run).map_err(|e| match tokens.in_file(or_allow(e)) {
        // The dump's, which names itself.
        e @ ModelError::File { .. } => e.into(),
        e => anyhow::Error::new(e).context(path.display().to_string()),
    })?;
    if let (Some(writer), Some(path)) = (writer, &args.dump) {
        writer.finish().with_context(|| format!("--dump {}", path.display()))?;
    }
    drop(working);
    let vocab = model.config().vocab;
    Ok(Tensor::fp32(&[batch, len, vocab], tokens.spread(&found, vocab)))
}

/// `tokens` [B, T], row-major, and which of them count.
pub struct Tokens {
    tokens: Vec<i32>,
    mask: Option<Vec<i32>>,
    batch: usize,
    len: usize,
    /// The rope length that the file says its texts were made with, in its metadata.
    pub rope_length: Option<usize>,
    /// What it says of the `temperature` and the `dtype` that they were sampled at and in.
    pub sampled: [Option<String>; 2],
    /// What else it says of how they were sampled, as `sampling` or by the names of settings; and of each of them alone.
    pub settings: Map<String, Value>,
    pub settings_of_each: Option<Vec<Map<String, Value>>>,
    /// Whether it asks that experts which it records are chosen.
    pub replays_experts: bool,
    /// The adapters of the sequences as runs take them: one for all or one for each; nothing where it says nothing.
    pub adapters: Vec<AdapterChoice>,
}

/// What metadata say of adapters: a name, or a list of names and nulls in JSON.
fn adapters(text: &str, sequences: usize) -> Result<Vec<AdapterChoice>> {
    if !text.starts_with('[') {
        return Ok(vec![AdapterChoice::Named(text.into())]);
    }
    let form = "metadata `adapter`: it must be the name of one, or a list of a name or null for each sequence";
    let names: Vec<Option<String>> = serde_json::from_str(text).context(form)?;
    ensure!(names.len() == sequences, "metadata `adapter`: has {} names for {sequences} sequences", names.len());
    Ok(names.into_iter().map(|name| name.map_or(AdapterChoice::Plain, AdapterChoice::Named)).collect())
}

impl Tokens {
    /// Reads `tokens` and `attention_mask` alone: the file may hold tensors of dtypes that are not the contract's.
    pub fn read(path: &Path) -> Result<Tokens> {
        let bytes = std::fs::read(path).with_context(|| path.display().to_string())?;
        Tokens::parse(&bytes).with_context(|| path.display().to_string())
    }

    fn parse(bytes: &[u8]) -> Result<Tokens> {
        let file = SafeTensors::deserialize(bytes).context("not a safetensors file")?;
        Tokens::of(&file, bytes)
    }

    /// Those of a file that has been read, and its bytes.
    pub fn of(file: &SafeTensors, bytes: &[u8]) -> Result<Tokens> {
        let (_, header) = SafeTensors::read_metadata(bytes).context("not a safetensors file")?;
        let field = |name: &str| header.metadata().as_ref().and_then(|fields| fields.get(name));
        let rope_length = field("rope_length").map(|text| text.parse());
        let rope_length = rope_length.transpose().context("metadata `rope_length`: it must be a whole number")?;
        let replay = field("replay").map(String::as_str);
        ensure!(
            [None, Some("experts")].contains(&replay),
            "metadata `replay`: is `{}`; use experts",
            replay.unwrap_or("")
        );
        let sampled = ["temperature", "dtype"].map(|name| field(name).cloned());
        let (mut settings, mut settings_of_each) = (Map::new(), None);
        if let Some(text) = field("sampling") {
            let form = "metadata `sampling`: it must be an object of settings, or a list of one for each sequence";
            match serde_json::from_str(text).context(form)? {
                Value::Object(object) => settings = object,
                list @ Value::Array(_) => {
                    settings_of_each = Some(serde_json::from_value::<Vec<_>>(list).context(form)?)
                }
                _ => bail!(form),
            }
            let each = settings_of_each.iter().flatten().chain([&settings]);
            let unknown = each.flat_map(Map::keys).find(|name| !SamplingRule::FIELDS.contains(&name.as_str()));
            if let Some(name) = unknown {
                let all = SamplingRule::FIELDS.join(", ");
                bail!("metadata `sampling`: `{name}` is no setting of this version; use {all}");
            }
        }
        for name in SamplingRule::FIELDS.iter().filter(|name| **name != "temperature") {
            let value = field(name).map(|text| serde_json::from_str(text).unwrap_or_else(|_| text.clone().into()));
            settings.extend(value.map(|value| (name.to_string(), value)));
        }
        let Ok(tensor) = file.tensor("tokens") else {
            bail!("tensor `tokens`: missing; store the tokens as I32 [B, T] under that name");
        };
        ensure!(tensor.dtype() == Dtype::I32, "tensor `tokens`: dtype is {:?}; it must be I32", tensor.dtype());
        let &[batch, len] = tensor.shape() else {
            bail!("tensor `tokens`: shape {:?} must have the form [B, T]", tensor.shape());
        };
        ensure!(batch > 0 && len > 0, "tensor `tokens`: shape [{batch}, {len}] holds no tokens; give at least one");
        let mask = match file.tensor("attention_mask") {
            Err(_) => None,
            Ok(mask) => {
                let name = "tensor `attention_mask`";
                ensure!(mask.dtype() == Dtype::I32, "{name}: dtype is {:?}; it must be I32", mask.dtype());
                ensure!(mask.shape() == [batch, len], "{name}: shape {:?} must be that of tokens", mask.shape());
                let mask = words(mask.data(), i32::from_le_bytes);
                for (i, row) in mask.chunks_exact(len).enumerate() {
                    ensure!(row.iter().all(|m| [0, 1].contains(m)), "{name}: row {i} holds more than 0 and 1");
                    let edges = row.windows(2).filter(|two| two[0] != two[1]).count();
                    let whole = edges < 2 || edges == 2 && row[0] == 0;
                    ensure!(
                        row.contains(&1) && whole,
                        "{name}: row {i} must be one run of ones, padded on either side"
                    );
                }
                Some(mask)
            }
        };
        if let Some(each) = &settings_of_each {
            ensure!(each.len() == batch, "metadata `sampling`: has {} settings for {batch} sequences", each.len());
        }
        let adapters = field("adapter").map_or(Ok(Vec::new()), |text| adapters(text, batch))?;
        Ok(Tokens {
            tokens: words(tensor.data(), i32::from_le_bytes),
            mask,
            batch,
            len,
            rope_length,
            sampled,
            settings,
            settings_of_each,
            replays_experts: replay.is_some(),
            adapters,
        })
    }

    /// Refuses tokens and lengths that the model does not have, by their place in the file at `path`, padding counted; names
    /// what looks like padding and is taken for tokens.
    pub fn check(&self, config: &Config, path: &Path) -> Result<()> {
        self.check_places(config).with_context(|| path.display().to_string())?;
        let Some(pad) = config.pad.filter(|_| self.mask.is_none()) else { return Ok(()) };
        for (b, row) in self.tokens.chunks_exact(self.len).enumerate() {
            let first = row.iter().take_while(|token| **token == pad).count();
            let last = row.iter().rev().take_while(|token| **token == pad).count();
            // One may be meant: some models pad with the token that begins or ends a text.
            if first.max(last) > 1 {
                let (place, count) = if first > last { ("begins", first) } else { ("ends", last) };
                warn(&format!(
                    "{}: sequence {b} {place} with {count} tokens {pad}, config.json's pad_token_id, and there is no tensor \
                     `attention_mask`: they are taken for tokens of the text",
                    path.display()
                ));
                break;
            }
        }
        Ok(())
    }

    fn check_places(&self, config: &Config) -> Result<()> {
        for (b, row) in self.tokens.chunks_exact(self.len).enumerate() {
            let counts = |t: &usize| self.counts(b * self.len + t);
            let wrong = |t: &usize| !usize::try_from(row[*t]).is_ok_and(|token| token < config.vocab);
            if let Some(t) = (0..self.len).filter(counts).find(wrong) {
                let last = config.vocab - 1;
                bail!("tensor `tokens`: element [{b}, {t}] is {}; the vocabulary is 0 to {last}", row[t]);
            }
            let length = (0..self.len).filter(counts).count();
            let (longest, positions) = (config.longest(), config.max_positions);
            let more = if longest < positions { "; declare more with --rope-length" } else { "" };
            ensure!(
                length <= longest,
                "tensor `tokens`: sequence {b} has {length}; the rope length of the run is {longest}, the model has {positions} \
                 positions{more}"
            );
        }
        Ok(())
    }

    fn counts(&self, place: usize) -> bool {
        self.mask.as_ref().is_none_or(|mask| mask[place] == 1)
    }

    /// Sequences and places of each.
    pub fn shape(&self) -> [usize; 2] {
        [self.batch, self.len]
    }

    /// The tokens that count, of each sequence.
    pub fn sequences(&self) -> Vec<Vec<i32>> {
        self.of_sequences(&self.tokens)
    }

    /// The values, one for each place, of the tokens that count.
    pub fn of_sequences<T: Copy>(&self, values: &[T]) -> Vec<Vec<T>> {
        let row = |b: usize| (b * self.len..(b + 1) * self.len).filter(|&i| self.counts(i)).map(|i| values[i]);
        (0..self.batch).map(|b| row(b).collect()).collect()
    }

    /// The places of the tokens that count, of each sequence.
    pub fn places_of_sequences(&self) -> Vec<Vec<usize>> {
        self.of_sequences(&(0..self.tokens.len()).collect::<Vec<_>>())
    }

    /// The first place of a sequence whose token does not count and for which `is` holds.
    pub fn outside(&self, is: impl Fn(usize) -> bool) -> Option<usize> {
        (0..self.tokens.len()).find(|&place| !self.counts(place) && is(place))
    }

    /// The places of the tokens that count, in the order of the sequences.
    pub fn places(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.tokens.len()).filter(|&place| self.counts(place))
    }

    /// An error about a token of a sequence, by the place of the token in the file, padding counted.
    pub fn in_file(&self, e: ModelError) -> ModelError {
        match e {
            ModelError::NotFinite { place, sequence, token, why } => {
                let places = (0..self.len).filter(|t| self.counts(sequence * self.len + t));
                let token = places.clone().nth(token).unwrap_or(token);
                ModelError::NotFinite { place, sequence, token, why }
            }
            e => e,
        }
    }

    /// The place of the first token of each sequence.
    pub fn firsts(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.batch).filter_map(|b| (b * self.len..(b + 1) * self.len).find(|&place| self.counts(place)))
    }

    /// Rows of all places, such as logits, from those of the tokens that count.
    pub fn spread(&self, found: &[f32], vocab: usize) -> Vec<f32> {
        let mut logits = vec![0.0; self.tokens.len() * vocab];
        for (place, row) in self.places().zip(found.chunks_exact(vocab)) {
            logits[place * vocab..(place + 1) * vocab].copy_from_slice(row);
        }
        logits
    }
}

/// Little-endian words.
pub fn words<T>(data: &[u8], word: impl Fn([u8; 4]) -> T) -> Vec<T> {
    data.as_chunks::<4>().0.iter().map(|bytes| word(*bytes)).collect()
}
