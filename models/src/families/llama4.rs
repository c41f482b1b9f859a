//! Llama 4 (text): attention within chunks of positions in the layers that rotate, over all of them in the others, whose queries grow
//! with their positions; experts that read what a token weighs in some or all layers, and beside them one that sees every token.

use super::Family;
use super::parts::{
    Missing, attention, chosen_or, expert, gated, heads, kinds, layer_numbers, no_rope, null_derived, only_silu,
    pre_norm, push, rope, softmax_experts_of,
};
use super::smollm3::rotates;
use crate::config::{Config, IMAGES};
use crate::fields::Fields;
use crate::layers::heads::{NormOf, QkNorm, Rope};
use crate::layers::moe::{self, ExpertNames, Stacked, Weighs};
use crate::layers::{LayerPlan, attend, attention, mlp};
use crate::rotary::{Growth, Rotary, Scaling};
use samebits_ops::{ChosenBy, Pairing, Scoring};
use serde_json::Value;

pub(super) const FAMILY: Family = Family { nested: Some("llama4"), ..Family::of("llama4_text", read) };

/// The experts: `gate_up_proj[E,hidden,2F]`, of which the first half of the columns are gates, and `down_proj[E,F,hidden]`.
const EXPERTS: Stacked = Stacked {
    names: ["feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"],
    ends: ["", ""],
    transposed: true,
    takes_turns: false,
};

fn read(c: &mut Config, f: &Fields, layers: usize) {
    only_silu(f);
    c.unused = &[("vision_model.", IMAGES), ("multi_modal_projector.", IMAGES)];
    let dim = if f.has("head_dim") { Missing::Derived } else { Missing::Refused };
    let heads = heads(c, f, null_derived(f), dim);
    let bias = f.flag("attention_bias", false);
    let rotates = rotates(f, layers);
    let words: [&[&str]; 2] = [&["chunked_attention"], &["full_attention"]];
    let chunks = chunks(f, kinds(f, "layer_types", layers, words, true).unwrap_or_else(|| rotates.clone()));
    let turning = Rope { pairing: Pairing::Interleaved, ..rope(c, f, heads.key_dim, Some(500_000.0)) };
    let still = no_rope(c, heads.key_dim);
    let growing = growth(f).map(|growth| {
        push(c, Rotary { dim: heads.key_dim, scaling: Scaling::Zero, growth: Some(growth), ..Rotary::default() }).table
    });
    // Behind the rotation, with the eps of all norms.
    let norm = QkNorm { norm: c.norms, of: NormOf::Head, behind: true, weights: false };
    let norm = Some(norm).filter(|_| f.flag("use_qk_norm", true));
    let sparse = sparse(f, layers);
    let experts = sparse.contains(&true).then(|| LayerPlan::Moe(experts(c, f)));
    let names = mlp::Names::Each(["feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj"]);
    let dense = sparse
        .contains(&false)
        .then(|| LayerPlan::Mlp(mlp::Plan { names, ..gated(c, f.required_size("intermediate_size_mlp")) }));
    // Of the two kinds a model may have one alone.
    f.unread(&["intermediate_size", "intermediate_size_mlp", "num_local_experts", "num_experts_per_tok"]);
    let block = |i: usize| {
        let plan = attention(c, attend::Heads { chunk: chunks[i], ..heads.clone() }, turning);
        let mixer = match rotates[i] {
            true => attention::Plan { norm, ..plan },
            false => attention::Plan { rope: still, q_table: growing, ..plan },
        };
        let mixer = LayerPlan::Attention(attention::Plan { bias, o_bias: bias, ..mixer });
        let layer = if sparse[i] { &experts } else { &dense };
        pre_norm(mixer, layer.clone().expect("there is one of each kind that a layer is of"))
    };
    c.blocks = (0..layers).map(block).collect();
}

/// The chunk of each layer that has one.
fn chunks(f: &Fields, chunked: Vec<bool>) -> Vec<Option<usize>> {
    let field = "attention_chunk_size";
    let size = f.size(field).or((!f.has(field)).then_some(8192));
    if size.is_none() && chunked.contains(&true) {
        f.refuse(field, "is null, but layers attend within chunks; write how many positions one has");
    }
    chunked.into_iter().map(|chunked| size.filter(|_| chunked)).collect()
}

/// How queries grow in the layers that do not rotate. The switch was once a number.
fn growth(f: &Fields) -> Option<Growth> {
    let field = "attn_temperature_tuning";
    let tuned = match f.get(field) {
        Some(Value::Number(number)) => number.as_f64() != Some(0.0),
        _ => f.flag(field, true),
    };
    let (original, beta) = (f.size("floor_scale").unwrap_or(8192), f.positive("attn_scale").unwrap_or(0.1));
    tuned.then_some(Growth { beta, original, first: 1 })
}

/// Which layers have experts: those of `moe_layers`, else every `interleave_moe_layer_step`-th.
fn sparse(f: &Fields, layers: usize) -> Vec<bool> {
    let step = f.size("interleave_moe_layer_step").unwrap_or(1);
    let by_step = |i: usize| step > 0 && (i + 1).is_multiple_of(step);
    match layer_numbers(f, "moe_layers") {
        Some(numbers) => (0..layers).map(|i| numbers.contains(&(i as u64))).collect(),
        None => (0..layers).map(by_step).collect(),
    }
}

fn experts(c: &Config, f: &Fields) -> moe::Plan {
    let (count, width) = (f.required_size("num_local_experts"), f.required_size("intermediate_size"));
    let names = moe::Names { block: "feed_forward", router: "router", experts: ExpertNames::Stacked(EXPERTS) };
    moe::Plan {
        scoring: Scoring::Sigmoid,
        chosen_by: ChosenBy::Logits,
        weighs: Weighs::Inputs,
        shared: Some(moe::Shared::of(expert(c, width), "shared_expert")),
        names,
        ..softmax_experts_of(count, chosen_or(f, count, 1), expert(c, width), false)
    }
}
