//! gpt-oss: sinks in the softmax of attention, windows in every other layer, experts with biases and a gated activation within
//! limits in every layer. Published folders store the experts as MXFP4.

use super::Family;
use super::parts::{Missing, attention, expert, heads, only_silu, pre_norm, rope, softmax_experts, windows};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::mlp::Activation;
use crate::layers::moe::{self, ExpertNames, Stacked};
use crate::layers::{LayerPlan, attend, attention, mlp};
use samebits_ops::Clamp;

pub(super) const FAMILY: Family = Family { mxfp4: true, ..Family::of("gpt_oss", read) };

/// The experts: `gate_up_proj[E,hidden,2F]`, whose columns are of gate and up in turns, and `gate_up_proj_bias[E,2F]`; the same of
/// `down_proj`.
const EXPERTS: Stacked = Stacked {
    names: ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    ends: ["", "_bias"],
    transposed: true,
    takes_turns: true,
};

fn read(c: &mut Config, f: &Fields, layers: usize) {
    only_silu(f);
    if f.get("rope_scaling").or(f.get("rope_parameters")).is_none() {
        f.refuse(
            "rope_parameters",
            "is missing; the family's code has a YaRN of its own then, so write down what is meant",
        );
    }
    let bias = f.flag("attention_bias", true);
    let heads = heads(c, f, Missing::Refused, Missing::Refused);
    let windows = windows(f, layers, Some(f.required_size("sliding_window")), |i| i.is_multiple_of(2));
    let rope = rope(c, f, heads.key_dim, Some(150_000.0));
    let clamp = Clamp {
        alpha: f.positive("swiglu_alpha").unwrap_or(1.702) as f32,
        limit: f.positive("swiglu_limit").unwrap_or(7.0) as f32,
    };
    let expert = mlp::Plan {
        activation: Activation::Clamped(clamp),
        bias: true,
        ..expert(c, f.required_size("intermediate_size"))
    };
    // The softmax of the chosen logits: that of all, divided by the sum of the chosen.
    let experts = softmax_experts(f, f.required_size("num_local_experts"), expert, true);
    let names = moe::Names { router: "router", experts: ExpertNames::Stacked(EXPERTS), ..moe::Names::PLAIN };
    let experts = moe::Plan { router_bias: true, names, ..experts };
    let block = |window| {
        let heads = attend::Heads { window, ..heads.clone() };
        let sinks = Some("self_attn.sinks");
        let mixer = attention::Plan { bias, o_bias: bias, sinks, ..attention(c, heads, rope) };
        pre_norm(LayerPlan::Attention(mixer), LayerPlan::Moe(experts.clone()))
    };
    c.blocks = windows.into_iter().map(block).collect();
}
