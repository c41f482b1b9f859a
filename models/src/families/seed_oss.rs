//! Seed-OSS: Llama with biases on query, key and value.

use super::Family;
use super::parts::{Missing, attention, gated, heads, only_silu, pre_norm, rope};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::{LayerPlan, attention, mlp};

pub(super) const FAMILY: Family = Family::of("seed_oss", read);

fn read(c: &mut Config, f: &Fields, layers: usize) {
    only_silu(f);
    let heads = heads(c, f, Missing::Refused, Missing::Refused);
    let (bias, o_bias) = (f.flag("attention_bias", true), f.flag("attention_out_bias", false));
    // Of training alone.
    f.unread(&["residual_dropout"]);
    let rope = rope(c, f, heads.key_dim, None);
    let mixer = attention::Plan { bias, o_bias, ..attention(c, heads, rope) };
    let mlp = mlp::Plan { bias: f.flag("mlp_bias", false), ..gated(c, f.required_size("intermediate_size")) };
    c.blocks = vec![pre_norm(LayerPlan::Attention(mixer), LayerPlan::Mlp(mlp)); layers];
}
