//! The forward of every family, in the order of the paper: one path, whose parts the config chooses.
//!
//! There is one way to run it: a step takes the next tokens of some sequences, as many of each as there are, one behind the
//! other. Prefill, chunks, decode, mixed batches and speculative tokens are steps that differ in how many.
//!
//! `A` is the type that matrix products and attention read: bf16, or f32 for the reference, whose weights are the same
//! bf16 values widened exactly.
//!
//! # Rounding points of the bf16 chain
//!
//! A value is rounded to bf16 where a product reads it and nowhere else: the output of `rms_norm` before q/k/v, gate/up and
//! the output projection, the rotated queries and keys, the values, the attention output, and the gated activation. Everything
//! between two products stays f32: the residual stream, what the blocks add to it, queries and keys until they are
//! rotated, gate and up. So are the norm weights, widened exactly.
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
//! The products read the same bf16 operands in all four, so the last costs no arithmetic, only wider activations between
//! ops: little beside the weights that every step reads.

use crate::config::{Config, Mlp};
use crate::experts::{Mixture, PROJECTIONS};
use crate::heads::{Projected, Projections};
use crate::kv_cache::{Host, KvCache, Store, buffer};
use crate::linear::{Gated, Inner, Linear, Loader};
use crate::rotary::Rotary;
use crate::watch::Watch;
use crate::weights::Weights;
use crate::{ModelError, PageOrder};
use samebits_ops::{
    Cpu, Element, Gemm, Keys, PackedWeight, Qkv, RopeTable, Sequences, add, add_rms_norm, attention, embedding,
    embedding_packed, gemm_packed, rms_norm, scale, softcap,
};
use std::collections::BTreeMap;
use std::ops::Range;

/// Weights of a model, ready to run.
pub(crate) struct Decoder<A> {
    pub config: Config,
    /// `[V, hidden]`; `None` where it is the output projection.
    pub embed: Option<Vec<A>>,
    pub layers: Vec<Layer<A>>,
    pub final_norm: Vec<f32>,
    pub lm_head: PackedWeight,
}

pub(crate) struct Layer<A> {
    pub input_norm: Vec<f32>,
    pub projections: Projections<A>,
    pub o: Linear<A>,
    /// Behind the attention.
    pub post_attention_norm: Option<Vec<f32>>,
    pub mlp_norm: Vec<f32>,
    pub mlp: LayerMlp<A>,
    /// Behind the MLP.
    pub post_mlp_norm: Option<Vec<f32>>,
}

pub(crate) enum LayerMlp<A> {
    Dense(Gated<A>),
    Sparse(Mixture<A>),
}

/// Which tokens of a step get logits. A row's bits do not depend on the others.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Rows {
    /// Every token.
    All,
    /// Each sequence's last one.
    Last,
}

/// The next tokens of one sequence.
#[derive(Clone, Copy)]
pub(crate) struct Feed<'a> {
    /// Its number in the cache.
    pub sequence: usize,
    /// What the caller calls it.
    pub label: usize,
    /// At least one token.
    pub tokens: &'a [i32],
}

/// Whatever carries out steps: the decoder on the processor, or on a device.
pub(crate) trait Steps {
    /// Where it keeps keys and values.
    type Store: Store;

    /// Sizes and parameters.
    fn config(&self) -> &Config;

    /// An empty cache.
    ///
    /// # Errors
    /// Those of a device.
    fn cache(&self, page_size: usize, order: PageOrder) -> Result<KvCache<Self::Store>, ModelError>;

    /// Runs the next tokens of some sequences: logits `[rows, V]`, in the order of the feeds.
    ///
    /// The caller has checked that every token is below V, that a sequence is fed once and that every feed has a token.
    ///
    /// # Errors
    /// More positions than a sequence declared; too little memory; what an op or the probe refuses.
    fn step(
        &self,
        cpu: &Cpu,
        feeds: &[Feed],
        cache: &mut KvCache<Self::Store>,
        rows: Rows,
        watch: &mut Watch,
    ) -> Result<Vec<f32>, ModelError>;
}

/// The tokens of one step.
pub(crate) struct Step {
    /// Rows of each feed.
    starts: Vec<usize>,
    /// Label and position of each row.
    pub places: Vec<(usize, usize)>,
}

impl Step {
    /// The step of some feeds and its tokens; every position gets a place in the cache.
    pub fn of<S: Store>(feeds: &[Feed], cache: &mut KvCache<S>) -> Result<(Step, Vec<i32>), ModelError> {
        let (mut step, mut tokens) = (Step { starts: vec![0], places: Vec::new() }, Vec::new());
        for feed in feeds {
            cache.reserve(feed.sequence, feed.tokens.len())?;
            let start = cache.len(feed.sequence);
            step.places.extend((start..start + feed.tokens.len()).map(|pos| (feed.label, pos)));
            step.starts.push(step.places.len());
            tokens.extend_from_slice(feed.tokens);
        }
        Ok((step, tokens))
    }

    /// The positions of its tokens.
    pub fn positions(&self) -> Vec<i32> {
        self.places.iter().map(|&(_, pos)| pos as i32).collect()
    }

    /// Where the rows of each feed start, and where the last ends.
    pub fn q_start(&self) -> Vec<i32> {
        self.starts.iter().map(|&start| start as i32).collect()
    }

    /// The last row of each feed, and the step that is left of them.
    pub fn last(&self) -> (Vec<usize>, Step) {
        let last: Vec<usize> = self.starts[1..].iter().map(|end| end - 1).collect();
        let places = last.iter().map(|&row| self.places[row]).collect();
        let starts = (0..=last.len()).collect();
        (last, Step { starts, places })
    }

    /// Sequences that are fed.
    pub fn feeds(&self) -> usize {
        self.starts.len() - 1
    }

    /// Tokens in the step.
    pub fn rows(&self) -> usize {
        self.places.len()
    }

    pub fn feed_rows(&self, feed: usize) -> Range<usize> {
        self.starts[feed]..self.starts[feed + 1]
    }
}

impl<A: Element> Decoder<A> {
    /// Takes every tensor that `config` describes out of `weights` and packs the matrices.
    pub fn load(config: &Config, mut weights: Weights, cpu: &Cpu) -> Result<Decoder<A>, ModelError> {
        let c = config;
        let w = &mut weights;
        for extra in 0..c.extra_layers {
            w.drop_prefix(&format!("model.layers.{}.", c.layers + extra));
        }
        // The largest tensors first: what is read of one is given back before the model has its whole size.
        let (table, head) = ("model.embed_tokens.weight", "lm_head.weight");
        let mut embed = Some(w.take::<A>(table, &[c.vocab, c.hidden])?);
        if c.tied && w.contains(head) {
            // Some tied folders store the table a second time: then it must be the same table.
            let path = w.path(head);
            if !same_bits(&w.take::<A>(head, &[c.vocab, c.hidden])?, embed.as_deref().expect("it was just read")) {
                let why = "differs from model.embed_tokens.weight, but tie_word_embeddings is true; remove one";
                return Err(ModelError::tensor(&path, head, why));
            }
        }
        let own = if c.tied { embed.take() } else { Some(w.take(head, &[c.vocab, c.hidden])?) };
        let lm_head = PackedWeight::pack(cpu, c.vocab, c.hidden, &own.expect("tied or its own"))?;
        let mut layers = Vec::new();
        for layer in 0..c.layers {
            layers.push(Layer::load(&mut Loader { config: c, cpu, weights: w, layer })?);
        }
        let final_norm = w.take("model.norm.weight", &[c.hidden])?;
        weights.finish()?;
        Ok(Decoder { config: c.clone(), embed, layers, final_norm, lm_head })
    }
}

/// Cosines and sines of a step, by the length that each sequence has declared.
pub(crate) fn angles<S: Store>(
    rotary: &Rotary,
    cpu: &Cpu,
    step: &Step,
    feeds: &[Feed],
    cache: &KvCache<S>,
    pos: &[i32],
) -> RopeTable {
    let mut by_limit: BTreeMap<usize, Vec<f32>> = BTreeMap::new();
    let mut limits = Vec::with_capacity(pos.len());
    for (i, feed) in feeds.iter().enumerate() {
        let limit = rotary.class_of(cache.limit(feed.sequence));
        by_limit.entry(limit).or_insert_with(|| rotary.inv_freq(limit));
        limits.extend(step.feed_rows(i).map(|_| limit));
    }
    RopeTable::each(cpu, rotary.dim / 2, |t| &by_limit[&limits[t]], pos, rotary.factor)
}

impl<A: Element> Steps for Decoder<A> {
    type Store = Host<A>;

    fn config(&self) -> &Config {
        &self.config
    }

    fn cache(&self, page_size: usize, order: PageOrder) -> Result<KvCache<Host<A>>, ModelError> {
        let c = &self.config;
        Ok(KvCache::new(Host::new(c.layers, [c.k_width(), c.v_width()]), page_size, order))
    }

    fn step(
        &self,
        cpu: &Cpu,
        feeds: &[Feed],
        cache: &mut KvCache<Host<A>>,
        rows: Rows,
        watch: &mut Watch,
    ) -> Result<Vec<f32>, ModelError> {
        let c = &self.config;
        let (step, tokens) = Step::of(feeds, cache)?;
        let n = step.rows();
        let pos = step.positions();
        let angles = angles(&c.rotary, cpu, &step, feeds, cache, &watch.positions(None, &step, &pos)?);
        let kv_len: Vec<i32> = feeds.iter().map(|feed| (cache.len(feed.sequence) + feed.tokens.len()) as i32).collect();
        let table = cache.table(feeds.iter().map(|feed| feed.sequence));
        let q_start = step.q_start();

        // Residual stream x, its normed form a, and what a block adds to it, y: [n, hidden].
        let (mut x, mut y, mut sum) =
            (buffer::<f32>(&[n, c.hidden])?, buffer::<f32>(&[n, c.hidden])?, buffer::<f32>(&[n, c.hidden])?);
        let mut a: Vec<A> = buffer(&[n, c.hidden])?;
        // Attention output [n, Hq, E].
        let mut heads: Vec<A> = buffer(&[n, c.q_heads, c.value_dim])?;
        let mut lse = buffer(&[n, c.q_heads])?;
        let mut inner = Inner::default();

        match &self.embed {
            Some(embed) => embedding(cpu, c.hidden, embed, &tokens, &mut x)?,
            None => embedding_packed(cpu, &self.lm_head, &tokens, &mut x)?,
        }
        if let Some(factor) = c.embed_scale {
            scale(cpu, factor, &x, &mut sum)?;
            std::mem::swap(&mut x, &mut sum);
        }
        watch.see(None, "embed", &step, &mut x)?;
        for (i, layer) in self.layers.iter().enumerate() {
            // Attention block. The layer before has left what it adds to x in y.
            if i == 0 {
                rms_norm(cpu, &c.norm(n), &x, &layer.input_norm, &mut a)?;
            } else {
                add_rms_norm(cpu, &c.norm(n), &x, &y, &layer.input_norm, &mut sum, &mut a)?;
                std::mem::swap(&mut x, &mut sum);
                watch.see(Some(i - 1), "sum", &step, &mut x)?;
            }
            watch.see(Some(i), "input_norm", &step, &mut a)?;
            let Projected { mut q, mut k, mut v } = layer.projections.apply(cpu, c, &step, &angles, &a)?;
            watch.see(Some(i), "q", &step, &mut q)?;
            watch.see(Some(i), "k", &step, &mut k)?;
            watch.see(Some(i), "v", &step, &mut v)?;
            for (f, feed) in feeds.iter().enumerate() {
                let start = cache.len(feed.sequence);
                for (row, at) in step.feed_rows(f).zip(start..) {
                    let (k, v) = (&k[row * c.k_width()..][..c.k_width()], &v[row * c.v_width()..][..c.v_width()]);
                    cache.write(i, feed.sequence, at, k, v);
                }
            }
            let shape = c.attention(feeds.len(), n, cache.rows(), i);
            let keys = Keys::Paged { page_size: cache.page_size(), table: &table };
            let q_pos = watch.positions(Some(i), &step, &pos)?;
            let sequences = Sequences { q_pos: &q_pos, kv_len: &kv_len, q_start: Some(&q_start), keys };
            let (k, v) = cache.layer(i);
            attention(cpu, &shape, &sequences, Qkv { q: &q[..], k, v }, &mut heads, &mut lse)?;
            watch.see(Some(i), "attention", &step, &mut heads)?;
            layer.o.apply_to(cpu, n, &heads, &mut y)?;
            watch.see(Some(i), "o", &step, &mut y)?;
            if let Some(w) = &layer.post_attention_norm {
                rms_norm(cpu, &c.norm(n), &y, w, &mut sum)?;
                std::mem::swap(&mut y, &mut sum);
                watch.see(Some(i), "post_attention_norm", &step, &mut y)?;
            }

            // MLP block.
            add_rms_norm(cpu, &c.norm(n), &x, &y, &layer.mlp_norm, &mut sum, &mut a)?;
            std::mem::swap(&mut x, &mut sum);
            watch.see(Some(i), "attention_sum", &step, &mut x)?;
            watch.see(Some(i), "mlp_norm", &step, &mut a)?;
            match &layer.mlp {
                LayerMlp::Dense(mlp) => mlp.apply_to(cpu, n, &a, &mut y, &mut inner)?,
                LayerMlp::Sparse(mixture) => mixture.apply(cpu, &step, i, &a, &mut y, &mut inner, watch)?,
            }
            watch.see(Some(i), "mlp", &step, &mut y)?;
            if let Some(w) = &layer.post_mlp_norm {
                rms_norm(cpu, &c.norm(n), &y, w, &mut sum)?;
                std::mem::swap(&mut y, &mut sum);
                watch.see(Some(i), "post_mlp_norm", &step, &mut y)?;
            }
        }
        for feed in feeds {
            cache.advance(feed.sequence, feed.tokens.len());
        }
        add(cpu, &x, &y, &mut sum)?;
        watch.see(Some(c.layers - 1), "sum", &step, &mut sum)?;

        let (x, step) = match rows {
            Rows::All => (sum, step),
            Rows::Last => {
                let (last, step) = step.last();
                (last.iter().flat_map(|&row| &sum[row * c.hidden..][..c.hidden]).copied().collect(), step)
            }
        };
        let n = step.rows();
        let a = &mut a[..n * c.hidden];
        rms_norm(cpu, &c.norm(n), &x, &self.final_norm, a)?;
        watch.see(None, "final_norm", &step, a)?;
        let mut logits: Vec<f32> = buffer(&[n, c.vocab])?;
        gemm_packed(cpu, &Gemm::new(n, c.vocab, c.hidden), a, &self.lm_head, None, &mut logits)?;
        if c.logit_softcap > 0.0 {
            let mut capped = buffer(&[n, c.vocab])?;
            softcap(cpu, c.logit_softcap, &logits, &mut capped)?;
            logits = capped;
        }
        watch.see(None, "logits", &step, &mut logits)?;
        Ok(logits)
    }
}

impl<A: Element> Layer<A> {
    fn load(loader: &mut Loader) -> Result<Layer<A>, ModelError> {
        let c = loader.config;
        let projections = Projections::load(loader)?;
        let o_bias = c.o_bias || c.latent.is_some_and(|latent| latent.bias);
        let o = loader.linear("self_attn.o_proj", c.hidden, c.q_heads * c.value_dim, o_bias)?;
        let mlp = match c.mlps[loader.layer] {
            Mlp::Dense(width) => LayerMlp::Dense(loader.gated("mlp", PROJECTIONS, width)?),
            Mlp::Sparse => LayerMlp::Sparse(Mixture::load(loader, c.experts.expect("sparse layers have experts"))?),
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

fn same_bits<A: Element>(a: &[A], b: &[A]) -> bool {
    a.iter().zip(b).all(|(a, b)| a.widen().to_bits() == b.widen().to_bits())
}
