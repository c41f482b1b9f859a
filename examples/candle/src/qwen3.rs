//! Qwen3 as candle-transformers has it (`models::qwen3`), step by step, but for the choice of ops.
//!
//! Models of candle-transformers name their ops themselves, so this one is said again here with [`Ops`] in the place of
//! `Linear`, `RmsNorm` and `flash_attn`. With [`Ops::Candle`] it has the bits of the original, as the tests hold it to.

use crate::{Attention, MatMul, RmsNorm};
use candle_core::{DType, Device, Error, Module, Result, Tensor, bail};
use candle_nn::attention::{AttnMask, flash_attn};
use candle_nn::kv_cache::ConcatKvCache;
use candle_nn::{Embedding, VarBuilder, embedding, rotary_emb};
pub use candle_transformers::models::qwen3::Config;
use samebits_ops::Cpu;
use std::path::Path;

/// Whose `rms_norm`, products and attention a [`Model`] computes with. The rest (embedding, rotation, SiLU, sums) is
/// candle's: it looks at one element or pair at a time.
#[derive(Clone)]
pub enum Ops {
    /// Those that the model of candle-transformers uses.
    Candle,
    /// [`RmsNorm`], [`MatMul`] and [`Attention`].
    Samebits(Cpu),
}

impl Ops {
    fn linear(&self, x: &Tensor, w: &Tensor) -> Result<Tensor> {
        match self {
            Ops::Candle => candle_nn::Linear::new(w.clone(), None).forward(x),
            Ops::Samebits(cpu) => x.apply_op2(w, MatMul { cpu: cpu.clone() }),
        }
    }

    fn rms_norm(&self, x: &Tensor, w: &Tensor, eps: f64) -> Result<Tensor> {
        match self {
            // Of a view of heads the original makes a contiguous tensor as well, by `flatten`.
            Ops::Candle => candle_nn::RmsNorm::new(w.clone(), eps).forward(&x.contiguous()?),
            Ops::Samebits(cpu) => x.apply_op2(w, RmsNorm { cpu: cpu.clone(), eps }),
        }
    }

    /// `q[B, Hq, T, D], k[B, Hkv, S, D], v[B, Hkv, S, D] -> [B, T, Hq, D]`, the first query at position `offset`.
    fn attention(&self, q: &Tensor, k: &Tensor, v: &Tensor, offset: usize) -> Result<Tensor> {
        let (q, k, v) = (q.transpose(1, 2)?, k.transpose(1, 2)?, v.transpose(1, 2)?);
        match self {
            Ops::Candle => {
                let scale = 1.0 / (q.dim(3)? as f32).sqrt();
                // Its kernel computes in f32.
                let f32 = |x: &Tensor| x.contiguous()?.to_dtype(DType::F32);
                let mask = AttnMask::causal_with_offset(offset);
                let out = flash_attn::<f32>(&f32(&q)?, &f32(&k)?, &f32(&v)?, scale, mask, None, None)?;
                out.to_dtype(q.dtype())?.transpose(1, 2)
            }
            Ops::Samebits(cpu) => q.apply_op3(&k, &v, Attention { cpu: cpu.clone(), offset }),
        }
    }
}

/// A small model that adds: 4 layers, 256 wide, 32 tokens.
pub const ADDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/checkpoints/qwen3-adder");

/// The configuration and the weights of a Qwen3 folder of Hugging Face, as `dtype`.
///
/// # Errors
/// When a file is missing or of another form.
pub fn load(folder: &Path, dtype: DType) -> Result<(Config, VarBuilder<'static>)> {
    let mut config: serde_json::Value =
        serde_json::from_slice(&std::fs::read(folder.join("config.json"))?).map_err(Error::wrap)?;
    // Where newer folders have it; candle-transformers reads the older place.
    if let Some(theta) = config.pointer("/rope_parameters/rope_theta").cloned() {
        config["rope_theta"] = theta;
    }
    let weights = std::fs::read(folder.join("model.safetensors"))?;
    Ok((
        serde_json::from_value(config).map_err(Error::wrap)?,
        VarBuilder::from_buffered_safetensors(weights, dtype, &Device::Cpu)?,
    ))
}

struct Layer {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    attention_norm: Tensor,
    mlp_norm: Tensor,
    cache: ConcatKvCache,
}

impl Layer {
    fn load(config: &Config, weights: VarBuilder) -> Result<Layer> {
        let (hidden, wide, dim) = (config.hidden_size, config.intermediate_size, config.head_dim);
        let (q_wide, kv_wide) = (config.num_attention_heads * dim, config.num_key_value_heads * dim);
        let matrix = |name: &str, n: usize, k: usize| weights.get((n, k), &format!("{name}.weight"));
        let vector = |name: &str, n: usize| weights.get(n, &format!("{name}.weight"));
        Ok(Layer {
            q: matrix("self_attn.q_proj", q_wide, hidden)?,
            k: matrix("self_attn.k_proj", kv_wide, hidden)?,
            v: matrix("self_attn.v_proj", kv_wide, hidden)?,
            o: matrix("self_attn.o_proj", hidden, q_wide)?,
            q_norm: vector("self_attn.q_norm", dim)?,
            k_norm: vector("self_attn.k_norm", dim)?,
            gate: matrix("mlp.gate_proj", wide, hidden)?,
            up: matrix("mlp.up_proj", wide, hidden)?,
            down: matrix("mlp.down_proj", hidden, wide)?,
            attention_norm: vector("input_layernorm", hidden)?,
            mlp_norm: vector("post_attention_layernorm", hidden)?,
            cache: ConcatKvCache::new(2),
        })
    }
}

/// The model, with the keys and values that it has seen.
pub struct Model {
    config: Config,
    ops: Ops,
    embedding: Embedding,
    layers: Vec<Layer>,
    norm: Tensor,
    head: Tensor,
    cos: Tensor,
    sin: Tensor,
}

impl Model {
    /// The model of `config` with `weights`, which computes with `ops`.
    ///
    /// # Errors
    /// When a weight is missing or has another shape, or the model has biases or a sliding window.
    pub fn new(config: &Config, weights: &VarBuilder, ops: Ops) -> Result<Model> {
        if config.attention_bias || config.use_sliding_window {
            bail!("biases and sliding windows are not supported");
        }
        let embedding = embedding(config.vocab_size, config.hidden_size, weights.pp("model.embed_tokens"))?;
        let head = match config.tie_word_embeddings {
            true => embedding.embeddings().clone(),
            false => weights.get((config.vocab_size, config.hidden_size), "lm_head.weight")?,
        };
        let layers = (0..config.num_hidden_layers).map(|i| Layer::load(config, weights.pp("model.layers").pp(i)));
        let (cos, sin) = angles(config, weights.dtype())?;
        Ok(Model {
            ops,
            embedding,
            layers: layers.collect::<Result<_>>()?,
            norm: weights.get(config.hidden_size, "model.norm.weight")?,
            head,
            cos,
            sin,
            config: config.clone(),
        })
    }

    /// `tokens[B, T] -> logits[B, 1, V]` behind the last token. They follow the `offset` tokens that the model has seen of
    /// each sequence; with 0 it forgets what it has seen.
    ///
    /// # Errors
    /// When a token is outside the vocabulary, or a position beyond the model's.
    pub fn forward(&mut self, tokens: &Tensor, offset: usize) -> Result<Tensor> {
        let Model { config, ops, cos, sin, .. } = self;
        let (b, l) = tokens.dims2()?;
        let eps = config.rms_norm_eps;
        let (cos, sin) = (cos.narrow(0, offset, l)?, sin.narrow(0, offset, l)?);
        let mut x = self.embedding.forward(tokens)?;
        for layer in &mut self.layers {
            if offset == 0 {
                layer.cache.reset();
            }
            let h = ops.rms_norm(&x, &layer.attention_norm, eps)?;
            // As [B, H, T, D]: a view.
            let heads = |w: &Tensor| ops.linear(&h, w)?.reshape((b, l, (), config.head_dim))?.transpose(1, 2);
            let q = ops.rms_norm(&heads(&layer.q)?, &layer.q_norm, eps)?;
            let k = ops.rms_norm(&heads(&layer.k)?, &layer.k_norm, eps)?;
            let (q, k) = (rotary_emb::rope(&q, &cos, &sin)?, rotary_emb::rope(&k, &cos, &sin)?);
            let (k, v) = layer.cache.append(&k, &heads(&layer.v)?)?;
            let out = ops.attention(&q, &k, &v, offset)?.reshape((b, l, ()))?;
            x = (x + ops.linear(&out, &layer.o)?)?;

            let h = ops.rms_norm(&x, &layer.mlp_norm, eps)?;
            let gate = config.hidden_act.forward(&ops.linear(&h, &layer.gate)?)?;
            x = (x + ops.linear(&(gate * ops.linear(&h, &layer.up)?)?, &layer.down)?)?;
        }
        let last = ops.rms_norm(&x, &self.norm, eps)?.narrow(1, l - 1, 1)?;
        ops.linear(&last, &self.head)
    }
}

/// Cosines and sines `[positions, D / 2]`.
fn angles(config: &Config, dtype: DType) -> Result<(Tensor, Tensor)> {
    let dim = config.head_dim;
    let inverse = |i: usize| 1f32 / config.rope_theta.powf(i as f64 / dim as f64) as f32;
    let inverse = Tensor::from_iter((0..dim).step_by(2).map(inverse), &Device::Cpu)?.unsqueeze(0)?;
    let positions = Tensor::arange(0, config.max_position_embeddings as u32, &Device::Cpu)?;
    let angles = positions.to_dtype(DType::F32)?.unsqueeze(1)?.matmul(&inverse)?;
    Ok((angles.cos()?.to_dtype(dtype)?, angles.sin()?.to_dtype(dtype)?))
}
