//! What RWKV mixes of a token and the one before it: `x + (before - x) * mu`, mu a number for each channel, and products of rows
//! with such numbers.
//!
//! Both are `causal_conv1d`: the difference one of two taps, 1 and -1, which rounds once; the product one of a single tap.

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

/// The difference of each token from the one before it. It keeps the last token of a sequence.
pub(crate) struct TokenShift {
    channels: usize,
    /// `[channels,2]`, 1 and -1.
    taps: Tensor,
}

impl TokenShift {
    pub fn new(channels: usize) -> Result<TokenShift, ModelError> {
        Ok(TokenShift { channels, taps: Tensor::new([1f32, -1.0].repeat(channels), &[channels, 2])? })
    }

    pub fn move_to(&mut self, device: &Device) -> Result<(), ModelError> {
        self.taps = Backend::upload(device, self.taps.view())?;
        Ok(())
    }

    /// `before - x`, of `x[n,channels]` in f32; what it keeps is the first part of the layer's state.
    pub fn forward(&self, pass: &mut Pass, state: &mut LayerState, x: &Tensor) -> Result<Tensor, ModelError> {
        let (channels, mut y) = (self.channels, pass.empty(DType::Fp32, x.shape())?);
        let (op, tokens) = (("causal_conv1d", &Attributes::new()), [("x", x, &[channels][..])]);
        let kept = [Kept { part: 0, names: ["state", "next"], axes: &[1, channels] }];
        recur::forward(pass, state, op, &tokens, &[("w", self.taps.view())], &kept, ("y", &mut y, &[channels]))?;
        Ok(y)
    }

    /// From that of the difference: that of x.
    pub fn backward(&self, back: &mut Backward, dy: &Tensor) -> Result<Tensor, ModelError> {
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

/// `a * b` in f32.
pub(crate) fn mul(pass: &mut Pass, a: &Tensor, b: &Tensor) -> Result<Tensor, ModelError> {
    pair(pass, "mul", [a, b], DType::Fp32)
}

/// `a + b`, of `dtype`.
pub(crate) fn add(pass: &mut Pass, a: &Tensor, b: &Tensor, dtype: DType) -> Result<Tensor, ModelError> {
    pair(pass, "add", [a, b], dtype)
}

/// `a - b` in f32.
pub(crate) fn sub(pass: &mut Pass, a: &Tensor, b: &Tensor) -> Result<Tensor, ModelError> {
    let minus = scaled(pass, b, -1.0)?;
    add(pass, a, &minus, DType::Fp32)
}

/// `x * factor` in f32.
pub(crate) fn scaled(pass: &mut Pass, x: &Tensor, factor: f64) -> Result<Tensor, ModelError> {
    let mut y = pass.empty(DType::Fp32, x.shape())?;
    pass.op("scale", &Attributes::new().with("factor", factor), &[("x", x.view())], [("y", y.view_mut())])?;
    Ok(y)
}

fn pair(pass: &mut Pass, op: &str, [a, b]: [&Tensor; 2], dtype: DType) -> Result<Tensor, ModelError> {
    let mut y = pass.empty(dtype, a.shape())?;
    pass.op(op, &Attributes::new(), &[("a", a.view()), ("b", b.view())], [("y", y.view_mut())])?;
    Ok(y)
}
