//! A stream on its way to the rule: a projection, a causal convolution, and the silu of that.

use super::super::arithmetic::{silu, silu_backward};
use super::super::causal_conv::CausalConv;
use super::super::linear::Linear;
use crate::ModelError;
use crate::backward::Backward;
use crate::pass::Pass;
use crate::state::LayerState;
use samebits_ops::device::Device;
use samebits_ops::{Backend, Cpu, DType, Tensor};

pub(super) struct Stream {
    linear: Linear,
    conv: CausalConv,
    /// A row of ones, by which a product with a gate is the gate's silu.
    ones: Tensor,
    /// The number of what it keeps in the layer's state.
    part: usize,
}

/// What a reverse pass reads, and what is made.
pub(super) struct Made {
    /// What the convolution read, and what it made.
    raw: Tensor,
    conv: Tensor,
    pub active: Tensor,
}

/// The sites of what convolutions make, and of their gradients.
const SITES: [[&str; 2]; 3] = [["q_conv", "dq_conv"], ["k_conv", "dk_conv"], ["v_conv", "dv_conv"]];

impl Stream {
    /// Stream number `part`, `width` wide.
    pub fn new(part: usize, width: usize, linear: Linear, conv: CausalConv) -> Result<Stream, ModelError> {
        Ok(Stream { linear, conv, ones: Tensor::new(vec![1f32; width], &[1, width])?, part })
    }

    pub fn move_to(&mut self, cpu: &Cpu, device: &Device) -> Result<(), ModelError> {
        self.linear.move_to(cpu, device)?;
        self.conv.move_to(device)?;
        self.ones = Backend::upload(device, self.ones.view())?;
        Ok(())
    }

    /// How wide the row is that it keeps of a sequence.
    pub fn state_width(&self) -> usize {
        self.conv.width()
    }

    /// From `a[n,hidden]`; what is made is f32.
    pub fn forward(&self, pass: &mut Pass, state: &mut LayerState, a: &Tensor) -> Result<Made, ModelError> {
        let raw = self.linear.apply(pass, a.view(), DType::Fp32)?;
        let mut conv = self.conv.forward(pass, state, self.part, &raw)?;
        pass.see(SITES[self.part][0], &mut conv)?;
        let active = silu(pass, &conv, &self.ones)?;
        Ok(Made { raw, conv, active })
    }

    /// From that of what is made: that of a, in f32.
    pub fn backward(&self, back: &mut Backward, a: &Tensor, made: &Made, dy: &Tensor) -> Result<Tensor, ModelError> {
        let Made { raw, conv, .. } = made;
        let mut dconv = silu_backward(&mut back.pass, conv, &self.ones, dy)?;
        back.see(SITES[self.part][1], &mut dconv)?;
        let draw = self.conv.backward(back, raw, &dconv)?;
        self.linear.backward(back, 0, a.view(), draw.view(), back.mask, DType::Fp32)
    }
}
