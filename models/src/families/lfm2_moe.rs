//! LFM2 with experts: short convolutions and attention as in LFM2, experts by sigmoid scores in all but the first layers.

use super::Family;
use super::lfm2::{blocks, dense};
use super::parts::{expert, softmax_experts};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::moe::{self, ChoiceBias};
use crate::layers::{LayerPlan, mlp};
use samebits_ops::Scoring;

pub(super) const FAMILY: Family = Family { eps: "norm_eps", tied: true, ..Family::of("lfm2_moe", read) };

fn read(c: &mut Config, f: &Fields, layers: usize) {
    let mlp = dense(c, f.required_size("intermediate_size"));
    let width = f.required_size("moe_intermediate_size");
    let expert = mlp::Plan { names: mlp::Names::Each(["w1", "w3", "w2"]), ..expert(c, width) };
    let bias = f.flag("use_expert_bias", true);
    let experts = moe::Plan {
        scoring: Scoring::Sigmoid,
        choice_bias: bias.then_some(ChoiceBias { name: "expert_bias", is_matrix: false }),
        scale: f.positive("routed_scaling_factor").unwrap_or(1.0),
        names: moe::Names { block: "feed_forward", ..moe::Names::PLAIN },
        ..softmax_experts(f, f.required_size("num_experts"), expert, f.flag("norm_topk_prob", true))
    };
    let first = f.get("num_dense_layers").map_or(2, |_| f.size_or_zero("num_dense_layers"));
    blocks(c, f, layers, |i| match i < first {
        true => LayerPlan::Mlp(mlp.clone()),
        false => LayerPlan::Moe(experts.clone()),
    });
}
