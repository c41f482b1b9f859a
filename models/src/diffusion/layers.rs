//! Layers that components share. Images are `[B,C,H,W]`, texts and places as rows `[B,T,C]`.

use super::moves::{everywhere, halves, nearest, places_as_rows, rows_as_places};
use super::run::Run;
use crate::ModelError;
use crate::machine::typed;
use crate::weights::Weights;
use samebits_ops::{Attributes, Cpu, DType, PackedWeight, Tensor, TensorRef};

/// Takes the tensors of a component out of its folder, each under the names that stand before its own.
pub(crate) struct Loader<'a, 'w> {
    pub cpu: &'a Cpu,
    pub dtype: DType,
    pub weights: &'a mut Weights<'w>,
    pub prefix: String,
}

impl<'w> Loader<'_, 'w> {
    /// What stands under a part of the names.
    pub fn of(&mut self, part: &str) -> Loader<'_, 'w> {
        let prefix = format!("{}{part}.", self.prefix);
        Loader { cpu: self.cpu, dtype: self.dtype, weights: &mut *self.weights, prefix }
    }

    /// What stands where this stands.
    pub fn of_itself(&mut self) -> Loader<'_, 'w> {
        Loader { cpu: self.cpu, dtype: self.dtype, weights: &mut *self.weights, prefix: self.prefix.clone() }
    }

    /// A parameter.
    pub fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<Tensor, ModelError> {
        self.weights.tensor(&format!("{}{name}", self.prefix), self.dtype, shape)
    }
}

/// All axes but the last as one.
pub(crate) fn rows(shape: &[usize]) -> [usize; 2] {
    let (last, others) = shape.split_last().expect("it has an axis");
    [others.iter().product(), *last]
}

/// Height and width.
pub(crate) fn size(x: &Tensor) -> [usize; 2] {
    let &[_, _, height, width] = x.shape() else { panic!("it is an image") };
    [height, width]
}

/// A convolution of two axes.
pub(crate) struct Conv {
    w: Tensor,
    bias: Option<Tensor>,
    outputs: usize,
    taps: usize,
    stride: usize,
    /// Zeros before an axis and behind it.
    pads: [usize; 2],
    attributes: Attributes,
}

impl Conv {
    /// `taps` by `taps`, from `channels[0]` to `channels[1]`, with as many zeros on all sides as keep the size.
    pub fn load(loader: Loader, channels: [usize; 2], taps: usize) -> Result<Conv, ModelError> {
        Conv::load_strided(loader, channels, taps, 1, [taps / 2; 2])
    }

    pub fn load_strided(
        mut loader: Loader,
        [inputs, outputs]: [usize; 2],
        taps: usize,
        stride: usize,
        pads: [usize; 2],
    ) -> Result<Conv, ModelError> {
        let w = loader.tensor("weight", &[outputs, inputs, taps, taps])?;
        let bias = Some(loader.tensor("bias", &[outputs])?);
        let mut attributes = Attributes::new();
        for name in ["stride_h", "stride_w"] {
            attributes = attributes.with(name, stride);
        }
        for (names, pad) in [["pad_top", "pad_left"], ["pad_bottom", "pad_right"]].iter().zip(pads) {
            attributes = attributes.with(names[0], pad).with(names[1], pad);
        }
        Ok(Conv { w, bias, outputs, taps, stride, pads, attributes })
    }

    pub fn forward(&self, run: &mut Run, x: &Tensor) -> Result<Tensor, ModelError> {
        self.forward_as(run, run.dtype, x)
    }

    pub fn forward_as(&self, run: &mut Run, dtype: DType, x: &Tensor) -> Result<Tensor, ModelError> {
        let &[batch, inputs, height, width] = x.shape() else { panic!("it is an image") };
        let places = |places: usize| (places + self.pads[0] + self.pads[1]).checked_sub(self.taps);
        let (Some(h), Some(w)) = (places(height), places(width)) else {
            let taps = self.taps;
            let why = format!(
                "{height} by {width} places are fewer than the {taps} by {taps} of a window; give a larger image"
            );
            return Err(ModelError::input("sample", why));
        };
        let (h, w) = (h / self.stride + 1, w / self.stride + 1);
        let weight = self.w.view_as(&[self.outputs, inputs, 1, self.taps, self.taps])?;
        let mut tensors = vec![("x", x.view_as(&[batch, inputs, 1, height, width])?), ("w", weight)];
        tensors.extend(self.bias.as_ref().map(|bias| ("bias", bias.view())));
        let mut y = run.op_as(dtype, "conv", &self.attributes, &tensors, &[batch, self.outputs, 1, h, w])?;
        y.reshape(&[batch, self.outputs, h, w]);
        Ok(y)
    }
}

/// A norm of groups of channels, with silu behind it or without.
pub(crate) struct GroupNorm {
    w: Tensor,
    bias: Tensor,
    attributes: Attributes,
}

impl GroupNorm {
    pub fn load(
        mut loader: Loader,
        channels: usize,
        groups: usize,
        eps: f64,
        silu: bool,
    ) -> Result<GroupNorm, ModelError> {
        let (w, bias) = (loader.tensor("weight", &[channels])?, loader.tensor("bias", &[channels])?);
        let attributes = Attributes::new().with("groups", groups).with("eps", eps).with("silu", silu);
        Ok(GroupNorm { w, bias, attributes })
    }

    pub fn forward(&self, run: &mut Run, x: &Tensor) -> Result<Tensor, ModelError> {
        let &[batch, channels, height, width] = x.shape() else { panic!("it is an image") };
        let flat = [batch, channels, height * width];
        let inputs = [("x", x.view_as(&flat)?), ("w", self.w.view()), ("bias", self.bias.view())];
        let mut y = run.op("group_norm", &self.attributes, &inputs, &flat)?;
        y.reshape(x.shape());
        Ok(y)
    }
}

/// A norm of rows.
pub(crate) struct LayerNorm {
    w: Tensor,
    bias: Tensor,
    attributes: Attributes,
}

impl LayerNorm {
    pub fn load(mut loader: Loader, width: usize, eps: f64) -> Result<LayerNorm, ModelError> {
        let (w, bias) = (loader.tensor("weight", &[width])?, loader.tensor("bias", &[width])?);
        Ok(LayerNorm { w, bias, attributes: Attributes::new().with("eps", eps) })
    }

    pub fn forward(&self, run: &mut Run, x: &Tensor) -> Result<Tensor, ModelError> {
        let flat = rows(x.shape());
        let inputs = [("x", x.view_as(&flat)?), ("w", self.w.view()), ("bias", self.bias.view())];
        let mut y = run.op("layer_norm", &self.attributes, &inputs, &flat)?;
        y.reshape(x.shape());
        Ok(y)
    }
}

/// A matrix, and a bias where there is one.
pub(crate) struct Dense {
    w: PackedWeight,
    bias: Option<Tensor>,
    outputs: usize,
}

impl Dense {
    pub fn load(mut loader: Loader, [inputs, outputs]: [usize; 2], bias: bool) -> Result<Dense, ModelError> {
        let w = loader.tensor("weight", &[outputs, inputs])?;
        let bias = bias.then(|| loader.tensor("bias", &[outputs])).transpose()?;
        let &[n, k] = w.shape() else { panic!("it is a matrix") };
        let w = typed!(w.dtype() => A, {
            PackedWeight::pack(loader.cpu, n, k, w.as_slice::<A>().expect("it is on the host, and of this dtype"))?
        });
        Ok(Dense { w, bias, outputs })
    }

    /// `[..,K] -> [..,N]`
    pub fn forward(&self, run: &mut Run, x: &Tensor) -> Result<Tensor, ModelError> {
        self.forward_as(run, run.dtype, x)
    }

    pub fn forward_as(&self, run: &mut Run, dtype: DType, x: &Tensor) -> Result<Tensor, ModelError> {
        let flat = rows(x.shape());
        let mut inputs = vec![("x", x.view_as(&flat)?), ("w", TensorRef::packed(&self.w))];
        inputs.extend(self.bias.as_ref().map(|bias| ("bias", bias.view())));
        let mut y = run.op_as(dtype, "gemm", &Attributes::new(), &inputs, &[flat[0], self.outputs])?;
        let mut shape = x.shape().to_vec();
        *shape.last_mut().expect("it has an axis") = self.outputs;
        y.reshape(&shape);
        Ok(y)
    }
}

/// Attention of rows to rows: to all of them, or with `causal` to those that are not behind.
pub(crate) struct Attention {
    pub q: Dense,
    pub k: Dense,
    pub v: Dense,
    pub out: Dense,
    pub heads: usize,
    pub causal: bool,
}

impl Attention {
    /// As diffusers stores it: `width` of the rows, `context` of those that it looks at.
    pub fn load(mut loader: Loader, width: usize, context: usize, heads: usize) -> Result<Attention, ModelError> {
        Ok(Attention {
            q: Dense::load(loader.of("to_q"), [width, width], false)?,
            k: Dense::load(loader.of("to_k"), [context, width], false)?,
            v: Dense::load(loader.of("to_v"), [context, width], false)?,
            out: Dense::load(loader.of("to_out.0"), [width, width], true)?,
            heads,
            causal: false,
        })
    }

    /// `x[B,T,..], context[B,S,..] -> [B,T,..]` in f32, of which the first `lengths` rows of context are there; all where there are none.
    pub fn forward(
        &self,
        run: &mut Run,
        x: &Tensor,
        context: &Tensor,
        lengths: Option<&[usize]>,
    ) -> Result<Tensor, ModelError> {
        let (&[batch, queries, _], &[_, keys, _]) = (x.shape(), context.shape()) else { panic!("both have rows") };
        let (q, k, v) = (self.q.forward(run, x)?, self.k.forward(run, context)?, self.v.forward(run, context)?);
        let [qk, values] = [self.q.outputs / self.heads, self.v.outputs / self.heads];
        let position = |row: usize| if self.causal { (row % queries) as i32 } else { 0 };
        let positions: Vec<i32> = (0..batch * queries).map(position).collect();
        let lengths: Vec<i32> = (0..batch).map(|b| lengths.map_or(keys, |lengths| lengths[b]) as i32).collect();
        let inputs = [
            ("q", q.view_as(&[batch, queries, self.heads, qk])?),
            ("k", k.view_as(&[batch, keys, self.heads, qk])?),
            ("v", v.view_as(&[batch, keys, self.heads, values])?),
            ("q_pos", TensorRef::new(&positions, &[batch, queries])?),
            ("kv_len", TensorRef::new(&lengths, &[batch])?),
        ];
        let attributes = Attributes::new().with("causal", self.causal);
        let mut heads = run.attend(&attributes, &inputs, [batch, queries, self.heads, values])?;
        heads.reshape(&[batch, queries, self.heads * values]);
        self.out.forward_as(run, DType::Fp32, &heads)
    }
}

/// `norm, conv, + time, norm, conv, + x`: what blocks of images are made of.
pub(crate) struct Resnet {
    norm1: GroupNorm,
    conv1: Conv,
    time: Option<Dense>,
    norm2: GroupNorm,
    conv2: Conv,
    shortcut: Option<Conv>,
}

/// What the norms of a component have in common.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Norms {
    pub groups: usize,
    pub eps: f64,
}

impl Resnet {
    /// `time` is the width of the embedding of times, where it reads one.
    pub fn load(
        mut loader: Loader,
        [inputs, outputs]: [usize; 2],
        time: Option<usize>,
        norms: Norms,
    ) -> Result<Resnet, ModelError> {
        let Norms { groups, eps } = norms;
        let time = time.map(|width| Dense::load(loader.of("time_emb_proj"), [width, outputs], true)).transpose()?;
        let shortcut = inputs != outputs;
        let shortcut = shortcut.then(|| Conv::load(loader.of("conv_shortcut"), [inputs, outputs], 1)).transpose()?;
        Ok(Resnet {
            norm1: GroupNorm::load(loader.of("norm1"), inputs, groups, eps, true)?,
            conv1: Conv::load(loader.of("conv1"), [inputs, outputs], 3)?,
            time,
            norm2: GroupNorm::load(loader.of("norm2"), outputs, groups, eps, true)?,
            conv2: Conv::load(loader.of("conv2"), [outputs; 2], 3)?,
            shortcut,
        })
    }

    /// `time` has gone through silu.
    pub fn forward(&self, run: &mut Run, x: &Tensor, time: Option<&Tensor>) -> Result<Tensor, ModelError> {
        let h = self.norm1.forward(run, x)?;
        let h = match (&self.time, time) {
            (Some(project), Some(time)) => {
                let h = self.conv1.forward_as(run, DType::Fp32, &h)?;
                let time = project.forward_as(run, DType::Fp32, time)?;
                run.join(&everywhere(&time, h.shape())?, &h)?
            }
            _ => self.conv1.forward(run, &h)?,
        };
        let h = self.norm2.forward(run, &h)?;
        let h = self.conv2.forward_as(run, DType::Fp32, &h)?;
        match &self.shortcut {
            None => run.join(x, &h),
            Some(shortcut) => {
                let x = shortcut.forward_as(run, DType::Fp32, x)?;
                run.join(&x, &h)
            }
        }
    }
}

/// Every second place of an image, by a convolution.
pub(crate) fn load_downsampler(mut loader: Loader, channels: usize, padding: usize) -> Result<Conv, ModelError> {
    // What is not padded on all sides is padded behind.
    let pads = if padding == 0 { [0, 1] } else { [padding; 2] };
    Conv::load_strided(loader.of("downsamplers.0.conv"), [channels; 2], 3, 2, pads)
}

/// An image with another size, and a convolution of it.
pub(crate) struct Upsample(Conv);

impl Upsample {
    pub fn load(mut loader: Loader, channels: usize) -> Result<Upsample, ModelError> {
        Ok(Upsample(Conv::load(loader.of("upsamplers.0.conv"), [channels; 2], 3)?))
    }

    pub fn forward(&self, run: &mut Run, x: &Tensor, size: [usize; 2]) -> Result<Tensor, ModelError> {
        self.0.forward(run, &nearest(x, size)?)
    }
}

/// Self-attention between the places of an image, with one head, between a norm and what is added to it.
pub(crate) struct PlaceAttention {
    norm: GroupNorm,
    attention: Attention,
}

impl PlaceAttention {
    pub fn load(mut loader: Loader, channels: usize, norms: Norms) -> Result<PlaceAttention, ModelError> {
        let mut dense = |name: &str| Dense::load(loader.of(name), [channels; 2], true);
        let attention = Attention {
            q: dense("to_q")?,
            k: dense("to_k")?,
            v: dense("to_v")?,
            out: dense("to_out.0")?,
            heads: 1,
            causal: false,
        };
        let norm = GroupNorm::load(loader.of("group_norm"), channels, norms.groups, norms.eps, false)?;
        Ok(PlaceAttention { norm, attention })
    }

    pub fn forward(&self, run: &mut Run, x: &Tensor) -> Result<Tensor, ModelError> {
        let h = places_as_rows(&self.norm.forward(run, x)?)?;
        let h = self.attention.forward(run, &h, &h, None)?;
        run.join(x, &rows_as_places(&h, size(x))?)
    }
}

/// `down(gelu(gate(x)) * up(x))` in f32, where one matrix makes up and gate.
pub(crate) struct GegluMlp {
    both: Dense,
    down: Dense,
}

impl GegluMlp {
    pub fn load(mut loader: Loader, width: usize) -> Result<GegluMlp, ModelError> {
        Ok(GegluMlp {
            both: Dense::load(loader.of("net.0.proj"), [width, 8 * width], true)?,
            down: Dense::load(loader.of("net.2"), [4 * width, width], true)?,
        })
    }

    pub fn forward(&self, run: &mut Run, x: &Tensor) -> Result<Tensor, ModelError> {
        let [up, gate] = halves(&self.both.forward_as(run, DType::Fp32, x)?)?;
        let (kind, shape) = (Attributes::new().with("kind", "gelu"), up.shape());
        let gate = run.op_as(DType::Fp32, "activate", &kind, &[("x", gate.view())], shape)?;
        let product = run.op("mul", &Attributes::new(), &[("a", up.view()), ("b", gate.view())], shape)?;
        self.down.forward_as(run, DType::Fp32, &product)
    }
}
