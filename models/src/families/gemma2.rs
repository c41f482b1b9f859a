//! Gemma 2: windows in every other layer, soft limits, gelu, norms behind the layers too, 1 added to norm weights.

use super::Family;
use super::parts::{Missing, attention, gated, heads, rope, sandwich, windows};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::head::Finish;
use crate::layers::mlp::Activation;
use crate::layers::{LayerPlan, attend, attention, mlp};
use serde_json::json;

pub(super) const FAMILY: Family = Family { tied: true, ..Family::of("gemma2", read) };

fn read(c: &mut Config, f: &Fields, layers: usize) {
    f.present(&["sliding_window", "attn_logit_softcapping", "final_logit_softcapping"]);
    let (heads, bias, mlp) = gemma(c, f);
    let windows = windows(f, layers, f.size("sliding_window"), |i| i % 2 == 0);
    let rope = rope(c, f, heads.key_dim, Some(10_000.0));
    let softcap = f.positive("attn_logit_softcapping");
    let block = |window| {
        let heads = attend::Heads { window, softcap, ..heads.clone() };
        let mixer = attention::Plan { bias, o_bias: bias, ..attention(c, heads, rope) };
        sandwich(LayerPlan::Attention(mixer), LayerPlan::Mlp(mlp.clone()))
    };
    c.blocks = windows.into_iter().map(block).collect();
}

/// What Gemmas have in common: their heads, whether projections have biases, and the MLP; of the model the offset of norms, the
/// factor of embeddings and the limit of logits.
pub(super) fn gemma(c: &mut Config, f: &Fields) -> (attend::Heads, bool, mlp::Plan) {
    let heads = heads(c, f, Missing::Refused, Missing::Refused);
    let bias = f.flag("attention_bias", false);
    // Older folders name both; the first is what counts.
    f.only("hidden_activation", &[json!("gelu_pytorch_tanh")]);
    f.only("hidden_act", &[json!("gelu_pytorch_tanh"), json!("gelu")]);
    f.only("use_bidirectional_attention", &[json!(false)]);
    f.unread(&["cache_implementation"]);
    c.norms.offset = true;
    c.embed_scale = Some((c.hidden as f64).sqrt());
    c.finish = f.positive("final_logit_softcapping").map(Finish::Softcap);
    let scale = 1.0 / f.positive("query_pre_attn_scalar").unwrap_or(256.0).sqrt();
    let heads = attend::Heads { scale, ..heads };
    let mlp = mlp::Plan { activation: Activation::Gelu, ..gated(c, f.required_size("intermediate_size")) };
    (heads, bias, mlp)
}
