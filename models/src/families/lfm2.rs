//! LFM2: short convolutions between gates, and in some layers attention with norms of heads.

use super::Family;
use super::parts::{Missing, attends, attention, gated, head_norms, heads, layer_numbers, rope};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::attention::QkvNames;
use crate::layers::branch::{self, Place};
use crate::layers::{LayerPlan, attention, conv, mlp};

pub(super) const FAMILY: Family = Family { eps: "norm_eps", tied: true, ..Family::of("lfm2", read) };

fn read(c: &mut Config, f: &Fields, layers: usize) {
    let width = width(f);
    let mlp = LayerPlan::Mlp(dense(c, width));
    blocks(c, f, layers, |_| mlp.clone());
}

/// An MLP of a layer.
pub(super) fn dense(c: &Config, width: usize) -> mlp::Plan {
    mlp::Plan { names: mlp::Names::Each(["feed_forward.w1", "feed_forward.w3", "feed_forward.w2"]), ..gated(c, width) }
}

/// All that does not belong to the MLPs, of which each block has one.
pub(super) fn blocks(c: &mut Config, f: &Fields, layers: usize, mlp: impl Fn(usize) -> LayerPlan) {
    let heads = heads(c, f, Missing::Refused, Missing::Derived);
    // Folders name it in two ways; the older one counts.
    c.tied = f.flag("tie_embedding", c.tied);
    c.final_norm = "model.embedding_norm";
    let conv =
        conv::Plan { hidden: c.hidden, taps: f.size("conv_L_cache").unwrap_or(3), bias: f.flag("conv_bias", false) };
    // By numbers where no types are given.
    let numbers = layer_numbers(f, "full_attn_idxs");
    let by_number = || numbers.map_or(vec![true; layers], |of| (0..layers).map(|i| of.contains(&(i as u64))).collect());
    let attends = attends(f, layers, [&["full_attention"], &["conv"]], true).unwrap_or_else(by_number);
    let rope = rope(c, f, heads.key_dim, Some(1_000_000.0));
    let names = attention::Names {
        qkv: QkvNames::Each(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
        o: "self_attn.out_proj",
        norms: ["self_attn.q_layernorm", "self_attn.k_layernorm"],
    };
    let attention = attention::Plan { norm: head_norms(c), names, ..attention(c, heads, rope) };
    let normed = branch::Plan::normed;
    let block = |(i, attends)| {
        let mixer = if attends { LayerPlan::Attention(attention.clone()) } else { LayerPlan::ShortConv(conv.clone()) };
        vec![normed(Place::Mixer, "operator_norm", mixer), normed(Place::Mlp, "ffn_norm", mlp(i))]
    };
    c.blocks = attends.into_iter().enumerate().map(block).collect();
}

/// The width of the MLPs, which is not what `intermediate_size` says.
fn width(f: &Fields) -> usize {
    // Folders name it in two ways; the older one counts.
    let said = f.size("block_ff_dim").unwrap_or_else(|| f.required_size("intermediate_size"));
    f.unread(&["intermediate_size"]);
    let factor = if f.has("block_ffn_dim_multiplier") { f.positive("block_ffn_dim_multiplier") } else { Some(1.0) };
    let multiple = f.size("block_multiple_of").unwrap_or(256);
    if !f.flag("block_auto_adjust_ff_dim", true) {
        return said;
    }
    let width = (2.0 * said as f64 / 3.0) as usize;
    // A null switches the multiples off too.
    let Some(factor) = factor else { return width };
    let width = (factor * width as f64) as usize;
    width.checked_next_multiple_of(multiple.max(1)).filter(|width| *width <= i32::MAX as usize).unwrap_or_else(|| {
        f.refuse("block_ffn_dim_multiplier", "makes the MLPs wider than 2147483647");
        0
    })
}
