//! OLMo 2: norms behind the layers and none before them, norms of whole queries and keys.

use super::Family;
use super::parts::{Missing, attention, behind, gated, heads, only_silu, rope, row_norms};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::{LayerPlan, attention};

pub(super) const FAMILY: Family = Family::of("olmo2", read);

fn read(c: &mut Config, f: &Fields, layers: usize) {
    only_silu(f);
    let heads = heads(c, f, Missing::Derived, Missing::Derived);
    let bias = f.flag("attention_bias", false);
    let rope = rope(c, f, heads.key_dim, Some(10_000.0));
    let mixer = attention::Plan { norm: row_norms(c), bias, o_bias: bias, ..attention(c, heads, rope) };
    let mlp = gated(c, f.required_size("intermediate_size"));
    c.blocks = vec![behind(LayerPlan::Attention(mixer), LayerPlan::Mlp(mlp)); layers];
}
