//! Mixtral: a mixture of experts in every layer.

use super::Family;
use super::parts::{Missing, attention, expert, heads, only_silu, pre_norm, rope, softmax_experts};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::{LayerPlan, attend, mlp, moe};

pub(super) const FAMILY: Family = Family::of("mixtral", read);

fn read(c: &mut Config, f: &Fields, layers: usize) {
    only_silu(f);
    let heads = heads(c, f, Missing::Refused, Missing::Derived);
    let heads = attend::Heads { window: f.size("sliding_window"), ..heads };
    let width = f.required_size("intermediate_size");
    let expert = mlp::Plan { names: mlp::Names::Each(["w1", "w3", "w2"]), ..expert(c, width) };
    let experts = softmax_experts(f, f.required_size("num_local_experts"), expert, true);
    let experts = moe::Plan { names: moe::Names { block: "block_sparse_moe", ..moe::Names::PLAIN }, ..experts };
    let rope = rope(c, f, heads.key_dim, Some(1_000_000.0));
    c.blocks = vec![pre_norm(LayerPlan::Attention(attention(c, heads, rope)), LayerPlan::Moe(experts)); layers];
}
