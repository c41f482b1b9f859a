//! GLM-4.5 and 4.6: experts by sigmoid scores and some that see every token behind the first layers, half of each head
//! rotated, norms of heads or none.

use super::Family;
use super::deepseek_v2::shared_experts;
use super::deepseek_v3::sigmoid_experts;
use super::parts::{Missing, attention, dense_first, gated, head_norms, heads, only_silu, partial_rope, pre_norm};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::{LayerPlan, attention};

pub(super) const FAMILY: Family = Family::of("glm4_moe", read);

fn read(c: &mut Config, f: &Fields, layers: usize) {
    only_silu(f);
    c.extra_layers = f.size_or_zero("num_nextn_predict_layers");
    f.present(&["first_k_dense_replace"]);
    let heads = heads(c, f, Missing::Refused, Missing::Derived);
    let bias = f.flag("attention_bias", false);
    let norm = if f.flag("use_qk_norm", false) { head_norms(c) } else { None };
    let rope = partial_rope(c, f, heads.key_dim, Some(10_000.0), 0.5);
    let mixer = attention::Plan { norm, bias, ..attention(c, heads, rope) };
    let experts = sigmoid_experts(f, shared_experts(c, f), true);
    let dense = gated(c, f.required_size("intermediate_size"));
    let block = |mlp| pre_norm(LayerPlan::Attention(mixer.clone()), mlp);
    c.blocks = dense_first(f, layers, &experts, &dense).into_iter().map(block).collect();
}
