//! v of a layer: that of the first layer as it is, that of another on its way back to the first one's, `v + (first - v) * s`.

use super::super::arithmetic::{add, gated, gated_backward, sub};
use super::super::loader::Loader;
use super::super::narrow::{self, Between, Narrow};
use super::Plan;
use crate::ModelError;
use crate::backward::Backward;
use crate::pass::Pass;
use samebits_ops::device::{Device, Part};
use samebits_ops::{Cpu, DType, Tensor};

/// By what the sigmoid s reads; none in the first layer.
pub(super) struct Values(Option<Narrow>);

/// What a reverse pass reads where there is a way back.
pub(super) struct Saved {
    /// `first - v`
    away: Tensor,
    of_s: Tensor,
    narrow: narrow::Saved,
}

impl Values {
    pub fn load(loader: &mut Loader, plan: &Plan) -> Result<Values, ModelError> {
        if plan.first {
            return Ok(Values(None));
        }
        Ok(Values(Some(plan.narrow(loader, "v", plan.ranks[2], Between::Nothing, true)?)))
    }

    pub fn move_to(&mut self, cpu: &Cpu, device: &Device) -> Result<(), ModelError> {
        self.0.as_mut().map_or(Ok(()), |narrow| narrow.move_to(cpu, device))
    }

    /// From v, and from what it was a projection of.
    pub fn forward(&self, pass: &mut Pass, v: Tensor, x: &Tensor) -> Result<(Tensor, Option<Saved>), ModelError> {
        let Some(narrow) = &self.0 else {
            let (mut first, part) = (pass.empty(DType::Fp32, v.shape())?, Part::whole(v.shape()[1]));
            pass.machine.copy_rows([v.shape()[0], v.shape()[1]], (&v, part), (&mut first, part))?;
            pass.carried = Some(first);
            return Ok((v, None));
        };
        let (of_s, narrow) = narrow.forward(pass, x)?;
        let first = pass.carried.take().expect("a config whose first time mix reads another is refused");
        let away = sub(pass, &first, &v)?;
        pass.carried = Some(first);
        let way = gated(pass, &of_s, &away, DType::Fp32)?;
        Ok((add(pass, &v, &way, DType::Fp32)?, Some(Saved { away, of_s, narrow })))
    }

    /// From that of what is made: that of v, and where there is a way back that of what v was a projection of. That of the first
    /// v is left for the first layer, which goes on with it.
    pub fn backward(
        &self,
        back: &mut Backward,
        (x, saved): (&Tensor, Option<&Saved>),
        dv: Tensor,
    ) -> Result<(Tensor, Option<Tensor>), ModelError> {
        let carried = back.carried.take();
        let (Some(narrow), Some(saved)) = (&self.0, saved) else {
            return Ok((if let Some(carried) = carried { back.sum(dv, carried)? } else { dv }, None));
        };
        let [dof_s, daway] = gated_backward(&mut back.pass, &saved.of_s, &saved.away, &dv)?;
        let dv = sub(&mut back.pass, &dv, &daway)?;
        let of_x = narrow.backward(back, x, &saved.narrow, &dof_s)?;
        back.carried = Some(if let Some(carried) = carried { back.sum(carried, daway)? } else { daway });
        Ok((dv, Some(of_x)))
    }
}
