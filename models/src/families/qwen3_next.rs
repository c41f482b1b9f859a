//! Qwen3-Next: the gated delta rule in three layers of four and in the others attention behind a gate; experts in most.

use super::Family;
use super::parts::{
    Asked, Missing, asked, attends, attention, gated, head_norms, heads, only_silu, pre_norm, push, sparse_by_step,
};
use super::qwen2_moe::experts;
use crate::config::{Config, FURTHER};
use crate::fields::Fields;
use crate::layers::{LayerPlan, attention, delta, norm};
use crate::rotary;

pub(super) const FAMILY: Family = Family::of("qwen3_next", read);

fn read(c: &mut Config, f: &Fields, layers: usize) {
    let sparse = sparse_by_step(f, layers);
    let experts = LayerPlan::Moe(experts(c, f, |f| f.required_size("num_experts"), f.flag("norm_topk_prob", true)));
    let dense = LayerPlan::Mlp(gated(c, f.required_size("intermediate_size")));
    c.unused = &[("mtp.", FURTHER)];
    blocks(c, f, layers, delta::Names::ByKeyHead, |i| if sparse[i] { experts.clone() } else { dense.clone() });
}

/// All that does not belong to the MLPs, of which each block has one.
pub(super) fn blocks(c: &mut Config, f: &Fields, layers: usize, names: delta::Names, mlp: impl Fn(usize) -> LayerPlan) {
    only_silu(f);
    let before_gates = c.norms;
    c.norms = norm::Plan { offset: true, ..c.norms };
    let heads = heads(c, f, Missing::Refused, Missing::Refused);
    let interval = f.size("full_attention_interval").unwrap_or(4);
    let usual = || (0..layers).map(|i| (i + 1).is_multiple_of(interval)).collect();
    let attends = attends(f, layers, [&["full_attention"], &["linear_attention"]], true).unwrap_or_else(usual);
    let size = |field| f.required_size(field);
    let (key_heads, value_heads) = (size("linear_num_key_heads"), size("linear_num_value_heads"));
    if key_heads > 0 && !value_heads.is_multiple_of(key_heads) {
        let why = format!("is {value_heads}; it must be a multiple of linear_num_key_heads {key_heads}");
        f.refuse("linear_num_value_heads", why);
    }
    let rule = delta::Plan {
        hidden: c.hidden,
        key_heads,
        value_heads,
        key_dim: size("linear_key_head_dim"),
        value_dim: size("linear_value_head_dim"),
        taps: f.size("linear_conv_kernel_dim").unwrap_or(4),
        largest_beta: 1.0,
        by_channel: false,
        norm: before_gates,
        gate: delta::Gate::Silu,
        names,
    };
    let bias = f.flag("attention_bias", false);
    let grids = names == delta::Names::Streams;
    let rotated = Asked { partial: Some(0.25), grids, ..asked(c, heads.key_dim, Some(10_000.0)) };
    let rope = push(c, rotary::read(f, rotated));
    let mixer = attention::Plan { norm: head_norms(c), bias, o_bias: bias, gate: true, ..attention(c, heads, rope) };
    let block = |(i, attends)| {
        let mixer = if attends { LayerPlan::Attention(mixer.clone()) } else { LayerPlan::DeltaRule(rule.clone()) };
        pre_norm(mixer, mlp(i))
    };
    c.blocks = attends.into_iter().enumerate().map(block).collect();
}
