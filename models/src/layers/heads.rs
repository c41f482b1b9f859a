//! Projections to heads that are rotated by their positions, behind a norm where there is one.

use super::linear::Linear;
use super::loader::Loader;
use super::norm::{self, Vector};
use crate::ModelError;
use crate::backward::Backward;
use crate::machine::{concat, split};
use crate::pass::Pass;
use crate::rotary::Rotary;
use crate::sums::Of;
use samebits_ops::device::Device;
use samebits_ops::{Attributes, Cpu, DType, Pairing, Tensor, TensorRef};

/// How heads are rotated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope {
    /// The number of its [`Rotary`](crate::Rotary) in the config.
    pub table: usize,
    /// The first elements of a head, which are rotated: as many as that says.
    pub dim: usize,
    /// Which of them rotate together.
    pub pairing: Pairing,
}

impl Rope {
    /// Whether it can rotate heads of `width` elements by one of `tables`.
    pub(crate) fn check(&self, width: usize, tables: &[Rotary]) -> Result<(), &'static str> {
        match tables.get(self.table) {
            None => Err("heads are rotated by a table of the config"),
            Some(table) if table.dim != self.dim => Err("as many elements are rotated as the table has"),
            Some(_) if !self.dim.is_multiple_of(2) || self.dim > width => {
                Err("an even number of elements of a head is rotated")
            }
            Some(_) => Ok(()),
        }
    }
}

/// The norms of queries and keys before they are rotated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QkNorm {
    /// The norms.
    pub norm: norm::Plan,
    /// What each is of.
    pub of: NormOf,
}

/// What a norm of queries or keys is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormOf {
    /// Each head, with the same weights for all.
    Head,
    /// All heads of a token as one row.
    Row,
}

/// The rotation of heads.
pub(crate) struct Rotation {
    table: usize,
    attributes: Attributes,
    norm: Option<(HeadNorm, NormOf)>,
}

/// The norm before a rotation: of each head, which is one op with it, or of the row.
struct HeadNorm {
    weight: Vector,
    attributes: Attributes,
    of_gradient: Attributes,
}

impl Rotation {
    pub fn new(rope: &Rope) -> Rotation {
        let name = if rope.pairing == Pairing::Interleaved { "interleaved" } else { "half" };
        Rotation { table: rope.table, attributes: Attributes::new().with("pairing", name), norm: None }
    }

    /// Behind a norm of `heads` heads of `dim` elements whose weights are called `part`.
    fn with_norm(
        self,
        loader: &mut Loader,
        part: &str,
        [heads, dim]: [usize; 2],
        QkNorm { norm, of }: &QkNorm,
    ) -> Result<Rotation, ModelError> {
        let (mut attributes, mut of_gradient) = (norm.attributes(), norm.of_gradient());
        let width = match of {
            NormOf::Row => heads * dim,
            NormOf::Head => {
                let pairing = self.attributes.get("pairing").expect("it was just given").clone();
                (attributes, of_gradient) =
                    (attributes.with("pairing", pairing.clone()), of_gradient.with("pairing", pairing));
                dim
            }
        };
        let norm = HeadNorm { weight: loader.vector(&format!("{part}.weight"), width)?, attributes, of_gradient };
        Ok(Rotation { norm: Some((norm, *of)), ..self })
    }

    pub fn move_to(&mut self, device: &Device) -> Result<(), ModelError> {
        self.norm.as_mut().map_or(Ok(()), |(norm, _)| norm.weight.move_to(device))
    }

    /// `raw[n,H,D]` in f32, rotated; and it itself, where a reverse pass will read it.
    pub fn forward(
        &self,
        pass: &mut Pass,
        raw: Tensor,
        shape: [usize; 3],
    ) -> Result<(Tensor, Option<Tensor>), ModelError> {
        let mut y = pass.empty(pass.dtype, raw.shape())?;
        let (x, pos) = (("x", raw.view_as(&shape)?), ("pos", pass.inputs.angles[self.table].tensor()));
        let outputs = [("y", y.view_mut_as(&shape)?)];
        match &self.norm {
            None => pass.op("rope", &self.attributes, &[x, pos], outputs)?,
            Some((norm, NormOf::Head)) => {
                pass.op("norm_rope", &norm.attributes, &[x, ("w", norm.weight.w.view()), pos], outputs)?;
            }
            Some((norm, NormOf::Row)) => {
                let mut normed = pass.empty(DType::Fp32, raw.shape())?;
                let (x, w) = (("x", raw.view()), ("w", norm.weight.w.view()));
                pass.op("rms_norm", &norm.attributes, &[x, w], [("y", normed.view_mut())])?;
                pass.op("rope", &self.attributes, &[("x", normed.view_as(&shape)?), pos], outputs)?;
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
        let (dy, pos) = (("dy", dy.view_as(&shape)?), ("pos", TensorRef::angles(&back.angles[self.table])));
        let Some((HeadNorm { weight, attributes, of_gradient }, of)) = &self.norm else {
            back.pass.op("rope_backward", &self.attributes, &[dy, pos], [("dx", dx.view_mut_as(&shape)?)])?;
            return Ok(dx);
        };
        let (raw, w, name) = (raw.expect("a norm keeps what it reads"), weight.w.view(), Of::whole(&weight.name));
        if *of == NormOf::Row {
            let mut dnormed = back.pass.empty(DType::Fp32, raw.shape())?;
            back.pass.op("rope_backward", &self.attributes, &[dy, pos], [("dx", dnormed.view_mut_as(&shape)?)])?;
            let (x, dy) = (("x", raw.view()), ("dy", dnormed.view()));
            back.add_vector(["rms_norm_dw", "dw"], of_gradient, (name, None, raw.shape()[1]), &[x, dy], back.mask)?;
            back.pass.op("rms_norm_backward", attributes, &[x, ("w", w), dy], [("dx", dx.view_mut())])?;
            return Ok(dx);
        }
        let x = ("x", raw.view_as(&shape)?);
        back.add_vector(["norm_rope_dw", "dw"], of_gradient, (name, None, shape[2]), &[x, dy, pos], back.mask)?;
        let inputs = [x, ("w", w), dy, pos];
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

    /// Heads behind a norm, whose weights are called `part`.
    pub fn with_norm(self, loader: &mut Loader, part: &str, plan: &QkNorm) -> Result<Heads, ModelError> {
        let rotation = self.rotation.with_norm(loader, part, [self.heads, self.dim], plan)?;
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
