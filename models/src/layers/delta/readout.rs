//! What is made of what the rule reads: the norm of each head times silu(z) or sigmoid(z), z a projection of what entered.

use super::super::arithmetic::{self, by_head, gated_backward, silu_gated, silu_gated_backward};
use super::super::norm::{self, Vector};
use super::Gate;
use super::projection::{self, Projection};
use crate::ModelError;
use crate::backward::Backward;
use crate::pass::Pass;
use crate::sums::Of;
use samebits_ops::device::Device;
use samebits_ops::{Cpu, DType, Tensor};

pub(super) struct Readout {
    pub z: Projection,
    pub norm: Vector,
    pub plan: norm::Plan,
    pub gate: Gate,
}

/// What a reverse pass reads, and what is made.
pub(super) struct Made {
    z: Tensor,
    of_z: projection::Saved,
    rule: Tensor,
    normed: Tensor,
    /// As the last projection reads it.
    pub gated: Tensor,
}

impl Readout {
    pub fn move_to(&mut self, cpu: &Cpu, device: &Device) -> Result<(), ModelError> {
        self.z.move_to(cpu, device)?;
        self.norm.move_to(device)
    }

    /// From `a[n,hidden]` and what the rule has read, in f32.
    pub fn forward(&self, pass: &mut Pass, a: &Tensor, rule: Tensor) -> Result<Made, ModelError> {
        let (mut z, of_z) = self.z.forward(pass, a)?;
        pass.see("z", &mut z)?;
        let (mut normed, heads) = (pass.empty(DType::Fp32, rule.shape())?, by_head(&rule, self.norm.w.shape()[0]));
        let inputs = [("x", rule.view_as(&heads)?), ("w", self.norm.w.view())];
        pass.op("rms_norm", &self.plan.attributes(), &inputs, [("y", normed.view_mut_as(&heads)?)])?;
        pass.see("normed", &mut normed)?;
        let mut gated = match self.gate {
            Gate::Sigmoid => arithmetic::gated(pass, &z, &normed, pass.dtype)?,
            Gate::Silu => silu_gated(pass, &z, &normed, pass.dtype)?,
        };
        pass.see("gated", &mut gated)?;
        Ok(Made { z, of_z, rule, normed, gated })
    }

    /// From that of what is made: that of a, and that of what the rule has read.
    pub fn backward(
        &self,
        back: &mut Backward,
        a: &Tensor,
        made: &Made,
        dgated: &Tensor,
    ) -> Result<[Tensor; 2], ModelError> {
        let (Made { z, of_z, rule, normed, .. }, f32, dim) = (made, DType::Fp32, self.norm.w.shape()[0]);
        let [dz, dnormed] = match self.gate {
            Gate::Sigmoid => gated_backward(&mut back.pass, z, normed, dgated)?,
            Gate::Silu => silu_gated_backward(&mut back.pass, z, normed, dgated)?,
        };
        let from_z = self.z.backward(back, a, of_z, &dz)?;

        let (heads, mut drule) = (by_head(rule, dim), back.pass.empty(f32, rule.shape())?);
        let (x, dy) = (("x", rule.view_as(&heads)?), ("dy", dnormed.view_as(&heads)?));
        // Each head of a token counts.
        let mask: Vec<i32> = back.mask.iter().flat_map(|&mask| vec![mask; rule.shape()[1] / dim]).collect();
        let of = (Of::whole(&self.norm.name), None, dim);
        back.add_vector(["rms_norm_dw", "dw"], &self.plan.of_gradient(), of, &[x, dy], &mask)?;
        let inputs = [x, ("w", self.norm.w.view()), dy];
        let dx = [("dx", drule.view_mut_as(&heads)?)];
        back.pass.op("rms_norm_backward", &self.plan.attributes(), &inputs, dx)?;
        back.see("drule", &mut drule)?;
        Ok([from_z, drule])
    }
}
