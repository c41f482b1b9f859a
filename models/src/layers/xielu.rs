//! xIELU, whose two alphas are made of parameters that are learned.

use super::loader::Loader;
use super::norm::Vector;
use crate::ModelError;
use crate::backward::Backward;
use crate::sums::Of;
use samebits_ops::{Attributes, DType, Tensor, TensorRef, Xielu};

/// A parameter that an alpha of xIELU is made of.
pub(crate) struct Alpha {
    name: String,
    /// The slope of the alpha in the parameter.
    slope: f32,
    /// By which `activate` gives what the alpha is multiplied with.
    part: Attributes,
}

/// The attributes of `activate` with these numbers.
pub(crate) fn xielu(Xielu { alpha_p, alpha_n, beta }: Xielu) -> Attributes {
    let numbers = [("alpha_p", alpha_p), ("alpha_n", alpha_n), ("beta", beta)];
    numbers
        .into_iter()
        .fold(Attributes::new().with("kind", "xielu"), |all, (name, number)| all.with(name, f64::from(number)))
}

impl Alpha {
    /// The numbers of an xIELU, and the parameters that its alphas are made of.
    pub fn both(loader: &mut Loader, name: &str) -> Result<(Xielu, [Alpha; 2]), ModelError> {
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
    pub fn add_gradient(&self, back: &mut Backward, up: &Tensor, dy: &Tensor) -> Result<(), ModelError> {
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
