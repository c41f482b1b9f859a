//! StarCoder2: layer norms, biases, an MLP without a gate, a window.

use super::Family;
use super::parts::{Missing, activation, attention, heads, pre_norm, rope, ungated};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::norm::Kind;
use crate::layers::{LayerPlan, attend, attention, mlp};
use samebits_ops::Activation;

pub(super) const FAMILY: Family = Family { eps: "norm_epsilon", tied: true, ..Family::of("starcoder2", read) };

fn read(c: &mut Config, f: &Fields, layers: usize) {
    let heads = heads(c, f, Missing::Refused, Missing::Derived);
    let heads = attend::Heads { window: f.size("sliding_window"), ..heads };
    let bias = f.flag("use_bias", true);
    // Its code reads none of these; published folders have them.
    f.unread(&["activation_function", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"]);
    c.norms.kind = Kind::Layer { bias: true };
    let rope = rope(c, f, heads.key_dim, Some(10_000.0));
    let mixer = attention::Plan { bias, o_bias: bias, ..attention(c, heads, rope) };
    let activation = activation(f, "hidden_act", Activation::GeluTanh);
    let mlp = ungated(c, f.required_size("intermediate_size"), activation, ["mlp.c_fc", "mlp.c_proj"]);
    let mlp = mlp::Plan { bias, ..mlp };
    c.blocks = vec![pre_norm(LayerPlan::Attention(mixer), LayerPlan::Mlp(mlp)); layers];
}
