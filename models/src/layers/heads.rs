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

/// The norms of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QkNorm {
    /// The norms.
    pub norm: norm::Plan,
    /// What each is of.
    pub of: NormOf,
    /// Whether they are behind the rotation instead of before it.
    pub behind: bool,
    /// Whether they have weights; else these are 1.
    pub weights: bool,
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
    norm: Option<HeadNorm>,
}

/// A norm of heads. One of each head right before all of it is rotated is one op with the rotation.
struct HeadNorm {
    weight: Vector,
    plan: QkNorm,
    attributes: Attributes,
    of_gradient: Attributes,
}

impl HeadNorm {
    fn is_one_op(&self, passed: usize) -> bool {
        self.plan.of == NormOf::Head && !self.plan.behind && passed == 0 && self.plan.weights
    }

    /// What it sees of `[n,heads,width]` as rows.
    fn rows(&self, [n, heads, width]: [usize; 3]) -> [usize; 2] {
        match self.plan.of {
            NormOf::Head => [n * heads, width],
            NormOf::Row => [n, heads * width],
        }
    }

    /// The norm as an op of its own.
    fn forward(&self, pass: &mut Pass, x: &Tensor, y: &mut Tensor, shape: [usize; 3]) -> Result<(), ModelError> {
        let (rows, w) = (self.rows(shape), ("w", self.weight.w.view()));
        pass.op(
            "rms_norm",
            &self.plan.norm.attributes(),
            &[("x", x.view_as(&rows)?), w],
            [("y", y.view_mut_as(&rows)?)],
        )
    }

    /// From `dy` in f32 of what [`HeadNorm::forward`] made of x: that of x, in f32.
    fn backward(&self, back: &mut Backward, x: &Tensor, dy: &Tensor, shape: [usize; 3]) -> Result<Tensor, ModelError> {
        let (rows, norm) = (self.rows(shape), &self.plan.norm);
        let (x, dy) = (("x", x.view_as(&rows)?), ("dy", dy.view_as(&rows)?));
        // Each head of a token counts.
        let of_token = rows[0] / shape[0].max(1);
        let mask = back.mask_of_rows(of_token);
        if self.plan.weights {
            let of = (Of::whole(&self.weight.name), None, rows[1]);
            back.add_vector(["rms_norm_dw", "dw"], &norm.of_gradient(), of, &[x, dy], &mask)?;
        }
        let mut dx = back.pass.empty(DType::Fp32, &rows)?;
        let inputs = [x, ("w", self.weight.w.view()), dy];
        back.pass.op("rms_norm_backward", &norm.attributes(), &inputs, [("dx", dx.view_mut())])?;
        dx.reshape(&[shape[0], shape[1] * shape[2]]);
        Ok(dx)
    }
}

impl Rotation {
    pub fn new(rope: &Rope) -> Rotation {
        let name = if rope.pairing == Pairing::Interleaved { "interleaved" } else { "half" };
        Rotation { table: rope.table, attributes: Attributes::new().with("pairing", name), norm: None }
    }

    /// With a norm of `heads` heads of `dim` elements whose weights are called `part`.
    fn with_norm(
        self,
        loader: &mut Loader,
        part: &str,
        [heads, dim]: [usize; 2],
        plan: &QkNorm,
    ) -> Result<Rotation, ModelError> {
        let pairing = self.attributes.get("pairing").expect("it is always given").clone();
        let attributes = plan.norm.attributes().with("pairing", pairing.clone());
        let of_gradient = plan.norm.of_gradient().with("pairing", pairing);
        let width = if plan.of == NormOf::Row { heads * dim } else { dim };
        let weight = if plan.weights { loader.vector(&format!("{part}.weight"), width)? } else { Vector::ones(width)? };
        Ok(Rotation { norm: Some(HeadNorm { weight, plan: *plan, attributes, of_gradient }), ..self })
    }

    pub fn move_to(&mut self, device: &Device) -> Result<(), ModelError> {
        self.norm.as_mut().map_or(Ok(()), |norm| norm.weight.move_to(device))
    }

    /// `raw[n,H,D]` in f32, behind the norm, the first elements of each head rotated and the last `passed` as they are; and
    /// what the norm read, where a reverse pass will read it.
    pub fn forward(
        &self,
        pass: &mut Pass,
        raw: Tensor,
        shape: [usize; 3],
        passed: usize,
    ) -> Result<(Tensor, Option<Tensor>), ModelError> {
        let Some(norm) = &self.norm else { return Ok((self.turn(pass, &raw, pass.dtype, shape, passed)?, None)) };
        if norm.is_one_op(passed) {
            let mut y = pass.empty(pass.dtype, raw.shape())?;
            let inputs = [("x", raw.view_as(&shape)?), ("w", norm.weight.w.view()), self.angles(pass)];
            pass.op("norm_rope", &norm.attributes, &inputs, [("y", y.view_mut_as(&shape)?)])?;
            return Ok((y, pass.keeps.then_some(raw)));
        }
        if norm.plan.behind {
            let turned = self.turn(pass, &raw, DType::Fp32, shape, passed)?;
            let mut y = pass.empty(pass.dtype, raw.shape())?;
            norm.forward(pass, &turned, &mut y, shape)?;
            return Ok((y, pass.keeps.then_some(turned)));
        }
        let mut normed = pass.empty(DType::Fp32, raw.shape())?;
        norm.forward(pass, &raw, &mut normed, shape)?;
        Ok((self.turn(pass, &normed, pass.dtype, shape, passed)?, pass.keeps.then_some(raw)))
    }

    fn angles<'t>(&self, pass: &Pass<'t, '_>) -> (&'static str, TensorRef<'t>) {
        ("pos", pass.inputs.angles[self.table].tensor())
    }

    /// The rotation alone, to `dtype`.
    fn turn(
        &self,
        pass: &mut Pass,
        x: &Tensor,
        dtype: DType,
        [n, heads, dim]: [usize; 3],
        passed: usize,
    ) -> Result<Tensor, ModelError> {
        let rotated = [n, heads, dim - passed];
        let rope = |pass: &mut Pass, x: &Tensor| -> Result<Tensor, ModelError> {
            let mut y = pass.empty(dtype, x.shape())?;
            let inputs = [("x", x.view_as(&rotated)?), self.angles(pass)];
            pass.op("rope", &self.attributes, &inputs, [("y", y.view_mut_as(&rotated)?)])?;
            Ok(y)
        };
        if passed == 0 {
            return rope(pass, x);
        }
        let [first, last] = split(pass.machine, [n, heads], x, [dim - passed, passed])?;
        let first = rope(pass, &first)?;
        let mut rounded = pass.empty(dtype, last.shape())?;
        pass.round(&last, &mut rounded)?;
        concat(pass.machine, n * heads, (&first, dim - passed, 1), (&rounded, passed, 1))
    }

    /// From `dy[n,H,D]` in f32, of what [`Rotation::forward`] made: that of the heads before, in f32. `kept` is what that kept.
    pub fn backward(
        &self,
        back: &mut Backward,
        kept: Option<&Tensor>,
        dy: &Tensor,
        shape: [usize; 3],
        passed: usize,
    ) -> Result<Tensor, ModelError> {
        let Some(norm) = &self.norm else { return self.turn_back(back, dy, shape, passed) };
        let kept = kept.expect("a norm keeps what it reads");
        if norm.is_one_op(passed) {
            let (x, dy) = (("x", kept.view_as(&shape)?), ("dy", dy.view_as(&shape)?));
            let pos = ("pos", TensorRef::angles(&back.angles[self.table]));
            let of = (Of::whole(&norm.weight.name), None, shape[2]);
            back.add_vector(["norm_rope_dw", "dw"], &norm.of_gradient, of, &[x, dy, pos], back.mask)?;
            let mut dx = back.pass.empty(DType::Fp32, kept.shape())?;
            let inputs = [x, ("w", norm.weight.w.view()), dy, pos];
            back.pass.op("norm_rope_backward", &norm.attributes, &inputs, [("dx", dx.view_mut_as(&shape)?)])?;
            return Ok(dx);
        }
        if norm.plan.behind {
            let dturned = norm.backward(back, kept, dy, shape)?;
            return self.turn_back(back, &dturned, shape, passed);
        }
        let dnormed = self.turn_back(back, dy, shape, passed)?;
        norm.backward(back, kept, &dnormed, shape)
    }

    /// The reverse of [`Rotation::turn`], in f32.
    fn turn_back(
        &self,
        back: &mut Backward,
        dy: &Tensor,
        [n, heads, dim]: [usize; 3],
        passed: usize,
    ) -> Result<Tensor, ModelError> {
        let rotated = [n, heads, dim - passed];
        let rope = |back: &mut Backward, dy: &Tensor| -> Result<Tensor, ModelError> {
            let mut dx = back.pass.empty(DType::Fp32, dy.shape())?;
            let inputs = [("dy", dy.view_as(&rotated)?), ("pos", TensorRef::angles(&back.angles[self.table]))];
            back.pass.op("rope_backward", &self.attributes, &inputs, [("dx", dx.view_mut_as(&rotated)?)])?;
            Ok(dx)
        };
        if passed == 0 {
            return rope(back, dy);
        }
        let [first, last] = split(back.pass.machine, [n, heads], dy, [dim - passed, passed])?;
        let first = rope(back, &first)?;
        concat(back.pass.machine, n * heads, (&first, dim - passed, 1), (&last, passed, 1))
    }
}

/// Heads whose first elements are rotated.
pub(crate) struct Heads {
    heads: usize,
    /// The elements of a head that the projection makes.
    dim: usize,
    /// How many of them, the last ones, are not rotated.
    passed: usize,
    projection: Linear,
    rotation: Rotation,
    /// The elements behind them, which carry no position, and how many each head has.
    nope: Option<(Linear, usize)>,
}

impl Heads {
    pub fn new(heads: usize, dim: usize, projection: Linear, rotation: Rotation) -> Heads {
        Heads { heads, dim, passed: 0, projection, rotation, nope: None }
    }

    /// Heads whose last `passed` elements are not rotated.
    pub fn passing(self, passed: usize) -> Heads {
        Heads { passed, ..self }
    }

    /// Heads with `width` more elements that are not rotated.
    pub fn with_nope(self, linear: Linear, width: usize) -> Heads {
        Heads { nope: Some((linear, width)), ..self }
    }

    /// Heads with a norm, whose weights are called `part`.
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
        let raw = self.project(pass, a)?;
        self.forward_of(pass, a, raw)
    }

    /// `a[n,hidden]` to what the norm and the rotation read, in f32.
    pub fn project(&self, pass: &mut Pass, a: &Tensor) -> Result<Tensor, ModelError> {
        self.projection.apply(pass, a.view(), DType::Fp32)
    }

    /// [`Heads::forward`] from what [`Heads::project`] made.
    pub fn forward_of(&self, pass: &mut Pass, a: &Tensor, raw: Tensor) -> Result<(Tensor, Option<Tensor>), ModelError> {
        let (n, heads, dim) = (a.shape()[0], self.heads, self.dim);
        let (rotary, raw) = self.rotation.forward(pass, raw, [n, heads, dim], self.passed)?;
        let Some((linear, width)) = &self.nope else { return Ok((rotary, raw)) };
        let nope = linear.apply(pass, a.view(), pass.dtype)?;
        Ok((concat(pass.machine, n * heads, (&rotary, dim, 1), (&nope, *width, 1))?, raw))
    }

    /// From `dy[n,heads * D]` in f32: that of a, in f32. `more` is that of what else reads the projection.
    pub fn backward(
        &self,
        back: &mut Backward,
        a: &Tensor,
        (raw, more): (Option<Tensor>, Option<Tensor>),
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
        let mut draw = self.rotation.backward(back, raw.as_ref(), &drotary, [n, heads, dim], self.passed)?;
        if let Some(more) = more {
            draw = back.sum(draw, more)?;
        }
        let from_rotary = self.projection.backward(back, 0, a.view(), draw.view(), mask, DType::Fp32)?;
        let Some((linear, dnope)) = dnope else { return Ok(from_rotary) };
        let from_nope = linear.backward(back, 0, a.view(), dnope.view(), mask, DType::Fp32)?;
        back.sum(from_rotary, from_nope)
    }
}
