//! SmolLM3: Llama, some of whose layers do not rotate; these alone may have windows.

use super::Family;
use super::parts::{Missing, attention, gated, heads, no_rope, only_silu, pre_norm, rope, windows};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::{LayerPlan, attend, attention, mlp};
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family { tied: true, ..Family::of("smollm3", read) };

fn read(c: &mut Config, f: &Fields, layers: usize) {
    only_silu(f);
    let heads = heads(c, f, Missing::Refused, Missing::Derived);
    let (bias, mlp_bias) = (f.flag("attention_bias", false), f.flag("mlp_bias", false));
    let rotates = rotates(f, layers);
    let window = if f.flag("use_sliding_window", false) { f.size("sliding_window") } else { None };
    // Its code reads neither of the last two; published folders have them.
    f.unread(&["sliding_window", "max_window_layers", "pretraining_tp"]);
    let windows = windows(f, layers, window, |i| !rotates[i]);
    let still = no_rope(c, heads.key_dim);
    let rope = rope(c, f, heads.key_dim, Some(2_000_000.0));
    let mlp = mlp::Plan { bias: mlp_bias, ..gated(c, f.required_size("intermediate_size")) };
    let block = |(window, rotates): (Option<usize>, bool)| {
        let heads = attend::Heads { window, ..heads.clone() };
        let rope = if rotates { rope } else { still };
        let mixer = attention::Plan { bias, o_bias: bias, ..attention(c, heads, rope) };
        pre_norm(LayerPlan::Attention(mixer), LayerPlan::Mlp(mlp.clone()))
    };
    c.blocks = windows.into_iter().zip(rotates).map(block).collect();
}

/// Which layers rotate: where `no_rope_layers` has a 1; without it, or where it is empty, all but every
/// `no_rope_layer_interval`-th.
pub(super) fn rotates(f: &Fields, layers: usize) -> Vec<bool> {
    let every = f.size("no_rope_layer_interval").unwrap_or(4);
    let otherwise = || (0..layers).map(|i| every > 0 && !(i + 1).is_multiple_of(every)).collect();
    let Some(value) = f.get("no_rope_layers").filter(|value| **value != json!([])) else { return otherwise() };
    let read = |list: &Vec<Value>| list.iter().map(|v| v.as_u64().filter(|v| *v < 2).map(|v| v == 1)).collect();
    let list: Option<Vec<bool>> = value.as_array().filter(|list| list.len() == layers).and_then(read);
    list.unwrap_or_else(|| {
        f.refuse("no_rope_layers", format!("is {value}; it must be a list of {layers} numbers, 0 or 1"));
        otherwise()
    })
}
