//! Cohere 2 (Command R7B, Command A): attention and MLP side by side behind one layer norm without a bias; layers with a window
//! rotate pairs of neighbours, the others do not rotate; logits times a factor.

use super::Family;
use super::parts::{Missing, attention, gated, heads, no_rope, only_silu, parallel, rope, windows};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::head::Finish;
use crate::layers::heads::Rope;
use crate::layers::norm::Kind;
use crate::layers::{LayerPlan, attend, attention};
use samebits_ops::Pairing;

pub(super) const FAMILY: Family = Family { eps: "layer_norm_eps", tied: true, ..Family::of("cohere2", read) };

fn read(c: &mut Config, f: &Fields, layers: usize) {
    only_silu(f);
    let heads = heads(c, f, Missing::Derived, Missing::Derived);
    let bias = f.flag("attention_bias", false);
    // Its code does not read this; published folders have it.
    f.unread(&["position_embedding_type"]);
    c.norms.kind = Kind::Layer { bias: false };
    c.finish = Some(f.positive("logit_scale").unwrap_or(0.0625)).filter(|scale| *scale != 1.0).map(Finish::Scale);
    // The family's own default, where the key is missing and not null.
    let default = (!f.has("sliding_window")).then_some(4096);
    let every = f.size("sliding_window_pattern").unwrap_or(4).max(1);
    let windows = windows(f, layers, f.size("sliding_window").or(default), |i| !(i + 1).is_multiple_of(every));
    let still = no_rope(c, heads.key_dim);
    let turning = Rope { pairing: Pairing::Interleaved, ..rope(c, f, heads.key_dim, Some(10_000.0)) };
    let mlp = gated(c, f.required_size("intermediate_size"));
    let block = |window: Option<usize>| {
        let heads = attend::Heads { window, ..heads.clone() };
        let rope = if window.is_some() { turning } else { still };
        let mixer = attention::Plan { bias, o_bias: bias, ..attention(c, heads, rope) };
        parallel(LayerPlan::Attention(mixer), LayerPlan::Mlp(mlp.clone()), None)
    };
    c.blocks = windows.into_iter().map(block).collect();
}
