//! Falcon-H1: in every layer a scan of Mamba-2 and an attention side by side, and a factor for most products.

use super::Family;
use super::parts::{Missing, attention, gated, heads, null_derived, only_silu, rope, scan_of};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::branch::{self, Beside, Place, Reads};
use crate::layers::head::Finish;
use crate::layers::mamba2::{self, Gate};
use crate::layers::{LayerPlan, attend, attention, mlp};

pub(super) const FAMILY: Family = Family::of("falcon_h1", read);

fn read(c: &mut Config, f: &Fields, layers: usize) {
    only_silu(f);
    c.final_norm = "model.final_layernorm";
    let heads = heads(c, f, null_derived(f), Missing::Derived);
    let rope = rope(c, f, heads.key_dim, Some(10_000.0));
    let factor = |field| f.positive(field).unwrap_or(1.0);
    // Factors of 1 change no bit; these are products that need not be made.
    let made = |factor: f64| (factor != 1.0).then_some(factor);
    c.embed_scale = made(factor("embedding_multiplier"));
    c.finish = made(factor("lm_head_multiplier")).map(Finish::Scale);

    // What enters an attention has a factor, and so have its keys: both are in the factor of the scores, and the first is in
    // that of the output.
    let bias = f.flag("attention_bias", false);
    let enters = factor("attention_in_multiplier");
    if bias && enters != 1.0 {
        f.refuse("attention_bias", "is true; with an attention_in_multiplier other than 1 it must be false");
    }
    let scale = heads.scale * factor("key_multiplier") * enters * enters;
    let attention = attention::Plan { bias, o_bias: bias, ..attention(c, attend::Heads { scale, ..heads }, rope) };

    let [gate, down] = factors(f, "mlp_multipliers");
    let names = mlp::Names::Each(["feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj"]);
    let (bias, gated) = (f.flag("mlp_bias", false), gated(c, f.required_size("intermediate_size")));
    let mlp = mlp::Plan { bias, gate_factor: made(gate), names, ..gated };

    let scan = scan(c, f);
    let outputs = [factor("ssm_out_multiplier"), factor("attention_out_multiplier") * enters];
    // How many logits a generation makes, and what the code knows by itself.
    f.unread(&["num_logits_to_keep", "mamba_use_mlp", "mlp_expansion_factor", "attn_layer_indices"]);
    let beside = Beside {
        reads: Reads::Same,
        layer: LayerPlan::Attention(attention),
        factors: (outputs != [1.0; 2]).then_some(outputs),
        behind: None,
    };
    let normed = branch::Plan::normed;
    let mixer = normed(Place::Mixer, "input_layernorm", LayerPlan::Mamba2(scan));
    let block = vec![
        branch::Plan { beside: Some(beside), ..mixer },
        branch::Plan { factor: made(down), ..normed(Place::Mlp, "pre_ff_layernorm", LayerPlan::Mlp(mlp)) },
    ];
    c.blocks = vec![block; layers];
}

/// The scan, with the factors of what enters it and of each part of what it is made from.
fn scan(c: &Config, f: &Fields) -> mamba2::Plan {
    let expanded = c.hidden.saturating_mul(f.size("mamba_expand").unwrap_or(2));
    let inner = match f.size("mamba_d_ssm") {
        Some(inner) => inner,
        None if f.has("mamba_d_ssm") => expanded,
        None => 1024,
    };
    let scan = scan_of(c, f, inner, "mamba_d_ssm, or hidden_size times mamba_expand where that is null");
    let [in_bias, conv_bias] = scan.bias;
    let out_bias = f.flag("projectors_bias", false);
    if in_bias != out_bias {
        f.refuse("projectors_bias", format!("is {out_bias}; supported is that of mamba_proj_bias, {in_bias}"));
    }
    let enters = f.positive("ssm_in_multiplier").unwrap_or(1.0);
    if in_bias && enters != 1.0 {
        f.refuse("mamba_proj_bias", "is true; with an ssm_in_multiplier other than 1 it must be false");
    }
    let parts: [f64; 5] = factors(f, "ssm_multipliers").map(|factor| factor * enters);
    let has_norm = f.flag("mamba_rms_norm", false);
    let gate = match f.flag("mamba_norm_before_gate", true) {
        _ if !has_norm => Gate::Alone,
        true => Gate::AfterNorm,
        false => Gate::ThenNorm,
    };
    let norm_groups = if has_norm { scan.norm_groups } else { 1 };
    mamba2::Plan {
        bias: [in_bias, conv_bias],
        factors: (parts != [1.0; 5]).then_some(parts),
        gate,
        norm_groups,
        ..scan
    }
}

/// A list of factors, 1 each where there is none.
fn factors<const N: usize>(f: &Fields, field: &str) -> [f64; N] {
    let Some(value) = f.get(field) else { return [1.0; N] };
    let numbers = value.as_array().map(|list| list.iter().map(|value| value.as_f64()).collect::<Option<Vec<_>>>());
    let numbers = numbers.flatten().and_then(|numbers| <[f64; N]>::try_from(numbers).ok());
    match numbers.filter(|numbers| numbers.iter().all(|factor| *factor > 0.0 && *factor <= f64::from(f32::MAX))) {
        Some(numbers) => numbers,
        None => {
            f.refuse(field, format!("is {value}; it must be {N} numbers above 0"));
            [1.0; N]
        }
    }
}
