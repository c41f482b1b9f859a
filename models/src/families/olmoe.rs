//! OLMoE: a mixture of experts in every layer, norms of whole queries and keys.

use super::Family;
use super::parts::{
    Missing, attention, expert, first_size, heads, only_silu, pre_norm, rope, row_norms, softmax_experts,
};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::{LayerPlan, attention};

pub(super) const FAMILY: Family = Family::of("olmoe", read);

fn read(c: &mut Config, f: &Fields, layers: usize) {
    only_silu(f);
    let heads = heads(c, f, Missing::Derived, Missing::Derived);
    let bias = f.flag("attention_bias", false);
    // None of the published ones clips.
    f.only("clip_qkv", &[]);
    let expert = expert(c, f.required_size("intermediate_size"));
    let normalise = f.flag("norm_topk_prob", false);
    let experts = softmax_experts(f, first_size(f, &["num_experts", "num_local_experts"]), expert, normalise);
    let rope = rope(c, f, heads.key_dim, Some(10_000.0));
    let mixer = attention::Plan { norm: row_norms(c), bias, o_bias: bias, ..attention(c, heads, rope) };
    c.blocks = vec![pre_norm(LayerPlan::Attention(mixer), LayerPlan::Moe(experts)); layers];
}
