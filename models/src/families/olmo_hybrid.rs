//! OLMo Hybrid: the gated delta rule in most layers, behind norms, and in the others the attention of OLMo 3, before them.

use super::Family;
use super::parts::{Missing, attends, attention, behind, gated, heads, no_rope, only_silu, rope, row_norms};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::branch::{self, Place};
use crate::layers::{LayerPlan, attention, delta, norm};

pub(super) const FAMILY: Family = Family::of("olmo_hybrid", read);

fn read(c: &mut Config, f: &Fields, layers: usize) {
    only_silu(f);
    let heads = heads(c, f, Missing::Derived, Missing::Derived);
    let bias = f.flag("attention_bias", false);
    let usual = || (0..layers).map(|i| i % 4 == 3 || layers < 4 && i + 1 == layers).collect();
    let attends = attends(f, layers, [&["full_attention"], &["linear_attention"]], true).unwrap_or_else(usual);
    if f.is_clean() && (attends.iter().all(|attends| *attends) || !attends.contains(&true)) {
        f.refuse("layer_types", "must have a \"linear_attention\" and a \"full_attention\"");
    }
    let key_heads = f.size("linear_num_key_heads").unwrap_or(heads.queries);
    let value_heads = f.size("linear_num_value_heads").unwrap_or(heads.queries);
    if key_heads > 0 && !value_heads.is_multiple_of(key_heads) {
        let why = format!("is {value_heads}; it must be a multiple of linear_num_key_heads {key_heads}");
        f.refuse("linear_num_value_heads", why);
    }
    let derived = (0.75 * c.hidden as f64 / key_heads.max(1) as f64) as usize;
    let key_dim = f.size("linear_key_head_dim").unwrap_or(derived);
    let rule = delta::Plan {
        hidden: c.hidden,
        key_heads,
        value_heads,
        key_dim,
        value_dim: f.size("linear_value_head_dim").unwrap_or(2 * key_dim),
        taps: f.size("linear_conv_kernel_dim").unwrap_or(4),
        largest_beta: if f.flag("linear_allow_neg_eigval", true) { 2.0 } else { 1.0 },
        by_channel: false,
        // Not the one of the config.
        norm: norm::Plan::rms(1e-5),
        gate: delta::Gate::Silu,
        names: delta::Names::Each,
    };
    // What weights are drawn from at the beginning of a training.
    f.unread(&["linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor"]);
    let rope = match is_rotated(f) {
        true => rope(c, f, heads.key_dim, Some(10_000.0)),
        false => {
            f.unread(&["rope_theta", "rope_scaling", "rope_parameters"]);
            no_rope(c, heads.key_dim)
        }
    };
    let mixer = attention::Plan { norm: row_norms(c), bias, o_bias: bias, ..attention(c, heads, rope) };
    let mlp = LayerPlan::Mlp(gated(c, f.required_size("intermediate_size")));
    let normed = branch::Plan::normed;
    let block = |attends| match attends {
        true => behind(LayerPlan::Attention(mixer.clone()), mlp.clone()),
        false => vec![
            normed(Place::Mixer, "attention_layer_norm", LayerPlan::DeltaRule(rule.clone())),
            normed(Place::Mlp, "feedforward_layer_norm", mlp.clone()),
        ],
    };
    c.blocks = attends.into_iter().map(block).collect();
}

/// Whether heads are rotated: not where the base is null, as published folders have it.
fn is_rotated(f: &Fields) -> bool {
    let own = f.get("rope_scaling").or_else(|| f.get("rope_parameters")).and_then(|all| all.get("rope_theta"));
    let is_null = f.has("rope_theta") && f.get("rope_theta").is_none();
    let without = own.map_or(is_null, |base| base.is_null());
    if let Some(base) = f.get("rope_theta").filter(|_| without) {
        f.refuse("rope_theta", format!("is {base}, but rope_parameters.rope_theta is null; keep one"));
    }
    !without
}
