//! What each family reads from its config beyond what all share: the same fields as its code in transformers.

use crate::ModelError;
use crate::config::{Config, Experts, Latent, Mlp};
use crate::fields::Fields;
use crate::layers::mlp::Activation;
use crate::rotary::Scaling;
use samebits_ops::{GroupWorth, Pairing, Scoring};
use serde_json::{Value, json};

/// Model families, by the `model_type` in `config.json`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Qwen3: norms of query and key heads.
    Qwen3,
    /// Qwen2 and Qwen2.5: biases on query, key and value.
    Qwen2,
    /// Llama 2 and 3.
    Llama,
    /// Mistral: a sliding window.
    Mistral,
    /// Gemma 2: windows in every other layer, soft limits, gelu, norms behind the blocks, 1 added to norm weights.
    Gemma2,
    /// Phi-3: fused projections, long rotary positions.
    Phi3,
    /// Mixtral: a mixture of experts in every layer.
    Mixtral,
    /// Qwen3-MoE: a mixture of experts in most layers.
    Qwen3Moe,
    /// DeepSeek V2: latent attention, shared experts, softmax routing.
    DeepseekV2,
    /// DeepSeek V3: the same with sigmoid routing and a bias on the choice.
    DeepseekV3,
}

use Family::*;

impl Family {
    /// Every supported family.
    pub const ALL: [Family; 10] =
        [Qwen3, Qwen2, Llama, Mistral, Gemma2, Phi3, Mixtral, Qwen3Moe, DeepseekV2, DeepseekV3];

    /// The `model_type` in `config.json`.
    pub fn name(self) -> &'static str {
        match self {
            Qwen3 => "qwen3",
            Qwen2 => "qwen2",
            Llama => "llama",
            Mistral => "mistral",
            Gemma2 => "gemma2",
            Phi3 => "phi3",
            Mixtral => "mixtral",
            Qwen3Moe => "qwen3_moe",
            DeepseekV2 => "deepseek_v2",
            DeepseekV3 => "deepseek_v3",
        }
    }

    pub(crate) fn read(fields: &Fields) -> Result<Family, ModelError> {
        let names = Family::ALL.map(Family::name).join(", ");
        let value = fields.get("model_type");
        let family = Family::ALL.into_iter().find(|family| value.is_some_and(|value| value == family.name()));
        let said = value.map_or("missing".to_string(), Value::to_string);
        family
            .ok_or_else(|| ModelError::field(fields.path(), "model_type", format!("is {said}; supported are {names}")))
    }
}

impl Config {
    /// Reads what is the family's own.
    pub(crate) fn read_family(&mut self, f: &Fields) {
        let silu = [json!("silu"), json!("swish")];
        let off = [json!(false)];
        if self.family != Gemma2 {
            f.only("hidden_act", &silu);
        }
        match self.family {
            Llama => {
                self.heads(f);
                (self.qkv_bias, self.mlp_bias) = (f.flag("attention_bias", false), f.flag("mlp_bias", false));
                self.o_bias = self.qkv_bias;
            }
            Qwen2 | Qwen3 => {
                self.heads(f);
                f.only("use_mrope", &off);
                if self.family == Qwen2 {
                    self.qkv_bias = true;
                } else {
                    self.head_norms = true;
                    self.qkv_bias = f.flag("attention_bias", false);
                    self.o_bias = self.qkv_bias;
                }
                let window = if f.flag("use_sliding_window", false) { f.size("sliding_window") } else { None };
                // Without the switch, the family's code drops the window.
                f.unread(&["sliding_window"]);
                let first = f.get("max_window_layers").map_or(28, |_| f.size_or_zero("max_window_layers"));
                self.windows_by_layer(f, window, |i| i >= first);
            }
            Mistral | Mixtral => {
                self.heads(f);
                // The family's own default, where the key is missing and not null.
                let default = (self.family == Mistral && !f.has("sliding_window")).then_some(4096);
                self.windows = vec![f.size("sliding_window").or(default); self.layers];
                if self.family == Mixtral {
                    self.mlps.fill(Mlp::Sparse);
                    let width = f.required_size("intermediate_size");
                    self.experts = Some(self.softmax_experts(f, &["num_local_experts"], width, true));
                }
            }
            Gemma2 => {
                self.heads(f);
                f.present(&["sliding_window", "attn_logit_softcapping", "final_logit_softcapping"]);
                self.qkv_bias = f.flag("attention_bias", false);
                self.o_bias = self.qkv_bias;
                // Older folders name both; the first is what counts.
                f.only("hidden_activation", &[json!("gelu_pytorch_tanh")]);
                f.only("hidden_act", &[json!("gelu_pytorch_tanh"), json!("gelu")]);
                f.only("use_bidirectional_attention", &off);
                self.activation = Activation::Gelu;
                (self.weight_offset, self.post_norms) = (true, true);
                self.embed_scale = Some((self.hidden as f64).sqrt());
                self.scale = 1.0 / f.positive("query_pre_attn_scalar").unwrap_or(256.0).sqrt();
                self.attention_softcap = f.positive("attn_logit_softcapping");
                self.logit_softcap = f.positive("final_logit_softcapping");
                let window = f.size("sliding_window");
                f.unread(&["cache_implementation"]);
                self.windows_by_layer(f, window, |i| i % 2 == 0);
            }
            Phi3 => {
                self.heads(f);
                self.fused = true;
                self.windows = vec![f.size("sliding_window"); self.layers];
            }
            Qwen3Moe => {
                self.heads(f);
                self.head_norms = true;
                self.qkv_bias = f.flag("attention_bias", false);
                self.o_bias = self.qkv_bias;
                let window = if f.flag("use_sliding_window", false) { f.size("sliding_window") } else { None };
                f.unread(&["sliding_window", "max_window_layers"]);
                self.windows = vec![window; self.layers];
                self.sparse_by_step(f);
                let width = f.required_size("moe_intermediate_size");
                let normalise = f.flag("norm_topk_prob", false);
                self.experts = Some(self.softmax_experts(f, &["num_experts", "num_local_experts"], width, normalise));
            }
            DeepseekV2 | DeepseekV3 => self.latent(f),
        }
        // Whoever does not read the types of the layers may still name them.
        let window = self.windows.iter().copied().flatten().next();
        let read = self.windows.clone();
        self.windows_by_layer(f, window, |_| false);
        if self.windows != read {
            f.refuse("layer_types", format!("are not those of {}", self.family.name()));
        }
        if self.latent.is_none() {
            self.rotary(f, self.key_dim, self.family == Phi3);
        }
    }

    /// Whether `value` of a field that the family does not read asks for nothing, where that is not plain to see.
    pub(crate) fn is_neutral(&self, field: &str, value: &Value) -> Option<bool> {
        let same = |neutral: Value| Some(crate::fields::same(&neutral, value));
        let zero = || same(json!(0));
        match field {
            "attention_bias" | "qkv_bias" | "use_qkv_bias" => same(json!(self.qkv_bias)),
            "hidden_size" | "d_model" | "n_embd" | "embed_dim" | "word_embed_proj_dim" => same(json!(self.hidden)),
            "n_layer" | "n_layers" | "num_layers" => same(json!(self.layers)),
            "n_head" | "n_heads" | "num_heads" => same(json!(self.q_heads)),
            "num_kv_heads" => same(json!(self.kv_heads)),
            "kv_channels" => same(json!(self.key_dim)),
            "rotary_dim" => same(json!(self.rotary.dim)),
            "rotary_pct" | "rope_ratio" => same(json!(1)),
            "n_positions" | "n_ctx" | "max_seq_len" | "context_length" => same(json!(self.max_positions)),
            "ffn_dim" | "ffn_hidden_size" | "n_inner" => {
                Some(self.mlps.iter().all(|mlp| matches!(mlp, Mlp::Dense(width) if same(json!(width)) == Some(true))))
            }
            "layer_norm_eps" | "layer_norm_epsilon" | "norm_eps" | "norm_epsilon" => {
                Some(value.as_f64().is_some_and(|eps| eps as f32 == self.rms_eps))
            }
            "activation" | "activation_function" | "hidden_activation" => match self.activation {
                Activation::Silu => Some(["silu", "swish"].iter().any(|name| value == name)),
                Activation::Gelu => same(json!("gelu_pytorch_tanh")),
            },
            "sliding_window" | "sliding_window_size" => {
                let same = |window: &Option<usize>| value.as_u64() == window.map(|window| window as u64);
                let reaches_all = value.as_u64().is_some_and(|window| window >= self.max_positions as u64);
                let windows: Vec<_> = self.windows.iter().filter(|window| window.is_some()).collect();
                Some(if windows.is_empty() { reaches_all } else { windows.into_iter().all(same) })
            }
            "max_window_layers" => Some(self.windows.iter().all(Option::is_none)),
            "query_pre_attn_scalar" => Some(value.as_f64().is_some_and(|scalar| 1.0 / scalar.sqrt() == self.scale)),
            "attention_multiplier" => Some(value.as_f64() == Some(self.scale)),
            "logits_scaling"
            | "residual_multiplier"
            | "embedding_multiplier"
            | "logit_scale"
            | "embedding_scale"
            | "lm_head_multiplier"
            | "scale_emb" => same(json!(1)),
            "use_qk_norm" | "qk_layernorm" => same(json!(self.head_norms)),
            "causal" | "scale_attn_weights" => same(json!(true)),
            "position_embedding_type" => same(json!("rope")),
            "rope_interleave" | "rope_interleaved" | "rotary_emb_interleaved" => {
                same(json!(self.pairing == Pairing::Interleaved))
            }
            "norm_topk_prob" => Some(self.experts.is_none_or(|experts| value == experts.normalise)),
            "decoder_sparse_step" | "moe_layer_freq" | "routed_scaling_factor" | "n_group" | "topk_group" => {
                same(json!(1))
            }
            "num_experts"
            | "num_local_experts"
            | "n_routed_experts"
            | "n_shared_experts"
            | "num_experts_per_tok"
            | "moe_intermediate_size"
            | "shared_expert_intermediate_size"
            | "first_k_dense_replace"
            | "num_kv_shared_layers" => match self.experts {
                Some(experts) if field == "num_local_experts" || field == "num_experts" => same(json!(experts.count)),
                _ => zero(),
            },
            _ => None,
        }
    }

    /// Heads that all have projections of their own.
    fn heads(&mut self, f: &Fields) {
        self.kv_heads = match (f.size("num_key_value_heads"), self.family) {
            (Some(heads), _) => heads,
            (None, Llama | Phi3) => self.q_heads,
            (None, _) => f.required_size("num_key_value_heads"),
        };
        if self.kv_heads > 0 && !self.q_heads.is_multiple_of(self.kv_heads) {
            let why = format!("is {}; it must divide num_attention_heads {}", self.kv_heads, self.q_heads);
            f.refuse("num_key_value_heads", why);
        }
        self.key_dim = match (f.size("head_dim"), self.family) {
            (Some(dim), _) => dim,
            // These families' own default has nothing to do with their sizes: a folder without the field is ambiguous.
            (None, Qwen3 | Gemma2) => f.required_size("head_dim"),
            (None, _) if self.q_heads == 0 => 0,
            (None, _) if self.hidden.is_multiple_of(self.q_heads) => self.hidden / self.q_heads,
            (None, _) => {
                let why = format!("is {}; without head_dim it must divide hidden_size {}", self.q_heads, self.hidden);
                f.refuse("num_attention_heads", why);
                0
            }
        };
        self.value_dim = self.key_dim;
        self.scale = 1.0 / (self.key_dim as f64).sqrt();
    }

    /// `layer_types` where they are given, else `windowed`.
    fn windows_by_layer(&mut self, f: &Fields, window: Option<usize>, windowed: impl Fn(usize) -> bool) {
        let Some(value) = f.get("layer_types") else {
            for (_, layer) in self.windows.iter_mut().enumerate().filter(|(i, _)| windowed(*i)) {
                *layer = window;
            }
            return;
        };
        let Some(types) = value.as_array() else { return f.refuse("layer_types", "is not a list of layer types") };
        if types.len() != self.layers {
            if self.layers > 0 {
                let why = format!("has {} entries; num_hidden_layers is {}", types.len(), self.layers);
                f.refuse("layer_types", why);
            }
            return;
        }
        for (i, (kind, layer)) in types.iter().zip(&mut self.windows).enumerate() {
            *layer = match (kind.as_str(), window) {
                (Some("full_attention"), _) => None,
                (Some("sliding_attention"), Some(_)) => window,
                (Some("sliding_attention"), None) => {
                    let why = "is \"sliding_attention\", but there is no sliding_window in use";
                    return f.refuse(format!("layer_types[{i}]"), why);
                }
                _ => {
                    let why = format!("is {kind}; supported are \"full_attention\" and \"sliding_attention\"");
                    return f.refuse(format!("layer_types[{i}]"), why);
                }
            };
        }
    }

    /// Experts of Mixtral and Qwen3-MoE: softmax scores, no groups.
    fn softmax_experts(&self, f: &Fields, names: &[&str], width: usize, normalise: bool) -> Experts {
        let mut count = None;
        for name in names {
            count = count.or_else(|| f.size(name));
        }
        let count = count.unwrap_or_else(|| f.required_size(names[0]));
        Experts {
            count,
            chosen: chosen(f, count),
            width,
            shared_width: None,
            scoring: Scoring::Softmax,
            choice_bias: false,
            groups: 1,
            top_groups: 1,
            group_worth: GroupWorth::Max,
            normalise,
            scale: 1.0,
        }
    }

    /// Every `decoder_sparse_step`-th layer is sparse, but those in `mlp_only_layers`.
    fn sparse_by_step(&mut self, f: &Fields) {
        let step = f.size("decoder_sparse_step").unwrap_or(1);
        let given = f.get("mlp_only_layers");
        let dense: Option<Vec<u64>> = match given {
            None => Some(Vec::new()),
            Some(value) => value.as_array().and_then(|list| list.iter().map(Value::as_u64).collect()),
        };
        let Some(dense) = dense else {
            let value = given.expect("it is no list");
            return f.refuse("mlp_only_layers", format!("is {value}; it must be a list of layer numbers"));
        };
        for (i, mlp) in self.mlps.iter_mut().enumerate() {
            if (i + 1).is_multiple_of(step) && !dense.contains(&(i as u64)) {
                *mlp = Mlp::Sparse;
            }
        }
    }

    /// DeepSeek: latent attention and its experts.
    fn latent(&mut self, f: &Fields) {
        f.present(&["q_lora_rank"]);
        if self.family == DeepseekV3 {
            f.present(&["n_group", "topk_group", "first_k_dense_replace", "routed_scaling_factor"]);
        }
        let latent = Latent {
            q_rank: f.size("q_lora_rank"),
            kv_rank: f.required_size("kv_lora_rank"),
            nope: f.required_size("qk_nope_head_dim"),
            rotary: f.required_size("qk_rope_head_dim"),
            bias: f.flag("attention_bias", false),
        };
        self.key_dim = latent.nope + latent.rotary;
        self.value_dim = f.required_size("v_head_dim");
        self.latent = Some(latent);
        f.only("num_key_value_heads", &[json!(self.q_heads)]);
        f.only("head_dim", &[json!(latent.rotary)]);
        f.only("qk_head_dim", &[json!(self.key_dim)]);
        self.pairing = Pairing::Interleaved;
        if self.family == DeepseekV3 {
            if !f.flag("rope_interleave", true) {
                self.pairing = Pairing::Half;
            }
            self.extra_layers = f.size_or_zero("num_nextn_predict_layers");
        } else {
            self.mlp_bias = f.flag("mlp_bias", false);
        }
        self.rotary(f, latent.rotary, false);
        self.scale = 1.0 / (self.key_dim as f64).sqrt();
        if let Some(mscale) = self.rotary_mscale_all(f) {
            self.scale *= mscale * mscale;
        }

        let count = f.required_size("n_routed_experts");
        f.only("moe_layer_freq", &[json!(1)]);
        let dense = f.size_or_zero("first_k_dense_replace");
        for mlp in self.mlps.iter_mut().skip(dense) {
            *mlp = Mlp::Sparse;
        }
        let width = f.required_size("moe_intermediate_size");
        let shared = f.size_or_zero("n_shared_experts");
        let groups = f.size("n_group").unwrap_or(1);
        let top_groups = f.size("topk_group").unwrap_or(1);
        if groups > 0 && !count.is_multiple_of(groups) {
            f.refuse("n_group", format!("is {groups}; it must divide n_routed_experts {count}"));
        }
        let mut experts = Experts {
            count,
            chosen: chosen(f, count),
            width,
            shared_width: Some(shared * width).filter(|width| *width > 0),
            scoring: Scoring::Softmax,
            choice_bias: false,
            groups,
            top_groups,
            group_worth: GroupWorth::Max,
            normalise: false,
            scale: f.positive("routed_scaling_factor").unwrap_or(1.0),
        };
        if self.family == DeepseekV2 {
            f.only("scoring_func", &[json!("softmax")]);
            f.only("topk_method", &[json!("greedy"), json!("group_limited_greedy")]);
            // Its code in transformers does not read the field.
            f.only("norm_topk_prob", &[json!(false)]);
            if f.get("topk_method").is_none_or(|method| method == "greedy") {
                (experts.groups, experts.top_groups) = (1, 1);
            }
        } else {
            f.only("scoring_func", &[json!("sigmoid")]);
            f.only("topk_method", &[json!("noaux_tc")]);
            (experts.scoring, experts.choice_bias) = (Scoring::Sigmoid, true);
            experts.group_worth = GroupWorth::TopTwo;
            experts.normalise = f.flag("norm_topk_prob", true);
            if groups > 1 && count > 0 && count / groups < 2 {
                f.refuse("n_group", format!("is {groups}; a group needs two of the {count} experts"));
            }
        }
        let known = count > 0 && experts.groups > 0 && experts.top_groups > 0;
        let held = experts.top_groups.saturating_mul(count / experts.groups.max(1));
        if known && (experts.top_groups > experts.groups || held < experts.chosen) {
            let why =
                format!("is {top_groups}; of {groups} groups it must hold num_experts_per_tok {}", experts.chosen);
            f.refuse("topk_group", why);
        }
        self.experts = Some(experts);
    }

    /// The scaling of the rotary positions over the first elements of `dim`.
    fn rotary(&mut self, f: &Fields, dim: usize, partial: bool) {
        let theta = match self.family {
            Llama | Gemma2 | Mistral | Phi3 | DeepseekV2 | DeepseekV3 => Some(10_000.0),
            Mixtral => Some(1_000_000.0),
            Qwen2 | Qwen3 | Qwen3Moe => None,
        };
        self.rotary = crate::rotary::read(f, dim, partial, theta, self.max_positions);
        // The published length is that of the training; these scalings are there to go beyond it.
        let stretch = match self.rotary.scaling {
            Scaling::Linear { factor } | Scaling::Dynamic { factor, .. } => self.max_positions as f64 * factor,
            Scaling::Yarn { factor, original, .. } => original as f64 * factor,
            _ => 0.0,
        };
        self.max_positions = self.max_positions.max(stretch.min(f64::from(i32::MAX)) as usize);
    }

    /// DeepSeek multiplies its scores by the square of this where positions are scaled.
    fn rotary_mscale_all(&self, f: &Fields) -> Option<f64> {
        if self.rotary.scaling == Scaling::Default {
            return None;
        }
        let mut found = None;
        for map in ["rope_parameters", "rope_scaling"].iter().filter_map(|object| f.get(object)?.as_object()) {
            let number = |key: &str| map.get(key).and_then(Value::as_f64).filter(|v| *v != 0.0);
            if let (Some(all), Some(factor)) = (number("mscale_all_dim"), number("factor")) {
                found = Some(crate::rotary::mscale(factor, all));
            }
        }
        found
    }
}

/// `num_experts_per_tok`, at most `count`.
fn chosen(f: &Fields, count: usize) -> usize {
    let chosen = f.required_size("num_experts_per_tok");
    if count > 0 && chosen > count {
        f.refuse("num_experts_per_tok", format!("is {chosen}; there are {count} experts"));
    }
    chosen
}
