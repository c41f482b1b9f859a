//! `config.json` and `generation_config.json`, read strictly.
//!
//! A config says what a model computes, and nothing of it is guessed. Each family reads the fields that its code in
//! transformers reads ([`crate::families`]); a field that another model's code reads is refused by name where its value
//! asks for something, and what is passed by is named ([`crate::fields`]).

use crate::error::escaped;
use crate::fields::Fields;
use crate::layers::head::Finish;
use crate::layers::{LayerPlan, attend, attention, branch, is_size, moe, norm, per_layer, shared, time_mix};
use crate::rotary::{RopeLength, Rotary};
use crate::{Family, ModelError, families, gguf, quantised};
use serde_json::{Map, Value};
use std::path::Path;
use std::str::FromStr;

/// A contract for how weights may be stored: `contract/ws1.toml`, or `contract/ws2.toml`, which admits more.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
pub enum StorageContract {
    /// Floats of 16 and 32 bits, integers with scales, and MXFP4.
    #[default]
    Ws1,
    /// Floats of 8 bits with a scale for each block, too.
    Ws2,
}

impl StorageContract {
    /// Its name.
    pub fn name(self) -> &'static str {
        if self == StorageContract::Ws1 { "ws1" } else { "ws2" }
    }
}

impl FromStr for StorageContract {
    type Err = ModelError;

    fn from_str(text: &str) -> Result<StorageContract, ModelError> {
        let found = [StorageContract::Ws1, StorageContract::Ws2].into_iter().find(|contract| contract.name() == text);
        found.ok_or_else(|| ModelError::input("contract", format!("is `{}`; there are ws1 and ws2", escaped(text))))
    }
}

/// What a model computes, as data: its blocks, and what stands before and behind them. Every size is at most `i32::MAX`.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Model family.
    pub family: Family,
    /// Tokens in the vocabulary.
    pub vocab: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// The branches of each block, in the order in which they are run.
    pub blocks: Vec<Vec<branch::Plan>>,
    /// What several of them share.
    pub shared: Vec<shared::Plan>,
    /// What stands before the number of a block in the names of its tensors.
    pub stack: &'static str,
    /// The name of the table of embeddings, without `.weight`.
    pub table: &'static str,
    /// That of the output projection, where it is a matrix of its own.
    pub head: &'static str,
    /// Whether the output projection has a bias.
    pub head_bias: bool,
    /// That of the table of learned positions, which are added to the embedded tokens, where there is one.
    pub positions: Option<&'static str>,
    /// That of a norm behind the embedding, where there is one.
    pub embed_norm: Option<&'static str>,
    /// How inputs that blocks have of their own are made of tokens, where they have any.
    pub inputs: Option<per_layer::inputs::Plan>,
    /// The name of a number that is stored with each block and multiplies the residual stream behind it, where there is one.
    pub block_factor: Option<&'static str>,
    /// Whether the matrices of blocks are stored transposed.
    pub transposed: bool,
    /// All norms of the residual stream.
    pub norms: norm::Plan,
    /// The name of that behind the last block, without `.weight`.
    pub final_norm: &'static str,
    /// How positions become angles: the tables that attentions name.
    pub rotary: Vec<Rotary>,
    /// Factor of the embedded tokens.
    pub embed_scale: Option<f64>,
    /// What is done to the logits.
    pub finish: Option<Finish>,
    /// Longest sequence that the model is for.
    pub max_positions: usize,
    /// What the frequencies of rotary positions belong to. Where nothing else is said the length that the model was trained on,
    /// for scalings that depend on a length, else `max_positions`.
    pub rope_length: RopeLength,
    /// Whether the output projection is the embedding table.
    pub tied: bool,
    /// Blocks behind the last one that predict further tokens; stored with some models and not part of the forward.
    pub extra_layers: usize,
    /// The beginnings of the names of other tensors that are stored and not part of the forward, and what they are for.
    pub unused: &'static [(&'static str, &'static str)],
    /// The token that begins a text.
    pub bos: Option<i32>,
    /// The tokens that end a text: those of `generation_config.json` where it names any, else those of `config.json`.
    pub eos: Vec<i32>,
    /// The token that fills up batches; never part of a text.
    pub pad: Option<i32>,
    /// A line for each field that was passed by: no code reads it, or its value asks for nothing.
    pub passed: Vec<String>,
    /// The first contract that admits how the weights of the folder are stored.
    pub stored_by: StorageContract,
}

/// What stands for a `config.json` in a folder that needs none, or in a file that holds a whole model.
fn without_config(dir: &Path, path: &Path) -> Result<Option<Map<String, Value>>, ModelError> {
    match () {
        () if gguf::is_gguf(dir) => gguf::config(dir).map(Some),
        () if path.exists() => Ok(None),
        () => families::of_tensors(dir),
    }
}

/// Refuses matrices that are stored in a way that is not read; the contract that admits those of others.
fn matrices_are_read(family: Family, fields: &Fields) -> StorageContract {
    let mut contract = StorageContract::Ws1;
    if let Some(value) = fields.get("quantization_config") {
        match quantised::read(value) {
            Ok(stored) if stored.float8.is_some() => contract = StorageContract::Ws2,
            Ok(_) => {}
            Err(complaints) => complaints.into_iter().for_each(|(field, why)| fields.refuse(field, why)),
        }
        if value["quant_method"] == "mxfp4" && !family.mxfp4 {
            fields.refuse("quantization_config.quant_method", "is \"mxfp4\", which this family does not have");
        }
    }
    if fields.get("compression_config").is_some() {
        let why = "is set; supported is quantization_config, or plain BF16, F16 or F32 weights";
        fields.refuse("compression_config", why);
    }
    contract
}

impl Config {
    /// Reads `config.json` and, where there is one, `generation_config.json` of the folder `dir`.
    ///
    /// # Errors
    /// A file that is missing or not a JSON object; all fields that are missing, malformed, or ask for a computation that
    /// the family does not have.
    pub fn load(dir: &Path) -> Result<Config, ModelError> {
        let path = dir.join("config.json");
        let of_tensors = without_config(dir, &path)?;
        let path = if of_tensors.is_some() { dir.into() } else { path };
        let mut config = Config::read(match of_tensors {
            Some(map) => Fields::new(path, map),
            None => Fields::read(path)?,
        });
        let generation = dir.join("generation_config.json");
        if generation.exists() {
            // What of it is wrong is told beside what is wrong with the other.
            let fields = Fields::read(generation)?;
            let eos = fields.eos(config.as_ref().map_or(0, |config| config.vocab));
            match (&mut config, fields.end()) {
                (_, Ok(_)) => {}
                (Err(first), Err(e)) => first.join(e),
                (Ok(_), Err(e)) => return Err(e),
            }
            if let Ok(config) = &mut config
                && !eos.is_empty()
            {
                config.eos = eos;
            }
        }
        config
    }

    /// The text of the `config.json` of the folder `dir`, or of one that says what its tensors do where it needs none.
    ///
    /// # Errors
    /// A folder that has none.
    pub fn text(dir: &Path) -> Result<String, ModelError> {
        let path = dir.join("config.json");
        match without_config(dir, &path)? {
            Some(map) => Ok(Value::Object(map).to_string()),
            None => std::fs::read_to_string(&path).map_err(|e| ModelError::file(&path, format!("cannot be read: {e}"))),
        }
    }

    /// Refuses a folder whose weights are stored as a contract does not admit.
    ///
    /// # Errors
    /// The field that says so.
    pub fn admitted(&self, dir: &Path, by: StorageContract) -> Result<(), ModelError> {
        if self.stored_by <= by {
            return Ok(());
        }
        let why = "is \"fp8\", which contract ws1 refuses; ws2 admits it as a way to store weights, which are then rounded to \
                   --dtype (--storage ws2), for all but training";
        Err(ModelError::field(&dir.join("config.json"), "quantization_config.quant_method", why))
    }

    /// Reads the fields of a `config.json` that would stand in `path`.
    pub(crate) fn of_map(path: &Path, map: Map<String, Value>) -> Result<Config, ModelError> {
        Config::read(Fields::new(path.into(), map))
    }

    /// Reads the text of a `config.json`.
    ///
    /// # Errors
    /// As [`Config::load`].
    pub fn parse(text: &str) -> Result<Config, ModelError> {
        Config::read(Fields::parse(text)?)
    }

    /// Reads what all families share, lets the family read what is its own, and looks at the rest.
    pub(crate) fn read(fields: Fields) -> Result<Config, ModelError> {
        let (family, fields) = Family::read(fields)?;
        let stored_by = matrices_are_read(family, &fields);
        let counted = || {
            let list = family.counted.iter().find_map(|field| fields.get(field))?;
            let letters = || list.as_str().map(|letters| letters.chars().count());
            list.as_array().map(Vec::len).or_else(letters).filter(|layers| *layers > 0)
        };
        let mut layers = match counted() {
            Some(layers) if fields.get("num_hidden_layers").is_none() => layers,
            _ => fields.required_size("num_hidden_layers"),
        };
        if layers > MOST_LAYERS {
            fields.refuse("num_hidden_layers", format!("is {layers}; at most {MOST_LAYERS} are read"));
            layers = 0;
        }
        let (hidden, vocab) = (fields.required_size("hidden_size"), fields.required_size("vocab_size"));
        let mut config = Config {
            family,
            vocab,
            hidden,
            blocks: Vec::new(),
            shared: Vec::new(),
            stack: "model.layers",
            table: "model.embed_tokens",
            head: "lm_head",
            head_bias: false,
            positions: None,
            embed_norm: None,
            inputs: None,
            block_factor: None,
            transposed: false,
            norms: norm::Plan::rms(eps(&fields, family.eps)),
            final_norm: "model.norm",
            rotary: Vec::new(),
            embed_scale: None,
            finish: None,
            max_positions: match fields.size("max_position_embeddings") {
                None if family.endless => i32::MAX as usize,
                None => fields.required_size("max_position_embeddings"),
                Some(positions) => positions,
            },
            rope_length: RopeLength::OfText,
            tied: fields.flag("tie_word_embeddings", family.tied),
            extra_layers: 0,
            unused: &[],
            bos: fields.token("bos_token_id", vocab),
            eos: fields.eos(vocab),
            pad: fields.pad(vocab),
            passed: Vec::new(),
            stored_by,
        };
        family.blocks(&mut config, &fields, layers);
        if !fields.was_asked("pretraining_tp") {
            fields.only("pretraining_tp", &[1.into()]);
        }
        config.heads_fit(&fields);
        if config.experts_in_all() > MOST_EXPERTS {
            let experts = config.experts().map(|plan| plan.count).max().unwrap_or(0);
            let why = format!("is {layers}; with {experts} experts in each that is more than {MOST_EXPERTS} experts");
            fields.refuse("num_hidden_layers", why);
        }
        let (longest, recorded) = (config.max_positions, fields.size(ROPE_LENGTH));
        let trained = config.trained_length().unwrap_or(longest).min(longest);
        config.rope_length = RopeLength::Declared(recorded.unwrap_or(trained));
        if recorded.is_some_and(|length| length > longest) {
            fields.refuse(ROPE_LENGTH, format!("is more than the model's {longest} positions"));
        }
        fields.look_at_the_rest(|field, value| config.is_neutral(field, value));
        config.passed = fields.end()?;
        Ok(config)
    }

    /// Refuses heads that together are wider than a size may be.
    fn heads_fit(&self, fields: &Fields) {
        let widths = self.heads().map(|heads| (heads.queries, heads.key_dim.max(heads.value_dim)));
        let mut wide = widths
            .filter(|&(queries, widest)| queries.checked_mul(widest).is_none_or(|width| width > i32::MAX as usize));
        if let Some((queries, widest)) = wide.next() {
            let why = format!("is {widest}; times num_attention_heads {queries} it exceeds {}", i32::MAX);
            fields.refuse("head_dim", why);
        }
    }

    /// What a tensor is for that is stored and not part of the forward.
    pub(crate) fn unused(&self, name: &str) -> Option<&'static str> {
        let behind = |block: usize| block.checked_sub(self.layers()).is_some_and(|i| i < self.extra_layers);
        let further = self.extra_layers > 0 && name.starts_with("model.mtp_");
        if further || self.within_block(name).is_some_and(|(block, _)| behind(block)) {
            return Some(FURTHER);
        }
        if self.is_lent(name) {
            return Some(LENT);
        }
        self.unused.iter().find(|(beginning, _)| name.starts_with(beginning)).map(|(_, what)| *what)
    }

    /// The number of the block that a tensor is of, and its name within.
    fn within_block<'n>(&self, name: &'n str) -> Option<(usize, &'n str)> {
        let (block, rest) = name.strip_prefix(self.stack)?.strip_prefix('.')?.split_once('.')?;
        Some((block.parse().ok()?, rest))
    }

    /// Whether a tensor would make keys or values of a layer that reads those of another.
    fn is_lent(&self, name: &str) -> bool {
        let Some((block, part)) = self.within_block(name) else { return false };
        let Some(plan) = self.first_attention(block).filter(|plan| plan.lender.is_some()) else { return false };
        let attention::QkvNames::Each([_, k, v]) = plan.names.qkv else { return false };
        let of = |name: &str| part.strip_prefix(name).is_some_and(|end| end.starts_with('.'));
        // Folders name a norm of values as they do that of keys.
        of(k) || of(v) || of(plan.names.norms[1]) || of("self_attn.v_norm")
    }

    /// Refuses what no reading of a folder gives, but whoever changes a config can.
    pub(crate) fn check(&self) -> Result<(), ModelError> {
        let sizes = [self.vocab, self.hidden, self.max_positions, self.longest()];
        let layers = self.layers();
        let checks = [
            (sizes.into_iter().all(is_size), "sizes are 1 to 2147483647"),
            (layers <= MOST_LAYERS && self.extra_layers <= MOST_LAYERS, "layers are few"),
            (self.experts_in_all() <= MOST_EXPERTS, "experts are few"),
            (
                !self.head_bias || !self.tied && self.finish.is_none(),
                "logits with a bias are as their own matrix makes them",
            ),
            (self.first_time_mix().is_none_or(|plan| plan.first), "the first time mix reads v of no other"),
            (self.carried() <= 1, "blocks leave one thing for those behind, beside the stream"),
            (self.embed_norm.is_none() || self.inputs.is_none(), "inputs of blocks are made of tokens without a norm"),
            (self.plans().all(|plan| self.has_input(plan)), "the inputs of blocks are as wide as those that are made"),
            (
                self.lenders_fit(),
                "keys and values are read of the first layer of an earlier block, which has such heads",
            ),
            (self.mixtures().windows(2).all(|two| two[0].block < two[1].block), "a block has one mixture of experts"),
            (self.uses_hold(), "a use of a shared block stands before a norm, and there is that block"),
        ];
        let broken = checks.into_iter().find(|(holds, _)| !holds).map(|(_, rule)| rule);
        let shared = || self.shared.iter().find_map(|plan| plan.check(self.hidden, &self.rotary).err());
        let plans = || self.plans().find_map(|plan| plan.check(self.hidden, &self.rotary).err()).or_else(shared);
        match broken.or_else(plans) {
            None => Ok(()),
            Some(rule) => Err(ModelError::input("config", format!("was changed, and no longer holds that {rule}"))),
        }
    }

    /// Declares the length that the frequencies of rotary positions belong to; no text may be longer.
    ///
    /// # Errors
    /// A length of 0, or beyond the model's positions.
    pub fn declare(&mut self, length: usize) -> Result<(), ModelError> {
        if length == 0 || length > self.max_positions {
            let why = format!("is {length}; the model has 1 to {} positions", self.max_positions);
            return Err(ModelError::input("rope length", why));
        }
        self.rope_length = RopeLength::Declared(length);
        Ok(())
    }

    /// The longest text of a run.
    pub fn longest(&self) -> usize {
        match self.rope_length {
            RopeLength::Declared(length) => length,
            RopeLength::OfText => self.max_positions,
        }
    }

    /// Refuses a text that is longer than the run, or would grow to be, by the name of what bounds it.
    pub(crate) fn check_length(&self, what: &'static str, who: &str, len: usize) -> Result<(), ModelError> {
        let (longest, positions) = (self.longest(), self.max_positions);
        if len <= longest {
            return Ok(());
        }
        let why = match longest < positions {
            true => format!(
                "{who} has {len}; the rope length of the run is {longest}: declare more (--rope-length), up to {positions}"
            ),
            false => format!("{who} has {len}; the model has {positions} positions"),
        };
        Err(ModelError::input(what, why))
    }

    /// The length that the model was trained on, where frequencies of rotary positions depend on a length.
    pub fn trained_length(&self) -> Option<usize> {
        self.rotary.iter().filter_map(Rotary::trained_length).min()
    }

    /// Blocks.
    pub fn layers(&self) -> usize {
        self.blocks.len()
    }

    /// The layers of all blocks.
    pub(crate) fn plans(&self) -> impl Iterator<Item = &LayerPlan> {
        self.blocks.iter().flatten().flat_map(branch::Plan::layers)
    }

    /// The time mix that runs first.
    fn first_time_mix(&self) -> Option<&time_mix::Plan> {
        self.plans().find_map(|plan| match plan {
            LayerPlan::TimeMix(plan) => Some(plan),
            _ => None,
        })
    }

    /// The heads of every attention.
    pub(crate) fn heads(&self) -> impl Iterator<Item = &attend::Heads> {
        self.plans().filter_map(LayerPlan::heads).chain(self.shared.iter().map(|plan| &plan.heads))
    }

    /// Whether the uses of shared blocks are what a decoder can run.
    fn uses_hold(&self) -> bool {
        let has_time_mix = self.first_time_mix().is_some();
        let holds = |branch: &branch::Plan| match &branch.ahead {
            Some(ahead) => branch.before.is_some() && ahead.of < self.shared.len() && !has_time_mix,
            None => true,
        };
        self.blocks.iter().flatten().all(holds)
    }

    /// What stands before the names of a shared block's tensors.
    pub(crate) fn shared_prefix(&self, plan: &shared::Plan) -> String {
        format!("{}.{}.{}.", self.stack, plan.first, plan.name)
    }

    /// The name of a tensor under the first use of its shared block, where this is its name under a later one.
    pub(crate) fn shared_name(&self, name: &str) -> Option<String> {
        let (block, rest) = self.within_block(name)?;
        let plan = self.shared.get(self.blocks.get(block)?.iter().find_map(|branch| branch.ahead.as_ref())?.of)?;
        let rest = rest.strip_prefix(plan.name)?.strip_prefix('.')?;
        Some(format!("{}{rest}", self.shared_prefix(plan))).filter(|first| first != name)
    }

    /// Every mixture of experts.
    pub(crate) fn experts(&self) -> impl Iterator<Item = &moe::Plan> {
        self.plans().filter_map(|plan| match plan {
            LayerPlan::Moe(plan) => Some(plan),
            _ => None,
        })
    }

    /// What is left for blocks beside the stream: inputs of their own, embedded tokens, or the values of the first of them.
    fn carried(&self) -> usize {
        let all = [self.inputs.is_some(), !self.shared.is_empty(), self.first_time_mix().is_some()];
        all.into_iter().filter(|carried| *carried).count()
    }

    /// Whether the input that a layer asks for is made.
    fn has_input(&self, plan: &LayerPlan) -> bool {
        let LayerPlan::PerLayerInput(plan) = plan else { return true };
        let made = |inputs: &per_layer::inputs::Plan| [inputs.width, inputs.width.saturating_mul(self.layers())];
        self.inputs.as_ref().map(made) == Some([plan.width, plan.all])
    }

    /// The attention of a block that comes first in it, where it does.
    fn first_attention(&self, block: usize) -> Option<&attention::Plan> {
        match self.blocks.get(block)?.first()? {
            branch::Plan { layer: LayerPlan::Attention(plan), ahead: None, .. } => Some(plan),
            _ => None,
        }
    }

    /// Whether each attention that reads keys and values of another block comes first in its own, behind one that has them.
    fn lenders_fit(&self) -> bool {
        let asked = self.plans().filter(|plan| matches!(plan, LayerPlan::Attention(plan) if plan.lender.is_some()));
        let fits = (0..self.layers()).filter(|&i| {
            let Some((own, lender)) = self.first_attention(i).and_then(|own| Some((own, own.lender?))) else {
                return false;
            };
            let widths = |plan: &attention::Plan| [plan.heads.keys, plan.heads.key_dim, plan.heads.value_dim];
            let fits = |other: &attention::Plan| other.lender.is_none() && widths(other) == widths(own);
            lender < i && self.first_attention(lender).is_some_and(fits)
        });
        fits.count() == asked.count()
    }

    /// Whether a layer chooses the keys that its queries see.
    pub(crate) fn chooses_keys(&self) -> bool {
        self.plans().any(|plan| matches!(plan, LayerPlan::LatentAttention(plan) if plan.indexer.is_some()))
    }

    fn experts_in_all(&self) -> usize {
        self.experts().fold(0, |sum, plan| sum.saturating_add(plan.count))
    }

    /// For each block, how many positions back its attention reaches; `None` for all, and where it has none.
    pub fn windows(&self) -> Vec<Option<usize>> {
        let of = |block: &Vec<branch::Plan>| {
            block.iter().flat_map(branch::Plan::layers).find_map(|layer| layer.heads()?.window)
        };
        self.blocks.iter().map(of).collect()
    }
}

/// The field that training records a declared length in; no other program reads it.
pub const ROPE_LENGTH: &str = "samebits_rope_length";

/// What blocks behind the last one are for.
pub(crate) const FURTHER: &str = "it predicts further tokens";

/// What stands beside a text model.
pub(crate) const IMAGES: &str = "it is of a model of images";
pub(crate) const SOUNDS: &str = "it is of a model of sounds";

/// What would make keys and values that a layer reads of another.
pub(crate) const LENT: &str = "the layer reads the keys and values of another";

/// More layers than this are a mistake.
const MOST_LAYERS: usize = 1 << 16;

/// More experts in all layers together are a mistake.
const MOST_EXPERTS: usize = 1 << 20;

/// What norms of the family add under the root.
fn eps(fields: &Fields, name: &str) -> f32 {
    let Some(value) = fields.get(name) else {
        fields.refuse(name, "is missing; it must be a number above 0");
        return 1.0;
    };
    match value.as_f64().map(|eps| eps as f32) {
        Some(eps) if eps > 0.0 && eps.is_finite() => eps,
        _ => {
            fields.refuse(name, format!("is {value}; it must be a number above 0 within f32"));
            1.0
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rotary::Scaling;
    use serde_json::json;

    /// A minimal config of `family` with `changes` laid over it (null removes).
    fn read(family: &str, changes: Value) -> Result<Config, String> {
        let mut fields = json!({
            "model_type": family, "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
            "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        });
        for (field, value) in changes.as_object().unwrap() {
            fields[field] = value.clone();
        }
        let Value::Object(map) = fields else { unreachable!() };
        Config::read(Fields::new("config.json".into(), map)).map_err(|e| e.to_string())
    }

    /// An object with more fields.
    fn with(some: &Value, more: Value) -> Value {
        let mut all = some.clone();
        all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        all
    }

    #[test]
    fn families_and_defaults() {
        for family in ["qwen3", "qwen2", "llama", "phi3"] {
            assert_eq!(read(family, json!({})).unwrap().family.name(), family);
        }
        let llama =
            read("llama", json!({"num_key_value_heads": null, "head_dim": null, "rope_parameters": null})).unwrap();
        let heads = llama.heads().next().unwrap();
        assert_eq!((heads.keys, heads.key_dim, llama.rotary[0].theta), (4, 16, 10_000.0));
        assert_eq!((llama.tied, llama.bos, llama.eos.len()), (false, None, 0));
    }

    #[test]
    fn both_spellings_of_the_rotary_base() {
        let old = json!({"rope_parameters": null, "rope_theta": 5e5, "rope_scaling": {"type": "default"}});
        assert_eq!(read("qwen3", old).unwrap().rotary[0].theta, 5e5);
        assert_eq!(read("qwen3", json!({"rope_theta": 10000})).unwrap().rotary[0].theta, 1e4);
        assert_eq!(read("qwen3", json!({"rope_parameters": {"rope_theta": 7.5}})).unwrap().rotary[0].theta, 7.5);
    }

    /// What a scaling takes where the folder does not say it, and what follows from it for cosines and sines.
    #[test]
    fn scalings_and_their_defaults() {
        let read = |family: &str, parameters: Value| {
            let mut all = json!({"rope_theta": 10000.0, "original_max_position_embeddings": 128});
            all.as_object_mut().unwrap().extend(parameters.as_object().unwrap().clone());
            read(family, json!({"rope_parameters": all})).unwrap().rotary.remove(0)
        };
        let yarn = |changes: Value| {
            let mut all = json!({"rope_type": "yarn"});
            all.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
            read("llama", all)
        };
        let plain = yarn(json!({}));
        let expected = Scaling::Yarn { factor: 4.0, beta_fast: 32.0, beta_slow: 1.0, original: 128, truncate: true };
        assert_eq!((plain.scaling.clone(), plain.factor), (expected, (0.1 * 4f64.ln() + 1.0) as f32));
        let both = yarn(json!({"mscale": 0.5, "mscale_all_dim": 2.0}));
        assert_eq!(both.factor, ((0.05 * 4f64.ln() + 1.0) / (0.2 * 4f64.ln() + 1.0)) as f32);
        assert_eq!(yarn(json!({"attention_factor": 1.25, "mscale": 0.5, "mscale_all_dim": 2.0})).factor, 1.25);
        // To the models' own code a 0 means that there is none.
        let zero = yarn(json!({"mscale": 0, "mscale_all_dim": 0}));
        assert_eq!((zero.scaling, zero.factor), (plain.scaling.clone(), plain.factor));
        let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0});
        assert_eq!(read("llama", llama3).factor, 1.0);
        let long = |changes: Value| {
            let mut all = json!({"rope_type": "longrope", "short_factor": vec![1.0; 8], "long_factor": vec![2.0; 8]});
            all.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
            read("phi3", all).factor
        };
        assert_eq!(long(json!({})), (1.0 + 4f64.ln() / 128f64.ln()).sqrt() as f32);
        assert_eq!(long(json!({"original_max_position_embeddings": 512})), 1.0);
        assert_eq!(long(json!({"attention_factor": 1.25})), 1.25);
        assert_eq!(read("phi3", json!({"partial_rotary_factor": 0.5})).dim, 8);
    }

    #[test]
    fn windows_and_lengths() {
        let windows = |family: &str, changes| read(family, changes).unwrap().windows();
        assert_eq!(windows("mistral", json!({"sliding_window": 9})), [Some(9); 2]);
        // The family's own default, where the key is missing and not null.
        assert_eq!(windows("mistral", json!({})), [Some(4096); 2]);
        assert_eq!(windows("mistral", json!({"sliding_window": null})), [None; 2]);
        let qwen2 = |on: bool| json!({"use_sliding_window": on, "sliding_window": 9, "max_window_layers": 1});
        assert_eq!(
            (windows("qwen2", qwen2(true)), windows("qwen2", qwen2(false))),
            (vec![None, Some(9)], vec![None; 2])
        );
        let gemma2 = json!({"sliding_window": 7, "attn_logit_softcapping": 5, "final_logit_softcapping": null});
        assert_eq!(windows("gemma2", gemma2.clone()), [Some(7), None]);
        let gemma2 = read("gemma2", gemma2).unwrap();
        assert_eq!(
            (gemma2.heads().next().unwrap().softcap, gemma2.finish, gemma2.embed_scale),
            (Some(5.0), None, Some(8.0))
        );
        let stretched = json!({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.5}});
        let stretched = read("llama", stretched).unwrap();
        assert_eq!(stretched.max_positions, 1280);
        assert_eq!(stretched.rotary[0].scaling, Scaling::Dynamic { factor: 2.5, original: 512 });
    }

    /// A base that is stretched once and for all, a share of a head in elements, and which layers have experts.
    #[test]
    fn bases_and_shares_and_sparse_layers() {
        let stretched =
            json!({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 8.0, "factor": 1.0}});
        let hunyuan = read("hunyuan_v1_dense", stretched).unwrap();
        let expected = Rotary { theta: 1e4 * libm::pow(8.0, 16.0 / 14.0), dim: 16, ..Rotary::default() };
        assert_eq!((&hunyuan.rotary[..], hunyuan.trained_length()), (&[expected][..], None));
        let plain = json!({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 0, "factor": 2.0}});
        let plain = read("hunyuan_v1_dense", plain).unwrap();
        assert_eq!(plain.rotary[0].scaling, Scaling::Dynamic { factor: 2.0, original: 512 });
        let minimax = |more: Value| {
            let mut all = json!({"num_local_experts": 4, "num_experts_per_tok": 2});
            all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            read("minimax_m2", all).unwrap().rotary[0].dim
        };
        assert_eq!((minimax(json!({"rotary_dim": 6})), minimax(json!({}))), (6, 16));
        assert_eq!(minimax(json!({"rotary_dim": 6, "partial_rotary_factor": 0.5})), 8);
        let ernie = |more: Value| {
            let mut all = json!({"num_hidden_layers": 5, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 8});
            all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            let blocks = read("ernie4_5_moe", all).unwrap().blocks;
            blocks.iter().map(|block| matches!(block[1].layer, LayerPlan::Moe(_))).collect::<Vec<_>>()
        };
        assert_eq!(ernie(json!({})), [false, true, true, true, true]);
        let some = json!({"moe_layer_start_index": 0, "moe_layer_end_index": 3, "moe_layer_interval": 2});
        assert_eq!(ernie(some), [false, true, false, true, false]);
        assert_eq!(ernie(json!({"moe_layer_end_index": -1})), [false, true, true, true, true]);
        let qwen = json!({
            "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8,
            "use_sliding_window": true, "max_window_layers": 3,
        });
        assert_eq!(read("qwen2_moe", qwen).unwrap().windows(), [Some(4096), None, Some(4096), None]);
    }

    #[test]
    fn eos_is_a_token_or_a_list() {
        assert_eq!(read("llama", json!({"eos_token_id": 7})).unwrap().eos, [7]);
        assert_eq!(read("llama", json!({"eos_token_id": [7, 8]})).unwrap().eos, [7, 8]);
        assert_eq!(read("llama", json!({"pad_token_id": -1})).unwrap().pad, None);
    }

    #[test]
    fn what_is_not_supported_is_refused_by_name() {
        let scaled = |kind: &str, parameters: Value| {
            let mut all = json!({"rope_type": kind, "rope_theta": 10000.0});
            all.as_object_mut().unwrap().extend(parameters.as_object().unwrap().clone());
            json!({"rope_parameters": all})
        };
        let cases = [
            (
                "qwen3",
                json!({"model_type": "gemma3"}),
                "`model_type` is \"gemma3\"; supported are qwen3, qwen2, llama, mistral, gemma2",
            ),
            ("qwen3", json!({"model_type": null}), "`model_type` is missing"),
            ("qwen3", json!({"model_type": 3}), "`model_type` is 3"),
            ("qwen3", json!({"hidden_act": "gelu"}), "`hidden_act` is \"gelu\"; supported is \"silu\""),
            ("qwen3", json!({"use_sliding_window": 1}), "`use_sliding_window` is 1; it must be true or false"),
            ("qwen2", json!({"use_mrope": true}), "`use_mrope` is true"),
            ("llama", json!({"attention_bias": 1}), "`attention_bias` is 1; it must be true or false"),
            ("llama", json!({"sliding_window": 5}), "`sliding_window` is 5, which this family does not know"),
            (
                "gemma3_text",
                json!({"sliding_window": 4, "attn_logit_softcapping": 6.0}),
                "`attn_logit_softcapping` is 6.0, which this family",
            ),
            ("llama", json!({"attn_logit_softcapping": 50.0}), "`attn_logit_softcapping` is 50.0, which this family"),
            (
                "qwen3",
                json!({"attn_logit_softcapping": 30}),
                "`attn_logit_softcapping` is 30, which this family does not",
            ),
            (
                "llama",
                json!({"residual_multiplier": 0.22}),
                "`residual_multiplier` is 0.22, which this family does not",
            ),
            ("llama", json!({"alibi": true}), "`alibi` is true, which this family does not know"),
            ("llama", json!({"rope_interleaved": true}), "`rope_interleaved` is true, which this family does not know"),
            ("qwen2", json!({"attention_bias": false}), "`attention_bias` is false, which this family does not know"),
            ("phi3", json!({"attention_bias": true}), "`attention_bias` is true, which this family does not know"),
            (
                "mixtral",
                json!({"norm_topk_prob": false, "num_local_experts": 4, "num_experts_per_tok": 2}),
                "`norm_topk_prob` is false, which this family does not know",
            ),
            ("llama", json!({"pretraining_tp": 2}), "`pretraining_tp` is 2; supported is 1"),
            (
                "gemma2",
                json!({"sliding_window": 4, "final_logit_softcapping": 3}),
                "`attn_logit_softcapping` is missing",
            ),
            ("phi3", json!({"use_mrope": true}), "`use_mrope` is true, which this family does not know"),
            ("qwen2", json!({"layer_types": ["chunked_attention", "full_attention"]}), "`layer_types[0]` is \"chunked"),
            ("mixtral", json!({"num_experts_per_tok": 2}), "`num_local_experts` is missing"),
            (
                "mixtral",
                json!({"num_local_experts": 4, "num_experts_per_tok": 5}),
                "`num_experts_per_tok` is 5; there are 4",
            ),
            ("qwen3", json!({"quantization_config": {"bits": 4}}), "`quantization_config.quant_method` is missing"),
            (
                "qwen3",
                json!({"layer_types": ["full_attention", "sliding_attention"]}),
                "`layer_types[1]` is \"sliding_attention\", but there is no sliding_window in use",
            ),
            (
                "qwen3",
                json!({"layer_types": ["full_attention"]}),
                "`layer_types` has 1 entries; num_hidden_layers is 2",
            ),
            ("qwen3", json!({"layer_types": "full_attention"}), "`layer_types` is not a list"),
            (
                "qwen3",
                json!({"rope_parameters": {"rope_type": "ntk", "rope_theta": 1e4}}),
                "`rope_parameters.rope_type` is \"ntk\"; supported are \"default\", \"linear\", \"dynamic\"",
            ),
            (
                "llama",
                json!({"rope_parameters": null, "rope_scaling": {"type": "linear", "factor": 0}}),
                "`rope_scaling.factor` is 0; it must be a number above 0",
            ),
            (
                "llama",
                json!({"rope_scaling": {"factor": 2.0}}),
                "`rope_scaling.factor` is 2.0, but rope_type \"default\" does not",
            ),
            (
                "llama",
                json!({"rope_scaling": {"mrope_section": [1]}}),
                "`rope_scaling.mrope_section` is [1], which no supported",
            ),
            (
                "llama",
                json!({"rope_scaling": {"rope_type": "llama3"}}),
                "is \"llama3\", but the folder also says \"default\"",
            ),
            (
                "phi3",
                json!({"rope_parameters": {"rope_type": "longrope", "short_factor": [1], "long_factor": [1]}}),
                "`rope_parameters.short_factor` must be a list of 8 numbers",
            ),
            ("llama", json!({"rope_scaling": "linear"}), "`rope_scaling` is \"linear\"; it must be an object"),
            ("llama", json!({"partial_rotary_factor": 0.5}), "`partial_rotary_factor` is 0.5; supported is 1"),
            ("phi3", json!({"partial_rotary_factor": 1.5}), "is 1.5; supported is above 0 and at most 1"),
            ("phi3", json!({"partial_rotary_factor": 0.05}), "`partial_rotary_factor` is 0 elements of a head"),
            ("llama", json!({"rope_theta": 5e5}), "is 10000.0, but the folder also says 500000.0; keep one"),
            ("llama", json!({"rope_theta": 0}), "but the folder also says 0; keep one"),
            (
                "llama",
                scaled("llama3", json!({"factor": 8, "low_freq_factor": 4, "high_freq_factor": 1})),
                "low_freq_factor` is 4; it must not be above high_freq_factor 1",
            ),
            (
                "llama",
                scaled("yarn", json!({"factor": 8, "beta_fast": 1, "beta_slow": 2})),
                "beta_fast` is 1; it must be above beta_slow 2",
            ),
            (
                "llama",
                scaled("yarn", json!({"factor": 8, "original_max_position_embeddings": 1})),
                "original_max_position_embeddings` is 1, so that the ramp",
            ),
            (
                "llama",
                scaled("yarn", json!({"factor": 8, "attention_factor": 1e300})),
                "attention_factor` makes the factor of cosines and sines inf",
            ),
            ("llama", scaled("dynamic", json!({"factor": -2})), "factor` is -2; it must be a number above 0"),
            (
                "llama",
                json!({"head_dim": 2, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2}}),
                "needs more than 2 rotated elements",
            ),
            (
                "llama",
                scaled("linear", json!({"factor": 2, "alpha": 1000})),
                "`rope_parameters.alpha` is 1000, which no supported scaling reads",
            ),
            (
                "phi3",
                scaled(
                    "longrope",
                    json!({"short_factor": vec![1; 8], "long_factor": vec![1; 8], "original_max_position_embeddings": 1}),
                ),
                "is 1; \"longrope\" needs at least 2",
            ),
            ("qwen2", json!({"rope_parameters": null}), "`rope_parameters.rope_theta` is missing"),
            ("hunyuan_v1_dense", json!({"use_qk_norm": false}), "`use_qk_norm` is false; supported is true"),
            (
                "granitemoehybrid",
                json!({"mamba_n_heads": 8, "num_local_experts": 4, "num_experts_per_tok": 5}),
                "`num_experts_per_tok` is 5; there are 4 experts",
            ),
            (
                "falcon_h1",
                json!({"mamba_n_heads": 8, "mamba_d_ssm": 64, "ssm_multipliers": [1, 1, 1, 1]}),
                "`ssm_multipliers` is [1,1,1,1]; it must be 5 numbers above 0",
            ),
            (
                "falcon_h1",
                json!({"mamba_n_heads": 8, "mamba_d_ssm": 64, "attention_bias": true, "attention_in_multiplier": 0.5}),
                "`attention_bias` is true; with an attention_in_multiplier other than 1 it must be false",
            ),
            (
                "falcon_h1",
                json!({"mamba_n_heads": 8, "mamba_d_ssm": 64, "mamba_proj_bias": true, "projectors_bias": true, "ssm_in_multiplier": 2}),
                "`mamba_proj_bias` is true; with an ssm_in_multiplier other than 1 it must be false",
            ),
            (
                "falcon_h1",
                json!({"mamba_n_heads": 8, "mamba_d_ssm": 64, "projectors_bias": true}),
                "`projectors_bias` is true; supported is that of mamba_proj_bias, false",
            ),
            (
                "falcon_h1",
                json!({"mamba_n_heads": 8, "mamba_d_ssm": 60, "mamba_d_head": 8}),
                "`mamba_n_heads` is 8; times mamba_d_head 8 it must be mamba_d_ssm",
            ),
            ("hunyuan_v1_moe", json!({"num_experts": 4, "moe_topk": [2, 5]}), "`moe_topk` is 5; there are 4 experts"),
            (
                "hunyuan_v1_moe",
                json!({"num_experts": 4, "moe_topk": 2, "moe_intermediate_size": [96, 90]}),
                "`moe_intermediate_size` is [96,90]; supported is 96",
            ),
            (
                "hunyuan_v1_moe",
                json!({"num_experts": [4]}),
                "`num_experts` must be a whole number of at least 1, or a list of 2",
            ),
            (
                "ministral3",
                scaled("yarn", json!({"factor": 2, "original_max_position_embeddings": 64})),
                "`rope_parameters.llama_4_scaling_beta` is missing",
            ),
            (
                "llama",
                scaled("linear", json!({"factor": 2, "llama_4_scaling_beta": 0.1})),
                "`rope_parameters.llama_4_scaling_beta` is 0.1, which no supported scaling reads",
            ),
            ("ernie4_5_moe", json!({"use_bias": true}), "`use_bias` is true; supported is false"),
            (
                "minimax_m2",
                json!({"scoring_func": "softmax"}),
                "`scoring_func` is \"softmax\"; supported is \"sigmoid\"",
            ),
            (
                "lfm2",
                json!({"norm_eps": 1e-5, "rms_norm_eps": null, "full_attn_idxs": [0, "1"]}),
                "`full_attn_idxs` is [0,\"1\"]; it must be a list of layer numbers",
            ),
        ];
        for (family, changes, expected) in cases {
            let line = read(family, changes.clone()).unwrap_err();
            assert!(line.starts_with("config.json: ") && line.contains(expected), "{changes}: {line}");
        }
        assert!(read("qwen2", json!({"attention_bias": true})).is_ok(), "qwen2 has these biases");
    }

    /// Which shared block stands before which layer, and what the fields of Zamba2 may not say.
    #[test]
    fn shared_blocks_and_their_fields() {
        let zamba2 = |more: Value| {
            let kinds = ["hybrid", "mamba", "hybrid", "linear_attention", "hybrid"];
            let plain = json!({
                "num_hidden_layers": 5, "layers_block_type": kinds, "n_mamba_heads": 8, "num_mem_blocks": 2, "head_dim": 32,
                "num_key_value_heads": 4,
            });
            read("zamba2", with(&plain, more))
        };
        let found = zamba2(json!({"hybrid_layer_ids": [0, 2, 4]})).unwrap();
        let uses = |c: &Config| -> Vec<Option<(usize, usize)>> {
            c.blocks.iter().map(|block| block[0].ahead.as_ref().map(|ahead| (ahead.of, ahead.number))).collect()
        };
        assert_eq!(uses(&found), [Some((0, 0)), None, Some((1, 1)), None, Some((0, 2))]);
        assert_eq!(found.shared.iter().map(|plan| plan.first).collect::<Vec<_>>(), [0, 2]);
        assert_eq!(found.heads().map(|heads| heads.scale).collect::<Vec<_>>(), [0.25; 2]);
        let name = |block: usize, rest: &str| format!("model.layers.{block}.shared_transformer.{rest}");
        assert_eq!(found.shared_name(&name(4, "o")), Some(name(0, "o")));
        assert!(
            [name(0, "o"), name(2, "o"), "model.layers.4.linear.weight".into(), name(9, "o")]
                .iter()
                .all(|name| found.shared_name(name).is_none())
        );
        let one = zamba2(json!({"num_mem_blocks": null})).unwrap();
        assert_eq!((one.shared.len(), uses(&one)[4]), (1, Some((0, 2))));
        for (more, told) in [
            (json!({"use_long_context": true}), "`use_long_context` is true; supported is false, with the rope_theta"),
            (json!({"use_conv_bias": false}), "`use_conv_bias` is false; supported is true"),
            (json!({"time_step_limit": [0.01, 0.5]}), "`time_step_limit` asks for other steps"),
            (json!({"hybrid_layer_ids": [0, 4]}), "`hybrid_layer_ids` are not the layers"),
            (json!({"head_dim": 16}), "`head_dim` is not 32"),
            (json!({"mamba_headdim": 8}), "`mamba_headdim` is not 16"),
            (json!({"attention_hidden_size": 64}), "`attention_hidden_size` is not 128"),
            (json!({"hidden_act": "silu"}), "`hidden_act` is \"silu\"; supported are gelu"),
            (
                json!({"use_shared_attention_adapter": true, "num_key_value_heads": 2}),
                "`num_key_value_heads` is 2; with",
            ),
            (json!({"layers_block_type": null}), "`layers_block_type` is missing"),
            (
                json!({"layers_block_type": ["hybrid", "hybrid", "mamba", "mamba", "mamba"], "layer_types": ["hybrid"]}),
                "`layer_types`",
            ),
            (json!({"layers_block_type": ["hybrid", "mlp", "mamba", "mamba", "mamba"]}), "`layers_block_type[1]` is"),
            (json!({"partial_rotary_factor": 0.5, "use_mem_rope": true}), "`partial_rotary_factor` is 0.5"),
            (json!({"use_shared_mlp_adapter": false}), "`use_shared_mlp_adapter` is false"),
        ] {
            let line = zamba2(more.clone()).unwrap_err();
            assert!(line.contains(told), "{more}: {line}");
        }
        let line = zamba2(json!({"use_conv_bias": false, "n_mamba_heads": 7, "num_attention_heads": 3})).unwrap_err();
        let all = ["`use_conv_bias` is", "`n_mamba_heads` is 7", "`num_attention_heads` is 3"];
        assert!(all.iter().all(|told| line.contains(told)), "{line}");
    }

    #[test]
    fn all_complaints_come_together() {
        let changes = json!({
            "hidden_size": -1, "head_dim": null, "rms_norm_eps": 0, "num_key_value_heads": 3, "hidden_act": "gelu", "alibi": true,
            "rope_parameters": {"rope_type": "yarn", "factor": -1, "beta_fast": "x"}, "eos_token_id": [7, 100],
        });
        let line = read("qwen3", changes).unwrap_err();
        let said = line.strip_prefix("config.json: ").unwrap();
        let fields: Vec<&str> =
            said.split("; `").map(|part| part.trim_start_matches('`').split('`').next().unwrap()).collect();
        let expected = [
            "hidden_size",
            "rms_norm_eps",
            "eos_token_id",
            "hidden_act",
            "num_key_value_heads",
            "head_dim",
            "rope_parameters.rope_theta",
            "rope_parameters.factor",
            "rope_parameters.beta_fast",
            "alibi",
        ];
        assert_eq!(fields, expected, "{line}");
    }

    /// What nobody reads, and what asks for nothing, is named and changes nothing.
    #[test]
    fn what_changes_nothing_is_passed_by() {
        let passes = |family: &str, changes: Value| {
            let mut all = json!({"num_local_experts": 4, "num_experts_per_tok": 2});
            if family != "mixtral" {
                all = json!({});
            }
            let plain = read(family, all.clone()).unwrap();
            all.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
            let mut found = read(family, all).unwrap_or_else(|line| panic!("{family} {changes}: {line}"));
            let passed = std::mem::take(&mut found.passed);
            assert_eq!(found, plain, "{changes}");
            assert_eq!(passed.len(), changes.as_object().unwrap().len(), "{changes}: {passed:?}");
            for field in changes.as_object().unwrap().keys() {
                assert!(passed.iter().any(|line| line.contains(&format!("config.json: `{field}` is "))), "{passed:?}");
            }
        };
        passes("phi3", json!({"attention_bias": false, "mlp_bias": false, "lm_head_bias": false, "full_attn_mod": 1}));
        passes(
            "llama",
            json!({"is_llama_config": true, "rope_interleaved": false, "transformers.js_config": {"a": [1]}}),
        );
        passes(
            "llama",
            json!({"unsloth_version": "2024.9", "unsloth_fixed": true, "num_experts": 0, "max_window_layers": 28}),
        );
        passes(
            "llama",
            json!({"sliding_window": 512, "logits_scaling": 1.0, "query_pre_attn_scalar": 16, "n_layer": 2}),
        );
        passes(
            "qwen3",
            json!({"use_mcore_models": true, "sparse_attention": true, "norm_topk_prob": true, "use_qk_norm": true}),
        );
        passes("mixtral", json!({"norm_topk_prob": true, "attention_bias": false, "num_experts": 4}));
        let line = |parameters: Value| read("llama", json!({"rope_parameters": parameters})).unwrap().passed.join("");
        let yarn = json!({"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 256, "finetuned": true});
        assert!(line(yarn).contains("`rope_parameters.finetuned` is true, which no model's code reads"));
        assert!(line(json!({"rope_theta": 1e4, "factor": 1.0})).contains("`rope_parameters.factor` is 1.0"));
    }

    /// Their fields as published, sizes cut.
    #[test]
    fn published_folders_load() {
        let base = json!({
            "vocab_size": 96, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16",
            "use_cache": true, "initializer_range": 0.02, "attention_dropout": 0.0, "transformers_version": "4.40.0",
        });
        let longrope = json!({"long_factor": vec![1.1; 6], "short_factor": vec![1.0; 6], "type": "longrope"});
        let phi4 = json!({"long_factor": vec![1.1; 6], "short_factor": vec![1.0; 6], "type": "longrope"});
        let phi = json!({
            "architectures": ["Phi3ForCausalLM"], "attention_bias": false, "auto_map": {"AutoConfig": "x"}, "embd_pdrop": 0.0,
            "hidden_act": "silu", "model_type": "phi3", "pad_token_id": 0, "resid_pdrop": 0.0, "rope_theta": 10000.0,
        });
        let phi = |more: Value| with(&phi, more);
        let hunyuan = json!({
            "add_classification_head": false, "anyres_pooling_size": 2, "attention_bias": false, "attention_head_dim": 16, "class_num": 0,
            "cla_share_factor": 2, "dense_list": [48, 0], "eod_token_id": 3, "head_dim": 16, "hidden_act": "silu", "im_start_id": 4,
            "mask_init_id": 12, "max_position_embeddings": 32768, "mlp_bias": false, "norm_type": "rms", "num_key_value_heads": 2,
            "org_vocab_size": 96, "pad_token_id": 0, "pool_type": "last", "position_embedding_xdrope": false, "pretraining_tp": 1,
            "rope_scaling": {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "type": "dynamic"},
            "rope_theta": 10000.0, "tie_word_embeddings": true, "use_cla": false, "use_qk_norm": true, "use_rotary_pos_emb": true,
        });
        let published = [
            (
                "Phi-3-mini-4k",
                phi(
                    json!({"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rope_scaling": null, "sliding_window": 2047, "tie_word_embeddings": false}),
                ),
            ),
            (
                "Phi-3.5-mini",
                phi(
                    json!({"max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "rope_scaling": longrope, "sliding_window": 262144}),
                ),
            ),
            (
                "Phi-4-mini",
                phi(json!({
                    "max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "rope_scaling": phi4, "sliding_window": 262144,
                    "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": false, "mlp_bias": false, "partial_rotary_factor": 0.75,
                    "tie_word_embeddings": true, "num_attention_heads": 3, "num_key_value_heads": 1,
                })),
            ),
            (
                "Phi-4",
                phi(
                    json!({"max_position_embeddings": 16384, "original_max_position_embeddings": 16384, "rope_scaling": null, "sliding_window": null}),
                ),
            ),
            (
                "SmolLM2",
                json!({
                    "model_type": "llama", "attention_bias": false, "hidden_act": "silu", "is_llama_config": true, "max_position_embeddings": 8192,
                    "mlp_bias": false, "pretraining_tp": 1, "rope_interleaved": false, "rope_scaling": null, "rope_theta": 130000, "tie_word_embeddings": true,
                    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
                }),
            ),
            (
                "Llama-3.2 of unsloth",
                json!({
                    "model_type": "llama", "attention_bias": false, "head_dim": 16, "hidden_act": "silu", "max_position_embeddings": 131072, "mlp_bias": false,
                    "pad_token_id": 4, "pretraining_tp": 1, "rope_theta": 500000.0, "unsloth_fixed": true, "unsloth_version": "2024.9",
                    "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"},
                }),
            ),
            (
                "Yarn-Llama-2",
                json!({
                    "model_type": "llama", "hidden_act": "silu", "max_position_embeddings": 65536, "pad_token_id": 0, "pretraining_tp": 1,
                    "rope_scaling": {"factor": 16.0, "original_max_position_embeddings": 4096, "type": "yarn", "finetuned": true},
                }),
            ),
            (
                "Llama-2",
                json!({"model_type": "llama", "hidden_act": "silu", "max_length": 4096, "max_position_embeddings": 2048, "pad_token_id": -1, "pretraining_tp": 1, "rope_scaling": null, "tie_word_embeddings": false}),
            ),
            (
                "Qwen3",
                json!({
                    "model_type": "qwen3", "attention_bias": false, "head_dim": 16, "hidden_act": "silu", "max_position_embeddings": 40960, "max_window_layers": 28,
                    "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null, "tie_word_embeddings": true, "use_sliding_window": false, "use_mcore_models": true,
                }),
            ),
            (
                "Mistral without a window",
                json!({"model_type": "mistral", "hidden_act": "silu", "max_position_embeddings": 32768, "rope_theta": 1000000.0, "tie_word_embeddings": false}),
            ),
            (
                "Mistral-Nemo",
                json!({"model_type": "mistral", "head_dim": 16, "hidden_act": "silu", "max_position_embeddings": 131072, "rope_theta": 1000000.0, "sliding_window": null}),
            ),
            (
                "Qwen2.5",
                json!({
                    "model_type": "qwen2", "hidden_act": "silu", "max_position_embeddings": 32768, "max_window_layers": 21, "rope_theta": 1000000.0,
                    "sliding_window": 32768, "tie_word_embeddings": true, "use_mrope": false, "use_sliding_window": false,
                }),
            ),
            (
                "gemma-2",
                json!({
                    "model_type": "gemma2", "attention_bias": false, "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid", "final_logit_softcapping": 30.0,
                    "head_dim": 16, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 8192, "pad_token_id": 0,
                    "query_pre_attn_scalar": 256, "rope_theta": 10000.0, "sliding_window": 4096, "sliding_window_size": 4096,
                }),
            ),
            (
                "DeepSeek-V2-Lite",
                json!({
                    "model_type": "deepseek_v2", "attention_bias": false, "aux_loss_alpha": 0.001, "first_k_dense_replace": 1, "hidden_act": "silu", "kv_lora_rank": 32,
                    "max_position_embeddings": 163840, "moe_intermediate_size": 32, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 8, "n_shared_experts": 2,
                    "norm_topk_prob": false, "num_experts_per_tok": 2, "pretraining_tp": 1, "q_lora_rank": null, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
                    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096, "type": "yarn"},
                    "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": true, "tie_word_embeddings": false, "topk_group": 1, "topk_method": "greedy", "v_head_dim": 16,
                }),
            ),
            (
                "LFM2",
                json!({"block_auto_adjust_ff_dim": true, "block_dim": 48, "block_ff_dim": 96, "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_multiple_of": 256, "block_norm_eps": 1e-05, "block_out_init_scale": 1.0, "block_use_swiglu": true, "block_use_xavier_init": true, "conv_L_cache": 3, "conv_bias": false, "conv_dim": 48, "conv_dim_out": 48, "conv_use_xavier_init": true, "full_attn_idxs": [1], "max_position_embeddings": 128000, "model_type": "lfm2", "norm_eps": 1e-05, "num_heads": 4, "num_key_value_heads": 2, "rope_theta": 1000000.0, "use_pos_enc": true, "rms_norm_eps": null, "intermediate_size": null}),
            ),
            (
                "LFM2-8B-A1B",
                json!({"conv_L_cache": 3, "conv_bias": false, "intermediate_size": 80, "layer_types": ["conv", "full_attention"], "max_position_embeddings": 128000, "model_type": "lfm2_moe", "moe_intermediate_size": 24, "norm_eps": 1e-05, "norm_topk_prob": true, "num_dense_layers": 1, "num_experts": 8, "num_experts_per_tok": 4, "num_key_value_heads": 2, "rms_norm_eps": null, "rope_theta": 1000000.0, "routed_scaling_factor": 1.0, "use_expert_bias": true}),
            ),
            (
                "rwkv7-1.5B-world",
                json!({"model_type": "rwkv7", "a_low_rank_dim": 96, "attn": null, "attn_mode": "chunk", "decay_low_rank_dim": 96, "fuse_cross_entropy": true, "fuse_norm": false, "gate_low_rank_dim": 256, "head_dim": 16, "hidden_act": "sqrelu", "hidden_ratio": 4.0, "intermediate_size": 192, "max_position_embeddings": 2048, "norm_bias": true, "norm_eps": 1e-05, "norm_first": true, "num_heads": 3, "tie_word_embeddings": false, "v_low_rank_dim": 64, "value_dim": [48, 48], "rms_norm_eps": null, "num_key_value_heads": null, "num_attention_heads": null}),
            ),
            (
                "mamba-130m-hf",
                json!({"model_type": "mamba", "conv_kernel": 4, "d_inner": 96, "d_model": 48, "expand": 2, "fused_add_norm": true, "hidden_act": "silu", "hidden_size": 48, "initializer_range": 0.1, "intermediate_size": 96, "layer_norm_epsilon": 1e-05, "max_position_embeddings": null, "n_layer": 2, "num_attention_heads": null, "num_key_value_heads": null, "pad_vocab_size_multiple": 8, "rescale_prenorm_residual": false, "residual_in_fp32": true, "rms_norm": true, "rms_norm_eps": null, "ssm_cfg": {}, "state_size": 16, "time_step_floor": 0.0001, "time_step_init_scheme": "random", "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": 3, "time_step_scale": 1.0, "use_bias": false, "use_conv_bias": true}),
            ),
            (
                "falcon-mamba-7b",
                json!({"model_type": "falcon_mamba", "conv_kernel": 4, "expand": 16, "hidden_act": "silu", "hidden_size": 48, "initializer_range": 0.1, "intermediate_size": 96, "layer_norm_epsilon": 1e-05, "max_position_embeddings": null, "mixer_rms_eps": 1e-06, "num_attention_heads": null, "num_key_value_heads": null, "rescale_prenorm_residual": false, "residual_in_fp32": true, "rms_norm_eps": null, "state_size": 16, "tie_word_embeddings": false, "time_step_floor": 0.0001, "time_step_init_scheme": "random", "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": 3, "time_step_scale": 1.0, "use_bias": false, "use_conv_bias": true}),
            ),
            (
                "Jamba-v0.1",
                json!({"model_type": "jamba", "attention_dropout": 0.0, "attn_layer_offset": 1, "attn_layer_period": 2, "calc_logits_for_entire_prompt": false, "expert_layer_offset": 1, "expert_layer_period": 2, "hidden_act": "silu", "initializer_range": 0.02, "intermediate_size": 80, "mamba_conv_bias": true, "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_dt_rank": 3, "mamba_expand": 2, "mamba_inner_layernorms": true, "mamba_proj_bias": false, "max_position_embeddings": null, "n_ctx": 262144, "num_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 2, "num_logits_to_keep": 1, "output_router_logits": false, "rms_norm_eps": 1e-06, "router_aux_loss_coef": 0.001, "sliding_window": null, "tie_word_embeddings": false, "use_mamba_kernels": true}),
            ),
            (
                "Mamba-Codestral",
                json!({"model_type": "mamba2", "chunk_size": 256, "conv_kernel": 4, "expand": 2, "head_dim": 16, "hidden_act": "silu", "hidden_size": 48, "intermediate_size": 96, "layer_norm_epsilon": 1e-05, "n_groups": 2, "norm_before_gate": true, "num_heads": 6, "rescale_prenorm_residual": false, "residual_in_fp32": true, "rms_norm": true, "state_size": 16, "tie_word_embeddings": false, "time_step_floor": 0.0001, "time_step_init_scheme": "random", "time_step_limit": [0.0, {"__float__": "Infinity"}], "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": 256, "time_step_scale": 1.0, "use_bias": false, "use_conv_bias": true, "max_position_embeddings": null, "rms_norm_eps": null, "num_key_value_heads": null, "num_attention_heads": null}),
            ),
            (
                "Bamba-9B",
                json!({"model_type": "bamba", "attn_layer_indices": [1], "attn_rotary_emb": 64, "hidden_act": "silu", "intermediate_size": 80, "mamba_chunk_size": 256, "mamba_conv_bias": true, "mamba_d_conv": 4, "mamba_d_head": 16, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 6, "mamba_proj_bias": false, "max_position_embeddings": 262144, "num_key_value_heads": 2, "num_logits_to_keep": 1, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "tie_word_embeddings": false, "use_mamba_kernels": true}),
            ),
            (
                "Zamba2-2.7B",
                json!({"model_type": "zamba2", "adapter_rank": 128, "add_bias_linear": false, "attention_head_dim": 24, "attention_hidden_size": 96, "chunk_size": 256, "hidden_act": "gelu", "hybrid_layer_ids": [1], "intermediate_size": 80, "kv_channels": 12, "layers_block_type": ["mamba", "hybrid"], "mamba_d_conv": 4, "mamba_d_state": 64, "mamba_expand": 2, "mamba_headdim": 16, "mamba_ngroups": 1, "max_position_embeddings": 4096, "n_mamba_heads": 6, "num_logits_to_keep": 1, "num_mem_blocks": 2, "num_query_groups": 4, "pad_token_id": 0, "rope_theta": 10000, "time_step_floor": 0.0001, "time_step_limit": null, "time_step_max": 0.1, "time_step_min": 0.001, "use_conv_bias": true, "use_long_context": false, "use_mamba_kernels": true, "use_mem_eff_path": true, "use_mem_rope": false, "use_shared_attention_adapter": false, "use_shared_mlp_adapter": true}),
            ),
            (
                "Zamba2-1.2B",
                json!({"model_type": "zamba2", "adapter_rank": 128, "add_bias_linear": false, "chunk_size": 256, "hidden_act": "gelu", "intermediate_size": 80, "layers_block_type": ["mamba", "hybrid"], "mamba_d_conv": 4, "mamba_d_state": 128, "mamba_expand": 2, "mamba_ngroups": 1, "max_position_embeddings": 4096, "n_mamba_heads": 6, "num_mem_blocks": 1, "pad_token_id": 0, "rope_theta": 10000, "time_step_min": 0.001, "use_conv_bias": true, "use_long_context": false, "use_mem_rope": true, "use_shared_attention_adapter": true}),
            ),
            (
                "Qwen3-Next-80B-A3B",
                json!({"architectures": ["Qwen3NextForCausalLM"], "decoder_sparse_step": 1, "full_attention_interval": 2, "head_dim": 16, "hidden_act": "silu", "intermediate_size": 80, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 12, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": 12, "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_next", "moe_intermediate_size": 22, "norm_topk_prob": true, "num_experts": 8, "num_experts_per_tok": 3, "num_key_value_heads": 2, "output_router_logits": false, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 10000000, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 22, "tie_word_embeddings": false, "use_cache": true, "use_sliding_window": false}),
            ),
            (
                "the text part of Qwen3.5-27B",
                json!({"attention_bias": false, "attn_output_gate": true, "full_attention_interval": 2, "head_dim": 16, "hidden_act": "silu", "intermediate_size": 80, "layer_types": ["linear_attention", "full_attention"], "linear_conv_kernel_dim": 4, "linear_key_head_dim": 12, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": 12, "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": false, "num_key_value_heads": 2, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_parameters": {"mrope_interleaved": true, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default"}, "tie_word_embeddings": false}),
            ),
            (
                "the text part of Qwen3.5-35B-A3B",
                json!({"attention_bias": false, "attn_output_gate": true, "full_attention_interval": 2, "head_dim": 16, "hidden_act": "silu", "intermediate_size": null, "layer_types": ["linear_attention", "full_attention"], "linear_conv_kernel_dim": 4, "linear_key_head_dim": 12, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": 12, "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_5_moe_text", "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": false, "num_key_value_heads": 2, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_parameters": {"mrope_interleaved": true, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default"}, "tie_word_embeddings": false, "moe_intermediate_size": 22, "num_experts": 8, "num_experts_per_tok": 3, "output_router_logits": false, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 22}),
            ),
            (
                "Olmo-Hybrid-7B",
                json!({"architectures": ["OlmoHybridForCausalLM"], "attention_bias": false, "hidden_act": "silu", "intermediate_size": 80, "layer_types": ["linear_attention", "full_attention"], "linear_a_log_max": 16.0, "linear_a_log_min": 0.0, "linear_allow_neg_eigval": true, "linear_conv_kernel_dim": 4, "linear_dt_init_floor": 0.0001, "linear_dt_max": 0.1, "linear_dt_min": 0.001, "linear_key_head_dim": 9, "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_value_head_dim": 18, "max_position_embeddings": 65536, "model_type": "olmo_hybrid", "num_key_value_heads": 4, "pad_token_id": 0, "rms_norm_eps": 1e-06, "rope_parameters": {"rope_theta": null, "rope_type": "default"}, "tie_word_embeddings": false}),
            ),
            (
                "Kimi-Linear-48B-A3B",
                json!({"architectures": ["KimiLinearForCausalLM"], "first_k_dense_replace": 1, "head_dim": 72, "hidden_act": "silu", "kv_lora_rank": 24, "linear_attn_config": {"full_attn_layers": [2], "head_dim": 12, "kda_layers": [1], "num_heads": 3, "short_conv_kernel_size": 4}, "mla_use_nope": true, "model_max_length": 1048576, "model_type": "kimi_linear", "moe_intermediate_size": 24, "moe_layer_freq": 1, "moe_renormalize": true, "moe_router_activation_func": "sigmoid", "num_expert_group": 1, "num_experts": 8, "num_experts_per_token": 3, "num_nextn_predict_layers": 0, "num_shared_experts": 1, "pad_token_id": 0, "q_lora_rank": null, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "rope_scaling": null, "rope_theta": 10000.0, "routed_scaling_factor": 2.446, "tie_word_embeddings": false, "topk_group": 1, "use_grouped_topk": true, "v_head_dim": 12}),
            ),
            (
                "granite-4.0-h-1b",
                json!({"model_type": "granitemoehybrid", "attention_bias": false, "attention_multiplier": 0.0078125, "embedding_multiplier": 12, "hidden_act": "silu", "init_method": "mup", "intermediate_size": 96, "layer_types": ["mamba", "attention"], "logits_scaling": 6, "mamba_chunk_size": 256, "mamba_conv_bias": true, "mamba_d_conv": 4, "mamba_d_head": 16, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 6, "mamba_proj_bias": false, "max_position_embeddings": 131072, "normalization_function": "rmsnorm", "num_experts_per_tok": 0, "num_key_value_heads": 2, "num_local_experts": 0, "output_router_logits": false, "position_embedding_type": "nope", "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 10000, "router_aux_loss_coef": 0.01, "shared_intermediate_size": 96, "tie_word_embeddings": true}),
            ),
            (
                "granite-4.0-h-tiny",
                json!({"model_type": "granitemoehybrid", "attention_bias": false, "attention_multiplier": 0.0078125, "embedding_multiplier": 12, "hidden_act": "silu", "init_method": "mup", "intermediate_size": 32, "layer_types": ["mamba", "attention"], "logits_scaling": 6, "mamba_chunk_size": 256, "mamba_conv_bias": true, "mamba_d_conv": 4, "mamba_d_head": 16, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 6, "mamba_proj_bias": false, "max_position_embeddings": 131072, "normalization_function": "rmsnorm", "num_experts_per_tok": 6, "num_key_value_heads": 2, "num_local_experts": 64, "output_router_logits": false, "position_embedding_type": "nope", "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 10000, "router_aux_loss_coef": 0.0, "shared_intermediate_size": 48, "tie_word_embeddings": true}),
            ),
            (
                "NVIDIA-Nemotron-3-Nano-30B-A3B",
                json!({"model_type": "nemotron_h", "attention_bias": false, "conv_kernel": 4, "head_dim": 16, "hybrid_override_pattern": "MEM*E", "num_hidden_layers": 5, "intermediate_size": 48, "layer_norm_epsilon": 1e-05, "mamba_head_dim": 16, "mamba_hidden_act": "silu", "mamba_num_heads": 6, "mamba_proj_bias": false, "mamba_ssm_cache_dtype": "float32", "max_position_embeddings": 262144, "mlp_bias": false, "mlp_hidden_act": "relu2", "moe_intermediate_size": 48, "moe_shared_expert_intermediate_size": 96, "n_group": 1, "n_groups": 2, "n_routed_experts": 16, "n_shared_experts": 1, "norm_eps": 1e-05, "norm_topk_prob": true, "num_experts_per_tok": 6, "num_key_value_heads": 2, "routed_scaling_factor": 2.5, "ssm_state_size": 128, "tie_word_embeddings": false, "time_step_max": 0.1, "time_step_min": 0.001, "topk_group": 1, "use_bias": false, "use_conv_bias": true}),
            ),
            (
                "NVIDIA-Nemotron-3-Super",
                json!({"model_type": "nemotron_h", "attention_bias": false, "chunk_size": 128, "conv_kernel": 4, "head_dim": 16, "hybrid_override_pattern": "ME*", "num_hidden_layers": 3, "intermediate_size": 48, "layer_norm_epsilon": 1e-05, "max_position_embeddings": 262144, "mamba_head_dim": 16, "mamba_hidden_act": "silu", "mamba_num_heads": 6, "mlp_bias": false, "mlp_hidden_act": "relu2", "moe_intermediate_size": 48, "moe_latent_size": 24, "moe_shared_expert_intermediate_size": 96, "moe_shared_expert_overlap": true, "mtp_hybrid_override_pattern": "*E", "n_group": 1, "n_groups": 2, "n_routed_experts": 16, "n_shared_experts": 1, "norm_topk_prob": true, "num_experts_per_tok": 6, "num_key_value_heads": 2, "num_nextn_predict_layers": 1, "routed_scaling_factor": 5.0, "ssm_state_size": 128, "tie_word_embeddings": false, "time_step_min": 0.001, "topk_group": 1, "use_bias": false, "use_conv_bias": true}),
            ),
            (
                "Nemotron-H-8B",
                json!({"model_type": "nemotron_h", "attention_bias": false, "attention_head_dim": 128, "chunk_size": 128, "conv_kernel": 4, "expand": 2, "hidden_dropout": 0.0, "hybrid_override_pattern": "M-M*", "num_hidden_layers": 4, "intermediate_size": 80, "layer_norm_epsilon": 1e-05, "mamba_head_dim": 16, "mamba_hidden_act": "silu", "mamba_num_heads": 6, "mamba_proj_bias": false, "max_position_embeddings": 8192, "mlp_bias": false, "mlp_hidden_act": "relu2", "n_groups": 2, "num_key_value_heads": 2, "num_logits_to_keep": 1, "rescale_prenorm_residual": true, "residual_in_fp32": false, "rms_norm_eps": 1e-05, "sliding_window": null, "ssm_state_size": 128, "tie_word_embeddings": false, "time_step_floor": 0.0001, "time_step_limit": [0.0, {"__float__": "Infinity"}], "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": 256, "use_bias": false, "use_conv_bias": true, "use_mamba_kernels": true}),
            ),
            (
                "Falcon-H1-0.5B",
                json!({"model_type": "falcon_h1", "attention_bias": false, "attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9375, "attn_layer_indices": null, "embedding_multiplier": 5.656854249492381, "head_dim": 16, "hidden_act": "silu", "intermediate_size": 80, "key_multiplier": 0.390625, "lm_head_multiplier": 0.0390625, "mamba_chunk_size": 128, "mamba_conv_bias": true, "mamba_d_conv": 4, "mamba_d_head": 12, "mamba_d_ssm": 72, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 6, "mamba_norm_before_gate": false, "mamba_proj_bias": false, "mamba_rms_norm": false, "mamba_use_mlp": true, "max_position_embeddings": 16384, "mlp_bias": false, "mlp_expansion_factor": 8, "mlp_multipliers": [0.8838834764831844, 0.5859375], "num_key_value_heads": 2, "num_logits_to_keep": 1, "projectors_bias": false, "rope_scaling": null, "rope_theta": 100000000000.0, "ssm_in_multiplier": 1.25, "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738], "ssm_out_multiplier": 0.23570226039551587, "tie_word_embeddings": false}),
            ),
            (
                "gemma-3-1b",
                json!({"attention_bias": false, "attn_logit_softcapping": null, "cache_implementation": "hybrid", "final_logit_softcapping": null, "head_dim": 16, "hidden_activation": "gelu_pytorch_tanh", "intermediate_size": 80, "max_position_embeddings": 32768, "model_type": "gemma3_text", "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": null, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6}),
            ),
            (
                "SmolLM3",
                json!({"attention_bias": false, "hidden_act": "silu", "intermediate_size": 80, "layer_types": ["full_attention", "full_attention"], "max_position_embeddings": 65536, "max_window_layers": 28, "mlp_bias": false, "model_type": "smollm3", "no_rope_layer_interval": 4, "no_rope_layers": [1, 0], "num_key_value_heads": 2, "pretraining_tp": 2, "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 5000000.0, "sliding_window": null, "use_sliding_window": false}),
            ),
            (
                "EXAONE-4.0-1.2B",
                json!({"head_dim": 16, "hidden_act": "silu", "intermediate_size": 80, "layer_types": ["full_attention", "full_attention"], "max_position_embeddings": 65536, "model_type": "exaone4", "num_key_value_heads": 2, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 1000000, "sliding_window": null, "sliding_window_pattern": null, "tie_word_embeddings": true}),
            ),
            (
                "EXAONE-4.0-1.2B as transformers 5 saves it",
                json!({"head_dim": 16, "hidden_act": "silu", "intermediate_size": 80, "layer_types": ["full_attention", "full_attention"], "max_position_embeddings": 65536, "model_type": "exaone4", "num_key_value_heads": 2, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 1000000, "sliding_window": null, "sliding_window_pattern": 0, "tie_word_embeddings": true}),
            ),
            (
                "EXAONE-4.0-32B",
                json!({"head_dim": 16, "hidden_act": "silu", "intermediate_size": 80, "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"], "max_position_embeddings": 131072, "model_type": "exaone4", "num_key_value_heads": 2, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 1000000, "sliding_window": 4096, "sliding_window_pattern": "LLLG", "tie_word_embeddings": false, "num_hidden_layers": 4}),
            ),
            (
                "OLMo-2",
                json!({"attention_bias": false, "hidden_act": "silu", "intermediate_size": 80, "max_position_embeddings": 4096, "model_type": "olmo2", "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 500000, "tie_word_embeddings": false}),
            ),
            (
                "Olmo-3",
                json!({"attention_bias": false, "hidden_act": "silu", "intermediate_size": 80, "layer_types": ["sliding_attention", "full_attention"], "max_position_embeddings": 65536, "model_type": "olmo3", "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_scaling": {"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0, "original_max_position_embeddings": 8192, "rope_type": "yarn"}, "rope_theta": 500000, "sliding_window": 4096, "tie_word_embeddings": false}),
            ),
            (
                "Seed-OSS",
                json!({"attention_bias": true, "attention_out_bias": false, "head_dim": 16, "hidden_act": "silu", "intermediate_size": 80, "max_position_embeddings": 524288, "mlp_bias": false, "model_type": "seed_oss", "num_key_value_heads": 2, "residual_dropout": 0.1, "rms_norm_eps": 1e-06, "rope_scaling": {"rope_type": "default"}, "rope_theta": 10000000.0, "tie_word_embeddings": false}),
            ),
            (
                "GLM-4-0414",
                json!({"attention_bias": false, "head_dim": 16, "hidden_act": "silu", "intermediate_size": 80, "max_position_embeddings": 32768, "model_type": "glm4", "num_key_value_heads": 2, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "tie_word_embeddings": false}),
            ),
            (
                "ERNIE-4.5-0.3B",
                json!({"head_dim": 16, "hidden_act": "silu", "intermediate_size": 80, "max_position_embeddings": 131072, "model_type": "ernie4_5", "num_key_value_heads": 2, "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 500000.0, "tie_word_embeddings": true, "use_bias": false, "is_decoder": false}),
            ),
            (
                "granite-3.3",
                json!({"attention_bias": false, "attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "hidden_act": "silu", "intermediate_size": 80, "logits_scaling": 8.0, "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "granite", "num_key_value_heads": 2, "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 10000000.0, "tie_word_embeddings": true}),
            ),
            (
                "AFM-4.5B",
                json!({"architectures": ["ArceeForCausalLM"], "attention_bias": false, "head_dim": 12, "hidden_act": "relu2", "max_position_embeddings": 65536, "mlp_bias": false, "model_type": "arcee", "num_key_value_heads": 2, "pad_token_id": 4, "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 20.0, "mscale": 1.0, "original_max_position_embeddings": 4096, "rope_type": "yarn", "type": "yarn"}, "rope_theta": 10000.0, "tie_word_embeddings": false}),
            ),
            (
                "starcoder2-3b",
                json!({"activation_function": "gelu", "attention_softmax_in_fp32": true, "embedding_dropout": 0.1, "hidden_act": "gelu_pytorch_tanh", "layer_norm_epsilon": 1e-05, "max_position_embeddings": 16384, "mlp_type": "default", "model_type": "starcoder2", "norm_epsilon": 1e-05, "norm_type": "layer_norm", "num_key_value_heads": 2, "residual_dropout": 0.1, "rms_norm_eps": null, "rope_theta": 999999.4420358813, "scale_attention_softmax_in_fp32": true, "scale_attn_weights": true, "sliding_window": 4096, "use_bias": true}),
            ),
            (
                "gpt2",
                json!({"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attention_dropout": null, "attn_pdrop": 0.1, "embd_pdrop": 0.1, "hidden_size": null, "intermediate_size": null, "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 48, "n_head": 4, "n_layer": 2, "n_positions": 1024, "num_attention_heads": null, "num_hidden_layers": null, "num_key_value_heads": null, "resid_pdrop": 0.1, "rms_norm_eps": null, "summary_activation": null, "summary_first_dropout": 0.1, "summary_proj_to_labels": true, "summary_type": "cls_index", "summary_use_proj": true, "task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}}}),
            ),
            (
                "pythia-70m",
                json!({"architectures": ["GPTNeoXForCausalLM"], "hidden_act": "gelu", "layer_norm_eps": 1e-05, "max_position_embeddings": 2048, "model_type": "gpt_neox", "num_attention_heads": 3, "num_key_value_heads": null, "rms_norm_eps": null, "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": false, "use_parallel_residual": true}),
            ),
            (
                "gpt-neox-20b",
                json!({"architectures": ["GPTNeoXForCausalLM"], "attention_probs_dropout_prob": 0, "hidden_act": "gelu_fast", "hidden_dropout_prob": 0, "layer_norm_eps": 1e-05, "max_position_embeddings": 2048, "model_type": "gpt_neox", "num_attention_heads": 3, "num_key_value_heads": null, "rms_norm_eps": null, "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": false, "use_parallel_residual": true}),
            ),
            (
                "c4ai-command-r7b",
                json!({"architectures": ["Cohere2ForCausalLM"], "attention_bias": false, "cache_implementation": "hybrid", "head_dim": 12, "hidden_act": "silu", "layer_norm_eps": 1e-05, "layer_switch": 4, "logit_scale": 0.25, "max_position_embeddings": 8192, "model_type": "cohere2", "num_key_value_heads": 2, "order_of_interleaved_layers": "local_attn_first", "pad_token_id": 0, "position_embedding_type": "rope_gptj", "rms_norm_eps": null, "rope_scaling": null, "rope_theta": 50000, "rotary_pct": 1.0, "sliding_window": 4096, "sliding_window_pattern": 4, "use_embedding_sharing": true, "use_gated_activation": true, "use_parallel_block": true, "use_parallel_embedding": true, "use_qk_norm": false}),
            ),
            (
                "Minitron-4B",
                json!({"architectures": ["NemotronForCausalLM"], "attention_bias": false, "head_dim": 16, "hidden_act": "relu2", "max_position_embeddings": 4096, "mlp_bias": false, "model_type": "nemotron", "norm_eps": 1e-05, "num_key_value_heads": 2, "partial_rotary_factor": 0.5, "rms_norm_eps": null, "rope_scaling": null, "rope_theta": 10000, "tie_word_embeddings": false}),
            ),
            (
                "Apertus-8B",
                json!({"architectures": ["ApertusForCausalLM"], "attention_bias": false, "hidden_act": "xielu", "hidden_dropout": 0.0, "max_position_embeddings": 65536, "mlp_bias": false, "model_type": "apertus", "num_key_value_heads": 2, "pad_token_id": 3, "post_norm": false, "qk_norm": true, "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3", "type": "llama3"}, "rope_theta": 12000000, "tie_word_embeddings": false}),
            ),
            (
                "Ministral-3-3B-BF16",
                json!({"architectures": ["Ministral3ForCausalLM"], "attention_dropout": 0.0, "head_dim": 16, "hidden_act": "silu", "max_position_embeddings": 262144, "model_type": "ministral3", "num_key_value_heads": 2, "rope_parameters": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_theta": 1000000.0, "rope_type": "yarn", "type": "yarn"}, "sliding_window": null, "tie_word_embeddings": true}),
            ),
            (
                "Phi-3.5-MoE",
                json!({"architectures": ["PhiMoEForCausalLM"], "attention_bias": true, "attention_dropout": 0.0, "auto_map": {"AutoConfig": "configuration_phimoe.PhiMoEConfig"}, "hidden_act": "silu", "hidden_dropout": 0.0, "initializer_range": 0.02, "input_jitter_noise": 0.01, "lm_head_bias": true, "max_position_embeddings": 131072, "model_type": "phimoe", "num_experts_per_tok": 2, "num_key_value_heads": 2, "num_local_experts": 16, "original_max_position_embeddings": 4096, "output_router_logits": false, "rms_norm_eps": 1e-05, "rope_scaling": {"long_factor": vec![2.0; 6], "long_mscale": 1.243163121016122, "original_max_position_embeddings": 4096, "short_factor": vec![1.0; 6], "short_mscale": 1.243163121016122, "type": "longrope"}, "rope_theta": 10000.0, "router_aux_loss_coef": 0.0, "router_jitter_noise": 0.01, "sliding_window": 131072, "tie_word_embeddings": false}),
            ),
            (
                "Llama-4-Scout (text)",
                json!({"attention_bias": false, "attention_chunk_size": 8192, "attention_dropout": 0.0, "for_llm_compressor": false, "head_dim": 16, "hidden_act": "silu", "interleave_moe_layer_step": 1, "intermediate_size": 80, "intermediate_size_mlp": 160, "max_position_embeddings": 10485760, "model_type": "llama4_text", "no_rope_layers": [], "num_experts_per_tok": 1, "num_key_value_heads": 2, "num_local_experts": 16, "output_router_logits": false, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "tie_word_embeddings": false, "use_qk_norm": true}),
            ),
            (
                "OLMoE",
                json!({"attention_bias": false, "clip_qkv": null, "hidden_act": "silu", "intermediate_size": 32, "max_position_embeddings": 4096, "model_type": "olmoe", "norm_topk_prob": false, "num_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 4, "output_router_logits": false, "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 10000.0, "router_aux_loss_coef": 0.01, "tie_word_embeddings": false}),
            ),
            (
                "Qwen1.5-MoE-A2.7B",
                json!({"decoder_sparse_step": 1, "hidden_act": "silu", "max_position_embeddings": 8192, "max_window_layers": 21, "model_type": "qwen2_moe", "moe_intermediate_size": 22, "norm_topk_prob": false, "num_experts": 6, "num_experts_per_tok": 4, "output_router_logits": false, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 88, "sliding_window": 32768, "tie_word_embeddings": false, "use_sliding_window": false, "qkv_bias": true}),
            ),
            (
                "granite-3.0-1b-a400m",
                json!({"attention_bias": false, "attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "hidden_act": "silu", "intermediate_size": 32, "logits_scaling": 6.0, "max_position_embeddings": 4096, "model_type": "granitemoe", "num_experts_per_tok": 4, "num_key_value_heads": 2, "num_local_experts": 8, "output_router_logits": false, "pad_token_id": 0, "residual_multiplier": 0.22, "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 10000, "router_aux_loss_coef": 0.0, "tie_word_embeddings": true}),
            ),
            ("Hunyuan-7B", with(&hunyuan, json!({"model_type": "hunyuan_v1_dense"}))),
            (
                "Hunyuan-A13B",
                with(
                    &hunyuan,
                    json!({"model_type": "hunyuan_v1_moe", "group_limited_greedy": false, "kv_lora_rank": null, "moe_drop_tokens": false, "moe_intermediate_size": [64, 64], "moe_layer_num_skipped": 0, "moe_random_routing_dropped_token": false, "moe_topk": [2, 2], "num_experts": 4, "num_shared_expert": [1, 1], "norm_topk_prob": true, "use_mixed_mlp_moe": true, "use_mla": false}),
                ),
            ),
            (
                "GLM-4.5-Air",
                json!({"attention_bias": true, "eos_token_id": [2, 3], "first_k_dense_replace": 1, "head_dim": 16, "hidden_act": "silu", "max_position_embeddings": 131072, "model_type": "glm4_moe", "moe_intermediate_size": 22, "n_group": 1, "n_routed_experts": 8, "n_shared_experts": 1, "norm_topk_prob": true, "num_experts_per_tok": 4, "num_key_value_heads": 2, "num_nextn_predict_layers": 1, "pad_token_id": 0, "partial_rotary_factor": 0.5, "rope_scaling": null, "rope_theta": 1000000, "routed_scaling_factor": 1.0, "tie_word_embeddings": false, "topk_group": 1, "use_qk_norm": false}),
            ),
            (
                "MiniMax-M2",
                json!({"attn_type_list": [1, 1], "head_dim": 16, "hidden_act": "silu", "max_position_embeddings": 196608, "model_type": "minimax_m2", "mtp_transformer_layers": 1, "num_experts_per_tok": 4, "num_key_value_heads": 2, "num_local_experts": 8, "num_mtp_modules": 3, "qk_norm_type": "per_layer", "rms_norm_eps": 1e-06, "rope_theta": 5000000, "rotary_dim": 8, "scoring_func": "sigmoid", "shared_intermediate_size": 0, "tie_word_embeddings": false, "use_mtp": true, "use_qk_norm": true, "use_routing_bias": true}),
            ),
            (
                "ERNIE-4.5-21B-A3B",
                json!({"hidden_act": "silu", "max_position_embeddings": 131072, "model_type": "ernie4_5_moe", "moe_capacity": [64, 64, 64], "moe_gate": "topk", "moe_intermediate_size": 22, "moe_k": 3, "moe_layer_end_index": 1, "moe_layer_interval": 1, "moe_layer_start_index": 1, "moe_num_experts": 8, "moe_num_shared_experts": 2, "moe_use_aux_free": true, "num_key_value_heads": 2, "num_nextn_predict_layers": 1, "pad_token_id": 0, "rope_scaling": null, "rope_theta": 500000, "tie_word_embeddings": true, "use_bias": false}),
            ),
            (
                "gpt-oss-20b",
                json!({"attention_bias": true, "attention_dropout": 0.0, "eos_token_id": 2, "experts_per_token": 4, "head_dim": 16, "hidden_act": "silu", "initial_context_length": 4096, "initializer_range": 0.02, "intermediate_size": 24, "layer_types": ["sliding_attention", "full_attention"], "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_experts_per_tok": 4, "num_key_value_heads": 2, "num_local_experts": 8, "output_router_logits": false, "pad_token_id": 0, "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"], "quant_method": "mxfp4"}, "rms_norm_eps": 1e-05, "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": false}, "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": false, "use_cache": true}),
            ),
            (
                "dots.llm1",
                json!({"attention_bias": false, "first_k_dense_replace": 1, "head_dim": 16, "hidden_act": "silu", "max_position_embeddings": 32768, "max_window_layers": 62, "model_type": "dots1", "moe_intermediate_size": 22, "moe_layer_freq": 1, "n_routed_experts": 8, "n_shared_experts": 2, "norm_topk_prob": true, "num_experts_per_tok": 4, "num_key_value_heads": 4, "pretraining_tp": 1, "rope_scaling": null, "rope_theta": 10000000, "routed_scaling_factor": 2.5, "sliding_window": null, "tie_word_embeddings": false, "use_sliding_window": false}),
            ),
        ];
        for (name, changes) in published {
            let mut all = base.clone();
            all.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
            let Value::Object(map) = all else { unreachable!() };
            let read = Config::read(Fields::new("config.json".into(), map));
            let config = read.unwrap_or_else(|line| panic!("{name}: {line}"));
            if name == "Mistral without a window" {
                assert_eq!(config.windows(), [Some(4096); 2]);
            }
        }
    }

    /// Kimi Linear has the sizes and the numbers of its recurring layers in an object, from 1 on.
    #[test]
    fn layers_of_kimi_linear() {
        let kimi = |changes: Value| {
            let sizes = json!({"num_hidden_layers": 6, "head_dim": null, "num_key_value_heads": 4, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_token": 3, "num_shared_experts": 1, "routed_scaling_factor": 2.0, "linear_num_heads": 3, "linear_head_dim": 12, "linear_conv_kernel_dim": 4, "rope_parameters": null});
            let config = read("kimi_linear", with(&sizes, changes))?;
            let kind = |plan: &LayerPlan| match plan {
                LayerPlan::DeltaRule(plan) => format!("{}", plan.key_heads),
                LayerPlan::LatentAttention(_) => "*".into(),
                LayerPlan::Mlp(_) => "-".into(),
                LayerPlan::Moe(_) => "=".into(),
                other => panic!("{other:?}"),
            };
            Ok::<String, String>(config.plans().map(kind).collect())
        };
        assert_eq!(kimi(json!({})).unwrap(), "3-3=3=3=*=3=");
        let object = |full: Value, kda: Value| json!({"linear_attn_config": {"num_heads": 2, "head_dim": 12, "full_attn_layers": full, "kda_layers": kda}, "linear_num_heads": null});
        let lists = object(json!([6, 1]), json!([2, 3, 4, 5]));
        assert_eq!(kimi(with(&lists, json!({"first_k_dense_replace": 0}))).unwrap(), "*=2=2=2=2=*=");
        for (changes, refused) in [
            (object(json!([6, 1]), json!([2, 3, 4])), "must name each of 6 layers once"),
            (object(json!([6, 1]), json!([1, 2, 3, 4, 5])), "must name each of 6 layers once"),
            (object(json!([7, 1]), json!([2, 3, 4, 5, 6])), "must name each of 6 layers once"),
            (
                with(&lists, json!({"linear_num_heads": 3})),
                "`linear_num_heads` is 3, but linear_attn_config.num_heads is 2",
            ),
            (
                json!({"linear_attn_config": {"num_heads": 0}, "linear_num_heads": null}),
                "`linear_attn_config.num_heads` is 0",
            ),
            (json!({"linear_attn_config": {"gate": 1}}), "`linear_attn_config.gate` is 1"),
            (json!({"mla_use_nope": false}), "`mla_use_nope` is false"),
            (
                json!({"num_shared_experts": null, "routed_scaling_factor": null, "q_lora_rank": 0}),
                "`q_lora_rank` is 0",
            ),
        ] {
            let found = kimi(changes).unwrap_err();
            assert!(found.contains(refused), "{refused}: {found}");
        }
    }

    /// Phi-3.5-MoE: factors of cosines and sines by the length, how far logits count, a bias of the head; what its code does not do.
    #[test]
    fn phimoe_is_read() {
        let phimoe = |changes: Value| {
            let scaled = json!({"rope_type": "longrope", "rope_theta": 1e4, "short_factor": vec![1.0; 8], "long_factor": vec![2.0; 8], "original_max_position_embeddings": 64, "short_mscale": 1.25, "long_mscale": 1.5});
            read("phimoe", with(&json!({"num_local_experts": 8, "rope_parameters": scaled}), changes))
        };
        let config = phimoe(json!({"lm_head_bias": true, "router_jitter_noise": 0})).unwrap();
        let rotary = &config.rotary[0];
        assert_eq!([64, 65].map(|length| rotary.factor_at(length, 9)), [1.25, 1.5]);
        assert_eq!((config.head_bias, config.trained_length(), config.windows()), (true, Some(64), vec![None; 2]));
        let jitter = |config: &Config| config.experts().next().unwrap().scoring;
        assert_eq!(jitter(&config), samebits_ops::Scoring::SparseMixer { jitter: 0.0 });
        let plain = phimoe(json!({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}})).unwrap();
        assert_eq!(jitter(&plain), samebits_ops::Scoring::SparseMixer { jitter: 0.01 });
        let rope = |more: Value| {
            let own = json!({"rope_type": "longrope", "rope_theta": 1e4, "short_factor": vec![1.0; 8], "long_factor": vec![2.0; 8], "original_max_position_embeddings": 64});
            json!({"rope_parameters": with(&own, more)})
        };
        for (changes, refused) in [
            (rope(json!({"short_mscale": 1.0})), "`rope_parameters.long_mscale` is missing"),
            (rope(json!({"short_mscale": 0, "long_mscale": 1.0})), "`rope_parameters.short_mscale` is 0"),
            (
                rope(json!({"short_mscale": 1.0, "long_mscale": 1e60})),
                "`rope_parameters.long_mscale` makes the factor of cosines and sines inf",
            ),
            (
                json!({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2}}),
                "`rope_parameters.rope_type` is \"yarn\"",
            ),
            (json!({"router_jitter_noise": -0.1}), "`router_jitter_noise` is -0.1"),
            (json!({"num_experts_per_tok": 3}), "`num_experts_per_tok` is 3; supported is 2"),
            (json!({"num_local_experts": 1}), "`num_local_experts` is 1"),
            (json!({"lm_head_bias": true, "tie_word_embeddings": true}), "`lm_head_bias` is true"),
            (json!({"hidden_act": "gelu"}), "`hidden_act` is \"gelu\""),
        ] {
            let found = phimoe(changes.clone()).unwrap_err();
            assert!(found.contains(refused), "{changes}: {found}");
        }
    }

    /// Llama 4: which layers look beyond their chunk, rotate, are normed, grow and have experts, each said by a field of its own.
    #[test]
    fn layers_of_llama4() {
        let llama4 = |changes: Value| {
            let sizes = json!({"num_hidden_layers": 4, "intermediate_size_mlp": 160, "num_local_experts": 8, "num_experts_per_tok": 1, "rms_norm_eps": 1e-5});
            let config = read("llama4_text", with(&sizes, changes))?;
            let kind = |plan: &LayerPlan| match plan {
                LayerPlan::Attention(plan) => {
                    let turns = config.rotary[plan.rope.table].scaling != Scaling::Zero;
                    let growth = plan.q_table.and_then(|table| config.rotary[table].growth);
                    let [chunk, turns, normed] =
                        [plan.heads.chunk.is_some(), turns, plan.norm.is_some_and(|norm| norm.behind && !norm.weights)]
                            .map(u8::from);
                    format!(" {chunk}{turns}{normed}{}", growth.map_or(0, |growth| growth.original))
                }
                LayerPlan::Mlp(plan) => format!("-{}", plan.width),
                LayerPlan::Moe(plan) => format!("={}", plan.count),
                other => panic!("{other:?}"),
            };
            Ok::<String, String>(config.plans().map(kind).collect())
        };
        assert_eq!(llama4(json!({})).unwrap(), " 1110=8 1110=8 1110=8 0008192=8");
        let maverick = json!({"use_qk_norm": false, "interleave_moe_layer_step": 2, "no_rope_layers": [1, 1, 1, 0], "attn_temperature_tuning": 4, "floor_scale": 64});
        assert_eq!(llama4(maverick).unwrap(), " 1100-160 1100=8 1100-160 00064=8");
        let apart = json!({"layer_types": ["full_attention", "full_attention", "chunked_attention", "chunked_attention"], "no_rope_layer_interval": 2, "moe_layers": [0], "attn_temperature_tuning": false});
        assert_eq!(llama4(apart).unwrap(), " 0110=8 0000-160 1110-160 1000-160");
        let dense = json!({"moe_layers": [], "num_local_experts": null, "attention_chunk_size": null, "layer_types": vec!["full_attention"; 4]});
        assert_eq!(llama4(dense).unwrap(), " 0110-160 0110-160 0110-160 0008192-160");
        for (changes, refused) in [
            (json!({"attention_chunk_size": null}), "`attention_chunk_size` is null, but layers attend within chunks"),
            (json!({"attention_chunk_size": 0}), "`attention_chunk_size` is 0"),
            (json!({"attn_temperature_tuning": "on"}), "`attn_temperature_tuning` is \"on\"; it must be true or false"),
            (json!({"attn_scale": -1}), "`attn_scale` is -1"),
            (json!({"floor_scale": 0}), "`floor_scale` is 0"),
            (
                json!({"layer_types": vec!["sliding_attention"; 4]}),
                "`layer_types[0]` is \"sliding_attention\"; supported are",
            ),
            (json!({"no_rope_layers": [1, 1]}), "it must be a list of 4 numbers, 0 or 1"),
            (json!({"moe_layers": [0], "intermediate_size_mlp": null}), "`intermediate_size_mlp` is missing"),
            (json!({"num_local_experts": null}), "`num_local_experts` is missing"),
            (json!({"num_experts_per_tok": 9}), "`num_experts_per_tok` is 9; there are 8 experts"),
            (json!({"interleave_moe_layer_step": 0}), "`interleave_moe_layer_step` is 0"),
            (json!({"head_dim": 15}), "`head_dim` is 15"),
            (json!({"sliding_window": 7}), "`sliding_window` is 7, which this family does not know"),
            (json!({"hidden_act": "gelu"}), "`hidden_act` is \"gelu\""),
        ] {
            let found = llama4(changes.clone()).unwrap_err();
            assert!(found.contains(refused), "{changes}: {found}");
        }
    }

    /// A text model beside one of images: its fields stand in `text_config`, and those around it are looked at too.
    #[test]
    fn text_models_beside_others_are_read() {
        let read = |around: Value, within: Value| {
            let text = json!({"attention_bias": false, "attn_output_gate": true, "dtype": "bfloat16", "eos_token_id": 3, "full_attention_interval": 2, "head_dim": 16, "hidden_act": "silu", "hidden_size": 48, "intermediate_size": 80, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 12, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": 12, "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": false, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_parameters": {"mrope_interleaved": true, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default"}, "use_cache": true, "vocab_size": 96});
            let all = json!({"architectures": ["Qwen3_5ForConditionalGeneration"], "image_token_id": 90, "model_type": "qwen3_5", "text_config": with(&text, within), "tie_word_embeddings": true, "transformers_version": "5.2.0", "video_token_id": 91, "vision_config": {"depth": 2, "hidden_size": 32, "model_type": "qwen3_5"}, "vision_end_token_id": 92, "vision_start_token_id": 93});
            Config::parse(&with(&all, around).to_string()).map_err(|e| e.to_string())
        };
        let config = read(json!({}), json!({})).unwrap();
        assert_eq!((config.family.name(), config.hidden, config.layers()), ("qwen3_5_text", 48, 2));
        assert_eq!((config.tied, config.rotary[0].dim, &config.eos[..]), (true, 4, &[3][..]));
        assert!(config.passed.iter().any(|line| line.contains("`vision_config` is of a model beside")), "{config:?}");
        for (around, within, refused) in [
            (json!({"text_config": null}), json!({}), "`text_config` is missing"),
            (json!({}), json!({"hidden_size": null}), "`text_config.hidden_size` is missing"),
            (json!({}), json!({"model_type": "qwen3_5_moe_text"}), "`text_config.model_type` is"),
            (json!({}), json!({"attn_output_gate": false}), "`text_config.attn_output_gate` is false"),
            (
                json!({}),
                json!({"tie_word_embeddings": false}),
                "`tie_word_embeddings` is true, but text_config says false",
            ),
            (json!({"hidden_size": 4}), json!({}), "`hidden_size` is 4, but text_config says 48"),
            (
                json!({"quantization_config": {"quant_method": "fp8"}}),
                json!({}),
                "`quantization_config.weight_block_size` is missing",
            ),
            (json!({"sliding_window": 4}), json!({}), "`sliding_window` is 4, which this family does not know"),
            (json!({}), json!({"linear_num_value_heads": 3}), "`text_config.linear_num_value_heads` is 3"),
        ] {
            let found = read(around, within).unwrap_err();
            assert!(found.contains(refused), "{refused}: {found}");
        }
    }

    /// Either name of a field is read, the family's own first; what is wrong is told by the one that stands there.
    #[test]
    fn fields_of_other_names() {
        let gpt2 = |changes: Value| {
            let mut fields = json!({"model_type": "gpt2", "vocab_size": 100, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "layer_norm_epsilon": 1e-5});
            fields.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
            Config::parse(&fields.to_string()).map_err(|e| e.to_string())
        };
        let config = gpt2(json!({})).unwrap();
        assert_eq!((config.hidden, config.layers(), config.max_positions), (64, 2, 128));
        assert!(gpt2(json!({"n_positions": null})).unwrap_err().contains("`n_positions` is missing"));
        assert!(gpt2(json!({"n_embd": 66})).unwrap_err().contains("`n_head` is 4; it must divide hidden_size 66"));
        assert!(
            gpt2(json!({"activation_function": "tanh"})).unwrap_err().contains("`activation_function` is \"tanh\"")
        );
        let neox = |changes: Value| {
            let mut fields = json!({"model_type": "gpt_neox", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128, "layer_norm_eps": 1e-5});
            fields.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
            Config::parse(&fields.to_string()).unwrap().rotary.remove(0)
        };
        let read = |changes| neox(changes).dim;
        assert_eq!(
            [read(json!({})), read(json!({"rotary_pct": 0.5})), read(json!({"partial_rotary_factor": 1.0}))],
            [4, 8, 16]
        );
        assert_eq!(neox(json!({"rotary_emb_base": 500})).theta, 500.0);
    }

    /// The kinds of the layers of a Nemotron-H, in either form, say how many there are where nothing else does.
    #[test]
    fn layers_are_counted_by_their_kinds() {
        let nemotron = |changes: Value| {
            let base = json!({"num_hidden_layers": null, "layer_norm_epsilon": 1e-5, "mamba_num_heads": 4, "mamba_n_groups": 2});
            let config = read("nemotron_h", with(&base, changes))?;
            let kind = |plan: &LayerPlan| match plan {
                LayerPlan::Mamba2(plan) => format!("M{}", plan.groups),
                LayerPlan::Attention(_) => "*".into(),
                LayerPlan::Mlp(_) => "-".into(),
                LayerPlan::Moe(_) => "E".into(),
                other => panic!("{other:?}"),
            };
            Ok::<String, String>(config.plans().map(kind).collect())
        };
        assert_eq!(nemotron(json!({"hybrid_override_pattern": "M-*M"})).unwrap(), "M2-*M2");
        let list = json!({"layers_block_type": ["mlp", "full_attention", "linear_attention"]});
        assert_eq!(nemotron(list.clone()).unwrap(), "-*M2");
        let list = with(&list, json!({"hybrid_override_pattern": "M", "mamba_n_groups": 4}));
        assert_eq!(nemotron(list).unwrap(), "-*M4");
        assert_eq!(nemotron(json!({"layer_types": ["attention", "mamba"], "num_hidden_layers": 2})).unwrap(), "*M2");
        assert_eq!(nemotron(json!({"hybrid_override_pattern": "ME*", "n_routed_experts": 8})).unwrap(), "M2E*");
        let refused = [
            (json!({"hybrid_override_pattern": "M*X"}), "`hybrid_override_pattern` has \"X\"; supported are"),
            (json!({"layers_block_type": ["mlp", "rnn"]}), "`layers_block_type` has \"rnn\"; supported are"),
            (json!({"layer_types": ["moe"], "n_shared_experts": 2}), "`n_shared_experts` is 2"),
            (
                json!({"layer_types": ["moe"], "num_experts_per_tok": 9}),
                "`num_experts_per_tok` is 9; there are 8 experts",
            ),
            (json!({"layer_types": ["moe"], "n_group": 3}), "`n_group` is 3; it must divide"),
            (json!({"layer_types": ["moe"], "n_group": 2, "topk_group": 3}), "`topk_group` is 3"),
            (json!({"hybrid_override_pattern": "M", "num_hidden_layers": 2}), "must have a kind for each of 2 layers"),
            (json!({"layer_types": [1], "num_hidden_layers": 1}), "must have a kind for each of 1 layers"),
            (json!({"num_hidden_layers": 2}), "`layers_block_type` is missing"),
            (json!({}), "`num_hidden_layers` is missing"),
            (json!({"layer_types": ["mlp"], "attention_head_dim": 8}), "`attention_head_dim` is not head_dim, 16"),
            (json!({"layer_types": ["mlp"], "mamba_n_groups": 3}), "`mamba_n_groups` is 3; it must divide"),
            (json!({"layer_types": ["mlp"], "attention_bias": true}), "`attention_bias` is true"),
        ];
        for (changes, expected) in refused {
            let line = nemotron(changes.clone()).unwrap_err();
            assert!(line.contains(expected), "{changes}: {line}");
        }
    }

    #[test]
    fn sizes_are_checked() {
        let cases = [
            (json!({"hidden_size": null}), "`hidden_size` is missing"),
            (json!({"hidden_size": 0}), "`hidden_size` is 0"),
            (json!({"hidden_size": -64}), "`hidden_size` is -64"),
            (json!({"hidden_size": 64.5}), "`hidden_size` is 64.5"),
            (json!({"vocab_size": 1u64 << 31}), "`vocab_size` is 2147483648"),
            (json!({"num_hidden_layers": "2"}), "`num_hidden_layers` is \"2\""),
            (json!({"num_key_value_heads": 3}), "`num_key_value_heads` is 3; it must divide num_attention_heads 4"),
            (json!({"head_dim": 15}), "`head_dim` is 15 elements of a head; rotary positions need an even number"),
            (json!({"head_dim": 1 << 30}), "`head_dim` is 1073741824; times num_attention_heads 4"),
            (json!({"head_dim": null}), "`head_dim` is missing"),
            (json!({"rms_norm_eps": 0}), "`rms_norm_eps` is 0"),
            (json!({"rms_norm_eps": 1e-60}), "`rms_norm_eps` is 1e-60"),
            (json!({"rms_norm_eps": null}), "`rms_norm_eps` is missing"),
            (json!({"bos_token_id": 100}), "`bos_token_id` is 100; a token is a whole number below vocab_size 100"),
            (json!({"eos_token_id": [7, -1]}), "`eos_token_id` is -1"),
            (json!({"tie_word_embeddings": "yes"}), "`tie_word_embeddings` is \"yes\"; it must be true or false"),
        ];
        for (changes, expected) in cases {
            let line = read("qwen3", changes.clone()).unwrap_err();
            assert!(line.starts_with("config.json: ") && line.contains(expected), "{changes}: {line}");
        }
        let line = read("llama", json!({"head_dim": null, "hidden_size": 66})).unwrap_err();
        assert!(line.contains("`num_attention_heads` is 4; without head_dim it must divide hidden_size 66"), "{line}");
    }
}
