//! DeepSeek V3: V2 with sigmoid routing and a bias on the choice.

use super::Family;
use super::deepseek_v2::{latent, shared_experts};
use super::parts::{dense_first, gated, only_silu, pre_norm};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::{LayerPlan, moe};
use samebits_ops::{GroupWorth, Pairing, Scoring};
use serde_json::json;

pub(super) const FAMILY: Family = Family::of("deepseek_v3", read);

fn read(c: &mut Config, f: &Fields, layers: usize) {
    only_silu(f);
    f.present(&["q_lora_rank", "n_group", "topk_group", "first_k_dense_replace", "routed_scaling_factor"]);
    let pairing = if f.flag("rope_interleave", true) { Pairing::Interleaved } else { Pairing::Half };
    c.extra_layers = f.size_or_zero("num_nextn_predict_layers");
    let mixer = latent(c, f, pairing);
    let experts = sigmoid_experts(f, shared_experts(c, f), true);
    let dense = gated(c, f.required_size("intermediate_size"));
    let block = |mlp| pre_norm(LayerPlan::LatentAttention(mixer.clone()), mlp);
    c.blocks = dense_first(f, layers, &experts, &dense).into_iter().map(block).collect();
}

/// These experts by sigmoid scores, chosen with a bias; `normalise` where the folder does not say.
pub(super) fn sigmoid_experts(f: &Fields, experts: moe::Plan, normalise: bool) -> moe::Plan {
    f.only("scoring_func", &[json!("sigmoid")]);
    f.only("topk_method", &[json!("noaux_tc")]);
    let (count, groups) = (experts.count, experts.groups);
    if groups > 1 && count > 0 && count / groups < 2 {
        f.refuse("n_group", format!("is {groups}; a group needs two of the {count} experts"));
    }
    moe::Plan {
        scoring: Scoring::Sigmoid,
        choice_bias: Some(moe::ChoiceBias::PLAIN),
        group_worth: GroupWorth::TopTwo,
        normalise: f.flag("norm_topk_prob", normalise),
        ..experts
    }
}
