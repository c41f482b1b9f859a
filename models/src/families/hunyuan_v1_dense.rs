//! Hunyuan (dense): norms of heads behind their rotation, whose base may be stretched.

use super::Family;
use super::parts::{Missing, attention, gated, head_norms, heads, only_silu, pre_norm, stretched_rope};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::heads::QkNorm;
use crate::layers::{LayerPlan, attention};
use serde_json::json;

pub(super) const FAMILY: Family = Family::of("hunyuan_v1_dense", read);

fn read(c: &mut Config, f: &Fields, layers: usize) {
    let mixer = LayerPlan::Attention(mixer(c, f));
    let mlp = LayerPlan::Mlp(gated(c, f.required_size("intermediate_size")));
    c.blocks = vec![pre_norm(mixer, mlp); layers];
}

/// The attention of both families.
pub(super) fn mixer(c: &mut Config, f: &Fields) -> attention::Plan {
    only_silu(f);
    f.only("use_qk_norm", &[json!(true)]);
    let heads = heads(c, f, Missing::Derived, Missing::Refused);
    // The same under another name.
    f.only("attention_head_dim", &[json!(heads.key_dim)]);
    let bias = f.flag("attention_bias", false);
    let rope = stretched_rope(c, f, heads.key_dim, Some(10_000.0));
    let norm = head_norms(c).map(|norm| QkNorm { behind: true, ..norm });
    let norms = ["self_attn.query_layernorm", "self_attn.key_layernorm"];
    let names = attention::Names { norms, ..attention::Names::PLAIN };
    attention::Plan { norm, bias, o_bias: bias, names, ..attention(c, heads, rope) }
}
