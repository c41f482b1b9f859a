//! Mamba: blocks of one branch, a scan.

use super::Family;
use super::parts::only_silu;
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::branch::{self, Place};
use crate::layers::{LayerPlan, mamba};

pub(super) const FAMILY: Family =
    Family { eps: "layer_norm_epsilon", tied: true, endless: true, ..Family::of("mamba", read) };

fn read(c: &mut Config, f: &Fields, layers: usize) {
    blocks(c, f, layers, None);
}

/// The blocks of this form, with these norms within each scan.
pub(super) fn blocks(c: &mut Config, f: &Fields, layers: usize, norms: Option<mamba::Norms>) {
    only_silu(f);
    (c.stack, c.table, c.final_norm) = ("backbone.layers", "backbone.embeddings", "backbone.norm_f");
    // How weights begin, how a scan is run, and of which dtype a residual stream is that here is f32 always; and what folders say
    // besides of what the first code for them did.
    f.unread(&["time_step_scale", "time_step_min", "time_step_max", "time_step_floor", "time_step_init_scheme"]);
    f.unread(&["rescale_prenorm_residual", "residual_in_fp32", "use_mambapy", "use_associative_scan"]);
    f.unread(&["d_inner", "fused_add_norm", "pad_vocab_size_multiple", "rms_norm", "ssm_cfg"]);
    let size = |field, default| f.size(field).unwrap_or(default);
    // Where both are there, the code takes the width, whatever it is by the other.
    let widened = c.hidden.saturating_mul(size("expand", 2));
    let inner = size("intermediate_size", widened);
    let plan = mamba::Plan {
        name: "mixer",
        hidden: c.hidden,
        inner,
        state_dim: size("state_size", 16),
        rank: rank(c, f, "time_step_rank"),
        taps: size("conv_kernel", 4),
        bias: [f.flag("use_bias", false), f.flag("use_conv_bias", true)],
        norms,
    };
    c.blocks = vec![vec![branch::Plan::normed(Place::Mixer, "norm", LayerPlan::Mamba(plan))]; layers];
}

/// How many numbers steps are projected from; `auto` is a sixteenth of the width.
pub(super) fn rank(c: &Config, f: &Fields, field: &str) -> usize {
    match f.get(field) {
        Some(value) if value != "auto" => f.required_size(field),
        _ => c.hidden.div_ceil(16),
    }
}
