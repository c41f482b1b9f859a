//! Heads of length 1, `x / sqrt(x x + eps)`: an RMS norm of D elements whose weights are `1 / sqrt(D)`.

use super::arithmetic::by_head;
use crate::ModelError;
use crate::pass::Pass;
use samebits_ops::device::Device;
use samebits_ops::{Attributes, Backend, DType, Tensor};

pub(crate) struct Unit {
    weights: Tensor,
    norm: Attributes,
}

impl Unit {
    /// Of heads of so many elements; `eps` is added to the sum of their squares.
    pub fn new(dim: usize, eps: f64) -> Result<Unit, ModelError> {
        let weights = Tensor::new(vec![(1.0 / (dim as f64).sqrt()) as f32; dim], &[dim])?;
        // The norm adds to the mean.
        Ok(Unit { weights, norm: Attributes::new().with("eps", eps / dim as f64) })
    }

    pub fn move_to(&mut self, device: &Device) -> Result<(), ModelError> {
        self.weights = Backend::upload(device, self.weights.view())?;
        Ok(())
    }

    /// The heads of `x[n,..]` in f32.
    pub fn forward(&self, pass: &mut Pass, x: &Tensor) -> Result<Tensor, ModelError> {
        let (heads, mut y) = (by_head(x, self.weights.shape()[0]), pass.empty(DType::Fp32, x.shape())?);
        let inputs = [("x", x.view_as(&heads)?), ("w", self.weights.view())];
        pass.op("rms_norm", &self.norm, &inputs, [("y", y.view_mut_as(&heads)?)])?;
        Ok(y)
    }

    /// From `dy` of what [`Unit::forward`] made of x: that of x.
    pub fn backward(&self, pass: &mut Pass, x: &Tensor, dy: &Tensor) -> Result<Tensor, ModelError> {
        let (heads, mut dx) = (by_head(x, self.weights.shape()[0]), pass.empty(DType::Fp32, x.shape())?);
        let inputs = [("x", x.view_as(&heads)?), ("w", self.weights.view()), ("dy", dy.view_as(&heads)?)];
        pass.op("rms_norm_backward", &self.norm, &inputs, [("dx", dx.view_mut_as(&heads)?)])?;
        Ok(dx)
    }
}
