//! Hunyuan MoE: Hunyuan with a mixture of experts in every layer, and one that sees every token.

use super::Family;
use super::hunyuan_v1_dense::mixer;
use super::parts::{expert, pre_norm, softmax_experts_of};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::{LayerPlan, moe};
use serde_json::Value;

pub(super) const FAMILY: Family = Family::of("hunyuan_v1_moe", read);

fn read(c: &mut Config, f: &Fields, layers: usize) {
    let mixer = LayerPlan::Attention(mixer(c, f));
    let width = f.required_size("intermediate_size");
    let counts = each(f, "num_experts", layers);
    let chosen = each(f, "moe_topk", layers);
    // Every expert is as wide as that, and one of them sees every token.
    for (field, value) in [("moe_intermediate_size", width), ("num_shared_expert", 1)] {
        each_is(f, field, value);
    }
    let block = |(count, chosen): (usize, usize)| {
        if count > 0 && chosen > count {
            f.refuse("moe_topk", format!("is {chosen}; there are {count} experts"));
        }
        let shared = moe::Shared::of(expert(c, width), "shared_mlp");
        let names = moe::Names { router: "gate.wg", ..moe::Names::PLAIN };
        let experts = softmax_experts_of(count, chosen, expert(c, width), true);
        pre_norm(mixer.clone(), LayerPlan::Moe(moe::Plan { shared: Some(shared), names, ..experts }))
    };
    c.blocks = counts.into_iter().zip(chosen).map(block).collect();
}

/// A size of each layer: a number for all of them, or a list; 1 where there is none.
fn each(f: &Fields, field: &str, layers: usize) -> Vec<usize> {
    let Some(Value::Array(list)) = f.get(field) else { return vec![f.size(field).unwrap_or(1); layers] };
    let sizes: Option<Vec<usize>> = list.iter().map(|size| size.as_u64()?.try_into().ok()).collect();
    match sizes.filter(|sizes| sizes.len() == layers && sizes.iter().all(|size| (1..=i32::MAX as usize).contains(size)))
    {
        Some(sizes) => sizes,
        None => {
            f.refuse(field, format!("must be a whole number of at least 1, or a list of {layers} of them"));
            vec![0; layers]
        }
    }
}

/// Refuses a field, a number or a list, that says anything else.
fn each_is(f: &Fields, field: &str, size: usize) {
    let Some(value) = f.get(field) else { return };
    let one = std::slice::from_ref(value);
    let all = value.as_array().map_or(one, |list| &list[..]);
    if all.iter().any(|value| value.as_u64() != Some(size as u64)) {
        f.refuse(field, format!("is {value}; supported is {size}"));
    }
}
