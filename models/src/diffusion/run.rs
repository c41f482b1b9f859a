//! A component's forward on the processor: how its layers call ops.

use crate::ModelError;
use crate::machine::empty;
use samebits_ops::{Attributes, Calls, Cpu, DType, Tensor, TensorRef};

/// One forward of a component.
pub(crate) struct Run<'a> {
    pub cpu: &'a Cpu,
    /// Of what goes from layer to layer and into products. What is added at once is f32, so that a sum is rounded once.
    pub dtype: DType,
    calls: Calls,
}

impl<'a> Run<'a> {
    pub fn new(cpu: &'a Cpu, dtype: DType) -> Run<'a> {
        Run { cpu, dtype, calls: Calls::default() }
    }

    /// The output `y` of an op, of this shape.
    pub fn op(
        &mut self,
        op: &str,
        attributes: &Attributes,
        inputs: &[(&str, TensorRef)],
        shape: &[usize],
    ) -> Result<Tensor, ModelError> {
        self.op_as(self.dtype, op, attributes, inputs, shape)
    }

    /// The same in another dtype.
    pub fn op_as(
        &mut self,
        dtype: DType,
        op: &str,
        attributes: &Attributes,
        inputs: &[(&str, TensorRef)],
        shape: &[usize],
    ) -> Result<Tensor, ModelError> {
        let mut y = self.empty(dtype, shape)?;
        self.calls.run(self.cpu, op, attributes, inputs, vec![("y", y.view_mut())])?;
        Ok(y)
    }

    /// `out` of attention.
    pub fn attend(
        &mut self,
        attributes: &Attributes,
        inputs: &[(&str, TensorRef)],
        [batch, rows, heads, width]: [usize; 4],
    ) -> Result<Tensor, ModelError> {
        let mut out = self.empty(self.dtype, &[batch, rows, heads, width])?;
        let mut lse = self.empty(DType::Fp32, &[batch, rows, heads])?;
        let outputs = vec![("out", out.view_mut()), ("lse", lse.view_mut())];
        self.calls.run(self.cpu, "attention", attributes, inputs, outputs)?;
        Ok(out)
    }

    /// `a + b`
    pub fn add(&mut self, a: &Tensor, b: &Tensor) -> Result<Tensor, ModelError> {
        self.op("add", &Attributes::new(), &[("a", a.view()), ("b", b.view())], a.shape())
    }

    /// `x + h` of a sum h in f32, rounded once.
    pub fn join(&mut self, x: &Tensor, h: &Tensor) -> Result<Tensor, ModelError> {
        if x.dtype() == DType::Fp32 {
            return self.add(x, h);
        }
        let wide = self.op_as(DType::Fp32, "scale", &Attributes::new(), &[("x", x.view())], x.shape())?;
        self.add(&wide, h)
    }

    /// `x * sigmoid(x)`
    pub fn silu(&mut self, x: &Tensor) -> Result<Tensor, ModelError> {
        self.sigmoid_mul(x, x)
    }

    /// `sigmoid(gate) * x`
    pub fn sigmoid_mul(&mut self, gate: &Tensor, x: &Tensor) -> Result<Tensor, ModelError> {
        let rows = super::layers::rows(x.shape());
        let inputs = [("gate", gate.view_as(&rows)?), ("x", x.view_as(&rows)?)];
        let mut y = self.op("sigmoid_mul", &Attributes::new(), &inputs, &rows)?;
        y.reshape(x.shape());
        Ok(y)
    }

    /// x in the dtype of the run, rounded where that is narrower.
    pub fn rounded(&mut self, x: &Tensor) -> Result<Tensor, ModelError> {
        self.op("scale", &Attributes::new(), &[("x", x.view())], x.shape())
    }

    /// A tensor to be written over.
    pub fn empty(&self, dtype: DType, shape: &[usize]) -> Result<Tensor, ModelError> {
        empty(self.cpu, dtype, shape)
    }
}
