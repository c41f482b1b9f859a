//! Granite MoE: Granite with a mixture of experts in every layer, all of them in two tensors.

use super::Family;
use super::granite::block;
use super::parts::{expert, softmax_experts};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::LayerPlan;
use crate::layers::moe::{self, ExpertNames};

pub(super) const FAMILY: Family = Family::of("granitemoe", read);

fn read(c: &mut Config, f: &Fields, layers: usize) {
    let expert = expert(c, f.required_size("intermediate_size"));
    // The softmax of the chosen logits: that of all, divided by the sum of the chosen.
    let experts = softmax_experts(f, f.required_size("num_local_experts"), expert, true);
    let stacked = ExpertNames::Stacked(moe::Stacked::modules([
        "block_sparse_moe.input_linear",
        "block_sparse_moe.output_linear",
    ]));
    let names = moe::Names { block: "block_sparse_moe", router: "router.layer", experts: stacked };
    c.blocks = vec![block(c, f, LayerPlan::Moe(moe::Plan { names, ..experts })); layers];
}
