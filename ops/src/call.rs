//! Calls by name: one entry for every op, whose tensors have the dtypes and strides that they have.
//!
//! A call is checked once, by [`samebits_schema::validate`], and then goes to the op's [`Entry`]. The generic functions
//! over slices (`rms_norm`, ..) end in the same kernels.

use crate::backend::device::{Device, Graph, Unit};
use crate::profile::Profile;
use crate::tensor::{Prepared, Tensor, TensorMut, TensorRef};
use crate::{Cpu, Error, value_error};
use samebits_schema::{Attributes, Call, DType, Given, OutputDType, REST};
use std::fmt;

/// Runs an op on a backend.
pub type Run<B> = fn(&B, &mut Arguments) -> Result<(), Error>;

/// Makes the better form of an input.
pub type Prepare = fn(&Cpu, &Arguments) -> Result<Option<Prepared>, Error>;

/// An op as calls reach it. Another crate makes one with [`Entry::new`] and gives it to [`register`](crate::register).
#[non_exhaustive]
pub struct Entry {
    /// Its stem.
    pub name: &'static str,
    /// Runs it on the processor.
    pub cpu: Run<Cpu>,
    /// Runs it on a device, where its kernels are there.
    pub device: Option<Run<Device>>,
    /// The text of those kernels; another op may share it.
    pub unit: Option<&'static Unit>,
    /// Makes the form of an input that a caller who uses it again keeps.
    pub prepare: Option<Prepare>,
}

impl Entry {
    /// An op that runs on the processor.
    pub const fn new(name: &'static str, cpu: Run<Cpu>) -> Entry {
        Entry { name, cpu, device: None, unit: None, prepare: None }
    }

    /// The same on devices too, by the kernels of `unit`.
    #[must_use]
    pub const fn on_device(self, device: Run<Device>, unit: &'static Unit) -> Entry {
        Entry { device: Some(device), unit: Some(unit), ..self }
    }

    /// The same with a better form of an input.
    #[must_use]
    pub const fn with_prepare(self, prepare: Prepare) -> Entry {
        Entry { prepare: Some(prepare), ..self }
    }
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (device, prepare) = (self.device.is_some(), self.prepare.is_some());
        write!(f, "Entry {{ {}, device: {device}, prepare: {prepare} }}", self.name)
    }
}

/// The tensors and attributes of a call that has been checked: names, dtypes and shapes are those of the op's form.
#[non_exhaustive]
pub struct Arguments<'c, 'a> {
    /// Extents and attributes, with their defaults.
    pub call: &'c Call,
    /// By name.
    pub inputs: &'c [(&'c str, TensorRef<'a>)],
    /// By name; those that the op has taken are gone.
    pub outputs: Vec<(&'c str, TensorMut<'a>)>,
}

impl<'a> Arguments<'_, 'a> {
    /// The op's name.
    pub fn op(&self) -> &'static str {
        self.call.op.name
    }

    /// An input that the form of the op has.
    ///
    /// # Panics
    /// When the form has no such input, or the call left it out.
    pub fn input(&self, name: &str) -> TensorRef<'a> {
        self.optional(name).expect("the call was checked")
    }

    /// An input that may be left out.
    pub fn optional(&self, name: &str) -> Option<TensorRef<'a>> {
        self.inputs.iter().find(|(given, _)| *given == name).map(|(_, tensor)| *tensor)
    }

    /// The integers of an input, which are on the host.
    ///
    /// # Errors
    /// [`Error::Value`] when they are elsewhere or have gaps.
    ///
    /// # Panics
    /// As [`Arguments::input`].
    pub fn integers(&self, name: &str) -> Result<&'a [i32], Error> {
        self.input(name).dense(self.op(), name)
    }

    /// An output, once.
    ///
    /// # Panics
    /// When the form has no such output, or it was taken before.
    pub fn output(&mut self, name: &str) -> TensorMut<'a> {
        let at = self.outputs.iter().position(|(given, _)| *given == name).expect("the call was checked");
        self.outputs.swap_remove(at).1
    }
}

impl fmt::Debug for Arguments<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Arguments of {:?}", self.call)
    }
}

/// Extents of a tensor in the form of its op: further leading axes are one with the first.
fn given_shape(axes: &[&str], shape: &[usize]) -> Vec<usize> {
    if axes.contains(&REST) || axes.is_empty() || shape.len() <= axes.len() {
        return shape.to_vec();
    }
    let (leading, rest) = shape.split_at(shape.len() + 1 - axes.len());
    let first = leading.iter().fold(1usize, |product, &extent| product.saturating_mul(extent));
    [&[first], rest].concat()
}

/// Checks the form of a call and completes its attributes.
pub(crate) fn form(
    op: &str,
    attributes: Attributes,
    inputs: &[(&str, TensorRef)],
    outputs: &[(&str, TensorMut)],
) -> Result<Call, Error> {
    let op = samebits_schema::find(op).ok_or_else(|| Error::Unavailable(format!("no op is called `{op}`")))?;
    let shapes: Vec<Vec<usize>> = inputs
        .iter()
        .map(|(name, tensor)| given_shape(op.input(name).map_or(&[], |input| input.axes), tensor.shape()))
        .collect();
    let given: Vec<Given> = inputs
        .iter()
        .zip(&shapes)
        .map(|((name, tensor), shape)| Given { name, dtype: tensor.dtype(), shape })
        .collect();
    let follows = |name: &str| op.output(name).is_some_and(|output| output.fixed_dtype().is_none());
    let out = outputs.iter().find(|(name, _)| follows(name)).map_or(DType::Fp32, |(_, tensor)| tensor.dtype());
    Ok(samebits_schema::validate(op, &given, attributes, out)?)
}

/// Checks that the tensors of a call are those that its form was made of.
pub(crate) fn fits(call: &Call, inputs: &[(&str, TensorRef)], outputs: &[(&str, TensorMut)]) -> Result<(), Error> {
    Profile::of(call)?;
    let op = call.op;
    let bad = |name: &str, what: String| Err(value_error(op.name, format!("`{name}` {what}")));
    for input in op.inputs {
        let mut found = inputs.iter().filter(|(name, _)| *name == input.name);
        match (call.dtype(input.name), found.next(), found.next()) {
            (None, None, None) => {}
            (Some(dtype), Some((name, tensor)), None) => {
                if tensor.dtype() != dtype {
                    return bad(name, format!("is {}; the call was made for {dtype}", tensor.dtype()));
                }
                if !same_shape(call, input.axes, tensor.shape()) {
                    return bad(name, format!("has shape {:?}, which the call was not made for", tensor.shape()));
                }
            }
            _ => return bad(input.name, "is not given as the call was made".into()),
        }
    }
    for output in op.outputs {
        let mut found = outputs.iter().filter(|(name, _)| *name == output.name);
        let (Some((name, tensor)), None) = (found.next(), found.next()) else {
            return bad(output.name, "is an output and is not given once".into());
        };
        if !same_shape(call, output.axes, tensor.shape()) {
            let expected = call.output_shape(output).unwrap_or_default();
            return bad(name, format!("has shape {:?}; it must be {expected:?}", tensor.shape()));
        }
        // Outputs that follow `out` may differ from one another.
        let dtype = call.output_dtype(output);
        let free = matches!(output.dtype, OutputDType::Out) && tensor.dtype().is_float();
        if tensor.dtype() != dtype && !free {
            return bad(name, format!("is {}; it must be {dtype}", tensor.dtype()));
        }
    }
    let unknown = |name: &str| op.input(name).is_none() && op.output(name).is_none();
    let names = inputs.iter().map(|(name, _)| *name).chain(outputs.iter().map(|(name, _)| *name));
    match names.into_iter().find(|name| unknown(name)) {
        Some(name) => bad(name, "is no tensor of this op".into()),
        None => Ok(()),
    }
}

/// Whether a tensor has the extents that `axes` have in a call; further leading axes count as one with the first.
fn same_shape(call: &Call, axes: &[&str], shape: &[usize]) -> bool {
    if axes.last() == Some(&REST) {
        let (named, rest) = shape.split_at(shape.len().min(axes.len() - 1));
        return rest == call.dims.rest
            && named.iter().zip(axes).all(|(extent, axis)| call.dims.get(axis) == Some(*extent));
    }
    if axes.is_empty() || shape.len() < axes.len() {
        return axes.is_empty() && shape.is_empty();
    }
    let (leading, rest) = shape.split_at(shape.len() + 1 - axes.len());
    let first = leading.iter().try_fold(1usize, |product, &extent| product.checked_mul(extent));
    first == call.dims.get(axes[0])
        && rest.iter().zip(&axes[1..]).all(|(extent, axis)| call.dims.get(axis) == Some(*extent))
}

/// Where tensors are and ops run: [`Cpu`] or [`Device`].
pub trait Backend {
    /// A tensor of any elements, to be written over.
    ///
    /// # Errors
    /// [`Error::Memory`] when there is no room for it.
    fn empty(&self, dtype: DType, shape: &[usize]) -> Result<Tensor, Error>;

    /// A copy of a tensor that is on the host.
    ///
    /// # Errors
    /// As [`Backend::empty`]; [`Error::Value`] when it is elsewhere or has gaps; those of a device.
    fn upload(&self, host: TensorRef) -> Result<Tensor, Error>;

    /// A copy on the host of a tensor that is here, once what was started before has ended.
    ///
    /// # Errors
    /// As [`Backend::upload`].
    fn download(&self, tensor: TensorRef) -> Result<Tensor, Error>;

    /// Records what `work` starts instead of running it, to be replayed. `None`, and `work` is not begun, where ops run
    /// as they are called.
    ///
    /// # Errors
    /// As [`Device::capture`].
    fn capture(&self, work: &mut dyn FnMut() -> Result<(), Error>) -> Result<Option<Graph>, Error>;

    /// Runs what was recorded.
    ///
    /// # Errors
    /// As [`Device::replay`].
    fn replay(&self, graph: &Graph) -> Result<(), Error>;

    /// Runs `op` with its tensors by name, as `samebits schema` lists them. Tensors with more axes than the form of the
    /// op has are taken as if their leading axes were one.
    ///
    /// Outputs are whole and in row-major order. The weight of a product may be a [`TensorRef::packed`] one, positions
    /// a [`TensorRef::angles`].
    ///
    /// # Errors
    /// [`Error::Value`] that names the tensor, attribute or axis and the fix; the errors of the op.
    ///
    /// ```
    /// use samebits_ops::{Attributes, Backend, Cpu, TensorMut, TensorRef};
    ///
    /// // The second of three fused heads: rows with a stride, read where they stand.
    /// let fused = [9.0f32, 9.0, 3.0, 4.0, 9.0, 9.0, 9.0, 9.0, 6.0, 8.0, 9.0, 9.0];
    /// let head = TensorRef::strided(&fused[2..], &[2, 2], &[6, 1])?;
    /// let (w, mut y) = ([1.0f32, 1.0], [0.0f32; 4]);
    /// Cpu::best().call(
    ///     "rms_norm",
    ///     Attributes::new().with("eps", 0.0),
    ///     &[("x", head), ("w", TensorRef::new(&w, &[2])?)],
    ///     vec![("y", TensorMut::new(&mut y, &[2, 2])?)],
    /// )?;
    /// assert_eq!(y[..2], y[2..]);
    /// # Ok::<(), samebits_ops::Error>(())
    /// ```
    fn call(
        &self,
        op: &str,
        attributes: Attributes,
        inputs: &[(&str, TensorRef)],
        outputs: Vec<(&str, TensorMut)>,
    ) -> Result<(), Error> {
        let call = form(op, attributes, inputs, &outputs)?;
        self.run(&call, inputs, outputs)
    }

    /// [`Backend::call`] again, with tensors of the same form: what was checked is not checked again.
    ///
    /// # Errors
    /// As [`Backend::call`].
    fn run(&self, call: &Call, inputs: &[(&str, TensorRef)], outputs: Vec<(&str, TensorMut)>) -> Result<(), Error>;

    /// What a caller who repeats a call keeps of its inputs, and gives in the place of one from then on; `None` where
    /// the op has no better form of any. The bits are the same.
    ///
    /// # Errors
    /// As [`Backend::call`]; [`Error::Memory`].
    fn prepare(&self, call: &Call, inputs: &[(&str, TensorRef)]) -> Result<Option<Prepared>, Error>;
}
