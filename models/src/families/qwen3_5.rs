//! The text models of Qwen3.5: Qwen3-Next with other names in the gated delta rule, and an MLP in each layer.

use super::Family;
use super::parts::gated;
use super::qwen3_next::blocks;
use crate::config::{Config, FURTHER, IMAGES};
use crate::fields::Fields;
use crate::layers::{LayerPlan, delta};

pub(super) const FAMILY: Family = Family { nested: Some("qwen3_5"), ..Family::of("qwen3_5_text", read) };

fn read(c: &mut Config, f: &Fields, layers: usize) {
    let mlp = LayerPlan::Mlp(gated(c, f.required_size("intermediate_size")));
    beside(c, f);
    blocks(c, f, layers, delta::Names::Streams, |_| mlp.clone());
}

/// What folders say of what stands beside the text model, and of what is the same in all of them.
pub(super) fn beside(c: &mut Config, f: &Fields) {
    f.only("attn_output_gate", &[true.into()]);
    // States are f32.
    f.only("mamba_ssm_dtype", &["float32".into()]);
    f.unread(&["mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"]);
    c.unused = &[("mtp.", FURTHER), ("model.visual.", IMAGES)];
}
