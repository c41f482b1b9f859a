//! Apertus: norms of heads, and an MLP without a gate whose activation, xIELU, has parameters.

use super::Family;
use super::parts::{Missing, attention, head_norms, heads, rope, ungated};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::branch::{Place, Plan};
use crate::layers::{LayerPlan, attention, mlp};
use samebits_ops::Activation;
use serde_json::json;

pub(super) const FAMILY: Family = Family::of("apertus", read);

fn read(c: &mut Config, f: &Fields, layers: usize) {
    f.only("hidden_act", &[json!("xielu")]);
    let heads = heads(c, f, Missing::Derived, Missing::Derived);
    let bias = f.flag("attention_bias", false);
    let rope = rope(c, f, heads.key_dim, None);
    let mixer = attention::Plan { bias, o_bias: bias, norm: head_norms(c), ..attention(c, heads, rope) };
    let names = ["mlp.up_proj", "mlp.down_proj"];
    let mlp = ungated(c, f.required_size("intermediate_size"), Activation::Relu2, names);
    let mlp = mlp::Plan { activation: mlp::Activation::Learned("mlp.act_fn"), ..mlp };
    let normed = Plan::normed;
    c.blocks = vec![
        vec![
            normed(Place::Mixer, "attention_layernorm", LayerPlan::Attention(mixer)),
            normed(Place::Mlp, "feedforward_layernorm", LayerPlan::Mlp(mlp)),
        ];
        layers
    ];
}
