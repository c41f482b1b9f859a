//! Granite 4: scans of Mamba-2 and some attention, with the factors of Granite; with experts or without.

use super::Family;
use super::parts::{
    Missing, attends, attention, chosen_or, expert, gated, heads, no_rope, only_silu, pre_norm, rope, scan,
    softmax_experts_of,
};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::branch;
use crate::layers::head::Finish;
use crate::layers::moe::{self, ExpertNames, Shared};
use crate::layers::{LayerPlan, attend, attention, mlp};

pub(super) const FAMILY: Family = Family::of("granitemoehybrid", read);

fn read(c: &mut Config, f: &Fields, layers: usize) {
    only_silu(f);
    let heads = heads(c, f, Missing::Derived, Missing::Derived);
    let heads = attend::Heads { scale: f.positive("attention_multiplier").unwrap_or(1.0), ..heads };
    // Factors of 1 change no bit; these are products that need not be made.
    let factor = |field| f.positive(field).filter(|factor| *factor != 1.0);
    c.embed_scale = factor("embedding_multiplier");
    c.finish = factor("logits_scaling").map(|divisor| Finish::Scale(1.0 / divisor));
    let added = factor("residual_multiplier");
    let rope = match f.get("position_embedding_type").is_some_and(|kind| kind == "rope") {
        true => rope(c, f, heads.key_dim, Some(10_000.0)),
        false => {
            f.unread(&["rope_theta", "rope_scaling", "rope_parameters"]);
            no_rope(c, heads.key_dim)
        }
    };
    let bias = f.flag("attention_bias", false);
    let attention = attention::Plan { bias, o_bias: bias, ..attention(c, heads, rope) };
    let names = mlp::Names::Fused(["shared_mlp.input_linear", "shared_mlp.output_linear"]);
    let shared = mlp::Plan { names, ..gated(c, f.size("shared_intermediate_size").unwrap_or(1024)) };
    let count = f.get("num_local_experts").map_or(8, |_| f.size_or_zero("num_local_experts"));
    let mlp = match count {
        0 => {
            f.unread(&["num_experts_per_tok", "intermediate_size"]);
            LayerPlan::Mlp(shared)
        }
        _ => {
            let shared = Some(Shared { mlp: shared, name: None, gate: None });
            let expert = expert(c, f.size("intermediate_size").unwrap_or(11_008));
            let experts = ExpertNames::Stacked(moe::Stacked::modules([
                "block_sparse_moe.input_linear",
                "block_sparse_moe.output_linear",
            ]));
            let names = moe::Names { block: "block_sparse_moe", router: "router.layer", experts };
            let chosen = chosen_or(f, count, 2);
            LayerPlan::Moe(moe::Plan {
                shared: shared.map(Box::new),
                names,
                ..softmax_experts_of(count, chosen, expert, true)
            })
        }
    };
    let scan = scan(c, f);
    let block = |attends| {
        let mixer = match attends {
            true => LayerPlan::Attention(attention.clone()),
            false => LayerPlan::Mamba2(scan.clone()),
        };
        let block = pre_norm(mixer, mlp.clone()).into_iter();
        block.map(|branch| branch::Plan { factor: added, ..branch }).collect()
    };
    let words: [&[&str]; 2] = [&["attention", "full_attention"], &["mamba", "linear_attention"]];
    let attends = attends(f, layers, words, false).unwrap_or_else(|| vec![false; layers]);
    c.blocks = attends.into_iter().map(block).collect();
}
