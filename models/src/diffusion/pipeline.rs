//! Text to images: Stable Diffusion 1 and 2 and SDXL from a folder of diffusers.

use super::clip::TextEncoder;
use super::component::{Component, Kind};
use super::moves::{copied, joined, widened};
use super::noise::noise;
use super::prompts::Prompts;
use super::run::Run;
use super::sampler::Sampler;
use super::schedule::Scheduler;
use super::unet::{Conditions, Unet};
use super::vae::Vae;
use crate::fields::Fields;
use crate::files::read_object;
use crate::{ModelError, Precision};
use samebits_ops::{Cpu, Tensor};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// A pipeline, loaded: text encoders, a UNet, an autoencoder and a sampler.
pub struct Pipeline {
    dir: PathBuf,
    /// One, or the two of SDXL.
    encoders: Vec<Encoder>,
    /// Of SDXL: whether there are zeros in the place of a negative prompt that is not given.
    xl: Option<bool>,
    unet: Component,
    vae: Component,
    scheduler: Scheduler,
    precision: Precision,
    /// What of configs is passed by, a line of each.
    pub passed: Vec<String>,
}

/// A text encoder and its tokenizer.
struct Encoder {
    prompts: Prompts,
    text: Component,
}

impl Encoder {
    fn text(&self) -> &TextEncoder {
        let Kind::Text(text) = &self.text.kind else { unreachable!("it was checked") };
        text
    }
}

/// What text encoders make of prompts.
struct Told {
    /// `[B,T,K]`
    states: Tensor,
    /// Of SDXL, `[B,P]`.
    pooled: Option<Tensor>,
}

/// Fields, and their values in JSON.
type Values = &'static [(&'static str, &'static str)];

/// Samplers by the names of the command line: the class, and what it is told beside what the folder says.
const SAMPLERS: [(&str, &str, Values); 10] = [
    ("ddim", "DDIMScheduler", &[]),
    ("euler", "EulerDiscreteScheduler", &[("use_karras_sigmas", "false")]),
    ("euler_karras", "EulerDiscreteScheduler", &[("use_karras_sigmas", "true")]),
    ("euler_ancestral", "EulerAncestralDiscreteScheduler", &[]),
    ("heun", "HeunDiscreteScheduler", &[]),
    (
        "dpmpp_2m",
        "DPMSolverMultistepScheduler",
        &[("algorithm_type", "\"dpmsolver++\""), ("use_karras_sigmas", "false")],
    ),
    (
        "dpmpp_2m_karras",
        "DPMSolverMultistepScheduler",
        &[("algorithm_type", "\"dpmsolver++\""), ("use_karras_sigmas", "true")],
    ),
    ("dpmpp_2m_sde", "DPMSolverMultistepScheduler", &[("algorithm_type", "\"sde-dpmsolver++\"")]),
    ("unipc", "UniPCMultistepScheduler", &[]),
    ("lcm", "LCMScheduler", &[]),
];

/// What is asked of a pipeline.
#[derive(Clone)]
pub struct Request<'a> {
    /// One for each image.
    pub prompts: &'a [String],
    /// What images are led away from; `None` for what a pipeline takes where nothing is said.
    pub negative: Option<&'a str>,
    /// How far; with 1 or less there is no second call of the UNet. `None` for what is usual.
    pub guidance: Option<f64>,
    /// Height and width; `None` for what the folder says.
    pub size: Option<[usize; 2]>,
    /// Steps of the sampler.
    pub steps: usize,
    /// Of the noise that is not given.
    pub seed: u64,
    /// The first latents `[B,C,h,w]`, before they are scaled.
    pub latents: Option<&'a Tensor>,
    /// What the steps draw, `[draws,B,C,h,w]`.
    pub noise: Option<&'a Tensor>,
}

/// What a pipeline has made, in f32.
pub struct Images {
    /// `[B,3,H,W]`, from -1 to 1 where it is a picture.
    pub image: Tensor,
    /// The latents behind each call of the UNet, `[B,C,h,w]`.
    pub latents: Vec<Tensor>,
    /// What the UNet was told in each.
    pub timesteps: Vec<f32>,
    /// Levels of noise.
    pub sigmas: Vec<f32>,
    /// What the text encoder made of the prompts `[B,T,K]`, and of the negative one.
    pub embeddings: [Option<Tensor>; 2],
}

impl Pipeline {
    /// Loads the folder `dir`, with its own sampler or one by name (`ddim`, `euler`, `euler_karras`, ..).
    ///
    /// # Errors
    /// [`ModelError`] for a folder, a component or a sampler that is missing or not what is computed.
    pub fn load(
        dir: &Path,
        precision: Precision,
        sampler: Option<&str>,
        cpu: &Cpu,
        mut progress: impl FnMut(u64, u64),
    ) -> Result<Pipeline, ModelError> {
        let fields = Fields::read(dir.join("model_index.json"))?;
        let (xl, mut passed) = read_index(fields)?;
        let path = dir.join("scheduler/scheduler_config.json");
        let mut config = read_object(&path)?;
        if let Some(name) = sampler {
            let Some((_, class, told)) = SAMPLERS.iter().find(|(known, ..)| *known == name) else {
                let known: Vec<&str> = SAMPLERS.iter().map(|(name, ..)| *name).collect();
                return Err(ModelError::input("sampler", format!("`{name}` is none of {}", known.join(", "))));
            };
            config.insert("_class_name".into(), (*class).into());
            let told =
                told.iter().map(|(field, value)| ((*field).into(), serde_json::from_str(value).expect("it is JSON")));
            config.extend(told);
        }
        let (scheduler, lines) = Scheduler::of_map(path, config)?;
        passed.extend(lines);
        let mut load = |part: &str, all: bool| {
            let component = Component::load_parts(&dir.join(part), precision, cpu, &mut progress, all);
            component.inspect(|component| passed.extend(component.passed.iter().cloned()))
        };
        let mut encoders = Vec::new();
        for (text, tokenizer) in [("text_encoder", "tokenizer"), ("text_encoder_2", "tokenizer_2")] {
            if text == "text_encoder" || xl.is_some() {
                // The first one of SDXL is read before its last layer.
                let text = load(text, xl.is_none() || text == "text_encoder_2")?;
                encoders.push(Encoder { prompts: Prompts::load(&dir.join(tokenizer))?, text });
            }
        }
        let (unet, vae) = (load("unet", true)?, load("vae", true)?);
        let pipeline = Pipeline { dir: dir.into(), encoders, xl, unet, vae, scheduler, precision, passed };
        pipeline.fits()?;
        Ok(pipeline)
    }

    fn unet(&self) -> &Unet {
        let Kind::Unet(unet) = &self.unet.kind else { unreachable!("it was checked") };
        unet
    }

    fn vae(&self) -> &Vae {
        let Kind::Vae(vae) = &self.vae.kind else { unreachable!("it was checked") };
        vae
    }

    /// Refuses components that are not of their folders or do not go together.
    fn fits(&self) -> Result<(), ModelError> {
        let are_texts = self.encoders.iter().all(|encoder| matches!(encoder.text.kind, Kind::Text(_)));
        if !are_texts || !matches!(self.unet.kind, Kind::Unet(_)) || !matches!(self.vae.kind, Kind::Vae(_)) {
            return Err(ModelError::file(&self.dir, "has a component in the folder of another"));
        }
        let (unet, config) = (self.unet(), self.dir.join("unet/config.json"));
        let width: usize = self.encoders.iter().map(|encoder| encoder.text().width()).sum();
        if unet.text() != width {
            let why = format!("is {}; the text encoders have {width}", unet.text());
            return Err(ModelError::field(&config, "cross_attention_dim", why));
        }
        if unet.channels() != self.vae().channels()[1] {
            let why = format!("is {}; the autoencoder has {}", unet.channels(), self.vae().channels()[1]);
            return Err(ModelError::field(&config, "in_channels", why));
        }
        let pooled = self.encoders.last().and_then(|encoder| encoder.text().config.projection());
        let wanted = self.xl.and(pooled);
        let given = unet.added().map(|[number, all]| all.wrapping_sub(6 * number));
        if self.xl.is_some() != given.is_some() || given != wanted {
            let why = "does not go with this pipeline: SDXL embeds its pooled text and six sizes, others nothing";
            return Err(ModelError::field(&config, "projection_class_embeddings_input_dim", why));
        }
        Ok(())
    }

    /// What the encoders make of prompts.
    fn embed(&self, run: &mut Run, prompts: &[&str]) -> Result<Told, ModelError> {
        let mut all: Option<Tensor> = None;
        let mut pooled = None;
        for encoder in &self.encoders {
            let text = encoder.text();
            let (places, vocab) = (text.config.positions, text.config.vocab);
            let tokens = prompts.iter().map(|prompt| encoder.prompts.tokens(prompt, places, vocab));
            let tokens = tokens.collect::<Result<Vec<_>, _>>()?;
            let mut encoded = text.forward(run, &tokens.concat(), tokens[0].len(), None)?;
            let states = match self.xl {
                None => encoded.last,
                // Before the last layer, which the first encoder does not have here.
                Some(_) => encoded.states.swap_remove(text.before_last()),
            };
            pooled = encoded.projected;
            all = Some(match all {
                None => states,
                Some(first) if first.shape()[..2] == states.shape()[..2] => beside(&first, &states)?,
                Some(_) => return Err(ModelError::file(&self.dir, "has text encoders of texts of two lengths")),
            });
        }
        Ok(Told { states: all.expect("there is an encoder"), pooled })
    }

    /// Height and width of latents, and how many places of an image one of them is on each axis.
    fn size(&self, asked: Option<[usize; 2]>) -> Result<([usize; 2], usize), ModelError> {
        let factor = self.vae().factor();
        let default = || self.unet().config.size.map(|size| [size * factor; 2]);
        let Some([height, width]) = asked.or_else(default) else {
            return Err(ModelError::input("size", "the folder does not say how large images are; give it"));
        };
        if height == 0 || width == 0 || !height.is_multiple_of(factor) || !width.is_multiple_of(factor) {
            let why = format!("{height}x{width}: both must be multiples of {factor}, of which a latent stands for one");
            return Err(ModelError::input("size", why));
        }
        Ok(([height / factor, width / factor], factor))
    }

    /// Makes an image of each prompt; `done` is told how many calls of the UNet of how many there were.
    ///
    /// # Errors
    /// [`ModelError::Input`] for what does not fit; those of components.
    pub fn run(&self, cpu: &Cpu, request: &Request, mut done: impl FnMut(usize, usize)) -> Result<Images, ModelError> {
        let (unet, vae) = (self.unet(), self.vae());
        let run = &mut Run::new(cpu, self.precision.dtype());
        let (batch, channels) = (request.prompts.len(), unet.channels());
        let ([height, width], factor) = self.size(request.size)?;
        let shape = [batch, channels, height, width];
        let mut sampler = Sampler::new(&self.scheduler, request.steps, None)?;
        let guidance = request.guidance.unwrap_or(if self.xl.is_some() { 5.0 } else { 7.5 });
        let guided = guidance > 1.0;

        let prompts: Vec<&str> = request.prompts.iter().map(String::as_str).collect();
        let positive = self.embed(run, &prompts)?;
        let negative = guided.then(|| self.away(run, request, &positive)).transpose()?;
        let sizes = [height * factor, width * factor, 0, 0, height * factor, width * factor].map(|n| n as f32);
        let told = match &negative {
            Some(negative) => Told {
                states: behind(&negative.states, &positive.states)?,
                pooled: match (&negative.pooled, &positive.pooled) {
                    (Some(negative), Some(positive)) => Some(behind(negative, positive)?),
                    _ => None,
                },
            },
            None => {
                Told { states: copied(&positive.states)?, pooled: positive.pooled.as_ref().map(copied).transpose()? }
            }
        };
        let rows = told.states.shape()[0];
        let sizes = Tensor::new(sizes.repeat(rows), &[rows, sizes.len()])?;

        let mut latents = first_latents(request, &sampler, &shape)?;
        let calls = sampler.timesteps().len();
        let (mut all, mut draws, mut input) = (Vec::new(), 0, latents.clone());
        while let Some(timestep) = sampler.timestep() {
            sampler.scale_input(&latents, &mut input);
            let sample = run.rounded(&Tensor::new(input.clone(), &shape)?)?;
            let input = if guided { behind(&sample, &sample)? } else { sample };
            let added = self.xl.and(told.pooled.as_ref()).map(|pooled| [pooled, &sizes]);
            let said = unet.forward(run, &input, &vec![timestep; rows], Conditions { text: &told.states, added })?;
            let said = widened(&said);
            let output = match guided {
                true => guide(&said[..said.len() / 2], &said[said.len() / 2..], guidance as f32),
                false => said,
            };
            let noise = sampler.draws().then(|| drawn(request, draws, &shape)).transpose()?;
            draws += usize::from(noise.is_some());
            sampler.step(&output, &mut latents, noise.as_deref());
            all.push(Tensor::new(latents.clone(), &shape)?);
            done(all.len(), calls);
        }
        let z: Vec<f32> = latents.iter().map(|x| x / vae.config.scaling as f32 + vae.config.shift as f32).collect();
        let z = run.rounded(&Tensor::new(z, &shape)?)?;
        let image = vae.decode(run, &z)?;
        Ok(Images {
            image: Tensor::new(widened(&image), image.shape())?,
            latents: all,
            timesteps: sampler.timesteps().to_vec(),
            sigmas: sampler.sigmas().to_vec(),
            embeddings: [Some(&positive), negative.as_ref()]
                .map(|told| told.and_then(|told| Tensor::new(widened(&told.states), told.states.shape()).ok())),
        })
    }

    /// What images are led away from.
    fn away(&self, run: &mut Run, request: &Request, positive: &Told) -> Result<Told, ModelError> {
        if request.negative.is_none() && self.xl == Some(true) {
            let mut zeros = |like: &Tensor| -> Result<Tensor, ModelError> {
                let count = like.shape().iter().product();
                run.rounded(&Tensor::new(vec![0f32; count], like.shape())?)
            };
            return Ok(Told {
                states: zeros(&positive.states)?,
                pooled: positive.pooled.as_ref().map(zeros).transpose()?,
            });
        }
        self.embed(run, &vec![request.negative.unwrap_or(""); request.prompts.len()])
    }
}

/// What a `model_index.json` says: of SDXL whether zeros stand for no negative prompt, and what is passed by.
fn read_index(fields: Fields) -> Result<(Option<bool>, Vec<String>), ModelError> {
    const XL: &str = "StableDiffusionXLPipeline";
    fields.only("_class_name", &["StableDiffusionPipeline".into(), XL.into()]);
    if fields.get("_class_name").is_none() {
        fields.refuse("_class_name", "is missing; it must name a pipeline");
    }
    let xl = fields.get("_class_name").and_then(Value::as_str) == Some(XL);
    let parts = [
        ("text_encoder", "transformers", &["CLIPTextModel"][..]),
        ("tokenizer", "transformers", &["CLIPTokenizer", "CLIPTokenizerFast"]),
        ("unet", "diffusers", &["UNet2DConditionModel"]),
        ("vae", "diffusers", &["AutoencoderKL"]),
        ("text_encoder_2", "transformers", &["CLIPTextModelWithProjection"]),
        ("tokenizer_2", "transformers", &["CLIPTokenizer", "CLIPTokenizerFast"]),
    ];
    for (part, library, classes) in &parts[..if xl { 6 } else { 4 }] {
        let known: Vec<Value> = classes.iter().map(|class| serde_json::json!([library, class])).collect();
        fields.only(part, &known);
        if fields.get(part).is_none() {
            fields.refuse(*part, "is missing; a pipeline has this component");
        }
    }
    // What judges images, and what turns them into what that reads, is left out; an encoder of images is refused.
    fields.unread(&["scheduler", "safety_checker", "feature_extractor", "requires_safety_checker"]);
    fields.only("image_encoder", &[serde_json::json!([null, null])]);
    let zeros = xl.then(|| fields.flag("force_zeros_for_empty_prompt", true));
    super::config::nothing_else(&fields);
    Ok((zeros, fields.end()?))
}

/// `away + guidance * (to - away)`, the product and the sum by one fma.
fn guide(away: &[f32], to: &[f32], guidance: f32) -> Vec<f32> {
    away.iter().zip(to).map(|(away, to)| guidance.mul_add(to - away, *away)).collect()
}

/// `a[M,..], b[N,..] -> [M + N,..]`
fn behind(a: &Tensor, b: &Tensor) -> Result<Tensor, ModelError> {
    let flat = |x: &Tensor| -> Result<Tensor, ModelError> {
        let mut copy = copied(x)?;
        copy.reshape(&[&[1], x.shape()].concat());
        Ok(copy)
    };
    let mut both = joined(&flat(a)?, &flat(b)?)?;
    let shape = both.shape()[1..].to_vec();
    both.reshape(&shape);
    Ok(both)
}

/// `a[B,T,M], b[B,T,N] -> [B,T,M + N]`
fn beside(a: &Tensor, b: &Tensor) -> Result<Tensor, ModelError> {
    let flat = |x: &Tensor| -> Result<Tensor, ModelError> {
        let mut copy = copied(x)?;
        copy.reshape(&super::layers::rows(x.shape()));
        Ok(copy)
    };
    let (rows, mut both) = (&a.shape()[..2], joined(&flat(a)?, &flat(b)?)?);
    let width = both.shape()[1];
    both.reshape(&[rows, &[width]].concat());
    Ok(both)
}

/// What is given, or the noise of each image, times what the sampler asks for.
fn first_latents(request: &Request, sampler: &Sampler, shape: &[usize; 4]) -> Result<Vec<f32>, ModelError> {
    let mut latents = match request.latents {
        Some(given) if given.shape() == shape => widened(given),
        Some(given) => {
            let why =
                format!("`latents.0` has shape {:?}; these prompts and this size ask for {shape:?}", given.shape());
            return Err(ModelError::input("latents", why));
        }
        None => own_noise(request.seed, 0, shape),
    };
    let scale = sampler.initial_scale();
    latents.iter_mut().for_each(|x| *x *= scale);
    Ok(latents)
}

/// Draw number `draw` behind the first latents.
fn drawn(request: &Request, draw: usize, shape: &[usize; 4]) -> Result<Vec<f32>, ModelError> {
    let Some(given) = request.noise else { return Ok(own_noise(request.seed, draw as u64 + 1, shape)) };
    if given.shape().get(1..) != Some(shape) || given.shape()[0] <= draw {
        let why = format!("`noise` has shape {:?}; draw {draw} of {shape:?} is asked for", given.shape());
        return Err(ModelError::input("noise", why));
    }
    let size: usize = shape.iter().product();
    Ok(widened(given)[draw * size..][..size].to_vec())
}

fn own_noise(seed: u64, draw: u64, shape: &[usize; 4]) -> Vec<f32> {
    let size = shape[1] * shape[2] * shape[3];
    let mut all = vec![0.0; shape[0] * size];
    for (image, out) in all.chunks_mut(size.max(1)).enumerate() {
        noise(seed, image as u64, draw, 0, out);
    }
    all
}
