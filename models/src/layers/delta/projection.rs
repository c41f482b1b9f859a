//! A projection of what enters: by one matrix, or by two narrow ones.

use super::super::linear::Linear;
use super::super::narrow::{self, Narrow};
use crate::ModelError;
use crate::backward::Backward;
use crate::pass::Pass;
use samebits_ops::device::Device;
use samebits_ops::{Cpu, DType, Tensor};

pub(super) enum Projection {
    One(Linear),
    Two(Box<Narrow>),
}

/// What a reverse pass reads of two matrices.
pub(super) type Saved = Option<narrow::Saved>;

impl Projection {
    pub fn move_to(&mut self, cpu: &Cpu, device: &Device) -> Result<(), ModelError> {
        match self {
            Projection::One(linear) => linear.move_to(cpu, device),
            Projection::Two(narrow) => narrow.move_to(cpu, device),
        }
    }

    /// `a[n,hidden]` projected, in f32.
    pub fn forward(&self, pass: &mut Pass, a: &Tensor) -> Result<(Tensor, Saved), ModelError> {
        match self {
            Projection::One(linear) => Ok((linear.apply(pass, a.view(), DType::Fp32)?, None)),
            Projection::Two(narrow) => {
                let (y, saved) = narrow.forward(pass, a)?;
                Ok((y, Some(saved)))
            }
        }
    }

    /// From that of what is made: that of a, in f32.
    pub fn backward(&self, back: &mut Backward, a: &Tensor, saved: &Saved, dy: &Tensor) -> Result<Tensor, ModelError> {
        match (self, saved) {
            (Projection::One(linear), _) => linear.backward(back, 0, a.view(), dy.view(), back.mask, DType::Fp32),
            (Projection::Two(narrow), Some(saved)) => narrow.backward(back, a, saved, dy),
            (Projection::Two(_), None) => unreachable!("two matrices keep what is between them"),
        }
    }
}
