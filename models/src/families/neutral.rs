//! Which values of fields that a family does not read ask for nothing, where that is not plain to see: those that say what
//! the model computes anyway.

use crate::config::Config;
use crate::fields::same;
use crate::layers::heads::NormOf;
use crate::layers::mlp::{self, Activation};
use crate::layers::{LayerPlan, attention};
use samebits_ops::Pairing;
use serde_json::{Value, json};

impl Config {
    /// Whether `value` of a field asks for nothing; `None` where it is not known here.
    pub(crate) fn is_neutral(&self, field: &str, value: &Value) -> Option<bool> {
        let is = |neutral: Value| Some(same(&neutral, value));
        let heads = self.heads().next();
        let attention = self.plans().find_map(|plan| match plan {
            LayerPlan::Attention(plan) => Some(plan),
            _ => None,
        });
        let of_attention = |of: fn(&attention::Plan) -> bool| attention.is_some_and(of);
        let zero = || is(json!(0));
        match field {
            "attention_bias" | "qkv_bias" | "use_qkv_bias" => is(json!(of_attention(|plan| plan.bias))),
            "hidden_size" | "d_model" | "n_embd" | "embed_dim" | "word_embed_proj_dim" => is(json!(self.hidden)),
            "n_layer" | "n_layers" | "num_layers" => is(json!(self.layers())),
            "n_head" | "n_heads" | "num_heads" => is(json!(heads?.queries)),
            "num_kv_heads" => is(json!(heads?.keys)),
            "kv_channels" => is(json!(heads?.key_dim)),
            "rotary_dim" => is(json!(self.rotary.first()?.dim)),
            "rotary_pct" | "rope_ratio" => is(json!(1)),
            "n_positions" | "n_ctx" | "max_seq_len" | "context_length" => is(json!(self.max_positions)),
            "ffn_dim" | "ffn_hidden_size" | "n_inner" => {
                let widths = self.mlps().map(|mlp| mlp.width);
                Some(self.experts().next().is_none() && widths.into_iter().all(|width| same(&json!(width), value)))
            }
            "layer_norm_eps" | "layer_norm_epsilon" | "norm_eps" | "norm_epsilon" => {
                Some(value.as_f64().is_some_and(|eps| eps as f32 == self.norms.eps))
            }
            "activation" | "activation_function" | "hidden_activation" => match self.activation()? {
                Activation::Silu => Some(["silu", "swish"].iter().any(|name| value == name)),
                Activation::Gelu => is(json!("gelu_pytorch_tanh")),
                Activation::Clamped(_) | Activation::Ungated(_) | Activation::Learned(_) => None,
            },
            "sliding_window" | "sliding_window_size" => {
                let is_window = |window: &usize| value.as_u64() == Some(*window as u64);
                let reaches_all = value.as_u64().is_some_and(|window| window >= self.max_positions as u64);
                let windows: Vec<usize> = self.windows().into_iter().flatten().collect();
                Some(if windows.is_empty() { reaches_all } else { windows.iter().all(is_window) })
            }
            "max_window_layers" => Some(self.windows().iter().all(Option::is_none)),
            "query_pre_attn_scalar" => {
                let scale = heads?.scale;
                Some(value.as_f64().is_some_and(|scalar| 1.0 / scalar.sqrt() == scale))
            }
            "attention_multiplier" => Some(value.as_f64() == Some(heads?.scale)),
            "logits_scaling"
            | "residual_multiplier"
            | "embedding_multiplier"
            | "logit_scale"
            | "embedding_scale"
            | "lm_head_multiplier"
            | "scale_emb" => is(json!(1)),
            "use_qk_norm" | "qk_layernorm" => {
                is(json!(of_attention(|plan| plan.norm.is_some_and(|norm| norm.of == NormOf::Head))))
            }
            "causal" | "scale_attn_weights" => is(json!(true)),
            "position_embedding_type" => is(json!("rope")),
            "rope_interleave" | "rope_interleaved" | "rotary_emb_interleaved" => is(json!(
                self.plans().find_map(LayerPlan::rope).is_some_and(|rope| rope.pairing == Pairing::Interleaved)
            )),
            "norm_topk_prob" => Some(self.experts().all(|experts| value == experts.normalise)),
            "decoder_sparse_step" | "moe_layer_freq" | "routed_scaling_factor" | "n_group" | "topk_group" => {
                is(json!(1))
            }
            "num_local_experts" | "num_experts" => match self.experts().next() {
                Some(experts) => is(json!(experts.count)),
                None => zero(),
            },
            "n_routed_experts"
            | "n_shared_experts"
            | "num_experts_per_tok"
            | "moe_intermediate_size"
            | "shared_expert_intermediate_size"
            | "first_k_dense_replace"
            | "num_kv_shared_layers" => zero(),
            _ => None,
        }
    }

    /// The MLPs that are no experts.
    fn mlps(&self) -> impl Iterator<Item = &mlp::Plan> {
        self.plans().filter_map(|plan| match plan {
            LayerPlan::Mlp(plan) => Some(plan),
            _ => None,
        })
    }

    /// The activation of all MLPs.
    fn activation(&self) -> Option<Activation> {
        let of_experts = self.experts().map(|experts| &experts.expert);
        self.mlps().chain(of_experts).next().map(|mlp| mlp.activation)
    }
}
