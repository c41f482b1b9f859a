//! Projections to heads that are rotated by their positions, behind a norm of each head where there is one.

use super::linear::Linear;
use super::loader::Loader;
use super::norm::{self, Vector};
use crate::ModelError;
use crate::backward::Backward;
use crate::machine::{concat, split};
use crate::pass::Pass;
use crate::sums::Of;
use samebits_ops::device::Device;
use samebits_ops::{Attributes, Cpu, DType, Pairing, Tensor, TensorRef};

/// The rotation of heads.
pub(crate) struct Rotation {
    attributes: Attributes,
    norm: Option<HeadNorm>,
}

/// The norm of each head before its rotation: one op with it.
struct HeadNorm {
    weight: Vector,
    attributes: Attributes,
    of_gradient: Attributes,
}

impl Rotation {
    pub fn new(pairing: Pairing) -> Rotation {
        let name = if pairing == Pairing::Interleaved { "interleaved" } else { "half" };
        Rotation { attributes: Attributes::new().with("pairing", name), norm: None }
    }

    /// Behind a norm of heads of `dim` elements whose weights are called `part`.
    pub fn with_norm(
        self,
        loader: &mut Loader,
        part: &str,
        dim: usize,
        plan: &norm::Plan,
    ) -> Result<Rotation, ModelError> {
        let pairing = self.attributes.get("pairing").expect("it was just given").clone();
        let norm = HeadNorm {
            weight: loader.vector(&format!("{part}.weight"), dim)?,
            attributes: plan.attributes().with("pairing", pairing.clone()),
            of_gradient: plan.of_gradient().with("pairing", pairing),
        };
        Ok(Rotation { norm: Some(norm), ..self })
    }

    pub fn move_to(&mut self, device: &Device) -> Result<(), ModelError> {
        self.norm.as_mut().map_or(Ok(()), |norm| norm.weight.move_to(device))
    }

    /// `raw[n,H,D]` in f32, rotated; and it itself, where a reverse pass will read it.
    pub fn forward(
        &self,
        pass: &mut Pass,
        raw: Tensor,
        shape: [usize; 3],
    ) -> Result<(Tensor, Option<Tensor>), ModelError> {
        let mut y = pass.empty(pass.dtype, raw.shape())?;
        let (x, pos) = (("x", raw.view_as(&shape)?), ("pos", pass.inputs.angles.tensor()));
        let outputs = [("y", y.view_mut_as(&shape)?)];
        match &self.norm {
            None => pass.op("rope", &self.attributes, &[x, pos], outputs)?,
            Some(norm) => {
                pass.op("norm_rope", &norm.attributes, &[x, ("w", norm.weight.w.view()), pos], outputs)?;
            }
        }
        let is_read = pass.keeps && self.norm.is_some();
        Ok((y, is_read.then_some(raw)))
    }

    /// From `dy[n,H,D]` in f32, of the rotated heads: that of the heads before, in f32.
    pub fn backward(
        &self,
        back: &mut Backward,
        raw: Option<&Tensor>,
        dy: &Tensor,
        shape: [usize; 3],
    ) -> Result<Tensor, ModelError> {
        let mut dx = back.pass.empty(DType::Fp32, dy.shape())?;
        let (dy, pos) = (("dy", dy.view_as(&shape)?), ("pos", TensorRef::angles(back.angles)));
        let Some(HeadNorm { weight, attributes, of_gradient }) = &self.norm else {
            back.pass.op("rope_backward", &self.attributes, &[dy, pos], [("dx", dx.view_mut_as(&shape)?)])?;
            return Ok(dx);
        };
        let x = ("x", raw.expect("a norm keeps what it reads").view_as(&shape)?);
        let (of, dim, mask) = (Of::whole(&weight.name), shape[2], back.mask);
        back.add_vector(["norm_rope_dw", "dw"], of_gradient, (of, None, dim), &[x, dy, pos], mask)?;
        let inputs = [x, ("w", weight.w.view()), dy, pos];
        back.pass.op("norm_rope_backward", attributes, &inputs, [("dx", dx.view_mut_as(&shape)?)])?;
        Ok(dx)
    }
}

/// Heads whose first elements are rotated.
pub(crate) struct Heads {
    heads: usize,
    /// The elements of a head that are rotated.
    dim: usize,
    projection: Linear,
    rotation: Rotation,
    /// The elements behind them, which carry no position, and how many each head has.
    nope: Option<(Linear, usize)>,
}

impl Heads {
    pub fn new(heads: usize, dim: usize, projection: Linear, rotation: Rotation) -> Heads {
        Heads { heads, dim, projection, rotation, nope: None }
    }

    /// Heads with `width` more elements that are not rotated.
    pub fn with_nope(self, linear: Linear, width: usize) -> Heads {
        Heads { nope: Some((linear, width)), ..self }
    }

    /// Heads of `dim` elements behind a norm of each, whose weights are called `part`.
    pub fn with_norm(
        self,
        loader: &mut Loader,
        part: &str,
        dim: usize,
        plan: &norm::Plan,
    ) -> Result<Heads, ModelError> {
        let rotation = self.rotation.with_norm(loader, part, dim, plan)?;
        Ok(Heads { rotation, ..self })
    }

    pub fn move_to(&mut self, cpu: &Cpu, device: &Device) -> Result<(), ModelError> {
        self.projection.move_to(cpu, device)?;
        self.rotation.move_to(device)?;
        self.nope.as_mut().map_or(Ok(()), |(nope, _)| nope.move_to(cpu, device))
    }

    /// `a[n,hidden]` to `[n,heads * D]`; and what the norm reads, where a reverse pass will read it.
    pub fn forward(&self, pass: &mut Pass, a: &Tensor) -> Result<(Tensor, Option<Tensor>), ModelError> {
        let (n, heads, dim) = (a.shape()[0], self.heads, self.dim);
        let raw = self.projection.apply(pass, a.view(), DType::Fp32)?;
        let (rotary, raw) = self.rotation.forward(pass, raw, [n, heads, dim])?;
        let Some((linear, width)) = &self.nope else { return Ok((rotary, raw)) };
        let nope = linear.apply(pass, a.view(), pass.dtype)?;
        Ok((concat(pass.machine, n * heads, (&rotary, dim, 1), (&nope, *width, 1))?, raw))
    }

    /// From `dy[n,heads * D]` in f32: that of a, in f32.
    pub fn backward(
        &self,
        back: &mut Backward,
        a: &Tensor,
        raw: Option<Tensor>,
        dy: Tensor,
    ) -> Result<Tensor, ModelError> {
        let (n, heads, dim, mask) = (a.shape()[0], self.heads, self.dim, back.mask);
        let (drotary, dnope) = match &self.nope {
            None => (dy, None),
            Some((linear, width)) => {
                let [drotary, dnope] = split(back.pass.machine, [n, heads], &dy, [dim, *width])?;
                (drotary, Some((linear, dnope)))
            }
        };
        let draw = self.rotation.backward(back, raw.as_ref(), &drotary, [n, heads, dim])?;
        let from_rotary = self.projection.backward(back, 0, a.view(), draw.view(), mask, DType::Fp32)?;
        let Some((linear, dnope)) = dnope else { return Ok(from_rotary) };
        let from_nope = linear.backward(back, 0, a.view(), dnope.view(), mask, DType::Fp32)?;
        back.sum(from_rotary, from_nope)
    }
}
