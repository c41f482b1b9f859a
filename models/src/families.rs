//! The families: what the `config.json` of each says, as blocks of layers. A family is one file of data, which reads the
//! fields that its code in transformers reads, and a line of [`ALL`].

mod apertus;
mod arcee;
mod bamba;
mod cohere2;
mod deepseek_v2;
mod deepseek_v3;
mod deepseek_v32;
mod dots1;
mod ernie4_5;
mod ernie4_5_moe;
mod exaone4;
mod falcon_h1;
mod falcon_mamba;
mod gemma2;
mod gemma3_text;
mod gemma4;
mod glm4;
mod glm4_moe;
mod gpt2;
mod gpt_neox;
mod gpt_oss;
mod granite;
mod granitemoe;
mod granitemoehybrid;
mod hunyuan_v1_dense;
mod hunyuan_v1_moe;
mod jamba;
mod kimi_linear;
mod lfm2;
mod lfm2_moe;
mod llama;
mod llama4;
mod mamba;
mod mamba2;
mod minimax_m2;
mod ministral3;
mod mistral;
mod mixtral;
mod nemotron;
mod nemotron_h;
mod neutral;
mod olmo2;
mod olmo3;
mod olmo_hybrid;
mod olmoe;
mod parts;
mod phi3;
mod phimoe;
mod qwen2;
mod qwen2_moe;
mod qwen3;
mod qwen3_5;
mod qwen3_5_moe;
mod qwen3_moe;
mod qwen3_next;
pub(crate) mod rwkv7;
mod seed_oss;
mod smollm3;
mod starcoder2;
mod zamba2;

use crate::ModelError;
use crate::config::Config;
use crate::fields::Fields;
use serde_json::Value;
use std::fmt;

pub(crate) use rwkv7::of_tensors;

/// Every family, in the order in which errors name them.
const ALL: &[Family] = &[
    qwen3::FAMILY,
    qwen2::FAMILY,
    llama::FAMILY,
    mistral::FAMILY,
    gemma2::FAMILY,
    phi3::FAMILY,
    mixtral::FAMILY,
    qwen3_moe::FAMILY,
    deepseek_v2::FAMILY,
    deepseek_v3::FAMILY,
    deepseek_v32::FAMILY,
    olmo2::FAMILY,
    olmo3::FAMILY,
    olmoe::FAMILY,
    seed_oss::FAMILY,
    smollm3::FAMILY,
    exaone4::FAMILY,
    gemma3_text::FAMILY,
    gemma4::FAMILY,
    glm4::FAMILY,
    ernie4_5::FAMILY,
    granite::FAMILY,
    lfm2::FAMILY,
    lfm2_moe::FAMILY,
    qwen2_moe::FAMILY,
    granitemoe::FAMILY,
    hunyuan_v1_dense::FAMILY,
    hunyuan_v1_moe::FAMILY,
    glm4_moe::FAMILY,
    gpt_oss::FAMILY,
    minimax_m2::FAMILY,
    ernie4_5_moe::FAMILY,
    dots1::FAMILY,
    mamba::FAMILY,
    falcon_mamba::FAMILY,
    jamba::FAMILY,
    mamba2::FAMILY,
    bamba::FAMILY,
    granitemoehybrid::FAMILY,
    qwen3_next::FAMILY,
    qwen3_5::FAMILY,
    qwen3_5_moe::FAMILY,
    olmo_hybrid::FAMILY,
    kimi_linear::FAMILY,
    arcee::FAMILY,
    starcoder2::FAMILY,
    gpt2::FAMILY,
    gpt_neox::FAMILY,
    cohere2::FAMILY,
    nemotron::FAMILY,
    ministral3::FAMILY,
    llama4::FAMILY,
    phimoe::FAMILY,
    apertus::FAMILY,
    nemotron_h::FAMILY,
    falcon_h1::FAMILY,
    rwkv7::FAMILY,
    zamba2::FAMILY,
];

/// A model family.
#[derive(Clone, Copy)]
pub struct Family {
    /// The `model_type` in `config.json`.
    name: &'static str,
    /// The field of what norms add under the root.
    pub(crate) eps: &'static str,
    /// Whether the output projection is the embedding table where the folder does not say.
    pub(crate) tied: bool,
    /// Whether a folder need not say how long a text may be, since no layer counts positions.
    pub(crate) endless: bool,
    /// The `model_type` of folders whose `text_config` is one of this family, with a model of images beside it.
    pub(crate) nested: Option<&'static str>,
    /// Whether the experts may be stored as MXFP4.
    pub(crate) mxfp4: bool,
    /// Lists by layer, of which the first that is there says how many layers there are where `num_hidden_layers` is missing.
    pub(crate) counted: &'static [&'static str],
    /// Fields that most families call otherwise: that name, and its own. Either is read, as `attribute_map` of transformers has it.
    pub(crate) renamed: &'static [(&'static str, &'static str)],
    /// Reads what is its own, and the blocks, of which there are so many.
    read: fn(&mut Config, &Fields, usize),
}

impl Family {
    /// What most have in common, before the rest is said.
    const fn of(name: &'static str, read: fn(&mut Config, &Fields, usize)) -> Family {
        Family {
            name,
            eps: "rms_norm_eps",
            tied: false,
            endless: false,
            nested: None,
            mxfp4: false,
            counted: &[],
            renamed: &[],
            read,
        }
    }

    /// Every supported family.
    pub fn all() -> &'static [Family] {
        ALL
    }

    /// The `model_type` in `config.json`.
    pub fn name(self) -> &'static str {
        self.name
    }

    /// That of a folder, and the fields of its text model.
    pub(crate) fn read(fields: Fields) -> Result<(Family, Fields), ModelError> {
        let value = fields.get("model_type");
        let is = |name: &str| value.is_some_and(|value| value == name);
        let Some(family) = ALL.iter().find(|family| is(family.name) || family.nested.is_some_and(is)) else {
            let names: Vec<&str> = ALL.iter().flat_map(|family| [Some(family.name), family.nested]).flatten().collect();
            let said = value.map_or("missing".to_string(), Value::to_string);
            let why = format!("is {said}; supported are {}", names.join(", "));
            return Err(ModelError::field(fields.path(), "model_type", why));
        };
        let mut fields = if is(family.name) { fields } else { fields.within("text_config", BESIDE)? };
        fields.only("model_type", &[family.name.into()]);
        fields.rename(family.renamed);
        Ok((*family, fields))
    }

    /// Reads what is its own, and `layers` blocks.
    pub(crate) fn blocks(self, config: &mut Config, fields: &Fields, layers: usize) {
        (self.read)(config, fields, layers);
        // Whoever does not read the types of the layers may still name them.
        if !fields.was_asked("layer_types") {
            let read = config.windows();
            let window = read.iter().copied().flatten().next();
            if parts::windows(fields, layers, window, |i| read[i].is_some()) != read {
                fields.refuse("layer_types", format!("are not those of {}", self.name));
            }
        }
    }
}

/// The fields of models of images that stand around a `text_config`.
const BESIDE: &[&str] = &[
    "vision_config",
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
    "image_token_index",
    "boi_token_index",
    "eoi_token_index",
    "audio_config",
    "boi_token_id",
    "eoi_token_id",
    "boa_token_id",
    "eoa_token_id",
    "eoa_token_index",
    "audio_token_id",
];

impl PartialEq for Family {
    fn eq(&self, other: &Family) -> bool {
        self.name == other.name
    }
}

impl fmt::Debug for Family {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.name)
    }
}
