//! `UNet2DConditionModel` (Stable Diffusion 1 and 2, SDXL): what of a noisy image is noise, by a time and a text.

use super::config::{choice, grouped, kinds, list, nothing_else, sizes};
use super::layers::{
    Attention, Conv, Dense, GegluMlp, GroupNorm, LayerNorm, Loader, Norms, Resnet, Upsample, load_downsampler, size,
};
use super::moves::{joined, places_as_rows, rows_as_places, sinusoids, widened};
use super::run::Run;
use crate::ModelError;
use crate::fields::Fields;
use samebits_ops::{Attributes, DType, Tensor};

/// What a folder says of it.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    image: [usize; 2],
    /// Of each block, from the image on.
    channels: Vec<usize>,
    layers: Vec<usize>,
    /// Attention blocks of a transformer in each block; none where it has no attention.
    depths: [Vec<usize>; 2],
    /// Those of the block in the middle.
    middle: usize,
    heads: Vec<usize>,
    text: Vec<usize>,
    taps: [usize; 2],
    padding: usize,
    norms: Norms,
    /// Width of the embedding of times.
    time: usize,
    cosines_first: bool,
    shift: f32,
    dense: bool,
    /// Of SDXL: width of a number's sinusoids, and of all that is embedded beside the time.
    added: Option<[usize; 2]>,
    /// How large images of the folder are.
    pub size: Option<usize>,
}

/// Kinds of blocks, without attention and with it.
const DOWN: [&str; 2] = ["DownBlock2D", "CrossAttnDownBlock2D"];
const UP: [&str; 2] = ["UpBlock2D", "CrossAttnUpBlock2D"];

impl Config {
    pub fn read(fields: &Fields) -> Config {
        let channels = match fields.has("block_out_channels") {
            true => list(fields, "block_out_channels"),
            false => vec![320, 640, 1280, 1280],
        };
        let count = channels.len();
        let of_each = |field, default| sizes(fields, field, count, default);
        let transformers = of_each("transformer_layers_per_block", 1);
        let down = kinds(fields, "down_block_types", count, &DOWN, &[DOWN[1], DOWN[1], DOWN[1], DOWN[0]]);
        let up = kinds(fields, "up_block_types", count, &UP, &[UP[0], UP[1], UP[1], UP[1]]);
        // Blocks on the way up are listed from the lowest resolution on.
        let depth = |kind: &String, i: usize| if [DOWN[1], UP[1]].contains(&&**kind) { transformers[i] } else { 0 };
        let down: Vec<usize> = down.iter().enumerate().map(|(i, kind)| depth(kind, i)).collect();
        let up: Vec<usize> = up.iter().enumerate().map(|(i, kind)| depth(kind, count - 1 - i)).collect();
        choice(fields, "mid_block_type", &["UNetMidBlock2DCrossAttn"]);
        choice(fields, "act_fn", &["silu", "swish"]);
        let groups = fields.size("norm_num_groups").unwrap_or(32);
        if !fields.has("norm_num_groups") || fields.get("norm_num_groups").is_some() {
            grouped(fields, "norm_num_groups", groups, &channels);
        } else {
            fields.refuse("norm_num_groups", "is null; norms of groups are what is supported");
        }
        // Named for the elements of a head, it is how many heads there are.
        let heads = of_each("attention_head_dim", 8);
        if let Some((heads, width)) = heads.iter().zip(&channels).find(|(heads, width)| !width.is_multiple_of(**heads))
        {
            fields.refuse(
                "attention_head_dim",
                format!("asks for {heads} heads of {width} channels; it must divide them"),
            );
        }
        let taps = ["conv_in_kernel", "conv_out_kernel"].map(|field| {
            let taps = fields.size(field).unwrap_or(3);
            if taps.is_multiple_of(2) {
                fields.refuse(field, format!("is {taps}; it must be odd"));
            }
            taps
        });
        let padding = fields.get("downsample_padding").map_or(Some(1), |value| value.as_u64().filter(|n| *n < 2));
        if padding.is_none() {
            fields.refuse("downsample_padding", "must be 0 or 1");
        }
        let shift =
            fields.get("freq_shift").map_or(Some(0.0), |value| value.as_f64().filter(|n| [0.0, 1.0].contains(n)));
        if shift.is_none() {
            fields.refuse("freq_shift", "must be 0 or 1");
        }
        only_what_is_computed(fields);
        fields.only("addition_embed_type", &["text_time".into()]);
        let added = fields.get("addition_embed_type").is_some().then(|| {
            ["addition_time_embed_dim", "projection_class_embeddings_input_dim"]
                .map(|field| fields.required_size(field))
        });
        let image = ["in_channels", "out_channels"].map(|field| fields.size(field).unwrap_or(4));
        let config = Config {
            image,
            layers: of_each("layers_per_block", 2),
            middle: transformers[count - 1],
            depths: [down, up],
            heads,
            text: of_each("cross_attention_dim", 1280),
            taps,
            padding: padding.unwrap_or(1) as usize,
            norms: Norms { groups, eps: fields.positive("norm_eps").unwrap_or(1e-5) },
            time: fields.size("time_embedding_dim").unwrap_or(4 * channels[0]),
            cosines_first: fields.flag("flip_sin_to_cos", true),
            shift: shift.unwrap_or(0.0) as f32,
            dense: fields.flag("use_linear_projection", false),
            added,
            size: fields.size("sample_size"),
            channels,
        };
        nothing_else(fields);
        config
    }
}

/// Refuses what asks for another computation than that of Stable Diffusion.
fn only_what_is_computed(fields: &Fields) {
    for field in [
        "center_input_sample",
        "dual_cross_attention",
        "only_cross_attention",
        "resnet_skip_time_act",
        "class_embeddings_concat",
        "mid_block_only_cross_attention",
    ] {
        fields.only(field, &[false.into()]);
    }
    for field in ["mid_block_scale_factor", "resnet_out_scale_factor"] {
        fields.only(field, &[1.into()]);
    }
    for field in [
        "class_embed_type",
        "num_class_embeds",
        "encoder_hid_dim",
        "encoder_hid_dim_type",
        "time_embedding_act_fn",
        "timestep_post_act",
        "time_cond_proj_dim",
        "cross_attention_norm",
        "num_attention_heads",
        "reverse_transformer_layers_per_block",
    ] {
        fields.only(field, &[]);
    }
    choice(fields, "resnet_time_scale_shift", &["default"]);
    choice(fields, "time_embedding_type", &["positional"]);
    choice(fields, "attention_type", &["default"]);
    // Training, a softmax in f32 (as it is here always), heads of an embedding that is refused, numbers of an embedding where there
    // is none.
    fields.unread(&[
        "dropout",
        "upcast_attention",
        "addition_embed_type_num_heads",
        "addition_time_embed_dim",
        "projection_class_embeddings_input_dim",
    ]);
}

/// An embedding of numbers in f32: two matrices, and silu between them.
struct Embedding(Dense, Dense);

impl Embedding {
    fn load(mut loader: Loader, inputs: usize, outputs: usize) -> Result<Embedding, ModelError> {
        let first = Dense::load(loader.of("linear_1"), [inputs, outputs], true)?;
        Ok(Embedding(first, Dense::load(loader.of("linear_2"), [outputs; 2], true)?))
    }

    fn forward(&self, run: &mut Run, x: &Tensor) -> Result<Tensor, ModelError> {
        let h = self.0.forward_as(run, DType::Fp32, x)?;
        let h = run.silu(&h)?;
        self.1.forward_as(run, DType::Fp32, &h)
    }
}

/// Self-attention, attention to the text and an MLP, each behind a norm and added.
struct TransformerBlock {
    norms: [LayerNorm; 3],
    to_places: Attention,
    to_text: Attention,
    mlp: GegluMlp,
}

impl TransformerBlock {
    fn load(mut loader: Loader, width: usize, text: usize, heads: usize) -> Result<TransformerBlock, ModelError> {
        let mut norm = |name| LayerNorm::load(loader.of(name), width, 1e-5);
        Ok(TransformerBlock {
            norms: [norm("norm1")?, norm("norm2")?, norm("norm3")?],
            to_places: Attention::load(loader.of("attn1"), width, width, heads)?,
            to_text: Attention::load(loader.of("attn2"), width, text, heads)?,
            mlp: GegluMlp::load(loader.of("ff"), width)?,
        })
    }

    fn forward(&self, run: &mut Run, x: &Tensor, text: &Tensor) -> Result<Tensor, ModelError> {
        let h = self.norms[0].forward(run, x)?;
        let h = self.to_places.forward(run, &h, &h, None)?;
        let x = run.join(x, &h)?;
        let h = self.norms[1].forward(run, &x)?;
        let h = self.to_text.forward(run, &h, text, None)?;
        let x = run.join(&x, &h)?;
        let h = self.norms[2].forward(run, &x)?;
        let h = self.mlp.forward(run, &h)?;
        run.join(&x, &h)
    }
}

/// From channels to rows and back, by a matrix or by a convolution of one tap.
enum Projection {
    Dense(Dense),
    Conv(Conv),
}

/// Transformer blocks over the places of an image, between projections, added to it.
struct Transformer {
    norm: GroupNorm,
    proj_in: Projection,
    blocks: Vec<TransformerBlock>,
    proj_out: Projection,
}

impl Transformer {
    fn load(mut loader: Loader, config: &Config, level: usize, depth: usize) -> Result<Transformer, ModelError> {
        let (width, text, heads) = (config.channels[level], config.text[level], config.heads[level]);
        let mut projection = |name| -> Result<Projection, ModelError> {
            Ok(match config.dense {
                true => Projection::Dense(Dense::load(loader.of(name), [width; 2], true)?),
                false => Projection::Conv(Conv::load(loader.of(name), [width; 2], 1)?),
            })
        };
        let (proj_in, proj_out) = (projection("proj_in")?, projection("proj_out")?);
        let block = |i| TransformerBlock::load(loader.of(&format!("transformer_blocks.{i}")), width, text, heads);
        let blocks = (0..depth).map(block).collect::<Result<_, _>>()?;
        Ok(Transformer {
            norm: GroupNorm::load(loader.of("norm"), width, config.norms.groups, 1e-6, false)?,
            proj_in,
            blocks,
            proj_out,
        })
    }

    fn forward(&self, run: &mut Run, x: &Tensor, text: &Tensor) -> Result<Tensor, ModelError> {
        let h = self.norm.forward(run, x)?;
        let mut h = match &self.proj_in {
            Projection::Dense(proj) => proj.forward(run, &places_as_rows(&h)?)?,
            Projection::Conv(proj) => places_as_rows(&proj.forward(run, &h)?)?,
        };
        for block in &self.blocks {
            h = block.forward(run, &h, text)?;
        }
        let h = match &self.proj_out {
            Projection::Dense(proj) => rows_as_places(&proj.forward_as(run, DType::Fp32, &h)?, size(x))?,
            Projection::Conv(proj) => proj.forward_as(run, DType::Fp32, &rows_as_places(&h, size(x))?)?,
        };
        run.join(x, &h)
    }
}

/// Layers at one resolution, with attention to the text or without, and the way to the next.
struct Block<Next> {
    layers: Vec<(Resnet, Option<Transformer>)>,
    next: Option<Next>,
}

impl<Next> Block<Next> {
    /// Of as many layers as there are pairs of channels.
    fn load(
        mut loader: Loader,
        config: &Config,
        (level, depth): (usize, usize),
        channels: &[[usize; 2]],
        next: impl FnOnce(Loader) -> Result<Option<Next>, ModelError>,
    ) -> Result<Block<Next>, ModelError> {
        let layer = |(i, channels): (usize, &[usize; 2])| {
            let resnet = Resnet::load(loader.of(&format!("resnets.{i}")), *channels, Some(config.time), config.norms)?;
            let transformer = || Transformer::load(loader.of(&format!("attentions.{i}")), config, level, depth);
            Ok((resnet, (depth > 0).then(transformer).transpose()?))
        };
        let layers = channels.iter().enumerate().map(layer).collect::<Result<_, ModelError>>()?;
        Ok(Block { layers, next: next(loader)? })
    }
}

/// What all layers are told beside the image: the time, through silu, and the text.
struct Told {
    time: Tensor,
    text: Tensor,
}

impl Told {
    fn layer(
        &self,
        run: &mut Run,
        (resnet, transformer): &(Resnet, Option<Transformer>),
        x: &Tensor,
    ) -> Result<Tensor, ModelError> {
        let x = resnet.forward(run, x, Some(&self.time))?;
        match transformer {
            Some(transformer) => transformer.forward(run, &x, &self.text),
            None => Ok(x),
        }
    }
}

/// A UNet, loaded.
pub(crate) struct Unet {
    pub config: Config,
    time: Embedding,
    added: Option<Embedding>,
    conv_in: Conv,
    down: Vec<Block<Conv>>,
    /// A resnet with a transformer, and one without.
    middle: [(Resnet, Option<Transformer>); 2],
    up: Vec<Block<Upsample>>,
    norm_out: GroupNorm,
    conv_out: Conv,
}

/// What a UNet is given beside the image and the time.
pub(crate) struct Conditions<'a> {
    /// `[B,S,K]`
    pub text: &'a Tensor,
    /// Of SDXL: `text_embeds[B,P], time_ids[B,N]`.
    pub added: Option<[&'a Tensor; 2]>,
}

impl Unet {
    pub fn load(mut loader: Loader, config: Config) -> Result<Unet, ModelError> {
        let Config { channels, layers, depths, time, .. } = &config;
        let count = channels.len();
        let down = |level: usize| {
            let (outputs, inputs) = (channels[level], channels[level.saturating_sub(1)]);
            let all: Vec<[usize; 2]> =
                (0..layers[level]).map(|i| [if i == 0 { inputs } else { outputs }, outputs]).collect();
            let next = |loader: Loader| -> Result<Option<Conv>, ModelError> {
                (level + 1 < count).then(|| load_downsampler(loader, outputs, config.padding)).transpose()
            };
            Block::load(loader.of(&format!("down_blocks.{level}")), &config, (level, depths[0][level]), &all, next)
        };
        let down = (0..count).map(down).collect::<Result<_, _>>()?;
        let up = |i: usize| {
            let level = count - 1 - i;
            let outputs = channels[level];
            let (from_below, skipped_last) = (channels[(level + 1).min(count - 1)], channels[level.saturating_sub(1)]);
            let last = layers[level];
            let pair = |j: usize| {
                let (x, skipped) =
                    (if j == 0 { from_below } else { outputs }, if j == last { skipped_last } else { outputs });
                [x + skipped, outputs]
            };
            let all: Vec<[usize; 2]> = (0..=last).map(pair).collect();
            let next = |loader: Loader| -> Result<Option<Upsample>, ModelError> {
                (level > 0).then(|| Upsample::load(loader, outputs)).transpose()
            };
            Block::load(loader.of(&format!("up_blocks.{i}")), &config, (level, depths[1][i]), &all, next)
        };
        let up = (0..count).map(up).collect::<Result<_, _>>()?;
        let lowest = channels[count - 1];
        let mut resnet = |name| Resnet::load(loader.of(name), [lowest; 2], Some(*time), config.norms);
        let resnets = [resnet("mid_block.resnets.0")?, resnet("mid_block.resnets.1")?];
        let attention = Transformer::load(loader.of("mid_block.attentions.0"), &config, count - 1, config.middle)?;
        let [first, second] = resnets;
        let added = config.added.map(|[_, width]| Embedding::load(loader.of("add_embedding"), width, *time));
        Ok(Unet {
            time: Embedding::load(loader.of("time_embedding"), channels[0], *time)?,
            added: added.transpose()?,
            conv_in: Conv::load(loader.of("conv_in"), [config.image[0], channels[0]], config.taps[0])?,
            down,
            middle: [(first, Some(attention)), (second, None)],
            up,
            norm_out: GroupNorm::load(
                loader.of("conv_norm_out"),
                channels[0],
                config.norms.groups,
                config.norms.eps,
                true,
            )?,
            conv_out: Conv::load(loader.of("conv_out"), [channels[0], config.image[1]], config.taps[1])?,
            config,
        })
    }

    /// The embeddings of the times, and of what SDXL adds to them, through silu, `[B,time]`.
    fn embedded(&self, run: &mut Run, times: &[f32], added: Option<[&Tensor; 2]>) -> Result<Tensor, ModelError> {
        let Config { channels, cosines_first, shift, .. } = &self.config;
        let time = sinusoids(run, times, channels[0], *cosines_first, *shift)?;
        let mut time = self.time.forward(run, &time)?;
        if let (Some(embedding), Some([width, _]), Some([text, ids])) = (&self.added, self.config.added, added) {
            let &[batch, count] = ids.shape() else { panic!("it is checked") };
            let mut ids = sinusoids(run, &widened(ids), width, *cosines_first, *shift)?;
            ids.reshape(&[batch, count * width]);
            let added = embedding.forward(run, &joined(text, &ids)?)?;
            let both = [("a", time.view()), ("b", added.view())];
            time = run.op_as(DType::Fp32, "add", &Attributes::new(), &both, time.shape())?;
        }
        run.silu(&time)
    }

    /// `sample[B,C,H,W]`, a time of each image `-> [B,C',H,W]`.
    pub fn forward(
        &self,
        run: &mut Run,
        sample: &Tensor,
        times: &[f32],
        conditions: Conditions,
    ) -> Result<Tensor, ModelError> {
        let told = Told { time: self.embedded(run, times, conditions.added)?, text: run.rounded(conditions.text)? };
        let mut x = self.conv_in.forward(run, sample)?;
        let mut skipped = Vec::new();
        for block in &self.down {
            for layer in &block.layers {
                let next = told.layer(run, layer, &x)?;
                skipped.push(std::mem::replace(&mut x, next));
            }
            if let Some(downsampler) = &block.next {
                let next = downsampler.forward(run, &x)?;
                skipped.push(std::mem::replace(&mut x, next));
            }
        }
        // The lowest is skipped to as well as gone through.
        let mut below = Some(x);
        let mut x = None;
        for layer in &self.middle {
            x = Some(told.layer(run, layer, x.as_ref().or(below.as_ref()).expect("one of them is there"))?);
        }
        let mut x = x.expect("there is a layer in the middle");
        for block in &self.up {
            for layer in &block.layers {
                let beside = below.take().or_else(|| skipped.pop()).expect("as many as there were on the way down");
                x = told.layer(run, layer, &joined(&x, &beside)?)?;
            }
            if let Some(upsample) = &block.next {
                // As large as what comes beside it next.
                let to = size(skipped.last().expect("another block follows"));
                x = upsample.forward(run, &x, to)?;
            }
        }
        let x = self.norm_out.forward(run, &x)?;
        self.conv_out.forward(run, &x)
    }

    /// Channels of what it is given.
    pub fn channels(&self) -> usize {
        self.config.image[0]
    }

    /// Width of the text, where all blocks read the same.
    pub fn text(&self) -> usize {
        self.config.text[0]
    }

    /// Width of the sinusoids of a number, and of all that is embedded beside the time.
    pub fn added(&self) -> Option<[usize; 2]> {
        self.config.added
    }
}
