//! Mamba-2: blocks of one branch, a scan.

use super::Family;
use super::parts::{limits, only_silu};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::branch::{self, Place};
use crate::layers::mamba2::Gate;
use crate::layers::{LayerPlan, mamba2};

pub(super) const FAMILY: Family = Family { eps: "layer_norm_epsilon", endless: true, ..Family::of("mamba2", read) };

fn read(c: &mut Config, f: &Fields, layers: usize) {
    only_silu(f);
    (c.stack, c.table, c.final_norm) = ("backbone.layers", "backbone.embeddings", "backbone.norm_f");
    let size = |field, default| f.size(field).unwrap_or(default);
    let (heads, head_dim, groups) = (size("num_heads", 128), size("head_dim", 64), size("n_groups", 8));
    let expand = size("expand", 2);
    if c.hidden.checked_mul(expand) != heads.checked_mul(head_dim) {
        let why =
            format!("is {heads}; times head_dim {head_dim} it must be hidden_size {} times expand {expand}", c.hidden);
        f.refuse("num_heads", why);
    }
    if groups > 0 && (!heads.is_multiple_of(groups) || !(heads * head_dim).is_multiple_of(groups)) {
        f.refuse("n_groups", format!("is {groups}; it must divide num_heads {heads}"));
    }
    // How weights begin, how many positions a kernel takes at once, and of which dtype a residual stream is that here is f32
    // always; and what folders say of a norm that is always there and behind the gate.
    f.unread(&["time_step_rank", "time_step_min", "time_step_max", "time_step_floor", "time_step_init_scheme"]);
    f.unread(&["time_step_scale", "rescale_prenorm_residual", "chunk_size", "residual_in_fp32", "intermediate_size"]);
    f.unread(&["norm_before_gate", "rms_norm"]);
    let plan = mamba2::Plan {
        name: "mixer",
        hidden: c.hidden,
        heads,
        head_dim,
        groups,
        state_dim: size("state_size", 128),
        taps: size("conv_kernel", 4),
        bias: [f.flag("use_bias", false), f.flag("use_conv_bias", true)],
        limits: limits(f),
        factors: None,
        gate: Gate::ThenNorm,
        norm: c.norms,
        norm_groups: groups,
    };
    c.blocks = vec![vec![branch::Plan::normed(Place::Mixer, "norm", LayerPlan::Mamba2(plan))]; layers];
}
