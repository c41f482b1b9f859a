//! An MLP: `down(activation(gate(x)) * up(x))`, or without a gate `down(activation(up(x)))`; only what a product reads is
//! rounded.

use super::fits;
use super::linear::{Linear, Source};
use super::loader::Loader;
use super::moe::Stacked;
use super::xielu::{Alpha, xielu};
use crate::ModelError;
use crate::backward::Backward;
use crate::machine::Index;
use crate::pass::Pass;
use crate::rotary::Rotary;
use crate::state::LayerState;
use samebits_ops::device::Device;
use samebits_ops::{Activation as Fixed, Attributes, Clamp, Cpu, DType, Tensor, TensorMut, TensorRef};

/// What an MLP is made of.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of gate and up.
    pub width: usize,
    /// What the gate goes through, or up where there is none.
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
        fits([self.hidden, hidden], self.width)?;
        let has_gate = !matches!(self.names, Names::Ungated(_));
        match has_gate == self.activation.has_gate() && (has_gate || self.gate_factor.is_none()) {
            true => Ok(()),
            false => Err("an MLP has a gate or it has none"),
        }
    }
}

/// Names of the matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Names {
    /// Gate, up and down.
    Each([&'static str; 3]),
    /// Gate and up as one matrix, and down.
    Fused([&'static str; 2]),
    /// Up and down of one without a gate.
    Ungated([&'static str; 2]),
}

impl Names {
    /// What most families call them.
    pub const PLAIN: Names = Names::Each(["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]);
    /// Those of an expert, behind the name of the expert.
    pub const OF_EXPERT: Names = Names::Each(["gate_proj", "up_proj", "down_proj"]);
}

/// Activation of the gate, or of up where there is none.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// `silu_mul`.
    Silu,
    /// `gelu_mul`.
    Gelu,
    /// `clamped_silu_mul`.
    Clamped(Clamp),
    /// `activate`, without a gate.
    Ungated(Fixed),
    /// That of xIELU, whose two alphas are parameters, by the name that its tensors stand under.
    Learned(&'static str),
}

impl Activation {
    /// Whether it multiplies what a gate lets through.
    fn has_gate(self) -> bool {
        !matches!(self, Activation::Ungated(_) | Activation::Learned(_))
    }
}

/// What makes the rows between the matrices.
struct Middle {
    /// The op, its gradient, and their attributes.
    ops: [&'static str; 2],
    attributes: Attributes,
    alphas: Option<[Alpha; 2]>,
}

impl Middle {
    fn load(loader: &mut Loader, activation: Activation) -> Result<Middle, ModelError> {
        let activate = ["activate", "activate_backward"];
        let kind = |name| (activate, Attributes::new().with("kind", name));
        let mut alphas = None;
        let (ops, attributes) = match activation {
            Activation::Silu => (["silu_mul", "silu_mul_backward"], Attributes::new()),
            Activation::Gelu => (["gelu_mul", "gelu_mul_backward"], Attributes::new()),
            Activation::Clamped(Clamp { alpha, limit }) => {
                let numbers = Attributes::new().with("alpha", f64::from(alpha)).with("limit", f64::from(limit));
                (["clamped_silu_mul", "clamped_silu_mul_backward"], numbers)
            }
            Activation::Ungated(Fixed::Gelu) => kind("gelu"),
            Activation::Ungated(Fixed::GeluTanh) => kind("gelu_tanh"),
            Activation::Ungated(Fixed::Relu2) => kind("relu2"),
            Activation::Ungated(Fixed::Xielu(numbers)) => (activate, xielu(numbers)),
            Activation::Learned(name) => {
                let (numbers, both) = Alpha::both(loader, name)?;
                alphas = Some(both);
                (activate, xielu(numbers))
            }
        };
        Ok(Middle { ops, attributes, alphas })
    }
}

/// One MLP, or as many as there are experts.
pub(crate) struct Mlp {
    gate: Option<Linear>,
    up: Linear,
    down: Linear,
    middle: Middle,
    gate_factor: Option<Attributes>,
    width: usize,
}

/// What a reverse pass reads, beside x.
pub(crate) struct Saved {
    gate: Option<Tensor>,
    up: Tensor,
    product: Tensor,
}

/// What the rows between the matrices are made of, as inputs of an op.
fn inputs<'a>(gate: Option<&'a Tensor>, up: &'a Tensor) -> Vec<(&'static str, TensorRef<'a>)> {
    match gate {
        Some(gate) => vec![("gate", gate.view()), ("up", up.view())],
        None => vec![("x", up.view())],
    }
}

impl Mlp {
    pub fn load(loader: &mut Loader, plan: &Plan) -> Result<Mlp, ModelError> {
        Mlp::load_as(loader, "", plan)
    }

    /// The MLP whose matrices have names behind `prefix`.
    pub fn load_as(loader: &mut Loader, prefix: &str, plan: &Plan) -> Result<Mlp, ModelError> {
        let Plan { hidden, width, activation, bias, names, .. } = *plan;
        let mut widen = |name| loader.linear(&format!("{prefix}{name}"), width, hidden, bias);
        let (gate, up, down) = match names {
            Names::Each([gate, up, down]) => (Some(widen(gate)?), widen(up)?, down),
            Names::Fused([both, down]) => {
                let [gate, up] = loader.parts(&format!("{prefix}{both}"), 1, [width, width], hidden, bias)?;
                (Some(gate), up, down)
            }
            Names::Ungated([up, down]) => (None, widen(up)?, down),
        };
        let down = loader.linear(&format!("{prefix}{down}"), hidden, width, bias)?;
        let middle = Middle::load(loader, activation)?;
        Ok(Mlp { gate, up, down, middle, gate_factor: plan.gate_factor(), width })
    }

    /// The MLPs of `count` experts, each with matrices of its own behind `block`, its number and a dot.
    pub fn load_each(loader: &mut Loader, block: &str, count: usize, plan: &Plan) -> Result<Mlp, ModelError> {
        let all = (0..count).map(|e| Mlp::load_as(loader, &format!("{block}.{e}."), plan));
        let all: Vec<Mlp> = all.collect::<Result<_, _>>()?;
        let (mut gates, mut ups, mut downs, mut last) = (Vec::new(), Vec::new(), Vec::new(), None);
        for Mlp { gate, up, down, middle, .. } in all {
            gates.extend(gate);
            ups.push(up);
            downs.push(down);
            last = Some(middle);
        }
        let gate = (!gates.is_empty()).then(|| Linear::stack(gates));
        let middle = last.expect("there is an expert");
        let (up, down) = (Linear::stack(ups), Linear::stack(downs));
        Ok(Mlp { gate, up, down, middle, gate_factor: plan.gate_factor(), width: plan.width })
    }

    /// The MLPs of `count` experts out of two tensors: gate and up of all, or up where there is no gate, and down of all.
    pub fn load_stacked(loader: &mut Loader, stacked: &Stacked, count: usize, plan: &Plan) -> Result<Mlp, ModelError> {
        let Plan { hidden, width, activation, bias, .. } = *plan;
        let Stacked { names, ends, transposed, takes_turns } = *stacked;
        let [wide, down] = names.map(|name| Source { ends, transposed, ..Source::whole(name.into(), 0) });
        let (groups, of_each) = if takes_turns { (width, 1) } else { (1, width) };
        let wide = Source { groups, ..wide };
        let (gate, up) = if activation.has_gate() {
            let both = loader.stacked(&wide, count, [of_each; 2], hidden, bias)?;
            let (gates, ups) = both.into_iter().map(|[gate, up]| (gate, up)).unzip();
            (Some(Linear::stack(gates)), Linear::stack(ups))
        } else {
            let ups = loader.stacked(&wide, count, [of_each], hidden, bias)?;
            (None, Linear::stack(ups.into_iter().flatten().collect()))
        };
        let down = loader.stacked(&down, count, [hidden], width, bias)?;
        let down = Linear::stack(down.into_iter().flatten().collect());
        let middle = Middle::load(loader, activation)?;
        Ok(Mlp { gate, up, down, middle, gate_factor: plan.gate_factor(), width })
    }

    pub fn move_to(&mut self, cpu: &Cpu, device: &Device) -> Result<(), ModelError> {
        let all = self.gate.iter_mut().chain([&mut self.up, &mut self.down]);
        all.into_iter().try_for_each(|linear| linear.move_to(cpu, device))
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

    /// The MLP of `rows` rows: `widen` is the product with `gate` or with `up`, `narrow` that with `down`.
    fn apply_with(
        &self,
        pass: &mut Pass,
        rows: usize,
        widen: impl Fn(&Linear, &mut Pass, &mut Tensor) -> Result<(), ModelError>,
        narrow: impl FnOnce(&mut Pass, &Tensor) -> Result<(), ModelError>,
    ) -> Result<Option<Saved>, ModelError> {
        let shape = [rows, self.width];
        let mut gate = None;
        if let Some(linear) = &self.gate {
            let mut made = pass.room("gate", DType::Fp32, &shape)?;
            widen(linear, pass, &mut made)?;
            if let Some(factor) = &self.gate_factor {
                let mut scaled = pass.room("scaled_gate", DType::Fp32, &shape)?;
                pass.op("scale", factor, &[("x", made.view())], [("y", scaled.view_mut())])?;
                pass.leave([("gate", made)]);
                made = scaled;
            }
            gate = Some(made);
        }
        let mut up = pass.room("up", DType::Fp32, &shape)?;
        widen(&self.up, pass, &mut up)?;
        let mut product = pass.room("product", pass.dtype, &shape)?;
        let Middle { ops: [op, _], attributes, .. } = &self.middle;
        pass.op(op, attributes, &inputs(gate.as_ref(), &up), [("y", product.view_mut())])?;
        narrow(pass, &product)?;
        if pass.keeps {
            return Ok(Some(Saved { gate, up, product }));
        }
        let gate_room = if self.gate_factor.is_some() { "scaled_gate" } else { "gate" };
        if let Some(gate) = gate {
            pass.leave([(gate_room, gate)]);
        }
        pass.leave([("up", up), ("product", product)]);
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
        let mut dup = back.pass.empty(DType::Fp32, up.shape())?;
        let Middle { ops: [_, op], attributes, alphas } = &self.middle;
        let mut inputs = inputs(gate.as_ref(), &up);
        inputs.push(("dy", dproduct.view()));
        let Some(linear) = &self.gate else {
            back.pass.op(op, attributes, &inputs, [("dx", dup.view_mut())])?;
            for alpha in alphas.iter().flatten() {
                alpha.add_gradient(back, &up, &dproduct)?;
            }
            return self.up.backward(back, number, x, dup.view(), mask, DType::Fp32);
        };
        let mut dgate = back.pass.empty(DType::Fp32, up.shape())?;
        back.pass.op(op, attributes, &inputs, [("dgate", dgate.view_mut()), ("dup", dup.view_mut())])?;
        if let Some(factor) = &self.gate_factor {
            dgate = back.pass.scaled(factor, &dgate)?;
        }
        let from_gate = linear.backward(back, number, x, dgate.view(), mask, DType::Fp32)?;
        let from_up = self.up.backward(back, number, x, dup.view(), mask, DType::Fp32)?;
        back.sum(from_gate, from_up)
    }
}
