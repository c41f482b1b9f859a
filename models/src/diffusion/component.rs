//! A component of a pipeline: a folder with a `config.json` and weights, and its forward by the names of its arguments.

use super::clip::{self, TextEncoder};
use super::layers::Loader;
use super::moves::widened;
use super::run::Run;
use super::unet::{self, Conditions, Unet};
use super::vae::{self, Vae};
use crate::fields::Fields;
use crate::weights::Weights;
use crate::{ModelError, Precision};
use samebits_ops::{Cpu, DType, Tensor};
use std::collections::BTreeMap;
use std::path::Path;

/// A component, loaded: `AutoencoderKL`, `UNet2DConditionModel`, `CLIPTextModel` or `CLIPTextModelWithProjection`.
///
/// Whatever is computed beside an image, and on whatever threads and instruction set, it has the same bits.
pub struct Component {
    pub(super) kind: Kind,
    dtype: DType,
    /// What of the config is passed by, a line of each.
    pub passed: Vec<String>,
}

pub(super) enum Kind {
    Vae(Box<Vae>),
    Unet(Box<Unet>),
    Text(Box<TextEncoder>),
}

/// What a config says.
enum Config {
    Vae(vae::Config),
    Unet(unet::Config),
    Text(clip::Config),
}

impl Config {
    /// What is wrong with it is noted in the fields.
    fn read(fields: &Fields) -> Option<Config> {
        let class = ["_class_name", "model_type"].map(|field| fields.get(field).and_then(|class| class.as_str()));
        match class {
            [Some("AutoencoderKL"), _] => Some(Config::Vae(vae::Config::read(fields))),
            [Some("UNet2DConditionModel"), _] => Some(Config::Unet(unet::Config::read(fields))),
            [None, Some("clip_text_model")] => Some(Config::Text(clip::Config::read(fields))),
            [class, model] => {
                let (field, class) =
                    if model.is_some() && class.is_none() { ("model_type", model) } else { ("_class_name", class) };
                let class = class.map_or("is missing".into(), |class| format!("is `{class}`"));
                let known = "AutoencoderKL, UNet2DConditionModel, or the model_type clip_text_model";
                fields.refuse(field, format!("{class}; supported is {known}"));
                None
            }
        }
    }

    fn load(&self, loader: Loader, all: bool) -> Result<Kind, ModelError> {
        Ok(match self {
            Config::Vae(config) => Kind::Vae(Box::new(Vae::load(loader, config.clone())?)),
            Config::Unet(config) => Kind::Unet(Box::new(Unet::load(loader, config.clone())?)),
            Config::Text(config) => Kind::Text(Box::new(TextEncoder::load(loader, config.clone(), all)?)),
        })
    }
}

/// Names that tensors have in other folders, and those that they have here: attention of an autoencoder saved before 2023, a text
/// encoder by itself.
fn own_name(name: &str) -> Option<String> {
    const OLD: [[&str; 2]; 4] = [["query", "to_q"], ["key", "to_k"], ["value", "to_v"], ["proj_attn", "to_out.0"]];
    if let Some((module, end)) = name.rsplit_once('.')
        && let Some((attention, old)) = module.rsplit_once('.')
        && attention.ends_with(".mid_block.attentions.0")
        && let Some([_, new]) = OLD.iter().find(|[name, _]| *name == old)
    {
        return Some(format!("{attention}.{new}.{end}"));
    }
    let is_of_text =
        ["embeddings.", "encoder.layers.", "final_layer_norm."].iter().any(|start| name.starts_with(start));
    is_of_text.then(|| format!("text_model.{name}"))
}

impl Component {
    /// Loads the folder `dir`; `progress` is told how many bytes of how many have been read.
    ///
    /// # Errors
    /// [`ModelError`]: all fields that ask for what is not computed, or all tensors that are missing, are not of the component or have
    /// another shape; files that cannot be read, elements that are not finite.
    pub fn load(
        dir: &Path,
        precision: Precision,
        cpu: &Cpu,
        progress: impl FnMut(u64, u64),
    ) -> Result<Component, ModelError> {
        Component::load_parts(dir, precision, cpu, progress, true)
    }

    /// The same; without `all` a text encoder has no last layer, and what that holds is not read.
    pub(super) fn load_parts(
        dir: &Path,
        precision: Precision,
        cpu: &Cpu,
        progress: impl FnMut(u64, u64),
        all: bool,
    ) -> Result<Component, ModelError> {
        let fields = Fields::read(dir.join("config.json"))?;
        let config = Config::read(&fields);
        let passed = fields.end()?;
        let config = config.expect("a class that is not known was refused");
        let dtype = precision.dtype();
        let load =
            |weights: &mut Weights, all: bool| config.load(Loader { cpu, dtype, weights, prefix: String::new() }, all);
        let mut list = Weights::listing();
        load(&mut list, true)?;
        let mut weights = Weights::open_component(dir)?.report_to(progress);
        weights.rename(own_name);
        weights.complete(list.parameters)?;
        Ok(Component { kind: load(&mut weights, all)?, dtype, passed })
    }

    /// Whether the folder has a config as components have.
    pub fn is_component(dir: &Path) -> bool {
        Fields::read(dir.join("config.json")).is_ok_and(|fields| {
            let model = fields.get("model_type").and_then(|model| model.as_str().map(|m| m == "clip_text_model"));
            fields.has("_class_name") || model == Some(true)
        })
    }

    /// Its forward, by the names of the arguments that it has in diffusers or transformers. The answer is `out`, in f32: of an autoencoder the
    /// image of `z[B,L,h,w]`, or the moments of `sample[B,C,H,W]`, of which the first half are means; of a UNet what `sample[B,C,H,W]`,
    /// `timestep` (one or B) and `encoder_hidden_states[B,S,K]` give, with `text_embeds[B,P]` and `time_ids[B,N]` of SDXL; of a text
    /// encoder the last states of `input_ids[B,T]`, or what its projection makes of them, and beside it `last_hidden_state`,
    /// `pooler_output` and `hidden_states.0` and on. Of `attention_mask[B,T]` each row is ones and then zeros.
    ///
    /// # Errors
    /// [`ModelError::Input`] for tensors that are missing, unknown or do not fit; those of ops.
    pub fn forward(
        &self,
        cpu: &Cpu,
        inputs: &BTreeMap<String, Tensor>,
    ) -> Result<BTreeMap<String, Tensor>, ModelError> {
        let given = Given(inputs);
        let run = &mut Run::new(cpu, self.dtype);
        let mut all = BTreeMap::new();
        match &self.kind {
            Kind::Vae(vae) => {
                given.known(&["z", "sample"])?;
                let [image, latent] = vae.channels();
                let out = match (given.get("z"), given.get("sample")) {
                    (Some(_), None) => {
                        let z = given.image(run, "z", latent)?;
                        vae.decode(run, &z)?
                    }
                    (None, Some(_)) => {
                        let sample = given.image(run, "sample", image)?;
                        vae.encode(run, &sample)?
                    }
                    _ => return Err(wrong("give `z` to decode, or `sample` to encode")),
                };
                all.insert("out".into(), out);
            }
            Kind::Unet(unet) => {
                all.insert("out".into(), forward_of_unet(unet, run, &given)?);
            }
            Kind::Text(text) => {
                let encoded = forward_of_text(text, run, &given)?;
                let out = encoded.projected.as_ref().unwrap_or(&encoded.last);
                all.insert("out".into(), in_f32(out)?);
                all.insert("last_hidden_state".into(), encoded.last);
                all.insert("pooler_output".into(), encoded.pooled);
                let states = encoded.states.into_iter().enumerate();
                all.extend(states.map(|(i, states)| (format!("hidden_states.{i}"), states)));
            }
        }
        all.into_iter().map(|(name, tensor)| Ok((name, in_f32(&tensor)?))).collect()
    }
}

fn forward_of_unet(unet: &Unet, run: &mut Run, given: &Given) -> Result<Tensor, ModelError> {
    let of_added: &[&str] = if unet.added().is_some() { &["text_embeds", "time_ids"] } else { &[] };
    given.known(&[&["sample", "timestep", "encoder_hidden_states"], of_added].concat())?;
    let sample = given.image(run, "sample", unet.channels())?;
    let batch = sample.shape()[0];
    let times = given.numbers("timestep")?;
    if ![1, batch].contains(&times.len()) {
        return Err(wrong(format!(
            "`timestep` has {} numbers; give one, or one for each of {batch} images",
            times.len()
        )));
    }
    let times: Vec<f32> = times.iter().cycle().take(batch).copied().collect();
    let text = given.floats(run, "encoder_hidden_states", &[Some(batch), None, Some(unet.text())])?;
    let added = match unet.added() {
        None => None,
        Some([width, all]) => {
            let ids = given.get("time_ids").map(|ids| ids.shape().to_vec());
            let count = ids.as_ref().and_then(|shape| shape.get(1).copied()).unwrap_or(0);
            let pooled = all.checked_sub(count * width);
            let text = given.floats(run, "text_embeds", &[Some(batch), pooled])?;
            let ids = given.required("time_ids")?;
            if ids.shape() != [batch, count] || pooled.is_none() {
                let why = format!(
                    "`time_ids` has shape {:?}; the model embeds {all} numbers, {width} for each of them",
                    ids.shape()
                );
                return Err(wrong(why));
            }
            Some([text, Tensor::new(given.numbers("time_ids")?, &[batch, count])?])
        }
    };
    let added = added.as_ref().map(|[text, ids]| [text, ids]);
    unet.forward(run, &sample, &times, Conditions { text: &text, added })
}

fn forward_of_text(text: &TextEncoder, run: &mut Run, given: &Given) -> Result<clip::Encoded, ModelError> {
    given.known(&["input_ids", "attention_mask"])?;
    let ids = given.required("input_ids")?;
    let (&[batch, length], Some(tokens)) = (ids.shape(), ids.as_slice::<i32>()) else {
        return Err(wrong(format!(
            "`input_ids` is {} of shape {:?}; it must be integers [B, T]",
            ids.dtype(),
            ids.shape()
        )));
    };
    let (vocab, positions) = (text.config.vocab, text.config.positions);
    if batch == 0 || length == 0 || length > positions {
        return Err(wrong(format!(
            "`input_ids` has texts of {length} tokens; the encoder has places for 1 to {positions}"
        )));
    }
    if let Some(token) = tokens.iter().find(|token| !usize::try_from(**token).is_ok_and(|token| token < vocab)) {
        return Err(wrong(format!("`input_ids` holds {token}; the vocabulary is 0 to {}", vocab - 1)));
    }
    let mut lengths = None;
    if let Some(mask) = given.get("attention_mask") {
        let values = given.numbers("attention_mask")?;
        let counted: Vec<usize> =
            values.chunks(length).map(|row| row.iter().take_while(|m| **m == 1.0).count()).collect();
        let rest = |(row, ones): (&[f32], &usize)| *ones > 0 && row[*ones..].iter().all(|m| *m == 0.0);
        if mask.shape() != [batch, length] || !values.chunks(length).zip(&counted).all(rest) {
            return Err(wrong("`attention_mask` must have the shape of input_ids, each row ones and then zeros"));
        }
        lengths = Some(counted);
    }
    text.forward(run, tokens, length, lengths.as_deref())
}

/// The tensors of a forward.
struct Given<'a>(&'a BTreeMap<String, Tensor>);

fn wrong(why: impl Into<String>) -> ModelError {
    ModelError::input("inputs", why)
}

impl Given<'_> {
    /// Refuses names that are none of these.
    fn known(&self, names: &[&str]) -> Result<(), ModelError> {
        match self.0.keys().find(|name| !names.contains(&name.as_str())) {
            Some(name) => {
                Err(wrong(format!("`{name}` is no argument that this component reads; it reads {}", names.join(", "))))
            }
            None => Ok(()),
        }
    }

    fn get(&self, name: &str) -> Option<&Tensor> {
        self.0.get(name)
    }

    fn required(&self, name: &str) -> Result<&Tensor, ModelError> {
        self.get(name).ok_or_else(|| wrong(format!("`{name}` is missing")))
    }

    /// Numbers of any dtype, in f32.
    fn numbers(&self, name: &str) -> Result<Vec<f32>, ModelError> {
        let tensor = self.required(name)?;
        Ok(match tensor.as_slice::<i32>() {
            Some(integers) => integers.iter().map(|n| *n as f32).collect(),
            None => widened(tensor),
        })
    }

    /// Floats of a shape, of which some extents are given, in the dtype of the run.
    fn floats(&self, run: &mut Run, name: &str, shape: &[Option<usize>]) -> Result<Tensor, ModelError> {
        let tensor = self.required(name)?;
        let fits = |(is, of): (&usize, &Option<usize>)| *is > 0 && of.is_none_or(|of| of == *is);
        let is_float = tensor.dtype() != DType::I32;
        if !is_float || tensor.shape().len() != shape.len() || !tensor.shape().iter().zip(shape).all(fits) {
            let shape: Vec<String> = shape.iter().map(|n| n.map_or("..".into(), |n| n.to_string())).collect();
            let (dtype, is) = (tensor.dtype(), tensor.shape());
            return Err(wrong(format!(
                "`{name}` is {dtype} of shape {is:?}; it must be floats of shape [{}]",
                shape.join(", ")
            )));
        }
        run.rounded(tensor)
    }

    /// `[B,channels,H,W]`, in the dtype of the run.
    fn image(&self, run: &mut Run, name: &str, channels: usize) -> Result<Tensor, ModelError> {
        self.floats(run, name, &[None, Some(channels), None, None])
    }
}

fn in_f32(tensor: &Tensor) -> Result<Tensor, ModelError> {
    Ok(Tensor::new(widened(tensor), tensor.shape())?)
}
