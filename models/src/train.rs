//! Training: gradients, their norm, and a step of AdamW on f32 weights.
//!
//! What the next forward reads is the weights rounded once, all of them, to the precision of the run, where they stand;
//! nothing else of a step is kept, so a run that goes on from its weights and moments has the bits of one that never
//! stopped.

use crate::adapters::{Adapters, PeftFolder, prefix};
use crate::decoder::Decoder;
use crate::gradients::{Gradients, gradients};
use crate::machine::typed;
use crate::memory::buffer;
use crate::sums::zeros;
use crate::weights::Weights;
use crate::{AdapterChoice, Audit, Batch, Config, Flips, GradientRun, ModelError, Precision, StorageContract};
use samebits_ops::{AdamW, Attributes, Backend, Cpu, DType, Element, Tensor, TensorMut, TensorRef, adamw};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::channel;
use zerocopy::IntoBytes;

/// Tensors by name.
type Tensors = BTreeMap<String, Arc<Tensor>>;

/// The parameters of AdamW.
#[derive(Clone, Copy, Debug)]
pub struct Optimizer {
    /// The learning rate.
    pub lr: f64,
    /// How much of the first moment is kept.
    pub beta1: f64,
    /// How much of the second moment is kept.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Times `lr`: the share of every weight that goes in a step.
    pub weight_decay: f64,
    /// Longer gradients are cut to this norm.
    pub max_norm: f64,
}

/// A model in training, or adapters of it.
pub struct Trainer {
    config: Config,
    /// What weights are rounded to: those of an adapter stay f32.
    dtype: DType,
    /// Where adapters are trained.
    adapted: Option<Adapted>,
    /// Weights and moments of every parameter that is trained, in f32.
    state: BTreeMap<String, [Tensor; 3]>,
    /// What the next forward reads: the parameters rounded, and what is none and stays.
    tensors: Tensors,
    /// Steps done.
    step: usize,
    /// Whether a step ended in the middle, or with weights that are not finite.
    is_spoilt: bool,
    /// [`PIECE`]; few in tests of this file, whose tensors are small.
    piece: usize,
    /// The gradient that the head had in the last step: the first of a reverse pass, which is there together with all
    /// that was kept of the forward, so what a step holds at most does not grow. The system takes long to hand so much out again.
    spare: Option<Tensor>,
}

/// What adapters in training are those of, and what the folder of each says, by name.
struct Adapted {
    decoder: Decoder,
    folders: Vec<(String, Arc<PeftFolder>)>,
    sha256: String,
}

impl Adapted {
    /// What stands before the names of the parameters of one of them.
    fn prefix(&self, name: &str) -> String {
        prefix(name, self.folders.len())
    }
}

/// What a step made.
#[derive(Clone, Debug, PartialEq)]
pub struct StepReport {
    /// Its number, from 1 on.
    pub step: usize,
    /// The loss before it.
    pub loss: f32,
    /// The norm of the gradient before it is cut.
    pub norm: f32,
    /// [`Trainer::sha256`] behind it.
    pub sha256: String,
    /// Where experts were recorded, how many choices of routers are others, and of how many.
    pub flips: Option<[usize; 2]>,
}

/// The elements of a block of the norm.
const BLOCK: usize = 65536;
/// The elements that a step makes before their digest is made.
const PIECE: usize = 1 << 22;

/// The decoder of a folder at a rope length, packed or not.
fn decoder_of(
    dir: &Path,
    rope_length: Option<usize>,
    (cpu, dtype, packs): (&Cpu, DType, bool),
    progress: impl FnMut(u64, u64),
) -> Result<Decoder, ModelError> {
    let mut config = Config::load(dir)?;
    config.admitted(dir, StorageContract::Ws1)?;
    rope_length.map_or(Ok(()), |length| config.declare(length))?;
    let files = Weights::open(dir)?.report_to(progress);
    Decoder::load(&config, files, dtype, cpu, packs).map_err(|e| Audit::all_of(dir, e))
}

impl Trainer {
    /// Begins with the weights of the Hugging Face folder `dir`, at another rope length where one is given.
    ///
    /// # Errors
    /// As [`Model::load`](crate::Model::load) and [`Config::declare`].
    pub fn load(
        dir: &Path,
        precision: Precision,
        rope_length: Option<usize>,
        cpu: &Cpu,
        progress: impl FnMut(u64, u64),
    ) -> Result<Trainer, ModelError> {
        let dtype = precision.dtype();
        // All that a forward reads is checked here; what its decoder holds is made again from the rounded weights.
        let decoder = decoder_of(dir, rope_length, (cpu, dtype, false), progress)?;
        let Decoder { config, parameters, constants, .. } = decoder;
        let (mut state, mut tensors) = (BTreeMap::new(), BTreeMap::new());
        for read in Weights::open(dir)?.read_all() {
            let (name, values) = read?;
            if parameters.contains_key(&name) {
                tensors.insert(name.clone(), Arc::new(round(cpu, &values, dtype)?));
                let (m, v) = (zeros(cpu, values.shape())?, zeros(cpu, values.shape())?);
                state.insert(name, [values, m, v]);
            } else if constants.contains_key(&name) {
                tensors.insert(name, Arc::new(values));
            }
        }
        Ok(Trainer::begun(config, dtype, None, (state, tensors)))
    }

    /// Begins with the adapters of some PEFT folders, each under a name, beside the model of the folder `dir`, whose weights stay.
    /// They are one set of parameters: one loss, one norm. Of several, each parameter stands behind the name of its adapter.
    ///
    /// # Errors
    /// As [`Trainer::load`]; an adapter that does not fit the model, or that has a dropout; no adapter, or a name that stands twice.
    pub fn load_adapters(
        (dir, adapters): (&Path, &[(String, PathBuf)]),
        precision: Precision,
        rope_length: Option<usize>,
        cpu: &Cpu,
        progress: impl FnMut(u64, u64),
    ) -> Result<Trainer, ModelError> {
        let decoder = decoder_of(dir, rope_length, (cpu, precision.dtype(), true), progress)?;
        let mut folders = Vec::new();
        for (name, adapter) in adapters {
            let folder = PeftFolder::read(adapter, (&decoder.parameters, &decoder.adaptable))?;
            folders.push((name.clone(), Arc::new(folder)));
        }
        let all: Vec<_> = folders.iter().map(|(name, folder)| (&name[..], folder, folder.tensors())).collect();
        let choices: Vec<_> = adapters.iter().map(|(name, _)| AdapterChoice::Named(name.clone())).collect();
        Adapters::of_training(&all, cpu)?.trained(&choices, choices.len(), true)?;
        let (mut state, mut digest) = (BTreeMap::new(), Sha256::new());
        for read in Weights::open(dir)?.read_all() {
            let (name, values) = read?;
            if decoder.parameters.contains_key(&name) {
                digest.update(sha256([values.as_slice::<f32>().expect("it is f32, and on the host")]));
            }
        }
        for (name, folder) in &folders {
            let prefix = prefix(name, folders.len());
            for (tensor, values) in folder.tensors() {
                let own = round(cpu, values, DType::Fp32)?;
                let (m, v) = (zeros(cpu, values.shape())?, zeros(cpu, values.shape())?);
                state.insert(format!("{prefix}{tensor}"), [own, m, v]);
            }
        }
        let sha256 = hex(digest);
        let (config, dtype) = (decoder.config.clone(), DType::Fp32);
        let tensors = state.iter().map(|(name, [own, ..])| Ok((name.clone(), Arc::new(round(cpu, own, dtype)?))));
        let tensors = tensors.collect::<Result<_, ModelError>>()?;
        let adapted = Some(Adapted { decoder, folders, sha256 });
        Ok(Trainer::begun(config, dtype, adapted, (state, tensors)))
    }

    /// One before its first step.
    fn begun(
        config: Config,
        dtype: DType,
        adapted: Option<Adapted>,
        (state, tensors): (BTreeMap<String, [Tensor; 3]>, Tensors),
    ) -> Trainer {
        Trainer { config, dtype, adapted, state, tensors, step: 0, is_spoilt: false, piece: PIECE, spare: None }
    }

    /// What the folders of the adapters say that are trained, by name, each with its tensors as the folder calls them; none where the
    /// model is.
    pub fn adapters(&self) -> Vec<(&str, &PeftFolder, Tensors)> {
        let Some(adapted) = &self.adapted else { return Vec::new() };
        let own = |name: &str| self.tensors_behind(&adapted.prefix(name));
        adapted.folders.iter().map(|(name, folder)| (&name[..], &**folder, own(name))).collect()
    }

    /// The tensors whose names begin with `prefix`, by what stands behind it.
    fn tensors_behind(&self, prefix: &str) -> Tensors {
        let behind =
            |(name, tensor): (&String, &Arc<Tensor>)| Some((name.strip_prefix(prefix)?.into(), tensor.clone()));
        self.tensors.iter().filter_map(behind).collect()
    }

    /// Where adapters are trained, the SHA-256 of the digests of the weights of their model, in the order of their names.
    pub fn model_sha256(&self) -> Option<&str> {
        self.adapted.as_ref().map(|adapted| &adapted.sha256[..])
    }

    /// Sizes and parameters.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Steps done.
    pub fn step(&self) -> usize {
        self.step
    }

    /// Weights and moments of every parameter, in f32.
    pub fn state(&self) -> &BTreeMap<String, [Tensor; 3]> {
        &self.state
    }

    /// What a folder of the model holds: parameters in the precision of the run, and what is none as it was, in f32.
    pub fn tensors(&self) -> &Tensors {
        &self.tensors
    }

    /// SHA-256 of all weights: their f32 elements, little endian, in the order of their names (bytes).
    pub fn sha256(&self) -> String {
        sha256(self.state.values().map(|[w, ..]| w.as_slice::<f32>().expect("weights are f32, and on the host")))
    }

    /// Goes on from weights and moments that [`Trainer::state`] gave behind step number `step`.
    ///
    /// # Errors
    /// Parameters that are not those of the model.
    pub fn resume(
        &mut self,
        cpu: &Cpu,
        step: usize,
        mut state: BTreeMap<String, [Tensor; 3]>,
    ) -> Result<(), ModelError> {
        for (name, own) in &self.state {
            let fits = |given: &[Tensor; 3]| {
                given.iter().zip(own).all(|(a, b)| (a.shape(), a.dtype()) == (b.shape(), b.dtype()) && a.is_on_host())
            };
            if !state.get(name).is_some_and(fits) {
                return Err(ModelError::input("state", format!("`{name}` is missing or of another shape")));
            }
        }
        if step > u32::MAX as usize {
            return Err(ModelError::input("state", format!("is of step {step}; no run gets that far")));
        }
        if let Some(name) = state.keys().find(|name| !self.state.contains_key(*name)) {
            return Err(ModelError::input("state", format!("`{name}` is no parameter of the model")));
        }
        for (name, [w, ..]) in &mut state {
            self.tensors.insert(name.clone(), Arc::new(round(cpu, w, self.dtype)?));
        }
        (self.state, self.step, self.is_spoilt) = (state, step, false);
        Ok(())
    }

    /// Refuses what the next step would refuse of this batch and optimizer, before anything is computed.
    ///
    /// # Errors
    /// Those of [`Model::gradients`](crate::Model::gradients) of a batch; parameters of the optimizer that are out of range.
    pub fn check(&self, cpu: &Cpu, batch: &Batch, run: &GradientRun, optimizer: &Optimizer) -> Result<(), ModelError> {
        if self.is_spoilt {
            return Err(ModelError::input(
                "weights",
                "a step did not end, so they are spoilt; begin anew, or resume a state",
            ));
        }
        adamw::<f32>(cpu, &self.shape(optimizer), &[], None, [&mut [], &mut [], &mut []], &mut [])?;
        factor(cpu, &[0.0], optimizer.max_norm)?;
        batch.check(&self.config, cpu, run).map(|_| ())
    }

    /// AdamW of the next step.
    fn shape(&self, optimizer: &Optimizer) -> AdamW {
        let Optimizer { lr, beta1, beta2, eps, weight_decay, .. } = *optimizer;
        AdamW { lr, beta1, beta2, eps, weight_decay, step: self.step + 1 }
    }

    /// Those of the next step.
    fn gradients(
        &mut self,
        cpu: &Cpu,
        batch: &Batch,
        run: &GradientRun,
        progress: impl FnMut(usize),
    ) -> Result<Gradients, ModelError> {
        let spare = self.spare.take();
        let own = self.adapters().into_iter().map(|(.., tensors)| tensors).collect::<Vec<_>>();
        let Some(Adapted { decoder, folders, .. }) = &mut self.adapted else {
            let decoder = Decoder::load(&self.config, Weights::shared(&self.tensors), self.dtype, cpu, false)?;
            return gradients(&decoder, cpu, batch, run, (None, spare), progress);
        };
        let all: Vec<_> = folders.iter().zip(&own).map(|((name, folder), own)| (&name[..], folder, own)).collect();
        decoder.adapters = Arc::new(Adapters::of_training(&all, cpu)?);
        let found = gradients(decoder, cpu, batch, run, (None, spare), progress);
        // A step writes over the tensors.
        decoder.adapters = Arc::default();
        found
    }

    /// The next step.
    ///
    /// # Errors
    /// Those of [`Trainer::check`]; a loss, a gradient or a norm that is not finite; too little memory. Weights and moments are
    /// then as they were. A step that makes weights that are not finite: no other is taken then before [`Trainer::resume`].
    pub fn advance(
        &mut self,
        cpu: &Cpu,
        batch: &Batch,
        run: &GradientRun,
        optimizer: &Optimizer,
        progress: impl FnMut(usize),
    ) -> Result<StepReport, ModelError> {
        self.check(cpu, batch, run, optimizer)?;
        let (step, shape, piece) = (self.step + 1, self.shape(optimizer), self.piece);
        let mut found = self.gradients(cpu, batch, run, progress)?;
        let (norm, factor) = clip(cpu, &found.parameters, optimizer.max_norm)?;
        if !found.loss.is_finite() || !norm.is_finite() {
            let why =
                format!("step {step} has loss {} and gradient norm {norm}; lower --lr or look at the data", found.loss);
            return Err(ModelError::input("not finite", why));
        }
        self.is_spoilt = true;
        let mut beyond = None;
        let sha256 = std::thread::scope(|scope| {
            // A step waits for memory and a digest computes, so one of the threads makes that of what is done.
            let (done, weights) = channel();
            let (others, beside) = match cpu.threads() {
                1 => (cpu.clone(), Err(weights)),
                threads => (cpu.other(cpu.isa(), threads - 1, cpu.budget())?, Ok(scope.spawn(|| sha256(weights)))),
            };
            for (name, state) in &mut self.state {
                let gradient = found.parameters.remove(name).expect("every parameter has one");
                let g = gradient.as_slice::<f32>().expect("gradients are f32");
                let [w, m, v] = state.each_mut().map(|values| values.as_slice_mut::<f32>().expect("f32, on the host"));
                let rounded = self.tensors.get_mut(name).and_then(Arc::get_mut);
                let rounded = rounded.expect("every parameter is read, and the decoder is gone");
                typed!(self.dtype => A, {
                    let rounded = rounded.as_slice_mut::<A>().expect("it has this dtype");
                    let pieces = w.chunks_mut(piece).zip(m.chunks_mut(piece)).zip(v.chunks_mut(piece));
                    for ((((w, m), v), g), rounded) in pieces.zip(g.chunks(piece)).zip(rounded.chunks_mut(piece)) {
                        adamw(&others, &shape, g, Some(factor), [&mut *w, m, v], rounded)?;
                        if !rounded.iter().fold(true, |all, x| all & x.widen().is_finite()) {
                            beyond.get_or_insert(name);
                        }
                        done.send(&*w).expect("the other end waits for all");
                    }
                });
                if self.spare.is_none() && gradient.shape() == [self.config.vocab, self.config.hidden] {
                    self.spare = Some(gradient);
                }
            }
            drop(done);
            Ok::<String, ModelError>(match beside {
                Ok(thread) => thread.join().expect("a digest of what is there"),
                Err(weights) => sha256(weights),
            })
        })?;
        if let Some(name) = beyond {
            let why =
                format!("step {step} takes weights of `{name}` beyond {}; lower --lr or --weight-decay", self.dtype);
            return Err(ModelError::input("not finite", why));
        }
        (self.step, self.is_spoilt) = (step, false);
        let are_recorded = found.flips.iter().any(Option::is_some);
        let flips = are_recorded.then(|| Flips::sum(found.flips.iter().flatten()));
        Ok(StepReport { step, loss: found.loss, norm, sha256, flips })
    }
}

/// SHA-256 of f32 elements, little endian.
pub(crate) fn sha256<'a>(all: impl IntoIterator<Item = &'a [f32]>) -> String {
    let mut digest = Sha256::new();
    for elements in all {
        if cfg!(target_endian = "little") {
            digest.update(elements.as_bytes());
        } else {
            elements.iter().for_each(|element| digest.update(element.to_le_bytes()));
        }
    }
    hex(digest)
}

/// A digest in hexadecimal digits.
fn hex(digest: Sha256) -> String {
    digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The norm of a gradient, and what it is multiplied with.
fn clip(cpu: &Cpu, gradient: &BTreeMap<String, Tensor>, max_norm: f64) -> Result<(f32, f32), ModelError> {
    let mut sums: Vec<f32> = Vec::new();
    for tensor in gradient.values() {
        let values = tensor.as_slice::<f32>().expect("gradients are f32");
        let (whole, rest) = values.split_at(values.len() / BLOCK * BLOCK);
        for (values, shape) in
            [(whole, [whole.len() / BLOCK, BLOCK]), (rest, [usize::from(!rest.is_empty()), rest.len()])]
        {
            let mut sum = buffer::<f32>(&shape[..1])?;
            let outputs = vec![("sum", TensorMut::new(&mut sum, &shape[..1])?)];
            cpu.call("square_sum", Attributes::new(), &[("x", TensorRef::new(values, &shape)?)], outputs)?;
            sums.extend(sum);
        }
    }
    factor(cpu, &sums, max_norm)
}

/// The same of the sums of squares of its blocks.
fn factor(cpu: &Cpu, sums: &[f32], max_norm: f64) -> Result<(f32, f32), ModelError> {
    let (mut norm, mut factor) = ([0f32], [0f32]);
    let outputs = vec![("norm", TensorMut::new(&mut norm, &[1])?), ("factor", TensorMut::new(&mut factor, &[1])?)];
    let attributes = Attributes::new().with("max_norm", max_norm);
    cpu.call("clip_factor", attributes, &[("sum", TensorRef::new(sums, &[sums.len()])?)], outputs)?;
    Ok((norm[0], factor[0]))
}

/// f32 with the last rounding to a dtype.
fn round(cpu: &Cpu, values: &Tensor, dtype: DType) -> Result<Tensor, ModelError> {
    let mut y = cpu.empty(dtype, values.shape())?;
    cpu.call("scale", Attributes::new(), &[("x", values.view())], vec![("y", y.view_mut())])?;
    Ok(y)
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;
    use crate::{Loss, Sampled};
    use samebits_ops::{AdamW, adamw, bf16, clip_factor, square_sum};

    type State = BTreeMap<String, [Tensor; 3]>;

    fn trainer(cpu: &Cpu) -> Trainer {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/checkpoints/deepseek-v3");
        let trainer = Trainer::load(&dir, Precision::Bf16, None, cpu, |_, _| ()).unwrap();
        Trainer { piece: 1000, ..trainer }
    }

    /// Six tokens in two groups.
    fn batch<T>(loss: Loss, then: impl FnOnce(&Batch) -> T) -> T {
        let (sequences, count) = ([vec![1, 2, 3, 4], vec![5, 6]], [vec![0, 1, 0, 1], vec![0, 1]]);
        then(&Batch { sequences: &sequences, count: &count, loss, sampled: Sampled::At(1.0), groups: 2 })
    }

    fn advance(trainer: &mut Trainer, cpu: &Cpu, loss: Loss) -> Result<StepReport, ModelError> {
        let optimizer = Optimizer { lr: 0.01, beta1: 0.8, beta2: 0.9, eps: 1e-6, weight_decay: 0.1, max_norm: 0.5 };
        batch(loss, |batch| trainer.advance(cpu, batch, &GradientRun::default(), &optimizer, |_| ()))
    }

    fn floats(tensor: &Tensor) -> Vec<f32> {
        tensor.as_slice::<f32>().unwrap().to_vec()
    }

    fn copy(state: &State) -> State {
        let of = |tensor: &Tensor| Tensor::new(floats(tensor), tensor.shape()).unwrap();
        state.iter().map(|(name, tensors)| (name.clone(), tensors.each_ref().map(of))).collect()
    }

    fn bits(state: &State) -> Vec<u32> {
        state.values().flatten().flat_map(floats).map(f32::to_bits).collect()
    }

    /// A step is AdamW of every parameter, by the gradients of the rounded weights and the norm of all of them; a run that
    /// goes on from what another left is that one.
    pub(crate) fn a_step_is_adamw_of_every_parameter() {
        let cpu = Cpu::best();
        let (mut trainer, mut other) = (trainer(&cpu), self::trainer(&cpu));
        assert_eq!(trainer.step(), 0);
        let constants = trainer.tensors.keys().filter(|name| !trainer.state.contains_key(*name)).count();
        assert_eq!((constants, trainer.tensors.len() - constants), (1, trainer.state.len()));
        for step in 1..=2 {
            let decoder =
                Decoder::load(&trainer.config, Weights::shared(&trainer.tensors), DType::Bf16, &cpu, false).unwrap();
            let found = batch(Loss::Nll, |batch| {
                gradients(&decoder, &cpu, batch, &GradientRun::default(), (None, None), |_| ())
            });
            let found = found.unwrap();
            drop(decoder);
            let mut sums = vec![0f32; found.parameters.len()];
            for (gradient, sum) in found.parameters.values().zip(sums.chunks_mut(1)) {
                square_sum(&cpu, gradient.as_slice().unwrap(), sum).unwrap();
            }
            let (norm, factor) = clip_factor(&cpu, 0.5, &sums).unwrap();
            assert!(factor < 1.0);
            let mut expected = copy(trainer.state());
            let shape = AdamW { lr: 0.01, beta1: 0.8, beta2: 0.9, eps: 1e-6, weight_decay: 0.1, step };
            let mut digest = Sha256::new();
            for (name, tensors) in &mut expected {
                let [w, m, v] = tensors.each_mut().map(|tensor| tensor.as_slice_mut::<f32>().unwrap());
                let gradient = found.parameters[name].as_slice::<f32>().unwrap();
                let mut rounded = vec![bf16::ZERO; w.len()];
                adamw(&cpu, &shape, gradient, Some(factor), [&mut *w, m, v], &mut rounded).unwrap();
                w.iter().for_each(|w| digest.update(w.to_le_bytes()));
            }
            let report = advance(&mut trainer, &cpu, Loss::Nll).unwrap();
            let sha256 = digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(report, StepReport { step, loss: found.loss, norm, sha256, flips: None });
            assert_eq!(bits(trainer.state()), bits(&expected));
            for (name, [w, ..]) in &expected {
                let rounded: Vec<bf16> = floats(w).into_iter().map(bf16::from_f32).collect();
                assert!(trainer.tensors[name].as_slice::<bf16>().unwrap() == rounded, "{name}");
            }
            other.resume(&cpu, step - 1, copy(other.state())).unwrap();
            assert_eq!(advance(&mut other, &cpu, Loss::Nll).unwrap(), report);
            // From the weights alone: what was rounded is made anew.
            let state = copy(other.state());
            other = self::trainer(&cpu);
            other.resume(&cpu, step, state).unwrap();
            assert_eq!((other.step(), bits(other.state())), (step, bits(trainer.state())));
        }
    }

    /// A norm is that of the blocks of each tensor, and of what is left behind them.
    pub(crate) fn norms_are_made_of_blocks() {
        let cpu = Cpu::best();
        let values = |len: usize| (0..len).map(|i| (i * 7919 % 1009) as f32 / 1009.0 - 0.3).collect::<Vec<f32>>();
        let tensors = [("a", 2 * BLOCK + 5), ("b", BLOCK), ("c", 7)].map(|(name, len)| (name, values(len)));
        let mut sums = Vec::new();
        for block in tensors.iter().flat_map(|(_, values)| values.chunks(BLOCK)) {
            let mut sum = [0f32];
            square_sum(&cpu, block, &mut sum).unwrap();
            sums.extend(sum);
        }
        let tensor =
            |(name, values): (&str, Vec<f32>)| (name.to_string(), Tensor::new(values.clone(), &[values.len()]));
        let gradient = tensors.into_iter().map(tensor).map(|(name, tensor)| (name, tensor.unwrap())).collect();
        let (norm, factor) = clip_factor(&cpu, 2.0, &sums).unwrap();
        assert!(sums.len() == 5 && norm > 100.0);
        assert_eq!(clip(&cpu, &gradient, 2.0).unwrap(), (norm, factor));
    }

    /// What is refused leaves weights, moments and steps as they were.
    pub(crate) fn refusals_leave_the_state() {
        let cpu = Cpu::best();
        let mut trainer = trainer(&cpu);
        let before = bits(trainer.state());
        let mut refused = |change: &dyn Fn(&mut State), part: &str| {
            let mut state = copy(trainer.state());
            change(&mut state);
            let error = trainer.resume(&cpu, 3, state).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        };
        let name = "model.norm.weight";
        refused(&|state| drop(state.remove(name)), "`model.norm.weight` is missing or of another shape");
        refused(
            &|state| state.get_mut(name).unwrap()[1] = zeros(&cpu, &[1]).unwrap(),
            "is missing or of another shape",
        );
        let halves = |len: usize| Tensor::new(vec![bf16::ZERO; len], &[len]).unwrap();
        refused(&|state| state.get_mut(name).unwrap()[2] = halves(48), "is missing or of another shape");
        refused(
            &|state| drop(state.insert("other".into(), [(); 3].map(|()| zeros(&cpu, &[1]).unwrap()))),
            "`other` is no parameter of the model",
        );
        // The loss is finite, the norm is not.
        let old = [vec![0.0; 4], vec![0.0; 2]];
        let loss = Loss::Policy { advantages: &[-1e30; 2], old_logprob: &old, low: 1.0, high: 1.0, entropy: 0.0 };
        let error = advance(&mut trainer, &cpu, loss).unwrap_err().to_string();
        assert!(error.contains("step 1 has loss") && error.contains("norm inf"), "{error}");
        assert_eq!((trainer.step(), bits(trainer.state())), (0, before));
    }

    /// A step that takes weights beyond their dtype is refused, and so is any behind it, until there is a state again.
    pub(crate) fn a_step_beyond_the_dtype_is_refused() {
        let cpu = Cpu::best();
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/checkpoints/deepseek-v3");
        let mut trainer = Trainer::load(&dir, Precision::Fp16, None, &cpu, |_, _| ()).unwrap();
        let before = copy(trainer.state());
        let step = |trainer: &mut Trainer, lr: f64| {
            let optimizer = Optimizer { lr, beta1: 0.9, beta2: 0.9, eps: 1e-6, weight_decay: 1e3, max_norm: 1.0 };
            batch(Loss::Nll, |batch| trainer.advance(&cpu, batch, &GradientRun::default(), &optimizer, |_| ()))
        };
        let error = step(&mut trainer, 1e4).unwrap_err().to_string();
        assert!(error.contains("step 1 takes weights of `") && error.contains("beyond fp16"), "{error}");
        let error = step(&mut trainer, 1e-5).unwrap_err().to_string();
        assert!(error.contains("they are spoilt") && trainer.step() == 0, "{error}");
        trainer.resume(&cpu, 0, before).unwrap();
        assert_eq!(step(&mut trainer, 1e-5).unwrap().step, 1);
    }
}
