//! DeepSeek V2: latent attention, shared experts, softmax routing.

use super::Family;
use super::parts::{dense_first, expert, gated, groups, only_silu, pre_norm, rope, softmax_experts};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::heads::Rope;
use crate::layers::{LayerPlan, attend, latent_attention, mlp, moe};
use crate::rotary::Scaling;
use samebits_ops::Pairing;
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family::of("deepseek_v2", read);

fn read(c: &mut Config, f: &Fields, layers: usize) {
    only_silu(f);
    f.present(&["q_lora_rank"]);
    let bias = f.flag("mlp_bias", false);
    let mixer = latent(c, f, Pairing::Interleaved);
    let mut experts = shared_experts(c, f);
    f.only("scoring_func", &[json!("softmax")]);
    f.only("topk_method", &[json!("greedy"), json!("group_limited_greedy")]);
    // Its code in transformers does not read the field.
    f.only("norm_topk_prob", &[json!(false)]);
    if f.get("topk_method").is_none_or(|method| method == "greedy") {
        (experts.groups, experts.top_groups) = (1, 1);
    }
    experts.expert.bias = bias;
    experts.shared.iter_mut().for_each(|shared| shared.mlp.bias = bias);
    let dense = mlp::Plan { bias, ..gated(c, f.required_size("intermediate_size")) };
    let block = |mlp| pre_norm(LayerPlan::LatentAttention(mixer.clone()), mlp);
    c.blocks = dense_first(f, layers, &experts, &dense).into_iter().map(block).collect();
}

/// Latent attention.
pub(super) fn latent(c: &mut Config, f: &Fields, pairing: Pairing) -> latent_attention::Plan {
    let queries = f.required_size("num_attention_heads");
    let (q_rank, kv_rank) = (f.size("q_lora_rank"), f.required_size("kv_lora_rank"));
    let (nope, rotary) = (f.required_size("qk_nope_head_dim"), f.required_size("qk_rope_head_dim"));
    let bias = f.flag("attention_bias", false);
    let (key_dim, value_dim) = (nope + rotary, f.required_size("v_head_dim"));
    f.only("num_key_value_heads", &[json!(queries)]);
    f.only("head_dim", &[json!(rotary)]);
    f.only("qk_head_dim", &[json!(key_dim)]);
    let rope = Rope { pairing, ..rope(c, f, rotary, Some(10_000.0)) };
    let mut scale = 1.0 / (key_dim as f64).sqrt();
    if let Some(mscale) = mscale_all(c, f) {
        scale *= mscale * mscale;
    }
    let heads =
        attend::Heads { queries, keys: queries, key_dim, value_dim, scale, softcap: None, window: None, chunk: None };
    latent_attention::Plan { hidden: c.hidden, heads, rope, q_rank, kv_rank, nope, bias, indexer: None }
}

/// What scores are multiplied by the square of, where positions are scaled.
fn mscale_all(c: &Config, f: &Fields) -> Option<f64> {
    if c.rotary.iter().all(|rotary| rotary.scaling == Scaling::Default) {
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

/// Experts in groups by softmax scores, and some that see every token.
pub(super) fn shared_experts(c: &Config, f: &Fields) -> moe::Plan {
    let count = f.required_size("n_routed_experts");
    f.only("moe_layer_freq", &[json!(1)]);
    let width = f.required_size("moe_intermediate_size");
    let shared = f.size_or_zero("n_shared_experts") * width;
    let (groups, top_groups) = groups(f, count);
    moe::Plan {
        shared: (shared > 0).then(|| moe::Shared::of(expert(c, shared), "shared_experts")),
        groups,
        top_groups,
        scale: f.positive("routed_scaling_factor").unwrap_or(1.0),
        ..softmax_experts(f, count, expert(c, width), false)
    }
}
