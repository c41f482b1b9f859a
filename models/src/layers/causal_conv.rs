//! A causal convolution of channels by themselves, as layers that recur have: its weights, and the rows that it keeps of a
//! sequence. All is f32.

use super::linear::Source;
use super::loader::Loader;
use super::norm::Vector;
use super::recur::{self, Kept};
use crate::ModelError;
use crate::backward::{Backward, Block};
use crate::pass::Pass;
use crate::state::LayerState;
use crate::sums::Of;
use samebits_ops::device::Device;
use samebits_ops::{Attributes, CHAINS, DType, Tensor, TensorRef};

pub(crate) struct CausalConv {
    channels: usize,
    taps: usize,
    /// `[channels,1,taps]`
    w: Vector,
    /// Which elements of the parameter they are, where they are not all.
    part: Option<Source>,
    bias: Option<Vector>,
}

impl CausalConv {
    /// The one called `name`, without `.weight`.
    pub fn load(
        loader: &mut Loader,
        name: &str,
        [channels, taps]: [usize; 2],
        bias: bool,
    ) -> Result<CausalConv, ModelError> {
        let w = loader.tensor(&format!("{name}.weight"), &[channels, 1, taps])?;
        let bias = bias.then(|| loader.vector(&format!("{name}.bias"), channels)).transpose()?;
        Ok(CausalConv { channels, taps, w, part: None, bias })
    }

    /// The one called `name`, cut in parts of so many channels: a convolution each.
    pub fn parts<const N: usize>(
        loader: &mut Loader,
        name: &str,
        widths: [usize; N],
        taps: usize,
    ) -> Result<[CausalConv; N], ModelError> {
        let all = widths.iter().sum::<usize>();
        let Vector { name, w } = loader.tensor(&format!("{name}.weight"), &[all, 1, taps])?;
        let (w, mut start) = (w.as_slice::<f32>().expect("it is f32, and on the host"), 0);
        let parts = widths.map(|channels| {
            let width = channels * taps;
            // A list has no elements.
            let own = w.get(start..start + width).unwrap_or_default().to_vec();
            let there = own.len() / taps;
            let whole = Source::whole(name.trim_end_matches(".weight").into(), all * taps);
            let source = Source { start, width, ..whole };
            start += width;
            let w = Vector { name: name.clone(), w: Tensor::new(own, &[there, 1, taps])? };
            Ok(CausalConv { channels, taps, w, part: Some(source), bias: None })
        });
        let parts = parts.into_iter().collect::<Result<Vec<_>, ModelError>>()?;
        Ok(parts.try_into().ok().expect("one for each width"))
    }

    pub fn move_to(&mut self, device: &Device) -> Result<(), ModelError> {
        [Some(&mut self.w), self.bias.as_mut()].into_iter().flatten().try_for_each(|vector| vector.move_to(device))
    }

    /// How wide the row is that it keeps of a sequence.
    pub fn width(&self) -> usize {
        (self.taps - 1) * self.channels
    }

    /// `x[n,channels]` convolved; what it keeps is part number `part` of the layer's state.
    pub fn forward(
        &self,
        pass: &mut Pass,
        state: &mut LayerState,
        part: usize,
        x: &Tensor,
    ) -> Result<Tensor, ModelError> {
        let &CausalConv { channels, taps, .. } = self;
        let mut weights = vec![("w", self.w.w.view_as(&[channels, taps])?)];
        weights.extend(self.bias.as_ref().map(|bias| ("bias", bias.w.view())));
        let mut y = pass.empty(DType::Fp32, x.shape())?;
        let (op, tokens) = (("causal_conv1d", &Attributes::new()), [("x", x, &[channels][..])]);
        let kept = [Kept { part, names: ["state", "next"], axes: &[taps - 1, channels] }];
        recur::forward(pass, state, op, &tokens, &weights, &kept, ("y", &mut y, &[channels]))?;
        Ok(y)
    }

    /// From `dy[n,channels]`: that of x; those of the weights are added up.
    pub fn backward(&self, back: &mut Backward, x: &Tensor, dy: &Tensor) -> Result<Tensor, ModelError> {
        let (channels, none, mask) = (self.channels, Attributes::new(), back.mask);
        if let Some(bias) = &self.bias {
            let of = (Of::whole(&bias.name), None, channels);
            back.add_vector(["token_sum", "sum"], &none, of, &[("x", dy.view())], mask)?;
        }
        let tokens = [("x", x, &[channels][..]), ("dy", dy, &[channels])];
        let mut made =
            recur::backward(back, &tokens, &[channels], |back, block, given| self.of_block(back, block, given))?;
        Ok(made.pop().expect("one was asked for"))
    }

    /// Of the sequences of a block: the gradient of what the convolution read; that of its weights is added up.
    fn of_block(
        &self,
        back: &mut Backward,
        block: &Block,
        inputs: Vec<(&str, TensorRef)>,
    ) -> Result<Vec<Tensor>, ModelError> {
        let &CausalConv { channels, taps, .. } = self;
        let (batch, rows, mask, none) = (block.lengths.len(), block.rows, block.mask(), Attributes::new());
        let (w, shape) = (("w", self.w.w.view_as(&[channels, taps])?), [CHAINS, channels, taps]);
        let Backward { pass, sums, cpu, .. } = back;
        let part = self.part.as_ref();
        let of = part.map_or_else(|| Of::whole(&self.w.name), Of::matrix);
        sums.vector(cpu, of, part, channels * taps, &mask, |carry, before, next| {
            let attributes = none.clone().with("token_offset", before);
            let carry = TensorRef::new(carry.contiguous::<f32>().expect("it is one piece on the host"), &shape)?;
            let tokens = [("mask", TensorRef::new(&mask, &[batch, rows])?), ("carry", carry)];
            let inputs = [&inputs[..], &tokens].concat();
            pass.op("causal_conv1d_dw", &attributes, &inputs, [("dw", next.view_mut_as(&shape)?)])
        })?;
        let lengths = block.lengths_i32();
        let mut dx = pass.empty(DType::Fp32, &[batch, rows, channels])?;
        let mut dstate = pass.empty(DType::Fp32, &[batch, taps - 1, channels])?;
        let given = [inputs[1], w, ("len", TensorRef::new(&lengths, &[batch])?)];
        let outputs = [("dx", dx.view_mut()), ("dstate", dstate.view_mut())];
        pass.op("causal_conv1d_backward", &none, &given, outputs)?;
        Ok(vec![dx])
    }
}
