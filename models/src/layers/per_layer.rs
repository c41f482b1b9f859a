//! What a block reads of its tokens beside the residual stream, as Gemma 3n and 4 have it: `project(gelu(gate(x)) * input)`. The
//! inputs of all blocks are made of the tokens before the first one ([`inputs`]).

pub(crate) mod inputs;

use super::fits;
use super::linear::Linear;
use super::loader::Loader;
use crate::ModelError;
use crate::backward::Backward;
use crate::pass::Pass;
use crate::rotary::Rotary;
use crate::state::LayerState;
use samebits_ops::device::{Device, Part};
use samebits_ops::{Attributes, Cpu, DType, Tensor};

/// What the branch of a block with an input of its own is made of.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Elements of its input.
    pub width: usize,
    /// The first of them in those of all blocks.
    pub first: usize,
    /// Elements of the inputs of all blocks.
    pub all: usize,
    /// The names of its matrices: the gate, and the projection back.
    pub names: [&'static str; 2],
}

impl Plan {
    /// What it no longer holds, where it was changed.
    pub(crate) fn check(&self, hidden: usize, _: &[Rotary]) -> Result<(), &'static str> {
        fits([self.hidden, hidden], self.width)?;
        match self.first.checked_add(self.width).is_some_and(|end| end <= self.all) {
            true => Ok(()),
            false => Err("the input of a block is among those of all blocks"),
        }
    }
}

pub(crate) struct PerLayerInput {
    gate: Linear,
    projection: Linear,
    plan: Plan,
}

/// What a reverse pass reads, beside a.
pub(crate) struct Saved {
    gate: Tensor,
    input: Tensor,
    product: Tensor,
}

impl PerLayerInput {
    pub fn load(loader: &mut Loader, plan: &Plan) -> Result<PerLayerInput, ModelError> {
        let &Plan { hidden, width, names: [gate, projection], .. } = plan;
        let (gate, projection) =
            (loader.linear(gate, width, hidden, false)?, loader.linear(projection, hidden, width, false)?);
        Ok(PerLayerInput { gate, projection, plan: plan.clone() })
    }

    pub fn move_to(&mut self, cpu: &Cpu, device: &Device) -> Result<(), ModelError> {
        self.gate.move_to(cpu, device)?;
        self.projection.move_to(cpu, device)
    }

    /// Its columns of the inputs of all blocks.
    fn columns(&self) -> Part<'static, crate::machine::Index> {
        Part { offset: self.plan.first, stride: self.plan.all, ..Part::whole(self.plan.width) }
    }

    /// `a[n,hidden] -> y[n,hidden]`
    pub fn forward(
        &self,
        pass: &mut Pass,
        _state: &mut LayerState,
        a: &Tensor,
        y: &mut Tensor,
    ) -> Result<Option<Saved>, ModelError> {
        let size = [a.shape()[0], self.plan.width];
        let mut gate = self.gate.apply(pass, a.view(), DType::Fp32)?;
        pass.see("per_layer_gate", &mut gate)?;
        let mut input = pass.empty(DType::Fp32, &size)?;
        let all = pass.carried.take().expect("a config whose blocks have inputs makes them");
        pass.machine.copy_rows(size, (&all, self.columns()), (&mut input, Part::whole(size[1])))?;
        pass.carried = Some(all);
        let mut product = pass.empty(pass.dtype, &size)?;
        let inputs = [("gate", gate.view()), ("up", input.view())];
        pass.op("gelu_mul", &Attributes::new(), &inputs, [("y", product.view_mut())])?;
        self.projection.apply_to(pass, 0, product.view(), y.view_mut())?;
        Ok(pass.keeps.then_some(Saved { gate, input, product }))
    }

    /// From `dy[n,hidden]` in f32: that of a, in f32. That of its input is left for what made the inputs.
    pub fn backward(&self, back: &mut Backward, a: &Tensor, saved: Saved, dy: &Tensor) -> Result<Tensor, ModelError> {
        let (Saved { gate, input, product }, mask, f32) = (saved, back.mask, DType::Fp32);
        let size = [a.shape()[0], self.plan.width];
        let dproduct = self.projection.backward(back, 0, product.view(), dy.view(), mask, f32)?;
        let (mut dgate, mut dinput) = (back.pass.empty(f32, &size)?, back.pass.empty(f32, &size)?);
        let inputs = [("gate", gate.view()), ("up", input.view()), ("dy", dproduct.view())];
        let outputs = [("dgate", dgate.view_mut()), ("dup", dinput.view_mut())];
        back.pass.op("gelu_mul_backward", &Attributes::new(), &inputs, outputs)?;
        back.see("dper_layer_gate", &mut dgate)?;
        let mut all = match back.carried.take() {
            Some(all) => all,
            None => back.pass.empty(f32, &[size[0], self.plan.all])?,
        };
        back.pass.machine.copy_rows(size, (&dinput, Part::whole(size[1])), (&mut all, self.columns()))?;
        back.carried = Some(all);
        self.gate.backward(back, 0, a.view(), dgate.view(), mask, f32)
    }
}
