//! One pass of a step through a model: how its layers call ops, show what they made and keep it.

use crate::ModelError;
use crate::adapters::Adapters;
use crate::layers::low_rank::Rows;
use crate::machine::{Machine, empty, typed};
use crate::step::{Step, StepInputs};
use crate::trace::TraceHook;
use samebits_ops::{Attributes, Calls, DType, Element, Tensor, TensorMut, TensorRef};
use std::collections::BTreeMap;
use std::ops::Range;

pub(crate) struct Pass<'a, 'p> {
    pub machine: &'a dyn Machine,
    /// What products and attention read.
    pub dtype: DType,
    pub adapters: &'a Adapters,
    pub step: &'a Step,
    pub inputs: &'a StepInputs,
    /// The block that is run; `None` before the first and behind the last.
    pub layer: Option<usize>,
    pub hook: &'a mut TraceHook<'p>,
    pub calls: Calls,
    /// Whether a reverse pass will follow, and layers keep what it reads.
    pub keeps: bool,
    /// What the first layer has left for all others.
    pub carried: Option<Tensor>,
    /// What layers have left for the next ones, by name: the system takes longer to hand out fresh pages than an op takes
    /// to fill them.
    rooms: BTreeMap<&'static str, Tensor>,
}

impl<'a, 'p> Pass<'a, 'p> {
    /// A pass before its first op. `keeps` says whether a reverse pass will follow.
    pub fn new(
        (machine, dtype, adapters): (&'a dyn Machine, DType, &'a Adapters),
        (step, inputs): (&'a Step, &'a StepInputs),
        hook: &'a mut TraceHook<'p>,
        calls: Calls,
        keeps: bool,
    ) -> Pass<'a, 'p> {
        let (layer, carried, rooms) = (None, None, BTreeMap::new());
        Pass { machine, dtype, adapters, step, inputs, layer, hook, calls, keeps, carried, rooms }
    }

    /// The rows of the step by the adapter that they have of the matrix that is called so; nothing where none has one.
    pub fn adapted(&self, matrix: &str) -> Vec<Rows<'a>> {
        let of = |(rows, adapter): &(Range<usize>, Option<usize>)| {
            (rows.clone(), adapter.and_then(|number| self.adapters.of(number, matrix)))
        };
        let rows: Vec<Rows> = self.step.adapters.iter().map(of).collect();
        if rows.iter().any(|(_, adapter)| adapter.is_some()) { rows } else { Vec::new() }
    }

    /// A tensor of any elements, to be written over.
    pub fn empty(&self, dtype: DType, shape: &[usize]) -> Result<Tensor, ModelError> {
        empty(self.machine, dtype, shape)
    }

    /// The same, in the place of one that was left under this name, where there is room.
    pub fn room(&mut self, name: &'static str, dtype: DType, shape: &[usize]) -> Result<Tensor, ModelError> {
        if let Some(mut left) = self.rooms.remove(name)
            && left.dtype() == dtype
            && left.reshape(shape)
        {
            return Ok(left);
        }
        self.empty(dtype, shape)
    }

    /// Leaves tensors that nobody reads any more for those that will ask for room under their names.
    pub fn leave<const N: usize>(&mut self, tensors: [(&'static str, Tensor); N]) {
        self.rooms.extend(tensors);
    }

    /// Copies for the reverse pass, where one will follow, of what will be written over.
    pub fn kept<const N: usize>(&self, values: [&Tensor; N]) -> Result<Option<[Tensor; N]>, ModelError> {
        if !self.keeps {
            return Ok(None);
        }
        let copies = values.into_iter().map(|values| self.machine.upload(values.view()));
        let copies = copies.collect::<Result<Vec<_>, _>>()?;
        Ok(Some(copies.try_into().ok().expect("one for each")))
    }

    /// `y = x`, as products read it.
    pub fn round(&mut self, x: &Tensor, y: &mut Tensor) -> Result<(), ModelError> {
        self.op("scale", &Attributes::new(), &[("x", x.view())], [("y", y.view_mut())])
    }

    /// x times a factor, in f32.
    pub fn scaled(&mut self, factor: &Attributes, x: &Tensor) -> Result<Tensor, ModelError> {
        let mut y = self.empty(DType::Fp32, x.shape())?;
        self.op("scale", factor, &[("x", x.view())], [("y", y.view_mut())])?;
        Ok(y)
    }

    /// Runs an op.
    pub fn op<const N: usize>(
        &mut self,
        op: &str,
        attributes: &Attributes,
        inputs: &[(&str, TensorRef)],
        outputs: [(&str, TensorMut); N],
    ) -> Result<(), ModelError> {
        self.run(op, attributes, inputs, outputs.into())
    }

    /// [`Pass::op`] with as many outputs as there come to be.
    pub fn run(
        &mut self,
        op: &str,
        attributes: &Attributes,
        inputs: &[(&str, TensorRef)],
        outputs: Vec<(&str, TensorMut)>,
    ) -> Result<(), ModelError> {
        if self.hook.looks && self.hook.op.is_none() {
            self.look(op, attributes, inputs, &outputs)?;
        }
        Ok(self.calls.run(self.machine, op, attributes, inputs, outputs)?)
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

    /// Shows a site of the block that is run where somebody looks, and brings back what that changed; else nothing is copied.
    pub fn see(&mut self, site: &'static str, values: &mut Tensor) -> Result<(), ModelError> {
        self.see_at(self.layer, site, values)
    }

    /// Shows what a layer that recurs keeps of each sequence, `[sequences,width]`, as `op` has made it.
    pub fn see_state(&mut self, op: &str, values: &mut Tensor) -> Result<(), ModelError> {
        let (layer, step) = (self.layer, self.step);
        self.show(values, |hook, values| hook.see_state(layer, op, step, values))
    }

    /// [`Pass::see`] of a site of another block, or of none.
    pub fn see_at(&mut self, layer: Option<usize>, site: &'static str, values: &mut Tensor) -> Result<(), ModelError> {
        let step = self.step;
        self.show(values, |hook, values| hook.see(layer, site, step, values))
    }

    /// Shows values on the host where somebody looks, by what says whether it changed them.
    fn show(
        &mut self,
        values: &mut Tensor,
        show: impl FnOnce(&mut TraceHook, &mut Tensor) -> Result<bool, ModelError>,
    ) -> Result<(), ModelError> {
        if self.hook.probe.is_none() {
            return Ok(());
        }
        if values.is_on_host() {
            return show(self.hook, values).map(drop);
        }
        let mut host = self.machine.download(values.view())?;
        if show(self.hook, &mut host)? {
            *values = self.machine.upload(host.view())?;
        }
        Ok(())
    }
}
