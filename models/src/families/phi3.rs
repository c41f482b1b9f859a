//! Phi-3, 3.5 and 4: fused projections, long rotary positions, heads that are rotated in part.

use super::Family;
use super::parts::{Missing, asked, attention, gated, heads, only_silu, pre_norm, push};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::attention::QkvNames;
use crate::layers::{LayerPlan, attend, attention, mlp};
use crate::rotary::{self, Asked};

pub(super) const FAMILY: Family = Family::of("phi3", read);

fn read(c: &mut Config, f: &Fields, layers: usize) {
    only_silu(f);
    let heads = heads(c, f, Missing::Derived, Missing::Derived);
    let heads = attend::Heads { window: f.size("sliding_window"), ..heads };
    let asked = asked(c, heads.key_dim, Some(10_000.0));
    let rope = push(c, rotary::read(f, Asked { partial: Some(1.0), renamed: true, ..asked }));
    let names = attention::Names { qkv: QkvNames::Fused("self_attn.qkv_proj"), ..attention::Names::PLAIN };
    let mixer = attention::Plan { names, ..attention(c, heads, rope) };
    let names = mlp::Names::Fused(["mlp.gate_up_proj", "mlp.down_proj"]);
    let mlp = mlp::Plan { names, ..gated(c, f.required_size("intermediate_size")) };
    c.blocks = vec![pre_norm(LayerPlan::Attention(mixer), LayerPlan::Mlp(mlp)); layers];
}
