//! An MLP without a gate: `down(activation(up(x)))`; only what a product reads is rounded.

use super::linear::Linear;
use super::loader::Loader;
use super::{SIZES, WIDTH, is_size};
use crate::ModelError;
use crate::backward::Backward;
use crate::pass::Pass;
use crate::rotary::Rotary;
use crate::state::LayerState;
use samebits_ops::device::Device;
use samebits_ops::{Activation, Attributes, Cpu, DType, Tensor};

/// What an MLP without a gate is made of.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of what goes through the activation.
    pub width: usize,
    /// The activation.
    pub activation: Activation,
    /// Whether its matrices have biases.
    pub bias: bool,
    /// The names of its matrices: up, and down.
    pub names: [&'static str; 2],
}

impl Plan {
    /// What it no longer holds, where it was changed.
    pub(crate) fn check(&self, hidden: usize, _: &[Rotary]) -> Result<(), &'static str> {
        match (self.hidden == hidden, is_size(self.width)) {
            (false, _) => Err(WIDTH),
            (_, false) => Err(SIZES),
            _ => Ok(()),
        }
    }
}

pub(crate) struct UngatedMlp {
    up: Linear,
    down: Linear,
    width: usize,
    activation: Attributes,
}

/// What a reverse pass reads, beside x.
pub(crate) struct Saved {
    up: Tensor,
    activated: Tensor,
}

impl UngatedMlp {
    pub fn load(loader: &mut Loader, plan: &Plan) -> Result<UngatedMlp, ModelError> {
        let &Plan { hidden, width, activation, bias, names: [up, down] } = plan;
        let kind = match activation {
            Activation::Gelu => "gelu",
            Activation::GeluTanh => "gelu_tanh",
            Activation::Relu2 => "relu2",
        };
        let (up, down) = (loader.linear(up, width, hidden, bias)?, loader.linear(down, hidden, width, bias)?);
        Ok(UngatedMlp { up, down, width, activation: Attributes::new().with("kind", kind) })
    }

    pub fn move_to(&mut self, cpu: &Cpu, device: &Device) -> Result<(), ModelError> {
        [&mut self.up, &mut self.down].into_iter().try_for_each(|linear| linear.move_to(cpu, device))
    }

    /// `x[n,hidden] -> y[n,hidden]`
    pub fn forward(
        &self,
        pass: &mut Pass,
        _state: &mut LayerState,
        x: &Tensor,
        y: &mut Tensor,
    ) -> Result<Option<Saved>, ModelError> {
        let shape = [x.shape()[0], self.width];
        let mut up = pass.room("up", DType::Fp32, &shape)?;
        self.up.apply_to(pass, 0, x.view(), up.view_mut())?;
        let mut activated = pass.room("product", pass.dtype, &shape)?;
        pass.op("activate", &self.activation, &[("x", up.view())], [("y", activated.view_mut())])?;
        self.down.apply_to(pass, 0, activated.view(), y.view_mut())?;
        if pass.keeps {
            return Ok(Some(Saved { up, activated }));
        }
        pass.leave([("up", up), ("product", activated)]);
        Ok(None)
    }

    /// From `dy[n,hidden]` in f32: that of x, in f32.
    pub fn backward(&self, back: &mut Backward, x: &Tensor, saved: Saved, dy: &Tensor) -> Result<Tensor, ModelError> {
        let (Saved { up, activated }, mask) = (saved, back.mask);
        let dactivated = self.down.backward(back, 0, activated.view(), dy.view(), mask, DType::Fp32)?;
        let mut dup = back.pass.empty(DType::Fp32, up.shape())?;
        let inputs = [("x", up.view()), ("dy", dactivated.view())];
        back.pass.op("activate_backward", &self.activation, &inputs, [("dx", dup.view_mut())])?;
        self.up.backward(back, 0, x.view(), dup.view(), mask, DType::Fp32)
    }
}
