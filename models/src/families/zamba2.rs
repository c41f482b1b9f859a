//! Zamba2: scans of Mamba-2; before some of them one of a few transformer blocks, which several blocks share and which also read the
//! embedded tokens.

use super::Family;
use super::parts::{activation, kinds, layer_numbers, limits, no_rope, rope};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::branch::{self, Place};
use crate::layers::mamba2::Gate;
use crate::layers::{LayerPlan, attend, mamba2, norm, shared};
use samebits_ops::Activation;
use serde_json::json;

pub(super) const FAMILY: Family = Family { tied: true, counted: &KINDS, ..Family::of("zamba2", read) };

/// The kinds of the layers. The first that is there is read.
const KINDS: [&str; 2] = ["layers_block_type", "layer_types"];

/// What stands before the names of a shared block, and the name of the last matrix of a use.
const SHARED: &str = "shared_transformer";
const LAST: &str = "linear";

fn read(c: &mut Config, f: &Fields, layers: usize) {
    c.final_norm = "model.final_layernorm";
    let field = if f.has(KINDS[0]) { KINDS[0] } else { KINDS[1] };
    let hybrid = kinds(f, field, layers, [&["hybrid"], &["linear_attention", "mamba"]], false).unwrap_or_else(|| {
        f.refuse(KINDS[0], "is missing; it must be a list of the kinds of the layers");
        vec![false; layers]
    });
    let hybrid: Vec<usize> = (0..layers).filter(|&i| hybrid[i]).collect();
    let is = |ids: &[u64]| ids.iter().copied().eq(hybrid.iter().map(|&i| i as u64));
    if layer_numbers(f, "hybrid_layer_ids").is_some_and(|ids| !is(&ids)) {
        f.refuse("hybrid_layer_ids", format!("are not the layers that {field} calls hybrid, {hybrid:?}; remove it"));
    }
    let (scan, shared) = (scan(c, f), shared(c, f));
    // How weights begin, how many positions a kernel takes at once, which kernels there are, how many logits a generation makes, and
    // sizes that the code of the family does not read.
    f.unread(&[
        "time_step_max",
        "time_step_floor",
        "chunk_size",
        "use_mamba_kernels",
        "use_mem_eff_path",
        "num_logits_to_keep",
    ]);
    f.unread(&["kv_channels", "num_query_groups"]);

    let blocks = f.size("num_mem_blocks").unwrap_or(1).max(1);
    c.shared = hybrid.iter().take(blocks).map(|&first| shared::Plan { first, ..shared.clone() }).collect();
    let block = |i: usize| {
        let number = hybrid.iter().position(|&block| block == i);
        let [name, before] = match number {
            Some(_) => ["mamba_decoder.mamba", "mamba_decoder.input_layernorm"],
            None => ["mamba", "input_layernorm"],
        };
        let scan = LayerPlan::Mamba2(mamba2::Plan { name, ..scan.clone() });
        let ahead = number.map(|number| shared::Use { of: number % blocks, number, last: LAST });
        vec![branch::Plan { ahead, ..branch::Plan::normed(Place::Mixer, before, scan) }]
    };
    c.blocks = (0..layers).map(block).collect();
}

/// Refuses a size that the folder says otherwise than the others do.
fn derived(f: &Fields, field: &str, size: usize, of: &str) {
    if f.size(field).is_some_and(|said| said != size) && size > 0 {
        f.refuse(field, format!("is not {size}, as {of} say; remove it"));
    }
}

/// The scans, by the names of a layer that is one alone.
fn scan(c: &Config, f: &Fields) -> mamba2::Plan {
    let size = |field, default| f.size(field).unwrap_or(default);
    let inner = c.hidden.saturating_mul(size("mamba_expand", 2));
    let (heads, groups) = (size("n_mamba_heads", 8), size("mamba_ngroups", 1));
    let head_dim = inner.checked_div(heads).unwrap_or(0);
    if heads > 0 && head_dim * heads != inner {
        let why = format!("is {heads}; it must divide hidden_size times mamba_expand, {inner}");
        f.refuse("n_mamba_heads", why);
    }
    derived(f, "mamba_headdim", head_dim, "hidden_size, mamba_expand and n_mamba_heads");
    if groups > 0 && !heads.is_multiple_of(groups) {
        f.refuse("mamba_ngroups", format!("is {groups}; it must divide n_mamba_heads {heads}"));
    }
    // The code of the family has it always, and adds it always in a prefill.
    f.only("use_conv_bias", &[json!(true)]);
    let shortest = f.positive("time_step_min").unwrap_or(0.001);
    let limits = limits(f);
    if f.get("time_step_limit").is_some() && limits != [shortest, 0.0] && limits != [0.0; 2] {
        let why = format!(
            "asks for other steps than the code of the family takes, no shorter than time_step_min {shortest}; remove it"
        );
        f.refuse("time_step_limit", why);
    }
    mamba2::Plan {
        name: "mamba",
        hidden: c.hidden,
        heads,
        head_dim,
        groups,
        state_dim: size("mamba_d_state", 64),
        taps: size("mamba_d_conv", 4),
        bias: [f.flag("add_bias_linear", false), true],
        limits: [shortest, 0.0],
        factors: None,
        gate: Gate::ThenNorm,
        // Whatever other norms add.
        norm: norm::Plan::rms(1e-5),
        norm_groups: groups,
    }
}

/// What shared blocks have in common.
fn shared(c: &mut Config, f: &Fields) -> shared::Plan {
    let enters = c.hidden.saturating_mul(2);
    let queries = f.required_size("num_attention_heads");
    let keys = f.size("num_key_value_heads").unwrap_or(queries);
    let dim = enters.checked_div(queries).unwrap_or(0);
    if queries > 0 && dim * queries != enters {
        f.refuse("num_attention_heads", format!("is {queries}; it must divide twice the hidden_size, {enters}"));
    }
    let adapts_heads = f.flag("use_shared_attention_adapter", false);
    if adapts_heads && keys != queries {
        let why = format!("is {keys}; with use_shared_attention_adapter it must be num_attention_heads {queries}");
        f.refuse("num_key_value_heads", why);
    } else if keys > 0 && !queries.is_multiple_of(keys) {
        let why = format!("is {keys}; it must divide num_attention_heads {queries}");
        f.refuse("num_key_value_heads", why);
    }
    derived(f, "attention_hidden_size", enters, "twice the hidden_size");
    for field in ["attention_head_dim", "head_dim"] {
        derived(f, field, dim, "twice the hidden_size and num_attention_heads");
    }
    // Older code of the family could be without.
    f.only("use_shared_mlp_adapter", &[json!(true)]);
    if f.flag("use_long_context", false) {
        let why = "is true; supported is false, with the rope_theta and max_position_embeddings that are meant: its authors' code \
                   multiplies the base by 8^(D / (D - 2)), transformers says so and does not";
        f.refuse("use_long_context", why);
    }
    let rope = match f.flag("use_mem_rope", false) {
        true => rope(c, f, dim, Some(10_000.0)),
        false => {
            f.unread(&["rope_theta", "rope_scaling", "rope_parameters"]);
            no_rope(c, dim)
        }
    };
    let scale = 1.0 / (dim as f64 / 2.0).sqrt();
    let (key_dim, value_dim) = (dim, dim);
    shared::Plan {
        first: 0,
        name: SHARED,
        hidden: c.hidden,
        heads: attend::Heads { queries, keys, key_dim, value_dim, scale, softcap: None, window: None, chunk: None },
        rope,
        adapts_heads,
        rank: f.size("adapter_rank").unwrap_or(128),
        width: f.size("intermediate_size").unwrap_or(c.hidden.saturating_mul(4)),
        activation: activation(f, "hidden_act", Activation::Gelu),
        bias: f.flag("add_bias_linear", false),
    }
}
