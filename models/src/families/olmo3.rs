//! OLMo 3: OLMo 2 with windows in three layers of four; a scaling of positions is for the layers without one.

use super::Family;
use super::parts::{Missing, attention, behind, gated, heads, only_silu, rope_of_kind, row_norms, windows};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::{LayerPlan, attend, attention};

pub(super) const FAMILY: Family = Family::of("olmo3", read);

fn read(c: &mut Config, f: &Fields, layers: usize) {
    only_silu(f);
    let heads = heads(c, f, Missing::Derived, Missing::Derived);
    let bias = f.flag("attention_bias", false);
    let default = (!f.has("sliding_window")).then_some(4096);
    let windows = windows(f, layers, f.size("sliding_window").or(default), |i| !(i + 1).is_multiple_of(4));
    let full = rope_of_kind(c, f, heads.key_dim, "full_attention", "rope_theta", 500_000.0);
    let local = rope_of_kind(c, f, heads.key_dim, "sliding_attention", "rope_theta", 500_000.0);
    let mlp = gated(c, f.required_size("intermediate_size"));
    let block = |window: Option<usize>| {
        let heads = attend::Heads { window, ..heads.clone() };
        let rope = if window.is_some() { local } else { full };
        let mixer = attention::Plan { norm: row_norms(c), bias, o_bias: bias, ..attention(c, heads, rope) };
        behind(LayerPlan::Attention(mixer), LayerPlan::Mlp(mlp.clone()))
    };
    c.blocks = windows.into_iter().map(block).collect();
}
