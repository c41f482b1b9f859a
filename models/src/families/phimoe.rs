//! Phi-3.5-MoE: layer norms, biases, also of the output projection, long rotary positions, two experts for each token by sparsemixer.

use super::Family;
use super::parts::{
    Missing, asked, attention, expert, heads, null_derived, only_silu, pre_norm, push, softmax_experts_of,
};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::norm::Kind;
use crate::layers::{LayerPlan, attend, attention, mlp, moe};
use crate::rotary::{self, Asked};
use samebits_ops::Scoring;

pub(super) const FAMILY: Family = Family::of("phimoe", read);

fn read(c: &mut Config, f: &Fields, layers: usize) {
    only_silu(f);
    c.norms.kind = Kind::Layer { bias: true };
    let heads = heads(c, f, null_derived(f), Missing::Derived);
    let heads = attend::Heads { window: f.size("sliding_window"), ..heads };
    let bias = f.flag("attention_bias", false);
    c.head_bias = f.flag("lm_head_bias", false);
    if c.head_bias && c.tied {
        f.refuse("lm_head_bias", "is true; with tie_word_embeddings it must be false");
    }
    let asked = asked(c, heads.key_dim, Some(1_000_000.0));
    let rotary = rotary::read(f, Asked { mscales: true, ..asked });
    if !matches!(rotary.scaling, rotary::Scaling::Default | rotary::Scaling::Long { .. }) {
        let kind = f
            .object("rope_parameters")
            .or(f.object("rope_scaling"))
            .and_then(|map| map.get("rope_type").or(map.get("type")));
        let kind = kind.map_or("another".into(), ToString::to_string);
        f.refuse("rope_parameters.rope_type", format!("is {kind}; supported are \"default\" and \"longrope\""));
    }
    let rope = push(c, rotary);
    let mixer = attention::Plan { bias, o_bias: bias, ..attention(c, heads, rope) };
    // Its code takes two, whatever the folder says.
    f.only("num_experts_per_tok", &[2.into()]);
    let count = f.required_size("num_local_experts");
    if count == 1 {
        f.refuse("num_local_experts", "is 1; two are chosen");
    }
    let expert = expert(c, f.required_size("intermediate_size"));
    let expert = mlp::Plan { names: mlp::Names::Each(["w1", "w3", "w2"]), ..expert };
    let names = moe::Names { block: "block_sparse_moe", ..moe::Names::PLAIN };
    let experts = softmax_experts_of(count, 2, expert, false);
    let experts = moe::Plan { scoring: Scoring::SparseMixer { jitter: jitter(f) }, names, ..experts };
    // What training adds to what experts read.
    f.unread(&["input_jitter_noise"]);
    c.blocks = vec![pre_norm(LayerPlan::Attention(mixer), LayerPlan::Moe(experts)); layers];
}

/// How far below the chosen logit others count for its weight.
fn jitter(f: &Fields) -> f64 {
    let field = "router_jitter_noise";
    let Some(value) = f.get(field) else { return 0.01 };
    value.as_f64().filter(|jitter| (0.0..1e38).contains(jitter)).unwrap_or_else(|| {
        f.refuse(field, format!("is {value}; it must be a number of at least 0"));
        0.0
    })
}
