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

use crate::audit::DIFFERS;
use crate::config::{Config, Mlp, OpAttributes};
use crate::experts::{Mixture, PROJECTIONS};
use crate::kv_cache::KvCache;
use crate::linear::{Gated, Linear, Loader, Source, Vector};
use crate::machine::{Machine, typed};
use crate::pass::Pass;
use crate::qkv::{Projections, Qkv};
use crate::step::{Form, Rows, SequenceInput, Step, StepInputs, shape};
use crate::trace::TraceHook;
use crate::weights::Weights;
use crate::{ModelError, PAGE_SIZE, PageOrder, Tripwire};
use samebits_ops::device::{Device, Part};
use samebits_ops::{Backend, Cpu, DType, Element, Tensor, TensorRef};
use std::collections::BTreeMap;
use std::mem::swap;
use std::sync::Arc;

/// Weights of a model, ready to run.
pub(crate) struct Decoder {
    pub config: Config,
    /// What products and attention read.
    pub dtype: DType,
    pub attributes: OpAttributes,
    /// `[V, hidden]`; `None` where it is the output projection.
    embed: Option<Arc<Tensor>>,
    pub layers: Vec<Layer>,
    pub final_norm: Vector,
    pub lm_head: Linear,
    /// Name and shape of every parameter.
    pub parameters: BTreeMap<String, Vec<usize>>,
    /// The same of what is read and is no parameter.
    pub constants: BTreeMap<String, Vec<usize>>,
    /// Whether an update ended in the middle: weights of two versions.
    torn: bool,
}

/// The name of the embedding table in a folder.
pub(crate) const TABLE: &str = "model.embed_tokens";

pub(crate) struct Layer {
    pub input_norm: Vector,
    pub projections: Projections,
    pub o: Linear,
    /// Behind the attention.
    pub post_attention_norm: Option<Vector>,
    pub mlp_norm: Vector,
    pub mlp: LayerMlp,
    /// Behind the MLP.
    pub post_mlp_norm: Option<Vector>,
}

pub(crate) enum LayerMlp {
    Dense(Box<Gated>),
    Sparse(Box<Mixture>),
}

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

    /// An empty cache.
    ///
    /// # Errors
    /// A page without positions; those of a device.
    pub fn cache(&self, page_size: usize, order: PageOrder) -> Result<KvCache, ModelError> {
        let c = self.config();
        if page_size == 0 {
            return Err(ModelError::input("page size", "is 0; a page holds at least 1 position"));
        }
        // Room for no more than one text can have.
        let page_size = page_size.min(c.longest().max(1));
        KvCache::new(self.machine, self.decoder.dtype, c.layers, [c.k_width(), c.v_width()], page_size, order)
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
        cache: &mut KvCache,
        rows: Rows,
        hook: &mut TraceHook,
    ) -> Result<Vec<f32>, ModelError> {
        if sequences.is_empty() {
            return Ok(Vec::new());
        }
        let &Runner { decoder, machine, .. } = self;
        let c = self.config();
        let step = Step::of(machine, sequences, cache)?;
        let columns = cache.columns(sequences.iter().map(|input| input.sequence));
        let form = [step.rows(), columns.next_power_of_two()];
        let known = if step.is_single() { cache.forms.recorded.remove(&form) } else { None };
        let again = known.is_some();
        let (earlier, recorded) = known.map_or((None, None), |known| (Some(known.inputs), known.recorded));
        let pos = step.positions();
        let angle_pos = hook.positions(None, &step, &pos)?;
        let inputs = StepInputs::new(self, &step, sequences, cache, &angle_pos, rows, earlier)?;

        // What a probe asks for is copied, and so is a choice that the host makes products of: that is not recorded.
        let may_record = hook.probe.is_none() && (c.experts.is_none() || inputs.choices.is_some());
        let (calls, gated) = (std::mem::take(&mut cache.forms.calls), Default::default());
        let (dtype, attributes) = (decoder.dtype, &decoder.attributes);
        let mut pass = Pass { machine, config: c, dtype, attributes, hook, calls, gated, kept: None };
        let recorded = match recorded {
            None if again && may_record => {
                let mut logits = None;
                let graph = machine.capture(&mut || {
                    let made = decoder.forward(&mut pass, &step, &inputs, cache);
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
            None => match decoder.forward(&mut pass, &step, &inputs, cache)? {
                logits if logits.is_on_host() => logits,
                logits => machine.download(logits.view())?,
            },
        };
        let with_logits = inputs.last.as_ref().map_or(&step, |(_, step)| step);
        pass.see(None, "logits", with_logits, &mut logits)?;
        cache.forms.calls = pass.calls;
        for input in sequences {
            cache.advance(input.sequence, input.tokens.len());
        }
        if step.is_single() {
            cache.forms.keep(form, Form { inputs, recorded });
        }
        Ok(logits.into_vec().expect("logits are f32, and on the host"))
    }

    /// Why the logits behind the last of some tokens, the first ones of a sequence with room for `limit`, are not finite: runs
    /// them again, alone, which moves no bit, and looks at all that is computed on the way.
    pub fn why_not_finite(&self, label: usize, tokens: &[i32], limit: usize) -> ModelError {
        let look = || -> Result<(), ModelError> {
            let mut cache = self.cache(PAGE_SIZE, PageOrder::Ascending)?;
            let input = SequenceInput { sequence: cache.open(limit), label, tokens };
            let mut tripwire = Tripwire;
            let mut hook = TraceHook { looks: true, ..TraceHook::of(Some(&mut tripwire)) };
            self.step(&[input], &mut cache, Rows::Last, &mut hook).map(drop)
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
        config.passed.extend(weights.check(&config)?);
        let c = &config;
        let w = &mut weights;
        // The largest tensors first: what is read of one is given back before the model has its whole size.
        let (embed, lm_head) = tables(c, w, dtype, cpu, packs)?;
        let mut layers = Vec::new();
        for layer in 0..c.layers {
            layers.push(Layer::load(&mut Loader { config: c, dtype, cpu, weights: w, layer, packs })?);
        }
        let final_norm = final_norm(c, w)?;
        let (parameters, constants) = (std::mem::take(&mut w.parameters), std::mem::take(&mut w.constants));
        let (attributes, torn) = (c.attributes(), false);
        Ok(Decoder { config, dtype, attributes, embed, layers, final_norm, lm_head, parameters, constants, torn })
    }

    /// Refuses weights that [`Decoder::load`] would refuse, and keeps nothing of them.
    pub fn check(&self, mut weights: Weights, cpu: &Cpu) -> Result<(), ModelError> {
        let (c, w) = (&self.config, &mut weights);
        w.check(c)?;
        tables(c, w, self.dtype, cpu, false)?;
        for (name, shape) in &self.parameters {
            if !w.parameters.contains_key(name) {
                w.tensor(name, self.dtype, shape)?;
            }
        }
        for (name, shape) in &self.constants {
            w.constant(name, shape)?;
        }
        Ok(())
    }

    /// Takes packed weights that [`Decoder::check`] has let by, a layer at a time in the place of the old one.
    ///
    /// # Errors
    /// Too little memory; nothing runs then before an update is whole.
    pub fn update(&mut self, mut weights: Weights, cpu: &Cpu) -> Result<(), ModelError> {
        let (c, dtype, w, packs) = (&self.config, self.dtype, &mut weights, true);
        self.torn = true;
        (self.embed, self.lm_head) = tables(c, w, dtype, cpu, packs)?;
        for (layer, place) in self.layers.iter_mut().enumerate() {
            *place = Layer::load(&mut Loader { config: c, dtype, cpu, weights: w, layer, packs })?;
        }
        self.final_norm = final_norm(c, w)?;
        self.torn = false;
        Ok(())
    }

    /// Takes the weights from the processor to a device.
    pub fn move_to(&mut self, cpu: &Cpu, device: &Device) -> Result<(), ModelError> {
        for layer in &mut self.layers {
            layer.projections.move_to(cpu, device)?;
            layer.o.move_to(cpu, device)?;
            match &mut layer.mlp {
                LayerMlp::Dense(mlp) => mlp.move_to(cpu, device)?,
                LayerMlp::Sparse(mixture) => mixture.move_to(cpu, device)?,
            }
        }
        self.lm_head.move_to(cpu, device)?;
        let of_layers = self.layers.iter_mut().flat_map(|layer| {
            let always = [&mut layer.input_norm, &mut layer.mlp_norm];
            always.into_iter().chain(&mut layer.post_attention_norm).chain(&mut layer.post_mlp_norm)
        });
        let norms = of_layers.chain([&mut self.final_norm]).map(|norm| &mut norm.w);
        for tensor in norms {
            *tensor = Backend::upload(device, tensor.view())?;
        }
        if let Some(embed) = &mut self.embed {
            *embed = Arc::new(Backend::upload(device, embed.view())?);
        }
        Ok(())
    }

    /// The ops of a step: logits `[rows, V]`.
    fn forward(
        &self,
        pass: &mut Pass,
        step: &Step,
        inputs: &StepInputs,
        cache: &mut KvCache,
    ) -> Result<Tensor, ModelError> {
        let c = &self.config;
        let mut stream = self.embed(pass, step, inputs)?;
        for i in 0..c.layers {
            self.layer(i, pass, step, inputs, cache, &mut stream)?;
        }
        self.last_sum(pass, step, &mut stream)?;
        let mut step = step;
        if let Some((last, left)) = &inputs.last {
            step = left;
            let mut x = pass.empty(DType::Fp32, &[step.rows(), c.hidden])?;
            let from = Part { rows: Some(last), ..Part::whole(c.hidden) };
            pass.machine.copy_rows([step.rows(), c.hidden], (&stream.x, from), (&mut x, Part::whole(c.hidden)))?;
            stream.x = x;
        }
        self.last_norm(pass, step, &mut stream)?;
        self.logits(pass, stream.a.view())
    }

    /// The residual stream of a step's tokens, before the first layer.
    pub fn embed(&self, pass: &mut Pass, step: &Step, inputs: &StepInputs) -> Result<Stream, ModelError> {
        if self.torn {
            let why = "an update ran out of memory, so they are of two versions; update them again";
            return Err(ModelError::input("weights", why));
        }
        let (at, n) = (&self.attributes, step.rows());
        let mut stream = Stream::new(pass, n)?;
        let table = self.embed.as_ref().map_or(self.lm_head.matrix(0), |embed| embed.view());
        let tokens = inputs.tokens.view(&[n])?;
        let Stream { x, sum, .. } = &mut stream;
        pass.op("embedding", &at.none, &[("w", table), ("tokens", tokens)], [("y", x.view_mut())])?;
        if let Some(factor) = &at.embed_scale {
            pass.op("scale", factor, &[("x", x.view())], [("y", sum.view_mut())])?;
            swap(x, sum);
        }
        pass.see(None, "embed", step, x)?;
        Ok(stream)
    }

    /// Layer number `i`.
    pub fn layer(
        &self,
        i: usize,
        pass: &mut Pass,
        step: &Step,
        inputs: &StepInputs,
        cache: &mut KvCache,
        stream: &mut Stream,
    ) -> Result<(), ModelError> {
        let (c, n, layer) = (&self.config, step.rows(), &self.layers[i]);
        let Stream { x, y, sum, a, heads, lse } = stream;
        // Attention block. The layer before has left what it adds to x in y.
        if i == 0 {
            norm(pass, x, &layer.input_norm, a)?;
        } else {
            add_norm(pass, [x, y], &layer.input_norm, sum, a)?;
            swap(x, sum);
            pass.see(Some(i - 1), "sum", step, x)?;
        }
        pass.see(Some(i), "input_norm", step, a)?;
        let Qkv { mut q, mut k, mut v } = layer.projections.apply(pass, inputs.angles.tensor(), a)?;
        pass.see(Some(i), "q", step, &mut q)?;
        pass.see(Some(i), "k", step, &mut k)?;
        pass.see(Some(i), "v", step, &mut v)?;
        let (shape, [keys, values]) = (shape(c, step, cache, i), &mut cache.layers[i]);
        for (from, to, width) in [(&k, &mut *keys, c.k_width()), (&v, &mut *values, c.v_width())] {
            let part = Part { rows: Some(&inputs.rows), ..Part::whole(width) };
            pass.machine.copy_rows([n, width], (from, Part::whole(width)), (to, part))?;
        }
        let q_pos = pass.hook.positions(Some(i), step, &inputs.attention.q_pos)?;
        pass.machine.attention(&shape, &inputs.attention, &q_pos, [&q, &*keys, &*values], [heads, lse])?;
        pass.see(Some(i), "attention", step, heads)?;
        pass.keep("sum", x)?;
        pass.keep("input_norm", a)?;
        for (name, values) in [("q", q), ("k", k), ("v", v)] {
            pass.keep_own(name, values);
        }
        pass.keep("attention", heads)?;
        pass.keep("lse", lse)?;
        layer.o.apply_to(pass, 0, heads.view(), y.view_mut())?;
        pass.see(Some(i), "o", step, y)?;
        if let Some(w) = &layer.post_attention_norm {
            pass.keep("o", y)?;
            norm(pass, y, w, sum)?;
            swap(y, sum);
            pass.see(Some(i), "post_attention_norm", step, y)?;
        }

        // MLP block.
        add_norm(pass, [x, y], &layer.mlp_norm, sum, a)?;
        swap(x, sum);
        pass.see(Some(i), "attention_sum", step, x)?;
        pass.see(Some(i), "mlp_norm", step, a)?;
        match &layer.mlp {
            LayerMlp::Dense(mlp) => mlp.apply_to(pass, 0, a.view(), y.view_mut())?,
            LayerMlp::Sparse(mixture) => mixture.apply(pass, step, i, inputs.choices.as_ref(), a, y)?,
        }
        pass.see(Some(i), "mlp", step, y)?;
        pass.keep("attention_sum", x)?;
        pass.keep("mlp_norm", a)?;
        if let Some(w) = &layer.post_mlp_norm {
            pass.keep("mlp", y)?;
            norm(pass, y, w, sum)?;
            swap(y, sum);
            pass.see(Some(i), "post_mlp_norm", step, y)?;
        }
        Ok(())
    }

    /// Adds what the last layer has left in y to x.
    pub fn last_sum(&self, pass: &mut Pass, step: &Step, stream: &mut Stream) -> Result<(), ModelError> {
        let Stream { x, y, sum, .. } = stream;
        pass.op("add", &self.attributes.none, &[("a", x.view()), ("b", y.view())], [("y", sum.view_mut())])?;
        swap(x, sum);
        pass.see(Some(self.config.layers - 1), "sum", step, x)
    }

    /// The normed form of x in a.
    pub fn last_norm(&self, pass: &mut Pass, step: &Step, stream: &mut Stream) -> Result<(), ModelError> {
        let Stream { x, a, .. } = stream;
        if !a.reshape(x.shape()) {
            *a = pass.empty(self.dtype, x.shape())?;
        }
        norm(pass, x, &self.final_norm, a)?;
        pass.see(None, "final_norm", step, a)
    }

    /// `a[rows,hidden]` to logits `[rows,V]`.
    pub fn logits(&self, pass: &mut Pass, a: TensorRef) -> Result<Tensor, ModelError> {
        let logits = self.lm_head.apply(pass, a, DType::Fp32)?;
        let Some(cap) = &self.attributes.softcap else { return Ok(logits) };
        let mut capped = pass.empty(DType::Fp32, logits.shape())?;
        pass.op("softcap", cap, &[("x", logits.view())], [("y", capped.view_mut())])?;
        Ok(capped)
    }
}

/// The rows of a step on their way through the layers.
pub(crate) struct Stream {
    /// The residual stream, `[n,hidden]`.
    pub x: Tensor,
    /// What a block adds to it.
    pub y: Tensor,
    /// Room for the next of either.
    sum: Tensor,
    /// The normed form of x, as products read it.
    pub a: Tensor,
    /// What attention makes: `[n,Hq * E]`, `[n,Hq]`.
    heads: Tensor,
    lse: Tensor,
}

impl Stream {
    fn new(pass: &Pass, n: usize) -> Result<Stream, ModelError> {
        let (c, stream, narrow) = (pass.config, DType::Fp32, pass.dtype);
        Ok(Stream {
            x: pass.empty(stream, &[n, c.hidden])?,
            y: pass.empty(stream, &[n, c.hidden])?,
            sum: pass.empty(stream, &[n, c.hidden])?,
            a: pass.empty(narrow, &[n, c.hidden])?,
            heads: pass.empty(narrow, &[n, c.q_heads * c.value_dim])?,
            lse: pass.empty(stream, &[n, c.q_heads])?,
        })
    }
}

/// `y = norm(x)`
fn norm(pass: &mut Pass, x: &Tensor, w: &Vector, y: &mut Tensor) -> Result<(), ModelError> {
    pass.op("rms_norm", &pass.attributes.norm, &[("x", x.view()), ("w", w.w.view())], [("y", y.view_mut())])
}

/// `sum = x + residual`, `y = norm(sum)`
fn add_norm(
    pass: &mut Pass,
    [x, residual]: [&Tensor; 2],
    w: &Vector,
    sum: &mut Tensor,
    y: &mut Tensor,
) -> Result<(), ModelError> {
    let inputs = [("x", x.view()), ("residual", residual.view()), ("w", w.w.view())];
    pass.op("add_rms_norm", &pass.attributes.norm, &inputs, [("sum", sum.view_mut()), ("y", y.view_mut())])
}

impl Layer {
    fn load(loader: &mut Loader) -> Result<Layer, ModelError> {
        let c = loader.config;
        let projections = Projections::load(loader)?;
        let o_bias = c.o_bias || c.latent.is_some_and(|latent| latent.bias);
        let o = loader.linear("self_attn.o_proj", c.hidden, c.q_heads * c.value_dim, o_bias)?;
        let mlp = match c.mlps[loader.layer] {
            Mlp::Dense(width) => LayerMlp::Dense(Box::new(loader.gated("mlp", PROJECTIONS, width)?)),
            Mlp::Sparse => {
                let experts = c.experts.expect("sparse layers have experts");
                LayerMlp::Sparse(Box::new(Mixture::load(loader, experts)?))
            }
        };
        let mut norm = |part: &str| loader.vector(&format!("{part}.weight"), c.hidden);
        let input_norm = norm("input_layernorm")?;
        // What stands before the MLP has this name only where nothing stands behind the attention.
        let (post_attention_norm, mlp_norm, post_mlp_norm) = if c.post_norms {
            let behind = norm("post_attention_layernorm")?;
            (Some(behind), norm("pre_feedforward_layernorm")?, Some(norm("post_feedforward_layernorm")?))
        } else {
            (None, norm("post_attention_layernorm")?, None)
        };
        Ok(Layer { input_norm, projections, o, post_attention_norm, mlp_norm, mlp, post_mlp_norm })
    }
}

/// The table of embeddings, `None` where it is the output projection; and that.
fn tables(
    c: &Config,
    w: &mut Weights,
    dtype: DType,
    cpu: &Cpu,
    packs: bool,
) -> Result<(Option<Arc<Tensor>>, Linear), ModelError> {
    let (table, head) = (format!("{TABLE}.weight"), "lm_head.weight");
    let mut embed = Some(w.matrix(&table, dtype, &[c.vocab, c.hidden])?);
    if c.tied && w.contains(head) {
        // Some tied folders store the table a second time: then it must be the same table.
        let path = w.path(head);
        let again = w.tensor(head, dtype, &[c.vocab, c.hidden])?;
        w.parameters.remove(head);
        if !same_bits(&again, embed.as_ref().expect("it was just read")) {
            return Err(ModelError::tensor(&path, head, DIFFERS));
        }
    }
    let own = if c.tied { embed.take() } else { Some(w.matrix(head, dtype, &[c.vocab, c.hidden])?) };
    let source = Source::whole(if c.tied { TABLE } else { "lm_head" }.into(), c.vocab);
    let lm_head = Linear::new(cpu, source, own.expect("tied or its own"), None, packs)?;
    Ok((embed, lm_head))
}

fn final_norm(c: &Config, w: &mut Weights) -> Result<Vector, ModelError> {
    let name = "model.norm.weight";
    Ok(Vector { w: w.tensor(name, DType::Fp32, &[c.hidden])?, name: name.into() })
}

fn same_bits(a: &Tensor, b: &Tensor) -> bool {
    typed!(a.dtype() => A, {
        let (a, b) = (a.as_slice::<A>().unwrap_or_default(), b.as_slice::<A>().unwrap_or_default());
        a.iter().zip(b).all(|(a, b)| a.widen().to_bits() == b.widen().to_bits())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Model, PAGE_SIZE, Precision};
    use std::path::Path;

    /// One bit tells them apart; 0 and -0 are equal numbers.
    #[test]
    fn tables_are_compared_by_their_bits() {
        let table = |last: f32| Tensor::new(vec![1.0, 2.0, last], &[3]).unwrap();
        assert!(same_bits(&table(0.0), &table(0.0)));
        assert!(!same_bits(&table(0.0), &table(-0.0)));
    }

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
            let mut cache = on.cache(PAGE_SIZE, PageOrder::Ascending).unwrap();
            let inputs = [&[1, 2, 3][..], &[4, 5]].map(|tokens| {
                let sequence = cache.open(tokens.len());
                SequenceInput { sequence, label: sequence, tokens }
            });
            let logits = on.step(&inputs, &mut cache, rows, &mut TraceHook::default()).unwrap();
            logits.chunks(vocab).map(|row| row.iter().map(|x| x.to_bits()).collect()).collect::<Vec<Vec<u32>>>()
        };
        let all = run(Rows::All);
        assert_eq!(all.len(), 5);
        assert!(run(Rows::Last) == [all[2].clone(), all[4].clone()]);
    }
}
