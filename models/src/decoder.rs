//! The forward of qwen3, qwen2 and llama, in the order of the paper.
//!
//! `A` is the type that matrix products and attention read: bf16, or f32 for the reference, whose weights are the same
//! bf16 values widened exactly.
//!
//! # Rounding points of the bf16 chain
//!
//! A value is rounded to bf16 where a product reads it and nowhere else: the output of `rms_norm` before q/k/v, gate/up and
//! the output projection, the rotated queries and keys, the values, the attention output, and `silu_mul`. Everything
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

use crate::kv_cache::{KvCache, buffer};
use crate::weights::Weights;
use crate::{Config, Family, ModelError};
use half::bf16;
use samebits_ops::{
    Attention, Cpu, Element, NormRope, PackedWeight, Pairing, RmsNorm, Rope, RopeTable, Rounding, Tf32, add,
    add_rms_norm, attention, embedding, gemm_packed, inv_freq, norm_rope, rms_norm, rope, silu_mul,
};

/// Weights of a model, ready to run.
pub(crate) struct Decoder<A> {
    config: Config,
    pub(crate) inv_freq: Vec<f32>,
    /// `[V, hidden]`
    embed: Vec<bf16>,
    layers: Vec<Layer<A>>,
    final_norm: Vec<f32>,
    lm_head: PackedWeight,
}

struct Layer<A> {
    input_norm: Vec<f32>,
    q: Linear<A>,
    k: Linear<A>,
    v: Linear<A>,
    /// One head wide; qwen3 only.
    qk_norm: Option<(Vec<f32>, Vec<f32>)>,
    o: Linear<A>,
    mlp_norm: Vec<f32>,
    gate: Linear<A>,
    up: Linear<A>,
    down: Linear<A>,
}

/// `x W^T + b`, the weight packed.
struct Linear<A> {
    weight: PackedWeight,
    /// qwen2's q, k and v only.
    bias: Option<Vec<A>>,
}

/// Which tokens of a step get logits. A row's bits do not depend on the others.
#[derive(Clone, Copy)]
pub(crate) enum Rows {
    /// Every token.
    All,
    /// Each sequence's last one.
    Last,
}

impl<A: Element> Decoder<A> {
    /// Takes every tensor that `config` describes out of `weights` and packs the matrices.
    pub fn load(config: &Config, mut weights: Weights, cpu: &Cpu) -> Result<Decoder<A>, ModelError> {
        let c = config;
        let w = &mut weights;
        let embed = w.take("model.embed_tokens.weight", &[c.vocab, c.hidden])?;
        let mut layers = Vec::new();
        for i in 0..c.layers {
            layers.push(Layer::load(c, i, w, cpu)?);
        }
        let final_norm = convert(&w.take("model.norm.weight", &[c.hidden])?);
        let head = "lm_head.weight";
        let own = match c.tied {
            // Some tied folders store the table a second time: then it must be the same table.
            true if w.contains(head) => {
                let path = w.path(head);
                if w.take(head, &[c.vocab, c.hidden])? != embed {
                    let why = "differs from model.embed_tokens.weight, but tie_word_embeddings is true; remove one";
                    return Err(ModelError::tensor(&path, head, why));
                }
                None
            }
            true => None,
            false => Some(w.take(head, &[c.vocab, c.hidden])?),
        };
        let lm_head = pack::<A>(cpu, c.vocab, c.hidden, own.as_deref().unwrap_or(&embed))?;
        weights.finish()?;
        let inv_freq = inv_freq(c.rope_theta, c.head_dim);
        Ok(Decoder { config: c.clone(), inv_freq, embed, layers, final_norm, lm_head })
    }

    /// An empty cache for `batch` sequences of up to `capacity` tokens.
    pub fn cache(&self, batch: usize, capacity: usize) -> Result<KvCache<A>, ModelError> {
        KvCache::new(self.layers.len(), batch, capacity, self.config.kv_width())
    }

    /// Runs the next `T` tokens of every sequence in `cache`: `tokens[B,T] -> logits[B,T,V]`, or `[B,V]` for the last rows.
    ///
    /// The caller has checked that every token is below V and that `tokens` is a whole number of times the batch.
    pub fn forward(
        &self,
        cpu: &Cpu,
        tokens: &[i32],
        cache: &mut KvCache<A>,
        rows: Rows,
    ) -> Result<Vec<f32>, ModelError> {
        let c = &self.config;
        let (n, batch) = (tokens.len(), cache.batch());
        let len = n / batch;
        cache.check_room(len)?;
        let (start, end) = (cache.len() as i32, (cache.len() + len) as i32);
        let pos: Vec<i32> = (0..batch).flat_map(|_| start..end).collect();
        let kv_len = vec![end; batch];
        let angles = RopeTable::new(cpu, &self.inv_freq, &pos);

        let attention_shape = Attention {
            batch,
            queries: len,
            keys: cache.capacity(),
            q_heads: c.q_heads,
            kv_heads: c.kv_heads,
            head_dim: c.head_dim,
            value_dim: c.head_dim,
            scale: 1.0 / (c.head_dim as f64).sqrt(),
            causal: true,
            window: 0,
            softcap: 0.0,
            tf32: Tf32::Disabled,
        };
        let norm =
            |rows: usize, n: usize| RmsNorm { rows, n, eps: c.rms_eps, rounding: Rounding::Once, weight_offset: false };
        let rotation = |heads: usize| Rope { tokens: n, heads, dim: c.head_dim, pairing: Pairing::Half };
        let norm_rotation = |heads: usize| NormRope {
            tokens: n,
            heads,
            dim: c.head_dim,
            eps: c.rms_eps,
            rounding: Rounding::Once,
            weight_offset: false,
            pairing: Pairing::Half,
        };

        // Residual stream x, its normed form a, and what a block adds to it, y: [n, hidden].
        let (mut x, mut y, mut sum) =
            (buffer::<f32>(&[n, c.hidden])?, buffer(&[n, c.hidden])?, buffer(&[n, c.hidden])?);
        let mut a: Vec<A> = buffer(&[n, c.hidden])?;
        // Queries and attention output [n, Hq, D]; keys and values [n, Hkv, D]; f32 until the rotation has run.
        let (mut q, mut k) = (buffer::<f32>(&[n, c.q_width()])?, buffer::<f32>(&[n, c.kv_width()])?);
        let (mut queries, mut heads) = (buffer::<A>(&[n, c.q_width()])?, buffer::<A>(&[n, c.q_width()])?);
        let (mut keys, mut values) = (buffer::<A>(&[n, c.kv_width()])?, buffer::<A>(&[n, c.kv_width()])?);
        let mut lse = buffer(&[n, c.q_heads])?;
        // MLP: [n, intermediate].
        let (mut gate, mut up) = (buffer::<f32>(&[n, c.intermediate])?, buffer::<f32>(&[n, c.intermediate])?);
        let mut inner: Vec<A> = buffer(&[n, c.intermediate])?;

        embedding(cpu, c.hidden, &self.embed, tokens, &mut x)?;
        for (i, layer) in self.layers.iter().enumerate() {
            // Attention block. The layer before has left what it adds to x in y.
            if i == 0 {
                rms_norm(cpu, &norm(n, c.hidden), &x, &layer.input_norm, &mut a)?;
            } else {
                add_rms_norm(cpu, &norm(n, c.hidden), &x, &y, &layer.input_norm, &mut sum, &mut a)?;
                std::mem::swap(&mut x, &mut sum);
            }
            layer.q.apply(cpu, n, &a, &mut q)?;
            layer.k.apply(cpu, n, &a, &mut k)?;
            layer.v.apply(cpu, n, &a, &mut values)?;
            match &layer.qk_norm {
                Some((q_norm, k_norm)) => {
                    norm_rope(cpu, &norm_rotation(c.q_heads), &angles, &q, q_norm, &mut queries)?;
                    norm_rope(cpu, &norm_rotation(c.kv_heads), &angles, &k, k_norm, &mut keys)?;
                }
                None => {
                    rope(cpu, &rotation(c.q_heads), &angles, &q, &mut queries)?;
                    rope(cpu, &rotation(c.kv_heads), &angles, &k, &mut keys)?;
                }
            }
            cache.append(i, len, &keys, &values)?;
            attention(
                cpu,
                &attention_shape,
                &queries,
                cache.keys(i),
                cache.values(i),
                &pos,
                &kv_len,
                &mut heads,
                &mut lse,
            )?;
            layer.o.apply(cpu, n, &heads, &mut y)?;

            // MLP block.
            add_rms_norm(cpu, &norm(n, c.hidden), &x, &y, &layer.mlp_norm, &mut sum, &mut a)?;
            std::mem::swap(&mut x, &mut sum);
            layer.gate.apply(cpu, n, &a, &mut gate)?;
            layer.up.apply(cpu, n, &a, &mut up)?;
            silu_mul(cpu, &gate, &up, &mut inner)?;
            layer.down.apply(cpu, n, &inner, &mut y)?;
        }
        cache.advance(len)?;
        add(cpu, &x, &y, &mut sum)?;

        let x = match rows {
            Rows::All => sum,
            Rows::Last => sum.chunks_exact(len * c.hidden).flat_map(|s| &s[(len - 1) * c.hidden..]).copied().collect(),
        };
        let n = x.len() / c.hidden;
        rms_norm(cpu, &norm(n, c.hidden), &x, &self.final_norm, &mut a[..n * c.hidden])?;
        let mut logits = buffer(&[n, c.vocab])?;
        gemm_packed(cpu, n, &a[..n * c.hidden], &self.lm_head, None, &mut logits)?;
        Ok(logits)
    }
}

impl<A: Element> Layer<A> {
    fn load(c: &Config, i: usize, w: &mut Weights, cpu: &Cpu) -> Result<Layer<A>, ModelError> {
        let name = |part: &str| format!("model.layers.{i}.{part}");
        let mut linear = |part: &str, n: usize, k: usize, bias: bool| -> Result<Linear<A>, ModelError> {
            let weight = pack::<A>(cpu, n, k, &w.take(&name(&format!("{part}.weight")), &[n, k])?)?;
            let bias = bias.then(|| w.take(&name(&format!("{part}.bias")), &[n])).transpose()?;
            Ok(Linear { weight, bias: bias.map(|b| convert(&b)) })
        };
        let qkv_bias = c.family == Family::Qwen2;
        let q = linear("self_attn.q_proj", c.q_width(), c.hidden, qkv_bias)?;
        let k = linear("self_attn.k_proj", c.kv_width(), c.hidden, qkv_bias)?;
        let v = linear("self_attn.v_proj", c.kv_width(), c.hidden, qkv_bias)?;
        let o = linear("self_attn.o_proj", c.hidden, c.q_width(), false)?;
        let gate = linear("mlp.gate_proj", c.intermediate, c.hidden, false)?;
        let up = linear("mlp.up_proj", c.intermediate, c.hidden, false)?;
        let down = linear("mlp.down_proj", c.hidden, c.intermediate, false)?;
        let mut norm =
            |part: &str, n: usize| Ok::<_, ModelError>(convert(&w.take(&name(&format!("{part}.weight")), &[n])?));
        let qk_norm = match c.family {
            Family::Qwen3 => Some((norm("self_attn.q_norm", c.head_dim)?, norm("self_attn.k_norm", c.head_dim)?)),
            Family::Qwen2 | Family::Llama => None,
        };
        let input_norm = norm("input_layernorm", c.hidden)?;
        let mlp_norm = norm("post_attention_layernorm", c.hidden)?;
        Ok(Layer { input_norm, q, k, v, qk_norm, o, mlp_norm, gate, up, down })
    }
}

impl<A: Element> Linear<A> {
    /// `x[M,K] -> y[M,N]`
    fn apply<O: Element>(&self, cpu: &Cpu, m: usize, x: &[A], y: &mut [O]) -> Result<(), ModelError> {
        Ok(gemm_packed(cpu, m, x, &self.weight, self.bias.as_deref(), y)?)
    }
}

/// Packs `w[N,K]` as `A`.
fn pack<A: Element>(cpu: &Cpu, n: usize, k: usize, w: &[bf16]) -> Result<PackedWeight, ModelError> {
    Ok(PackedWeight::pack(cpu, n, k, &convert::<A>(w))?)
}

/// The same values as `T`, bf16 or f32: exact for both.
fn convert<T: Element>(w: &[bf16]) -> Vec<T> {
    w.iter().map(|w| T::narrow(w.widen())).collect()
}
