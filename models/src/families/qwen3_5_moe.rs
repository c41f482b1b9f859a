//! The text models of Qwen3.5 with experts, in every layer.

use super::Family;
use super::qwen3_next::{blocks, experts};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::{LayerPlan, delta};

pub(super) const FAMILY: Family = Family::of("qwen3_5_moe_text", read);

fn read(c: &mut Config, f: &Fields, layers: usize) {
    let experts = LayerPlan::Moe(experts(c, f, true));
    c.extra_layers = f.size_or_zero("mtp_num_hidden_layers");
    blocks(c, f, layers, delta::Names::Streams, |_| experts.clone());
}
