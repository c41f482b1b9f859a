use super::{Loading, Machine, warn};
use crate::cmd::component;
use crate::png;
use anyhow::{Context, Result, bail, ensure};
use samebits_contract::atomic_write;
use samebits_contract::tensor;
use samebits_contract::wire::File;
use samebits_models::Precision;
use samebits_models::diffusion::{Images, Pipeline, Request};
use samebits_ops::Tensor;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Makes images of texts
///
/// Reads a folder of diffusers (`model_index.json`, a component a folder) of Stable Diffusion 1 or 2 or SDXL and writes a PNG for each
/// prompt. Noise comes of the seed, the number of the prompt, the draw and the element, so an image does not depend on those beside
/// it; neither do instruction set, threads and budget move a bit of it.
#[derive(clap::Args)]
pub struct Args {
    /// Folder of diffusers: model_index.json, text_encoder/, tokenizer/, unet/, vae/, scheduler/; of SDXL text_encoder_2/, tokenizer_2/
    #[arg(long, value_name = "DIR")]
    model: PathBuf,

    /// What is to be seen; may be given again, for an image each
    #[arg(long, value_name = "TEXT", required = true)]
    prompt: Vec<String>,

    /// What the images are led away from
    #[arg(long, value_name = "TEXT")]
    negative: Option<String>,

    /// How far they are led; 1 is not at all [default: 7.5, of SDXL 5]
    #[arg(long, value_name = "G")]
    guidance: Option<f64>,

    /// Height and width of the images [default: what the folder says]
    #[arg(long, value_name = "HxW", value_parser = size)]
    size: Option<[usize; 2]>,

    /// Steps from noise to an image
    #[arg(long, value_name = "N")]
    steps: usize,

    /// ddim, euler, euler_karras, euler_ancestral, heun, dpmpp_2m, dpmpp_2m_karras, dpmpp_2m_sde, unipc or lcm [default: as
    /// the folder's scheduler says]
    #[arg(long, value_name = "SAMPLER")]
    sampler: Option<String>,

    /// Of all noise that is not given
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,

    /// Safetensors file with the first latents, `latents.0` [B, C, h, w], before they are scaled
    #[arg(long, value_name = "FILE")]
    latents: Option<PathBuf>,

    /// Safetensors file with what stochastic samplers draw, `noise` [draws, B, C, h, w]
    #[arg(long, value_name = "FILE")]
    noise: Option<PathBuf>,

    /// Also write the latents behind each step (`latents.1` and on), `timesteps`, `sigmas`, `prompt_embeds`, `negative_prompt_embeds`
    /// and `image`, in f32
    #[arg(long, value_name = "FILE")]
    dump: Option<PathBuf>,

    /// bf16: as models are published; fp32: everything in fp32
    #[arg(long, default_value = "bf16", value_name = "bf16|fp16|fp32")]
    dtype: Precision,

    /// Most bytes of workspace of an op [default: no limit]
    #[arg(long, value_name = "BYTES")]
    budget: Option<usize>,

    /// PNG to write; with several prompts a name with {}, in whose place their numbers stand
    #[arg(long, value_name = "FILE.png")]
    out: PathBuf,

    #[command(flatten)]
    machine: Machine,
}

fn size(text: &str) -> Result<[usize; 2], String> {
    let parts: Option<Vec<usize>> = text.split('x').map(|part| part.parse().ok().filter(|n| *n > 0)).collect();
    parts.and_then(|parts| parts.try_into().ok()).ok_or_else(|| "give height and width, such as 512x768".into())
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let cpu = args.machine.cpu(args.budget)?;
    let outs = outs(args)?;
    for path in outs.iter().chain(&args.dump) {
        atomic_write::check(path).with_context(|| path.display().to_string())?;
    }
    if let Some(guidance) = args.guidance {
        ensure!(guidance.is_finite(), "--guidance {guidance}: give a finite number");
    }
    let given = |path: &Option<PathBuf>, name: &str| -> Result<Option<Tensor>> {
        let Some(path) = path else { return Ok(None) };
        let tensor = component::read(path).with_context(|| path.display().to_string())?.remove(name);
        tensor.map(Some).with_context(|| format!("{}: tensor `{name}` is missing", path.display()))
    };
    let (latents, noise) = (given(&args.latents, "latents.0")?, given(&args.noise, "noise")?);
    let loading = Loading::of(&args.model);
    let progress = |done, total| loading.at(done, total);
    let pipeline = Pipeline::load(&args.model, args.dtype, args.sampler.as_deref(), &cpu, progress)?;
    drop(loading);
    pipeline.passed.iter().for_each(|line| warn(line));
    samebits_ops::keep_freed_memory();
    let request = Request {
        prompts: &args.prompt,
        negative: args.negative.as_deref(),
        guidance: args.guidance,
        size: args.size,
        steps: args.steps,
        seed: args.seed,
        latents: latents.as_ref(),
        noise: noise.as_ref(),
    };
    let bar = super::counting(args.steps);
    let images = pipeline.run(&cpu, &request, |done, all| {
        bar.set_length(all as u64);
        bar.set_position(done as u64);
    })?;
    bar.finish_and_clear();
    write(args, &outs, &images)?;
    Ok(ExitCode::SUCCESS)
}

/// The files, one for each prompt.
fn outs(args: &Args) -> Result<Vec<PathBuf>> {
    let name = args.out.to_str().with_context(|| format!("--out {}: is no text", args.out.display()))?;
    match args.prompt.len() {
        1 => Ok(vec![name.replace("{}", "0").into()]),
        _ if !name.contains("{}") => bail!("--out {name}: there are several prompts; give a name with {{}}"),
        count => Ok((0..count).map(|i| name.replace("{}", &i.to_string()).into()).collect()),
    }
}

/// Writes the dump, and the pictures when all of them are there.
fn write(args: &Args, outs: &[PathBuf], images: &Images) -> Result<()> {
    let values = images.image.as_slice::<f32>().context("an image is f32")?;
    if let Some(value) = values.iter().find(|value| !value.is_finite()) {
        bail!(
            "an image would hold {value}; {} is too narrow for this model: give --dtype bf16 or fp32",
            args.dtype.name()
        );
    }
    let &[_, channels, height, width] = images.image.shape() else { bail!("an image has four axes") };
    ensure!(channels == 3, "images of {channels} channels are no pictures");
    if let Some(path) = &args.dump {
        dump(path, images).with_context(|| format!("--dump {}", path.display()))?;
    }
    for (image, path) in values.chunks(3 * height * width).zip(outs) {
        let byte = |value: f32| ((value / 2.0 + 0.5).clamp(0.0, 1.0) * 255.0).round_ties_even() as u8;
        let places = height * width;
        let rgb: Vec<u8> = (0..places).flat_map(|p| (0..3).map(move |c| byte(image[c * places + p]))).collect();
        atomic_write::write(path, &png::encode([height, width], &rgb)).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

fn dump(path: &Path, images: &Images) -> Result<()> {
    let f32_of = |tensor: &Tensor| -> Result<tensor::Tensor> {
        let values = tensor.as_slice::<f32>().context("a dump is f32")?;
        Ok(tensor::Tensor::fp32(tensor.shape(), values.to_vec()))
    };
    let list = |values: &[f32]| tensor::Tensor::fp32(&[values.len()], values.to_vec());
    let mut tensors = BTreeMap::from([
        ("image".to_string(), f32_of(&images.image)?),
        ("timesteps".into(), list(&images.timesteps)),
        ("sigmas".into(), list(&images.sigmas)),
    ]);
    for (i, latents) in images.latents.iter().enumerate() {
        tensors.insert(format!("latents.{}", i + 1), f32_of(latents)?);
    }
    for (name, states) in ["prompt_embeds", "negative_prompt_embeds"].iter().zip(&images.embeddings) {
        if let Some(states) = states {
            tensors.insert((*name).into(), f32_of(states)?);
        }
    }
    Ok(atomic_write::write(path, &File { tensors, metadata: BTreeMap::new() }.encode())?)
}
