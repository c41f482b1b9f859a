//! Llama 2 and 3.

use super::Family;
use super::parts::{Missing, attention, gated, heads, only_silu, pre_norm, rope};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::{LayerPlan, attention, mlp};

pub(super) const FAMILY: Family = Family::of("llama", read);

fn read(c: &mut Config, f: &Fields, layers: usize) {
    only_silu(f);
    let heads = heads(c, f, Missing::Derived, Missing::Derived);
    let (bias, mlp_bias) = (f.flag("attention_bias", false), f.flag("mlp_bias", false));
    let rope = rope(c, f, heads.key_dim, Some(10_000.0));
    let mixer = attention::Plan { bias, o_bias: bias, ..attention(c, heads, rope) };
    let mlp = mlp::Plan { bias: mlp_bias, ..gated(c, f.required_size("intermediate_size")) };
    c.blocks = vec![pre_norm(LayerPlan::Attention(mixer), LayerPlan::Mlp(mlp)); layers];
}
