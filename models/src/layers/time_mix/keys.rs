//! What the recurrence reads of k: k scaled, `k + (k * i - k) * k_a`; minus its direction, which is `k * k_k` of length 1 in
//! each head; and the part of the direction that i is.

use super::super::arithmetic::{add, gated, gated_backward, scaled, sub};
use super::super::loader::Loader;
use super::super::token_mix::PerChannel;
use super::super::unit::Unit;
use super::Plan;
use crate::ModelError;
use crate::backward::Backward;
use crate::pass::Pass;
use samebits_ops::device::Device;
use samebits_ops::{DType, Tensor};

pub(super) struct Keys {
    k_k: PerChannel,
    k_a: PerChannel,
    /// Makes directions of length 1.
    unit: Unit,
}

/// What is made, each `[n,hidden]` in f32.
pub(super) struct Made {
    pub scaled: Tensor,
    pub minus: Tensor,
    pub part: Tensor,
    /// Of the direction: before it is of length 1, and behind.
    long: Tensor,
    unit: Tensor,
    /// What `k_a` takes a part of.
    change: Tensor,
}

impl Keys {
    pub fn load(loader: &mut Loader, plan: &Plan) -> Result<Keys, ModelError> {
        let mut numbers = |name| PerChannel::load(loader, &plan.names.of(name), &[plan.hidden], None);
        Ok(Keys { k_k: numbers("k_k")?, k_a: numbers("k_a")?, unit: Unit::new(plan.head_dim, plan.direction_eps)? })
    }

    pub fn move_to(&mut self, device: &Device) -> Result<(), ModelError> {
        self.unit.move_to(device)?;
        [&mut self.k_k, &mut self.k_a].into_iter().try_for_each(|numbers| numbers.move_to(device))
    }

    /// From `k[n,hidden]`, and what the sigmoid of i reads.
    pub fn forward(&self, pass: &mut Pass, k: &Tensor, of_i: &Tensor) -> Result<Made, ModelError> {
        let f32 = DType::Fp32;
        let long = self.k_k.forward(pass, k)?;
        let unit = self.unit.forward(pass, &long)?;
        let minus = scaled(pass, &unit, -1.0)?;
        let part = gated(pass, of_i, &unit, f32)?;
        let taken = gated(pass, of_i, k, f32)?;
        let change = sub(pass, &taken, k)?;
        let changed = self.k_a.forward(pass, &change)?;
        let scaled = add(pass, k, &changed, f32)?;
        Ok(Made { scaled, minus, part, long, unit, change })
    }

    /// From those of the three: those of k and of what the sigmoid of i reads.
    pub fn backward(
        &self,
        back: &mut Backward,
        (k, of_i, made): (&Tensor, &Tensor, &Made),
        [dscaled, dminus, dpart]: [&Tensor; 3],
    ) -> Result<[Tensor; 2], ModelError> {
        let dchange = self.k_a.backward(back, &made.change, dscaled)?;
        let [dtaken_i, dtaken] = gated_backward(&mut back.pass, of_i, k, &dchange)?;
        let own = sub(&mut back.pass, dscaled, &dchange)?;
        let [dpart_i, dunit] = gated_backward(&mut back.pass, of_i, &made.unit, dpart)?;
        let dunit = sub(&mut back.pass, &dunit, dminus)?;
        let dlong = self.unit.backward(&mut back.pass, &made.long, &dunit)?;
        let of_direction = self.k_k.backward(back, k, &dlong)?;
        let dk = back.sum(own, dtaken)?;
        Ok([back.sum(dk, of_direction)?, back.sum(dtaken_i, dpart_i)?])
    }
}
