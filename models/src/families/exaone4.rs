//! EXAONE 4: norms behind the layers, norms of heads; where there are windows, the layers without one do not rotate.

use super::Family;
use super::parts::{Missing, attention, behind, gated, head_norms, heads, no_rope, only_silu, rope, windows};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::{LayerPlan, attend, attention};
use serde_json::Value;

pub(super) const FAMILY: Family = Family::of("exaone4", read);

fn read(c: &mut Config, f: &Fields, layers: usize) {
    only_silu(f);
    let heads = heads(c, f, Missing::Refused, Missing::Derived);
    f.present(&["sliding_window"]);
    let window = f.size("sliding_window");
    // The pattern was once written as letters: `LLLG`.
    let every = match f.get("sliding_window_pattern") {
        Some(Value::String(letters)) if letters.chars().rev().skip(1).all(|c| c == 'L') && letters.ends_with('G') => {
            letters.len()
        }
        Some(Value::String(letters)) => {
            f.refuse(
                "sliding_window_pattern",
                format!("is {letters:?}; it must be L's and one G at the end, or a number"),
            );
            1
        }
        // Where there is no window transformers writes 0.
        _ if window.is_none() => 1,
        _ => f.size("sliding_window_pattern").unwrap_or(4).max(1),
    };
    let windows = windows(f, layers, window, |i| !(i + 1).is_multiple_of(every));
    let still = no_rope(c, heads.key_dim);
    let rope = rope(c, f, heads.key_dim, None);
    let mlp = gated(c, f.required_size("intermediate_size"));
    let block = |of: Option<usize>| {
        let heads = attend::Heads { window: of, ..heads.clone() };
        let rope = if window.is_none() || of.is_some() { rope } else { still };
        let mixer = attention::Plan { norm: head_norms(c), ..attention(c, heads, rope) };
        behind(LayerPlan::Attention(mixer), LayerPlan::Mlp(mlp.clone()))
    };
    c.blocks = windows.into_iter().map(block).collect();
}
