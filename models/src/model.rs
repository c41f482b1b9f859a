use crate::adapters::Adapters;
use crate::decoder::{Decoder, Runner, expected, listed};
use crate::generate::{self, Generation};
use crate::machine::Machine;
use crate::memory::buffer;
use crate::rotary::RopeLength;
use crate::state::States;
use crate::step::{Rows, SequenceInput};
use crate::tokenizer::Tokenizer;
use crate::trace::{TraceHook, all_finite};
use crate::weights::Weights;
use crate::{
    AdapterChoice, Audit, Config, Grouping, ModelError, PeftFolder, Run, Sampling, SamplingRule, Schedule,
    StorageContract, gguf,
};
use samebits_ops::device::Device;
use samebits_ops::{Cpu, DType, Tensor, TensorRef};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::{Arc, OnceLock};

/// What matrix products and attention read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// Weights in bf16, rounded once where they are stored wider; activations are rounded to bf16 where a product reads
    /// them.
    Bf16,
    /// The same with fp16.
    Fp16,
    /// Weights widened exactly; nothing is rounded below f32.
    Fp32,
}

impl Precision {
    /// Every precision.
    pub const ALL: [Precision; 3] = [Precision::Bf16, Precision::Fp16, Precision::Fp32];

    /// `bf16`, `fp16` or `fp32`.
    pub fn name(self) -> &'static str {
        match self {
            Precision::Bf16 => "bf16",
            Precision::Fp16 => "fp16",
            Precision::Fp32 => "fp32",
        }
    }

    pub(crate) fn dtype(self) -> DType {
        match self {
            Precision::Bf16 => DType::Bf16,
            Precision::Fp16 => DType::Fp16,
            Precision::Fp32 => DType::Fp32,
        }
    }
}

impl FromStr for Precision {
    type Err = ModelError;

    fn from_str(text: &str) -> Result<Precision, ModelError> {
        Precision::ALL
            .into_iter()
            .find(|precision| precision.name() == text)
            .ok_or_else(|| ModelError::input("precision", format!("`{text}` is not bf16, fp16 or fp32")))
    }
}

/// A model's folder, and what is said of it.
#[derive(Clone, Copy, Debug)]
pub struct ModelFolder<'a> {
    /// A Hugging Face folder or a GGUF file.
    pub dir: &'a Path,
    /// PEFT folder of an adapter that is added to its matrices: each is their sum, rounded once.
    pub merged: Option<&'a Path>,
    /// What admits how its weights are stored.
    pub contract: StorageContract,
}

impl<'a> ModelFolder<'a> {
    /// The folder alone, under the first contract.
    pub fn of(dir: &'a Path) -> ModelFolder<'a> {
        ModelFolder { dir, merged: None, contract: StorageContract::Ws1 }
    }
}

/// Files of a model folder that go with its weights as they are, beside config.json: what a tokenizer is made of.
const FOLDER_FILES: [&str; 16] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "tokenizer.model.v3",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "tiktoken.model",
    "chat_template.jinja",
    "chat_template.json",
];

/// The files of the folder `dir` that go with its weights as they are, all but config.json: each by its name in the folder.
///
/// # Errors
/// A folder that cannot be read.
pub fn folder_files(dir: &Path) -> Result<Vec<(String, PathBuf)>, ModelError> {
    if gguf::is_gguf(dir) {
        return Err(ModelError::file(dir, "is a GGUF file; what is written needs the files of the model's folder"));
    }
    let unreadable = |e: std::io::Error| ModelError::file(dir, format!("cannot be read: {e}"));
    let mut found = Vec::new();
    for folder in ["", "additional_chat_templates/"] {
        let place = dir.join(folder);
        if !place.is_dir() && !folder.is_empty() {
            continue;
        }
        for entry in std::fs::read_dir(&place).map_err(unreadable)? {
            let Ok(name) = entry.map_err(unreadable)?.file_name().into_string() else { continue };
            let code = [".tiktoken", ".jinja"].iter().any(|end| name.ends_with(end));
            if (code || folder.is_empty() && FOLDER_FILES.contains(&&name[..])) && place.join(&name).is_file() {
                found.push((format!("{folder}{name}"), place.join(&name)));
            }
        }
    }
    found.sort();
    Ok(found)
}

/// A decoder language model with its weights in memory, packed for one [`Precision`].
pub struct Model {
    /// Where it came from, if from a folder.
    dir: Option<PathBuf>,
    pub(crate) decoder: Arc<Decoder>,
    /// Where its weights are; `None` for the processor.
    device: Option<Device>,
    tokenizer: OnceLock<Tokenizer>,
}

impl Model {
    /// Loads the Hugging Face folder `dir`; `cpu` packs the weights, which then run on any [`Cpu`].
    ///
    /// # Errors
    /// Any file, field or tensor that is missing, damaged, unexpected, not finite or asks for something unsupported.
    /// `tokenizer.json` is not needed before [`Model::generate`].
    pub fn load(dir: &Path, precision: Precision, cpu: &Cpu) -> Result<Model, ModelError> {
        Model::open(&ModelFolder::of(dir), precision, cpu, |_, _| {})
    }

    /// [`Model::load`] of a folder with what is said of it, which calls `progress(read, total)` with bytes as it goes.
    ///
    /// # Errors
    /// As [`Model::load`]; weights that the contract does not admit; an adapter that does not fit the model.
    pub fn open(
        folder: &ModelFolder,
        precision: Precision,
        cpu: &Cpu,
        progress: impl FnMut(u64, u64),
    ) -> Result<Model, ModelError> {
        let &ModelFolder { dir, merged, contract } = folder;
        let config = Config::load(dir)?;
        config.admitted(dir, contract)?;
        let mut files = Weights::open(dir)?.report_to(progress);
        if let Some(adapter) = merged {
            let Weights { parameters, adaptable, .. } = listed(&config);
            files.merged = Some(PeftFolder::read(adapter, (&parameters, &adaptable))?);
        }
        let decoder = Decoder::load(&config, files, precision.dtype(), cpu, true);
        let decoder = Arc::new(decoder.map_err(|e| Audit::all_of(dir, e))?);
        Ok(Model { dir: Some(dir.into()), decoder, device: None, tokenizer: OnceLock::new() })
    }

    /// SHA-256 of the adapter that was added to its matrices, where one was ([`ModelFolder::merged`]).
    pub fn merged(&self) -> Option<&str> {
        self.decoder.merged.as_deref()
    }

    /// The model of a folder as it is in training: every parameter is rounded once to `precision`, also those that
    /// [`Model::load`] reads in f32. Where the folder holds nothing wider, it is the same model.
    ///
    /// # Errors
    /// As [`Model::load`].
    pub fn load_rounded(
        dir: &Path,
        precision: Precision,
        contract: StorageContract,
        cpu: &Cpu,
    ) -> Result<Model, ModelError> {
        let (config, dtype) = (Config::load(dir)?, precision.dtype());
        config.admitted(dir, contract)?;
        let decoder = Decoder::load(&config, Weights::open(dir)?.rounded_to(dtype), dtype, cpu, true);
        let decoder = decoder.map_err(|e| Audit::all_of(dir, e))?;
        Ok(Model { dir: Some(dir.into()), decoder: decoder.into(), device: None, tokenizer: OnceLock::new() })
    }

    /// A model of `config` by tensors in memory, under the names that a folder of it has: floats on the host, in row-major
    /// order. Every parameter is rounded once to `precision`, as [`Model::load_rounded`]. `dir` has the tokenizer.
    ///
    /// # Errors
    /// A tensor that is missing, unexpected, of another shape or not finite.
    pub fn of_tensors(
        config: &Config,
        tensors: &BTreeMap<String, TensorRef>,
        precision: Precision,
        dir: Option<&Path>,
        cpu: &Cpu,
    ) -> Result<Model, ModelError> {
        let dtype = precision.dtype();
        let decoder = Decoder::load(config, Weights::of(tensors).rounded_to(dtype), dtype, cpu, true)?;
        Ok(Model { dir: dir.map(Path::to_owned), decoder: decoder.into(), device: None, tokenizer: OnceLock::new() })
    }

    /// Packs other weights, as [`Model::of_tensors`], a layer at a time in the place of the old one: no more than one is in
    /// memory twice. Where they are refused, the model stays what it was. A [`Forward`](crate::Forward) keeps the weights
    /// that it ran with.
    ///
    /// # Errors
    /// As [`Model::of_tensors`]; a model on a device; too little memory, and then nothing runs before an update is whole.
    pub fn update(&mut self, tensors: &BTreeMap<String, TensorRef>, cpu: &Cpu) -> Result<(), ModelError> {
        if self.is_on_device() {
            return Err(ModelError::input("device", "weights are packed on the processor; load the model there"));
        }
        let dtype = self.decoder.dtype;
        let weights = || Weights::of(tensors).rounded_to(dtype);
        match Arc::get_mut(&mut self.decoder) {
            Some(decoder) => {
                decoder.check(weights(), cpu)?;
                decoder.update(weights(), cpu)?;
            }
            None => {
                let adapters = self.decoder.adapters.clone();
                let mut decoder = Decoder::load(self.config(), weights(), dtype, cpu, true)?;
                decoder.adapters = adapters;
                self.decoder = decoder.into();
            }
        }
        Ok(())
    }

    /// The same model with the adapters of some PEFT folders beside it, each under a name: every text has one of them or none
    /// ([`AdapterChoice`]). Gradients are those of the adapters then, and the weights of the model have none.
    ///
    /// # Errors
    /// An adapter that does not fit the model, all that is wrong with it at once; a name that stands twice; a model that has
    /// adapters already, or is on a device; a forward that waits for its reverse pass.
    pub fn with_adapters(mut self, cpu: &Cpu, folders: &[(String, PathBuf)]) -> Result<Model, ModelError> {
        if folders.is_empty() {
            return Ok(self);
        }
        let of_model = (&self.decoder.parameters, &self.decoder.adaptable);
        let read = folders.iter().map(|(name, dir)| Ok((name.clone(), PeftFolder::read(dir, of_model)?)));
        let adapters = Adapters::of_folders(read.collect::<Result<_, ModelError>>()?, cpu)?;
        let own = self.adapters_mut()?;
        if !own.is_empty() {
            return Err(ModelError::input("adapter", "the model has some already; load all of them together"));
        }
        *own = adapters;
        Ok(self)
    }

    /// Gives an adapter other tensors, f32 under their names in its folder. Where they are refused, it stays what it was.
    ///
    /// # Errors
    /// A tensor that is missing, unexpected, of another shape or not finite; a model on a device; a forward that waits for its
    /// reverse pass.
    pub fn update_adapter(
        &mut self,
        name: &str,
        tensors: &BTreeMap<String, TensorRef>,
        cpu: &Cpu,
    ) -> Result<(), ModelError> {
        self.adapters_mut()?.update(name, tensors, cpu)
    }

    fn adapters_mut(&mut self) -> Result<&mut Adapters, ModelError> {
        if self.is_on_device() {
            return Err(ModelError::input("device", "adapters are packed on the processor; load the model there"));
        }
        let adapters = Arc::get_mut(&mut self.decoder).and_then(|decoder| Arc::get_mut(&mut decoder.adapters));
        let waits = "a forward of the model waits for its reverse pass; drop it first";
        adapters.ok_or_else(|| ModelError::input("adapter", waits))
    }

    /// The folder of the adapter that is chosen.
    ///
    /// # Errors
    /// As [`Model::adapter`].
    pub fn adapter_folder(&self, choice: &AdapterChoice) -> Result<Option<&PeftFolder>, ModelError> {
        Ok(self.decoder.adapters.find(choice)?.map(|number| self.decoder.adapters.folder(number)))
    }

    /// Name and SHA-256 of every adapter ([`PeftFolder::sha256`]).
    pub fn adapters(&self) -> impl Iterator<Item = (&str, &str)> {
        self.decoder.adapters.names()
    }

    /// The name of the adapter that is chosen; `None` for none.
    ///
    /// # Errors
    /// One that the model does not have; no choice between several.
    pub fn adapter(&self, choice: &AdapterChoice) -> Result<Option<&str>, ModelError> {
        Ok(self.decoder.adapters.find(choice)?.map(|number| self.decoder.adapters.name(number)))
    }

    /// Name and shape of all that gradients are made of: every parameter, or those of the adapter; of several adapters, those of
    /// each behind its name, `NAME/parameter`.
    pub fn trained(&self) -> &BTreeMap<String, Vec<usize>> {
        self.decoder.trained()
    }

    /// The tensors of a Hugging Face folder in f32.
    ///
    /// # Errors
    /// A file that is missing or damaged; a tensor that is not finite, or of another dtype than BF16, F16 and F32.
    pub fn read_tensors(dir: &Path) -> Result<BTreeMap<String, Tensor>, ModelError> {
        let mut weights = Weights::open(dir)?;
        if let Ok(config) = Config::load(dir) {
            config.admitted(dir, StorageContract::Ws1)?;
            weights.drop_biases_of_zeros(&expected(&config))?;
        }
        weights.read_all().collect()
    }

    /// Name and shape of every parameter.
    pub fn parameters(&self) -> &BTreeMap<String, Vec<usize>> {
        &self.decoder.parameters
    }

    /// The name of the parameter that a tensor is once more, under the name of a later use of a shared block.
    pub fn shared_name(&self, name: &str) -> Option<String> {
        self.config().shared_name(name)
    }

    /// Names of the tensors that are read and are no parameters.
    pub fn constants(&self) -> impl Iterator<Item = &String> {
        self.decoder.constants.keys()
    }

    /// The same model with its weights in the memory of `device`, where all of it then runs but for tables of angles,
    /// which experts take which tokens, and what is done with logits. Every schedule gives the same bits.
    ///
    /// # Errors
    /// [`ModelError::Op`] when the device has no room, or the model is on a device already.
    pub fn to_device(self, cpu: &Cpu, device: &Device) -> Result<Model, ModelError> {
        if self.device.is_some() {
            return Err(ModelError::input("device", "the model is on one already; load it anew"));
        }
        let Some(mut decoder) = Arc::into_inner(self.decoder) else {
            return Err(ModelError::input(
                "device",
                "a forward of the model waits for its reverse pass; drop it first",
            ));
        };
        decoder.move_to(cpu, device)?;
        Ok(Model { decoder: Arc::new(decoder), device: Some(device.clone()), ..self })
    }

    /// The same weights on the same device, run under the counters and the budget of `device`; `None` where the model is on
    /// the processor.
    pub fn under(&self, device: &Device) -> Option<Model> {
        self.device.as_ref()?;
        let (dir, decoder, device) = (self.dir.clone(), self.decoder.clone(), Some(device.clone()));
        Some(Model { dir, decoder, device, tokenizer: OnceLock::new() })
    }

    /// Sizes and parameters.
    pub fn config(&self) -> &Config {
        &self.decoder.config
    }

    /// The same model with other frequencies of its rotary positions, where their scaling depends on a length.
    ///
    /// # Errors
    /// A declared length of 0, or beyond the model's positions; a forward that waits for its reverse pass.
    pub fn with_rope_length(mut self, length: RopeLength) -> Result<Model, ModelError> {
        let Some(decoder) = Arc::get_mut(&mut self.decoder) else {
            return Err(ModelError::input(
                "rope length",
                "a forward of the model waits for its reverse pass; drop it first",
            ));
        };
        match length {
            RopeLength::Declared(length) => decoder.config.declare(length)?,
            RopeLength::OfText => decoder.config.rope_length = length,
        }
        Ok(self)
    }

    /// A line for each field and kind of tensor of its folder that was passed by.
    pub fn passed(&self) -> &[String] {
        &self.config().passed
    }

    /// Whether its weights are on a device.
    pub(crate) fn is_on_device(&self) -> bool {
        self.device.is_some()
    }

    /// The decoder where it runs.
    pub(crate) fn on<'a>(&'a self, cpu: &'a Cpu) -> Runner<'a> {
        let machine: &dyn Machine = match &self.device {
            Some(device) => device,
            None => cpu,
        };
        Runner { decoder: &self.decoder, machine, cpu }
    }

    /// `tokens[B,T] -> logits[B,T,V]` in f32, straight from the last product. `batch` is B and `len` is T.
    ///
    /// # Errors
    /// As [`Model::forward_run`]; a length that is not `batch * len`.
    pub fn forward(
        &self,
        cpu: &Cpu,
        tokens: &[i32],
        batch: usize,
        len: usize,
        schedule: Schedule,
        grouping: Grouping,
    ) -> Result<Vec<f32>, ModelError> {
        if tokens.is_empty() || batch.checked_mul(len) != Some(tokens.len()) {
            let why = format!("there are {}; pass batch {batch} times length {len}, at least 1", tokens.len());
            return Err(ModelError::input("tokens", why));
        }
        let sequences: Vec<&[i32]> = tokens.chunks_exact(len).collect();
        self.forward_run(cpu, &sequences, Run { schedule, grouping, ..Run::default() })
    }

    /// Logits of some sequences, which may differ in length, one behind the other: `[tokens of all, V]`.
    ///
    /// # Errors
    /// A sequence without tokens, a token outside the vocabulary, more tokens than the model has positions, a schedule that
    /// makes no progress, too little memory, or what the probe refuses; [`ModelError::NotFinite`] where logits are not finite
    /// and need be.
    pub fn forward_run(&self, cpu: &Cpu, sequences: &[&[i32]], mut run: Run) -> Result<Vec<f32>, ModelError> {
        for tokens in sequences {
            self.config().check_tokens("tokens", tokens, tokens.len())?;
            if tokens.is_empty() {
                return Err(ModelError::input("tokens", "a sequence has none; pass at least one"));
            }
        }
        run.experts.as_deref().map_or(Ok(()), |routing| routing.check(self.config(), sequences))?;
        if let Schedule::Chunk(0) | Schedule::Speculative(0) | Schedule::Prefix(0) = run.schedule {
            let why = format!("{} makes no progress; use a number of at least 1", run.schedule);
            return Err(ModelError::input("schedule", why));
        }
        let logits = forward(&self.on(cpu), sequences, &mut run)?;
        if !run.allow_nonfinite && !all_finite(&logits) {
            let vocab = self.config().vocab;
            let places = sequences.iter().enumerate().flat_map(|(b, tokens)| (0..tokens.len()).map(move |t| (b, t)));
            let mut rows = places.zip(logits.chunks_exact(vocab));
            let ((b, t), _) = rows.find(|(_, row)| !all_finite(row)).expect("one is not finite");
            let adapter = self.decoder.adapters.find_all(run.adapters, sequences.len())?[b];
            return Err(self.on(cpu).why_not_finite((b, adapter), &sequences[b][..=t], sequences[b].len()));
        }
        Ok(logits)
    }

    /// The tokenizer of the folder.
    pub(crate) fn tokenizer(&self) -> Result<&Tokenizer, ModelError> {
        match self.tokenizer.get() {
            Some(tokenizer) => Ok(tokenizer),
            None => {
                let Some(dir) = &self.dir else {
                    return Err(ModelError::input(
                        "tokenizer",
                        "the model came without a folder; give lists of tokens",
                    ));
                };
                let loaded = Tokenizer::load(dir)?;
                Ok(self.tokenizer.get_or_init(|| loaded))
            }
        }
    }

    /// Continues `prompt` greedily by at most `max_tokens` tokens.
    ///
    /// The prompt begins with the model's bos token where it has one, unless the tokenizer adds it itself or
    /// `tokenizer_config.json` says `"add_bos_token": false`. Generation ends at any of the model's eos tokens, after
    /// `max_tokens`, or at the model's last position.
    ///
    /// # Errors
    /// No usable `tokenizer.json`; characters that it has no token for, unless it has an unknown token of its own; a prompt
    /// without tokens, outside the vocabulary or longer than the model's positions;
    /// logits that are not finite.
    pub fn generate(&self, cpu: &Cpu, prompt: &str, max_tokens: usize) -> Result<Generation, ModelError> {
        let tokenizer = self.tokenizer()?;
        generate::greedy(&self.on(cpu), tokenizer, prompt, max_tokens)
    }

    /// The same by other tokens than the likeliest, or with other ends, as `sampling` says.
    ///
    /// # Errors
    /// As [`Model::generate`] and [`Model::rollout`].
    pub fn generate_by(&self, cpu: &Cpu, prompt: &str, sampling: &Sampling) -> Result<Generation, ModelError> {
        let greedy = Sampling { max_tokens: sampling.max_tokens, rule: SamplingRule::at(0.0), ..Sampling::default() };
        match *sampling == (Sampling { seed: sampling.seed, ..greedy }) {
            true => self.generate(cpu, prompt, sampling.max_tokens),
            false => generate::sampled(self, cpu, prompt, sampling),
        }
    }
}

impl Config {
    /// An error unless every token is in the vocabulary and `len` tokens fit the run.
    pub(crate) fn check_tokens(&self, what: &'static str, tokens: &[i32], len: usize) -> Result<(), ModelError> {
        self.check_length(what, "a sequence", len)?;
        let inside = |&token: &i32| usize::try_from(token).is_ok_and(|token| token < self.vocab);
        match tokens.iter().position(|token| !inside(token)) {
            None => Ok(()),
            Some(i) => {
                let why = format!("element {i} is {}; the vocabulary is 0 to {}", tokens[i], self.vocab - 1);
                Err(ModelError::input(what, why))
            }
        }
    }
}

/// A sequence on its way through a schedule.
struct Fed<'a> {
    label: usize,
    tokens: &'a [i32],
    adapter: Option<usize>,
    /// Row of its first token in the logits.
    row: usize,
    /// Its number in the cache, once it has begun.
    number: Option<usize>,
    /// Tokens whose logits are there.
    done: usize,
}

/// Feeds sequences through the KV cache as scheduled: logits `[tokens of all, V]`.
fn forward(on: &Runner, sequences: &[&[i32]], run: &mut Run) -> Result<Vec<f32>, ModelError> {
    let vocab = on.config().vocab;
    let total: usize = sequences.iter().map(|tokens| tokens.len()).sum();
    let mut logits = buffer(&[total, vocab])?;
    let mut row = 0;
    let mut fed: Vec<Fed> = Vec::new();
    let adapters = on.decoder.adapters.find_all(run.adapters, sequences.len())?;
    for (label, (&tokens, adapter)) in sequences.iter().zip(adapters).enumerate() {
        fed.push(Fed { label, tokens, adapter, row, number: None, done: 0 });
        row += tokens.len();
    }
    let group = match run.grouping {
        Grouping::Together => sequences.len().max(1),
        Grouping::Alone => 1,
    };
    if let Some(routing) = run.experts.as_deref_mut() {
        routing.begin(on.config(), sequences);
    }
    let mut states = on.states(run.page_size, run.page_order)?;
    for fed in fed.chunks_mut(group) {
        let mut round = 0;
        while fed.iter().any(|fed| fed.done < fed.tokens.len()) {
            forward_round(on, fed, round, &mut states, run, &mut logits)?;
            round += 1;
        }
    }
    Ok(logits)
}

/// One step of a schedule for the sequences that take part in it.
fn forward_round(
    on: &Runner,
    fed: &mut [Fed],
    round: usize,
    states: &mut States,
    run: &mut Run,
    logits: &mut [f32],
) -> Result<(), ModelError> {
    let vocab = on.config().vocab;
    // By sequence: what is fed, and how much of it is right.
    let mut pieces: Vec<(usize, Vec<i32>, usize)> = Vec::new();
    for (i, fed) in fed.iter_mut().enumerate() {
        let (len, left) = (fed.tokens.len(), fed.tokens.len() - fed.done);
        let mut count = match run.schedule {
            Schedule::Prefill => left,
            Schedule::Decode => 1,
            Schedule::Chunk(n) | Schedule::Speculative(n) => n,
            Schedule::Prefix(n) if round == 0 => n,
            Schedule::Prefix(_) => left,
            Schedule::Mixed if i > round => 0,
            Schedule::Mixed if i == round => len.div_ceil(2),
            Schedule::Mixed => 1,
        };
        count = count.min(left);
        if count == 0 {
            continue;
        }
        // Where layers recur, a rollback may have gone back behind what is done.
        let held = fed.number.map_or(0, |number| states.len(number));
        let mut tokens = fed.tokens[held..fed.done + count].to_vec();
        let mut right = tokens.len();
        if let Schedule::Speculative(_) = run.schedule {
            right = fed.done - held + 1 + round % count;
            fed.number.into_iter().for_each(|number| states.snapshot(number));
            tokens[right..].iter_mut().for_each(|token| *token = (*token + 1) % vocab as i32);
        }
        fed.number.get_or_insert_with(|| states.open(fed.tokens.len()));
        pieces.push((i, tokens, right));
    }
    // Rows with the same adapter are one product where they stand together.
    pieces.sort_by_key(|(i, ..)| fed[*i].adapter);
    let number = |i: usize| fed[i].number.expect("it has begun");
    let inputs = pieces.iter().map(|(i, tokens, _)| {
        let Fed { label, adapter, .. } = fed[*i];
        SequenceInput { sequence: number(*i), label, tokens, adapter }
    });
    let inputs: Vec<SequenceInput> = inputs.collect();
    let probe = run.probe.as_mut().map(|probe| &mut **probe as &mut dyn crate::Probe);
    let texts = inputs.iter().map(|input| (input.label, states.len(input.sequence), input.tokens.len()));
    let mut experts = run.experts.as_deref().map(|routing| routing.of_step(on.config(), texts));
    let mut hook = TraceHook { experts: experts.as_mut(), ..TraceHook::of(probe) };
    let found = on.step(&inputs, states, Rows::All, &mut hook)?;

    let mut from = 0;
    for (i, tokens, right) in &pieces {
        let fed = &mut fed[*i];
        let number = fed.number.expect("it has begun");
        let held = states.len(number) - tokens.len();
        let rows = &found[from * vocab..(from + right) * vocab];
        logits[(fed.row + held) * vocab..][..rows.len()].copy_from_slice(rows);
        if let (Some(routing), Some(experts)) = (run.experts.as_deref_mut(), &experts) {
            routing.keep((fed.label, held), &experts.own(from..from + right));
        }
        from += tokens.len();
        fed.done = held + right;
        states.rollback(number, fed.done);
        if fed.done == fed.tokens.len() {
            states.close(number);
        } else if matches!(run.schedule, Schedule::Prefix(_)) && round == 0 {
            // The donor ends; what it began is gone on with by another.
            fed.number = Some(states.fork(number, fed.done, fed.tokens.len()));
            states.close(number);
        }
    }
    Ok(())
}
