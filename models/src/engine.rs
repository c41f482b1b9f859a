//! A model that answers requests as they come, and whose weights may change between them.

use crate::rollout::{Event, Queue, Sample, Serving, Timing};
use crate::{Model, ModelError, Sampling};
use samebits_ops::{Cpu, TensorRef};
use std::collections::BTreeMap;

/// A model and the texts on their way through it. What a text becomes depends on the weights, its prompt, its number, and
/// how it is sampled, and neither on who is on the way beside it nor on when it came.
pub struct Engine {
    model: Model,
    queue: Queue,
    /// How often the weights have been changed.
    version: usize,
}

impl Engine {
    /// An engine without requests.
    ///
    /// # Errors
    /// A batch, a chunk or a page of 0; those of a device.
    pub fn new(model: Model, serving: &Serving, cpu: &Cpu) -> Result<Engine, ModelError> {
        let queue = Queue::new(&model.on(cpu), serving)?;
        Ok(Engine { model, queue, version: 0 })
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// How often the weights have been changed.
    pub fn version(&self) -> usize {
        self.version
    }

    /// What steps have taken so far.
    pub fn timing(&self) -> Timing {
        self.queue.timing()
    }

    /// Asks for texts behind `prompts`, the first of them with number `first`; the number of the request.
    ///
    /// # Errors
    /// As [`Model::rollout`].
    pub fn add(&mut self, prompts: &[Vec<i32>], sampling: &Sampling, first: usize) -> Result<usize, ModelError> {
        self.queue.add(&self.model, prompts, sampling, first)
    }

    /// Numbers of requests with texts that have not ended.
    pub fn requests(&self) -> impl Iterator<Item = usize> {
        self.queue.requests()
    }

    /// Feeds all texts on their way, and begins others while there is room: what became of them.
    ///
    /// # Errors
    /// Logits or log-probabilities that are not finite; too little memory. No request is left then.
    pub fn step(&mut self, cpu: &Cpu) -> Result<Vec<Event>, ModelError> {
        self.queue.step(&self.model, cpu)
    }

    /// Ends a request: the texts of it that had begun and not ended, as they are.
    pub fn end(&mut self, request: usize) -> Vec<Sample> {
        self.queue.end(request)
    }

    /// Changes the weights, as [`Model::update`].
    ///
    /// # Errors
    /// Requests with texts that have not ended: no text is made by two versions of the weights. What
    /// [`Model::update`] refuses, and then the weights stay as they were; too little memory.
    pub fn update(&mut self, tensors: &BTreeMap<String, TensorRef>, cpu: &Cpu) -> Result<(), ModelError> {
        self.check_idle()?;
        self.model.update(tensors, cpu)?;
        self.version += 1;
        Ok(())
    }

    /// Refuses a change while texts are on their way.
    fn check_idle(&self) -> Result<(), ModelError> {
        let open: Vec<String> = self.requests().map(|request| request.to_string()).collect();
        if !open.is_empty() {
            let (version, open) = (self.version, open.join(", "));
            let why =
                format!("version {version} of the weights is in use by request {open}; let its texts end, or end it");
            return Err(ModelError::input("update", why));
        }
        Ok(())
    }

    /// Gives an adapter other tensors, as [`Model::update_adapter`].
    ///
    /// # Errors
    /// As [`Engine::update`].
    pub fn update_adapter(
        &mut self,
        name: &str,
        tensors: &BTreeMap<String, TensorRef>,
        cpu: &Cpu,
    ) -> Result<(), ModelError> {
        self.check_idle()?;
        self.model.update_adapter(name, tensors, cpu)?;
        self.version += 1;
        Ok(())
    }
}
