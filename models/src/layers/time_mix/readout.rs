//! What a time mix makes of what the recurrence has read: the norm of each head, and to it v times the sum over the head of
//! `r * k * r_k`.

use super::super::arithmetic::{add, by_head, mul};
use super::super::loader::Loader;
use super::super::token_mix::PerChannel;
use super::Plan;
use crate::ModelError;
use crate::backward::Backward;
use crate::pass::Pass;
use samebits_ops::device::Device;
use samebits_ops::{Attributes, Backend, DType, Tensor};

pub(super) struct Readout {
    /// The weights and the bias of the norm, and its attributes.
    weights: PerChannel,
    norm: Attributes,
    r_k: PerChannel,
    /// A matrix of ones, by which a product is the sum of a head in each of its elements.
    sum: Tensor,
}

/// What a reverse pass reads.
pub(super) struct Saved {
    wkv: Tensor,
    normed: Tensor,
    /// `r * k`, and its sums by head.
    product: Tensor,
    sums: Tensor,
}

impl Readout {
    pub fn load(loader: &mut Loader, plan: &Plan) -> Result<Readout, ModelError> {
        let dim = plan.head_dim;
        let (norm, r_k) = (plan.names.of("ln_x"), plan.names.of("r_k"));
        let bias = format!("{norm}.bias");
        Ok(Readout {
            weights: PerChannel::load(loader, &format!("{norm}.weight"), &[plan.hidden], Some(&bias))?,
            norm: Attributes::new().with("eps", f64::from(plan.eps)),
            r_k: PerChannel::load(loader, &r_k, &[plan.heads(), dim], None)?,
            sum: Tensor::new(vec![1f32; dim * dim], &[dim, dim])?,
        })
    }

    pub fn move_to(&mut self, device: &Device) -> Result<(), ModelError> {
        self.sum = Backend::upload(device, self.sum.view())?;
        [&mut self.weights, &mut self.r_k].into_iter().try_for_each(|numbers| numbers.move_to(device))
    }

    /// Each `[n,hidden]` in f32, as what is made.
    pub fn forward(
        &self,
        pass: &mut Pass,
        wkv: Tensor,
        [r, k, v]: [&Tensor; 3],
    ) -> Result<(Tensor, Saved), ModelError> {
        let (f32, heads) = (DType::Fp32, by_head(&wkv, self.sum.shape()[0]));
        let mut normed = pass.empty(f32, wkv.shape())?;
        let inputs = [("x", wkv.view_as(&heads)?)];
        pass.op("layer_norm", &self.norm, &inputs, [("y", normed.view_mut_as(&heads)?)])?;
        let weighted = self.weights.forward(pass, &normed)?;
        let product = mul(pass, r, k, f32)?;
        let weighed = self.r_k.forward(pass, &product)?;
        let mut sums = pass.empty(f32, weighed.shape())?;
        let inputs = [("x", weighed.view_as(&heads)?), ("w", self.sum.view())];
        pass.op("gemm", &Attributes::new(), &inputs, [("y", sums.view_mut_as(&heads)?)])?;
        let bonus = mul(pass, &sums, v, f32)?;
        Ok((add(pass, &weighted, &bonus, f32)?, Saved { wkv, normed, product, sums }))
    }

    /// From that of what is made: those of what the recurrence read, and of r, k and v.
    pub fn backward(
        &self,
        back: &mut Backward,
        (saved, [r, k, v]): (&Saved, [&Tensor; 3]),
        dy: &Tensor,
    ) -> Result<(Tensor, [Tensor; 3]), ModelError> {
        let (f32, heads) = (DType::Fp32, by_head(dy, self.sum.shape()[0]));
        let dsums = mul(&mut back.pass, dy, v, f32)?;
        let dv = mul(&mut back.pass, dy, &saved.sums, f32)?;
        let mut dweighed = back.pass.empty(f32, dsums.shape())?;
        let inputs = [("dy", dsums.view_as(&heads)?), ("w", self.sum.view())];
        back.pass.op("gemm_dx", &Attributes::new(), &inputs, [("dx", dweighed.view_mut_as(&heads)?)])?;
        let dproduct = self.r_k.backward(back, &saved.product, &dweighed)?;
        let dr = mul(&mut back.pass, &dproduct, k, f32)?;
        let dk = mul(&mut back.pass, &dproduct, r, f32)?;
        let dnormed = self.weights.backward(back, &saved.normed, dy)?;
        let mut dwkv = back.pass.empty(f32, dnormed.shape())?;
        let inputs = [("x", saved.wkv.view_as(&heads)?), ("dy", dnormed.view_as(&heads)?)];
        back.pass.op("layer_norm_backward", &self.norm, &inputs, [("dx", dwkv.view_mut_as(&heads)?)])?;
        Ok((dwkv, [dr, dk, dv]))
    }
}
