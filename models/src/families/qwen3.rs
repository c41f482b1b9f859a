//! Qwen3: norms of query and key heads.

use super::Family;
use super::parts::{Missing, attention, gated, head_norms, heads, only_silu, pre_norm, rope, switched_windows};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::{LayerPlan, attend, attention};
use serde_json::json;

pub(super) const FAMILY: Family = Family::of("qwen3", read);

fn read(c: &mut Config, f: &Fields, layers: usize) {
    only_silu(f);
    let heads = heads(c, f, Missing::Refused, Missing::Refused);
    f.only("use_mrope", &[json!(false)]);
    let bias = f.flag("attention_bias", false);
    let windows = switched_windows(f, layers);
    let rope = rope(c, f, heads.key_dim, None);
    let mlp = gated(c, f.required_size("intermediate_size"));
    let block = |window| {
        let heads = attend::Heads { window, ..heads.clone() };
        let mixer = attention::Plan { norm: head_norms(c), bias, o_bias: bias, ..attention(c, heads, rope) };
        pre_norm(LayerPlan::Attention(mixer), LayerPlan::Mlp(mlp.clone()))
    };
    c.blocks = windows.into_iter().map(block).collect();
}
