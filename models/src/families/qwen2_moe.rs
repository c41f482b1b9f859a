//! Qwen2-MoE (Qwen1.5-MoE): biases on query, key and value, experts in most layers, and one that sees every token behind a
//! gate.

use super::Family;
use super::parts::{
    Missing, attention, expert, first_size, gated, heads, only_silu, pre_norm, rope, softmax_experts, sparse_by_step,
    windows,
};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::{LayerPlan, attend, attention, moe};

pub(super) const FAMILY: Family = Family::of("qwen2_moe", read);

fn read(c: &mut Config, f: &Fields, layers: usize) {
    only_silu(f);
    let heads = heads(c, f, Missing::Refused, Missing::Derived);
    let bias = f.flag("qkv_bias", true);
    let window = f.flag("use_sliding_window", false).then(|| f.size("sliding_window").unwrap_or(4096));
    // Without the switch, the family's code drops the window.
    f.unread(&["sliding_window"]);
    let last = f.get("max_window_layers").map_or(28, |_| f.size_or_zero("max_window_layers"));
    // Of the first layers every other one.
    let windows = windows(f, layers, window, |i| i.is_multiple_of(2) && i < last);
    let sparse = sparse_by_step(f, layers);
    let normalise = f.flag("norm_topk_prob", false);
    let experts = experts(c, f, |f| first_size(f, &["num_experts", "num_local_experts"]), normalise);
    let rope = rope(c, f, heads.key_dim, Some(10_000.0));
    let dense = gated(c, f.required_size("intermediate_size"));
    let block = |(is_sparse, window)| {
        let heads = attend::Heads { window, ..heads.clone() };
        let mixer = attention::Plan { bias, ..attention(c, heads, rope) };
        let mlp = if is_sparse { LayerPlan::Moe(experts.clone()) } else { LayerPlan::Mlp(dense.clone()) };
        pre_norm(LayerPlan::Attention(mixer), mlp)
    };
    c.blocks = sparse.into_iter().zip(windows).map(block).collect();
}

/// As many experts as `count` reads, and one that sees every token behind a gate.
pub(super) fn experts(c: &Config, f: &Fields, count: impl Fn(&Fields) -> usize, normalise: bool) -> moe::Plan {
    let of_experts = expert(c, f.required_size("moe_intermediate_size"));
    let shared = expert(c, f.required_size("shared_expert_intermediate_size"));
    let shared = moe::Shared { mlp: shared, name: Some("shared_expert"), gate: Some("shared_expert_gate") };
    let experts = softmax_experts(f, count(f), of_experts, normalise);
    moe::Plan { shared: Some(Box::new(shared)), ..experts }
}
