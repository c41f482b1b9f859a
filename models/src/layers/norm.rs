//! RMS norm.

use super::loader::Loader;
use crate::ModelError;
use crate::backward::Backward;
use crate::pass::Pass;
use crate::sums::Of;
use samebits_ops::device::Device;
use samebits_ops::{Attributes, Backend, DType, Tensor};

/// What norms of a model have in common.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Plan {
    /// Added under the root.
    pub eps: f32,
    /// Whether 1 is added to the weights.
    pub offset: bool,
}

impl Plan {
    /// The attributes of a norm.
    pub(crate) fn attributes(&self) -> Attributes {
        self.of_gradient().with("weight_offset", self.offset)
    }

    /// Those of the gradient of its weights, to which an offset is nothing.
    pub(crate) fn of_gradient(&self) -> Attributes {
        Attributes::new().with("eps", f64::from(self.eps))
    }
}

/// A vector of f32, and its name in the folder.
pub(crate) struct Vector {
    pub name: String,
    pub w: Tensor,
}

impl Vector {
    /// Takes it to a device.
    pub fn move_to(&mut self, device: &Device) -> Result<(), ModelError> {
        self.w = Backend::upload(device, self.w.view())?;
        Ok(())
    }
}

/// The norm of rows.
pub(crate) struct Norm {
    weight: Vector,
    attributes: Attributes,
    of_gradient: Attributes,
}

impl Norm {
    /// The norm of rows of `n` elements whose weights are called `part`.
    pub fn load(loader: &mut Loader, part: &str, n: usize, plan: &Plan) -> Result<Norm, ModelError> {
        let weight = loader.vector(&format!("{part}.weight"), n)?;
        Ok(Norm { weight, attributes: plan.attributes(), of_gradient: plan.of_gradient() })
    }

    pub fn move_to(&mut self, device: &Device) -> Result<(), ModelError> {
        self.weight.move_to(device)
    }

    /// `y = norm(x)`
    pub fn forward(&self, pass: &mut Pass, x: &Tensor, y: &mut Tensor) -> Result<(), ModelError> {
        let inputs = [("x", x.view()), ("w", self.weight.w.view())];
        pass.op("rms_norm", &self.attributes, &inputs, [("y", y.view_mut())])
    }

    /// `sum = x + residual`, `y = norm(sum)`
    pub fn add_forward(
        &self,
        pass: &mut Pass,
        [x, residual]: [&Tensor; 2],
        sum: &mut Tensor,
        y: &mut Tensor,
    ) -> Result<(), ModelError> {
        let inputs = [("x", x.view()), ("residual", residual.view()), ("w", self.weight.w.view())];
        pass.op("add_rms_norm", &self.attributes, &inputs, [("sum", sum.view_mut()), ("y", y.view_mut())])
    }

    /// From `dy` of a norm of x: that of x.
    pub fn backward(&self, back: &mut Backward, x: &Tensor, dy: &Tensor) -> Result<Tensor, ModelError> {
        self.add_gradient(back, x, dy)?;
        let mut dx = back.pass.empty(DType::Fp32, x.shape())?;
        let inputs = [("x", x.view()), ("w", self.weight.w.view()), ("dy", dy.view())];
        back.pass.op("rms_norm_backward", &self.attributes, &inputs, [("dx", dx.view_mut())])?;
        Ok(dx)
    }

    /// From `dy` of a norm of a sum, and `dsum` of the sum itself: that of what was added.
    pub fn add_backward(
        &self,
        back: &mut Backward,
        sum: &Tensor,
        dy: &Tensor,
        dsum: &Tensor,
    ) -> Result<Tensor, ModelError> {
        self.add_gradient(back, sum, dy)?;
        let mut dx = back.pass.empty(DType::Fp32, sum.shape())?;
        let inputs = [("sum", sum.view()), ("w", self.weight.w.view()), ("dy", dy.view()), ("dsum", dsum.view())];
        back.pass.op("add_rms_norm_backward", &self.attributes, &inputs, [("dx", dx.view_mut())])?;
        Ok(dx)
    }

    /// Adds the tokens of x to the gradient of the weights.
    fn add_gradient(&self, back: &mut Backward, x: &Tensor, dy: &Tensor) -> Result<(), ModelError> {
        let (inputs, of) = ([("x", x.view()), ("dy", dy.view())], Of::whole(&self.weight.name));
        back.add_vector(["rms_norm_dw", "dw"], &self.of_gradient, (of, None, x.shape()[1]), &inputs, back.mask)
    }
}
