//! The forward of every family, in the order of the paper: one path, whose parts the config chooses.
//!
//! There is one way to run it: a step takes the next tokens of some sequences, as many of each as there are, one behind
//! the other. Prefill, chunks, decode, mixed batches and speculative tokens are steps that differ in how many.
//!
//! It runs on the processor or on a device, over [`Backend`](samebits_ops::Backend): ops are called by name, and what
//! the two do differently is in [`Machine`]. Matrix products and attention read one dtype: bf16, fp16, or f32 for the
//! reference, whose weights are the same bf16 values widened exactly.
//!
//! # Rounding points of the bf16 chain
//!
//! A value is rounded to bf16 where a product reads it and nowhere else: the output of `rms_norm` before q/k/v, gate/up
//! and the output projection, the rotated queries and keys, the values, the attention output, and the gated activation.
//! Everything between two products stays f32: the residual stream, what the blocks add to it, queries and keys until
//! they are rotated, gate and up. So are the norm weights, widened exactly.
//!
//! This was chosen by measurement. RMS (largest) error of the logits against transformers' fp32 run, as a share of the
//! error of transformers' own bf16 run, on the checkpoints in `tests/checkpoints`:
//!
//! | rounded to bf16                        | qwen3-adder   | qwen2         | llama         |
//! |----------------------------------------|---------------|---------------|---------------|
//! | every op's output                      | 1.035 (1.054) | 0.830 (1.098) | 0.869 (0.775) |
//! | every op's output but the residual sum | 0.797 (0.814) | 0.708 (0.859) | 0.762 (0.645) |
//! | nothing that is added to the residual  | 0.744 (0.728) | 0.658 (0.608) | 0.681 (0.640) |
//! | only what a product reads              | 0.340 (0.251) | 0.594 (0.529) | 0.618 (0.645) |
//!
//! The products read the same bf16 operands in all four, so the last costs no arithmetic, only wider activations
//! between ops: little beside the weights that every step reads.

use crate::adapters::Adapters;
use crate::backward::Backward;
use crate::config::Config;
use crate::layers::branch::{self, Branch, Stream};
use crate::layers::embedding::Embedding;
use crate::layers::head::Head;
use crate::layers::linear::Source;
use crate::layers::loader::Loader;
use crate::layers::norm::Norm;
use crate::layers::shared::Shared;
use crate::machine::Machine;
use crate::pass::Pass;
use crate::state::{Kind, States};
use crate::step::{Form, Rows, SequenceInput, Step, StepInputs};
use crate::trace::TraceHook;
use crate::weights::Weights;
use crate::{ModelError, PAGE_SIZE, PageOrder, Tripwire};
use samebits_ops::device::{Device, Part};
use samebits_ops::{Attributes, Cpu, DType, Isa, Tensor};
use std::collections::BTreeMap;
use std::slice::SliceIndex;
use std::sync::Arc;

/// Weights of a model, ready to run.
pub(crate) struct Decoder {
    pub config: Config,
    /// What products and attention read.
    pub dtype: DType,
    embedding: Embedding,
    /// What several blocks share.
    shared: Vec<Shared>,
    blocks: Vec<Block>,
    final_norm: Norm,
    pub head: Head,
    /// Name and shape of every parameter.
    pub parameters: BTreeMap<String, Vec<usize>>,
    /// The same of what is read and is no parameter.
    pub constants: BTreeMap<String, Vec<usize>>,
    /// The matrices that may have adapters, and the rows that products read.
    pub adaptable: BTreeMap<String, Vec<Source>>,
    /// Those that there are.
    pub adapters: Arc<Adapters>,
    /// The SHA-256 of the adapter that was added to its matrices.
    pub merged: Option<String>,
    /// Whether an update ended in the middle: weights of two versions.
    torn: bool,
}

struct Block {
    branches: Vec<Branch>,
    /// What the residual stream is multiplied by behind them, where it is.
    factor: Option<Attributes>,
}

/// The gradient of the residual stream behind a block, once that is multiplied.
const DFACTOR: &str = "dblock_factor";

/// A decoder where it runs.
#[derive(Clone, Copy)]
pub(crate) struct Runner<'a> {
    pub decoder: &'a Decoder,
    /// Where its weights are.
    pub machine: &'a dyn Machine,
    /// What makes the tables of angles.
    pub cpu: &'a Cpu,
}

impl<'a> Runner<'a> {
    /// Sizes and parameters.
    pub fn config(&self) -> &'a Config {
        &self.decoder.config
    }

    /// The states of no sequence yet.
    ///
    /// # Errors
    /// A page without positions; those of a device.
    pub fn states(&self, page_size: usize, order: PageOrder) -> Result<States, ModelError> {
        if page_size == 0 {
            return Err(ModelError::input("page size", "is 0; a page holds at least 1 position"));
        }
        // Room for no more than one text can have.
        let page_size = page_size.min(self.config().longest().max(1));
        let kinds: Vec<Kind> = self.decoder.branches(..).flat_map(Branch::states).collect();
        States::new(self.machine, self.decoder.dtype, &kinds, page_size, order)
    }

    /// Runs the next tokens of some sequences: logits `[rows, V]`, in the order of the sequences.
    ///
    /// The caller has checked that every token is below V, that a sequence comes once and that every one has a token.
    ///
    /// # Errors
    /// More positions than a sequence declared; too little memory; what an op or the probe refuses.
    pub fn step(
        &self,
        sequences: &[SequenceInput],
        states: &mut States,
        rows: Rows,
        hook: &mut TraceHook,
    ) -> Result<Vec<f32>, ModelError> {
        if sequences.is_empty() {
            return Ok(Vec::new());
        }
        let &Runner { decoder, machine, .. } = self;
        let c = self.config();
        let step = Step::of(machine, sequences, states)?;
        let columns = states.columns(sequences.iter().map(|input| input.sequence));
        let form = ([step.rows(), columns.next_power_of_two()], step.adapters.clone());
        let known = if step.is_single() { states.forms.recorded.remove(&form) } else { None };
        let again = known.is_some();
        let (earlier, recorded) = known.map_or((None, None), |known| (Some(known.inputs), known.recorded));
        let pos = step.positions();
        let angle_pos = hook.positions(None, &step, &pos)?;
        let inputs = StepInputs::new(self, &step, sequences, states, &angle_pos, rows, earlier)?;

        // What a probe asks for is copied, and so is a choice that the host makes products of or is told, or of keys: that is not
        // recorded.
        let experts_stay = c.experts().next().is_none() || inputs.choices.is_some() && hook.experts.is_none();
        let may_record = hook.probe.is_none() && experts_stay && !c.chooses_keys();
        let recorded = recorded.filter(|_| may_record);
        let calls = std::mem::take(&mut states.forms.calls);
        let on = (machine, decoder.dtype, &*decoder.adapters);
        let mut pass = Pass::new(on, (&step, &inputs), hook, calls, false);
        let recorded = match recorded {
            None if again && may_record => {
                let mut logits = None;
                let graph = machine.capture(&mut || {
                    let made = decoder.forward(&mut pass, states);
                    logits = Some(made.map_err(ModelError::into_op)?);
                    Ok(())
                })?;
                graph.zip(logits)
            }
            recorded => recorded,
        };
        let mut logits = match &recorded {
            Some((graph, logits)) => {
                machine.replay(graph)?;
                machine.download(logits.view())?
            }
            None => match decoder.forward(&mut pass, states)? {
                logits if logits.is_on_host() => logits,
                logits => machine.download(logits.view())?,
            },
        };
        pass.step = inputs.last.as_ref().map_or(&step, |(_, step)| step);
        pass.see_at(None, "logits", &mut logits)?;
        states.forms.calls = pass.calls;
        for input in sequences {
            states.advance(input.sequence, input.tokens.len());
        }
        if step.is_single() {
            states.forms.keep(form, Form { inputs, recorded });
        }
        Ok(logits.into_vec().expect("logits are f32, and on the host"))
    }

    /// Why the logits behind the last of some tokens, the first ones of a sequence with room for `limit`, are not finite: runs
    /// them again, alone, which moves no bit, and looks at all that is computed on the way.
    pub fn why_not_finite(&self, (label, adapter): (usize, Option<usize>), tokens: &[i32], limit: usize) -> ModelError {
        let look = || -> Result<(), ModelError> {
            let mut states = self.states(PAGE_SIZE, PageOrder::Ascending)?;
            let input = SequenceInput { sequence: states.open(limit), label, tokens, adapter };
            let mut tripwire = Tripwire;
            let mut hook = TraceHook { looks: true, ..TraceHook::of(Some(&mut tripwire)) };
            self.step(&[input], &mut states, Rows::Last, &mut hook).map(drop)
        };
        let unseen = || {
            let (place, why) = ("the logits".into(), "they are not, and all behind them is: a probe changed it".into());
            ModelError::NotFinite { place, sequence: label, token: tokens.len() - 1, why }
        };
        look().err().unwrap_or_else(unseen).helped(self.decoder.dtype)
    }
}

impl Decoder {
    /// Takes every tensor that `config` describes out of `weights`. `packs` says whether matrices are packed, which pays
    /// where they are read more often than in a step of training; else those that are in memory stay where they are.
    pub fn load(
        config: &Config,
        mut weights: Weights,
        dtype: DType,
        cpu: &Cpu,
        packs: bool,
    ) -> Result<Decoder, ModelError> {
        let mut config = config.clone();
        config.check()?;
        config.passed.extend(weights.check(&config, expected(&config))?);
        let c = &config;
        let mut loader = Loader { dtype, cpu, weights: &mut weights, prefix: String::new(), packs, transposed: false };
        // The largest tensors first: what is read of one is given back before the model has its whole size.
        let (embedding, head) = tables(c, &mut loader)?;
        let shared = shared(c, &mut loader)?;
        let blocks = (0..c.layers()).map(|i| block(c, i, &mut loader)).collect::<Result<_, _>>()?;
        let final_norm = final_norm(c, &mut loader)?;
        let Weights { parameters, constants, adaptable, merged, .. } = weights;
        let merged = merged.map(|adapter| adapter.sha256());
        let (adapters, torn) = (Arc::default(), false);
        Ok(Decoder {
            config,
            dtype,
            embedding,
            shared,
            blocks,
            final_norm,
            head,
            parameters,
            constants,
            adaptable,
            adapters,
            merged,
            torn,
        })
    }

    /// Name and shape of all that there are gradients of: the parameters, or where there are adapters theirs alone.
    pub fn trained(&self) -> &BTreeMap<String, Vec<usize>> {
        if self.adapters.is_empty() { &self.parameters } else { self.adapters.parameters() }
    }

    /// Refuses weights that [`Decoder::load`] would refuse, and keeps nothing of them.
    pub fn check(&self, mut weights: Weights, cpu: &Cpu) -> Result<(), ModelError> {
        weights.check(&self.config, expected(&self.config))?;
        let (dtype, prefix) = (self.dtype, String::new());
        tables(
            &self.config,
            &mut Loader { dtype, cpu, weights: &mut weights, prefix, packs: false, transposed: false },
        )?;
        for (name, shape) in &self.parameters {
            if !weights.parameters.contains_key(name) {
                weights.tensor(name, dtype, shape)?;
            }
        }
        for (name, shape) in &self.constants {
            weights.constant(name, shape)?;
        }
        Ok(())
    }

    /// Takes packed weights that [`Decoder::check`] has let by, a block at a time in the place of the old one.
    ///
    /// # Errors
    /// Too little memory; nothing runs then before an update is whole.
    pub fn update(&mut self, mut weights: Weights, cpu: &Cpu) -> Result<(), ModelError> {
        let (c, dtype, prefix) = (&self.config, self.dtype, String::new());
        let mut loader = Loader { dtype, cpu, weights: &mut weights, prefix, packs: true, transposed: false };
        self.torn = true;
        (self.embedding, self.head) = tables(c, &mut loader)?;
        self.shared = shared(c, &mut loader)?;
        for (i, place) in self.blocks.iter_mut().enumerate() {
            *place = block(c, i, &mut loader)?;
        }
        self.final_norm = final_norm(c, &mut loader)?;
        (self.merged, self.torn) = (None, false);
        Ok(())
    }

    /// Takes the weights from the processor to a device.
    pub fn move_to(&mut self, cpu: &Cpu, device: &Device) -> Result<(), ModelError> {
        self.shared.iter_mut().try_for_each(|block| block.move_to(cpu, device))?;
        let Some(adapters) = Arc::get_mut(&mut self.adapters) else {
            let why = "a forward of the model waits for its reverse pass; drop it first";
            return Err(ModelError::input("device", why));
        };
        adapters.move_to(cpu, device)?;
        let branches = self.blocks.iter_mut().flat_map(|block| &mut block.branches);
        branches.into_iter().try_for_each(|branch| branch.move_to(cpu, device))?;
        self.final_norm.move_to(device)?;
        self.head.linear.move_to(cpu, device)?;
        self.embedding.move_to(cpu, device)
    }

    /// The ops of a step: logits `[rows, V]`.
    fn forward(&self, pass: &mut Pass, states: &mut States) -> Result<Tensor, ModelError> {
        let mut stream = self.embed(pass)?;
        for i in 0..self.blocks.len() {
            self.block(i, pass, states, &mut stream)?;
        }
        stream.add(pass)?;
        if let Some((last, left)) = &pass.inputs.last {
            pass.step = left;
            let size = [left.rows(), self.config.hidden];
            let mut x = pass.empty(DType::Fp32, &size)?;
            let from = Part { rows: Some(last), ..Part::whole(size[1]) };
            pass.machine.copy_rows(size, (&stream.x, from), (&mut x, Part::whole(size[1])))?;
            stream.x = x;
        }
        self.last_norm(pass, &mut stream)?;
        self.head.logits(pass, stream.a.view())
    }

    /// The residual stream of a step's tokens, before the first block.
    pub fn embed(&self, pass: &mut Pass) -> Result<Stream, ModelError> {
        if self.torn {
            let why = "an update ran out of memory, so they are of two versions; update them again";
            return Err(ModelError::input("weights", why));
        }
        let mut stream = Stream::new(pass, pass.step.rows(), self.config.hidden)?;
        self.embedding.forward(pass, &self.head.linear, stream.room())?;
        if !self.shared.is_empty() {
            let (size, part) = ([pass.step.rows(), self.config.hidden], Part::whole(self.config.hidden));
            let mut embedded = pass.empty(DType::Fp32, &size)?;
            pass.machine.copy_rows(size, (&stream.x, part), (&mut embedded, part))?;
            pass.carried = Some(embedded);
        }
        Ok(stream)
    }

    /// Block number `i`: what its reverse pass reads, where one will follow.
    pub fn block(
        &self,
        i: usize,
        pass: &mut Pass,
        states: &mut States,
        stream: &mut Stream,
    ) -> Result<Vec<branch::Saved>, ModelError> {
        let mut saved = Vec::new();
        let mut first = self.states_before(i);
        pass.layer = Some(i);
        for branch in &self.blocks[i].branches {
            let end = first + branch.states().count();
            // A layer that reads what another keeps has its state for this while.
            let lender = branch.lender().map(|block| self.states_before(block));
            lender.iter().for_each(|&lender| states.layers.swap(first, lender));
            let made = branch.forward(pass, &self.shared, &mut states.layers[first..end], stream);
            lender.iter().for_each(|&lender| states.layers.swap(first, lender));
            saved.extend(made?);
            first = end;
        }
        if let Some(factor) = &self.blocks[i].factor {
            stream.multiply(pass, factor)?;
        }
        pass.layer = None;
        Ok(saved)
    }

    /// The branches of some blocks.
    fn branches(&self, blocks: impl SliceIndex<[Block], Output = [Block]>) -> impl Iterator<Item = &Branch> {
        self.blocks[blocks].iter().flat_map(|block| &block.branches)
    }

    /// How many states the layers of the blocks before a block have.
    fn states_before(&self, block: usize) -> usize {
        self.branches(..block).flat_map(Branch::states).count()
    }

    /// The normed form of x in a, behind the last block.
    pub fn last_norm(&self, pass: &mut Pass, stream: &mut Stream) -> Result<(), ModelError> {
        let Stream { x, a, .. } = &mut *stream;
        if !a.reshape(x.shape()) {
            *a = pass.empty(self.dtype, x.shape())?;
        }
        stream.norm(pass, &self.final_norm)?;
        pass.see_at(None, "final_norm", &mut stream.a)
    }

    /// From that of a behind the last norm: that of the residual stream x before it.
    pub fn last_norm_backward(&self, back: &mut Backward, x: &Tensor, da: &Tensor) -> Result<Tensor, ModelError> {
        let dx = self.final_norm.backward(back, x, da)?;
        self.see_gradient(back, self.blocks.len(), 0, dx)
    }

    /// From that of the residual stream behind block number `i`: that of the stream before it.
    pub fn block_backward(
        &self,
        i: usize,
        back: &mut Backward,
        saved: Vec<branch::Saved>,
        mut dsum: Tensor,
    ) -> Result<Tensor, ModelError> {
        let Block { branches, factor } = &self.blocks[i];
        if let Some(factor) = factor {
            let dx = back.pass.scaled(factor, &dsum)?;
            dsum = self.see_gradient(back, i, branches.len(), dx)?;
        }
        for (at, (branch, saved)) in branches.iter().zip(saved).enumerate().rev() {
            back.pass.layer = Some(i);
            let dx = branch.backward(back, &self.shared, saved, &dsum)?;
            back.pass.layer = None;
            dsum = self.see_gradient(back, i, at, dx)?;
        }
        Ok(dsum)
    }

    /// Shows the gradient of the residual stream before branch number `at` of a block, by the name of the branch that made it.
    fn see_gradient(&self, back: &mut Backward, block: usize, at: usize, mut dx: Tensor) -> Result<Tensor, ModelError> {
        let (layer, before) = match at {
            0 => (block.checked_sub(1), block.checked_sub(1).and_then(|before| self.blocks.get(before))),
            _ => (Some(block), self.blocks.get(block)),
        };
        let site = match before {
            Some(Block { factor: Some(_), .. }) if at == 0 => DFACTOR,
            Some(Block { branches, .. }) => {
                let last = if at == 0 { branches.len() } else { at } - 1;
                branches[last].gradient_site()
            }
            None => "dembed",
        };
        back.see_at(layer, site, &mut dx)?;
        Ok(dx)
    }

    /// From that of the residual stream before the first block, of these tokens.
    pub fn embed_backward(&self, back: &mut Backward, tokens: &[i32], mut dx: Tensor) -> Result<(), ModelError> {
        if back.sums.frozen {
            return Ok(());
        }
        if !self.shared.is_empty()
            && let Some(embedded) = back.carried.take()
        {
            dx = back.sum(embedded, dx)?;
        }
        self.embedding.backward(back, &self.head.linear, tokens, dx)
    }
}

/// Every tensor that a config asks for, with its shape: what loading takes.
pub(crate) fn expected(c: &Config) -> BTreeMap<String, Vec<usize>> {
    let Weights { mut parameters, constants, .. } = listed(c);
    parameters.extend(constants);
    parameters
}

/// The same before anything is read of a folder, with the matrices that may have adapters.
pub(crate) fn listed(c: &Config) -> Weights<'static> {
    let mut weights = Weights::listing();
    let cpu = Cpu::new(Isa::best(), 1, usize::MAX).expect("the best isa is available");
    let prefix = String::new();
    let mut loader =
        Loader { dtype: DType::Fp32, cpu: &cpu, weights: &mut weights, prefix, packs: false, transposed: false };
    let mut take = || -> Result<(), ModelError> {
        tables(c, &mut loader)?;
        shared(c, &mut loader)?;
        for i in 0..c.layers() {
            block(c, i, &mut loader)?;
        }
        final_norm(c, &mut loader).map(drop)
    };
    take().expect("a list has every tensor, and none needs memory");
    weights
}

/// The table of embeddings and the output projection.
fn tables(c: &Config, loader: &mut Loader) -> Result<(Embedding, Head), ModelError> {
    loader.prefix.clear();
    loader.transposed = false;
    let (embedding, head) = Embedding::load(loader, c)?;
    Ok((embedding, Head::new(head, c.finish)))
}

/// What several blocks share.
fn shared(c: &Config, loader: &mut Loader) -> Result<Vec<Shared>, ModelError> {
    loader.transposed = c.transposed;
    let load = |plan| {
        loader.prefix = c.shared_prefix(plan);
        Shared::load(loader, plan, &c.norms)
    };
    c.shared.iter().map(load).collect()
}

/// Block number `i`.
fn block(c: &Config, i: usize, loader: &mut Loader) -> Result<Block, ModelError> {
    loader.prefix = format!("{}.{i}.", c.stack);
    loader.transposed = c.transposed;
    let branches = c.blocks[i].iter().map(|plan| Branch::load(loader, plan, c));
    let branches = branches.collect::<Result<_, _>>()?;
    let factor = c.block_factor.map(|name| loader.constant(name, &[1])).transpose()?;
    let factor = factor.and_then(|factor| Some(f64::from(*factor.as_slice::<f32>()?.first()?)));
    Ok(Block { branches, factor: factor.map(|factor| Attributes::new().with("factor", factor)) })
}

fn final_norm(c: &Config, loader: &mut Loader) -> Result<Norm, ModelError> {
    loader.prefix.clear();
    Norm::load(loader, c.final_norm, c.hidden, &c.norms)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Model, PAGE_SIZE, Precision};
    use samebits_ops::TensorRef;
    use std::path::Path;

    /// Some tied folders store the table a second time: it has one gradient.
    #[test]
    fn a_table_that_is_stored_twice_is_one_parameter() {
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/checkpoints/gemma2");
        let dir = tempfile::tempdir().unwrap();
        std::fs::copy(from.join("config.json"), dir.path().join("config.json")).unwrap();
        let file = std::fs::read(from.join("model.safetensors")).unwrap();
        let stored = safetensors::SafeTensors::deserialize(&file).unwrap();
        let table = "model.embed_tokens.weight";
        let twice = ("lm_head.weight".to_string(), stored.tensor(table).unwrap());
        let tensors = stored.tensors().into_iter().chain([twice]);
        safetensors::serialize_to_file(tensors, None, &dir.path().join("model.safetensors")).unwrap();
        let config = Config::load(dir.path()).unwrap();
        let decoder = Decoder::load(&config, Weights::open(dir.path()).unwrap(), DType::Bf16, &Cpu::best(), true);
        let decoder = decoder.unwrap();
        assert!(decoder.parameters.contains_key(table) && !decoder.parameters.contains_key("lm_head.weight"));
    }

    /// The tensors of a checkpoint, and the same times a half.
    fn two_versions(name: &str) -> (Config, [BTreeMap<String, Tensor>; 2]) {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/checkpoints").join(name);
        let tensors = Model::read_tensors(&dir).unwrap();
        let half = |tensor: &Tensor| {
            let halves = tensor.as_slice::<f32>().unwrap().iter().map(|x| x / 2.0);
            Tensor::new(halves.collect::<Vec<f32>>(), tensor.shape()).unwrap()
        };
        let halves = tensors.iter().map(|(name, tensor)| (name.clone(), half(tensor))).collect();
        (Config::load(&dir).unwrap(), [tensors, halves])
    }

    fn views(tensors: &BTreeMap<String, Tensor>) -> BTreeMap<String, TensorRef<'_>> {
        tensors.iter().map(|(name, tensor)| (name.clone(), tensor.view())).collect()
    }

    fn logits(model: &Model, cpu: &Cpu) -> Result<Vec<f32>, ModelError> {
        model.forward_run(cpu, &[&[1, 2, 3, 4, 5]], crate::Run::default())
    }

    /// Dense and sparse, tied and not, with what is no parameter.
    #[test]
    fn an_update_leaves_nothing_of_the_old_weights() {
        let cpu = Cpu::best();
        for name in ["qwen2", "gemma2", "phi3", "mixtral", "deepseek-v3"] {
            let (config, [old, new]) = two_versions(name);
            let of = |tensors| Model::of_tensors(&config, &views(tensors), Precision::Bf16, None, &cpu).unwrap();
            let (mut model, fresh) = (of(&old), logits(&of(&new), &cpu).unwrap());
            assert_ne!(logits(&model, &cpu).unwrap(), fresh, "{name}");
            let place = Arc::as_ptr(&model.decoder);
            model.update(&views(&new), &cpu).unwrap();
            assert_eq!(logits(&model, &cpu).unwrap(), fresh, "{name}");
            // Where the old ones were; or beside them, where a forward still has those.
            assert_eq!(Arc::as_ptr(&model.decoder), place);
            let held = model.decoder.clone();
            model.update(&views(&old), &cpu).unwrap();
            assert!(!Arc::ptr_eq(&model.decoder, &held));
            model.decoder = held;
            assert_eq!(logits(&model, &cpu).unwrap(), fresh, "{name}");
        }
    }

    #[test]
    fn an_update_that_ends_in_the_middle_is_never_run() {
        let cpu = Cpu::best();
        let (config, [old, new]) = two_versions("qwen2");
        let mut model = Model::of_tensors(&config, &views(&old), Precision::Bf16, None, &cpu).unwrap();
        let mut some = views(&new);
        some.remove("model.layers.1.self_attn.o_proj.weight");
        // What is looked at before changes nothing.
        let before = logits(&model, &cpu).unwrap();
        assert!(model.update(&some, &cpu).is_err());
        assert_eq!(logits(&model, &cpu).unwrap(), before);
        let decoder = Arc::get_mut(&mut model.decoder).unwrap();
        assert!(decoder.update(Weights::of(&some).rounded_to(DType::Bf16), &cpu).is_err());
        let said = logits(&model, &cpu).unwrap_err().to_string();
        assert_eq!(said, "weights: an update ran out of memory, so they are of two versions; update them again");
        model.update(&views(&old), &cpu).unwrap();
        assert_eq!(logits(&model, &cpu).unwrap(), before);
    }

    #[test]
    fn the_last_row_of_each_sequence_has_the_same_logits_alone() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/checkpoints/llama");
        let cpu = Cpu::best();
        let model = Model::load(&dir, Precision::Bf16, &cpu).unwrap();
        let (on, vocab) = (model.on(&cpu), model.config().vocab);
        let run = |rows: Rows| {
            let mut states = on.states(PAGE_SIZE, PageOrder::Ascending).unwrap();
            let inputs = [&[1, 2, 3][..], &[4, 5]].map(|tokens| {
                let sequence = states.open(tokens.len());
                SequenceInput { sequence, label: sequence, tokens, adapter: None }
            });
            let logits = on.step(&inputs, &mut states, rows, &mut TraceHook::default()).unwrap();
            logits.chunks(vocab).map(|row| row.iter().map(|x| x.to_bits()).collect()).collect::<Vec<Vec<u32>>>()
        };
        let all = run(Rows::All);
        assert_eq!(all.len(), 5);
        assert!(run(Rows::Last) == [all[2].clone(), all[4].clone()]);
    }
}
