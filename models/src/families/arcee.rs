//! Arcee: Llama whose MLP has no gate but the square of what is above 0.

use super::Family;
use super::parts::{Missing, activation, attention, heads, pre_norm, rope, ungated};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::{LayerPlan, attention, mlp};
use samebits_ops::Activation;

pub(super) const FAMILY: Family = Family::of("arcee", read);

fn read(c: &mut Config, f: &Fields, layers: usize) {
    let heads = heads(c, f, Missing::Derived, Missing::Derived);
    let (bias, mlp_bias) = (f.flag("attention_bias", false), f.flag("mlp_bias", false));
    let rope = rope(c, f, heads.key_dim, Some(10_000.0));
    let mixer = attention::Plan { bias, o_bias: bias, ..attention(c, heads, rope) };
    let activation = activation(f, "hidden_act", Activation::Relu2);
    let mlp = ungated(c, f.required_size("intermediate_size"), activation, ["mlp.up_proj", "mlp.down_proj"]);
    let mlp = mlp::Plan { bias: mlp_bias, ..mlp };
    c.blocks = vec![pre_norm(LayerPlan::Attention(mixer), LayerPlan::Mlp(mlp)); layers];
}
