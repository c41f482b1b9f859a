//! RWKV-7: blocks of a time mix, whose v of the first block the others read, and a channel mix. Folders have the names of
//! flash-linear-attention and its `config.json`, or those of the `rwkv` package and none: then sizes are those of the tensors.

use super::Family;
use crate::ModelError;
use crate::config::Config;
use crate::fields::Fields;
use crate::layers::branch::{self, Place};
use crate::layers::norm::Kind;
use crate::layers::time_mix::Names;
use crate::layers::{LayerPlan, channel_mix, time_mix};
use crate::weights::{Weights, files_of_torch};
use serde_json::{Map, Value, json};
use std::path::Path;

pub(super) const FAMILY: Family = Family { eps: "norm_eps", endless: true, ..Family::of("rwkv7", read) };

/// The field of a config that was made of tensors, which no folder has.
const PUBLISHED: &str = "samebits_names_of_the_rwkv_package";

fn read(c: &mut Config, f: &Fields, layers: usize) {
    let names = if f.flag(PUBLISHED, false) { Names::Published } else { Names::Fla };
    f.only("hidden_act", &[json!("sqrelu")]);
    let (hidden, head_dim) = (c.hidden, head_dim(c.hidden, f));
    if let Some(value) = f.get("value_dim") {
        let is_width = |value: &Value| value.as_u64() == Some(hidden as u64);
        if !is_width(value) && !value.as_array().is_some_and(|all| all.len() == layers && all.iter().all(is_width)) {
            f.refuse("value_dim", format!("is {value}; supported is hidden_size {hidden}"));
        }
    }
    if f.get("attn").is_some() {
        f.refuse("attn", "is set; supported are folders whose blocks all have a time mix");
    }
    // What kernels run, how losses are made, and how weights begin.
    f.unread(&["attn_mode", "fuse_cross_entropy", "fuse_linear_cross_entropy", "use_l2warp"]);
    // The op goes by head_dim where both are there.
    f.unread(&["num_heads", "initializer_range"]);
    let width = f.size("intermediate_size").unwrap_or_else(|| {
        let ratio = f.positive("hidden_ratio").unwrap_or(4.0);
        ((hidden as f64 * ratio) as usize).div_ceil(32).saturating_mul(32)
    });
    f.unread(&["hidden_ratio"]);
    let factor = head_dim as f64 / 64.0;
    let rank = |field: &str, default: usize, of: f64| match f.has(field) && f.get(field).is_none() {
        // Written as null, it follows from the width.
        true => ((of * (hidden as f64).sqrt() / 32.0).round_ties_even() as usize * 32).max(32),
        false => f.size(field).unwrap_or(default),
    };
    let ranks = [
        rank("decay_low_rank_dim", 64, 2.5 * factor),
        rank("a_low_rank_dim", 64, 2.5 * factor),
        rank("v_low_rank_dim", 16, 1.7 * factor),
        rank("gate_low_rank_dim", 128, 5.0),
    ];
    c.norms.kind = Kind::Layer { bias: f.flag("norm_bias", true) };
    let norm_first = f.flag("norm_first", true);
    let (before, mlp) = match names {
        Names::Published => {
            (c.stack, c.table, c.head, c.final_norm) = ("blocks", "emb", "head", "ln_out");
            c.embed_norm = Some("blocks.0.ln0");
            ("ln1", "ln2")
        }
        Names::Fla => {
            (c.stack, c.table) = ("model.layers", "model.embeddings");
            c.embed_norm = norm_first.then_some("model.layers.0.pre_norm");
            ("attn_norm", "ffn_norm")
        }
    };
    // The package has a constant, as folders of it have heads of 64.
    let eps = if names == Names::Published { 64e-5 } else { (head_dim as f64 * f64::from(c.norms.eps)) as f32 };
    // A direction is `l2_norm` or torch's `normalize`, whose root is at least 1e-12.
    let fused = names == Names::Fla && f.flag("fuse_norm", true);
    let direction_eps = if fused { 1e-6 } else { 1e-24 };
    let block = |i: usize| {
        let mixer = time_mix::Plan { hidden, head_dim, ranks, first: i == 0, eps, direction_eps, names };
        let channels = channel_mix::Plan { hidden, width };
        vec![
            branch::Plan::normed(Place::Mixer, before, LayerPlan::TimeMix(mixer)),
            branch::Plan::normed(Place::Mlp, mlp, LayerPlan::ChannelMix(channels)),
        ]
    };
    c.blocks = (0..layers).map(block).collect();
}

/// Elements of a head, which divide the width; 1 where they are refused.
fn head_dim(hidden: usize, f: &Fields) -> usize {
    let (field, dim) = match (f.size("head_dim"), f.has("head_dim"), f.size("num_heads")) {
        (Some(dim), ..) => ("head_dim", dim),
        // Written as null, it follows from the heads.
        (None, true, Some(heads)) => ("num_heads", hidden.checked_div(heads).unwrap_or(0)),
        (None, true, None) => ("head_dim", 0),
        (None, false, _) => ("head_dim", 64),
    };
    if dim == 0 || !hidden.is_multiple_of(dim) {
        f.refuse(field, format!("gives heads of {dim}; they must divide hidden_size {hidden}"));
        return 1;
    }
    dim
}

/// The fields of a folder without a `config.json` whose tensors have the names of the `rwkv` package; `None` of any other.
pub(crate) fn of_tensors(dir: &Path) -> Result<Option<Map<String, Value>>, ModelError> {
    let weights = match Weights::open(dir) {
        Ok(weights) => weights,
        // It may be that of another family, which needs a config.json first of all.
        Err(_) if files_of_torch(dir).is_empty() => return Ok(None),
        Err(e) => return Err(e),
    };
    let shape =
        |name: &str| weights.left().find(|(own, _)| own.as_str() == name).map(|(_, stored)| stored.shape.clone());
    let Some(heads) = shape("blocks.0.att.r_k") else { return Ok(None) };
    let blocks = weights.left().filter_map(|(name, _)| name.strip_prefix("blocks.")?.split_once('.')?.0.parse().ok());
    let layers = blocks.max().map_or(0, |last: usize| last.saturating_add(1));
    let size = |name: &str, axis: usize| {
        let why = || ModelError::file(dir, format!("has no config.json, and no tensor `{name}` that says sizes"));
        shape(name).and_then(|shape| shape.get(axis).copied()).ok_or_else(why)
    };
    // A folder of one block has no way back to the first one's v.
    let v = shape("blocks.1.att.v1.weight").and_then(|shape| shape.get(1).copied()).unwrap_or(1);
    let fields = json!({
        "model_type": "rwkv7", PUBLISHED: true, "norm_eps": 1e-5, "num_hidden_layers": layers,
        "vocab_size": size("emb.weight", 0)?, "hidden_size": size("emb.weight", 1)?,
        "head_dim": heads.get(1).copied().unwrap_or(0), "intermediate_size": size("blocks.0.ffn.key.weight", 0)?,
        "decay_low_rank_dim": size("blocks.0.att.w1.weight", 1)?, "a_low_rank_dim": size("blocks.0.att.a1.weight", 1)?,
        "v_low_rank_dim": v, "gate_low_rank_dim": size("blocks.0.att.g1.weight", 1)?,
    });
    let Value::Object(map) = fields else { unreachable!("it is an object") };
    Ok(Some(map))
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;
    use crate::{Model, Precision, Run, pth};
    use safetensors::tensor::Dtype;
    use samebits_ops::{Cpu, Tensor};
    use std::collections::BTreeMap;

    fn checkpoint() -> std::path::PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/checkpoints/rwkv7")
    }

    /// The name of a tensor in folders of flash-linear-attention, by that in a model of the other names; and whether it is stored
    /// transposed there.
    fn in_fla(name: &str) -> (String, bool) {
        let whole = [
            ("emb.weight", "model.embeddings.weight"),
            ("head.weight", "lm_head.weight"),
            ("ln_out.", "model.norm."),
            ("blocks.0.ln0.", "model.layers.0.pre_norm."),
        ];
        if let Some((old, new)) = whole.into_iter().find(|(old, _)| name.starts_with(old)) {
            return (name.replacen(old, new, 1), false);
        }
        let (layer, part) = name.strip_prefix("blocks.").unwrap().split_once('.').unwrap();
        let narrow = part.strip_prefix("att.").filter(|part| part.as_bytes()[1].is_ascii_digit());
        if let Some(part) = narrow {
            let (number, kind) = if part.as_bytes()[1] == b'1' { (0, "weight") } else { (2, &part[3..]) };
            let name = format!("model.layers.{layer}.attn.{}_lora.lora.{number}.{kind}", &part[..1]);
            return (name, kind == "weight");
        }
        let parts = [
            ("ln1.", "attn_norm."),
            ("ln2.", "ffn_norm."),
            ("att.ln_x.", "attn.g_norm."),
            ("att.receptance.", "attn.r_proj."),
            ("att.key.", "attn.k_proj."),
            ("att.value.", "attn.v_proj."),
            ("att.output.", "attn.o_proj."),
            ("att.", "attn."),
            ("ffn.", "ffn."),
        ];
        let (old, new) = parts.into_iter().find(|(old, _)| part.starts_with(old)).unwrap();
        (format!("model.layers.{layer}.{}", part.replacen(old, new, 1)), false)
    }

    pub(crate) fn both_namings_have_the_same_logits() {
        let cpu = Cpu::best();
        let of_package = Model::load(&checkpoint(), Precision::Bf16, &cpu).unwrap();
        let turned = |tensor: Tensor, is_turned: bool| {
            let &[n, k] = tensor.shape() else { return tensor };
            let x = tensor.as_slice::<f32>().unwrap();
            let columns = (0..k).flat_map(|column| (0..n).map(move |row| x[row * k + column]));
            if is_turned { Tensor::new(columns.collect(), &[k, n]).unwrap() } else { tensor }
        };
        let tensors = Model::read_tensors(&checkpoint()).unwrap().into_iter().map(|(name, tensor)| {
            let (name, is_turned) = in_fla(&name);
            (name, turned(tensor, is_turned))
        });
        let tensors: BTreeMap<String, Tensor> = tensors.collect();
        let fields = json!({
            "model_type": "rwkv7", "vocab_size": 160, "hidden_size": 48, "num_hidden_layers": 3, "head_dim": 16,
            "intermediate_size": 96, "decay_low_rank_dim": 12, "a_low_rank_dim": 12, "v_low_rank_dim": 8,
            "gate_low_rank_dim": 20, "norm_eps": 1e-5, "fuse_norm": false,
        });
        let mut config = Config::parse(&fields.to_string()).unwrap();
        let views = tensors.iter().map(|(name, tensor)| (name.clone(), tensor.view())).collect();
        let of = |config: &Config| Model::of_tensors(config, &views, Precision::Bf16, None, &cpu).unwrap();
        let logits = |model: &Model| {
            let found = model.forward_run(&cpu, &[&[1, 2, 3, 4, 5], &[7, 8]], Run::default()).unwrap();
            found.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        };
        // The package has one number for heads of any size, with which it computes something else.
        assert!(logits(&of_package) != logits(&of(&config)));
        for plan in config.blocks.iter_mut().flatten().filter_map(time_mix) {
            assert_eq!((plan.eps, plan.direction_eps), ((16.0 * f64::from(1e-5f32)) as f32, 1e-24));
            plan.eps = 64e-5;
        }
        assert!(logits(&of_package) == logits(&of(&config)));
        // What is added to the squares of a direction is seen, though 1e-6 may be lost in bf16.
        config.blocks.iter_mut().flatten().filter_map(time_mix).for_each(|plan| plan.direction_eps = 1e-2);
        assert!(logits(&of_package) != logits(&of(&config)));
    }

    fn time_mix(branch: &mut branch::Plan) -> Option<&mut time_mix::Plan> {
        if let LayerPlan::TimeMix(plan) = &mut branch.layer { Some(plan) } else { None }
    }

    /// The tensors of the checkpoint as the package has them: vectors with two axes of one, w0 for what is added to the product
    /// with w2, and a way back to v in the first block too.
    fn published() -> BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)> {
        let file = std::fs::read(checkpoint().join("model.safetensors")).unwrap();
        let stored = safetensors::SafeTensors::deserialize(&file).unwrap();
        let named = |name: String| match name.rsplit_once(".att.") {
            Some((block, last)) if last.as_bytes()[1].is_ascii_digit() => {
                let last = if last.ends_with("2.bias") { format!("{}0", &last[..1]) } else { last[..2].into() };
                format!("{block}.att.{last}")
            }
            _ => name,
        };
        let shaped = |name: &str, shape: &[usize]| {
            let has_axes = shape.len() == 1 && !name.contains(".ln") && !name.starts_with("ln");
            if has_axes { vec![1, 1, shape[0]] } else { shape.to_vec() }
        };
        let mut tensors: BTreeMap<String, _> = BTreeMap::new();
        for (name, view) in stored.tensors() {
            let name = named(name);
            let shape = shaped(&name, view.shape());
            tensors.insert(name, (view.dtype(), shape, view.data().to_vec()));
        }
        for name in ["v0", "v1", "v2"] {
            let like = tensors[&format!("blocks.1.att.{name}")].clone();
            tensors.insert(format!("blocks.0.att.{name}"), like);
        }
        assert!(["blocks.2.att.w0", "blocks.1.att.g2"].into_iter().all(|name| tensors.contains_key(name)));
        assert_eq!(tensors["blocks.2.ffn.x_k"].1, [1, 1, 48]);
        tensors
    }

    pub(crate) fn folders_without_a_config_have_the_sizes_of_their_tensors() {
        let config = Config::load(&checkpoint()).unwrap();
        let LayerPlan::TimeMix(plan) = &config.blocks[1][0].layer else { panic!("it is a time mix") };
        assert_eq!((config.layers(), config.vocab, config.hidden), (3, 160, 48));
        assert_eq!((plan.head_dim, plan.ranks, plan.first), (16, [12, 12, 8, 20], false));
        assert_eq!((plan.eps, plan.direction_eps), (64e-5, 1e-24));
        let logits = |dir: &Path| {
            let cpu = Cpu::best();
            let model = Model::load(dir, Precision::Bf16, &cpu).unwrap();
            model.forward_run(&cpu, &[&[1, 2, 3, 4, 5]], Run::default()).unwrap()
        };
        let (tensors, expected) = (published(), logits(&checkpoint()));
        let dir = tempfile::tempdir().unwrap();
        let views = tensors.iter().map(|(name, (dtype, shape, data))| {
            (name, safetensors::tensor::TensorView::new(*dtype, shape.clone(), data).unwrap())
        });
        let place = dir.path().join("model.safetensors");
        safetensors::serialize_to_file(views, None, &place).unwrap();
        assert_eq!(logits(dir.path()), expected);
        std::fs::remove_file(place).unwrap();
        let file = pth::tests::saved(&tensors);
        std::fs::write(dir.path().join("RWKV-x070-Small.pth"), &file).unwrap();
        assert_eq!(logits(dir.path()), expected);
        // Which of two is meant is not known.
        std::fs::write(dir.path().join("b.pth"), &file).unwrap();
        let said = Config::load(dir.path()).unwrap_err().to_string();
        assert!(said.contains("has 2 .pth files"), "{said}");
    }

    pub(crate) fn folders_whose_tensors_say_no_sizes_are_refused() {
        type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;
        let said = |change: &dyn Fn(&mut Tensors)| {
            let (mut tensors, dir) = (published(), tempfile::tempdir().unwrap());
            change(&mut tensors);
            std::fs::write(dir.path().join("model.pth"), pth::tests::saved(&tensors)).unwrap();
            Model::load(dir.path(), Precision::Bf16, &Cpu::best()).map(drop).unwrap_err().to_string()
        };
        let nothing = tempfile::tempdir().unwrap();
        assert!(Config::load(nothing.path()).unwrap_err().to_string().contains("config.json"));
        let without = |name: &'static str| said(&move |tensors| drop(tensors.remove(name)));
        assert!(without("blocks.0.att.r_k").contains("config.json"));
        assert!(without("emb.weight").contains("no tensor `emb.weight` that says sizes"));
        assert!(without("blocks.2.ffn.x_k").contains("`blocks.2.ffn.x_k` is missing"));
        let renamed = |to: &'static str| {
            said(&move |tensors| {
                let tensor = tensors["blocks.2.ffn.x_k"].clone();
                tensors.insert(to.into(), tensor);
            })
        };
        assert!(renamed("blocks.18446744073709551615.ffn.x_k").contains("`num_hidden_layers` is 18446744073709551615"));
        // Of RWKV-7 with deep embeddings.
        assert!(renamed("blocks.2.ffn.s_emb.weight").contains("`blocks.2.ffn.s_emb.weight` is not part of the model"));
        let heads = said(&|tensors| tensors.get_mut("blocks.0.att.r_k").unwrap().1 = vec![48]);
        assert!(heads.contains("`head_dim` is 0"), "{heads}");
    }

    pub(crate) fn what_the_code_of_the_family_reads_is_read_or_refused() {
        let parse = |changes: Value| {
            let mut fields = json!({
                "model_type": "rwkv7", "vocab_size": 100, "hidden_size": 128, "num_hidden_layers": 2, "norm_eps": 1e-5,
            });
            changes.as_object().unwrap().iter().for_each(|(field, value)| fields[field] = value.clone());
            Config::parse(&fields.to_string()).map_err(|e| e.to_string())
        };
        let plans = |config: Config| match (&config.blocks[0][0].layer, &config.blocks[0][1].layer) {
            (LayerPlan::TimeMix(mix), LayerPlan::ChannelMix(channels)) => (mix.head_dim, mix.ranks, channels.width),
            _ => panic!("a time mix and a channel mix"),
        };
        assert_eq!(plans(parse(json!({})).unwrap()), (64, [64, 64, 16, 128], 512));
        let nulls = json!({
            "decay_low_rank_dim": null, "a_low_rank_dim": null, "v_low_rank_dim": null, "gate_low_rank_dim": null,
            "head_dim": null, "num_heads": 4, "hidden_ratio": 3.5,
        });
        assert_eq!(plans(parse(nulls).unwrap()), (32, [32, 32, 32, 64], 448));
        assert_eq!(parse(json!({"norm_first": false})).unwrap().embed_norm, None);
        let direction =
            |changes| parse(changes).unwrap().blocks[0].iter_mut().find_map(time_mix).unwrap().direction_eps;
        assert_eq!([json!({}), json!({"fuse_norm": false})].map(direction), [1e-6, 1e-24]);
        for (field, value) in [
            ("value_dim", json!(256)),
            ("value_dim", json!([128])),
            ("attn", json!({"layers": [1]})),
            ("hidden_act", json!("relu")),
            ("head_dim", json!(48)),
            ("head_dim", json!(null)),
        ] {
            let said = parse(json!({field: value})).unwrap_err();
            assert!(said.contains(&format!("`{field}`")), "{said}");
        }
        assert!(parse(json!({"value_dim": [128, 128]})).is_ok());
    }
}
