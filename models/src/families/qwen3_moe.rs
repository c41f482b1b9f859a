//! Qwen3-MoE: a mixture of experts in most layers.

use super::Family;
use super::parts::{
    Missing, attention, expert, first_size, gated, head_norms, heads, only_silu, pre_norm, rope, softmax_experts,
    sparse_by_step,
};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::{LayerPlan, attend, attention};

pub(super) const FAMILY: Family = Family::of("qwen3_moe", read);

fn read(c: &mut Config, f: &Fields, layers: usize) {
    only_silu(f);
    let heads = heads(c, f, Missing::Refused, Missing::Derived);
    let bias = f.flag("attention_bias", false);
    let window = if f.flag("use_sliding_window", false) { f.size("sliding_window") } else { None };
    f.unread(&["sliding_window", "max_window_layers"]);
    let heads = attend::Heads { window, ..heads };
    let sparse = sparse_by_step(f, layers);
    let expert = expert(c, f.required_size("moe_intermediate_size"));
    let normalise = f.flag("norm_topk_prob", false);
    let experts = softmax_experts(f, first_size(f, &["num_experts", "num_local_experts"]), expert, normalise);
    let rope = rope(c, f, heads.key_dim, None);
    let mixer = attention::Plan { norm: head_norms(c), bias, o_bias: bias, ..attention(c, heads, rope) };
    let dense = gated(c, f.required_size("intermediate_size"));
    let block = |is_sparse| {
        let mlp = if is_sparse { LayerPlan::Moe(experts.clone()) } else { LayerPlan::Mlp(dense.clone()) };
        pre_norm(LayerPlan::Attention(mixer.clone()), mlp)
    };
    c.blocks = sparse.into_iter().map(block).collect();
}
