//! The text encoder of CLIP, with its projection or without.

use super::config::nothing_else;
use super::layers::{Attention, Dense, LayerNorm, Loader};
use super::run::Run;
use crate::ModelError;
use crate::fields::Fields;
use samebits_ops::{Attributes, DType, Tensor, TensorRef};
use serde_json::Value;

/// What a folder says of it.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub vocab: usize,
    width: usize,
    inner: usize,
    layers: usize,
    heads: usize,
    /// Tokens of the longest text.
    pub positions: usize,
    eps: f64,
    quick: bool,
    eos: i64,
    projection: Option<usize>,
}

impl Config {
    /// Width of what is projected, where it is.
    pub fn projection(&self) -> Option<usize> {
        self.projection
    }

    pub fn read(fields: &Fields) -> Config {
        let size = |field, default| fields.size(field).unwrap_or(default);
        let class = fields.get("architectures").and_then(|list| list.as_array()?.first()?.as_str()).unwrap_or_default();
        let projects = class == "CLIPTextModelWithProjection";
        if !projects && class != "CLIPTextModel" {
            fields.refuse("architectures", "must be [\"CLIPTextModel\"] or [\"CLIPTextModelWithProjection\"]");
        }
        let projection = size("projection_dim", 512);
        let (width, heads) = (size("hidden_size", 512), size("num_attention_heads", 8));
        if heads > 0 && !width.is_multiple_of(heads) {
            fields.refuse("num_attention_heads", format!("is {heads}; it must divide hidden_size {width}"));
        }
        fields.only("hidden_act", &["quick_gelu".into(), "gelu".into()]);
        let eos = fields.get("eos_token_id").map_or(Some(49407), Value::as_i64);
        if eos.is_none() {
            fields.refuse("eos_token_id", "must be one token");
        }
        let config = Config {
            vocab: size("vocab_size", 49408),
            width,
            inner: size("intermediate_size", 2048),
            layers: size("num_hidden_layers", 12),
            heads,
            positions: size("max_position_embeddings", 77),
            eps: fields.positive("layer_norm_eps").unwrap_or(1e-5),
            quick: fields.get("hidden_act").and_then(Value::as_str) != Some("gelu"),
            eos: eos.unwrap_or(0),
            projection: projects.then_some(projection),
        };
        fields.only("model_type", &["clip_text_model".into()]);
        fields.unread(&["dropout", "initializer_factor", "bos_token_id", "pad_token_id"]);
        nothing_else(fields);
        config
    }
}

/// Attention to the tokens before and an MLP, each behind a norm and added.
struct Layer {
    norms: [LayerNorm; 2],
    attention: Attention,
    up: Dense,
    down: Dense,
}

impl Layer {
    fn load(mut loader: Loader, config: &Config) -> Result<Layer, ModelError> {
        let Config { width, inner, heads, eps, .. } = *config;
        let norms = [
            LayerNorm::load(loader.of("layer_norm1"), width, eps)?,
            LayerNorm::load(loader.of("layer_norm2"), width, eps)?,
        ];
        let mut dense = |name, sizes| Dense::load(loader.of(name), sizes, true);
        let attention = Attention {
            q: dense("self_attn.q_proj", [width; 2])?,
            k: dense("self_attn.k_proj", [width; 2])?,
            v: dense("self_attn.v_proj", [width; 2])?,
            out: dense("self_attn.out_proj", [width; 2])?,
            heads,
            causal: true,
        };
        Ok(Layer { norms, attention, up: dense("mlp.fc1", [width, inner])?, down: dense("mlp.fc2", [inner, width])? })
    }

    fn forward(&self, run: &mut Run, x: &Tensor, lengths: Option<&[usize]>, quick: bool) -> Result<Tensor, ModelError> {
        let h = self.norms[0].forward(run, x)?;
        let h = self.attention.forward(run, &h, &h, lengths)?;
        let x = run.join(x, &h)?;
        let h = self.norms[1].forward(run, &x)?;
        let up = self.up.forward_as(run, DType::Fp32, &h)?;
        let middle = if quick {
            let factor = Attributes::new().with("factor", 1.702);
            let gate = run.op_as(DType::Fp32, "scale", &factor, &[("x", up.view())], up.shape())?;
            run.sigmoid_mul(&gate, &up)?
        } else {
            run.op("activate", &Attributes::new().with("kind", "gelu"), &[("x", up.view())], up.shape())?
        };
        let h = self.down.forward_as(run, DType::Fp32, &middle)?;
        run.join(&x, &h)
    }
}

/// A text encoder, loaded.
pub(crate) struct TextEncoder {
    pub config: Config,
    tokens: Tensor,
    positions: Tensor,
    layers: Vec<Layer>,
    norm: LayerNorm,
    projection: Option<Dense>,
}

/// What a text encoder makes of texts.
pub(crate) struct Encoded {
    /// What goes into each layer, and what comes out of the last, `[B,T,C]`.
    pub states: Vec<Tensor>,
    /// The last through the norm.
    pub last: Tensor,
    /// That of the token that ends each text, `[B,C]`.
    pub pooled: Tensor,
    /// That of a matrix, where there is one.
    pub projected: Option<Tensor>,
}

impl TextEncoder {
    /// With `all` of its layers, or without the last one, whose states nobody reads then.
    pub fn load(mut loader: Loader, config: Config, all: bool) -> Result<TextEncoder, ModelError> {
        let Config { vocab, width, positions, eps, .. } = config;
        let projection = config.projection.map(|to| Dense::load(loader.of("text_projection"), [width, to], false));
        let projection = projection.transpose()?;
        let mut loader = loader.of("text_model");
        let tokens = loader.tensor("embeddings.token_embedding.weight", &[vocab, width])?;
        let positions = loader.tensor("embeddings.position_embedding.weight", &[positions, width])?;
        let layer = |i| Layer::load(loader.of(&format!("encoder.layers.{i}")), &config);
        let layers = (0..config.layers - usize::from(!all)).map(layer).collect::<Result<_, _>>()?;
        let norm = LayerNorm::load(loader.of("final_layer_norm"), width, eps)?;
        Ok(TextEncoder { config, tokens, positions, layers, norm, projection })
    }

    /// Texts of `length` tokens each, of which the first `lengths` are there; all where there are none.
    pub fn forward(
        &self,
        run: &mut Run,
        tokens: &[i32],
        length: usize,
        lengths: Option<&[usize]>,
    ) -> Result<Encoded, ModelError> {
        let (batch, width) = (tokens.len() / length, self.config.width);
        let places: Vec<i32> = (0..tokens.len()).map(|i| (i % length) as i32).collect();
        let mut embed = |table: &Tensor, index: &[i32]| {
            let inputs = [("w", table.view()), ("tokens", TensorRef::new(index, &[index.len()])?)];
            run.op("embedding", &Attributes::new(), &inputs, &[index.len(), width])
        };
        let (words, places) = (embed(&self.tokens, tokens)?, embed(&self.positions, &places)?);
        let mut x = run.add(&words, &places)?;
        x.reshape(&[batch, length, width]);
        let mut states = Vec::new();
        for layer in &self.layers {
            let next = layer.forward(run, &x, lengths, self.config.quick)?;
            states.push(std::mem::replace(&mut x, next));
        }
        let last = self.norm.forward(run, &x)?;
        states.push(x);
        let ends: Vec<i32> =
            tokens.chunks(length).enumerate().map(|(b, text)| (b * length + self.end(text)) as i32).collect();
        let rows = last.view_as(&[batch * length, width])?;
        let inputs = [("w", rows), ("tokens", TensorRef::new(&ends, &[batch])?)];
        let pooled = run.op("embedding", &Attributes::new(), &inputs, &[batch, width])?;
        let projected = self.projection.as_ref().map(|projection| projection.forward(run, &pooled)).transpose()?;
        Ok(Encoded { states, last, pooled, projected })
    }

    /// Which of the states goes into the last layer.
    pub fn before_last(&self) -> usize {
        self.config.layers - 1
    }

    /// Width of a token's states.
    pub fn width(&self) -> usize {
        self.config.width
    }

    /// The place of the token that ends a text. A config that says 2 was written before the token had a field, when it was the largest.
    fn end(&self, text: &[i32]) -> usize {
        let most = text.iter().max();
        let is_end = |token: &i32| match self.config.eos {
            2 => Some(token) == most,
            eos => i64::from(*token) == eos,
        };
        text.iter().position(is_end).unwrap_or(0)
    }
}
