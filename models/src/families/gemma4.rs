//! Gemma 4 (text): Gemma 3 with norms of values, wider heads where a layer has no window, keys and values that later layers share,
//! inputs of each layer's own beside the residual stream, a number that multiplies each layer's, and experts beside the MLP.

use super::Family;
use super::parts::{
    Missing, attention, expert, gated, head_norms, heads, rope_of_kind, sandwich, softmax_experts_of, windows,
};
use crate::config::{Config, IMAGES, SOUNDS};
use crate::fields::Fields;
use crate::layers::branch::{self, Beside, Place, Reads};
use crate::layers::head::Finish;
use crate::layers::heads::Rope;
use crate::layers::mlp::Activation;
use crate::layers::moe::{self, ExpertNames, Forms, Stacked};
use crate::layers::per_layer::{self, inputs};
use crate::layers::{LayerPlan, attend, attention, mlp, values};
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family { tied: true, nested: Some("gemma4"), ..Family::of("gemma4_text", read) };

/// The types of layers: with a window, and without.
const KINDS: [&str; 2] = ["sliding_attention", "full_attention"];

const EXPERTS: Stacked = Stacked {
    names: ["experts.gate_up_proj", "experts.down_proj"],
    ends: ["", ""],
    transposed: false,
    takes_turns: false,
};

fn read(c: &mut Config, f: &Fields, layers: usize) {
    f.only("hidden_activation", &[json!("gelu_pytorch_tanh")]);
    // Tokens of images would see each other; there are none.
    f.only("use_bidirectional_attention", &[json!(false), json!("vision")]);
    c.unused = &[
        ("model.vision_tower.", IMAGES),
        ("model.embed_vision.", IMAGES),
        ("model.audio_tower.", SOUNDS),
        ("model.embed_audio.", SOUNDS),
    ];
    c.embed_scale = Some((c.hidden as f64).sqrt());
    c.finish = f.positive("final_logit_softcapping").map(Finish::Softcap);
    c.block_factor = Some("layer_scalar");
    let windows = windows_of(f, layers);
    let twins = f.flag("attention_k_eq_v", false);
    let heads = heads_of(c, f, &windows, twins);
    let lenders = lenders(f, &windows);
    let ropes = ropes(c, f, &windows, &heads);
    let (bias, wide) = (f.flag("attention_bias", false), f.flag("use_double_wide_mlp", false));
    let width = f.required_size("intermediate_size");
    let experts = f.flag("enable_moe_block", false).then(|| experts(c, f));
    f.unread(&["num_experts", "top_k_experts", "moe_intermediate_size"]);
    c.inputs = inputs(c, f);
    let norm = Some(c.norms);
    let block = |i: usize| {
        let rope = ropes[usize::from(windows[i].is_none())];
        let values = values::Plan { of_keys: twins && windows[i].is_none(), norm };
        let mixer = attention(c, heads[i].clone(), rope);
        let mixer = attention::Plan { norm: head_norms(c), bias, o_bias: bias, values, lender: lenders[i], ..mixer };
        let width = if wide && lenders[i].is_some() { width.saturating_mul(2) } else { width };
        let mlp = mlp::Plan { activation: Activation::Gelu, ..gated(c, width) };
        let mut block = sandwich(LayerPlan::Attention(mixer), LayerPlan::Mlp(mlp));
        block[1].beside = experts.clone().map(|experts| Beside {
            reads: Reads::Stream,
            layer: LayerPlan::Moe(experts),
            factors: None,
            behind: Some(["post_feedforward_layernorm_1", "post_feedforward_layernorm_2"]),
        });
        block.extend(c.inputs.as_ref().map(|inputs| own_input(c, inputs, [i, layers])));
        block
    };
    c.blocks = (0..layers).map(block).collect();
}

/// The window of each layer; the last one has none.
fn windows_of(f: &Fields, layers: usize) -> Vec<Option<usize>> {
    let window = f.size("sliding_window").or((!f.has("sliding_window")).then_some(512));
    let mut windows = windows(f, layers, window, |i| !(i + 1).is_multiple_of(6));
    if let Some(last) = windows.last_mut().and_then(Option::take).filter(|_| f.has("layer_types")) {
        let why = format!(
            "is \"sliding_attention\" with {last} positions; the family's code takes \"full_attention\" for the last layer, so write that"
        );
        f.refuse(format!("layer_types[{}]", layers - 1), why);
    }
    windows
}

/// The heads of each layer: as `per_layer_config` says, or those without a window as the fields of these do.
fn heads_of(c: &Config, f: &Fields, windows: &[Option<usize>], twins: bool) -> Vec<attend::Heads> {
    let heads = attend::Heads { scale: 1.0, ..heads(c, f, Missing::Refused, Missing::Refused) };
    let own = f.object("per_layer_config");
    let (mut dim, mut keys) = (heads.key_dim, heads.keys);
    let globals = ["global_head_dim", "num_global_key_value_heads"];
    match own {
        Some(own) => {
            f.unread(&globals);
            for name in own.keys().filter(|name| name.parse::<usize>().map_or(true, |i| i >= windows.len())) {
                f.refuse(format!("per_layer_config.{name}"), format!("is of no layer; there are {}", windows.len()));
            }
        }
        None => {
            dim = f.required_size(globals[0]);
            keys = f.size(globals[1]).filter(|_| twins).unwrap_or(keys);
        }
    }
    let of = |i: usize| {
        let mut heads = attend::Heads { window: windows[i], ..heads.clone() };
        match own.map(|own| own.get(&i.to_string())) {
            None if windows[i].is_none() => (heads.key_dim, heads.keys) = (dim, keys),
            Some(Some(changes)) => changed(f, &format!("per_layer_config.{i}"), changes, &mut heads),
            _ => {}
        }
        heads.value_dim = heads.key_dim;
        if heads.keys > 0 && !heads.queries.is_multiple_of(heads.keys) {
            let field =
                if own.is_some() { format!("per_layer_config.{i}.num_key_value_heads") } else { globals[1].into() };
            f.refuse(field, format!("is {}; it must divide num_attention_heads {}", heads.keys, heads.queries));
        }
        heads
    };
    (0..windows.len()).map(of).collect()
}

/// What one layer has otherwise.
fn changed(f: &Fields, place: &str, changes: &Value, heads: &mut attend::Heads) {
    let Some(changes) = changes.as_object() else {
        return f.refuse(place, format!("is {changes}; it must be an object"));
    };
    for (field, value) in changes {
        let size = value.as_u64().and_then(|size| i32::try_from(size).ok()).filter(|size| *size > 0);
        let to = match &field[..] {
            "head_dim" => &mut heads.key_dim,
            "num_key_value_heads" => &mut heads.keys,
            _ => {
                f.refuse(
                    format!("{place}.{field}"),
                    format!("is {value}; supported are head_dim and num_key_value_heads"),
                );
                continue;
            }
        };
        match size {
            Some(size) => *to = size as usize,
            None => {
                f.refuse(format!("{place}.{field}"), format!("is {value}; it must be a whole number of at least 1"))
            }
        }
    }
}

/// The layer whose keys and values each of the last `num_kv_shared_layers` reads: the last of its type before them.
fn lenders(f: &Fields, windows: &[Option<usize>]) -> Vec<Option<usize>> {
    let (field, layers) = ("num_kv_shared_layers", windows.len());
    let shared = f.size_or_zero(field);
    if shared > 0 && shared >= layers {
        f.refuse(field, format!("is {shared}; the first of {layers} layers have keys and values of their own"));
        return vec![None; layers];
    }
    let own = layers - shared;
    let lender = |i: usize| {
        if i < own {
            return None;
        }
        let lender = (0..own).rev().find(|&j| windows[j].is_some() == windows[i].is_some());
        if lender.is_none() {
            let kind = KINDS[usize::from(windows[i].is_none())];
            f.refuse(field, format!("is {shared}; layer {i} is of {kind}, and no layer before these is"));
        }
        lender
    };
    (0..layers).map(lender).collect()
}

/// The rotations of layers with a window, and of those without.
fn ropes(c: &mut Config, f: &Fields, windows: &[Option<usize>], heads: &[attend::Heads]) -> [Rope; 2] {
    let given = f.object("rope_parameters");
    let of = |(at, kind): (usize, &'static str)| {
        let mut dims = heads.iter().zip(windows).filter(|(_, window)| usize::from(window.is_none()) == at);
        let dim = dims.next().map(|(heads, _)| heads.key_dim);
        if let Some((other, _)) = dims.find(|(heads, _)| Some(heads.key_dim) != dim) {
            let why = format!(
                "gives layers of {kind} heads of {} and of {} elements; supported is one size",
                dim.unwrap_or(0),
                other.key_dim
            );
            f.refuse("per_layer_config", why);
        }
        if dim.is_some() && !given.is_some_and(|given| given.get(kind).is_some_and(Value::is_object)) {
            f.refuse(format!("rope_parameters.{kind}"), "is missing; write how these layers rotate");
        }
        rope_of_kind(c, f, dim.unwrap_or(2), kind, "rope_theta", if at == 0 { 10_000.0 } else { 1_000_000.0 })
    };
    let [sliding, full] = KINDS;
    [(0, sliding), (1, full)].map(of)
}

/// How the inputs of the layers' own are made, where there are any.
fn inputs(c: &Config, f: &Fields) -> Option<inputs::Plan> {
    let (field, of_vocab) = ("hidden_size_per_layer_input", "vocab_size_per_layer_input");
    let width = if f.has(field) { f.size_or_zero(field) } else { 256 };
    let vocab = f.size(of_vocab).unwrap_or(262_144);
    if width == 0 {
        return None;
    }
    if vocab < c.vocab {
        f.refuse(of_vocab, format!("is {vocab}; each of the {} tokens of vocab_size has inputs", c.vocab));
    }
    let names = ["model.embed_tokens_per_layer", "model.per_layer_model_projection", "model.per_layer_projection_norm"];
    Some(inputs::Plan { vocab, width, names })
}

/// The branch of layer `i` of so many that reads its own input.
fn own_input(c: &Config, inputs: &inputs::Plan, [i, layers]: [usize; 2]) -> branch::Plan {
    let (width, names) = (inputs.width, ["per_layer_input_gate", "per_layer_projection"]);
    let (first, all) = (width.saturating_mul(i), width.saturating_mul(layers));
    branch::Plan {
        place: Place::PerLayerInput,
        before: None,
        layer: LayerPlan::PerLayerInput(per_layer::Plan { hidden: c.hidden, width, first, all, names }),
        behind: Some("post_per_layer_input_norm"),
        factor: None,
        beside: None,
        ahead: None,
    }
}

/// The experts beside the MLP.
fn experts(c: &Config, f: &Fields) -> moe::Plan {
    let (count, chosen) = (f.required_size("num_experts"), f.required_size("top_k_experts"));
    if count > 0 && chosen > count {
        f.refuse("top_k_experts", format!("is {chosen}; there are {count} experts"));
    }
    let own = mlp::Plan { activation: Activation::Gelu, ..expert(c, f.required_size("moe_intermediate_size")) };
    let router = ("router.scale", 1.0 / (c.hidden as f64).sqrt());
    moe::Plan {
        forms: Some(Forms { norm: c.norms, experts: "pre_feedforward_layernorm_2", router }),
        expert_scale: Some("per_expert_scale"),
        names: moe::Names { block: "router", router: "proj", experts: ExpertNames::Stacked(EXPERTS) },
        ..softmax_experts_of(count, chosen, own, true)
    }
}
