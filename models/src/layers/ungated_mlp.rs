//! An MLP without a gate: `down(activation(up(x)))`; only what a product reads is rounded.

use super::fits;
use super::linear::Linear;
use super::loader::Loader;
use super::norm::Vector;
use crate::ModelError;
use crate::backward::Backward;
use crate::pass::Pass;
use crate::rotary::Rotary;
use crate::state::LayerState;
use crate::sums::Of;
use samebits_ops::device::Device;
use samebits_ops::{Activation, Attributes, Cpu, DType, Tensor, TensorRef, Xielu};

/// What an MLP without a gate is made of.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of what goes through the activation.
    pub width: usize,
    /// The activation.
    pub activation: Curve,
    /// Whether its matrices have biases.
    pub bias: bool,
    /// The names of its matrices: up, and down.
    pub names: [&'static str; 2],
}

/// What the rows between the matrices go through.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Curve {
    /// An activation without parameters.
    Fixed(Activation),
    /// xIELU, whose two alphas are parameters, by the name that its tensors stand under.
    Learned(&'static str),
}

impl Plan {
    /// What it no longer holds, where it was changed.
    pub(crate) fn check(&self, hidden: usize, _: &[Rotary]) -> Result<(), &'static str> {
        fits([self.hidden, hidden], self.width)
    }
}

pub(crate) struct UngatedMlp {
    up: Linear,
    down: Linear,
    width: usize,
    activation: Attributes,
    alphas: Option<[Alpha; 2]>,
}

/// A parameter that an alpha of xIELU is made of.
struct Alpha {
    name: String,
    /// The slope of the alpha in the parameter.
    slope: f32,
    /// By which `activate` gives what the alpha is multiplied with.
    part: Attributes,
}

/// What a reverse pass reads, beside x.
pub(crate) struct Saved {
    up: Tensor,
    activated: Tensor,
}

impl UngatedMlp {
    pub fn load(loader: &mut Loader, plan: &Plan) -> Result<UngatedMlp, ModelError> {
        let &Plan { hidden, width, activation, bias, names: [up, down] } = plan;
        let (up, down) = (loader.linear(up, width, hidden, bias)?, loader.linear(down, hidden, width, bias)?);
        let (activation, alphas) = match activation {
            Curve::Fixed(Activation::Gelu) => (kind("gelu"), None),
            Curve::Fixed(Activation::GeluTanh) => (kind("gelu_tanh"), None),
            Curve::Fixed(Activation::Relu2) => (kind("relu2"), None),
            Curve::Fixed(Activation::Xielu(numbers)) => (xielu(numbers), None),
            Curve::Learned(name) => {
                let (numbers, alphas) = Alpha::both(loader, name)?;
                (xielu(numbers), Some(alphas))
            }
        };
        Ok(UngatedMlp { up, down, width, activation, alphas })
    }

    pub fn move_to(&mut self, cpu: &Cpu, device: &Device) -> Result<(), ModelError> {
        [&mut self.up, &mut self.down].into_iter().try_for_each(|linear| linear.move_to(cpu, device))
    }

    /// `x[n,hidden] -> y[n,hidden]`
    pub fn forward(
        &self,
        pass: &mut Pass,
        _state: &mut LayerState,
        x: &Tensor,
        y: &mut Tensor,
    ) -> Result<Option<Saved>, ModelError> {
        let shape = [x.shape()[0], self.width];
        let mut up = pass.room("up", DType::Fp32, &shape)?;
        self.up.apply_to(pass, 0, x.view(), up.view_mut())?;
        let mut activated = pass.room("product", pass.dtype, &shape)?;
        pass.op("activate", &self.activation, &[("x", up.view())], [("y", activated.view_mut())])?;
        self.down.apply_to(pass, 0, activated.view(), y.view_mut())?;
        if pass.keeps {
            return Ok(Some(Saved { up, activated }));
        }
        pass.leave([("up", up), ("product", activated)]);
        Ok(None)
    }

    /// From `dy[n,hidden]` in f32: that of x, in f32.
    pub fn backward(&self, back: &mut Backward, x: &Tensor, saved: Saved, dy: &Tensor) -> Result<Tensor, ModelError> {
        let (Saved { up, activated }, mask) = (saved, back.mask);
        let dactivated = self.down.backward(back, 0, activated.view(), dy.view(), mask, DType::Fp32)?;
        let mut dup = back.pass.empty(DType::Fp32, up.shape())?;
        let inputs = [("x", up.view()), ("dy", dactivated.view())];
        back.pass.op("activate_backward", &self.activation, &inputs, [("dx", dup.view_mut())])?;
        for alpha in self.alphas.iter().flatten() {
            alpha.add_gradient(back, &up, &dactivated)?;
        }
        self.up.backward(back, 0, x.view(), dup.view(), mask, DType::Fp32)
    }
}

fn kind(name: &str) -> Attributes {
    Attributes::new().with("kind", name)
}

fn xielu(Xielu { alpha_p, alpha_n, beta }: Xielu) -> Attributes {
    let numbers = [("alpha_p", alpha_p), ("alpha_n", alpha_n), ("beta", beta)];
    numbers.into_iter().fold(kind("xielu"), |all, (name, number)| all.with(name, f64::from(number)))
}

impl Alpha {
    /// The numbers of an xIELU, and the parameters that its alphas are made of.
    fn both(loader: &mut Loader, name: &str) -> Result<(Xielu, [Alpha; 2]), ModelError> {
        // They are buffers of the module, which is made with these numbers.
        for (part, supported) in [("beta", Xielu::BETA), ("eps", -1e-6)] {
            loader.number(&format!("{name}.{part}"), supported)?;
        }
        let vectors = [loader.vector(&format!("{name}.alpha_p"), 1)?, loader.vector(&format!("{name}.alpha_n"), 1)?];
        // A list has no elements.
        let of = |vector: &Vector| vector.w.as_slice::<f32>().and_then(|w| w.first().copied()).unwrap_or(0.0);
        let (numbers, slopes) = Xielu::of_parameters([0, 1].map(|i| of(&vectors[i])));
        let [of_p, of_n] = vectors.map(|vector| vector.name);
        let alpha = |name, slope, [alpha_p, alpha_n]: [f32; 2]| Alpha {
            name,
            slope,
            part: xielu(Xielu { alpha_p, alpha_n, beta: 0.0 }),
        };
        Ok((numbers, [alpha(of_p, slopes[0], [1.0, 0.0]), alpha(of_n, slopes[1], [0.0, 1.0])]))
    }

    /// Adds the tokens of `up[n,width]`, of whose activation `dy` is the gradient, both f32.
    fn add_gradient(&self, back: &mut Backward, up: &Tensor, dy: &Tensor) -> Result<(), ModelError> {
        let (n, mask) = (up.shape()[0], back.mask);
        let [mut part, mut unread] =
            [back.pass.empty(DType::Fp32, up.shape())?, back.pass.empty(DType::Fp32, up.shape())?];
        back.pass.op("activate", &self.part, &[("x", up.view())], [("y", part.view_mut())])?;
        let (rows, ones): (Vec<i32>, Vec<f32>) = (0..n as i32).map(|row| (row, 1.0)).unzip();
        let [mut of_alpha, mut of_parameter] =
            [back.pass.empty(DType::Fp32, &[n, 1])?, back.pass.empty(DType::Fp32, &[n, 1])?];
        let inputs = [
            ("x", part.view()),
            ("row", TensorRef::new(&rows, &[n, 1])?),
            ("weight", TensorRef::new(&ones, &[n, 1])?),
            ("dy", dy.view()),
        ];
        let outputs = [("dx", unread.view_mut()), ("dweight", of_alpha.view_mut())];
        back.pass.op("combine_backward", &Attributes::new(), &inputs, outputs)?;
        let slope = Attributes::new().with("factor", f64::from(self.slope));
        back.pass.op("scale", &slope, &[("x", of_alpha.view())], [("y", of_parameter.view_mut())])?;
        let of = (Of::whole(&self.name), None, 1);
        back.add_vector(["token_sum", "sum"], &Attributes::new(), of, &[("x", of_parameter.view())], mask)
    }
}
