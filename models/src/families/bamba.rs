//! Bamba: in most layers a scan of Mamba-2, in some attention that rotates half of each head.

use super::Family;
use super::parts::{Missing, attention, gated, heads, layer_numbers, null_derived, only_silu, partial_rope, scan};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::branch::{self, Place};
use crate::layers::{LayerPlan, attention, mlp};

pub(super) const FAMILY: Family = Family::of("bamba", read);

fn read(c: &mut Config, f: &Fields, layers: usize) {
    only_silu(f);
    c.final_norm = "model.final_layernorm";
    let heads = heads(c, f, null_derived(f), Missing::Derived);
    let rope = partial_rope(c, f, heads.key_dim, Some(10_000.0), 0.5);
    let (bias, mlp_bias) = (f.flag("attention_bias", false), f.flag("mlp_bias", false));
    let attention = attention::Plan { bias, o_bias: bias, ..attention(c, heads, rope) };
    let names = mlp::Names::Each(["feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj"]);
    let mlp = mlp::Plan { bias: mlp_bias, names, ..gated(c, f.required_size("intermediate_size")) };
    let scan = scan(c, f);
    // How many logits a generation makes, a loss of training, and the rotated part, of which the code knows by itself.
    f.unread(&["num_logits_to_keep", "z_loss_coefficient", "attn_rotary_emb", "use_mamba_kernels"]);
    let attends = layer_numbers(f, "attn_layer_indices").unwrap_or_default();
    let normed = branch::Plan::normed;
    let block = |i: usize| {
        let mixer = match attends.contains(&(i as u64)) {
            true => LayerPlan::Attention(attention.clone()),
            false => LayerPlan::Mamba2(scan.clone()),
        };
        let mlp = LayerPlan::Mlp(mlp.clone());
        vec![normed(Place::Mixer, "input_layernorm", mixer), normed(Place::Mlp, "pre_ff_layernorm", mlp)]
    };
    c.blocks = (0..layers).map(block).collect();
}
