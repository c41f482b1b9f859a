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
use serde_json::{Value, json};

pub(super) const FAMILY: Family =
    Family { eps: "layer_norm_epsilon", counted: &[LIST, PATTERN], ..Family::of("nemotron_h", read) };

/// The kinds of the layers: a list of names, or a string of letters where that is missing.
const LIST: &str = "layers_block_type";
const PATTERN: &str = "hybrid_override_pattern";

/// The kind of a layer.
#[derive(Clone, Copy)]
enum Kind {
    Scan,
    Attention,
    Mlp,
}

/// The letter and the names of each.
const KINDS: [(Kind, &str, [&str; 2]); 3] = [
    (Kind::Scan, "M", ["linear_attention", "mamba"]),
    (Kind::Attention, "*", ["full_attention", "attention"]),
    (Kind::Mlp, "-", ["mlp", "mlp"]),
];

fn read(c: &mut Config, f: &Fields, layers: usize) {
    f.only("mamba_hidden_act", &[json!("silu"), json!("swish")]);
    // The family's code has no such head, and no such biases.
    f.only("tie_word_embeddings", &[json!(false)]);
    f.only("attention_bias", &[json!(false)]);
    (c.stack, c.table, c.final_norm) = ("backbone.layers", "backbone.embeddings", "backbone.norm_f");
    let size = |field, default| f.size(field).unwrap_or(default);

    let key_dim = size("head_dim", 128);
    if f.size("attention_head_dim").is_some_and(|older| older != key_dim) {
        f.refuse("attention_head_dim", format!("is not head_dim, {key_dim}, which is the one that is read"));
    }
    let heads = heads(c, f, null_derived(f), Missing::Derived);
    let heads = attend::Heads { key_dim, value_dim: key_dim, scale: 1.0 / (key_dim as f64).sqrt(), ..heads };
    let rope = no_rope(c, key_dim);
    let qkv = QkvNames::Each(["mixer.q_proj", "mixer.k_proj", "mixer.v_proj"]);
    let names = Names { qkv, o: "mixer.o_proj", ..Names::PLAIN };
    let attention = attention::Plan { names, ..attention(c, heads, rope) };

    let (width, activation) =
        (f.required_size("intermediate_size"), activation(f, "mlp_hidden_act", Activation::Relu2));
    let mlp = ungated(c, width, activation, ["mixer.up_proj", "mixer.down_proj"]);
    let mlp = ungated_mlp::Plan { bias: f.flag("mlp_bias", false), ..mlp };

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
        // The prefill of transformers reads the shortest step of an untrained model for that, and no longest one.
        limits: [f.positive("time_step_min").unwrap_or(0.001), 0.0],
        factors: None,
        gate: Gate::ThenNorm,
        norm: c.norms,
        norm_groups: groups,
    };
    f.unread(&["time_step_limit", "time_step_max", "time_step_floor", "time_step_rank", "mamba_proj_bias", "expand"]);
    f.unread(&["chunk_size", "residual_in_fp32", "rescale_prenorm_residual", "num_logits_to_keep", "rms_norm_eps"]);
    f.unread(&["use_mamba_kernels", "mamba_ssm_cache_dtype"]);

    let normed = |place, layer| vec![branch::Plan::normed(place, "norm", layer)];
    let block = |kind| match kind {
        Kind::Scan => normed(Place::Mixer, LayerPlan::Mamba2(scan.clone())),
        Kind::Attention => normed(Place::Mixer, LayerPlan::Attention(attention.clone())),
        Kind::Mlp => normed(Place::Mlp, LayerPlan::UngatedMlp(mlp.clone())),
    };
    c.blocks = kinds(f, layers).into_iter().map(block).collect();
}

/// The kind of each layer.
fn kinds(f: &Fields, layers: usize) -> Vec<Kind> {
    let otherwise = || vec![Kind::Scan; layers];
    let (list, pattern) = (f.get(LIST), f.get(PATTERN));
    let field = if list.is_some() { LIST } else { PATTERN };
    let words: Option<Vec<String>> = match (list, pattern) {
        (Some(list), _) => {
            list.as_array().and_then(|list| list.iter().map(|kind| kind.as_str().map(String::from)).collect())
        }
        (None, Some(pattern)) => pattern.as_str().map(|pattern| pattern.chars().map(String::from).collect()),
        (None, None) => {
            f.refuse(LIST, "is missing; it must be a list of the kinds of the layers");
            return otherwise();
        }
    };
    let Some(words) = words.filter(|words| words.len() == layers) else {
        let what = if field == LIST { "a list of layer types" } else { "a string of letters" };
        f.refuse(field, format!("is not {what} for {layers} layers"));
        return otherwise();
    };
    let of = |word: &String| KINDS.iter().find(|(_, letter, names)| word == letter || names.contains(&word.as_str()));
    let found: Option<Vec<Kind>> = words.iter().map(|word| of(word).map(|(kind, ..)| *kind)).collect();
    found.unwrap_or_else(|| {
        let unknown = words.iter().find(|word| of(word).is_none()).cloned();
        let known = KINDS.map(|(_, letter, [name, _])| format!("{name:?} ({letter})"));
        f.refuse(field, format!("has {}; supported are {}", Value::from(unknown), known.join(", ")));
        otherwise()
    })
}
