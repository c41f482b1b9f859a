//! OLMo Hybrid: the gated delta rule in most layers, behind norms, and in the others the attention of OLMo 3, before them.

use super::Family;
use super::parts::{Missing, attention, behind, gated, heads, no_rope, only_silu, rope, row_norms};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::branch::{self, Place};
use crate::layers::{LayerPlan, attention, delta, norm};
use serde_json::Value;

pub(super) const FAMILY: Family = Family::of("olmo_hybrid", read);

fn read(c: &mut Config, f: &Fields, layers: usize) {
    only_silu(f);
    let heads = heads(c, f, Missing::Derived, Missing::Derived);
    let bias = f.flag("attention_bias", false);
    let attends = attends(f, layers);
    // Published folders do not rotate: their base is null.
    let rope = match f.get("rope_parameters").or_else(|| f.get("rope_theta")) {
        None => no_rope(c, heads.key_dim),
        Some(said) if said.get("rope_theta").is_some_and(Value::is_null) => no_rope(c, heads.key_dim),
        Some(_) => rope(c, f, heads.key_dim, None),
    };
    let key_heads = f.size("linear_num_key_heads").unwrap_or(heads.queries);
    let derived = (0.75 * c.hidden as f64 / key_heads.max(1) as f64) as usize;
    let key_dim = f.size("linear_key_head_dim").unwrap_or(derived);
    let rule = delta::Plan {
        hidden: c.hidden,
        key_heads,
        value_heads: f.size("linear_num_value_heads").unwrap_or(heads.queries),
        key_dim,
        value_dim: f.size("linear_value_head_dim").unwrap_or(2 * key_dim),
        taps: f.size("linear_conv_kernel_dim").unwrap_or(4),
        largest_beta: if f.flag("linear_allow_neg_eigval", true) { 2.0 } else { 1.0 },
        l2_eps: 1e-6,
        // Not the one of the config.
        norm: norm::Plan { eps: 1e-5, offset: false },
    };
    // What weights are drawn from at the beginning of a training.
    f.unread(&["linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor"]);
    let mixer = attention::Plan { norm: row_norms(c), bias, o_bias: bias, ..attention(c, heads, rope) };
    let mlp = gated(c, f.required_size("intermediate_size"));
    let branch = |place, before, layer| branch::Plan { place, before: Some(before), layer, behind: None, factor: None };
    let block = |attends| match attends {
        true => behind(LayerPlan::Attention(mixer.clone()), LayerPlan::Mlp(mlp.clone())),
        false => vec![
            branch(Place::Mixer, "attention_layer_norm", LayerPlan::DeltaRule(rule.clone())),
            branch(Place::Mlp, "feedforward_layer_norm", LayerPlan::Mlp(mlp.clone())),
        ],
    };
    c.blocks = attends.into_iter().map(block).collect();
}
