//! Folders that are wrong in one way each: refused by one line that names the file and the field or tensor.

use safetensors::tensor::{Dtype, TensorView};
use samebits_models::{Audit, Generation, Grouping, Model, ModelError, Precision, Schedule, Stop};
use samebits_ops::Cpu;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

const WHOLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// A tensor of a safetensors file: dtype, shape, bytes.
type Tensor = (Dtype, Vec<usize>, Vec<u8>);
type Tensors = BTreeMap<String, Tensor>;

fn checkpoint(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/checkpoints").join(name)
}

/// A copy of a checkpoint that may be changed.
fn copy(name: &str) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for file in ["config.json", "generation_config.json", "tokenizer.json", WHOLE] {
        let from = checkpoint(name).join(file);
        if from.exists() {
            fs::copy(from, dir.path().join(file)).unwrap();
        }
    }
    dir
}

fn read_tensors(path: &Path) -> Tensors {
    let file = fs::read(path).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
    tensors.iter().map(|(name, t)| (name.into(), (t.dtype(), t.shape().to_vec(), t.data().to_vec()))).collect()
}

fn write_tensors(path: &Path, tensors: &Tensors) {
    let views = tensors
        .iter()
        .map(|(name, (dtype, shape, data))| (name.as_str(), TensorView::new(*dtype, shape.clone(), data).unwrap()));
    fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

fn change_tensors(dir: &TempDir, change: impl FnOnce(&mut Tensors)) {
    let path = dir.path().join(WHOLE);
    let mut tensors = read_tensors(&path);
    change(&mut tensors);
    write_tensors(&path, &tensors);
}

fn change_json(dir: &TempDir, file: &str, change: impl FnOnce(&mut Value)) {
    let path = dir.path().join(file);
    let mut value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut value);
    fs::write(&path, value.to_string()).unwrap();
}

fn load(dir: &Path) -> Result<Model, ModelError> {
    Model::load(dir, Precision::Bf16, &Cpu::best())
}

/// Asserts that loading is refused by one line with all of `parts` in it.
fn assert_refused(dir: &TempDir, parts: &[&str]) {
    let line = match load(dir.path()) {
        Ok(_) => panic!("loaded; expected an error with {parts:?}"),
        Err(error) => error.to_string(),
    };
    assert!(!line.contains('\n'), "{line}");
    for part in parts {
        assert!(line.contains(part), "`{part}` is not in: {line}");
    }
}

/// Splits the weights of a copy into two shards with an index; tensors alternate between them.
fn shard(dir: &TempDir) {
    let whole = dir.path().join(WHOLE);
    let mut shards = [Tensors::new(), Tensors::new()];
    let mut map = BTreeMap::new();
    for (i, (name, tensor)) in read_tensors(&whole).into_iter().enumerate() {
        map.insert(name.clone(), shard_name(i % 2));
        shards[i % 2].insert(name, tensor);
    }
    for (i, tensors) in shards.iter().enumerate() {
        write_tensors(&dir.path().join(shard_name(i)), tensors);
    }
    fs::write(dir.path().join(INDEX), json!({"metadata": {"total_size": 1}, "weight_map": map}).to_string()).unwrap();
    fs::remove_file(whole).unwrap();
}

fn shard_name(i: usize) -> String {
    format!("model-{:05}-of-00002.safetensors", i + 1)
}

fn logits(dir: &Path) -> Vec<u32> {
    let tokens: Vec<i32> = (0..12).map(|i| 1 + i * 5 % 17).collect();
    let model = load(dir).unwrap();
    let logits = model.forward(&Cpu::best(), &tokens, 2, 6, Schedule::Prefill, Grouping::Together).unwrap();
    logits.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn an_untouched_copy_loads() {
    for name in ["qwen3-adder", "qwen2", "llama"] {
        assert_eq!(load(copy(name).path()).unwrap().config().family.name(), name.split('-').next().unwrap());
    }
    // What is not changed on purpose stays the same.
    let dir = copy("llama");
    change_tensors(&dir, |_| {});
    assert_eq!(logits(dir.path()), logits(&checkpoint("llama")));
}

/// Qwen3.5 as it is published, beside a model of images, with the experts of a layer in two tensors: the same logits.
#[test]
fn a_text_model_beside_one_of_images_is_loaded() {
    let dir = copy("qwen3-5-moe");
    change_json(&dir, "config.json", |config| {
        *config = json!({"model_type": "qwen3_5_moe", "text_config": config.clone(), "vision_config": {"depth": 1}});
    });
    change_tensors(&dir, |tensors| {
        let mut found = Tensors::new();
        for (name, (dtype, shape, bytes)) in std::mem::take(tensors) {
            let name = name.replacen("model.", "model.language_model.", 1);
            let part = name.split_once(".mlp.experts.").map(|(block, _)| {
                let together = if name.ends_with("down_proj.weight") { "down_proj" } else { "gate_up_proj" };
                (format!("{block}.mlp.experts.{together}"), name.ends_with("gate_proj.weight"))
            });
            let Some((together, is_first)) = part else {
                found.insert(name, (dtype, shape, bytes));
                continue;
            };
            // Names are in order: of each expert down, gate and up.
            let rows = if together.ends_with("gate_up_proj") { 2 * shape[0] } else { shape[0] };
            let (_, all, data) = found.entry(together.clone()).or_insert((dtype, vec![0, rows, shape[1]], Vec::new()));
            all[0] += usize::from(is_first || together.ends_with("down_proj"));
            data.extend(bytes);
        }
        let [of_images, further] = ["model.visual.patch_embed.proj.weight", "mtp.norm.weight"].map(String::from);
        found.insert(of_images, (Dtype::BF16, vec![2, 2], vec![0; 8]));
        found.insert(further, (Dtype::BF16, vec![2], vec![0; 4]));
        *tensors = found;
    });
    let found = read_tensors(&dir.path().join(WHOLE));
    assert_eq!(found["model.language_model.layers.0.mlp.experts.gate_up_proj"].1, [5, 48, 48]);
    assert_eq!(logits(dir.path()), logits(&checkpoint("qwen3-5-moe")));
    let passed = &load(dir.path()).unwrap().config().passed.clone();
    let named = |what: &str| passed.iter().any(|line| line.contains(what));
    assert!(named("1 tensors of a model of images, such as `model.visual.patch_embed.proj.weight`"), "{passed:?}");
    let audit = Audit::of(dir.path(), |_, _| {}).unwrap();
    let notes: Vec<String> = audit.findings.iter().map(|found| format!("{} {}", found.tensor, found.what)).collect();
    assert!(
        audit.holds() && notes.contains(&"mtp.norm.weight is not used: it predicts further tokens".into()),
        "{notes:?}"
    );
    // An expert too few.
    change_tensors(&dir, |tensors| {
        let (_, shape, bytes) = tensors.get_mut("model.language_model.layers.1.mlp.experts.down_proj").unwrap();
        bytes.truncate(bytes.len() / 5 * 4);
        shape[0] = 4;
    });
    assert_refused(&dir, &["`model.layers.1.mlp.experts.4.down_proj.weight`", "is missing"]);
}

/// Llama 4 as it is published, beside a model of images: the same logits.
#[test]
fn a_llama4_beside_a_model_of_images_is_loaded() {
    let dir = copy("llama4");
    change_json(&dir, "config.json", |config| {
        *config = json!({"model_type": "llama4", "text_config": config.clone(), "vision_config": {"depth": 1}, "boi_token_index": 150, "eoi_token_index": 151, "image_token_index": 152});
    });
    change_tensors(&dir, |tensors| {
        let all = std::mem::take(tensors).into_iter().map(|(name, tensor)| (format!("language_model.{name}"), tensor));
        tensors.extend(all);
        for of_images in ["multi_modal_projector.linear_1.weight", "vision_model.patch_embedding.linear.weight"] {
            tensors.insert(of_images.into(), (Dtype::BF16, vec![2, 2], vec![0; 8]));
        }
    });
    assert_eq!(logits(dir.path()), logits(&checkpoint("llama4")));
    let passed = &load(dir.path()).unwrap().config().passed.clone();
    assert!(passed.iter().any(|line| line.contains("2 tensors of a model of images, such as")), "{passed:?}");
    change_tensors(&dir, |tensors| drop(tensors.remove("language_model.lm_head.weight")));
    assert_refused(&dir, &["`lm_head.weight`", "is missing"]);
}

/// Gemma 4 as it is published, beside models of images and sounds, with heads by the fields of layers without a window, and with what
/// would make the keys and values that a layer reads of another: the same logits.
#[test]
fn a_gemma4_beside_other_models_is_loaded() {
    for name in ["gemma4", "gemma4-moe"] {
        let dir = copy(name);
        change_json(&dir, "config.json", |config| {
            let mut text = config.clone();
            let layers = text.as_object_mut().unwrap().remove("per_layer_config").unwrap();
            let of_layer = layers.as_object().unwrap().values().next().unwrap();
            text["global_head_dim"] = of_layer["head_dim"].clone();
            text["num_global_key_value_heads"] = of_layer.get("num_key_value_heads").cloned().unwrap_or(Value::Null);
            *config = json!({
                "model_type": "gemma4", "text_config": text, "vision_config": {"depth": 1}, "audio_config": {"hidden_size": 8},
                "image_token_id": 150, "boi_token_id": 151, "eoi_token_id": 152, "boa_token_id": 153, "eoa_token_index": 154,
                "audio_token_id": 155, "video_token_id": 156, "eos_token_id": [2, 5],
            });
        });
        change_tensors(&dir, |tensors| {
            let all = std::mem::take(tensors);
            tensors.extend(all.into_iter().map(|(name, of)| (name.replacen("model.", "model.language_model.", 1), of)));
            for other in ["model.vision_tower.patch.weight", "model.embed_audio.projection.weight"] {
                tensors.insert(other.into(), (Dtype::BF16, vec![2, 2], vec![0; 8]));
            }
            for part in ["k_proj.weight", "v_proj.weight", "k_norm.weight"].iter().filter(|_| name == "gemma4") {
                let name = format!("model.language_model.layers.3.self_attn.{part}");
                tensors.insert(name, (Dtype::BF16, vec![2, 2], vec![0; 8]));
            }
        });
        assert_eq!(logits(dir.path()), logits(&checkpoint(name)), "{name}");
        let passed = &load(dir.path()).unwrap().config().passed.clone();
        let named = |what: &str| passed.iter().any(|line| line.contains(what));
        assert!(
            named("of a model of images, such as `model.vision_tower.") && named("of a model of sounds"),
            "{passed:?}"
        );
        assert!(named("`eos_token_id` is [2,5], but text_config says 2"), "{passed:?}");
        assert_eq!(named("3 tensors of keys and values that are another layer's"), name == "gemma4", "{passed:?}");
    }
    let dir = copy("gemma4");
    change_json(&dir, "config.json", |config| {
        (config["num_kv_shared_layers"], config["use_bidirectional_attention"]) = (json!(4), json!("all"));
        config["per_layer_config"]["4"] = json!({"head_dim": 20, "sliding_window": 3});
        config["vocab_size_per_layer_input"] = json!(100);
        config["rope_parameters"].as_object_mut().unwrap().remove("sliding_attention");
    });
    let told = [
        "`num_kv_shared_layers` is 4; layer 1 is of full_attention, and no layer before these is",
        "`use_bidirectional_attention` is \"all\"",
        "`per_layer_config.4.sliding_window` is 3; supported are head_dim and num_key_value_heads",
        "`per_layer_config` gives layers of full_attention heads of 16 and of 20 elements",
        "`vocab_size_per_layer_input` is 100; each of the 160 tokens",
        "`rope_parameters.sliding_attention` is missing",
    ];
    assert_refused(&dir, &told);
}

/// Weights of a shared block may be stored under every layer that uses it: then they are the same.
#[test]
fn shared_weights_may_be_stored_again() {
    let (dir, expected) = (copy("zamba2"), logits(&checkpoint("zamba2")));
    let (first, second) = ("model.layers.0.shared_transformer.", "model.layers.3.shared_transformer.");
    change_tensors(&dir, |tensors| {
        let of_block = tensors.iter().filter(|(name, _)| name.starts_with(first));
        let again: Tensors = of_block.map(|(name, tensor)| (name.replacen(first, second, 1), tensor.clone())).collect();
        assert!(again.len() > 20);
        tensors.extend(again);
    });
    assert_eq!(logits(dir.path()), expected);
    let audits = [dir.path(), &checkpoint("zamba2")].map(|dir| Audit::of(dir, |_, _| {}).unwrap());
    assert!(audits[0].holds() && audits[0].parameters == audits[1].parameters, "{:?}", audits[0].findings);
    change_json(&dir, "config.json", |config| {
        // Older names of the kinds.
        config["layers_block_type"] = json!(["hybrid", "mamba", "hybrid", "hybrid", "hybrid"]);
    });
    assert_eq!(logits(dir.path()), expected);
    let [o, norm] = ["self_attn.o_proj.weight", "pre_ff_layernorm.weight"];
    change_tensors(&dir, |tensors| {
        tensors.get_mut(&format!("{second}{o}")).unwrap().2[0] ^= 1;
        tensors.remove(&format!("{first}{norm}"));
    });
    let differs = format!("`{second}{o}` differs from {first}{o}, which is the same weight; remove one");
    let strange = format!("`{second}{norm}` is not part of the model");
    assert_refused(&dir, &[&differs, &strange, &format!("`{first}{norm}` is missing")]);
    let audit = Audit::of(dir.path(), |_, _| {}).unwrap();
    assert!(!audit.holds() && audit.findings.iter().any(|found| found.wrong && found.tensor == format!("{second}{o}")));
}

#[test]
fn shards_give_the_same_logits() {
    let dir = copy("qwen3-adder");
    shard(&dir);
    assert_eq!(logits(dir.path()), logits(&checkpoint("qwen3-adder")));
}

/// A gpt-oss whose extents are multiples of 32: its folder with experts of bf16, and with the same as MXFP4.
fn experts_of_mxfp4() -> [TempDir; 2] {
    let [wide, packed] = [copy("gpt-oss"), copy("gpt-oss")];
    for dir in [&wide, &packed] {
        change_json(dir, "config.json", |config| {
            (config["hidden_size"], config["intermediate_size"]) = (json!(64), json!(32));
        });
    }
    let quantised = json!({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]});
    change_json(&packed, "config.json", |config| config["quantization_config"] = quantised);
    let grown = |(dtype, shape, data): Tensor| {
        let shape: Vec<usize> = shape.iter().map(|n| if [24, 48].contains(n) { n / 3 * 4 } else { *n }).collect();
        let bytes = 2 * shape.iter().product::<usize>();
        (dtype, shape, data.into_iter().cycle().take(bytes).collect())
    };
    let tensors: Tensors = read_tensors(&wide.path().join(WHOLE)).into_iter().map(|(n, t)| (n, grown(t))).collect();
    let (mut of_wide, mut of_packed) = (tensors.clone(), tensors);
    let mut state = 1u32;
    let mut byte = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    let is_of_experts = |name: &&String| name.ends_with("_proj") && name.contains("experts");
    for name in of_packed.keys().filter(is_of_experts).cloned().collect::<Vec<_>>() {
        let (_, shape, _) = of_packed.remove(&name).unwrap();
        let [count, k, n] = shape[..] else { panic!("{shape:?}") };
        let blocks: Vec<u8> = (0..count * n * k / 2).map(|_| byte()).collect();
        let scales: Vec<u8> = (0..count * n * k / 32).map(|_| 121 + byte() % 5).collect();
        let element = |expert: usize, row: usize, column: usize| {
            let at = (expert * n + column) * k + row;
            let bits = blocks[at / 2] >> (4 * (at % 2)) & 15;
            let size = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(bits & 7)]
                * 2f32.powi(i32::from(scales[at / 32]) - 127);
            if bits > 7 { -size } else { size }
        };
        let all =
            (0..count).flat_map(|expert| (0..k).flat_map(move |row| (0..n).map(move |column| [expert, row, column])));
        let expanded =
            all.flat_map(|[expert, row, column]| ((element(expert, row, column).to_bits() >> 16) as u16).to_le_bytes());
        of_wide.insert(name.clone(), (Dtype::BF16, shape.clone(), expanded.collect()));
        of_packed.insert(format!("{name}_blocks"), (Dtype::U8, vec![count, n, k / 32, 16], blocks));
        of_packed.insert(format!("{name}_scales"), (Dtype::U8, vec![count, n, k / 32], scales));
    }
    write_tensors(&wide.path().join(WHOLE), &of_wide);
    write_tensors(&packed.path().join(WHOLE), &of_packed);
    [wide, packed]
}

#[test]
fn mxfp4_is_the_folder_it_expands_to() {
    let [wide, packed] = experts_of_mxfp4();
    let expected = logits(wide.path());
    assert_eq!(logits(packed.path()), expected);
    shard(&packed);
    assert_eq!(logits(packed.path()), expected);
}

#[test]
fn mxfp4_that_is_not_whole_is_refused() {
    const SCALES: &str = "model.layers.0.mlp.experts.down_proj_scales";
    let scales = |change: fn(Tensor) -> Option<Tensor>| {
        let [_, packed] = experts_of_mxfp4();
        change_tensors(&packed, |tensors| {
            let changed = tensors.remove(SCALES).and_then(change);
            tensors.extend(changed.map(|scales| (SCALES.to_string(), scales)));
        });
        packed
    };
    assert_refused(&scales(|_| None), &["experts.down_proj_blocks` is not part of the model"]);
    let other_shape = scales(|(dtype, _, data)| Some((dtype, vec![8, 64], data)));
    assert_refused(
        &other_shape,
        &["experts.down_proj_scales` is not part of the model", "experts.down_proj` is missing"],
    );
    let not_a_number = scales(|(dtype, shape, mut data)| {
        data[3] = 255;
        Some((dtype, shape, data))
    });
    assert_refused(&not_a_number, &["experts.down_proj`", "NaN", "not finite"]);
    // No other family has it.
    let llama = copy("llama");
    change_json(&llama, "config.json", |config| config["quantization_config"] = json!({"quant_method": "mxfp4"}));
    assert_refused(&llama, &["`quantization_config.quant_method` is \"mxfp4\""]);
}

/// Folders whose tensors have the names of another class of transformers.
#[test]
fn other_names_give_the_same_logits() {
    for (name, ours, theirs) in
        [("gpt2", "transformer.", ""), ("gpt-neox", "embed_out.", "lm_head."), ("nemotron-h", "backbone.", "model.")]
    {
        let dir = copy(name);
        change_tensors(&dir, |tensors| {
            let rename = |(name, tensor): (String, Tensor)| (name.replacen(ours, theirs, 1), tensor);
            *tensors = std::mem::take(tensors).into_iter().map(rename).collect();
            assert!(!tensors.keys().any(|name| name.starts_with(ours)));
        });
        assert_eq!(logits(dir.path()), logits(&checkpoint(name)), "{name}");
    }
}

#[test]
fn missing_files() {
    for file in ["config.json", WHOLE] {
        let dir = copy("llama");
        fs::remove_file(dir.path().join(file)).unwrap();
        assert_refused(&dir, &[file]);
    }
    let line = load(Path::new("/nonexistent/model")).err().unwrap().to_string();
    assert!(line.starts_with("/nonexistent/model/config.json: cannot be read"), "{line}");
    let dir = copy("llama");
    fs::remove_file(dir.path().join(WHOLE)).unwrap();
    fs::create_dir(dir.path().join(WHOLE)).unwrap();
    assert_refused(&dir, &["model.safetensors: is not a regular file"]);
}

#[test]
fn damaged_weights() {
    let whole = fs::read(checkpoint("llama").join(WHOLE)).unwrap();
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let cases: [(Vec<u8>, &str); 5] = [
        (vec![], "it has 0 bytes"),
        (whole[..header - 1].to_vec(), "its header claims"),
        (
            whole[..whole.len() - 1].to_vec(),
            "tensor `model.norm.weight` has data_offsets [1295872, 1296128], but the file",
        ),
        ([&whole[..], &[0]].concat(), "its tensors cover 1296128 of 1296129 bytes"),
        ([&u64::MAX.to_le_bytes(), &whole[8..]].concat(), "its header claims 18446744073709551615 bytes"),
    ];
    for (bytes, expected) in cases {
        let dir = copy("llama");
        fs::write(dir.path().join(WHOLE), bytes).unwrap();
        assert_refused(&dir, &["model.safetensors: ", expected]);
    }
}

#[test]
fn overlapping_offsets() {
    let dir = copy("llama");
    let path = dir.path().join(WHOLE);
    let mut whole = fs::read(&path).unwrap();
    // The norm weights of layers 0 and 1 have equal sizes: both now claim the data of layer 0's.
    let header = String::from_utf8(whole[8..3160].to_vec()).unwrap();
    let changed = header.replace("[606720,606976]", "[262144,262400]");
    assert_ne!(header, changed);
    whole[8..3160].copy_from_slice(changed.as_bytes());
    fs::write(&path, whole).unwrap();
    assert_refused(&dir, &[WHOLE, "`model.layers.1.input_layernorm.weight` overlaps the data before it"]);
}

#[test]
fn wrong_tensors() {
    let norm = "model.layers.1.input_layernorm.weight";
    let gate = "model.layers.2.mlp.gate_proj.weight";
    let element = |name: &'static str, index: usize, bits: u16| {
        move |t: &mut Tensors| {
            t.get_mut(name).unwrap().2[2 * index..2 * index + 2].copy_from_slice(&bits.to_le_bytes());
        }
    };
    type Change = Box<dyn FnOnce(&mut Tensors)>;
    let cases: Vec<(Change, String)> = vec![
        (
            Box::new(move |t| drop(t.remove(norm))),
            format!("tensor `{norm}` is missing; config.json asks for it with shape [128]"),
        ),
        (
            Box::new(|t| drop(t.insert("model.layers.0.extra".into(), (Dtype::BF16, vec![1], vec![0, 0])))),
            "tensor `model.layers.0.extra` is not part of the model".into(),
        ),
        (
            Box::new(move |t| t.get_mut(gate).unwrap().1 = vec![128, 320]),
            format!("tensor `{gate}` has shape [128, 320]; config.json asks for [320, 128]"),
        ),
        (
            Box::new(move |t| t.get_mut(norm).unwrap().0 = Dtype::U16),
            format!("tensor `{norm}` is U16; weights must be BF16, F16 or F32"),
        ),
        (
            Box::new(element(gate, 5 * 128 + 3, 0x7FC0)),
            format!("tensor `{gate}` element [5, 3] is NaN (1 of 40960 are not finite)"),
        ),
        (
            Box::new(element("model.embed_tokens.weight", 0, 0xFF80)),
            "tensor `model.embed_tokens.weight` element [0, 0] is -inf".into(),
        ),
        (
            Box::new(element("lm_head.weight", 65535, 0x7F80)),
            "tensor `lm_head.weight` element [511, 127] is inf".into(),
        ),
    ];
    for (change, expected) in cases {
        let dir = copy("llama");
        change_tensors(&dir, change);
        assert_refused(&dir, &[WHOLE, &expected]);
    }
}

#[test]
fn another_family_than_the_weights() {
    for (from, to, tensor) in [
        ("qwen2", "llama", "tensor `model.layers.2.self_attn.v_proj.bias` is not part"),
        ("llama", "qwen2", "model.layers.0.self_attn.q_proj.bias` is missing"),
        ("llama", "qwen3", "model.layers.0.self_attn.q_norm.weight` is missing"),
    ] {
        let dir = copy(from);
        change_json(&dir, "config.json", |config| {
            config["model_type"] = to.into();
            for field in ["attention_bias", "use_sliding_window", "sliding_window", "max_window_layers", "mlp_bias"] {
                config.as_object_mut().unwrap().remove(field);
            }
        });
        assert_refused(&dir, &[WHOLE, tensor]);
    }
}

#[test]
fn all_complaints_of_a_folder_come_together() {
    let dir = copy("llama");
    change_tensors(&dir, |t| {
        t.remove("model.layers.1.input_layernorm.weight");
        t.insert("model.layers.0.extra".into(), (Dtype::BF16, vec![1], vec![0, 0]));
        t.get_mut("model.norm.weight").unwrap().0 = Dtype::U16;
        t.get_mut("model.layers.2.mlp.gate_proj.weight").unwrap().1 = vec![128, 320];
    });
    assert_refused(
        &dir,
        &[
            "`model.layers.1.input_layernorm.weight` is missing",
            "`model.layers.0.extra` is not part",
            "`model.norm.weight` is U16",
            "has shape [128, 320]",
        ],
    );
    change_json(&dir, "config.json", |config| config["hidden_act"] = "relu".into());
    change_json(&dir, "generation_config.json", |config| config["eos_token_id"] = "</s>".into());
    assert_refused(
        &dir,
        &["config.json: `hidden_act` is \"relu\"", "; ", "generation_config.json: `eos_token_id` is \"</s>\""],
    );
    // Elements are looked at behind headers, and then all of them too.
    let dir = copy("llama");
    let names = ["model.norm.weight", "model.layers.1.input_layernorm.weight", "lm_head.weight"];
    change_tensors(&dir, |t| {
        names.iter().for_each(|name| t.get_mut(*name).unwrap().2[..2].copy_from_slice(&[0xC0, 0x7F]))
    });
    assert_refused(&dir, &names.map(|name| name));
}

#[test]
fn buffers_are_passed_by_and_named() {
    let dir = copy("llama");
    change_tensors(&dir, |t| {
        for layer in 0..3 {
            t.insert(format!("model.layers.{layer}.self_attn.rotary_emb.inv_freq"), (Dtype::F32, vec![1], vec![0; 4]));
        }
        t.insert("model.layers.0.self_attn.bias".into(), (Dtype::BOOL, vec![1], vec![1]));
        t.insert("model.embed_tokens.position_ids".into(), (Dtype::I64, vec![1], vec![0; 8]));
    });
    let model = load(dir.path()).unwrap();
    assert_eq!(model.passed().len(), 1);
    assert!(
        model.passed()[0].contains("5 buffers that are computed anew, such as `model.embed_tokens.position_ids`"),
        "{:?}",
        model.passed()
    );
    assert_eq!(logits(dir.path()), logits(&checkpoint("llama")));
}

/// What one refuses as wrong the other finds wrong.
#[test]
fn an_audit_finds_what_loading_refuses() {
    type Change = Box<dyn FnOnce(&mut Tensors)>;
    let wrong = |dir: &TempDir| Audit::of(dir.path(), |_, _| {}).map_or(true, |audit| !audit.holds());
    let copy_head = |t: &mut Tensors| {
        t.insert("lm_head.weight".into(), t["model.embed_tokens.weight"].clone());
        t.get_mut("lm_head.weight").unwrap().2[0] ^= 1;
    };
    let cases: [(&str, Change); 6] = [
        ("qwen3-adder", Box::new(copy_head)),
        ("llama", Box::new(|t| drop(t.remove("model.norm.weight")))),
        ("llama", Box::new(|t| drop(t.insert("a".into(), (Dtype::BF16, vec![1], vec![0, 0]))))),
        ("llama", Box::new(|t| t.get_mut("model.norm.weight").unwrap().0 = Dtype::I16)),
        ("llama", Box::new(|t| t.get_mut("model.norm.weight").unwrap().1 = vec![1, 128])),
        ("llama", Box::new(|t| t.get_mut("model.norm.weight").unwrap().2[..2].copy_from_slice(&[0x80, 0x7F]))),
    ];
    for (i, (name, change)) in cases.into_iter().enumerate() {
        let dir = copy(name);
        assert!(load(dir.path()).is_ok() && !wrong(&dir));
        change_tensors(&dir, change);
        assert!(load(dir.path()).is_err() && wrong(&dir), "case {i}");
    }
    // Beyond what bf16 holds.
    let dir = copy("llama");
    change_tensors(&dir, |t| {
        let values = [f32::MAX; 128 * 320];
        *t.get_mut("model.layers.0.mlp.up_proj.weight").unwrap() =
            (Dtype::F32, vec![320, 128], values.iter().flat_map(|v| v.to_le_bytes()).collect());
    });
    assert!(load(dir.path()).is_err() && wrong(&dir));
}

#[test]
fn what_is_no_weights_file_says_so() {
    let dir = copy("llama");
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 12345\n";
    fs::write(dir.path().join(WHOLE), pointer).unwrap();
    assert_refused(&dir, &["model.safetensors: is a pointer of git-lfs", "git lfs pull"]);
    fs::write(dir.path().join(WHOLE), "<!DOCTYPE html><html><body>Sign in</body></html>").unwrap();
    assert_refused(&dir, &["model.safetensors: is a web page"]);
}

/// Neither what waits for ever nor what never ends is read.
#[cfg(unix)]
#[test]
fn only_regular_files_are_read() {
    use std::os::unix::fs::symlink;
    for file in ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", WHOLE, INDEX] {
        for device in [None, Some("/dev/zero"), Some("/dev")] {
            let dir = copy("qwen3-adder");
            let path = dir.path().join(file);
            drop(fs::remove_file(&path));
            if file == INDEX {
                fs::remove_file(dir.path().join(WHOLE)).unwrap();
            }
            match device {
                None => assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success()),
                Some(device) => symlink(device, &path).unwrap(),
            }
            let line = load(dir.path()).and_then(|model| model.generate(&Cpu::best(), "1", 1)).unwrap_err().to_string();
            assert!(line.contains(&format!("{file}: is not a regular file")), "{line}");
        }
    }
    // Links out of the folder are followed: the hub's cache is made of them.
    let dir = copy("llama");
    fs::remove_file(dir.path().join(WHOLE)).unwrap();
    symlink(checkpoint("llama").join(WHOLE).canonicalize().unwrap(), dir.path().join(WHOLE)).unwrap();
    assert!(load(dir.path()).is_ok());
}

#[test]
fn a_key_that_stands_twice_is_refused() {
    let twice = |file: &str| {
        let dir = copy("llama");
        if file == INDEX {
            shard(&dir);
        }
        let path = dir.path().join(file);
        let text = fs::read_to_string(&path).unwrap();
        let (from, to) = match file {
            INDEX => ("\"weight_map\":{", "\"weight_map\":{\"lm_head.weight\":\"x\","),
            _ => ("{", "{\"hidden_size\": 64, "),
        };
        fs::write(&path, text.replacen(from, to, 1)).unwrap();
        dir
    };
    assert_refused(&twice("config.json"), &["config.json: is not JSON: `hidden_size` stands in it twice"]);
    assert_refused(&twice(INDEX), &[INDEX, "`lm_head.weight` stands in it twice"]);
    // Two norms of the same size under one name.
    let dir = copy("llama");
    let path = dir.path().join(WHOLE);
    let mut whole = fs::read(&path).unwrap();
    let header = String::from_utf8(whole[8..3160].to_vec()).unwrap();
    let changed = header.replace("model.layers.1.input_layernorm.weight", "model.layers.0.input_layernorm.weight");
    whole[8..3160].copy_from_slice(changed.as_bytes());
    fs::write(&path, whole).unwrap();
    assert_refused(&dir, &[WHOLE, "`model.layers.0.input_layernorm.weight` stands in it twice"]);
}

#[test]
fn names_from_files_cannot_write_to_a_terminal() {
    let dir = copy("llama");
    change_tensors(&dir, |t| drop(t.insert("a\u{1b}[2J\u{7}".into(), (Dtype::BF16, vec![1], vec![0, 0]))));
    change_json(&dir, "config.json", |config| drop(config.as_object_mut().unwrap().remove("x")));
    assert_refused(&dir, &["tensor `a\\u{1b}[2J\\u{7}` is not part"]);
    let audit = Audit::of(dir.path(), |_, _| {}).unwrap();
    assert!(audit.findings.iter().all(|found| !found.tensor.contains('\u{1b}')));
    change_json(&dir, "config.json", |config| config["model_type"] = "\u{9b}x".into());
    assert_refused(&dir, &["\\u{9b}x"]);
}

#[test]
fn a_second_copy_of_a_tied_table_must_be_the_same() {
    let dir = copy("qwen3-adder");
    let head = "lm_head.weight";
    change_tensors(&dir, |t| drop(t.insert(head.into(), t["model.embed_tokens.weight"].clone())));
    assert_eq!(logits(dir.path()), logits(&checkpoint("qwen3-adder")));
    change_tensors(&dir, |t| t.get_mut(head).unwrap().2[0] ^= 1);
    assert_refused(&dir, &[WHOLE, "tensor `lm_head.weight` differs from model.embed_tokens.weight"]);
}

#[test]
fn wrong_configs() {
    let cases: [(&str, Value, &str); 9] = [
        ("/model_type", json!("mpt"), "`model_type` is \"mpt\"; supported are qwen3, qwen2, llama, mistral"),
        (
            "/rope_parameters/rope_type",
            json!("ntk"),
            "`rope_parameters.rope_type` is \"ntk\"; supported are \"default\"",
        ),
        ("/hidden_act", json!("relu"), "`hidden_act` is \"relu\""),
        ("/hidden_size", json!(0), "`hidden_size` is 0"),
        ("/hidden_size", json!(64), "has shape [512, 128]; config.json asks for [512, 64]"),
        ("/num_hidden_layers", json!(2), "`model.layers.2.self_attn.v_proj.weight` is not part"),
        ("/num_hidden_layers", json!(2147483647), "`num_hidden_layers` is 2147483647; at most 65536"),
        ("/tie_word_embeddings", json!(true), "`lm_head.weight` differs from model.embed_tokens.weight"),
        ("/eos_token_id", json!([2, 512]), "`eos_token_id` is 512; a token is a whole number below vocab_size 512"),
    ];
    for (field, value, expected) in cases {
        let dir = copy("llama");
        change_json(&dir, "config.json", |config| *config.pointer_mut(field).unwrap() = value);
        assert_refused(&dir, &[expected]);
    }
    for (text, expected) in [("{\"a\": ", "config.json: is not JSON"), ("[]", "config.json: is not a JSON object")] {
        let dir = copy("llama");
        fs::write(dir.path().join("config.json"), text).unwrap();
        assert_refused(&dir, &[expected]);
    }
    let dir = copy("llama");
    change_json(&dir, "generation_config.json", |config| config["eos_token_id"] = "</s>".into());
    assert_refused(&dir, &["generation_config.json: `eos_token_id` is \"</s>\""]);
}

#[test]
fn wrong_shards() {
    let list_norm_in = |dir: &TempDir, shard: &str| {
        change_json(dir, INDEX, |index| index["weight_map"]["model.norm.weight"] = shard.into());
    };
    for (name, expected) in [
        ("gone.safetensors", "`weight_map` names `gone.safetensors`, which is missing"),
        (
            "../model-00001-of-00002.safetensors",
            "`weight_map.model.norm.weight` is \"../model-00001-of-00002.safetensors\"; it must be a file name",
        ),
        ("/etc/passwd", "it must be a file name in the model folder"),
    ] {
        let dir = copy("llama");
        shard(&dir);
        list_norm_in(&dir, name);
        assert_refused(&dir, &[INDEX, expected]);
    }

    let listed = |i: usize| {
        let dir = copy("llama");
        shard(&dir);
        list_norm_in(&dir, &shard_name(i));
        load(dir.path()).map(|_| ()).map_err(|e| e.to_string())
    };
    let (a, b) = (listed(0), listed(1));
    let line = a.and(b).unwrap_err();
    assert!(line.contains("tensor `model.norm.weight` is not listed for this file"), "{line}");

    let dir = copy("llama");
    shard(&dir);
    change_json(&dir, INDEX, |index| index["weight_map"]["ghost"] = shard_name(0).into());
    assert_refused(
        &dir,
        &[INDEX, "tensor `ghost` is listed in \"model-00001-of-00002.safetensors\" but stands in no shard"],
    );

    let dir = copy("llama");
    shard(&dir);
    let (first, second) = (dir.path().join(shard_name(0)), dir.path().join(shard_name(1)));
    let (name, tensor) = read_tensors(&first).pop_first().unwrap();
    let mut tensors = read_tensors(&second);
    tensors.insert(name.clone(), tensor);
    write_tensors(&second, &tensors);
    assert_refused(&dir, &[&format!("tensor `{name}` stands in "), &shard_name(0), &shard_name(1), "keep one of them"]);

    let dir = copy("llama");
    shard(&dir);
    fs::copy(checkpoint("llama").join(WHOLE), dir.path().join(WHOLE)).unwrap();
    assert_refused(&dir, &[INDEX, "stands beside model.safetensors; keep one of them"]);

    let dir = copy("llama");
    shard(&dir);
    change_json(&dir, INDEX, |index| *index = json!({"metadata": {}}));
    assert_refused(&dir, &[INDEX, "`weight_map` is missing"]);
}

fn generate(dir: &TempDir, prompt: &str, max_tokens: usize) -> Result<Generation, String> {
    load(dir.path()).unwrap().generate(&Cpu::best(), prompt, max_tokens).map_err(|e| e.to_string())
}

#[test]
fn bos_comes_once_and_only_where_wanted() {
    let prompt = |dir: &TempDir| generate(dir, "1+2=", 0).unwrap().prompt;
    let (plain, with_bos) = (vec![4, 13, 5, 15], vec![1, 4, 13, 5, 15]);
    assert_eq!(prompt(&copy("qwen3-adder")), with_bos);

    // It is the tokenizer's word, whatever config.json calls bos.
    for bos in [Value::Null, json!(7)] {
        let dir = copy("qwen3-adder");
        change_json(&dir, "config.json", |config| config["bos_token_id"] = bos);
        assert_eq!(prompt(&dir), with_bos);
        fs::write(dir.path().join("tokenizer_config.json"), r#"{"add_bos_token": false}"#).unwrap();
        assert_eq!(prompt(&dir), with_bos);
    }
    let dir = copy("qwen3-adder");
    change_json(&dir, "tokenizer.json", |tokenizer| tokenizer["post_processor"] = Value::Null);
    fs::write(dir.path().join("tokenizer_config.json"), r#"{"add_bos_token": true, "bos_token": "<bos>"}"#).unwrap();
    assert_eq!(prompt(&dir), plain);
    assert!(generate(&dir, "", 1).unwrap_err().starts_with("prompt: has no tokens"));
}

#[test]
fn any_eos_ends_the_text() {
    // "12+34=" continues with 46: the token of 6 is 9, that of 4 is 7.
    for (config, generation, expected, stop) in [
        (json!(2), json!([2, 9]), "4", Stop::Eos),
        (json!([9, 2]), Value::Null, "4", Stop::Eos),
        (json!(9), json!(7), "", Stop::Eos),
        (Value::Null, Value::Null, "46", Stop::MaxTokens),
    ] {
        let dir = copy("qwen3-adder");
        change_json(&dir, "config.json", |json| json["eos_token_id"] = config);
        change_json(&dir, "generation_config.json", |json| json["eos_token_id"] = generation);
        let found = generate(&dir, "12+34=", 2).unwrap();
        assert_eq!((found.text.as_str(), found.stop), (expected, stop));
    }
    let dir = copy("qwen3-adder");
    fs::remove_file(dir.path().join("generation_config.json")).unwrap();
    assert_eq!(generate(&dir, "12+34=", 8).unwrap().text, "46");
    // Without an eos the model's own end token is pushed but never shown: to the tokenizer it is special.
    change_json(&dir, "config.json", |json| json["eos_token_id"] = 19.into());
    let endless = generate(&dir, "12+34=", 300).unwrap();
    assert_eq!((endless.tokens.len(), endless.stop, &endless.text[..2]), (300, Stop::MaxTokens, "46"));
}

#[test]
fn special_tokens_are_not_text() {
    // The tokenizer says which are: the token of 6, by its own files alone.
    for (file, said, is_special) in [
        ("config.json", json!({"pad_token_id": 9, "bos_token_id": 9}), false),
        ("tokenizer_config.json", json!({"pad_token": "6"}), true),
        ("tokenizer_config.json", json!({"additional_special_tokens": ["6"]}), true),
        ("special_tokens_map.json", json!({"pad_token": "6"}), true),
    ] {
        let dir = copy("qwen3-adder");
        if !dir.path().join(file).exists() {
            fs::write(dir.path().join(file), "{}").unwrap();
        }
        change_json(&dir, file, |json| json.as_object_mut().unwrap().extend(said.as_object().unwrap().clone()));
        let found = generate(&dir, "12+34=", 2).unwrap();
        assert_eq!((found.tokens.contains(&9), found.text.contains('6')), (true, !is_special), "{said}: {found:?}");
    }
}

#[test]
fn generation_stops_at_the_last_position() {
    // bos and "12+34=" are 7 tokens; each token but the last takes a further position.
    for (positions, expected) in [(8, Ok("46")), (7, Ok("4")), (6, Err("7; the model has 6 positions"))] {
        let dir = copy("qwen3-adder");
        change_json(&dir, "config.json", |config| config["max_position_embeddings"] = positions.into());
        match (generate(&dir, "12+34=", 8), expected) {
            (Ok(found), Ok(text)) => assert_eq!((found.text.as_str(), found.stop), (text, Stop::MaxPositions)),
            (Err(line), Err(end)) => assert_eq!(line, format!("prompt: a sequence has {end}")),
            (found, _) => panic!("{found:?}, expected {expected:?}"),
        }
    }
}

#[test]
fn wrong_tokenizers() {
    for (change, expected) in [
        (json!({"model": {"type": "WordLevel"}}), "tokenizer.json: is not a tokenizer"),
        (json!({"truncation": {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}}), ""),
    ] {
        let dir = copy("qwen3-adder");
        change_json(&dir, "tokenizer.json", |tokenizer| {
            for (field, value) in change.as_object().unwrap() {
                tokenizer[field] = value.clone();
            }
        });
        match generate(&dir, "12+34=", 8) {
            Ok(found) => assert_eq!((expected, found.text.as_str()), ("", "46"), "the prompt was cut"),
            Err(line) => assert!(!expected.is_empty() && line.contains(expected) && !line.contains('\n'), "{line}"),
        }
    }
    let dir = copy("qwen3-adder");
    change_json(&dir, "tokenizer.json", |tokenizer| tokenizer["model"]["vocab"]["1"] = 40.into());
    let line = generate(&dir, "12+34=", 8).unwrap_err();
    assert!(line.contains("tokenizer.json: gives token 40, but vocab_size in config.json is 32"), "{line}");
}
