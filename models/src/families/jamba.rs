//! Jamba: in most layers a scan of Mamba with norms, in some attention that does not rotate; experts in every other layer.

use super::Family;
use super::mamba::rank;
use super::parts::{
    Missing, attention, chosen_or, expert, gated, heads, no_rope, null_derived, only_silu, softmax_experts_of,
};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::branch::{self, Place};
use crate::layers::mamba::{self, Norms};
use crate::layers::moe::{self, ExpertNames};
use crate::layers::{LayerPlan, mlp};

pub(super) const FAMILY: Family =
    Family { endless: true, renamed: &[("num_experts", "num_local_experts")], ..Family::of("jamba", read) };

fn read(c: &mut Config, f: &Fields, layers: usize) {
    only_silu(f);
    c.final_norm = "model.final_layernorm";
    let size = |field, default| f.size(field).unwrap_or(default);
    let heads = heads(c, f, null_derived(f), Missing::Derived);
    let rope = no_rope(c, heads.key_dim);
    let attention = LayerPlan::Attention(attention(c, heads, rope));
    let width = size("intermediate_size", 14_336);
    let names = mlp::Names::Each(["feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj"]);
    let dense = LayerPlan::Mlp(mlp::Plan { names, ..gated(c, width) });
    // One expert is an MLP.
    let count = size("num_experts", 16);
    let names = moe::Names { block: "feed_forward", router: "router", experts: ExpertNames::Each };
    let experts = (count > 1).then(|| {
        let experts = softmax_experts_of(count, chosen_or(f, count, 2), expert(c, width), false);
        LayerPlan::Moe(moe::Plan { names, ..experts })
    });
    let scan = LayerPlan::Mamba(mamba::Plan {
        name: "mamba",
        hidden: c.hidden,
        inner: c.hidden.saturating_mul(size("mamba_expand", 2)),
        state_dim: size("mamba_d_state", 16),
        rank: rank(c, f, "mamba_dt_rank"),
        taps: size("mamba_d_conv", 4),
        bias: [f.flag("mamba_proj_bias", false), f.flag("mamba_conv_bias", true)],
        norms: Some(Norms { norm: c.norms, weights: true }),
    });
    // How scans are run, how many logits a generation makes, a loss of training, and how long texts were.
    f.unread(&[
        "use_mamba_kernels",
        "use_mambapy",
        "use_associative_scan",
        "mamba_inner_layernorms",
        "num_logits_to_keep",
    ]);
    f.unread(&[
        "calc_logits_for_entire_prompt",
        "num_experts_per_tok",
        "output_router_logits",
        "router_aux_loss_coef",
        "n_ctx",
    ]);
    let attends = every(f, "attn_layer", [8, 4]);
    let sparse = every(f, "expert_layer", [2, 1]);
    let normed = branch::Plan::normed;
    let block = |i: usize| {
        let mixer = if attends(i) { &attention } else { &scan };
        let mlp = experts.as_ref().filter(|_| sparse(i)).unwrap_or(&dense);
        vec![
            normed(Place::Mixer, "input_layernorm", mixer.clone()),
            normed(Place::Mlp, "pre_ff_layernorm", mlp.clone()),
        ]
    };
    c.blocks = (0..layers).map(block).collect();
}

/// Whether a layer is one of every `<name>_period`, from `<name>_offset` on.
fn every(f: &Fields, name: &str, [period, offset]: [usize; 2]) -> impl Fn(usize) -> bool {
    let [of_period, of_offset] = ["period", "offset"].map(|part| format!("{name}_{part}"));
    let period = f.size(&of_period).unwrap_or(period);
    let offset = if f.get(&of_offset).is_some() { f.size_or_zero(&of_offset) } else { offset };
    if offset >= period {
        f.refuse(of_offset, format!("is {offset}; it must be below {of_period}, {period}"));
    }
    move |i| period > 0 && i % period == offset
}
