//! `AutoencoderKL`: images to the numbers of a distribution of latents, and latents to images.

use super::config::{choice, grouped, kinds, list, nothing_else};
use super::layers::{Conv, GroupNorm, Loader, Norms, PlaceAttention, Resnet, Upsample, load_downsampler, size};
use super::run::Run;
use crate::ModelError;
use crate::fields::Fields;
use samebits_ops::Tensor;

/// What a folder says of it.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    image: [usize; 2],
    latent: usize,
    /// Channels of each block, from the image on.
    channels: Vec<usize>,
    layers: usize,
    groups: usize,
    attends: bool,
    quant: bool,
    post_quant: bool,
    /// What a pipeline multiplies latents with, and subtracts from them before.
    pub scaling: f64,
    pub shift: f64,
}

/// Of all norms.
const EPS: f64 = 1e-6;

impl Config {
    pub fn read(fields: &Fields) -> Config {
        let channels = match fields.has("block_out_channels") {
            true => list(fields, "block_out_channels"),
            false => vec![64],
        };
        let count = channels.len();
        for (field, kind) in [("down_block_types", "DownEncoderBlock2D"), ("up_block_types", "UpDecoderBlock2D")] {
            kinds(fields, field, count, &[kind], &[kind]);
        }
        choice(fields, "act_fn", &["silu", "swish"]);
        let groups = fields.size("norm_num_groups").unwrap_or(32);
        grouped(fields, "norm_num_groups", groups, &channels);
        // What a pipeline makes of latents, where it differs by channel.
        for field in ["latents_mean", "latents_std"] {
            fields.only(field, &[]);
        }
        // Of how large images tiles are made, and in what dtype; neither is of these numbers.
        fields.unread(&["sample_size", "force_upcast"]);
        let size = |field, default| fields.size(field).unwrap_or(default);
        let number = |field| fields.get(field).map(|value| value.as_f64().filter(|number| number.is_finite()));
        let shift = number("shift_factor").unwrap_or(Some(0.0));
        if shift.is_none() {
            fields.refuse("shift_factor", "must be a finite number, or null for none");
        }
        let config = Config {
            image: [size("in_channels", 3), size("out_channels", 3)],
            latent: size("latent_channels", 4),
            layers: size("layers_per_block", 1),
            groups,
            attends: fields.flag("mid_block_add_attention", true),
            quant: fields.flag("use_quant_conv", true),
            post_quant: fields.flag("use_post_quant_conv", true),
            scaling: fields.positive("scaling_factor").unwrap_or(0.18215),
            shift: shift.unwrap_or(0.0),
            channels,
        };
        nothing_else(fields);
        config
    }

    fn norms(&self) -> Norms {
        Norms { groups: self.groups, eps: EPS }
    }
}

/// The lowest resolution, on the way down and on the way up.
struct Middle {
    resnets: [Resnet; 2],
    attention: Option<PlaceAttention>,
}

impl Middle {
    fn load(mut loader: Loader, config: &Config) -> Result<Middle, ModelError> {
        let width = config.channels[config.channels.len() - 1];
        let mut resnet = |name| Resnet::load(loader.of(name), [width; 2], None, config.norms());
        let resnets = [resnet("resnets.0")?, resnet("resnets.1")?];
        let attention = config.attends.then(|| PlaceAttention::load(loader.of("attentions.0"), width, config.norms()));
        Ok(Middle { resnets, attention: attention.transpose()? })
    }

    fn forward(&self, run: &mut Run, x: &Tensor) -> Result<Tensor, ModelError> {
        let mut x = self.resnets[0].forward(run, x, None)?;
        if let Some(attention) = &self.attention {
            x = attention.forward(run, &x)?;
        }
        self.resnets[1].forward(run, &x, None)
    }
}

/// Layers at one resolution, and the way to the next.
struct Block<Next> {
    resnets: Vec<Resnet>,
    next: Option<Next>,
}

impl<Next> Block<Next> {
    fn load(
        loader: &mut Loader,
        count: usize,
        [inputs, outputs]: [usize; 2],
        norms: Norms,
        next: Option<Next>,
    ) -> Result<Block<Next>, ModelError> {
        let resnet = |i: usize| {
            let inputs = if i == 0 { inputs } else { outputs };
            Resnet::load(loader.of(&format!("resnets.{i}")), [inputs, outputs], None, norms)
        };
        Ok(Block { resnets: (0..count).map(resnet).collect::<Result<_, _>>()?, next })
    }

    fn forward(&self, run: &mut Run, mut x: Tensor) -> Result<Tensor, ModelError> {
        for resnet in &self.resnets {
            x = resnet.forward(run, &x, None)?;
        }
        Ok(x)
    }
}

struct Encoder {
    conv_in: Conv,
    down: Vec<Block<Conv>>,
    middle: Middle,
    norm_out: GroupNorm,
    conv_out: Conv,
}

impl Encoder {
    fn load(mut loader: Loader, config: &Config) -> Result<Encoder, ModelError> {
        let Config { channels, layers, groups, .. } = config;
        let (first, last) = (channels[0], channels[channels.len() - 1]);
        let block = |(i, &outputs): (usize, &usize)| {
            let inputs = channels[i.saturating_sub(1)];
            let mut loader = loader.of(&format!("down_blocks.{i}"));
            let next = i + 1 < channels.len();
            let next = next.then(|| load_downsampler(loader.of_itself(), outputs, 0)).transpose()?;
            Block::load(&mut loader, *layers, [inputs, outputs], config.norms(), next)
        };
        let down = channels.iter().enumerate().map(block).collect::<Result<_, _>>()?;
        Ok(Encoder {
            conv_in: Conv::load(loader.of("conv_in"), [config.image[0], first], 3)?,
            down,
            middle: Middle::load(loader.of("mid_block"), config)?,
            norm_out: GroupNorm::load(loader.of("conv_norm_out"), last, *groups, EPS, true)?,
            conv_out: Conv::load(loader.of("conv_out"), [last, 2 * config.latent], 3)?,
        })
    }

    fn forward(&self, run: &mut Run, x: &Tensor) -> Result<Tensor, ModelError> {
        let mut x = self.conv_in.forward(run, x)?;
        for block in &self.down {
            x = block.forward(run, x)?;
            if let Some(downsampler) = &block.next {
                x = downsampler.forward(run, &x)?;
            }
        }
        let x = self.middle.forward(run, &x)?;
        let x = self.norm_out.forward(run, &x)?;
        self.conv_out.forward(run, &x)
    }
}

struct Decoder {
    conv_in: Conv,
    middle: Middle,
    up: Vec<Block<Upsample>>,
    norm_out: GroupNorm,
    conv_out: Conv,
}

impl Decoder {
    fn load(mut loader: Loader, config: &Config) -> Result<Decoder, ModelError> {
        let Config { channels, layers, groups, .. } = config;
        let (first, last) = (channels[0], channels[channels.len() - 1]);
        let backwards: Vec<usize> = channels.iter().rev().copied().collect();
        let block = |(i, &outputs): (usize, &usize)| {
            let inputs = backwards[i.saturating_sub(1)];
            let mut loader = loader.of(&format!("up_blocks.{i}"));
            let next = i + 1 < backwards.len();
            let next = next.then(|| Upsample::load(loader.of_itself(), outputs)).transpose()?;
            Block::load(&mut loader, layers + 1, [inputs, outputs], config.norms(), next)
        };
        let up = backwards.iter().enumerate().map(block).collect::<Result<_, _>>()?;
        Ok(Decoder {
            conv_in: Conv::load(loader.of("conv_in"), [config.latent, last], 3)?,
            middle: Middle::load(loader.of("mid_block"), config)?,
            up,
            norm_out: GroupNorm::load(loader.of("conv_norm_out"), first, *groups, EPS, true)?,
            conv_out: Conv::load(loader.of("conv_out"), [first, config.image[1]], 3)?,
        })
    }

    fn forward(&self, run: &mut Run, z: &Tensor) -> Result<Tensor, ModelError> {
        let x = self.conv_in.forward(run, z)?;
        let mut x = self.middle.forward(run, &x)?;
        for block in &self.up {
            x = block.forward(run, x)?;
            if let Some(upsample) = &block.next {
                x = upsample.forward(run, &x, size(&x).map(|places| 2 * places))?;
            }
        }
        let x = self.norm_out.forward(run, &x)?;
        self.conv_out.forward(run, &x)
    }
}

/// An autoencoder, loaded.
pub(crate) struct Vae {
    pub config: Config,
    encoder: Encoder,
    /// Behind the encoder and before the decoder.
    quant: Option<Conv>,
    post_quant: Option<Conv>,
    decoder: Decoder,
}

impl Vae {
    pub fn load(mut loader: Loader, config: Config) -> Result<Vae, ModelError> {
        let latent = config.latent;
        let mut conv = |name, channels: usize| Conv::load(loader.of(name), [channels; 2], 1);
        let quant = config.quant.then(|| conv("quant_conv", 2 * latent)).transpose()?;
        let post_quant = config.post_quant.then(|| conv("post_quant_conv", latent)).transpose()?;
        Ok(Vae {
            encoder: Encoder::load(loader.of("encoder"), &config)?,
            quant,
            post_quant,
            decoder: Decoder::load(loader.of("decoder"), &config)?,
            config,
        })
    }

    /// `sample[B,C,H,W] -> [B,2 L,h,w]`: means of latents, then logarithms of their variances.
    pub fn encode(&self, run: &mut Run, sample: &Tensor) -> Result<Tensor, ModelError> {
        let moments = self.encoder.forward(run, sample)?;
        match &self.quant {
            Some(quant) => quant.forward(run, &moments),
            None => Ok(moments),
        }
    }

    /// `z[B,L,h,w] -> [B,C,H,W]`
    pub fn decode(&self, run: &mut Run, z: &Tensor) -> Result<Tensor, ModelError> {
        match &self.post_quant {
            Some(post_quant) => {
                let z = post_quant.forward(run, z)?;
                self.decoder.forward(run, &z)
            }
            None => self.decoder.forward(run, z),
        }
    }

    /// Places of an image that a latent stands for on each axis.
    pub fn factor(&self) -> usize {
        1 << (self.config.channels.len() - 1)
    }

    /// Channels of what is encoded, and of what is decoded.
    pub fn channels(&self) -> [usize; 2] {
        [self.config.image[0], self.config.latent]
    }
}
