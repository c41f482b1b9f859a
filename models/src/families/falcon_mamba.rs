//! Falcon Mamba: Mamba whose scans norm what they are told, without weights.

use super::{Family, mamba};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::mamba::Norms;
use crate::layers::norm;

pub(super) const FAMILY: Family =
    Family { eps: "layer_norm_epsilon", tied: true, endless: true, ..Family::of("falcon_mamba", read) };

fn read(c: &mut Config, f: &Fields, layers: usize) {
    f.unread(&["use_falcon_mambapy"]);
    let norm = norm::Plan::rms(f.positive("mixer_rms_eps").map_or(1e-6, |eps| eps as f32));
    mamba::blocks(c, f, layers, Some(Norms { norm, weights: false }));
}
