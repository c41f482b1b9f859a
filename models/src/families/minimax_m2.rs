//! MiniMax-M2: norms of whole queries and keys, of whose heads a first part is rotated, experts by sigmoid scores in every
//! layer.

use super::Family;
use super::parts::{Missing, attention, expert, heads, only_silu, partial_rope, pre_norm, row_norms, softmax_experts};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::moe::{self, ChoiceBias};
use crate::layers::{LayerPlan, attention, mlp};
use samebits_ops::Scoring;
use serde_json::json;

pub(super) const FAMILY: Family = Family::of("minimax_m2", read);

fn read(c: &mut Config, f: &Fields, layers: usize) {
    only_silu(f);
    f.only("use_qk_norm", &[json!(true)]);
    f.only("scoring_func", &[json!("sigmoid")]);
    f.only("shared_intermediate_size", &[json!(0)]);
    c.extra_layers = f.size_or_zero("num_mtp_modules");
    let heads = heads(c, f, Missing::Refused, Missing::Refused);
    // The share of a head that is rotated, in elements, as published folders have it.
    let rotated = f.size("rotary_dim").filter(|_| heads.key_dim > 0);
    let share = rotated.map_or(1.0, |rotated| rotated as f64 / heads.key_dim as f64);
    let rope = partial_rope(c, f, heads.key_dim, Some(5_000_000.0), share);
    let expert = expert(c, f.required_size("intermediate_size"));
    let expert = mlp::Plan { names: mlp::Names::Each(["w1", "w3", "w2"]), ..expert };
    let experts = softmax_experts(f, f.required_size("num_local_experts"), expert, true);
    let experts = moe::Plan {
        scoring: Scoring::Sigmoid,
        choice_bias: Some(ChoiceBias { name: "e_score_correction_bias", is_matrix: false }),
        names: moe::Names { block: "block_sparse_moe", ..moe::Names::PLAIN },
        ..experts
    };
    let mixer = attention::Plan { norm: row_norms(c), ..attention(c, heads, rope) };
    c.blocks = vec![pre_norm(LayerPlan::Attention(mixer), LayerPlan::Moe(experts)); layers];
}
