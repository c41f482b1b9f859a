//! Granite: Llama with a factor each for embeddings, scores, what layers add, and logits.

use super::Family;
use super::parts::{Missing, attention, gated, heads, only_silu, pre_norm, rope};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::branch;
use crate::layers::head::Finish;
use crate::layers::{LayerPlan, attend, attention, mlp};

pub(super) const FAMILY: Family = Family::of("granite", read);

fn read(c: &mut Config, f: &Fields, layers: usize) {
    let mlp_bias = f.flag("mlp_bias", false);
    let mlp = mlp::Plan { bias: mlp_bias, ..gated(c, f.required_size("intermediate_size")) };
    c.blocks = vec![block(c, f, LayerPlan::Mlp(mlp)); layers];
}

/// A block with this layer behind its attention, and the factors of the embeddings and of the logits.
pub(super) fn block(c: &mut Config, f: &Fields, layer: LayerPlan) -> Vec<branch::Plan> {
    only_silu(f);
    let heads = heads(c, f, Missing::Derived, Missing::Derived);
    let heads = attend::Heads { scale: f.positive("attention_multiplier").unwrap_or(1.0), ..heads };
    let bias = f.flag("attention_bias", false);
    // Factors of 1 change no bit; these are products that need not be made.
    let factor = |field| f.positive(field).filter(|factor| *factor != 1.0);
    c.embed_scale = factor("embedding_multiplier");
    c.finish = factor("logits_scaling").map(|divisor| Finish::Scale(1.0 / divisor));
    let added = factor("residual_multiplier");
    let rope = rope(c, f, heads.key_dim, Some(10_000.0));
    let mixer = attention::Plan { bias, o_bias: bias, ..attention(c, heads, rope) };
    let block = pre_norm(LayerPlan::Attention(mixer), layer);
    block.into_iter().map(|branch| branch::Plan { factor: added, ..branch }).collect()
}
