//! DeepSeek V3.2: V3 whose queries see the keys that an indexer chooses.

use super::Family;
use super::deepseek_v2::{latent, shared_experts};
use super::deepseek_v3::sigmoid_experts;
use super::parts::{dense_first, gated, groups_hold, kinds, only_silu, pre_norm};
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::heads::Rope;
use crate::layers::{LayerPlan, indexer, latent_attention};
use samebits_ops::Pairing;

pub(super) const FAMILY: Family = Family::of("deepseek_v32", read);

fn read(c: &mut Config, f: &Fields, layers: usize) {
    only_silu(f);
    f.present(&["n_group", "topk_group", "routed_scaling_factor"]);
    f.required_size("q_lora_rank");
    f.only("mlp_bias", &[false.into()]);
    c.extra_layers = f.size_or_zero("num_nextn_predict_layers");
    let mixer = latent(c, f, Pairing::Interleaved);
    // Half of a rotary part with the other half, whatever pairs the attention takes.
    let rope = Rope { pairing: Pairing::Half, ..mixer.rope };
    let [heads, dim, chosen] = ["index_n_heads", "index_head_dim", "index_topk"].map(|field| f.required_size(field));
    if dim > 0 && dim < rope.dim {
        f.refuse("index_head_dim", format!("is {dim}; it has the {} elements of qk_rope_head_dim in it", rope.dim));
    }
    let mixer = latent_attention::Plan { indexer: Some(indexer::Plan { heads, dim, chosen, rope }), ..mixer };
    kinds(f, "layer_types", layers, [&["indexed_attention"], &["indexed_attention"]], true);
    let experts = sigmoid_experts(f, shared_experts(c, f), true);
    let dense = gated(c, f.required_size("intermediate_size"));
    let sparse = kinds(f, "mlp_layer_types", layers, [&["sparse"], &["dense"]], true);
    let mlps = match sparse {
        None => {
            f.present(&["first_k_dense_replace"]);
            dense_first(f, layers, &experts, &dense)
        }
        Some(sparse) => {
            f.unread(&["first_k_dense_replace"]);
            groups_hold(f, &experts);
            let of = |sparse| if sparse { LayerPlan::Moe(experts.clone()) } else { LayerPlan::Mlp(dense.clone()) };
            sparse.into_iter().map(of).collect()
        }
    };
    c.blocks = mlps.into_iter().map(|mlp| pre_norm(LayerPlan::LatentAttention(mixer.clone()), mlp)).collect();
}
