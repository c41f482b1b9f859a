//! What the files of families have in common.

use crate::config::Config;
use crate::fields::Fields;
use crate::files::FLOAT;
use crate::layers::branch::{self, Beside, Place, Reads};
use crate::layers::heads::{NormOf, QkNorm, Rope};
use crate::layers::mamba2::Gate;
use crate::layers::mlp::Activation;
use crate::layers::moe::Weighs;
use crate::layers::{LayerPlan, attend, attention, mamba2, mlp, moe, values};
pub(super) use crate::rotary::Asked;
use crate::rotary::{Rotary, Scaling};
use samebits_ops::{Activation as Ungated, ChosenBy, GroupWorth, Pairing, Scoring};
use serde_json::{Value, json};

/// What a folder gets that does not say a size.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Missing {
    /// What follows from the others, as the family's code has it.
    Derived,
    /// An error: the family's own default has nothing to do with its sizes, so the folder is ambiguous.
    Refused,
}

/// What stands for `num_key_value_heads` where null means as many as query heads, and the family's own default has nothing to do with them.
pub(super) fn null_derived(f: &Fields) -> Missing {
    if f.has("num_key_value_heads") { Missing::Derived } else { Missing::Refused }
}

/// Refuses every activation but silu.
pub(super) fn only_silu(f: &Fields) {
    f.only("hidden_act", &[json!("silu"), json!("swish")]);
}

/// The activation of an MLP without a gate, which `field` names; `otherwise` where it is missing.
pub(super) fn activation(f: &Fields, field: &str, otherwise: Ungated) -> Ungated {
    const KNOWN: [(Ungated, &[&str]); 3] = [
        (Ungated::Gelu, &["gelu", "gelu_python"]),
        (Ungated::GeluTanh, &["gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate"]),
        (Ungated::Relu2, &["relu2"]),
    ];
    let Some(value) = f.get(field) else { return otherwise };
    let known = KNOWN.iter().find(|(_, names)| names.iter().any(|name| value == name));
    known.map(|(activation, _)| *activation).unwrap_or_else(|| {
        let names: Vec<&str> = KNOWN.iter().flat_map(|(_, names)| names.iter().copied()).collect();
        f.refuse(field, format!("is {value}; supported are {}", names.join(", ")));
        otherwise
    })
}

/// As many key heads as query heads, which share the width of the residual stream.
pub(super) fn heads_of_width(c: &Config, f: &Fields) -> attend::Heads {
    let queries = f.required_size("num_attention_heads");
    let dim = c.hidden.checked_div(queries).unwrap_or(0);
    if queries > 0 && dim * queries != c.hidden {
        f.refuse("num_attention_heads", format!("is {queries}; it must divide hidden_size {}", c.hidden));
    }
    let scale = 1.0 / (dim as f64).sqrt();
    attend::Heads {
        queries,
        keys: queries,
        key_dim: dim,
        value_dim: dim,
        scale,
        softcap: None,
        window: None,
        chunk: None,
    }
}

/// Heads that all have projections of their own; what stands for `num_key_value_heads` and `head_dim` where they are missing.
pub(super) fn heads(c: &Config, f: &Fields, kv: Missing, dim: Missing) -> attend::Heads {
    let queries = f.required_size("num_attention_heads");
    let keys = match f.size("num_key_value_heads") {
        Some(heads) => heads,
        None if kv == Missing::Derived => queries,
        None => f.required_size("num_key_value_heads"),
    };
    if keys > 0 && !queries.is_multiple_of(keys) {
        let why = format!("is {keys}; it must divide num_attention_heads {queries}");
        f.refuse("num_key_value_heads", why);
    }
    let dim = match f.size("head_dim") {
        Some(dim) => dim,
        None if dim == Missing::Refused => f.required_size("head_dim"),
        None if queries == 0 => 0,
        None if c.hidden.is_multiple_of(queries) => c.hidden / queries,
        None => {
            let why = format!("is {queries}; without head_dim it must divide hidden_size {}", c.hidden);
            f.refuse("num_attention_heads", why);
            0
        }
    };
    let scale = 1.0 / (dim as f64).sqrt();
    attend::Heads { queries, keys, key_dim: dim, value_dim: dim, scale, softcap: None, window: None, chunk: None }
}

/// How whole heads are rotated; `theta` is the base where the folder says none, and must be said without.
pub(super) fn rope(c: &mut Config, f: &Fields, dim: usize, theta: Option<f64>) -> Rope {
    push(c, crate::rotary::read(f, asked(c, dim, theta)))
}

/// The same, where only a first part of a head may be rotated: this share where the folder says none.
pub(super) fn partial_rope(c: &mut Config, f: &Fields, dim: usize, theta: Option<f64>, share: f64) -> Rope {
    push(c, crate::rotary::read(f, Asked { partial: Some(share), ..asked(c, dim, theta) }))
}

/// The same, whose base may be stretched once and for all.
pub(super) fn stretched_rope(c: &mut Config, f: &Fields, dim: usize, theta: Option<f64>) -> Rope {
    push(c, crate::rotary::read(f, Asked { stretched: true, ..asked(c, dim, theta) }))
}

/// How layers of one type rotate; `field` is the older name of their base, `theta` its default.
pub(super) fn rope_of_kind(c: &mut Config, f: &Fields, dim: usize, kind: &str, field: &str, theta: f64) -> Rope {
    push(c, crate::rotary::read(f, Asked { of: Some([kind, field]), ..asked(c, dim, Some(theta)) }))
}

/// No rotation.
pub(super) fn no_rope(c: &mut Config, dim: usize) -> Rope {
    push(c, Rotary { dim, scaling: Scaling::Zero, ..Rotary::default() })
}

pub(super) fn asked<'a>(c: &Config, head_dim: usize, theta: Option<f64>) -> Asked<'a> {
    Asked {
        head_dim,
        partial: None,
        renamed: false,
        stretched: false,
        grows: false,
        mscales: false,
        grids: false,
        theta,
        max_positions: c.max_positions,
        of: None,
    }
}

/// One more rotation.
pub(super) fn push(c: &mut Config, rotary: Rotary) -> Rope {
    // The published length is that of the training; these scalings are there to go beyond it.
    let stretch = match rotary.scaling {
        Scaling::Linear { factor } | Scaling::Proportional { factor, .. } | Scaling::Dynamic { factor, .. } => {
            c.max_positions as f64 * factor
        }
        Scaling::Yarn { factor, original, .. } => original as f64 * factor,
        _ => 0.0,
    };
    c.max_positions = c.max_positions.max(stretch.min(f64::from(i32::MAX)) as usize);
    let rope = Rope { table: c.rotary.len(), dim: rotary.dim, pairing: Pairing::Half };
    c.rotary.push(rotary);
    rope
}

/// An attention without norms and biases, by the names that most families have.
pub(super) fn attention(c: &Config, heads: attend::Heads, rope: Rope) -> attention::Plan {
    let names = attention::Names::PLAIN;
    attention::Plan {
        hidden: c.hidden,
        heads,
        rope,
        q_table: None,
        norm: None,
        bias: false,
        o_bias: false,
        sinks: None,
        gate: false,
        values: values::Plan::PLAIN,
        lender: None,
        names,
    }
}

/// A gated MLP of this width, by the names that most families have.
pub(super) fn gated(c: &Config, width: usize) -> mlp::Plan {
    let names = mlp::Names::PLAIN;
    mlp::Plan { hidden: c.hidden, width, activation: Activation::Silu, gate_factor: None, bias: false, names }
}

/// An MLP without a gate of this width, whose matrices have these names.
pub(super) fn ungated(c: &Config, width: usize, activation: Ungated, names: [&'static str; 2]) -> mlp::Plan {
    mlp::Plan { activation: Activation::Ungated(activation), names: mlp::Names::Ungated(names), ..gated(c, width) }
}

/// An expert of this width.
pub(super) fn expert(c: &Config, width: usize) -> mlp::Plan {
    mlp::Plan { names: mlp::Names::OF_EXPERT, ..gated(c, width) }
}

/// The norm of each query and key head.
pub(super) fn head_norms(c: &Config) -> Option<QkNorm> {
    Some(QkNorm { norm: c.norms, of: NormOf::Head, behind: false, weights: true })
}

/// The norms of whole queries and keys.
pub(super) fn row_norms(c: &Config) -> Option<QkNorm> {
    Some(QkNorm { norm: c.norms, of: NormOf::Row, behind: false, weights: true })
}

/// A block of two branches with a norm behind each layer: `x + norm(mixer(x))`, then `x + norm(mlp(x))`.
pub(super) fn behind(mixer: LayerPlan, mlp: LayerPlan) -> Vec<branch::Plan> {
    let branch = |place, layer, behind| branch::Plan {
        place,
        before: None,
        layer,
        behind: Some(behind),
        factor: None,
        beside: None,
        ahead: None,
    };
    vec![branch(Place::Mixer, mixer, "post_attention_layernorm"), branch(Place::Mlp, mlp, "post_feedforward_layernorm")]
}

/// A block of two branches with a norm before and behind each layer.
pub(super) fn sandwich(mixer: LayerPlan, mlp: LayerPlan) -> Vec<branch::Plan> {
    let branch = |place, before, layer, behind| branch::Plan {
        behind: Some(behind),
        ..branch::Plan::normed(place, before, layer)
    };
    vec![
        branch(Place::Mixer, "input_layernorm", mixer, "post_attention_layernorm"),
        branch(Place::Mlp, "pre_feedforward_layernorm", mlp, "post_feedforward_layernorm"),
    ]
}

/// A block of two branches, each behind a norm: `x + mixer(norm(x))`, then `x + mlp(norm(x))`.
pub(super) fn pre_norm(mixer: LayerPlan, mlp: LayerPlan) -> Vec<branch::Plan> {
    let normed = branch::Plan::normed;
    vec![normed(Place::Mixer, "input_layernorm", mixer), normed(Place::Mlp, "post_attention_layernorm", mlp)]
}

/// A block of one branch: `x + (mixer(norm(x)) + mlp(norm(x)))`, the MLP by the same norm or by one of its own.
pub(super) fn parallel(mixer: LayerPlan, mlp: LayerPlan, own: Option<&'static str>) -> Vec<branch::Plan> {
    vec![branch::Plan {
        place: Place::Whole,
        before: Some("input_layernorm"),
        layer: mixer,
        behind: None,
        factor: None,
        beside: Some(Beside { reads: own.map_or(Reads::Same, Reads::Normed), layer: mlp, factors: None, behind: None }),
        ahead: None,
    }]
}

/// Which layers attend, by `layer_types`, whose words for those that do and for the others stand with the usual one first; `None`
/// where they are not given. Where one is refused, all are `otherwise`.
pub(super) fn attends(f: &Fields, layers: usize, words: [&[&str]; 2], otherwise: bool) -> Option<Vec<bool>> {
    kinds(f, "layer_types", layers, words, otherwise)
}

/// The same of a field of any name.
pub(super) fn kinds(f: &Fields, field: &str, layers: usize, words: [&[&str]; 2], otherwise: bool) -> Option<Vec<bool>> {
    let types = f.get(field)?;
    let Some(types) = types.as_array().filter(|types| types.len() == layers) else {
        f.refuse(field, format!("is not a list of {layers} layer types"));
        return Some(vec![otherwise; layers]);
    };
    let attends = |(i, kind): (usize, &Value)| {
        let is = |words: &[&str]| kind.as_str().is_some_and(|kind| words.contains(&kind));
        if !is(words[0]) && !is(words[1]) {
            let why = format!("is {kind}; supported are {:?} and {:?}", words[1][0], words[0][0]);
            f.refuse(format!("{field}[{i}]"), why);
            return otherwise;
        }
        is(words[0])
    };
    Some(types.iter().enumerate().map(attends).collect())
}

/// The window of each layer: by `layer_types` where they are given, else of those that are `windowed`.
pub(super) fn windows(
    f: &Fields,
    layers: usize,
    window: Option<usize>,
    windowed: impl Fn(usize) -> bool,
) -> Vec<Option<usize>> {
    let otherwise = || (0..layers).map(|i| window.filter(|_| windowed(i))).collect();
    let Some(value) = f.get("layer_types") else { return otherwise() };
    let Some(types) = value.as_array() else {
        f.refuse("layer_types", "is not a list of layer types");
        return otherwise();
    };
    if types.len() != layers {
        if layers > 0 {
            f.refuse("layer_types", format!("has {} entries; num_hidden_layers is {layers}", types.len()));
        }
        return otherwise();
    }
    let of = |i: usize, kind: &Value| match (kind.as_str(), window) {
        (Some("full_attention"), _) => Ok(None),
        (Some("sliding_attention"), Some(_)) => Ok(window),
        (Some("sliding_attention"), None) => {
            Err((i, "is \"sliding_attention\", but there is no sliding_window in use".to_string()))
        }
        _ => Err((i, format!("is {kind}; supported are \"full_attention\" and \"sliding_attention\""))),
    };
    let read: Result<Vec<_>, _> = types.iter().enumerate().map(|(i, kind)| of(i, kind)).collect();
    read.unwrap_or_else(|(i, why)| {
        f.refuse(format!("layer_types[{i}]"), why);
        otherwise()
    })
}

/// The first of `names` that is there, as a size.
pub(super) fn first_size(f: &Fields, names: &[&str]) -> usize {
    let found = names.iter().fold(None, |found, name| found.or_else(|| f.size(name)));
    found.unwrap_or_else(|| f.required_size(names[0]))
}

/// `num_experts_per_tok`, at most `count`.
pub(super) fn chosen(f: &Fields, count: usize) -> usize {
    within(f, count, f.required_size("num_experts_per_tok"))
}

/// The same, where the family has a default.
pub(super) fn chosen_or(f: &Fields, count: usize, default: usize) -> usize {
    within(f, count, f.size("num_experts_per_tok").unwrap_or(default))
}

fn within(f: &Fields, count: usize, chosen: usize) -> usize {
    if count > 0 && chosen > count {
        f.refuse("num_experts_per_tok", format!("is {chosen}; there are {count} experts"));
    }
    chosen
}

/// `n_group` and `topk_group` of `count` experts, 1 where the folder does not say.
pub(super) fn groups(f: &Fields, count: usize) -> (usize, usize) {
    let [groups, top_groups] = ["n_group", "topk_group"].map(|field| f.size(field).unwrap_or(1));
    if groups > 0 && !count.is_multiple_of(groups) {
        f.refuse("n_group", format!("is {groups}; it must divide n_routed_experts {count}"));
    }
    (groups, top_groups)
}

/// A mixture of `count` experts by softmax scores, without groups and shared experts.
pub(super) fn softmax_experts(f: &Fields, count: usize, expert: mlp::Plan, normalise: bool) -> moe::Plan {
    softmax_experts_of(count, chosen(f, count), expert, normalise)
}

/// The same, of which so many are chosen.
pub(super) fn softmax_experts_of(count: usize, chosen: usize, expert: mlp::Plan, normalise: bool) -> moe::Plan {
    moe::Plan {
        count,
        chosen,
        expert,
        latent: None,
        shared: None,
        router_bias: false,
        scoring: Scoring::Softmax,
        chosen_by: ChosenBy::Scores,
        choice_bias: None,
        groups: 1,
        top_groups: 1,
        group_worth: GroupWorth::Max,
        normalise,
        scale: 1.0,
        weighs: Weighs::Outputs,
        forms: None,
        expert_scale: None,
        names: moe::Names::PLAIN,
    }
}

/// Refuses groups that do not hold the experts of a token.
pub(super) fn groups_hold(f: &Fields, experts: &moe::Plan) {
    let &moe::Plan { count, chosen, groups, top_groups, .. } = experts;
    let held = top_groups.saturating_mul(count / groups.max(1));
    let known = count > 0 && groups > 0 && top_groups > 0;
    if known && (top_groups > groups || held < chosen) {
        let why = format!("is {top_groups}; of {groups} groups it must hold num_experts_per_tok {chosen}");
        f.refuse("topk_group", why);
    }
}

/// What is behind the mixer of each layer: a dense MLP in the first `first_k_dense_replace`, experts in the others.
pub(super) fn dense_first(f: &Fields, layers: usize, experts: &moe::Plan, dense: &mlp::Plan) -> Vec<LayerPlan> {
    groups_hold(f, experts);
    let first = f.size_or_zero("first_k_dense_replace");
    let of = |i| if i < first { LayerPlan::Mlp(dense.clone()) } else { LayerPlan::Moe(experts.clone()) };
    (0..layers).map(of).collect()
}

/// A list of layer numbers, where the folder has it; what is none is refused.
pub(super) fn layer_numbers(f: &Fields, field: &str) -> Option<Vec<u64>> {
    let value = f.get(field)?;
    let numbers = value.as_array().and_then(|list| list.iter().map(Value::as_u64).collect());
    if numbers.is_none() {
        f.refuse(field, format!("is {value}; it must be a list of layer numbers"));
    }
    numbers
}

/// Which layers have experts: every `decoder_sparse_step`-th, but those in `mlp_only_layers`.
pub(super) fn sparse_by_step(f: &Fields, layers: usize) -> Vec<bool> {
    let step = f.size("decoder_sparse_step").unwrap_or(1);
    let dense = layer_numbers(f, "mlp_only_layers").unwrap_or_default();
    (0..layers).map(|i| (i + 1).is_multiple_of(step) && !dense.contains(&(i as u64))).collect()
}

/// Qwen's windows: of the layers from `max_window_layers` on, where `use_sliding_window` switches them on.
pub(super) fn switched_windows(f: &Fields, layers: usize) -> Vec<Option<usize>> {
    let window = if f.flag("use_sliding_window", false) { f.size("sliding_window") } else { None };
    // Without the switch, the family's code drops the window.
    f.unread(&["sliding_window"]);
    let first = f.get("max_window_layers").map_or(28, |_| f.size_or_zero("max_window_layers"));
    windows(f, layers, window, |i| i >= first)
}

/// A scan of Mamba-2 by the fields and names that hybrid models have.
pub(super) fn scan(c: &Config, f: &Fields) -> mamba2::Plan {
    let size = |field, default| f.size(field).unwrap_or(default);
    let inner = c.hidden.saturating_mul(size("mamba_expand", 2));
    scan_of(c, f, inner, "hidden_size times mamba_expand")
}

/// The same with heads that have `inner` elements together, as `what` says.
pub(super) fn scan_of(c: &Config, f: &Fields, inner: usize, what: &str) -> mamba2::Plan {
    let size = |field, default| f.size(field).unwrap_or(default);
    let (heads, groups) = (size("mamba_n_heads", 128), size("mamba_n_groups", 1));
    let auto = f.get("mamba_d_head").is_none_or(|value| value == "auto");
    let head_dim = if auto { inner.checked_div(heads).unwrap_or(0) } else { f.required_size("mamba_d_head") };
    if heads.checked_mul(head_dim) != Some(inner) {
        let why = format!("is {heads}; times mamba_d_head {head_dim} it must be {what}, {inner}");
        f.refuse("mamba_n_heads", why);
    }
    if groups > 0 && !heads.is_multiple_of(groups) {
        f.refuse("mamba_n_groups", format!("is {groups}; it must divide mamba_n_heads {heads}"));
    }
    // How many positions a kernel takes at once.
    f.unread(&["mamba_chunk_size"]);
    mamba2::Plan {
        name: "mamba",
        hidden: c.hidden,
        heads,
        head_dim,
        groups,
        state_dim: size("mamba_d_state", 256),
        taps: size("mamba_d_conv", 4),
        bias: [f.flag("mamba_proj_bias", false), f.flag("mamba_conv_bias", true)],
        limits: limits(f),
        factors: None,
        gate: Gate::ThenNorm,
        norm: c.norms,
        norm_groups: groups,
    }
}

/// The shortest and the longest step of `time_step_limit`; 0 where there is no longest.
pub(super) fn limits(f: &Fields) -> [f64; 2] {
    let field = "time_step_limit";
    let Some(value) = f.get(field) else { return [0.0; 2] };
    let number = |value: &Value| match value.get(FLOAT) {
        Some(word) => word.as_str().filter(|word| *word == "Infinity").map(|_| f64::INFINITY),
        None => value.as_f64(),
    };
    let limits = match value.as_array().map(|list| &list[..]) {
        Some([min, max]) => number(min).zip(number(max)),
        _ => None,
    };
    match limits.filter(|(min, max)| (0.0..=1e38).contains(min) && max >= min && *max > 0.0) {
        Some((min, max)) if max > 1e38 => [min, 0.0],
        Some((min, max)) => [min, max],
        None => {
            f.refuse(field, format!("is {value}; it must be two numbers of 0 or more that ascend"));
            [0.0; 2]
        }
    }
}
