//! The channel mix of RWKV-7: `value(relu(key(x + (before - x) * mu))^2)`. What it keeps of a sequence is its last token.

use super::fits;
use super::linear::Linear;
use super::loader::Loader;
use super::token_mix::{Mixed, TokenMix};
use crate::ModelError;
use crate::backward::Backward;
use crate::pass::Pass;
use crate::rotary::Rotary;
use crate::state::{Kind, LayerState};
use samebits_ops::device::Device;
use samebits_ops::{Attributes, Cpu, DType, Tensor};

/// What a channel mix is made of.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of what goes through the activation.
    pub width: usize,
}

impl Plan {
    /// What it no longer holds, where it was changed.
    pub(crate) fn check(&self, hidden: usize, _: &[Rotary]) -> Result<(), &'static str> {
        fits([self.hidden, hidden], self.width)
    }
}

pub(crate) struct ChannelMix {
    mix: TokenMix<1>,
    key: Linear,
    value: Linear,
    activation: Attributes,
}

/// What a reverse pass reads, beside a.
pub(crate) struct Saved {
    mixed: Mixed<1>,
    key: Tensor,
    activated: Tensor,
}

impl ChannelMix {
    pub fn load(loader: &mut Loader, plan: &Plan) -> Result<ChannelMix, ModelError> {
        let &Plan { hidden, width } = plan;
        let mix = TokenMix::load(loader, hidden, ["ffn.x_k".into()])?;
        let key = loader.linear("ffn.key", width, hidden, false)?;
        let value = loader.linear("ffn.value", hidden, width, false)?;
        let activation = Attributes::new().with("kind", "relu2");
        Ok(ChannelMix { mix, key, value, activation })
    }

    pub fn move_to(&mut self, cpu: &Cpu, device: &Device) -> Result<(), ModelError> {
        [&mut self.key, &mut self.value].into_iter().try_for_each(|linear| linear.move_to(cpu, device))?;
        self.mix.move_to(device)
    }

    pub fn state(&self) -> Kind {
        Kind::Recurrent(vec![self.mix.width()])
    }

    /// `a[n,hidden] -> y[n,hidden]`
    pub fn forward(
        &self,
        pass: &mut Pass,
        state: &mut LayerState,
        a: &Tensor,
        y: &mut Tensor,
    ) -> Result<Option<Saved>, ModelError> {
        let mixed = self.mix.forward(pass, state, a)?;
        let key = self.key.apply(pass, mixed.mixed[0].view(), DType::Fp32)?;
        let mut activated = pass.empty(pass.dtype, key.shape())?;
        pass.op("activate", &self.activation, &[("x", key.view())], [("y", activated.view_mut())])?;
        self.value.apply_to(pass, 0, activated.view(), y.view_mut())?;
        Ok(pass.keeps.then_some(Saved { mixed, key, activated }))
    }

    /// From `dy[n,hidden]` in f32: that of a, in f32.
    pub fn backward(&self, back: &mut Backward, _: &Tensor, saved: Saved, dy: &Tensor) -> Result<Tensor, ModelError> {
        let (Saved { mixed, key, activated }, mask, f32) = (saved, back.mask, DType::Fp32);
        let dactivated = self.value.backward(back, 0, activated.view(), dy.view(), mask, f32)?;
        let mut dkey = back.pass.empty(f32, key.shape())?;
        let inputs = [("x", key.view()), ("dy", dactivated.view())];
        back.pass.op("activate_backward", &self.activation, &inputs, [("dx", dkey.view_mut())])?;
        let dmixed = self.key.backward(back, 0, mixed.mixed[0].view(), dkey.view(), mask, f32)?;
        self.mix.backward(back, &mixed, [dmixed])
    }
}
