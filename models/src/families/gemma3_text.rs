//! Gemma 3 (text): Gemma 2 with norms of heads, windows in five layers of six, and positions of their own for these.

use super::Family;
use super::gemma2::gemma;
use super::parts::{attention, head_norms, rope_of_kind, sandwich, windows};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::{LayerPlan, attend, attention};

pub(super) const FAMILY: Family = Family { tied: true, ..Family::of("gemma3_text", read) };

fn read(c: &mut Config, f: &Fields, layers: usize) {
    // Its code names a limit of scores and never applies one: a value is refused, published folders have null.
    f.present(&["sliding_window"]);
    let (heads, bias, mlp) = gemma(c, f);
    let every = f.size("sliding_window_pattern").or(f.size("_sliding_window_pattern")).unwrap_or(6).max(1);
    let windows = windows(f, layers, f.size("sliding_window"), |i| !(i + 1).is_multiple_of(every));
    let full = rope_of_kind(c, f, heads.key_dim, "full_attention", "rope_theta", 1_000_000.0);
    let local = rope_of_kind(c, f, heads.key_dim, "sliding_attention", "rope_local_base_freq", 10_000.0);
    let block = |window: Option<usize>| {
        let heads = attend::Heads { window, ..heads.clone() };
        let rope = if window.is_some() { local } else { full };
        let mixer = attention::Plan { norm: head_norms(c), bias, o_bias: bias, ..attention(c, heads, rope) };
        sandwich(LayerPlan::Attention(mixer), LayerPlan::Mlp(mlp.clone()))
    };
    c.blocks = windows.into_iter().map(block).collect();
}
