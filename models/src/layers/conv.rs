//! A short convolution between two gates: `out(c * conv(b * x))`, where b, c and x are projections of what enters, and conv
//! is causal and of each channel alone. What it keeps of a sequence is the last `taps - 1` of the products `b * x`.
//!
//! All between the first projections and the last is f32, and rounded once where the last reads it.

use super::causal_conv::CausalConv;
use super::linear::Linear;
use super::loader::Loader;
use super::{SIZES, WIDTH, is_size};
use crate::ModelError;
use crate::backward::Backward;
use crate::pass::Pass;
use crate::rotary::Rotary;
use crate::state::{Kind, LayerState};
use samebits_ops::device::Device;
use samebits_ops::{Attributes, Cpu, DType, Tensor};

/// What a short convolution is made of.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Width of the residual stream, and channels.
    pub hidden: usize,
    /// Positions that an output sees: its own and those before.
    pub taps: usize,
    /// Whether the projections and the convolution have biases.
    pub bias: bool,
}

impl Plan {
    /// What it no longer holds, where it was changed.
    pub(crate) fn check(&self, hidden: usize, _: &[Rotary]) -> Result<(), &'static str> {
        match (self.hidden == hidden, is_size(self.taps) && self.hidden.checked_mul(self.taps).is_some_and(is_size)) {
            (false, _) => Err(WIDTH),
            (_, false) => Err(SIZES),
            _ => Ok(()),
        }
    }
}

pub(crate) struct ShortConv {
    b: Linear,
    c: Linear,
    x: Linear,
    conv: CausalConv,
    out: Linear,
}

/// What a reverse pass reads, beside a.
pub(crate) struct Saved {
    b: Tensor,
    c: Tensor,
    x: Tensor,
    /// `b * x`
    product: Tensor,
    conv: Tensor,
    /// `c * conv`, as the last projection reads it.
    gated: Tensor,
}

impl ShortConv {
    pub fn load(loader: &mut Loader, plan: &Plan) -> Result<ShortConv, ModelError> {
        let &Plan { hidden, taps, bias } = plan;
        let [b, c, x] = loader.parts("conv.in_proj", 1, [hidden; 3], hidden, bias)?;
        let conv = CausalConv::load(loader, "conv.conv", [hidden, taps], bias)?;
        let out = loader.linear("conv.out_proj", hidden, hidden, bias)?;
        Ok(ShortConv { b, c, x, conv, out })
    }

    pub fn move_to(&mut self, cpu: &Cpu, device: &Device) -> Result<(), ModelError> {
        [&mut self.b, &mut self.c, &mut self.x, &mut self.out].into_iter().try_for_each(|l| l.move_to(cpu, device))?;
        self.conv.move_to(device)
    }

    pub fn state(&self) -> Kind {
        Kind::Recurrent(vec![self.conv.width()])
    }

    /// `a[n,hidden] -> y[n,hidden]`
    pub fn forward(
        &self,
        pass: &mut Pass,
        state: &mut LayerState,
        a: &Tensor,
        y: &mut Tensor,
    ) -> Result<Option<Saved>, ModelError> {
        let b = self.b.apply(pass, a.view(), DType::Fp32)?;
        let c = self.c.apply(pass, a.view(), DType::Fp32)?;
        let x = self.x.apply(pass, a.view(), DType::Fp32)?;
        let product = mul(pass, &b, &x, DType::Fp32)?;
        let mut conv = self.conv.forward(pass, state, 0, &product)?;
        pass.see("conv", &mut conv)?;
        let gated = mul(pass, &c, &conv, pass.dtype)?;
        self.out.apply_to(pass, 0, gated.view(), y.view_mut())?;
        Ok(pass.keeps.then_some(Saved { b, c, x, product, conv, gated }))
    }

    /// From `dy[n,hidden]` in f32: that of a, in f32.
    pub fn backward(&self, back: &mut Backward, a: &Tensor, saved: Saved, dy: &Tensor) -> Result<Tensor, ModelError> {
        let (Saved { b, c, x, product, conv, gated }, mask, f32) = (saved, back.mask, DType::Fp32);
        let dgated = self.out.backward(back, 0, gated.view(), dy.view(), mask, f32)?;
        let dc = mul(&mut back.pass, &dgated, &conv, f32)?;
        let mut dconv = mul(&mut back.pass, &dgated, &c, f32)?;
        back.see("dconv", &mut dconv)?;
        let dproduct = self.conv.backward(back, &product, &dconv)?;
        let db = mul(&mut back.pass, &dproduct, &x, f32)?;
        let dx = mul(&mut back.pass, &dproduct, &b, f32)?;
        let from_b = self.b.backward(back, 0, a.view(), db.view(), mask, f32)?;
        let from_c = self.c.backward(back, 0, a.view(), dc.view(), mask, f32)?;
        let from_x = self.x.backward(back, 0, a.view(), dx.view(), mask, f32)?;
        let sum = back.sum(from_b, from_c)?;
        back.sum(sum, from_x)
    }
}

/// `a * b`, of `dtype`.
fn mul(pass: &mut Pass, a: &Tensor, b: &Tensor, dtype: DType) -> Result<Tensor, ModelError> {
    let mut y = pass.empty(dtype, a.shape())?;
    pass.op("mul", &Attributes::new(), &[("a", a.view()), ("b", b.view())], [("y", y.view_mut())])?;
    Ok(y)
}
