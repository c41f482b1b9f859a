//! Nemotron-H and Nemotron 3: blocks of one branch each: a scan of Mamba-2, an attention that does not rotate, an MLP without a
//! gate, or experts that are such MLPs.

use super::Family;
use super::deepseek_v3::sigmoid_experts;
use super::parts::{
    Missing, activation, attention, chosen_or, groups, groups_hold, heads, no_rope, null_derived, softmax_experts_of,
    ungated,
};
use crate::config::{Config, FURTHER};
use crate::fields::Fields;
use crate::layers::attention::{Names, QkvNames};
use crate::layers::branch::{self, Place};
use crate::layers::mamba2::Gate;
use crate::layers::{LayerPlan, attend, attention, mamba2, mlp, moe};
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

/// The place in [`WORDS`] of experts.
const EXPERTS: usize = 3;

/// The letter of each kind and its words, the usual one first.
const WORDS: [(&str, &[&str]); 4] =
    [("M", &["linear_attention", "mamba"]), ("*", &["full_attention", "attention"]), ("-", &["mlp"]), ("E", &["moe"])];

fn read(c: &mut Config, f: &Fields, layers: usize) {
    f.only("mamba_hidden_act", &[json!("silu"), json!("swish")]);
    // The family's code has no such head, and no such biases.
    f.only("tie_word_embeddings", &[json!(false)]);
    f.only("attention_bias", &[json!(false)]);
    c.unused = &[("mtp.", FURTHER)];
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

    let activation = activation(f, "mlp_hidden_act", Activation::Relu2);
    let mlp_bias = f.flag("mlp_bias", false);
    let without_gate = |width, names| mlp::Plan { bias: mlp_bias, ..ungated(c, width, activation, names) };
    let mlp = without_gate(f.required_size("intermediate_size"), ["mixer.up_proj", "mixer.down_proj"]);
    let mlp = normed(Place::Mlp, LayerPlan::Mlp(mlp));
    let kinds = kinds(f, layers);

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
    // Layers that predict further tokens.
    f.unread(&["num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern"]);
    f.unread(&["partial_rotary_factor", "rope_theta", "rope_parameters", "rope_scaling"]);

    let experts = if kinds.contains(&EXPERTS) {
        let expert = |width| without_gate(width, ["up_proj", "down_proj"]);
        let experts = self::experts(c, f, &expert);
        normed(Place::Mlp, LayerPlan::Moe(experts))
    } else {
        f.unread(&["n_routed_experts", "n_shared_experts", "moe_intermediate_size", "moe_latent_size"]);
        f.unread(&["moe_shared_expert_intermediate_size", "num_experts_per_tok", "routed_scaling_factor"]);
        f.unread(&["n_group", "topk_group", "norm_topk_prob", "moe_shared_expert_overlap"]);
        Vec::new()
    };
    let blocks = [scan, attention, mlp, experts];
    c.blocks = kinds.into_iter().map(|kind| blocks[kind].clone()).collect();
}

/// Experts without a gate, by sigmoid scores, and one that sees every token.
fn experts(c: &Config, f: &Fields, expert: &dyn Fn(usize) -> mlp::Plan) -> moe::Plan {
    let size = |field, default| f.size(field).unwrap_or(default);
    let count = size("n_routed_experts", 8);
    // The family's code has one, whatever is said.
    f.only("n_shared_experts", &[json!(1)]);
    // Whether a device runs it beside the others.
    f.unread(&["moe_shared_expert_overlap"]);
    let [shared, width] =
        ["moe_shared_expert_intermediate_size", "moe_intermediate_size"].map(|field| size(field, 7688));
    let one = expert(width);
    let names = ["fc1_latent_proj", "fc2_latent_proj"];
    let latent =
        f.size("moe_latent_size").map(|width| (width, moe::Latent { hidden: c.hidden, bias: one.bias, names }));
    let one = mlp::Plan { hidden: latent.map_or(c.hidden, |(width, _)| width), bias: false, ..one };
    let (groups, top_groups) = groups(f, count);
    let plan = moe::Plan {
        latent: latent.map(|(_, latent)| latent),
        shared: Some(moe::Shared::of(expert(shared), "shared_experts")),
        groups,
        top_groups,
        scale: f.positive("routed_scaling_factor").unwrap_or(1.0),
        names: moe::Names { block: "mixer", ..moe::Names::PLAIN },
        ..softmax_experts_of(count, chosen_or(f, count, 2), one, false)
    };
    groups_hold(f, &plan);
    sigmoid_experts(f, plan, true)
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
