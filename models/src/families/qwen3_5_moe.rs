//! The text models of Qwen3.5 with experts, in every layer.

use super::Family;
use super::qwen2_moe::experts;
use super::qwen3_5::beside;
use super::qwen3_next::blocks;
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::{LayerPlan, delta};

pub(super) const FAMILY: Family = Family { nested: Some("qwen3_5_moe"), ..Family::of("qwen3_5_moe_text", read) };

fn read(c: &mut Config, f: &Fields, layers: usize) {
    f.only("norm_topk_prob", &[true.into()]);
    // No layer has an MLP alone.
    f.unread(&["intermediate_size"]);
    let experts = LayerPlan::Moe(experts(c, f, |f| f.required_size("num_experts"), true));
    beside(c, f);
    blocks(c, f, layers, delta::Names::Streams, |_| experts.clone());
}
