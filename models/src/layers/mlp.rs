//! A gated MLP: `down(activation(gate(x)) * up(x))`; only what a product reads is rounded.

use super::fits;
use super::linear::{Linear, Source};
use super::loader::Loader;
use super::moe::Stacked;
use crate::ModelError;
use crate::backward::Backward;
use crate::machine::Index;
use crate::pass::Pass;
use crate::rotary::Rotary;
use crate::state::LayerState;
use samebits_ops::device::Device;
use samebits_ops::{Attributes, Clamp, Cpu, DType, Tensor, TensorMut, TensorRef};

/// What a gated MLP is made of.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of gate and up.
    pub width: usize,
    /// What the gate goes through.
    pub activation: Activation,
    /// Factor of the gate before its activation.
    pub gate_factor: Option<f64>,
    /// Whether its matrices have biases.
    pub bias: bool,
    /// The names of its matrices.
    pub names: Names,
}

impl Plan {
    /// The attributes of a gate's product with its factor.
    fn gate_factor(&self) -> Option<Attributes> {
        self.gate_factor.map(|factor| Attributes::new().with("factor", factor))
    }

    /// What it no longer holds, where it was changed.
    pub(crate) fn check(&self, hidden: usize, _: &[Rotary]) -> Result<(), &'static str> {
        fits([self.hidden, hidden], self.width)
    }
}

/// Names of the matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Names {
    /// Gate, up and down.
    Each([&'static str; 3]),
    /// Gate and up as one matrix, and down.
    Fused([&'static str; 2]),
}

impl Names {
    /// What most families call them.
    pub const PLAIN: Names = Names::Each(["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]);
    /// Those of an expert, behind the name of the expert.
    pub const OF_EXPERT: Names = Names::Each(["gate_proj", "up_proj", "down_proj"]);
}

/// Activation of the gate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// `silu_mul`.
    Silu,
    /// `gelu_mul`.
    Gelu,
    /// `clamped_silu_mul`.
    Clamped(Clamp),
}

impl Activation {
    /// The op, its gradient, and their attributes.
    fn op(self) -> ([&'static str; 2], Attributes) {
        match self {
            Activation::Silu => (["silu_mul", "silu_mul_backward"], Attributes::new()),
            Activation::Gelu => (["gelu_mul", "gelu_mul_backward"], Attributes::new()),
            Activation::Clamped(Clamp { alpha, limit }) => {
                let numbers = Attributes::new().with("alpha", f64::from(alpha)).with("limit", f64::from(limit));
                (["clamped_silu_mul", "clamped_silu_mul_backward"], numbers)
            }
        }
    }
}

/// One gated MLP, or as many as there are experts.
pub(crate) struct Mlp {
    gate: Linear,
    up: Linear,
    down: Linear,
    activation: Activation,
    gate_factor: Option<Attributes>,
    width: usize,
}

/// What a reverse pass reads, beside x.
pub(crate) struct Saved {
    gate: Tensor,
    up: Tensor,
    product: Tensor,
}

impl Mlp {
    pub fn load(loader: &mut Loader, plan: &Plan) -> Result<Mlp, ModelError> {
        Mlp::load_as(loader, "", plan)
    }

    /// The MLP whose matrices have names behind `prefix`.
    pub fn load_as(loader: &mut Loader, prefix: &str, plan: &Plan) -> Result<Mlp, ModelError> {
        let Plan { hidden, width, activation, bias, names, .. } = *plan;
        let (gate, up, down) = match names {
            Names::Each([gate, up, down]) => {
                let mut widen = |name| loader.linear(&format!("{prefix}{name}"), width, hidden, bias);
                (widen(gate)?, widen(up)?, down)
            }
            Names::Fused([both, down]) => {
                let [gate, up] = loader.parts(&format!("{prefix}{both}"), 1, [width, width], hidden, bias)?;
                (gate, up, down)
            }
        };
        let down = loader.linear(&format!("{prefix}{down}"), hidden, width, bias)?;
        Ok(Mlp { gate, up, down, activation, gate_factor: plan.gate_factor(), width })
    }

    /// The MLPs of `count` experts out of two tensors behind `block`: gate and up of all, and down of all.
    pub fn load_stacked(
        loader: &mut Loader,
        block: &str,
        stacked: &Stacked,
        count: usize,
        plan: &Plan,
    ) -> Result<Vec<Mlp>, ModelError> {
        let Plan { hidden, width, activation, bias, .. } = *plan;
        let Stacked { names, ends, transposed, takes_turns } = *stacked;
        let [both, down] = names.map(|name| Source { ends, transposed, ..Source::whole(format!("{block}.{name}"), 0) });
        let (groups, of_each) = if takes_turns { (width, 1) } else { (1, width) };
        let widened = loader.stacked(&Source { groups, ..both }, count, [of_each; 2], hidden, bias)?;
        let narrowed = loader.stacked(&down, count, [hidden], width, bias)?;
        let made = widened.into_iter().zip(narrowed);
        let of = |([gate, up], [down]): ([Linear; 2], [Linear; 1])| Mlp {
            gate,
            up,
            down,
            activation,
            gate_factor: plan.gate_factor(),
            width,
        };
        Ok(made.map(of).collect())
    }

    /// Those of several experts as one.
    pub fn stack(all: Vec<Mlp>) -> Mlp {
        let (activation, gate_factor, width) = (all[0].activation, all[0].gate_factor.clone(), all[0].width);
        let (mut gate, mut up, mut down) = (Vec::new(), Vec::new(), Vec::new());
        for mlp in all {
            gate.push(mlp.gate);
            up.push(mlp.up);
            down.push(mlp.down);
        }
        let [gate, up, down] = [gate, up, down].map(Linear::stack);
        Mlp { gate, up, down, activation, gate_factor, width }
    }

    pub fn move_to(&mut self, cpu: &Cpu, device: &Device) -> Result<(), ModelError> {
        [&mut self.gate, &mut self.up, &mut self.down].into_iter().try_for_each(|linear| linear.move_to(cpu, device))
    }

    /// `x[n,hidden] -> y[n,hidden]`
    pub fn forward(
        &self,
        pass: &mut Pass,
        _state: &mut LayerState,
        x: &Tensor,
        y: &mut Tensor,
    ) -> Result<Option<Saved>, ModelError> {
        self.apply_to(pass, 0, x.view(), y.view_mut())
    }

    /// From `dy[n,hidden]` in f32: that of x, in f32.
    pub fn backward(&self, back: &mut Backward, x: &Tensor, saved: Saved, dy: &Tensor) -> Result<Tensor, ModelError> {
        self.backward_of(back, 0, x.view(), saved, dy.view(), back.mask)
    }

    /// `x[M,hidden] -> y[M,hidden]` by one of the MLPs.
    pub fn apply_to(
        &self,
        pass: &mut Pass,
        number: usize,
        x: TensorRef,
        y: TensorMut,
    ) -> Result<Option<Saved>, ModelError> {
        self.apply_with(
            pass,
            x.shape()[0],
            |linear, pass, to| linear.apply_to(pass, number, x, to.view_mut()),
            |pass, product| self.down.apply_to(pass, number, product.view(), y),
        )
    }

    /// A row of x for every choice, each `every` times, by the MLP that was chosen: `y[P,hidden]`.
    pub fn apply_chosen(
        &self,
        pass: &mut Pass,
        x: (&Tensor, usize),
        choice: &Index,
        y: &mut Tensor,
    ) -> Result<(), ModelError> {
        self.apply_with(
            pass,
            y.shape()[0],
            |linear, pass, to| linear.apply_chosen(pass, x, choice, to),
            |pass, product| self.down.apply_chosen(pass, (product, 1), choice, y),
        )
        .map(drop)
    }

    /// The gated MLP of `rows` rows: `widen` is the product with `gate` or with `up`, `narrow` that with `down`.
    fn apply_with(
        &self,
        pass: &mut Pass,
        rows: usize,
        widen: impl Fn(&Linear, &mut Pass, &mut Tensor) -> Result<(), ModelError>,
        narrow: impl FnOnce(&mut Pass, &Tensor) -> Result<(), ModelError>,
    ) -> Result<Option<Saved>, ModelError> {
        let shape = [rows, self.width];
        let mut gate = pass.room("gate", DType::Fp32, &shape)?;
        widen(&self.gate, pass, &mut gate)?;
        if let Some(factor) = &self.gate_factor {
            let mut scaled = pass.room("scaled_gate", DType::Fp32, &shape)?;
            pass.op("scale", factor, &[("x", gate.view())], [("y", scaled.view_mut())])?;
            pass.leave([("gate", gate)]);
            gate = scaled;
        }
        let mut up = pass.room("up", DType::Fp32, &shape)?;
        widen(&self.up, pass, &mut up)?;
        let mut product = pass.room("product", pass.dtype, &shape)?;
        let (([op, _], attributes), inputs) = (self.activation.op(), [("gate", gate.view()), ("up", up.view())]);
        pass.op(op, &attributes, &inputs, [("y", product.view_mut())])?;
        narrow(pass, &product)?;
        if pass.keeps {
            return Ok(Some(Saved { gate, up, product }));
        }
        let gate_room = if self.gate_factor.is_some() { "scaled_gate" } else { "gate" };
        pass.leave([(gate_room, gate), ("up", up), ("product", product)]);
        Ok(None)
    }

    /// From `dy[M,hidden]` in f32, of what one of the MLPs made of `x[M,hidden]`: that of x, in f32.
    pub fn backward_of(
        &self,
        back: &mut Backward,
        number: usize,
        x: TensorRef,
        saved: Saved,
        dy: TensorRef,
        mask: &[i32],
    ) -> Result<Tensor, ModelError> {
        let Saved { gate, up, product } = saved;
        let dproduct = self.down.backward(back, number, product.view(), dy, mask, DType::Fp32)?;
        let mut dgate = back.pass.empty(DType::Fp32, gate.shape())?;
        let mut dup = back.pass.empty(DType::Fp32, gate.shape())?;
        let ([_, op], attributes) = self.activation.op();
        let inputs = [("gate", gate.view()), ("up", up.view()), ("dy", dproduct.view())];
        let outputs = [("dgate", dgate.view_mut()), ("dup", dup.view_mut())];
        back.pass.op(op, &attributes, &inputs, outputs)?;
        if let Some(factor) = &self.gate_factor {
            dgate = back.pass.scaled(factor, &dgate)?;
        }
        let from_gate = self.gate.backward(back, number, x, dgate.view(), mask, DType::Fp32)?;
        let from_up = self.up.backward(back, number, x, dup.view(), mask, DType::Fp32)?;
        back.sum(from_gate, from_up)
    }
}
