//! Mistral: a sliding window.

use super::Family;
use super::parts::{Missing, attention, gated, heads, only_silu, pre_norm, rope};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::{LayerPlan, attend};

pub(super) const FAMILY: Family = Family::of("mistral", read);

fn read(c: &mut Config, f: &Fields, layers: usize) {
    only_silu(f);
    let heads = heads(c, f, Missing::Refused, Missing::Derived);
    // The family's own default, where the key is missing and not null.
    let default = (!f.has("sliding_window")).then_some(4096);
    let heads = attend::Heads { window: f.size("sliding_window").or(default), ..heads };
    let rope = rope(c, f, heads.key_dim, Some(10_000.0));
    let mlp = gated(c, f.required_size("intermediate_size"));
    c.blocks = vec![pre_norm(LayerPlan::Attention(attention(c, heads, rope)), LayerPlan::Mlp(mlp)); layers];
}
