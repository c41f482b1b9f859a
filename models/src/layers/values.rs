//! Values of an attention: of a projection of their own, or of that of the keys, behind a norm where there is one.

use super::attend;
use super::linear::Linear;
use super::norm::{self, Norm};
use crate::ModelError;
use crate::backward::Backward;
use crate::pass::Pass;
use samebits_ops::device::Device;
use samebits_ops::{Cpu, DType, Tensor};

/// What values are made of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Plan {
    /// Whether they are of the projection of the keys, before the norm of those.
    pub of_keys: bool,
    /// The norm of each, which has no weights, where there is one.
    pub norm: Option<norm::Plan>,
}

impl Plan {
    /// As most families have it.
    pub const PLAIN: Plan = Plan { of_keys: false, norm: None };
}

pub(crate) struct Values {
    /// `None` where they are of that of the keys.
    projection: Option<Linear>,
    norm: Option<Norm>,
    /// How many heads a token has, and the elements of each.
    heads: [usize; 2],
}

/// That of what values are made of.
pub(crate) enum Gradient {
    /// Of what they are a projection of.
    Input(Tensor),
    /// Of what the projection of the keys made.
    Keys(Tensor),
}

impl Values {
    /// By a projection of their own, or by that of the keys.
    pub fn new(projection: Option<Linear>, plan: &Plan, heads: &attend::Heads) -> Result<Values, ModelError> {
        let heads = [heads.keys, heads.value_dim];
        let norm = plan.norm.map(|norm| Norm::without_weights(heads[1], &norm)).transpose()?;
        Ok(Values { projection, norm, heads })
    }

    pub fn move_to(&mut self, cpu: &Cpu, device: &Device) -> Result<(), ModelError> {
        self.norm.as_mut().map_or(Ok(()), |norm| norm.move_to(device))?;
        self.projection.as_mut().map_or(Ok(()), |projection| projection.move_to(cpu, device))
    }

    /// From `a[n,hidden]`, and what the projection of the keys made of it in f32: values as attention reads them, and what their norm
    /// reads, where that is a projection of their own and a reverse pass will read it.
    pub fn forward(&self, pass: &mut Pass, a: &Tensor, keys: &Tensor) -> Result<(Tensor, Option<Tensor>), ModelError> {
        let exact = if self.norm.is_some() { DType::Fp32 } else { pass.dtype };
        let made = self.projection.as_ref().map(|projection| projection.apply(pass, a.view(), exact)).transpose()?;
        let Some(norm) = &self.norm else { return Ok((made.expect("keys have a norm of their own"), None)) };
        let raw = made.as_ref().unwrap_or(keys);
        let rows = [raw.shape()[0] * self.heads[0], self.heads[1]];
        let mut y = pass.empty(pass.dtype, raw.shape())?;
        norm.forward_as(pass, raw.view_as(&rows)?, y.view_mut_as(&rows)?)?;
        Ok((y, made.filter(|_| pass.keeps)))
    }

    /// From that of values in f32. `raw` is what their norm read.
    pub fn backward(
        &self,
        back: &mut Backward,
        a: &Tensor,
        raw: Option<&Tensor>,
        mut dv: Tensor,
    ) -> Result<Gradient, ModelError> {
        if let Some(norm) = &self.norm {
            let raw = raw.expect("a norm keeps what it reads");
            let (shape, rows) = (raw.shape(), [raw.shape()[0] * self.heads[0], self.heads[1]]);
            let mut dx = back.pass.empty(DType::Fp32, shape)?;
            norm.backward_as(back, raw.view_as(&rows)?, dv.view_as(&rows)?, dx.view_mut_as(&rows)?)?;
            dv = dx;
        }
        let Some(projection) = &self.projection else { return Ok(Gradient::Keys(dv)) };
        projection.backward(back, 0, a.view(), dv.view(), back.mask, DType::Fp32).map(Gradient::Input)
    }
}
