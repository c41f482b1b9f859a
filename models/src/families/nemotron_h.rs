//! Nemotron-H: blocks of one branch each: a scan of Mamba-2, an attention that does not rotate, or an MLP without a gate.

use super::Family;
use super::parts::{Missing, activation, attention, heads, no_rope, null_derived, ungated};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::attention::{Names, QkvNames};
use crate::layers::branch::{self, Place};
use crate::layers::mamba2::Gate;
use crate::layers::{LayerPlan, attend, attention, mamba2, ungated_mlp};
use samebits_ops::Activation;
use serde_json::json;

pub(super) const FAMILY: Family = Family {
    eps: "layer_norm_epsilon",
    counted: &KINDS,
    // Older names of fields, which go before the newer ones.
    renamed: &[
        ("n_groups", "mamba_n_groups"),
        ("conv_kernel", "mamba_d_conv"),
        ("time_step_min", "mamba_dt_min"),
        ("use_conv_bias", "mamba_conv_bias"),
    ],
    ..Family::of("nemotron_h", read)
};

/// The kinds of the layers: a list of words, or a string of letters. The first that is there is read.
const KINDS: [&str; 3] = ["layers_block_type", "layer_types", "hybrid_override_pattern"];

/// The letter of each kind and its words, the usual one first.
const WORDS: [(&str, &[&str]); 3] =
    [("M", &["linear_attention", "mamba"]), ("*", &["full_attention", "attention"]), ("-", &["mlp"])];

fn read(c: &mut Config, f: &Fields, layers: usize) {
    f.only("mamba_hidden_act", &[json!("silu"), json!("swish")]);
    // The family's code has no such head, and no such biases.
    f.only("tie_word_embeddings", &[json!(false)]);
    f.only("attention_bias", &[json!(false)]);
    (c.stack, c.table, c.final_norm) = ("backbone.layers", "backbone.embeddings", "backbone.norm_f");
    let size = |field, default| f.size(field).unwrap_or(default);
    let normed = |place, layer| vec![branch::Plan::normed(place, "norm", layer)];

    let key_dim = size("head_dim", 128);
    if f.size("attention_head_dim").is_some_and(|older| older != key_dim) {
        f.refuse("attention_head_dim", format!("is not head_dim, {key_dim}, which is the one that is read"));
    }
    let heads = heads(c, f, null_derived(f), Missing::Derived);
    let heads = attend::Heads { key_dim, value_dim: key_dim, scale: 1.0 / (key_dim as f64).sqrt(), ..heads };
    let rope = no_rope(c, key_dim);
    let qkv = QkvNames::Each(["mixer.q_proj", "mixer.k_proj", "mixer.v_proj"]);
    let names = Names { qkv, o: "mixer.o_proj", ..Names::PLAIN };
    let attention = normed(Place::Mixer, LayerPlan::Attention(attention::Plan { names, ..attention(c, heads, rope) }));

    let width = f.required_size("intermediate_size");
    let activation = activation(f, "mlp_hidden_act", Activation::Relu2);
    let mlp = ungated(c, width, activation, ["mixer.up_proj", "mixer.down_proj"]);
    let mlp = ungated_mlp::Plan { bias: f.flag("mlp_bias", false), ..mlp };
    let mlp = normed(Place::Mlp, LayerPlan::UngatedMlp(mlp));

    let (scans, groups) = (size("mamba_num_heads", 128), size("n_groups", 8));
    if groups > 0 && !scans.is_multiple_of(groups) {
        f.refuse("n_groups", format!("is {groups}; it must divide mamba_num_heads {scans}"));
    }
    let scan = mamba2::Plan {
        name: "mixer",
        hidden: c.hidden,
        heads: scans,
        head_dim: size("mamba_head_dim", 64),
        groups,
        state_dim: size("ssm_state_size", 128),
        taps: size("conv_kernel", 4),
        bias: [f.flag("use_bias", false), f.flag("use_conv_bias", true)],
        // In the family's code the shortest step of an untrained model is the shortest of all, and none is the longest.
        limits: [f.positive("time_step_min").unwrap_or(0.001), 0.0],
        factors: None,
        gate: Gate::ThenNorm,
        norm: c.norms,
        norm_groups: groups,
    };
    let scan = normed(Place::Mixer, LayerPlan::Mamba2(scan));
    // How weights begin, how many positions a kernel takes at once, of which dtype a residual stream and a state are that here
    // are f32 always, how many logits a generation makes, and what is said of rotations and experts that no layer here has.
    f.unread(&["time_step_limit", "time_step_max", "time_step_floor", "time_step_rank", "rescale_prenorm_residual"]);
    f.unread(&["chunk_size", "mamba_chunk_size", "use_mamba_kernels", "residual_in_fp32", "mamba_ssm_cache_dtype"]);
    f.unread(&["mamba_proj_bias", "expand", "mamba_expand", "num_logits_to_keep", "rms_norm_eps"]);
    f.unread(&["partial_rotary_factor", "rope_theta", "rope_parameters", "rope_scaling"]);
    f.unread(&["n_routed_experts", "n_shared_experts", "moe_intermediate_size", "moe_latent_size", "norm_topk_prob"]);
    f.unread(&["moe_shared_expert_intermediate_size", "num_experts_per_tok", "routed_scaling_factor"]);
    f.unread(&["n_group", "topk_group"]);

    let blocks = [scan, attention, mlp];
    c.blocks = kinds(f, layers).into_iter().map(|kind| blocks[kind].clone()).collect();
}

/// The kind of each layer, by its place in [`WORDS`].
fn kinds(f: &Fields, layers: usize) -> Vec<usize> {
    let otherwise = vec![0; layers];
    let Some((field, value)) = KINDS.iter().find_map(|field| Some((*field, f.get(field)?))) else {
        f.refuse(KINDS[0], "is missing; it must be a list of the kinds of the layers");
        return otherwise;
    };
    let words: Option<Vec<String>> = match value.as_str() {
        Some(letters) => Some(letters.chars().map(String::from).collect()),
        None => value.as_array().and_then(|list| list.iter().map(|word| word.as_str().map(String::from)).collect()),
    };
    let Some(words) = words.filter(|words| words.len() == layers) else {
        f.refuse(field, format!("is {value}; it must have a kind for each of {layers} layers"));
        return otherwise;
    };
    let of = |word: &String| WORDS.iter().position(|(letter, words)| word == letter || words.contains(&word.as_str()));
    let found: Option<Vec<usize>> = words.iter().map(of).collect();
    found.unwrap_or_else(|| {
        let unknown = words.iter().find(|word| of(word).is_none()).map_or("", String::as_str);
        let known = WORDS.map(|(letter, words)| format!("{:?} ({letter})", words[0])).join(", ");
        f.refuse(field, format!("has {unknown:?}; supported are {known}"));
        otherwise
    })
}
