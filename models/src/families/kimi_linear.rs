//! Kimi Linear: the gated delta rule, with a decay for each element of a key, in three layers of four, in the others the latent
//! attention of DeepSeek V3 without rotations; experts by sigmoid scores behind the first layers.

use super::Family;
use super::deepseek_v2::shared_experts;
use super::deepseek_v3::sigmoid_experts;
use super::parts::{attends, gated, kinds, no_rope, only_silu, pre_norm};
use crate::config::Config;
use crate::fields::{Fields, asks_for_nothing};
use crate::layers::{LayerPlan, attend, delta, latent_attention, mlp, moe};
use serde_json::{Map, Value, json};

pub(super) const FAMILY: Family = Family {
    renamed: &[
        ("max_position_embeddings", "model_max_length"),
        ("norm_topk_prob", "moe_renormalize"),
        ("n_group", "num_expert_group"),
        ("n_routed_experts", "num_experts"),
        ("num_experts_per_tok", "num_experts_per_token"),
        ("n_shared_experts", "num_shared_experts"),
    ],
    ..Family::of("kimi_linear", read)
};

fn read(c: &mut Config, f: &Fields, layers: usize) {
    only_silu(f);
    f.only("mla_use_nope", &[json!(true)]);
    f.only("moe_router_activation_func", &[json!("sigmoid")]);
    // The family's own defaults have nothing to do with its sizes.
    f.present(&["n_shared_experts", "routed_scaling_factor"]);
    c.extra_layers = f.size_or_zero("num_nextn_predict_layers");
    let of_rule = f.object("linear_attn_config");
    refuse_others(f, of_rule);
    let heads = size(f, of_rule, "num_heads", "linear_num_heads");
    let dim = size(f, of_rule, "head_dim", "linear_head_dim");
    let rule = delta::Plan {
        hidden: c.hidden,
        key_heads: heads,
        value_heads: heads,
        key_dim: dim,
        value_dim: dim,
        taps: size(f, of_rule, "short_conv_kernel_size", "linear_conv_kernel_dim"),
        largest_beta: 1.0,
        by_channel: true,
        norm: c.norms,
        gate: delta::Gate::Sigmoid,
        names: delta::Names::Narrow,
    };
    let latent = latent(c, f);
    let experts = sigmoid_experts(f, shared_experts(c, f), true);
    let expert = mlp::Plan { names: mlp::Names::Each(["w1", "w3", "w2"]), ..experts.expert };
    let names = moe::Names { block: "block_sparse_moe", ..moe::Names::PLAIN };
    let experts = LayerPlan::Moe(moe::Plan { expert, names, ..experts });
    let dense = LayerPlan::Mlp(gated(c, f.required_size("intermediate_size")));
    let attends = attends(f, layers, [&["full_attention"], &["linear_attention"]], true);
    let attends = attends.unwrap_or_else(|| by_number(f, of_rule, layers));
    let first = f.get("first_k_dense_replace").map_or(1, |_| f.size_or_zero("first_k_dense_replace"));
    let sparse = kinds(f, "mlp_layer_types", layers, [&["sparse"], &["dense"]], true);
    let sparse = sparse.unwrap_or_else(|| (0..layers).map(|i| i >= first).collect());
    let block = |(attends, is_sparse)| {
        let rule = || LayerPlan::DeltaRule(rule.clone());
        let mixer = if attends { LayerPlan::LatentAttention(latent.clone()) } else { rule() };
        pre_norm(mixer, if is_sparse { experts.clone() } else { dense.clone() })
    };
    c.blocks = attends.into_iter().zip(sparse).map(block).collect();
}

/// Latent attention whose rotary parts are not rotated.
fn latent(c: &mut Config, f: &Fields) -> latent_attention::Plan {
    // The code of the family has the width of a rotary part there, whatever the folder says.
    f.unread(&["head_dim", "rope_theta", "rope_scaling", "rope_parameters"]);
    let queries = f.required_size("num_attention_heads");
    let (nope, rotary) = (f.required_size("qk_nope_head_dim"), f.required_size("qk_rope_head_dim"));
    let (key_dim, value_dim) = (nope + rotary, f.required_size("v_head_dim"));
    f.only("num_key_value_heads", &[json!(queries)]);
    f.only("qk_head_dim", &[json!(key_dim)]);
    let scale = 1.0 / (key_dim as f64).sqrt();
    latent_attention::Plan {
        hidden: c.hidden,
        heads: attend::Heads {
            queries,
            keys: queries,
            key_dim,
            value_dim,
            scale,
            softcap: None,
            window: None,
            chunk: None,
        },
        rope: no_rope(c, rotary),
        q_rank: f.size("q_lora_rank"),
        kv_rank: f.required_size("kv_lora_rank"),
        nope,
        bias: f.flag("attention_bias", false),
        indexer: None,
    }
}

const OBJECT: &str = "linear_attn_config";

/// A size that stands in the object, or as a field of its own.
fn size(f: &Fields, object: Option<&Map<String, Value>>, key: &str, field: &str) -> usize {
    let Some(value) = object.and_then(|map| map.get(key)).filter(|value| !value.is_null()) else {
        return f.required_size(field);
    };
    if let Some(own) = f.get(field).filter(|own| *own != value) {
        f.refuse(field, format!("is {own}, but {OBJECT}.{key} is {value}; keep one"));
    }
    let number = value.as_u64().and_then(|n| i32::try_from(n).ok()).filter(|n| *n > 0);
    number.map_or_else(
        || {
            f.refuse(
                format!("{OBJECT}.{key}"),
                format!("is {value}; it must be a whole number from 1 to {}", i32::MAX),
            );
            0
        },
        |n| n as usize,
    )
}

/// Refuses what nobody reads of the object.
fn refuse_others(f: &Fields, object: Option<&Map<String, Value>>) {
    const READ: [&str; 5] = ["num_heads", "head_dim", "short_conv_kernel_size", "full_attn_layers", "kda_layers"];
    for (key, value) in object.into_iter().flatten() {
        if !READ.contains(&&**key) && !asks_for_nothing(value) {
            f.refuse(format!("{OBJECT}.{key}"), format!("is {value}, which this family does not know"));
        }
    }
}

/// Which layers attend, by the numbers from 1 on that the object has of both kinds; every fourth but the first without them.
fn by_number(f: &Fields, object: Option<&Map<String, Value>>, layers: usize) -> Vec<bool> {
    let usual = || (0..layers).map(|i| i > 0 && i.is_multiple_of(4)).collect();
    let list = |key: &str| object.and_then(|map| map.get(key)).filter(|value| !value.is_null());
    let (Some(full), Some(kda)) = (list("full_attn_layers"), list("kda_layers")) else { return usual() };
    let mut found = vec![None; layers];
    let mut wrong = false;
    for (numbers, attends) in [(full, true), (kda, false)] {
        for number in numbers.as_array().into_iter().flatten() {
            let at = number.as_u64().and_then(|n| found.get_mut(usize::try_from(n).ok()?.checked_sub(1)?));
            wrong |= at.is_none_or(|at| at.replace(attends).is_some());
        }
    }
    let all: Option<Vec<bool>> = found.into_iter().collect();
    all.filter(|_| !wrong).unwrap_or_else(|| {
        f.refuse(OBJECT, format!("must name each of {layers} layers once, in full_attn_layers or in kda_layers"));
        usual()
    })
}
