//! `Engine`: texts sampled over the paged cache of the model crate, for requests that come when they like.

use crate::model::{
    Flipped, OfSequence, Views, config_of, flipped, locked, recorded_of, refused, released, rope_length,
};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use samebits_models::{
    Event, ModelError, PageOrder, Precision, RopeLength, Routing, Run, Sample, Sampling, Serving, StorageContract,
    ToScore,
};
use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::sync::Mutex;

/// A text to score: its prompt, its tokens, and the experts that were recorded of it.
type Scored = (Vec<i32>, Vec<i32>, Option<OfSequence>);

/// Experts of tokens: layers, experts chosen in each, and all of them.
type OfTokens = (usize, usize, Vec<i32>);

/// A text, where it has ended: prompt, limit, tokens, log-probabilities, why it ended, and its experts where they are recorded.
type Ended = (usize, usize, Vec<i32>, Vec<f32>, &'static str, Option<OfTokens>);

/// Of a text: its number, the next token and its log-probability, and the text where it has ended.
type Told = (usize, Option<(i32, f32)>, Option<Ended>);

fn ended(sample: Sample) -> Ended {
    let experts = sample.experts.map(|experts| (experts.layers, experts.chosen, experts.each));
    (sample.prompt, sample.limit, sample.tokens, sample.logprobs, sample.stop.name(), experts)
}

/// Settings from their JSON.
pub fn object(settings: &str) -> PyResult<serde_json::Map<String, serde_json::Value>> {
    serde_json::from_str(settings).map_err(|e| PyValueError::new_err(format!("settings: {e}")))
}

/// The engine of `samebits.Engine`.
#[pyclass(frozen, module = "samebits._native")]
pub struct Engine {
    state: Mutex<State>,
    /// The process that made it: another one may have been forked while it ran.
    process: u32,
}

struct State {
    engine: samebits_models::Engine,
    /// What requests have not been told.
    events: BTreeMap<usize, VecDeque<Event>>,
    /// Why requests were ended.
    failed: BTreeMap<usize, String>,
}

impl Engine {
    fn run<T: Send>(
        &self,
        py: Python<'_>,
        run: impl FnOnce(&mut State, &samebits_ops::Cpu) -> Result<T, ModelError> + Send,
    ) -> PyResult<T> {
        if self.process != std::process::id() {
            let line = format!("engine: it belongs to process {}, which was forked; make one here", self.process);
            return Err(PyRuntimeError::new_err(line));
        }
        locked(py, "engine", &self.state, run)
    }
}

#[pymethods]
impl Engine {
    /// By a folder alone, or by tensors with the text of a config.json or a folder.
    #[new]
    #[pyo3(signature = (tensors, dtype, config, folder, batch, chunk, page_size, page_order, share_prompts, length, adapters, storage))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        tensors: Option<&Bound<'_, PyDict>>,
        dtype: &str,
        config: Option<&str>,
        folder: Option<PathBuf>,
        batch: usize,
        chunk: usize,
        page_size: usize,
        page_order: &str,
        share_prompts: bool,
        length: Option<usize>,
        adapters: Vec<(String, PathBuf)>,
        storage: &str,
    ) -> PyResult<Engine> {
        let contract: StorageContract = storage.parse().map_err(refused)?;
        let precision: Precision = dtype.parse().map_err(refused)?;
        let page_order: PageOrder = page_order.parse().map_err(refused)?;
        let serving = Serving { batch, chunk, page_size, page_order, share_prompts };
        let views = tensors.map(|tensors| Views::of("engine", tensors)).transpose()?;
        let tensors = views.as_ref().map(Views::tensors).transpose()?;
        let engine = released(py, "engine", |cpu| {
            let model = match &tensors {
                None => {
                    let folder = folder.as_deref().expect("it is given");
                    let model = samebits_models::Model::load_rounded(folder, precision, contract, cpu)?;
                    match length {
                        Some(length) => model.with_rope_length(RopeLength::Declared(length))?,
                        None => model,
                    }
                }
                Some(tensors) => {
                    let config = config_of(config, folder.as_deref(), length)?;
                    samebits_models::Model::of_tensors(&config, tensors, precision, folder.as_deref(), cpu)?
                }
            };
            samebits_models::Engine::new(model.with_adapters(cpu, &adapters)?, &serving, cpu)
        })?;
        let state = State { engine, events: BTreeMap::new(), failed: BTreeMap::new() };
        Ok(Engine { state: Mutex::new(state), process: std::process::id() })
    }

    /// Asks for `samples` texts behind each prompt, the first of them with number `first`; the number of the request. Settings
    /// are an object of JSON: how tokens are sampled, and what ends a text.
    #[pyo3(signature = (prompts, samples, max_tokens, settings, seed, ignore_eos, first))]
    #[allow(clippy::too_many_arguments)]
    fn add(
        &self,
        py: Python<'_>,
        prompts: Vec<Vec<i32>>,
        samples: usize,
        max_tokens: usize,
        settings: &str,
        seed: u64,
        ignore_eos: bool,
        first: usize,
    ) -> PyResult<usize> {
        let mut sampling = Sampling { samples, max_tokens, seed, ignore_eos, ..Sampling::default() };
        sampling.read(&object(settings)?).map_err(|e| PyValueError::new_err(e.to_string()))?;
        self.run(py, |state, _| {
            let request = state.engine.add(&prompts, &sampling, first)?;
            state.events.insert(request, VecDeque::new());
            Ok(request)
        })
    }

    /// What became of the texts of a request since it was asked last; steps are run until there is something. None where
    /// all of them have ended.
    fn next(&self, py: Python<'_>, request: usize) -> PyResult<Option<Vec<Told>>> {
        let told = self.run(py, |state, cpu| {
            loop {
                if let Some(line) = state.failed.remove(&request) {
                    state.events.remove(&request);
                    return Ok(Err(line));
                }
                let Some(events) = state.events.get_mut(&request) else { return Ok(Ok(None)) };
                if !events.is_empty() {
                    return Ok(Ok(Some(std::mem::take(events))));
                }
                if !state.engine.requests().any(|open| open == request) {
                    state.events.remove(&request);
                    return Ok(Ok(None));
                }
                let open: Vec<usize> = state.engine.requests().collect();
                match state.engine.step(cpu) {
                    Ok(found) => {
                        for event in found {
                            state.events.entry(event.request).or_default().push_back(event);
                        }
                    }
                    Err(error) => {
                        // All of them have ended; who asked for the others learns it when he asks.
                        let others = open.into_iter().filter(|&other| other != request);
                        state.failed.extend(others.map(|other| (other, error.to_string())));
                        state.events.remove(&request);
                        return Err(error);
                    }
                }
            }
        })?;
        let told = told.map_err(PyRuntimeError::new_err)?;
        Ok(told.map(|events| {
            let tell = |event: Event| (event.sequence, event.next, event.sample.map(ended));
            events.into_iter().map(tell).collect()
        }))
    }

    /// Ends a request: number and text of those that had begun and not ended.
    fn end(&self, py: Python<'_>, request: usize) -> PyResult<Vec<(usize, Ended)>> {
        self.run(py, |state, _| {
            state.events.remove(&request);
            state.failed.remove(&request);
            Ok(state.engine.end(request).into_iter().map(|sample| (sample.sequence, ended(sample))).collect())
        })
    }

    /// Packs other weights, or those of an adapter. With `end` what is on its way is ended first, and those who asked for it are
    /// told.
    #[pyo3(signature = (tensors, end, adapter = None))]
    fn update(&self, py: Python<'_>, tensors: &Bound<'_, PyDict>, end: bool, adapter: Option<&str>) -> PyResult<usize> {
        let views = Views::of("update", tensors)?;
        let tensors = views.tensors()?;
        self.run(py, |state, cpu| {
            for request in if end { state.engine.requests().collect() } else { Vec::new() } {
                let events = state.events.entry(request).or_default();
                events.extend(state.engine.end(request).into_iter().map(|sample| {
                    let sequence = sample.sequence;
                    Event { request, sequence, next: None, sample: Some(sample) }
                }));
            }
            match adapter {
                Some(adapter) => state.engine.update_adapter(adapter, &tensors, cpu)?,
                None => state.engine.update(&tensors, cpu)?,
            }
            Ok(state.engine.version())
        })
    }

    /// Name and SHA-256 of every adapter.
    fn adapters(&self, py: Python<'_>) -> PyResult<BTreeMap<String, String>> {
        self.run(py, |state, _| {
            let all = state.engine.model().adapters();
            Ok(all.map(|(name, sha256)| (name.to_string(), sha256.to_string())).collect())
        })
    }

    /// Log-probabilities of tokens behind their prompts by one forward, as `next` tells them of texts sampled by these settings; and
    /// how many choices of routers are others than the experts that stand with a text, and of how many.
    fn score(&self, py: Python<'_>, texts: Vec<Scored>, settings: &str) -> PyResult<(Vec<Vec<f32>>, Flipped)> {
        let mut sampling = Sampling::default();
        sampling.read(&object(settings)?).map_err(|e| PyValueError::new_err(e.to_string()))?;
        let Sampling { rule, adapters, .. } = sampling;
        self.run(py, |state, cpu| {
            let model = state.engine.model();
            let asked = texts.iter().map(|(prompt, tokens, _)| (&prompt[..], &tokens[..], &rule, None));
            let asked: Vec<ToScore> = asked.collect();
            let recorded: Vec<_> = texts.iter().map(|(.., experts)| experts.clone().map(recorded_of)).collect();
            let mut routing = recorded.iter().any(Option::is_some).then(|| Routing { recorded, own: Vec::new() });
            let run = Run { adapters: &adapters, experts: routing.as_mut(), ..Run::default() };
            let scores = model.score(cpu, &asked, run)?;
            let flips = routing.iter().flat_map(|Routing { recorded, own }| recorded.iter().zip(own));
            let flips = flips.map(|(of, own)| of.as_ref().map(|of| of.experts.flips(model.config(), own)));
            Ok((scores, flipped(&flips.collect::<Vec<_>>())))
        })
    }

    /// A line for each field and kind of tensor of its folder that was passed by.
    fn passed(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        self.run(py, |state, _| Ok(state.engine.model().passed().to_vec()))
    }

    /// The declared length that frequencies belong to, and whether their scaling depends on one.
    fn rope_length(&self, py: Python<'_>) -> PyResult<(usize, bool)> {
        self.run(py, |state, _| Ok(rope_length(state.engine.model().config())))
    }

    /// The tokens of a text, and a warning.
    fn encode(&self, py: Python<'_>, text: &str) -> PyResult<(Vec<i32>, Option<String>)> {
        self.run(py, |state, _| state.engine.model().encode(text).map(|found| (found.tokens, found.warning)))
    }

    /// The tokens of a conversation, JSON of its messages, and a warning.
    fn encode_chat(&self, py: Python<'_>, messages: &str) -> PyResult<(Vec<i32>, Option<String>)> {
        let messages = serde_json::from_str(messages).map_err(|e| PyValueError::new_err(format!("messages: {e}")))?;
        self.run(py, |state, _| state.engine.model().encode_chat(&messages).map(|found| (found.tokens, found.warning)))
    }

    /// The text of some tokens.
    fn decode(&self, py: Python<'_>, tokens: Vec<i32>) -> PyResult<String> {
        self.run(py, |state, _| state.engine.model().decode(&tokens))
    }

    /// How often the weights have been changed, numbers of the requests on their way, and what steps took: tokens and
    /// seconds of prompts, and of what was sampled.
    #[allow(clippy::type_complexity)]
    fn state(&self, py: Python<'_>) -> PyResult<(usize, Vec<usize>, (usize, f64, usize, f64))> {
        self.run(py, |state, _| {
            let t = state.engine.timing();
            let timing = (t.prompt_tokens, t.prompt_seconds, t.sampled_tokens, t.sampled_seconds);
            Ok((state.engine.version(), state.engine.requests().collect(), timing))
        })
    }
}
