//! GPT-NeoX and Pythia: attention and MLP side by side, queries, keys and values in one matrix head by head, heads rotated in
//! part.

use super::Family;
use super::parts::{activation, attention, heads_of_width, parallel, partial_rope, pre_norm, ungated};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::attention::{self, Names, QkvNames};
use crate::layers::norm::Kind;
use crate::layers::{LayerPlan, mlp};
use samebits_ops::Activation;

pub(super) const FAMILY: Family = Family {
    eps: "layer_norm_eps",
    renamed: &[("partial_rotary_factor", "rotary_pct"), ("rope_theta", "rotary_emb_base")],
    ..Family::of("gpt_neox", read)
};

fn read(c: &mut Config, f: &Fields, layers: usize) {
    let heads = heads_of_width(c, f);
    let (bias, is_parallel) = (f.flag("attention_bias", true), f.flag("use_parallel_residual", true));
    c.norms.kind = Kind::Layer { bias: true };
    c.head = "embed_out";
    (c.table, c.stack, c.final_norm) = ("gpt_neox.embed_in", "gpt_neox.layers", "gpt_neox.final_layer_norm");
    let rope = partial_rope(c, f, heads.key_dim, Some(10_000.0), 0.25);
    let names = Names { qkv: QkvNames::ByHead("attention.query_key_value"), o: "attention.dense", ..Names::PLAIN };
    let mixer = LayerPlan::Attention(attention::Plan { bias, o_bias: bias, names, ..attention(c, heads, rope) });
    let activation = activation(f, "hidden_act", Activation::Gelu);
    let names = ["mlp.dense_h_to_4h", "mlp.dense_4h_to_h"];
    let mlp = ungated(c, f.required_size("intermediate_size"), activation, names);
    let mlp = LayerPlan::Mlp(mlp::Plan { bias: true, ..mlp });
    let block = match is_parallel {
        true => parallel(mixer, mlp, Some("post_attention_layernorm")),
        false => pre_norm(mixer, mlp),
    };
    c.blocks = vec![block; layers];
}
