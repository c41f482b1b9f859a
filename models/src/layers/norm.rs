//! Norms of rows: RMS norm, layer norm.

use super::loader::Loader;
use crate::ModelError;
use crate::backward::Backward;
use crate::pass::Pass;
use crate::sums::Of;
use samebits_ops::device::Device;
use samebits_ops::{Attributes, Backend, DType, Tensor, TensorMut, TensorRef};

/// What norms of a model have in common.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Plan {
    /// Added under the root.
    pub eps: f32,
    /// Whether 1 is added to the weights.
    pub offset: bool,
    /// What is normed.
    pub kind: Kind,
}

/// What a norm makes of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Its root mean square is 1: `rms_norm`.
    Rms,
    /// Its mean is 0 and its variance 1: `layer_norm`, with a bias or without.
    Layer {
        /// Whether there is one.
        bias: bool,
    },
}

impl Plan {
    /// An RMS norm by the weights as they are.
    pub(crate) const fn rms(eps: f32) -> Plan {
        Plan { eps, offset: false, kind: Kind::Rms }
    }

    /// The attributes of an RMS norm.
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
    /// Ones, which no folder has.
    pub fn ones(n: usize) -> Result<Vector, ModelError> {
        Ok(Vector { name: String::new(), w: Tensor::new(vec![1f32; n], &[n])? })
    }

    /// Takes it to a device.
    pub fn move_to(&mut self, device: &Device) -> Result<(), ModelError> {
        self.w = Backend::upload(device, self.w.view())?;
        Ok(())
    }
}

/// The norm of rows.
pub(crate) struct Norm {
    /// Ones without a name where the folder has none.
    weight: Vector,
    kind: Rows,
    of_gradient: Attributes,
}

/// What [`Kind`] needs to run.
enum Rows {
    Rms(Attributes),
    Layer { bias: Option<Vector> },
}

impl Norm {
    /// The norm of rows of `n` elements whose weights are called `part`.
    pub fn load(loader: &mut Loader, part: &str, n: usize, plan: &Plan) -> Result<Norm, ModelError> {
        let mut weight = loader.vector(&format!("{part}.weight"), n)?;
        let kind = match plan.kind {
            Kind::Rms => Rows::Rms(plan.attributes()),
            Kind::Layer { bias } => {
                if plan.offset {
                    // The op takes weights as they are; a sum of 1 has the same gradient.
                    weight
                        .w
                        .as_slice_mut::<f32>()
                        .expect("it is f32, and on the host")
                        .iter_mut()
                        .for_each(|w| *w += 1.0);
                }
                Rows::Layer { bias: bias.then(|| loader.vector(&format!("{part}.bias"), n)).transpose()? }
            }
        };
        Ok(Norm { weight, kind, of_gradient: plan.of_gradient() })
    }

    /// The RMS norm of rows of `n` elements that has no weights.
    pub fn without_weights(n: usize, plan: &Plan) -> Result<Norm, ModelError> {
        Ok(Norm::by(Vector::ones(n)?, plan))
    }

    /// The RMS norm by these weights as they are.
    pub fn by(weight: Vector, plan: &Plan) -> Norm {
        let attributes = plan.of_gradient();
        Norm { weight, kind: Rows::Rms(attributes.clone()), of_gradient: attributes }
    }

    pub fn move_to(&mut self, device: &Device) -> Result<(), ModelError> {
        if let Rows::Layer { bias: Some(bias) } = &mut self.kind {
            bias.move_to(device)?;
        }
        self.weight.move_to(device)
    }

    /// `y = norm(x)`
    pub fn forward(&self, pass: &mut Pass, x: &Tensor, y: &mut Tensor) -> Result<(), ModelError> {
        self.forward_as(pass, x.view(), y.view_mut())
    }

    /// The same of what is seen as rows.
    pub fn forward_as(&self, pass: &mut Pass, x: TensorRef, y: TensorMut) -> Result<(), ModelError> {
        let (x, w, y) = (("x", x), ("w", self.weight.w.view()), [("y", y)]);
        match &self.kind {
            Rows::Rms(attributes) => pass.op("rms_norm", attributes, &[x, w], y),
            Rows::Layer { bias: None } => pass.op("layer_norm", &self.of_gradient, &[x, w], y),
            Rows::Layer { bias: Some(bias) } => {
                pass.op("layer_norm", &self.of_gradient, &[x, w, ("bias", bias.w.view())], y)
            }
        }
    }

    /// `sum = x + residual`, `y = norm(sum)`
    pub fn add_forward(
        &self,
        pass: &mut Pass,
        [x, residual]: [&Tensor; 2],
        sum: &mut Tensor,
        y: &mut Tensor,
    ) -> Result<(), ModelError> {
        let Rows::Rms(attributes) = &self.kind else {
            let inputs = [("a", x.view()), ("b", residual.view())];
            pass.op("add", &Attributes::new(), &inputs, [("y", sum.view_mut())])?;
            return self.forward(pass, sum, y);
        };
        let inputs = [("x", x.view()), ("residual", residual.view()), ("w", self.weight.w.view())];
        pass.op("add_rms_norm", attributes, &inputs, [("sum", sum.view_mut()), ("y", y.view_mut())])
    }

    /// From `dy` of a norm of x: that of x.
    pub fn backward(&self, back: &mut Backward, x: &Tensor, dy: &Tensor) -> Result<Tensor, ModelError> {
        self.backward_of_rows(back, x, dy, 1)
    }

    /// The same where each token has so many rows of x.
    pub fn backward_of_rows(
        &self,
        back: &mut Backward,
        x: &Tensor,
        dy: &Tensor,
        of_token: usize,
    ) -> Result<Tensor, ModelError> {
        let mask = back.mask_of_rows(of_token);
        self.add_gradients(back, x, dy, &mask)?;
        let mut dx = back.pass.empty(DType::Fp32, x.shape())?;
        self.backward_as(back, x.view(), dy.view(), dx.view_mut())?;
        Ok(dx)
    }

    /// From `dy` of a norm of x: that of x alone.
    pub fn backward_as(
        &self,
        back: &mut Backward,
        x: TensorRef,
        dy: TensorRef,
        dx: TensorMut,
    ) -> Result<(), ModelError> {
        let (op, attributes) = match &self.kind {
            Rows::Rms(attributes) => ("rms_norm_backward", attributes),
            Rows::Layer { .. } => ("layer_norm_backward", &self.of_gradient),
        };
        back.pass.op(op, attributes, &[("x", x), ("w", self.weight.w.view()), ("dy", dy)], [("dx", dx)])
    }

    /// From `dy` of a norm of a sum, and `dsum` of the sum itself: that of what was added.
    pub fn add_backward(
        &self,
        back: &mut Backward,
        sum: &Tensor,
        dy: &Tensor,
        dsum: &Tensor,
    ) -> Result<Tensor, ModelError> {
        let Rows::Rms(attributes) = &self.kind else {
            let from_norm = self.backward(back, sum, dy)?;
            return back.sum(&from_norm, dsum);
        };
        self.add_gradients(back, sum, dy, back.mask)?;
        let mut dx = back.pass.empty(DType::Fp32, sum.shape())?;
        let inputs = [("sum", sum.view()), ("w", self.weight.w.view()), ("dy", dy.view()), ("dsum", dsum.view())];
        back.pass.op("add_rms_norm_backward", attributes, &inputs, [("dx", dx.view_mut())])?;
        Ok(dx)
    }

    /// Adds the rows of x to the gradients of the weights and the bias.
    fn add_gradients(&self, back: &mut Backward, x: &Tensor, dy: &Tensor, mask: &[i32]) -> Result<(), ModelError> {
        let (n, of) = (x.shape()[1], |vector: &Vector| Of::whole(&vector.name));
        if self.weight.name.is_empty() {
            return Ok(());
        }
        let op = match &self.kind {
            Rows::Rms(_) => "rms_norm_dw",
            Rows::Layer { bias } => {
                if let Some(bias) = bias {
                    let dy = [("x", dy.view())];
                    back.add_vector(["token_sum", "sum"], &Attributes::new(), (of(bias), None, n), &dy, mask)?;
                }
                "layer_norm_dw"
            }
        };
        let inputs = [("x", x.view()), ("dy", dy.view())];
        back.add_vector([op, "dw"], &self.of_gradient, (of(&self.weight), None, n), &inputs, mask)
    }
}
