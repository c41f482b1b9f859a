//! GPT-2: learned positions, layer norms, matrices that are stored transposed.

use super::Family;
use super::parts::{activation, attention, heads_of_width, no_rope, ungated};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::attention::{self, Names, QkvNames};
use crate::layers::branch::{self, Place};
use crate::layers::norm::Kind;
use crate::layers::{LayerPlan, attend, mlp};
use samebits_ops::Activation;

pub(super) const FAMILY: Family = Family {
    eps: "layer_norm_epsilon",
    tied: true,
    renamed: &[
        ("hidden_size", "n_embd"),
        ("max_position_embeddings", "n_positions"),
        ("num_attention_heads", "n_head"),
        ("num_hidden_layers", "n_layer"),
    ],
    ..Family::of("gpt2", read)
};

fn read(c: &mut Config, f: &Fields, layers: usize) {
    let heads = heads_of_width(c, f);
    let (is_scaled, by_layer) = (f.flag("scale_attn_weights", true), f.flag("scale_attn_by_inverse_layer_idx", false));
    // Scores are f32 either way; the rest is of heads for other tasks.
    f.unread(&[
        "reorder_and_upcast_attn",
        "summary_activation",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
    ]);
    c.norms.kind = Kind::Layer { bias: true };
    (c.table, c.positions, c.final_norm) = ("transformer.wte", Some("transformer.wpe"), "transformer.ln_f");
    (c.stack, c.transposed) = ("transformer.h", true);
    let rope = no_rope(c, heads.key_dim);
    let names = Names { qkv: QkvNames::Fused("attn.c_attn"), o: "attn.c_proj", ..Names::PLAIN };
    let activation = activation(f, "activation_function", Activation::GeluTanh);
    let width = f.size("n_inner").unwrap_or(c.hidden.saturating_mul(4));
    let mlp = mlp::Plan { bias: true, ..ungated(c, width, activation, ["mlp.c_fc", "mlp.c_proj"]) };
    let normed = branch::Plan::normed;
    let block = |i: usize| {
        let scale = if is_scaled { heads.scale } else { 1.0 } / if by_layer { (i + 1) as f64 } else { 1.0 };
        let heads = attend::Heads { scale, ..heads.clone() };
        let mixer = attention::Plan { bias: true, o_bias: true, names, ..attention(c, heads, rope) };
        vec![
            normed(Place::Mixer, "ln_1", LayerPlan::Attention(mixer)),
            normed(Place::Mlp, "ln_2", LayerPlan::Mlp(mlp.clone())),
        ]
    };
    c.blocks = (0..layers).map(block).collect();
}
