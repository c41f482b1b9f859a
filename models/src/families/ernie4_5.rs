//! ERNIE 4.5: Llama, whose heads are rotated in pairs of neighbours.

use super::Family;
use super::parts::{Missing, attention, gated, heads, only_silu, pre_norm, rope};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::heads::Rope;
use crate::layers::{LayerPlan, attention, mlp};
use samebits_ops::Pairing;

pub(super) const FAMILY: Family = Family { tied: true, ..Family::of("ernie4_5", read) };

fn read(c: &mut Config, f: &Fields, layers: usize) {
    only_silu(f);
    let heads = heads(c, f, Missing::Refused, Missing::Refused);
    let bias = f.flag("use_bias", false);
    let rope = Rope { pairing: Pairing::Interleaved, ..rope(c, f, heads.key_dim, Some(500_000.0)) };
    let mixer = attention::Plan { bias, o_bias: bias, ..attention(c, heads, rope) };
    let mlp = mlp::Plan { bias, ..gated(c, f.required_size("intermediate_size")) };
    c.blocks = vec![pre_norm(LayerPlan::Attention(mixer), LayerPlan::Mlp(mlp)); layers];
}
