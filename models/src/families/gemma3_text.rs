//! Gemma 3 (text): Gemma 2 with norms of heads, windows in five layers of six, and positions of their own for these.

use super::Family;
use super::parts::{Missing, attention, gated, head_norms, heads, rope_of_kind, sandwich, windows};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::head::Finish;
use crate::layers::mlp::Activation;
use crate::layers::{LayerPlan, attend, attention, mlp};
use serde_json::json;

pub(super) const FAMILY: Family = Family { tied: true, ..Family::of("gemma3_text", read) };

fn read(c: &mut Config, f: &Fields, layers: usize) {
    let heads = heads(c, f, Missing::Refused, Missing::Refused);
    f.present(&["sliding_window"]);
    let bias = f.flag("attention_bias", false);
    f.only("hidden_activation", &[json!("gelu_pytorch_tanh")]);
    f.only("hidden_act", &[json!("gelu_pytorch_tanh"), json!("gelu")]);
    f.only("use_bidirectional_attention", &[json!(false)]);
    f.unread(&["cache_implementation"]);
    let scale = 1.0 / f.positive("query_pre_attn_scalar").unwrap_or(256.0).sqrt();
    let heads = attend::Heads { scale, softcap: f.positive("attn_logit_softcapping"), ..heads };
    c.norms.offset = true;
    c.embed_scale = Some((c.hidden as f64).sqrt());
    c.finish = f.positive("final_logit_softcapping").map(Finish::Softcap);
    let every = f.size("sliding_window_pattern").or(f.size("_sliding_window_pattern")).unwrap_or(6).max(1);
    let windows = windows(f, layers, f.size("sliding_window"), |i| !(i + 1).is_multiple_of(every));
    let full = rope_of_kind(c, f, heads.key_dim, "full_attention", "rope_theta", 1_000_000.0);
    let local = rope_of_kind(c, f, heads.key_dim, "sliding_attention", "rope_local_base_freq", 10_000.0);
    let mlp = mlp::Plan { activation: Activation::Gelu, ..gated(c, f.required_size("intermediate_size")) };
    let block = |window: Option<usize>| {
        let heads = attend::Heads { window, ..heads.clone() };
        let rope = if window.is_some() { local } else { full };
        let mixer = attention::Plan { norm: head_norms(c), bias, o_bias: bias, ..attention(c, heads, rope) };
        sandwich(LayerPlan::Attention(mixer), LayerPlan::Mlp(mlp.clone()))
    };
    c.blocks = windows.into_iter().map(block).collect();
}
