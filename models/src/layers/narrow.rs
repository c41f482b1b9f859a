//! Two matrices with few rows between them: `up(f(down(x)))`, f nothing, a tanh or a sigmoid.

use super::arithmetic::{gated, gated_backward, rows};
use super::linear::Linear;
use super::loader::Loader;
use crate::ModelError;
use crate::backward::Backward;
use crate::pass::Pass;
use samebits_ops::device::Device;
use samebits_ops::{Attributes, Backend, Cpu, DType, Tensor};

/// What stands between the two.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Between {
    Nothing,
    Tanh,
    Sigmoid,
}

pub(crate) struct Narrow {
    down: Linear,
    between: Between,
    up: Linear,
    /// A row of ones, by which a product with a gate is the gate's sigmoid.
    ones: Tensor,
}

/// What a reverse pass reads, beside x.
pub(crate) struct Saved {
    /// What the function between reads, where there is one, and what the second matrix does.
    before: Option<Tensor>,
    made: Tensor,
}

impl Narrow {
    /// Of these names, `[rank,hidden]` and `[width,rank]`, each stored transposed or not.
    pub fn load(
        loader: &mut Loader,
        names: [String; 2],
        [hidden, rank, width]: [usize; 3],
        between: Between,
        (bias, transposed): (bool, bool),
    ) -> Result<Narrow, ModelError> {
        let before = std::mem::replace(&mut loader.transposed, transposed);
        let down = loader.linear(&names[0], rank, hidden, false);
        let up = loader.linear(&names[1], width, rank, bias);
        loader.transposed = before;
        Ok(Narrow { down: down?, between, up: up?, ones: Tensor::new(vec![1f32; rank], &[1, rank])? })
    }

    pub fn move_to(&mut self, cpu: &Cpu, device: &Device) -> Result<(), ModelError> {
        self.down.move_to(cpu, device)?;
        self.ones = Backend::upload(device, self.ones.view())?;
        self.up.move_to(cpu, device)
    }

    fn tanh() -> Attributes {
        Attributes::new().with("cap", 1.0)
    }

    /// `x[n,hidden] -> y[n,width]`: x as products read it, y in f32.
    pub fn forward(&self, pass: &mut Pass, x: &Tensor) -> Result<(Tensor, Saved), ModelError> {
        let exact = if self.between == Between::Nothing { pass.dtype } else { DType::Fp32 };
        let down = self.down.apply(pass, x.view(), exact)?;
        let (before, made) = match self.between {
            Between::Nothing => (None, down),
            Between::Tanh => {
                let mut made = pass.empty(pass.dtype, down.shape())?;
                pass.op("softcap", &Narrow::tanh(), &[("x", down.view())], [("y", made.view_mut())])?;
                (Some(down), made)
            }
            Between::Sigmoid => {
                let ones = rows(pass, &self.ones, &down)?;
                let made = gated(pass, &down, &ones, pass.dtype)?;
                (Some(down), made)
            }
        };
        let y = self.up.apply(pass, made.view(), DType::Fp32)?;
        Ok((y, Saved { before, made }))
    }

    /// From `dy[n,hidden]` in f32: that of x, in f32.
    pub fn backward(&self, back: &mut Backward, x: &Tensor, saved: &Saved, dy: &Tensor) -> Result<Tensor, ModelError> {
        let (mask, f32, Saved { before, made }) = (back.mask, DType::Fp32, saved);
        let mut dmade = self.up.backward(back, 0, made.view(), dy.view(), mask, f32)?;
        if let Some(before) = before {
            dmade = match self.between {
                Between::Sigmoid => {
                    let ones = rows(&back.pass, &self.ones, before)?;
                    let [dbefore, _] = gated_backward(&mut back.pass, before, &ones, &dmade)?;
                    dbefore
                }
                _ => {
                    let mut dbefore = back.pass.empty(f32, before.shape())?;
                    let inputs = [("x", before.view()), ("dy", dmade.view())];
                    back.pass.op("softcap_backward", &Narrow::tanh(), &inputs, [("dx", dbefore.view_mut())])?;
                    dbefore
                }
            };
        }
        self.down.backward(back, 0, x.view(), dmade.view(), mask, f32)
    }
}
