//! A call of an op from Python: arguments by place and by name, outputs made or given, the interpreter's lock released.

use crate::cpu;
use crate::cuda::{Operand, Place};
use crate::dlpack::{Refusal, View};
use crate::library::{Library, parse_dtype};
use pyo3::exceptions::{PyMemoryError, PyNotImplementedError, PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyString, PyTuple};
use samebits_ops::{Attributes, Backend, DType, Error, TensorMut, TensorRef, ask_for_huge_pages, bf16, f16};
use samebits_schema::{Call, Given, Input, Kind, Op, OutputDType, REST, Value, validate};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::slice::from_raw_parts_mut;

/// An output of so many bytes has memory that the system has just handed out; what is smaller may have been in use before. The C
/// library maps at least all above it alone.
const FRESH: usize = 32 << 20;

/// An error of the ops as an exception with the same line.
pub fn exception(error: Error) -> PyErr {
    let line = error.to_string();
    match error {
        Error::Memory { .. } | Error::Budget { .. } => PyMemoryError::new_err(line),
        Error::Unavailable(_) => PyNotImplementedError::new_err(line),
        Error::Device(_) | Error::Compile { .. } | Error::Forbidden { .. } => PyRuntimeError::new_err(line),
        _ => PyValueError::new_err(line),
    }
}

fn refused(op: &Op, name: &str, allowed: &str, refusal: Refusal) -> PyErr {
    refusal_of(op.name, name, allowed, refusal)
}

/// Why a tensor `name` cannot be used by `what`, as an exception.
pub fn refusal_of(what: &str, name: &str, allowed: &str, refusal: Refusal) -> PyErr {
    match refusal {
        Refusal::Value(why) => PyValueError::new_err(format!("{what}: `{name}` {why}")),
        Refusal::DType(found) => {
            PyValueError::new_err(format!("{what}: `{name}`: dtype is {found}; it must be {allowed}"))
        }
        Refusal::Unsupported(why) => PyNotImplementedError::new_err(format!("{what}: `{name}` {why}")),
        Refusal::Type(why) => PyTypeError::new_err(format!("{what}: `{name}` {why}")),
        Refusal::Python(error) => error,
    }
}

/// The inputs of `op` in the order of its function's parameters: those that must be given, then the others.
pub fn parameters(op: &'static Op) -> Vec<&'static Input> {
    let (optional, required): (Vec<_>, Vec<_>) = op.inputs.iter().partition(|input| input.optional);
    [required, optional].concat()
}

/// An op as a function.
pub struct Function {
    op: &'static Op,
    parameters: Vec<&'static Input>,
    /// Whether it is a kernel of torch's: gradients are the caller's matter, and what lies in a way that the op does not take
    /// is copied.
    kernel: bool,
}

/// An input that was given.
struct Argument<'py> {
    input: &'static Input,
    object: Bound<'py, PyAny>,
    library: Library,
}

impl Function {
    /// The function of `op`; `kernel`: for torch to call.
    pub fn new(op: &'static Op, kernel: bool) -> Function {
        Function { op, parameters: parameters(op), kernel }
    }

    /// Runs the op: inputs by place or name, attributes, `dtype` and `into` by name.
    pub fn call<'py>(
        &self,
        args: &Bound<'py, PyTuple>,
        kwargs: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let op = self.op;
        let mut given: Vec<Option<Bound<'py, PyAny>>> = vec![None; self.parameters.len()];
        if args.len() > given.len() {
            let most = format!("{}() takes {} tensors by place, {} were given", op.name, given.len(), args.len());
            return Err(PyTypeError::new_err(most));
        }
        for (place, value) in given.iter_mut().zip(args.iter_borrowed()) {
            *place = (!value.is_none()).then(|| value.to_owned());
        }
        let (mut attributes, mut dtype, mut into) = (Attributes::new(), None, None);
        for (key, value) in kwargs.into_iter().flatten() {
            let key = key.cast_into::<PyString>()?;
            let key = key.to_str()?;
            if let Some(at) = self.parameters.iter().position(|input| input.name == key) {
                if at < args.len() {
                    return Err(PyTypeError::new_err(format!("{}() got `{key}` twice", op.name)));
                }
                given[at] = (!value.is_none()).then_some(value);
            } else if value.is_none() {
                if !["dtype", "into"].contains(&key) && op.attribute(key).is_none() {
                    return Err(self.unknown(key));
                }
            } else if key == "dtype" {
                dtype = Some(parse_dtype(&value)?);
            } else if key == "into" && !self.kernel {
                into = Some(value);
            } else if let Some(attribute) = op.attribute(key) {
                attributes = attributes.with(key, value_of(attribute.kind, &value)?);
            } else {
                return Err(self.unknown(key));
            }
        }
        let mut arguments = Vec::with_capacity(given.len());
        for (&input, object) in self.parameters.iter().zip(given) {
            match object {
                Some(object) => {
                    let library = Library::of(&object)?;
                    arguments.push(Argument { input, object, library });
                }
                None if input.optional => {}
                None => {
                    let form = input.form();
                    let line = format!("{}: input `{}`: missing; the op needs it as {form}", op.name, input.name);
                    return Err(PyTypeError::new_err(line));
                }
            }
        }
        if self.kernel {
            for argument in &mut arguments {
                if !ends_contiguous(&argument.object)? {
                    argument.object = argument.object.call_method0("contiguous")?;
                }
            }
            // Nothing is written where an op refuses.
            match self.run(&arguments, attributes.clone(), dtype, None) {
                Err(error) if error.is_instance_of::<PyValueError>(args.py()) => {
                    let mut copied = false;
                    for argument in &mut arguments {
                        if !argument.object.call_method0("is_contiguous")?.is_truthy()? {
                            argument.object = argument.object.call_method0("contiguous")?;
                            copied = true;
                        } else if misaligned(&argument.object)? {
                            argument.object = argument.object.call_method0("clone")?;
                            copied = true;
                        }
                    }
                    if copied { self.run(&arguments, attributes, dtype, None) } else { Err(error) }
                }
                done => done,
            }
        } else {
            self.run(&arguments, attributes, dtype, into)
        }
    }

    fn unknown(&self, key: &str) -> PyErr {
        let op = self.op;
        let inputs = self.parameters.iter().map(|input| input.name);
        let own = if self.kernel { &["dtype"][..] } else { &["dtype", "into"] };
        let known: Vec<_> =
            inputs.chain(op.attributes().map(|attribute| attribute.name)).chain(own.iter().copied()).collect();
        PyTypeError::new_err(format!("{}() has no parameter `{key}`; it takes {}", op.name, known.join(", ")))
    }

    fn run<'py>(
        &self,
        arguments: &[Argument<'py>],
        attributes: Attributes,
        dtype: Option<DType>,
        into: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let op = self.op;
        let first = arguments.first().expect("every op has an input that must be given");
        let (py, library) = (first.object.py(), first.library);
        let mut views = Vec::with_capacity(arguments.len());
        for Argument { input, object, library } in arguments {
            let view = library.view(object, self.kernel).and_then(|view| {
                let (extent, stride) = (view.shape().last(), view.strides().last());
                match (extent, stride) {
                    (Some(&extent), Some(&stride)) if extent > 1 && stride != 1 && view.reach() > 0 => {
                        Err(Refusal::Value(format!(
                            "has stride {stride} on its last axis; it must be contiguous there, give a contiguous copy"
                        )))
                    }
                    _ => Ok(view),
                }
            });
            views.push(view.map_err(|refusal| refused(op, input.name, &input.dtype_names(), refusal))?);
        }
        let forms: Vec<_> = arguments.iter().zip(&views).map(|(a, view)| (a.input, view.dtype, view.shape())).collect();

        let made = into.is_none();
        let objects: Vec<Bound<'py, PyAny>> = match into {
            None => Vec::new(),
            Some(one) if op.outputs.len() == 1 && !one.is_instance_of::<PyTuple>() => vec![one],
            Some(all) => all.try_iter()?.collect::<PyResult<_>>()?,
        };
        let mut targets = Vec::with_capacity(op.outputs.len());
        if !made && objects.len() != op.outputs.len() {
            let names: Vec<_> = op.outputs.iter().map(|output| output.name).collect();
            let line = format!("{}: `into` has {} tensors; give {}", op.name, objects.len(), names.join(", "));
            return Err(PyValueError::new_err(line));
        }
        for (output, object) in op.outputs.iter().zip(&objects) {
            targets.push(self.target(output.name, object, Library::of(object)?)?);
        }
        let follows = |output: &OutputDType| !matches!(output, OutputDType::Fixed(_));
        let written = op.outputs.iter().zip(&targets).find(|(output, _)| follows(&output.dtype));
        let out = written.map(|(_, view)| view.dtype).or(dtype).unwrap_or_else(|| default_dtype(&forms));
        let call = check(op, &forms, attributes, out).map_err(exception)?;
        let on = self.gpu(arguments, &views, &objects, &targets)?;
        let mut outputs = objects;
        if made {
            for (output, shape, dtype) in shapes(&call, &forms) {
                let object = match on {
                    None => library.empty(py, dtype, &shape)?,
                    Some((_, at)) => arguments[at].library.empty_beside(&arguments[at].object, dtype, &shape)?,
                };
                let kind = Library::of(&object)?;
                let target = self.target(output, &object, kind)?;
                self.look_at(output, &target, on.map(|(id, _)| id), None)?;
                if on.is_none() && target.bytes().len() >= FRESH {
                    // SAFETY: memory of the tensor just made, which nobody else has.
                    ask_for_huge_pages::<u8>(unsafe { from_raw_parts_mut(target.data.cast(), target.bytes().len()) });
                }
                targets.push(target);
                outputs.push(object);
            }
        }
        apart(op, arguments, &views, &targets)?;
        if let Some((id, at)) = on {
            self.start(id, arguments[at].library, &call, arguments, &views, &targets)?;
            return returned(py, outputs);
        }

        let mut inputs = Vec::with_capacity(views.len());
        for (argument, view) in arguments.iter().zip(&views) {
            // SAFETY: the view is of memory that stays while it lives, aligned and as long as its shape and strides reach;
            // no output of this call overlaps it.
            inputs.push((argument.input.name, unsafe { tensor(view) }.map_err(exception)?));
        }
        let mut written = Vec::with_capacity(targets.len());
        for (output, view) in op.outputs.iter().zip(&targets) {
            // SAFETY: as above; it is in row-major order, may be written, and overlaps nothing of this call.
            written.push((output.name, unsafe { tensor_mut(view) }.map_err(exception)?));
        }
        let cpu = cpu::current();
        let done = py.detach(move || catch_unwind(AssertUnwindSafe(|| cpu.run(&call, &inputs, written))));
        match done {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return Err(exception(error)),
            Err(payload) => return Err(panicked(op.name, payload.as_ref())),
        }
        if made {
            for output in &mut outputs {
                *output = library.finish(&first.object, output.clone())?;
            }
        }
        returned(py, outputs)
    }

    /// The GPU that a call runs on and the first input there; `None` for the host. All floats and outputs are in one place,
    /// on a GPU of one library; integers, which are looked at on the host, may be there.
    fn gpu(
        &self,
        arguments: &[Argument],
        views: &[View],
        objects: &[Bound<'_, PyAny>],
        targets: &[View],
    ) -> PyResult<Option<(i32, usize)>> {
        let first = views.iter().position(|view| view.gpu.is_some());
        let gpu = first.and_then(|at| views[at].gpu);
        for (Argument { input, library, .. }, view) in arguments.iter().zip(views) {
            if view.gpu.is_some() || view.dtype.is_float() {
                self.look_at(input.name, view, gpu, first.map(|at| (arguments[at].library, *library)))?;
            }
        }
        for ((output, view), object) in self.op.outputs.iter().zip(targets).zip(objects) {
            let libraries = first.map(|at| PyResult::Ok((arguments[at].library, Library::of(object)?))).transpose()?;
            self.look_at(output.name, view, gpu, libraries)?;
        }
        Ok(gpu.zip(first))
    }

    /// Refuses a tensor that is not where the call is, or not as the kernels of a GPU read it.
    fn look_at(
        &self,
        name: &str,
        view: &View,
        gpu: Option<i32>,
        libraries: Option<(Library, Library)>,
    ) -> PyResult<()> {
        let place = |gpu: Option<i32>| gpu.map_or("the host".into(), |id| format!("cuda:{id}"));
        let what = if view.gpu != gpu {
            format!("is on {}, other tensors on {}; give all of them in one place", place(view.gpu), place(gpu))
        } else if libraries.is_some_and(|(first, this)| first.waits() != this.waits()) {
            "is of another library; on a GPU all tensors are torch's, or none".into()
        } else if gpu.is_some() && !view.is_contiguous() {
            "has gaps or another order of axes; kernels of a GPU need row-major order, give x.contiguous()".into()
        } else {
            return Ok(());
        };
        Err(PyValueError::new_err(format!("{}: `{name}` {what}", self.op.name)))
    }

    /// Starts a call on GPU `id`, where `library` computes.
    fn start(
        &self,
        id: i32,
        library: Library,
        call: &Call,
        arguments: &[Argument],
        views: &[View],
        targets: &[View],
    ) -> PyResult<()> {
        let (op, py) = (self.op, arguments[0].object.py());
        let stream = library.stream(py, id)?;
        let named = |error: Error| match error {
            Error::Unavailable(why) => {
                PyNotImplementedError::new_err(format!("{}: cannot run on cuda:{id}: {why}", op.name))
            }
            Error::Device(why) => PyRuntimeError::new_err(format!("{}: cuda:{id}: {why}", op.name)),
            error => exception(error),
        };
        let place = Place::new(id, stream).map_err(named)?;
        let mut inputs = Vec::with_capacity(views.len());
        for (argument, view) in arguments.iter().zip(views) {
            // SAFETY: the view is of memory that stays while it lives, aligned and as long as its shape and strides reach;
            // no output of this call overlaps it.
            inputs.push((argument.input.name, unsafe { Operand::of(view) }.map_err(exception)?));
        }
        let mut outputs = Vec::with_capacity(targets.len());
        for (output, view) in op.outputs.iter().zip(targets) {
            // SAFETY: it is on a GPU.
            outputs.push((output.name, unsafe { Operand::of(view) }.map_err(exception)?));
        }
        let budget = cpu::current().budget();
        let wait = library.waits();
        let start = || {
            // SAFETY: the stream is the one on which the library computes now. What `View` has looked at is aligned, `look_at`
            // that it has no gaps and is of this GPU, `apart` that outputs overlap nothing. It is live while the views are,
            // and then until the stream is behind it: torch gives memory to others in the order of the stream, and what is
            // of other libraries is waited for.
            unsafe { place.start(call, &inputs, &outputs, budget, wait) }
        };
        match py.detach(|| catch_unwind(AssertUnwindSafe(start))) {
            Ok(done) => done.map_err(named),
            Err(payload) => Err(panicked(op.name, payload.as_ref())),
        }
    }

    /// An output that was given or made: in row-major order, and to be written.
    fn target(&self, name: &str, object: &Bound<'_, PyAny>, library: Library) -> PyResult<View> {
        let allowed = "bf16, fp16, fp32 or i32";
        let view = library.view(object, self.kernel).map_err(|refusal| refused(self.op, name, allowed, refusal))?;
        let why = if view.read_only {
            "is read-only; give a tensor that may be written"
        } else if view.copied {
            "is lent as a copy; give a tensor that may be written in place"
        } else if !view.is_contiguous() {
            "has gaps or another order of axes; outputs are in row-major order"
        } else {
            return Ok(view);
        };
        Err(PyValueError::new_err(format!("{}: `{name}` {why}", self.op.name)))
    }
}

/// What a function returns: an output, or a tuple of several.
fn returned<'py>(py: Python<'py>, mut outputs: Vec<Bound<'py, PyAny>>) -> PyResult<Bound<'py, PyAny>> {
    match outputs.len() {
        1 => Ok(outputs.remove(0)),
        _ => Ok(PyTuple::new(py, outputs)?.into_any()),
    }
}

/// A panic of the ops, which is a fault of theirs, as an exception.
pub fn panicked(op: &str, payload: &(dyn std::any::Any + Send)) -> PyErr {
    let what = payload.downcast_ref::<String>().map(String::as_str).or(payload.downcast_ref::<&str>().copied());
    PyRuntimeError::new_err(format!("{op}: panicked, which is a fault of samebits: {}", what.unwrap_or("no message")))
}

/// Whether the last axis of a torch tensor is contiguous.
fn ends_contiguous(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    let stride = object.call_method0("stride")?;
    let stride = stride.cast::<PyTuple>()?;
    match stride.len() {
        0 => Ok(true),
        rank => Ok(stride.get_item(rank - 1)?.extract::<i64>()? == 1),
    }
}

/// Whether a torch tensor begins where a kernel of a GPU does not read.
fn misaligned(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    Ok(!object.call_method0("data_ptr")?.extract::<usize>()?.is_multiple_of(16))
}

/// A value as the schema has it; what is of another kind stays as it reads, and the schema refuses it.
pub fn value_of(kind: Kind, value: &Bound<'_, PyAny>) -> PyResult<Value> {
    let number = value.is_instance_of::<PyInt>() && !value.is_instance_of::<PyBool>();
    Ok(match kind {
        Kind::Count(_) if number => match value.extract::<usize>() {
            Ok(count) => Value::Count(count),
            Err(_) => Value::Word(value.str()?.to_str()?.to_string()),
        },
        Kind::Float(..) if number || value.is_instance_of::<PyFloat>() => Value::Float(value.extract()?),
        Kind::Flag if value.is_instance_of::<PyBool>() => Value::Flag(value.extract()?),
        Kind::Flag if number => match value.extract::<i64>() {
            Ok(flag @ 0..=1) => Value::Flag(flag == 1),
            _ => Value::Word(value.str()?.to_str()?.to_string()),
        },
        _ => Value::Word(value.str()?.to_str()?.to_string()),
    })
}

/// The form of an input of a call.
pub type Form<'f> = (&'static Input, DType, &'f [usize]);

/// The dtype of outputs that none was asked for: that of the first floats.
pub fn default_dtype(forms: &[Form]) -> DType {
    forms.iter().find(|(.., dtype, _)| dtype.is_float()).map_or(DType::Fp32, |(_, dtype, _)| *dtype)
}

/// Checks the form of a call. Tensors with more axes than the form of the op has are taken as if their leading axes were
/// one.
pub fn check(op: &'static Op, forms: &[Form], attributes: Attributes, out: DType) -> Result<Call, Error> {
    let shapes: Vec<Vec<usize>> = forms
        .iter()
        .map(|(input, _, shape)| match leading(input.axes, shape) {
            Some(leading) => {
                let first = leading.iter().fold(1usize, |product, &extent| product.saturating_mul(extent));
                [&[first], &shape[leading.len()..]].concat()
            }
            None => shape.to_vec(),
        })
        .collect();
    let given: Vec<Given> = forms
        .iter()
        .zip(&shapes)
        .map(|((input, dtype, _), shape)| Given { name: input.name, dtype: *dtype, shape })
        .collect();
    Ok(validate(op, &given, attributes, out)?)
}

/// The axes of `shape` that are taken as the first of `axes`, where they are several.
fn leading<'s>(axes: &[&str], shape: &'s [usize]) -> Option<&'s [usize]> {
    let several = !axes.is_empty() && axes.last() != Some(&REST) && shape.len() > axes.len();
    several.then(|| &shape[..shape.len() + 1 - axes.len()])
}

/// Name, shape and dtype of the outputs of a call. Where an input has several axes for the first one of an output, so has
/// the output.
pub fn shapes(call: &Call, forms: &[Form]) -> Vec<(&'static str, Vec<usize>, DType)> {
    let outputs = call.op.outputs.iter().zip(call.outputs());
    outputs
        .map(|(output, form)| {
            let several = forms.iter().filter(|(input, ..)| input.axes.first() == output.axes.first());
            let shape = match several.filter_map(|(input, _, shape)| leading(input.axes, shape)).next() {
                Some(leading) => [leading, &form.shape[1..]].concat(),
                None => form.shape,
            };
            (output.name, shape, form.dtype)
        })
        .collect()
}

/// Refuses outputs that overlap an input or one another.
fn apart(op: &Op, arguments: &[Argument], views: &[View], targets: &[View]) -> PyResult<()> {
    let inputs = arguments.iter().map(|argument| argument.input.name).zip(views);
    let outputs = op.outputs.iter().map(|output| output.name).zip(targets);
    let all: Vec<_> = inputs.chain(outputs).map(|(name, view)| (name, view.bytes())).collect();
    for (at, (name, bytes)) in all.iter().enumerate().skip(views.len()) {
        for (other, taken) in &all[..at] {
            if bytes.start < taken.end && taken.start < bytes.end {
                let line = format!("{}: output `{name}` overlaps `{other}`; give it memory of its own", op.name);
                return Err(PyValueError::new_err(line));
            }
        }
    }
    Ok(())
}

/// Runs an expression for the type of a dtype.
macro_rules! typed {
    ($dtype:expr => $type:ident, $run:expr) => {
        match $dtype {
            DType::Bf16 => {
                type $type = bf16;
                $run
            }
            DType::Fp16 => {
                type $type = f16;
                $run
            }
            DType::Fp32 => {
                type $type = f32;
                $run
            }
            DType::I32 => {
                type $type = i32;
                $run
            }
        }
    };
}
pub(crate) use typed;

/// # Safety
/// What `view` reaches can be read and is not written while the tensor is used.
pub unsafe fn tensor(view: &View) -> Result<TensorRef<'_>, Error> {
    typed!(view.dtype => T, {
        // SAFETY: as the caller promises; `View` has looked at the alignment.
        let data = unsafe { std::slice::from_raw_parts(view.data.cast::<T>(), view.reach()) };
        TensorRef::strided(data, view.shape(), view.strides())
    })
}

/// # Safety
/// What `view` reaches can be written and is nobody else's while the tensor is used.
unsafe fn tensor_mut(view: &View) -> Result<TensorMut<'_>, Error> {
    typed!(view.dtype => T, {
        // SAFETY: as the caller promises; `View` has looked at the alignment.
        let data = unsafe { from_raw_parts_mut(view.data.cast::<T>(), view.reach()) };
        TensorMut::new(data, view.shape())
    })
}
