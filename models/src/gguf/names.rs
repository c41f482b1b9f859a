//! What a GGUF file's metadata and tensors are in a Hugging Face folder.

use super::*;
use serde_json::json;

/// An architecture of GGUF whose layers are known here.
pub(super) struct Architecture {
    /// Its name in `general.architecture`.
    pub name: &'static str,
    /// The `model_type` of a folder, without experts and with.
    pub model_types: [Option<&'static str>; 2],
    /// Whether rows of q and k are stored pair by pair, as its kernels turn them: number 2j + s of a head is the folder's
    /// j + s * width / 2.
    pub paired: bool,
}

pub(super) const ARCHITECTURES: [Architecture; 5] = [
    Architecture { name: "llama", model_types: [Some("llama"), Some("mixtral")], paired: true },
    Architecture { name: "qwen2", model_types: [Some("qwen2"), None], paired: false },
    Architecture { name: "qwen2moe", model_types: [None, Some("qwen2_moe")], paired: false },
    Architecture { name: "qwen3", model_types: [Some("qwen3"), None], paired: false },
    Architecture { name: "qwen3moe", model_types: [None, Some("qwen3_moe")], paired: false },
];

/// Fields of an architecture that a folder has by another name: behind `<architecture>.` in the file.
pub(super) const FIELDS: [(&str, &str); 13] = [
    ("block_count", "num_hidden_layers"),
    ("context_length", "max_position_embeddings"),
    ("embedding_length", "hidden_size"),
    ("feed_forward_length", "intermediate_size"),
    ("attention.head_count", "num_attention_heads"),
    ("attention.head_count_kv", "num_key_value_heads"),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
    ("attention.key_length", "head_dim"),
    ("rope.freq_base", "rope_theta"),
    ("expert_count", "num_experts"),
    ("expert_used_count", "num_experts_per_tok"),
    ("expert_feed_forward_length", "moe_intermediate_size"),
    ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
];

/// Tensors of a block, and what a folder calls them within its own.
pub(super) const PARTS: [(&str, &str); 16] = [
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
    ("ffn_gate_inp", "mlp.gate"),
    ("ffn_gate_inp_shexp", "mlp.shared_expert_gate"),
    ("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
    ("ffn_up_shexp", "mlp.shared_expert.up_proj"),
    ("ffn_down_shexp", "mlp.shared_expert.down_proj"),
];

/// Factors by which frequencies are divided: what llama.cpp makes of the scaling of Llama 3.
pub(crate) const ROPE_FACTORS: &str = "rope_freqs.weight";

/// What is known of a file once its architecture is.
struct Reading<'a> {
    path: &'a Path,
    contents: &'a Contents,
    of: &'static Architecture,
    complaints: Vec<ModelError>,
}

impl Reading<'_> {
    fn get(&self, name: &str) -> Option<&Value> {
        self.contents.metadata.get(&format!("{}.{name}", self.of.name))
    }

    fn size(&self, name: &str) -> Option<usize> {
        self.get(name)?.as_u64().and_then(|size| usize::try_from(size).ok())
    }

    fn refuse(&mut self, name: &str, why: impl Into<String>) {
        self.complaints.push(ModelError::field(self.path, format!("{}.{name}", self.of.name), why));
    }
}

/// The `config.json` of a folder with this model.
///
/// # Errors
/// An architecture that is not known; every field that changes a computation and is not read.
pub(super) fn config(
    path: &Path,
    contents: &Contents,
    factors: Option<&[f32]>,
) -> Result<Map<String, Value>, ModelError> {
    let architecture = contents.metadata.get("general.architecture").and_then(Value::as_str).unwrap_or_default();
    let Some(of) = ARCHITECTURES.iter().find(|of| of.name == architecture) else {
        let names: Vec<&str> = ARCHITECTURES.iter().map(|of| of.name).collect();
        let why = format!("is `{architecture}`; supported are {}; load the model's folder instead", names.join(", "));
        return Err(ModelError::field(path, "general.architecture", why));
    };
    if contents.metadata.get("split.count").and_then(Value::as_u64).is_some_and(|count| count > 1) {
        return Err(ModelError::field(
            path,
            "split.count",
            "is above 1; join the files with `llama-gguf-split --merge`",
        ));
    }
    let mut reading = Reading { path, contents, of, complaints: Vec::new() };
    let mut map = Map::new();
    let has_experts = reading.size("expert_count").is_some_and(|count| count > 0);
    match of.model_types[usize::from(has_experts)] {
        Some(model_type) => drop(map.insert("model_type".into(), model_type.into())),
        None => reading.refuse("expert_count", "and the architecture do not go together"),
    }
    for (theirs, ours) in FIELDS {
        if let Some(value) = reading.get(theirs).filter(|_| has_experts || !theirs.starts_with("expert")) {
            let mixtral = of.name == "llama" && theirs == "expert_count";
            map.insert(if mixtral { "num_local_experts" } else { ours }.into(), value.clone());
        }
    }
    if of.name == "qwen3moe" || of.name == "qwen2moe" {
        map.insert("norm_topk_prob".into(), (of.name == "qwen3moe").into());
        let blocks = reading.size("block_count").unwrap_or(0).min(contents.tensors.len());
        let is_dense = |i: &usize| !contents.tensors.contains_key(&format!("blk.{i}.ffn_gate_inp.weight"));
        map.insert("mlp_only_layers".into(), (0..blocks).filter(is_dense).collect::<Vec<_>>().into());
    }
    scaling(&mut reading, &mut map, factors);
    match contents.tensors.get("token_embd.weight").and_then(|table| table.shape.first()) {
        Some(rows) => drop(map.insert("vocab_size".into(), (*rows).into())),
        None => reading.complaints.push(ModelError::tensor(path, "token_embd.weight", "is missing")),
    }
    map.insert("tie_word_embeddings".into(), (!contents.tensors.contains_key("output.weight")).into());
    for (theirs, ours) in [("bos", "bos_token_id"), ("eos", "eos_token_id"), ("padding", "pad_token_id")] {
        if let Some(token) = contents.metadata.get(&format!("tokenizer.ggml.{theirs}_token_id")) {
            map.insert(ours.into(), token.clone());
        }
    }
    if contents.tensors.contains_key("blk.0.attn_q.bias") && of.name == "llama" {
        map.insert("attention_bias".into(), true.into());
    }
    unread(&mut reading);
    ModelError::all(reading.complaints)?;
    Ok(map)
}

/// How positions are stretched.
fn scaling(reading: &mut Reading, map: &mut Map<String, Value>, factors: Option<&[f32]>) {
    let width = reading.size("attention.key_length").or_else(|| {
        let (hidden, heads) = (reading.size("embedding_length")?, reading.size("attention.head_count")?);
        hidden.checked_div(heads)
    });
    if let (Some(turned), Some(width)) = (reading.size("rope.dimension_count"), width)
        && turned != width
    {
        reading
            .refuse("rope.dimension_count", format!("is {turned}; heads of {width} are turned whole in this family"));
    }
    if let (Some(value), Some(key)) = (reading.size("attention.value_length"), width)
        && value != key
    {
        reading.refuse("attention.value_length", format!("is {value}; supported is that of keys, {key}"));
    }
    let number = |name: &str| reading.get(name).cloned().unwrap_or(Value::Null);
    let (factor, original) = (number("rope.scaling.factor"), number("rope.scaling.original_context_length"));
    // A factor without a type is a linear one.
    let unsaid = if factor.is_null() { "none" } else { "linear" };
    let kind = reading.get("rope.scaling.type").and_then(Value::as_str).unwrap_or(unsaid).to_string();
    match kind.as_str() {
        "none" => {}
        "linear" => drop(map.insert("rope_scaling".into(), json!({"rope_type": "linear", "factor": factor}))),
        "yarn" => {
            let of = json!({"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original});
            map.insert("rope_scaling".into(), of);
        }
        other => reading.refuse("rope.scaling.type", format!("is `{other}`; supported are none, linear and yarn")),
    }
    if let Some(factors) = factors {
        let base = reading.get("rope.freq_base").and_then(Value::as_f64).unwrap_or(10_000.0);
        let factor = factors.iter().copied().fold(1.0, f32::max);
        let near = |(found, wanted): (&f32, f64)| (f64::from(*found) - wanted).abs() <= 1e-4 * wanted;
        if !factors.iter().zip(of_llama3(base, factors.len(), f64::from(factor))).all(near) {
            let why = "are not those of Llama 3's scaling; load the model's folder instead";
            reading.complaints.push(ModelError::tensor(reading.path, ROPE_FACTORS, why));
        }
        let of = json!({
            "rope_type": "llama3", "factor": factor, "low_freq_factor": LOW, "high_freq_factor": HIGH,
            "original_max_position_embeddings": ORIGINAL,
        });
        map.insert("rope_scaling".into(), of);
    }
}

/// What Llama 3's scaling is with, but for its factor.
const LOW: f64 = 1.0;
const HIGH: f64 = 4.0;
const ORIGINAL: usize = 8192;

/// By how much llama.cpp divides each frequency for Llama 3's scaling.
pub(super) fn of_llama3(base: f64, pairs: usize, factor: f64) -> impl Iterator<Item = f64> {
    (0..pairs).map(move |i| {
        let turns = ORIGINAL as f64 / std::f64::consts::TAU * base.powf(-(i as f64) / pairs as f64);
        let smooth = ((turns - LOW) / (HIGH - LOW)).clamp(0.0, 1.0);
        1.0 / ((1.0 - smooth) / factor + smooth)
    })
}

/// Refuses fields of the architecture that nothing here reads.
fn unread(reading: &mut Reading) {
    // Of these the value is looked at above, or says nothing of the computation.
    const SEEN: [&str; 7] = [
        "rope.dimension_count",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.finetuned",
        "attention.value_length",
        "vocab_size",
    ];
    let beginning = format!("{}.", reading.of.name);
    let unknown: Vec<String> = (reading.contents.metadata.keys())
        .filter_map(|key| key.strip_prefix(&beginning))
        .filter(|key| !SEEN.contains(key) && !FIELDS.iter().any(|(theirs, _)| theirs == key))
        .map(String::from)
        .collect();
    for key in unknown {
        reading.refuse(&key, "is set, and nothing here reads it; load the model's folder instead");
    }
}

/// A tensor of a folder, and where in one of a file it stands.
#[derive(Debug, PartialEq)]
pub(crate) struct Place {
    /// Its name in a folder.
    pub name: String,
    /// Which one, of the experts that stand there one behind the other.
    pub part: Option<usize>,
    /// Whether its rows are stored pair by pair, in heads of which there are so many.
    pub heads: Option<usize>,
}

/// The tensors of a folder that one of a file holds; `None` for what is none of a model's.
pub(crate) fn places(contents: &Contents, name: &str) -> Option<Vec<Place>> {
    let architecture = contents.metadata.get("general.architecture").and_then(Value::as_str)?;
    let of = ARCHITECTURES.iter().find(|of| of.name == architecture)?;
    let whole = |name: String| Some(vec![Place { name, part: None, heads: None }]);
    match name {
        "token_embd.weight" => return whole("model.embed_tokens.weight".into()),
        "output_norm.weight" => return whole("model.norm.weight".into()),
        "output.weight" => return whole("lm_head.weight".into()),
        _ => {}
    }
    let (block, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    let (part, kind) = rest.rsplit_once('.')?;
    let size = |name: &str| contents.metadata.get(&format!("{architecture}.{name}"))?.as_u64();
    let heads = match part {
        "attn_q" => size("attention.head_count"),
        "attn_k" => size("attention.head_count_kv").or_else(|| size("attention.head_count")),
        _ => None,
    };
    let heads = heads.filter(|_| of.paired).map(|heads| heads as usize);
    let mixtral = of.name == "llama";
    if let Some(which) = part.strip_prefix("ffn_").and_then(|rest| rest.strip_suffix("_exps")) {
        let names = if mixtral { ["w1", "w3", "w2"] } else { ["gate_proj", "up_proj", "down_proj"] };
        let at = ["gate", "up", "down"].iter().position(|known| *known == which)?;
        let count = *contents.tensors.get(name)?.shape.first()?;
        let inside = if mixtral { "block_sparse_moe" } else { "mlp" };
        let place = |e: usize| Place {
            name: format!("model.layers.{block}.{inside}.experts.{e}.{}.{kind}", names[at]),
            part: Some(e),
            heads: None,
        };
        // As many as a model has, or it is damaged.
        return (count <= 1 << 16).then(|| (0..count).map(place).collect());
    }
    if mixtral && part == "ffn_gate_inp" {
        return whole(format!("model.layers.{block}.block_sparse_moe.gate.{kind}"));
    }
    let (_, ours) = PARTS.iter().find(|(theirs, _)| *theirs == part)?;
    Some(vec![Place { name: format!("model.layers.{block}.{ours}.{kind}"), part: None, heads }])
}
