//! One pass of a step through a model: how its parts call ops and show what they made.

use crate::ModelError;
use crate::config::{Config, OpAttributes};
use crate::machine::{Machine, empty, typed};
use crate::step::Step;
use crate::trace::TraceHook;
use samebits_ops::{Attributes, Calls, DType, Element, Tensor, TensorMut, TensorRef};

pub(crate) struct Pass<'a, 'p> {
    pub machine: &'a dyn Machine,
    pub config: &'a Config,
    /// What products and attention read.
    pub dtype: DType,
    pub attributes: &'a OpAttributes,
    pub hook: &'a mut TraceHook<'p>,
    pub calls: Calls,
    /// What a gated MLP computes on the way.
    pub gated: GatedBuffers,
    /// What a reverse pass will read of what is computed, where there will be one: the last is read first.
    pub kept: Option<Vec<(&'static str, Tensor)>>,
}

/// Gate, up and their product, kept for the next MLP: the system takes longer to hand out fresh pages than an op takes
/// to fill them.
#[derive(Default)]
pub(crate) struct GatedBuffers {
    pub gate: Option<Tensor>,
    pub up: Option<Tensor>,
    pub product: Option<Tensor>,
}

impl Pass<'_, '_> {
    /// A tensor of any elements, to be written over.
    pub fn empty(&self, dtype: DType, shape: &[usize]) -> Result<Tensor, ModelError> {
        empty(self.machine, dtype, shape)
    }

    /// The same, in the place of one that is kept where there is room.
    pub fn room<'t>(
        &self,
        kept: &'t mut Option<Tensor>,
        dtype: DType,
        shape: &[usize],
    ) -> Result<&'t mut Tensor, ModelError> {
        if !kept.as_mut().is_some_and(|kept| kept.reshape(shape)) {
            *kept = Some(self.empty(dtype, shape)?);
        }
        Ok(kept.as_mut().expect("it was just made"))
    }

    /// Keeps a copy for the reverse pass, where there will be one.
    pub fn keep(&mut self, name: &'static str, values: &Tensor) -> Result<(), ModelError> {
        if let Some(kept) = &mut self.kept {
            kept.push((name, self.machine.upload(values.view())?));
        }
        Ok(())
    }

    /// [`Pass::keep`] of what the forward has no more use for: it is not copied.
    pub fn keep_own(&mut self, name: &'static str, values: Tensor) {
        if let Some(kept) = &mut self.kept {
            kept.push((name, values));
        }
    }

    /// Runs an op.
    pub fn op<const N: usize>(
        &mut self,
        op: &str,
        attributes: &Attributes,
        inputs: &[(&str, TensorRef)],
        outputs: [(&str, TensorMut); N],
    ) -> Result<(), ModelError> {
        if self.hook.looks && self.hook.op.is_none() {
            self.look(op, attributes, inputs, &outputs)?;
        }
        Ok(self.calls.run(self.machine, op, attributes, inputs, outputs.into())?)
    }

    /// Runs an op for its outputs alone, and notes it where one of them is not finite.
    fn look(
        &mut self,
        op: &str,
        attributes: &Attributes,
        inputs: &[(&str, TensorRef)],
        outputs: &[(&str, TensorMut)],
    ) -> Result<(), ModelError> {
        let own = outputs.iter().map(|(_, output)| self.empty(output.dtype(), output.shape()));
        let mut own = own.collect::<Result<Vec<_>, _>>()?;
        let names = outputs.iter().map(|(name, _)| *name);
        let given = names.zip(own.iter_mut().map(Tensor::view_mut)).collect();
        self.calls.run(self.machine, op, attributes, inputs, given)?;
        for output in own.into_iter().filter(|output| output.dtype() != DType::I32) {
            let output = if output.is_on_host() { output } else { self.machine.download(output.view())? };
            let is_finite = typed!(output.dtype() => A, {
                output.as_slice::<A>().expect("it is on the host, and of this dtype").iter().all(|v| v.widen().is_finite())
            });
            if !is_finite {
                self.hook.op = Some(format!("{op} in {}", output.dtype()));
                break;
            }
        }
        Ok(())
    }

    /// Shows a site where somebody looks, and brings back what that changed; else nothing is copied.
    pub fn see(
        &mut self,
        layer: Option<usize>,
        site: &'static str,
        step: &Step,
        values: &mut Tensor,
    ) -> Result<(), ModelError> {
        if self.hook.probe.is_none() {
            return Ok(());
        }
        if values.is_on_host() {
            return self.hook.see(layer, site, step, values).map(drop);
        }
        let mut host = self.machine.download(values.view())?;
        if self.hook.see(layer, site, step, &mut host)? {
            *values = self.machine.upload(host.view())?;
        }
        Ok(())
    }
}
