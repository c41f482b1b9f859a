//! Ministral 3 (text): Mistral whose queries grow with their positions.

use super::Family;
use super::parts::{Missing, asked, attention, gated, heads, only_silu, pre_norm, push};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::{LayerPlan, attend, attention};
use crate::rotary::{self, Asked, Rotary};

pub(super) const FAMILY: Family = Family::of("ministral3", read);

fn read(c: &mut Config, f: &Fields, layers: usize) {
    only_silu(f);
    let heads = heads(c, f, Missing::Derived, Missing::Refused);
    let heads = attend::Heads { window: f.size("sliding_window"), ..heads };
    // The factor of a query is that of its cosines and sines.
    let of_queries = rotary::read(f, Asked { grows: true, ..asked(c, heads.key_dim, None) });
    let rope = push(c, Rotary { growth: None, ..of_queries.clone() });
    let q_table = of_queries.growth.is_some().then(|| push(c, of_queries).table);
    let mixer = attention::Plan { q_table, ..attention(c, heads, rope) };
    let mlp = gated(c, f.required_size("intermediate_size"));
    c.blocks = vec![pre_norm(LayerPlan::Attention(mixer), LayerPlan::Mlp(mlp)); layers];
}
