//! The text models of Qwen3.5: Qwen3-Next with other names in the gated delta rule, and an MLP in each layer.

use super::Family;
use super::parts::gated;
use super::qwen3_next::blocks;
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::{LayerPlan, delta};

pub(super) const FAMILY: Family = Family::of("qwen3_5_text", read);

fn read(c: &mut Config, f: &Fields, layers: usize) {
    let mlp = LayerPlan::Mlp(gated(c, f.required_size("intermediate_size")));
    c.extra_layers = f.size_or_zero("mtp_num_hidden_layers");
    blocks(c, f, layers, delta::Names::Streams, |_| mlp.clone());
}
