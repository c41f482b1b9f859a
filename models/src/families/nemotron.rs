//! Nemotron and Minitron: layer norms that add 1 to their weights, an MLP without a gate, heads rotated in part.

use super::Family;
use super::parts::{Missing, activation, attention, heads, partial_rope, pre_norm, ungated};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::norm::Kind;
use crate::layers::{LayerPlan, attention, mlp};
use samebits_ops::Activation;

pub(super) const FAMILY: Family = Family { eps: "norm_eps", ..Family::of("nemotron", read) };

fn read(c: &mut Config, f: &Fields, layers: usize) {
    let heads = heads(c, f, Missing::Refused, Missing::Derived);
    let (bias, mlp_bias) = (f.flag("attention_bias", false), f.flag("mlp_bias", false));
    (c.norms.kind, c.norms.offset) = (Kind::Layer { bias: true }, true);
    let rope = partial_rope(c, f, heads.key_dim, Some(10_000.0), 0.5);
    let mixer = attention::Plan { bias, o_bias: bias, ..attention(c, heads, rope) };
    let activation = activation(f, "hidden_act", Activation::Relu2);
    let mlp = ungated(c, f.required_size("intermediate_size"), activation, ["mlp.up_proj", "mlp.down_proj"]);
    let mlp = mlp::Plan { bias: mlp_bias, ..mlp };
    c.blocks = vec![pre_norm(LayerPlan::Attention(mixer), LayerPlan::Mlp(mlp)); layers];
}
