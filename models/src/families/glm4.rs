//! GLM-4: norms before and behind the layers, biases on query, key and value, half of each head rotated in pairs.

use super::Family;
use super::parts::{Missing, attention, gated, heads, only_silu, partial_rope};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::branch::{self, Place};
use crate::layers::heads::Rope;
use crate::layers::{LayerPlan, attention, mlp};
use samebits_ops::Pairing;

pub(super) const FAMILY: Family = Family::of("glm4", read);

fn read(c: &mut Config, f: &Fields, layers: usize) {
    only_silu(f);
    let heads = heads(c, f, Missing::Refused, Missing::Refused);
    let bias = f.flag("attention_bias", true);
    let rope = Rope { pairing: Pairing::Interleaved, ..partial_rope(c, f, heads.key_dim, Some(10_000.0), 0.5) };
    let mixer = LayerPlan::Attention(attention::Plan { bias, ..attention(c, heads, rope) });
    let names = mlp::Names::Fused(["mlp.gate_up_proj", "mlp.down_proj"]);
    let mlp = LayerPlan::Mlp(mlp::Plan { names, ..gated(c, f.required_size("intermediate_size")) });
    let branch = |place, before, layer, behind| branch::Plan {
        behind: Some(behind),
        ..branch::Plan::normed(place, before, layer)
    };
    let block = vec![
        branch(Place::Mixer, "input_layernorm", mixer, "post_self_attn_layernorm"),
        branch(Place::Mlp, "post_attention_layernorm", mlp, "post_mlp_layernorm"),
    ];
    c.blocks = vec![block; layers];
}
