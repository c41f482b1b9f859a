//! Whole models: log-probabilities and gradients by the model crate, over weights that stand in tensors of Python's.

use crate::call::{exception, panicked, refusal_of, tensor};
use crate::cpu;
use crate::dlpack::View;
use crate::engine::object;
use crate::library::Library;
use crate::tensor::{Storage, Tensor};
use pyo3::exceptions::{PyMemoryError, PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use samebits_contract::atomic_write::AtomicFile;
use samebits_contract::wire::write_tensors;
use samebits_models::{
    AdapterChoice, Config, Experts, Flips, GradientRun, ModelError, Partial, Precision, Recorded, Ruled, Run, Sampled,
    Sampling,
};
use samebits_ops::{Cpu, DType, TensorRef, bf16, f16};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// Experts that were recorded of a sequence: layers, experts chosen in each, all of them, and whether they are replayed.
pub type OfSequence = (usize, usize, Vec<i32>, bool);

/// How many choices of experts are others than recorded, and of how many; None where none were recorded.
pub type Flipped = Option<(usize, usize)>;

/// The same for the models.
pub fn recorded_of((layers, chosen, each, replay): OfSequence) -> Recorded {
    Recorded { experts: Experts { layers, chosen, each }, replay }
}

pub fn flipped(each: &[Option<Flips>]) -> Flipped {
    let [flips, choices] = Flips::sum(each.iter().flatten());
    each.iter().any(Option::is_some).then_some((flips, choices))
}

/// What log-probabilities are those of: all tokens at a temperature; or for each sequence its settings as JSON, how many of its
/// tokens are the prompt, the experts that were recorded of it, and the tokens that each of its tokens was drawn from. `adapter` among
/// the settings names its adapter, null for none.
enum Drawn {
    At(f64),
    By(Vec<Ruled>),
}

impl Drawn {
    fn sampled(&self) -> Sampled<'_> {
        match self {
            Drawn::At(temperature) => Sampled::At(*temperature),
            Drawn::By(rules) => Sampled::By(rules),
        }
    }
}

impl<'a, 'py> FromPyObject<'a, 'py> for Drawn {
    type Error = PyErr;

    fn extract(given: Borrowed<'a, 'py, PyAny>) -> PyResult<Drawn> {
        if let Ok(temperature) = given.extract::<f64>() {
            return Ok(Drawn::At(temperature));
        }
        type Each = (String, usize, Option<OfSequence>, Option<Vec<Vec<i32>>>);
        let each = given.extract::<Vec<Each>>()?;
        let ruled = |(settings, prompt, experts, kept): Each| {
            let mut sampling = Sampling::default();
            sampling.read(&object(&settings)?).map_err(refused)?;
            let Sampling { rule, adapters, .. } = sampling;
            let adapter = adapters.into_iter().next().unwrap_or_default();
            Ok(Ruled { rule, prompt, kept, experts: experts.map(recorded_of), adapter })
        };
        each.into_iter().map(ruled).collect::<PyResult<Vec<_>>>().map(Drawn::By)
    }
}

/// An error of the models as an exception with the same line.
pub fn refused(error: ModelError) -> PyErr {
    let line = error.to_string();
    match error {
        ModelError::Op(error) => exception(error),
        ModelError::Input { what: "memory", .. } => PyMemoryError::new_err(line),
        ModelError::Input { what: "update" | "sequences", .. } => PyRuntimeError::new_err(line),
        _ => PyValueError::new_err(line),
    }
}

/// Runs what takes time with the interpreter's lock released; a panic, which is a fault of ours, is an exception.
pub fn released<T: Send>(
    py: Python<'_>,
    what: &str,
    run: impl FnOnce(&Cpu) -> Result<T, ModelError> + Send,
) -> PyResult<T> {
    let cpu = cpu::current();
    match py.detach(move || catch_unwind(AssertUnwindSafe(|| run(&cpu)))) {
        Ok(done) => done.map_err(refused),
        Err(payload) => Err(panicked(what, payload.as_ref())),
    }
}

/// Runs `run` with what is in `kept`, which no Python code runs beside.
pub fn locked<S: Send, T: Send>(
    py: Python<'_>,
    what: &str,
    kept: &Mutex<S>,
    run: impl FnOnce(&mut S, &Cpu) -> Result<T, ModelError> + Send,
) -> PyResult<T> {
    // What a panic left is looked at by nobody but what it left it to.
    released(py, what, move |cpu| run(&mut kept.lock().unwrap_or_else(|e| e.into_inner()), cpu))
}

/// Tensors of Python's by name, as they lie; the objects stay while they are read.
pub struct Views<'py>(Vec<(String, Bound<'py, PyAny>, View)>);

impl<'py> Views<'py> {
    /// Those of a dictionary, floats in row-major order on the host.
    pub fn of(what: &str, tensors: &Bound<'py, PyDict>) -> PyResult<Views<'py>> {
        let mut views = Vec::new();
        for (name, object) in tensors {
            let name: String = name.extract()?;
            let view = Library::of(&object)?.view(&object, true);
            let view = view.and_then(View::on_host);
            let view = view.map_err(|refusal| refusal_of(what, &name, "bf16, fp16 or fp32", refusal))?;
            views.push((name, object, view));
        }
        Ok(Views(views))
    }

    /// What an op reads of them.
    pub fn tensors(&self) -> PyResult<BTreeMap<String, TensorRef<'_>>> {
        let mut tensors = BTreeMap::new();
        for (name, _, view) in &self.0 {
            // SAFETY: the view is of memory that stays while it lives, aligned and as long as its shape and strides reach;
            // who writes it meanwhile is up to Python code, as with all its tensors.
            tensors.insert(name.clone(), unsafe { tensor(view) }.map_err(exception)?);
        }
        Ok(tensors)
    }
}

/// A tensor of ours.
pub fn lent(tensor: samebits_ops::Tensor) -> Tensor {
    Tensor(Arc::new(Storage::of(tensor)))
}

fn all_lent(tensors: BTreeMap<String, samebits_ops::Tensor>) -> BTreeMap<String, Tensor> {
    tensors.into_iter().map(|(name, tensor)| (name, lent(tensor))).collect()
}

/// Rows of different lengths as `[rows, longest, width]` (without the last axis where `width` is None), zeros behind.
fn rectangle(rows: &[&[f32]], width: Option<usize>) -> Result<samebits_ops::Tensor, ModelError> {
    let of = width.unwrap_or(1);
    let longest = rows.iter().map(|row| row.len()).max().unwrap_or(0);
    let mut values = vec![0f32; rows.len() * longest];
    for (to, row) in values.chunks_mut(longest.max(1)).zip(rows) {
        to[..row.len()].copy_from_slice(row);
    }
    let mut shape = vec![rows.len(), longest / of];
    shape.extend(width);
    Ok(samebits_ops::Tensor::new(values, &shape)?)
}

/// The tensors of a Hugging Face folder in f32, by name.
#[pyfunction]
pub fn read_folder(py: Python<'_>, folder: PathBuf) -> PyResult<BTreeMap<String, Tensor>> {
    Ok(all_lent(released(py, "read_folder", |_| samebits_models::Model::read_tensors(&folder))?))
}

/// Which of a batch's sequences belong to a group: the first, and the one behind the last.
#[pyfunction]
pub fn sequences_of_group(sequences: usize, groups: usize, group: usize) -> (usize, usize) {
    let of = samebits_ops::sequences_of_group(sequences, groups, group);
    (of.start, of.end)
}

/// Names of the files of a model folder that go with its weights as they are, all but config.json.
#[pyfunction]
pub fn folder_files(folder: PathBuf) -> PyResult<Vec<String>> {
    let found = samebits_models::folder_files(&folder).map_err(refused)?;
    Ok(found.into_iter().map(|(name, _)| name).collect())
}

/// The family of a model, by the text of a config.json or the folder that has it: its `model_type`.
#[pyfunction]
#[pyo3(signature = (config, folder))]
pub fn family(config: Option<&str>, folder: Option<PathBuf>) -> PyResult<&'static str> {
    Ok(config_of(config, folder.as_deref(), None).map_err(refused)?.family.name())
}

/// The text of the config.json of a folder, or of one that says what its tensors do where it needs none.
#[pyfunction]
pub fn config_text(folder: PathBuf) -> PyResult<String> {
    samebits_models::Config::text(&folder).map_err(refused)
}

/// Writes a safetensors file of tensors by name; it appears whole or not at all.
#[pyfunction]
pub fn save(path: PathBuf, tensors: &Bound<'_, PyDict>, metadata: BTreeMap<String, String>) -> PyResult<()> {
    let views = Views::of("save", tensors)?;
    let tensors = views.tensors()?;
    let forms = tensors.iter().map(|(name, tensor)| (&name[..], tensor.dtype(), tensor.shape())).collect();
    let written = || -> std::io::Result<()> {
        let mut file = AtomicFile::create(&path)?;
        write_tensors(&mut file, forms, &metadata, |name, file| tensors[name].write(file))?;
        file.commit()
    };
    written().map_err(|e| PyOSError::new_err(format!("save: {}: {e}", path.display())))
}

/// What `config` (the text of a config.json) says, or else the folder, at another rope length where one is given.
pub fn config_of(
    config: Option<&str>,
    folder: Option<&Path>,
    rope_length: Option<usize>,
) -> Result<Config, ModelError> {
    let mut config = match (config, folder) {
        (Some(text), _) => Config::parse(text),
        (None, folder) => Config::load(folder.unwrap_or(Path::new("."))),
    }?;
    rope_length.map_or(Ok(()), |length| config.declare(length))?;
    Ok(config)
}

/// The declared length of a run, and whether frequencies depend on it.
pub fn rope_length(config: &Config) -> (usize, bool) {
    (config.longest(), config.trained_length().is_some())
}

/// An adapter's name, its tensors by name, and its config.
type NamedAdapter = (String, BTreeMap<String, Tensor>, String);

/// A model over weights that Python holds.
#[pyclass(frozen, module = "samebits._native")]
pub struct Model(Mutex<Held>);

struct Held {
    model: samebits_models::Model,
    /// What was packed last, of the model and of its adapters by their names.
    fingerprints: BTreeMap<Option<String>, Vec<u32>>,
}

#[pymethods]
impl Model {
    #[new]
    #[pyo3(signature = (tensors, dtype, config = None, folder = None, rope_length = None, adapters = vec![]))]
    fn new(
        py: Python<'_>,
        tensors: &Bound<'_, PyDict>,
        dtype: &str,
        config: Option<&str>,
        folder: Option<PathBuf>,
        rope_length: Option<usize>,
        adapters: Vec<(String, PathBuf)>,
    ) -> PyResult<Model> {
        let precision: Precision = dtype.parse().map_err(refused)?;
        let config = config_of(config, folder.as_deref(), rope_length).map_err(refused)?;
        let views = Views::of("model", tensors)?;
        let tensors = views.tensors()?;
        let held = released(py, "model", |cpu| {
            let model = samebits_models::Model::of_tensors(&config, &tensors, precision, folder.as_deref(), cpu)?;
            let model = model.with_adapters(cpu, &adapters)?;
            Ok(Held { model, fingerprints: BTreeMap::from([(None, fingerprint(&tensors))]) })
        })?;
        Ok(Model(Mutex::new(held)))
    }

    /// Packs the weights, or those of an adapter, anew where an element of them is another one than last time; whether it was so.
    #[pyo3(signature = (tensors, adapter = None))]
    fn refresh(&self, py: Python<'_>, tensors: &Bound<'_, PyDict>, adapter: Option<String>) -> PyResult<bool> {
        let views = Views::of("model", tensors)?;
        let tensors = views.tensors()?;
        locked(py, "model", &self.0, |held, cpu| {
            let fingerprint = fingerprint(&tensors);
            if held.fingerprints.get(&adapter) == Some(&fingerprint) {
                return Ok(false);
            }
            // Of no weights, where the update ends in the middle.
            held.fingerprints.remove(&adapter);
            match &adapter {
                Some(name) => held.model.update_adapter(name, &tensors, cpu)?,
                None => held.model.update(&tensors, cpu)?,
            }
            held.fingerprints.insert(adapter, fingerprint);
            Ok(true)
        })
    }

    /// Of each adapter its name, its tensors as its folder has them, and the text of its config.
    fn adapters(&self, py: Python<'_>) -> PyResult<Vec<NamedAdapter>> {
        let found = locked(py, "model", &self.0, |held, _| {
            let mut found = Vec::new();
            for (name, _) in held.model.adapters() {
                let folder = held.model.adapter_folder(&AdapterChoice::Named(name.into()))?.expect("it is named");
                let mut tensors = BTreeMap::new();
                for (name, tensor) in folder.tensors() {
                    let values = tensor.as_slice::<f32>().expect("it is f32, and on the host").to_vec();
                    tensors.insert(name.clone(), samebits_ops::Tensor::new(values, tensor.shape())?);
                }
                found.push((name.to_string(), tensors, folder.config()));
            }
            Ok(found)
        })?;
        Ok(found.into_iter().map(|(name, tensors, config)| (name, all_lent(tensors), config)).collect())
    }

    /// A line for each field and kind of tensor of its folder that was passed by.
    fn passed(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        locked(py, "model", &self.0, |held, _| Ok(held.model.passed().to_vec()))
    }

    /// The declared length that frequencies belong to, and whether their scaling depends on one.
    fn rope_length(&self, py: Python<'_>) -> PyResult<(usize, bool)> {
        locked(py, "model", &self.0, |held, _| Ok(rope_length(held.model.config())))
    }

    /// Name and shape of every parameter.
    fn parameters(&self, py: Python<'_>) -> PyResult<BTreeMap<String, Vec<usize>>> {
        locked(py, "model", &self.0, |held, _| Ok(held.model.parameters().clone()))
    }

    /// The name of the parameter that a tensor is once more, under the name of a later use of a shared block.
    fn shared_name(&self, py: Python<'_>, name: &str) -> PyResult<Option<String>> {
        locked(py, "model", &self.0, |held, _| Ok(held.model.shared_name(name)))
    }

    /// Names of the tensors that are read and are no parameters.
    fn constants(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        locked(py, "model", &self.0, |held, _| Ok(held.model.constants().cloned().collect()))
    }

    /// `[sequences, longest]`: the log-probability of each token, given those before it, of how `drawn` says that it was sampled;
    /// 0 for the first ones and behind a sequence.
    fn logprobs(
        &self,
        py: Python<'_>,
        sequences: Vec<Vec<i32>>,
        drawn: Drawn,
        micro_batch: usize,
        allow_nonfinite: bool,
    ) -> PyResult<(Tensor, Flipped)> {
        let run = GradientRun { micro_batch, allow_nonfinite, ..GradientRun::default() };
        let (found, flips) = locked(py, "logprob", &self.0, |held, cpu| {
            let (found, flips) = held.model.logprobs(cpu, &sequences, drawn.sampled(), &run)?;
            Ok((rectangle(&found.iter().map(|row| &row[..]).collect::<Vec<_>>(), None)?, flipped(&flips)))
        })?;
        Ok((lent(found), flips))
    }

    /// `[sequences, longest, V]`: logits behind each token, zeros behind a sequence.
    fn logits(&self, py: Python<'_>, sequences: Vec<Vec<i32>>, allow_nonfinite: bool) -> PyResult<Tensor> {
        let found = locked(py, "logits", &self.0, |held, cpu| {
            let all: Vec<&[i32]> = sequences.iter().map(|tokens| &tokens[..]).collect();
            let run = Run { allow_nonfinite, ..Run::default() };
            let (logits, vocab) = (held.model.forward_run(cpu, &all, run)?, held.model.config().vocab);
            let mut rest = &logits[..];
            let mut rows = Vec::new();
            for tokens in all {
                let row;
                (row, rest) = rest.split_at(tokens.len() * vocab);
                rows.push(row);
            }
            rectangle(&rows, Some(vocab))
        });
        Ok(lent(found?))
    }
}

/// 16 chains over all elements, one of each 16 tokens to each: no change of one element leaves them as they are.
fn fingerprint(tensors: &BTreeMap<String, TensorRef>) -> Vec<u32> {
    fn add<T: Copy>(lanes: &mut [u32; 16], values: Option<&[T]>, bits: impl Fn(T) -> u32) {
        for values in values.unwrap_or_default().chunks(lanes.len()) {
            for (lane, &value) in lanes.iter_mut().zip(values) {
                *lane = (*lane ^ bits(value)).wrapping_mul(0x9E37_79B1).rotate_left(13);
            }
        }
    }
    let mut lanes = [0x85EB_CA77; 16];
    for tensor in tensors.values() {
        match tensor.dtype() {
            DType::Bf16 => add(&mut lanes, tensor.contiguous::<bf16>(), |v| v.to_bits().into()),
            DType::Fp16 => add(&mut lanes, tensor.contiguous::<f16>(), |v| v.to_bits().into()),
            DType::Fp32 => add(&mut lanes, tensor.contiguous::<f32>(), f32::to_bits),
            DType::I32 => add(&mut lanes, tensor.contiguous::<i32>(), |v| v as u32),
        }
    }
    lanes.to_vec()
}

/// A forward that waits for its reverse pass.
#[pyclass(frozen, module = "samebits._native")]
pub struct Forward(Mutex<Option<samebits_models::Forward>>);

/// The gradients of a logical batch while its sequences go by.
#[pyclass(frozen, module = "samebits._native")]
pub struct Accumulator(Mutex<Option<samebits_models::Accumulator>>);

/// What is refused of an accumulator that has been read, or a forward that has been gone back through.
fn gone(what: &'static str) -> ModelError {
    ModelError::Input { what: "sequences", why: what.into() }
}

const READ: &str = "the sums have been read, or an error ended them; begin anew";

#[pymethods]
impl Accumulator {
    #[new]
    #[pyo3(signature = (sequences = None, groups = 1, rank = 0, ranks = 1))]
    fn new(sequences: Option<usize>, groups: usize, rank: usize, ranks: usize) -> PyResult<Accumulator> {
        let made = samebits_models::Accumulator::new(sequences, groups, rank, ranks).map_err(refused)?;
        Ok(Accumulator(Mutex::new(Some(made))))
    }

    /// A forward of the next sequences, and their log-probabilities as `Model.logprobs`.
    #[allow(clippy::too_many_arguments)]
    fn forward(
        &self,
        py: Python<'_>,
        model: &Model,
        sequences: Vec<Vec<i32>>,
        drawn: Drawn,
        micro_batch: usize,
        recompute: bool,
        allow_nonfinite: bool,
    ) -> PyResult<(Forward, Tensor, Flipped)> {
        let run = GradientRun { micro_batch, recompute, allow_nonfinite, ..GradientRun::default() };
        let (forward, logprob) = locked(py, "logprob", &self.0, |sums, cpu| {
            let sums = sums.as_mut().ok_or_else(|| gone(READ))?;
            let held = model.0.lock().unwrap_or_else(|e| e.into_inner());
            let forward = sums.forward(&held.model, cpu, &sequences, drawn.sampled(), &run)?;
            let logprob = rectangle(&forward.logprob.iter().map(|row| &row[..]).collect::<Vec<_>>(), None)?;
            Ok((forward, logprob))
        })?;
        let flips = flipped(&forward.flips);
        Ok((Forward(Mutex::new(Some(forward))), lent(logprob), flips))
    }

    /// Goes back through a forward from `dlogprob[sequences, longest]`, f32.
    fn reverse(&self, py: Python<'_>, forward: &Forward, dlogprob: &Bound<'_, PyAny>) -> PyResult<()> {
        let named = PyDict::new(py);
        named.set_item("dlogprob", dlogprob)?;
        let views = Views::of("logprob", &named)?;
        let tensors = views.tensors()?;
        locked(py, "logprob", &self.0, |kept, cpu| {
            let mut sums = kept.take().ok_or_else(|| gone(READ))?;
            let of = forward.0.lock().unwrap_or_else(|e| e.into_inner()).take();
            let Some(of) = of else {
                *kept = Some(sums);
                return Err(gone("these have been gone back through; a forward is gone back through once"));
            };
            let given = &tensors["dlogprob"];
            let longest = of.logprob.iter().map(Vec::len).max().unwrap_or(0);
            let values = given.contiguous::<f32>().filter(|_| given.shape() == [of.logprob.len(), longest]);
            let Some(values) = values else {
                let why = format!("must be f32 [{}, {longest}], in row-major order", of.logprob.len());
                return Err(ModelError::Input { what: "dlogprob", why });
            };
            let rows = values.chunks(longest.max(1)).zip(&of.logprob);
            let rows: Vec<Vec<f32>> = rows.map(|(row, logprob)| row[..logprob.len()].to_vec()).collect();
            sums.reverse(cpu, of, &rows)?;
            *kept = Some(sums);
            Ok(())
        })
    }

    /// The sums of this rank by name, for `join`.
    fn partial(&self, py: Python<'_>) -> PyResult<BTreeMap<String, Tensor>> {
        let found = locked(py, "logprob", &self.0, |sums, cpu| {
            Ok(sums.take().ok_or_else(|| gone(READ))?.partial(cpu)?.tensors())
        });
        Ok(all_lent(found?))
    }

    /// The gradient of every parameter in f32, by name.
    fn finish(&self, py: Python<'_>, model: &Model) -> PyResult<BTreeMap<String, Tensor>> {
        let found = locked(py, "logprob", &self.0, |sums, cpu| {
            let partial = sums.take().ok_or_else(|| gone(READ))?.partial(cpu)?;
            partial.finish(cpu, &model.0.lock().unwrap_or_else(|e| e.into_inner()).model)
        });
        Ok(all_lent(found?))
    }
}

/// The gradient of every parameter in f32, from what `Accumulator.partial` gave on each rank, in their order.
#[pyfunction]
pub fn join(py: Python<'_>, model: &Model, ranks: Vec<Bound<'_, PyDict>>) -> PyResult<BTreeMap<String, Tensor>> {
    let views = ranks.iter().map(|rank| Views::of("join", rank)).collect::<PyResult<Vec<_>>>()?;
    let ranks = views.iter().map(Views::tensors).collect::<PyResult<Vec<_>>>()?;
    let found = locked(py, "join", &model.0, |held, cpu| {
        let mut partials = Vec::new();
        for rank in ranks {
            let mut owned = BTreeMap::new();
            for (name, tensor) in rank {
                let values = tensor.contiguous::<f32>().unwrap_or_default().to_vec();
                owned.insert(name, samebits_ops::Tensor::new(values, tensor.shape())?);
            }
            partials.push(Partial::of_tensors(owned)?);
        }
        Partial::join(cpu, partials)?.finish(cpu, &held.model)
    });
    Ok(all_lent(found?))
}
