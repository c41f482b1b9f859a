//! ERNIE 4.5 MoE: heads rotated in pairs of neighbours, experts by softmax scores in some layers, chosen with a bias, and some
//! that see every token.

use super::Family;
use super::parts::{
    Missing, attention, expert, first_size, gated, heads, only_silu, pre_norm, rope, softmax_experts_of,
};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::LayerPlan;
use crate::layers::heads::Rope;
use crate::layers::moe::{self, ChoiceBias};
use samebits_ops::Pairing;
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family { tied: true, ..Family::of("ernie4_5_moe", read) };

fn read(c: &mut Config, f: &Fields, layers: usize) {
    only_silu(f);
    // With it, logits have one too.
    f.only("use_bias", &[json!(false)]);
    // What a smaller sum of scores is replaced by: one that only a choice by the bias alone could have.
    f.only("moe_norm_min", &[json!(1e-12)]);
    c.extra_layers = f.size_or_zero("num_nextn_predict_layers");
    let heads = heads(c, f, Missing::Refused, Missing::Derived);
    let rope = Rope { pairing: Pairing::Interleaved, ..rope(c, f, heads.key_dim, Some(500_000.0)) };
    let count = first_size(f, &["moe_num_experts", "num_experts"]);
    let chosen = first_size(f, &["moe_k", "num_experts_per_tok"]);
    if count > 0 && chosen > count {
        f.refuse("moe_k", format!("is {chosen}; there are {count} experts"));
    }
    let width = f.required_size("moe_intermediate_size");
    let shared = f.get("moe_num_shared_experts").map_or(2, |_| f.size_or_zero("moe_num_shared_experts")) * width;
    let experts = moe::Plan {
        shared: (shared > 0).then(|| moe::Shared::of(expert(c, shared), "shared_experts")),
        choice_bias: Some(ChoiceBias { name: "moe_statics.e_score_correction_bias", is_matrix: true }),
        ..softmax_experts_of(count, chosen, expert(c, width), true)
    };
    let dense = gated(c, f.required_size("intermediate_size"));
    let mixer = attention(c, heads, rope);
    let first = f.get("moe_layer_start_index").map_or(1, |_| f.size_or_zero("moe_layer_start_index"));
    // -1 for the last layer.
    let last = match f.get("moe_layer_end_index").map(Value::as_i64) {
        None | Some(Some(-1)) => layers,
        Some(_) => f.size_or_zero("moe_layer_end_index"),
    };
    let interval = f.size("moe_layer_interval").unwrap_or(1).max(1);
    let block = |i: usize| {
        let is_sparse = (i + 1).is_multiple_of(interval) && (first..=last).contains(&i);
        let mlp = if is_sparse { LayerPlan::Moe(experts.clone()) } else { LayerPlan::Mlp(dense.clone()) };
        pre_norm(LayerPlan::Attention(mixer.clone()), mlp)
    };
    c.blocks = (0..layers).map(block).collect();
}
