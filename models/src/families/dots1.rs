//! dots.llm1: the attention of Qwen3, with experts by sigmoid scores and some that see every token behind the first layers.

use super::Family;
use super::deepseek_v2::shared_experts;
use super::deepseek_v3::sigmoid_experts;
use super::parts::{Missing, attention, dense_first, gated, head_norms, heads, only_silu, pre_norm, rope, windows};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::{LayerPlan, attend, attention};

pub(super) const FAMILY: Family = Family::of("dots1", read);

fn read(c: &mut Config, f: &Fields, layers: usize) {
    only_silu(f);
    let heads = heads(c, f, Missing::Derived, Missing::Derived);
    let bias = f.flag("attention_bias", false);
    // The family's own default, where the key is missing and not null.
    let window = f.size("sliding_window").or((!f.has("sliding_window")).then_some(4096));
    let first = f.get("max_window_layers").map_or(62, |_| f.size_or_zero("max_window_layers"));
    let windows = windows(f, layers, window, |i| i >= first);
    let rope = rope(c, f, heads.key_dim, Some(10_000.0));
    let experts = sigmoid_experts(f, shared_experts(c, f), false);
    let dense = gated(c, f.required_size("intermediate_size"));
    let block = |(mlp, window)| {
        let heads = attend::Heads { window, ..heads.clone() };
        let mixer = attention::Plan { norm: head_norms(c), bias, o_bias: bias, ..attention(c, heads, rope) };
        pre_norm(LayerPlan::Attention(mixer), mlp)
    };
    c.blocks = dense_first(f, layers, &experts, &dense).into_iter().zip(windows).map(block).collect();
}
