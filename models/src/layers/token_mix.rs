//! What RWKV mixes of a token and the one before it: `x + (before - x) * mu`, mu a number for each channel, and products of rows
//! with such numbers.
//!
//! Both are `causal_conv1d`: the difference one of two taps, 1 and -1, which rounds once; the product one of a single tap.

use super::arithmetic::{add, scaled};
use super::loader::Loader;
use super::norm::Vector;
use super::recur::{self, Kept};
use crate::ModelError;
use crate::backward::Backward;
use crate::pass::Pass;
use crate::state::LayerState;
use crate::sums::Of;
use samebits_ops::device::Device;
use samebits_ops::{Attributes, Backend, CHAINS, DType, Tensor, TensorRef};

/// What some projections read of a token and the one before it, each by numbers of its own. It keeps the last token of a
/// sequence, as the first part of its layer's state.
pub(crate) struct TokenMix<const N: usize> {
    channels: usize,
    /// `[channels,2]`, 1 and -1.
    taps: Tensor,
    mu: [PerChannel; N],
}

/// What each projection reads, and the difference that it has a part of.
pub(crate) struct Mixed<const N: usize> {
    pub mixed: [Tensor; N],
    difference: Tensor,
}

impl<const N: usize> TokenMix<N> {
    /// By the numbers of these names.
    pub fn load(loader: &mut Loader, channels: usize, names: [String; N]) -> Result<TokenMix<N>, ModelError> {
        let taps = Tensor::new([1f32, -1.0].repeat(channels), &[channels, 2])?;
        let mu = names.into_iter().map(|name| PerChannel::load(loader, &name, &[channels], None));
        let mu = mu.collect::<Result<Vec<_>, _>>()?;
        Ok(TokenMix { channels, taps, mu: mu.try_into().ok().expect("one for each name") })
    }

    pub fn move_to(&mut self, device: &Device) -> Result<(), ModelError> {
        self.taps = Backend::upload(device, self.taps.view())?;
        self.mu.iter_mut().try_for_each(|mu| mu.move_to(device))
    }

    /// Elements that it keeps of a sequence.
    pub fn width(&self) -> usize {
        self.channels
    }

    /// Of `a[n,channels]`, as products read it.
    pub fn forward(&self, pass: &mut Pass, state: &mut LayerState, a: &Tensor) -> Result<Mixed<N>, ModelError> {
        let channels = self.channels;
        let (wide, mut difference) = (scaled(pass, a, 1.0)?, pass.empty(DType::Fp32, a.shape())?);
        let (op, tokens) = (("causal_conv1d", &Attributes::new()), [("x", &wide, &[channels][..])]);
        let kept = [Kept { part: 0, names: ["state", "next"], axes: &[1, channels] }];
        let output = ("y", &mut difference, &[channels][..]);
        recur::forward(pass, state, op, &tokens, &[("w", self.taps.view())], &kept, output)?;
        let mut mixed = Vec::new();
        for mu in &self.mu {
            let part = mu.forward(pass, &difference)?;
            mixed.push(add(pass, &wide, &part, pass.dtype)?);
        }
        Ok(Mixed { mixed: mixed.try_into().ok().expect("one for each"), difference })
    }

    /// From those of what the projections read, in f32: that of a.
    pub fn backward(&self, back: &mut Backward, saved: &Mixed<N>, dmixed: [Tensor; N]) -> Result<Tensor, ModelError> {
        let mut sums: Option<(Tensor, Tensor)> = None;
        for (mu, dmixed) in self.mu.iter().zip(dmixed) {
            let part = mu.backward(back, &saved.difference, &dmixed)?;
            sums = Some(match sums {
                None => (dmixed, part),
                Some((da, ddifference)) => (back.sum(da, dmixed)?, back.sum(ddifference, part)?),
            });
        }
        let (da, ddifference) = sums.expect("something reads it");
        let shifted = self.shift_backward(back, &ddifference)?;
        back.sum(da, shifted)
    }

    /// From that of the difference: that of a.
    fn shift_backward(&self, back: &mut Backward, dy: &Tensor) -> Result<Tensor, ModelError> {
        let tokens = [("dy", dy, &[self.channels][..])];
        let mut made = recur::backward(back, &tokens, &[self.channels], |back, block, given| {
            let (batch, lengths) = (block.lengths.len(), block.lengths_i32());
            let mut dx = back.pass.empty(DType::Fp32, &[batch, block.rows, self.channels])?;
            let mut dstate = back.pass.empty(DType::Fp32, &[batch, 1, self.channels])?;
            let inputs = [given[0], ("w", self.taps.view()), ("len", TensorRef::new(&lengths, &[batch])?)];
            let outputs = [("dx", dx.view_mut()), ("dstate", dstate.view_mut())];
            back.pass.op("causal_conv1d_backward", &Attributes::new(), &inputs, outputs)?;
            Ok(vec![dx])
        })?;
        Ok(made.pop().expect("one was asked for"))
    }
}

/// Rows times a number for each channel, plus another where there is a bias.
pub(crate) struct PerChannel {
    channels: usize,
    w: Vector,
    bias: Option<Vector>,
}

impl PerChannel {
    /// The numbers called `name`, of this shape; those that are added are called `bias`.
    pub fn load(
        loader: &mut Loader,
        name: &str,
        shape: &[usize],
        bias: Option<&str>,
    ) -> Result<PerChannel, ModelError> {
        let (channels, w) = (shape.iter().product(), loader.tensor(name, shape)?);
        let bias = bias.map(|name| loader.vector(name, channels)).transpose()?;
        Ok(PerChannel { channels, w, bias })
    }

    pub fn move_to(&mut self, device: &Device) -> Result<(), ModelError> {
        [Some(&mut self.w), self.bias.as_mut()].into_iter().flatten().try_for_each(|vector| vector.move_to(device))
    }

    /// The numbers as taps.
    fn taps(&self) -> Result<TensorRef<'_>, ModelError> {
        Ok(self.w.w.view_as(&[self.channels, 1])?)
    }

    /// `x[n,channels] * w` in f32.
    pub fn forward(&self, pass: &mut Pass, x: &Tensor) -> Result<Tensor, ModelError> {
        let (n, channels) = (x.shape()[0], self.channels);
        let (mut y, mut next) = (pass.empty(DType::Fp32, x.shape())?, pass.empty(DType::Fp32, &[1, 0, channels])?);
        let mut inputs = vec![("x", x.view_as(&[1, n, channels])?), ("w", self.taps()?)];
        inputs.extend(self.bias.as_ref().map(|bias| ("bias", bias.w.view())));
        let outputs = [("y", y.view_mut_as(&[1, n, channels])?), ("next", next.view_mut())];
        pass.op("causal_conv1d", &Attributes::new(), &inputs, outputs)?;
        Ok(y)
    }

    /// From `dy[n,channels]`: that of x; those of the numbers are added up.
    pub fn backward(&self, back: &mut Backward, x: &Tensor, dy: &Tensor) -> Result<Tensor, ModelError> {
        let (n, channels, mask, none) = (x.shape()[0], self.channels, back.mask, Attributes::new());
        if let Some(bias) = &self.bias {
            let of = (Of::whole(&bias.name), None, channels);
            back.add_vector(["token_sum", "sum"], &none, of, &[("x", dy.view())], mask)?;
        }
        let (of_rows, of_sums) = ([1, n, channels], [CHAINS, channels, 1]);
        let Backward { pass, sums, cpu, .. } = back;
        sums.vector(cpu, Of::whole(&self.w.name), None, channels, mask, |carry, before, next| {
            let attributes = none.clone().with("token_offset", before);
            let carry = TensorRef::new(carry.contiguous::<f32>().expect("it is one piece on the host"), &of_sums)?;
            let tokens = [("mask", TensorRef::new(mask, &[1, n])?), ("carry", carry)];
            let inputs = [[("x", x.view_as(&of_rows)?), ("dy", dy.view_as(&of_rows)?)], tokens].concat();
            pass.op("causal_conv1d_dw", &attributes, &inputs, [("dw", next.view_mut_as(&of_sums)?)])
        })?;
        let mut dx = pass.empty(DType::Fp32, x.shape())?;
        let mut dstate = pass.empty(DType::Fp32, &[1, 0, channels])?;
        let inputs = [("dy", dy.view_as(&of_rows)?), ("w", self.taps()?)];
        let outputs = [("dx", dx.view_mut_as(&of_rows)?), ("dstate", dstate.view_mut())];
        pass.op("causal_conv1d_backward", &none, &inputs, outputs)?;
        Ok(dx)
    }
}
