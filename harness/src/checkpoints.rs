//! The models that chain cases name, and their answers.

use samebits_contract::case::{Answer, Case};
use samebits_contract::spec::{self, Class, Error, find};
use samebits_contract::tensor::Tensor;
use samebits_judge::recordings::Recordings;
use samebits_models::{Config, Grouping, Model, ModelError, Precision, Probe, RopeLength, Run, Schedule, Tripwire};
use samebits_ops::device::Device;
use samebits_ops::{Cpu, Profile};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

/// Why there are no logits or gradients.
pub(crate) enum Failure {
    Model(ModelError),
    Text(String),
}

impl From<ModelError> for Failure {
    fn from(e: ModelError) -> Failure {
        Failure::Model(e)
    }
}

impl From<String> for Failure {
    fn from(reason: String) -> Failure {
        Failure::Text(reason)
    }
}

/// A model's name, its precision, and whether it lies on a device.
type Key = (String, &'static str, bool);

/// Makes what a forward of a model is shown to.
pub type MakeProbe = dyn Fn(&Config) -> Box<dyn Probe> + Send + Sync;

/// A folder of checkpoint folders; models are loaded once and kept.
pub struct Checkpoints {
    recordings: Recordings,
    probe: Box<MakeProbe>,
    /// Whether gradients are shown to it too: their outputs are looked at, and to show every value costs a copy of it.
    all_shown: bool,
    loaded: Arc<Mutex<BTreeMap<Key, Arc<Model>>>>,
}

/// None at all.
impl Default for Checkpoints {
    fn default() -> Checkpoints {
        Checkpoints::new(None)
    }
}

impl Checkpoints {
    /// The checkpoints in `dir`, and the vectors in the folder `vectors` beside it; with `None`, every case that needs one
    /// says what is missing.
    pub fn new(dir: Option<PathBuf>) -> Checkpoints {
        // A value that is not finite would only be seen in the logits, if at all.
        let recordings = Recordings::new(dir);
        Checkpoints { recordings, probe: Box::new(|_| Box::new(Tripwire)), all_shown: false, loaded: Arc::default() }
    }

    /// The same models, whose runs on the processor, gradients too, are shown to what `probe` makes.
    pub fn with_probe(&self, probe: Box<MakeProbe>) -> Checkpoints {
        Checkpoints { recordings: self.recordings.clone(), probe, all_shown: true, loaded: self.loaded.clone() }
    }

    /// What was recorded of them, and the vectors.
    pub fn recordings(&self) -> &Recordings {
        &self.recordings
    }

    /// Whether cases of this op are answered here.
    pub fn answers(op: &str) -> bool {
        find(op).is_some_and(|spec| spec.class == Class::Chain)
    }

    /// Answers a case of a whole model: logits, or gradients.
    pub fn answer(&self, cpu: &Cpu, case: &Case) -> Answer {
        self.answer_on(cpu, None, case)
    }

    /// The same on a device where there is one. Models are copied to the first device that asks.
    pub fn answer_on(&self, cpu: &Cpu, device: Option<&Device>, case: &Case) -> Answer {
        let Some(spec) = spec::of(&case.op, &case.params) else {
            return Answer::unsupported(format!("{}: program `{}` is not known", case.op, case.params["program"]));
        };
        let call = match spec.validate(case) {
            Err(Error::Unsupported(reason)) => return Answer::unsupported(reason),
            Err(e) => return Answer::error(e.reason()),
            Ok(checked) => checked.call,
        };
        // Models call ops of the usual profile, whatever the call of the whole model names.
        if let Err(e) = Profile::of(&call) {
            return Answer::unsupported(e.to_string());
        }
        // What a program declares, the models of that program give, by the same names.
        let outputs = match (spec.program, spec.is_model_gradient(), device) {
            ("decoder", true, Some(_)) => {
                return Answer::unsupported(format!("{}: gradients of models are made on the processor", case.op));
            }
            ("decoder", true, None) => self.gradients(cpu, case, &call),
            ("decoder", false, _) => self.logits(cpu, device, case),
            (program, ..) => return Answer::unsupported(format!("{}: no model here is a {program}", case.op)),
        };
        match outputs {
            Ok(outputs) => {
                let kernel = match device {
                    None => format!("{}/{}", case.op, cpu.isa()),
                    Some(device) => format!("{}/cuda:{}", case.op, device.ledger().kernels().join("+")),
                };
                Answer::ok(kernel, outputs)
            }
            Err(Failure::Text(reason)) => Answer::error(reason),
            Err(Failure::Model(e)) => {
                let smallest_budget = match e {
                    ModelError::Op(samebits_ops::Error::Budget { smallest, .. }) => Some(smallest),
                    _ => None,
                };
                Answer { smallest_budget, ..Answer::error(e.to_string()) }
            }
        }
    }

    /// What a decoder gives: logits of tokens.
    fn logits(&self, cpu: &Cpu, device: Option<&Device>, case: &Case) -> Result<BTreeMap<String, Tensor>, Failure> {
        let param = |name: &str, default: &str| case.params.get(name).map_or(default.to_string(), String::clone);
        let text = |e: ModelError| format!("chain: {e}");
        let precision: Precision = param("dtype", "bf16").parse().map_err(text)?;
        let schedule: Schedule = param("schedule", "prefill").parse().map_err(text)?;
        let grouping: Grouping = param("batch", "together").parse().map_err(text)?;
        let model = self.model(&case.params["model"], precision, cpu, device)?;
        let tokens = &case.inputs["tokens"];
        let &[batch, len] = tokens.shape() else { return Err(Failure::Text("chain: `tokens` must be [B,T]".into())) };
        let ids = tokens.as_i32().ok_or(Failure::Text("chain: `tokens` must be i32".into()))?;
        let mut probe = (self.probe)(model.config());
        let run = Run {
            schedule,
            grouping,
            page_size: param("page_size", "64").parse().map_err(|_| "chain: `page_size` is no number".to_string())?,
            page_order: param("page_order", "ascending").parse().map_err(text)?,
            allow_nonfinite: true,
            adapters: &[],
            experts: None,
            // A device would copy every value to show it.
            probe: if device.is_none() { Some(&mut *probe) } else { None },
        };
        let sequences: Vec<&[i32]> = ids.chunks_exact(len).collect();
        let logits = match device.and_then(|device| model.under(device)) {
            Some(counted) => counted.forward_run(cpu, &sequences, run)?,
            None => model.forward_run(cpu, &sequences, run)?,
        };
        if let Some(i) = logits.iter().position(|logit| !logit.is_finite()) {
            return Err(Failure::Text(format!("chain: logit {i} is {}; the weights overflow", logits[i])));
        }
        let logits = Tensor::fp32(&[batch, len, model.config().vocab], logits);
        Ok(BTreeMap::from([("logits".to_string(), logits)]))
    }

    /// What a run of gradients is shown to.
    pub(crate) fn probe_of_gradients(&self, config: &Config) -> Option<Box<dyn Probe>> {
        self.all_shown.then(|| (self.probe)(config))
    }

    pub(crate) fn model(
        &self,
        name: &str,
        precision: Precision,
        cpu: &Cpu,
        device: Option<&Device>,
    ) -> Result<Arc<Model>, Failure> {
        let key = (name.to_string(), precision.name(), device.is_some());
        let mut loaded = self.loaded.lock().expect("loading does not panic");
        if let Some(model) = loaded.get(&key) {
            return Ok(model.clone());
        }
        // What was recorded is of forwards over whole texts, each with frequencies of its own length.
        let model = Model::load(&self.recordings.folder(name)?, precision, cpu)?;
        let mut model = model.with_rope_length(RopeLength::OfText)?;
        if let Some(device) = device {
            model = model.to_device(cpu, &device.recording())?;
        }
        Ok(loaded.entry(key).or_insert(Arc::new(model)).clone())
    }
}
