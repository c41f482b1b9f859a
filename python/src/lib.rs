//! The extension module `samebits._native`: every op of the schema as a function over tensors of any library, and the
//! command. A new op needs nothing here.

mod call;
mod cpu;
mod cuda;
mod dlpack;
mod engine;
mod library;
mod mismatch;
mod model;
mod tensor;
mod text;
mod threads;

use call::{Form, Function, exception};
use pyo3::exceptions::{PyKeyError, PyNotImplementedError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyCFunction, PyDict, PyList};
use samebits_contract::axis;
use samebits_contract::table::Contract;
use samebits_ops::{Attributes, DType};
use samebits_schema::{Attribute, DefaultValue, Extent, Kind, OPS, Op, OutputDType, find, sample as samples};
use std::ffi::{CString, OsString};
use std::path::PathBuf;

/// The ops that a function makes sense of: all but those of whole models.
fn offered() -> impl Iterator<Item = &'static Op> {
    OPS.iter().copied().filter(|op| !op.needs_more())
}

fn op(name: &str) -> PyResult<&'static Op> {
    let found = find(name).filter(|op| !op.needs_more());
    found.ok_or_else(|| PyKeyError::new_err(format!("no op is called `{name}`")))
}

/// The functions by name; `kernel`: for torch to call.
fn functions<'py>(py: Python<'py>, kernel: bool) -> PyResult<Bound<'py, PyDict>> {
    let all = PyDict::new(py);
    for op in offered() {
        let doc = format!("{}({})\n--\n\n{}", op.name, text::signature(op), text::docstring(op));
        // They live as long as the process, like the functions.
        let leak = |text: String| Box::leak(CString::new(text).expect("no zero stands in it").into_boxed_c_str());
        let (name, doc) = (&*leak(op.name.to_string()), &*leak(doc));
        let function = Function::new(op, kernel);
        let function = PyCFunction::new_closure(py, Some(name), Some(doc), move |args, kwargs| {
            function.call(args, kwargs).map(Bound::unbind)
        })?;
        all.set_item(op.name, function)?;
    }
    Ok(all)
}

/// Every op as a function over tensors.
#[pyfunction]
fn ops<'py>(py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
    functions(py, false)
}

/// Every op as a kernel of torch: what lies in a way that the op does not take is copied, gradients are not looked at.
#[pyfunction]
fn kernels<'py>(py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
    functions(py, true)
}

/// The form of every op, in the order of the schema; inputs in the order of parameters.
#[pyfunction]
fn schema<'py>(py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
    let list = PyList::empty(py);
    for op in offered() {
        let object = PyDict::new(py);
        object.set_item("name", op.name)?;
        object.set_item("doc", text::docstring(op))?;
        object.set_item("gradient_of", op.gradient_of)?;
        let inputs = PyList::empty(py);
        for input in call::parameters(op) {
            let each = PyDict::new(py);
            each.set_item("name", input.name)?;
            each.set_item("axes", input.axes)?;
            each.set_item("role", input.role.name())?;
            each.set_item("group", input.group)?;
            each.set_item("dtypes", input.dtypes.iter().map(|&d| text::dtype_name(d)).collect::<Vec<_>>())?;
            each.set_item("optional", input.optional)?;
            inputs.append(each)?;
        }
        object.set_item("inputs", inputs)?;
        let attributes = PyList::empty(py);
        for attribute in op.attributes() {
            let each = PyDict::new(py);
            each.set_item("name", attribute.name)?;
            each.set_item("kind", attribute.kind.name())?;
            each.set_item("default", default_object(py, attribute)?)?;
            attributes.append(each)?;
        }
        object.set_item("attributes", attributes)?;
        let outputs = PyList::empty(py);
        for output in op.outputs {
            let each = PyDict::new(py);
            each.set_item("name", output.name)?;
            each.set_item("axes", output.axes)?;
            each.set_item("dtype", output.fixed_dtype().map(text::dtype_name))?;
            each.set_item("partial", matches!(output.dtype, OutputDType::OutOrFp32(_)))?;
            outputs.append(each)?;
        }
        object.set_item("outputs", outputs)?;
        let follow = op.extents.iter().filter_map(|(axis, extent)| match extent {
            Extent::Of(formula, _) => Some((*axis, *formula)),
            _ => None,
        });
        object.set_item("extents", follow.collect::<Vec<_>>())?;
        list.append(object)?;
    }
    Ok(list)
}

fn default_object<'py>(py: Python<'py>, attribute: &Attribute) -> PyResult<Bound<'py, PyAny>> {
    let DefaultValue::Is(text) = attribute.default else { return Ok(py.None().into_bound(py)) };
    Ok(match attribute.kind {
        Kind::Count(_) => text.parse::<usize>()?.into_pyobject(py)?.into_any(),
        Kind::Float(..) => text.parse::<f64>()?.into_pyobject(py)?.into_any(),
        Kind::Flag => (text == "1").into_pyobject(py)?.to_owned().into_any(),
        _ => text.into_pyobject(py)?.into_any(),
    })
}

fn attributes_of(op: &Op, given: &Bound<'_, PyDict>) -> PyResult<Attributes> {
    let mut attributes = Attributes::new();
    for (key, value) in given {
        let key: String = key.extract()?;
        if value.is_none() {
            continue;
        }
        let kind = op.attribute(&key).map_or(Kind::Text, |attribute| attribute.kind);
        attributes = attributes.with(&key, call::value_of(kind, &value)?);
    }
    Ok(attributes)
}

/// Shape and dtype of the outputs of a call: `inputs` are (name, dtype, shape) in the order of parameters.
#[pyfunction]
#[pyo3(signature = (name, inputs, attributes, dtype = None))]
fn forms(
    name: &str,
    inputs: Vec<(String, String, Vec<usize>)>,
    attributes: &Bound<'_, PyDict>,
    dtype: Option<&Bound<'_, PyAny>>,
) -> PyResult<Vec<(Vec<usize>, &'static str)>> {
    let op = op(name)?;
    let mut given: Vec<Form> = Vec::new();
    for (name, dtype, shape) in &inputs {
        let input = op.input(name).ok_or_else(|| PyKeyError::new_err(name.clone()))?;
        let dtype =
            [DType::Bf16, DType::Fp16, DType::Fp32, DType::I32].into_iter().find(|d| text::dtype_name(*d) == dtype);
        let Some(dtype) = dtype else {
            let found = &inputs.iter().find(|given| given.0 == *name).expect("it is one of them").1;
            let line = format!("{}: `{name}`: dtype is {found}; it must be {}", op.name, input.dtype_names());
            return Err(PyValueError::new_err(line));
        };
        given.push((input, dtype, shape));
    }
    let out = match dtype {
        Some(dtype) => library::parse_dtype(dtype)?,
        None => call::default_dtype(&given),
    };
    let checked = call::check(op, &given, attributes_of(op, attributes)?, out).map_err(exception)?;
    let outputs = call::shapes(&checked, &given).into_iter();
    Ok(outputs.map(|(_, shape, dtype)| (shape, text::dtype_name(dtype))).collect())
}

/// A random call of an op that it accepts, for tests: inputs as (name, dtype, shape, integers or None), attributes, and the
/// dtype of outputs.
#[pyfunction]
#[allow(clippy::type_complexity)]
fn sample<'py>(
    py: Python<'py>,
    name: &str,
    seed: u64,
) -> PyResult<(Vec<(&'static str, &'static str, Vec<usize>, Option<Vec<i32>>)>, Bound<'py, PyDict>, &'static str)> {
    let op = op(name)?;
    let mut random = samples::Random::new(seed);
    // Calls whose integers have nothing to name are drawn again: an op refuses them.
    for _ in 0..1000 {
        let drawn = samples::sample(op, &mut random);
        let mut inputs = Vec::new();
        for input in call::parameters(op) {
            let Some((_, dtype, shape)) = drawn.inputs.iter().find(|(name, ..)| *name == input.name) else { continue };
            let count = shape.iter().product();
            let integers = (!dtype.is_float()).then(|| samples::integers(&drawn.call, input.holds, count, &mut random));
            inputs.push((input.name, text::dtype_name(*dtype), shape.clone(), integers));
        }
        let integers = |name: &str| inputs.iter().find(|input| input.0 == name).and_then(|input| input.3.as_deref());
        if samebits_schema::check_indexes(&drawn.call, integers).is_err() {
            continue;
        }
        let attributes = PyDict::new(py);
        for (name, value) in &drawn.attributes {
            let attribute = op.attribute(name).expect("it was drawn from them");
            match attribute.kind {
                Kind::Count(_) => attributes.set_item(name, value.parse::<usize>()?)?,
                Kind::Float(..) => attributes.set_item(name, value.parse::<f64>()?)?,
                Kind::Flag => attributes.set_item(name, ["1", "true"].contains(&value.as_str()))?,
                _ => attributes.set_item(name, value)?,
            }
        }
        return Ok((inputs, attributes, text::dtype_name(drawn.call.out)));
    }
    Err(PyValueError::new_err(format!("{name}: a thousand draws are refused")))
}

/// The axes of invariance that the contract asks of an op.
#[pyfunction]
fn axes(name: &str) -> PyResult<Vec<&'static str>> {
    let op = op(name)?;
    let contract = Contract::load(None).map_err(|e| PyValueError::new_err(e.to_string()))?;
    let rows = || contract.rows().iter().filter(|row| row.op == op.name);
    let asked = axis::all().iter().filter(|axis| rows().any(|row| row.invariant.contains(&axis.name)));
    Ok(asked.map(|axis| axis.name).collect())
}

/// The stub of `samebits.ops`.
#[pyfunction]
fn stubs() -> String {
    text::stubs(&offered().collect::<Vec<_>>())
}

/// Runs the command `samebits`, once in the life of a process: its exit code.
#[pyfunction]
fn command(py: Python<'_>, program: PathBuf, arguments: Vec<OsString>, repository: Option<PathBuf>) -> PyResult<u8> {
    static BEGUN: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);
    if BEGUN.swap(true, std::sync::atomic::Ordering::Relaxed) {
        return Err(PyNotImplementedError::new_err("a process runs the command once; start another one"));
    }
    let called = samebits_harness::command::Called { program, arguments, repository };
    // A panic has said what it is; 101 is what it ends a program with.
    let run = std::panic::AssertUnwindSafe(|| samebits_harness::command::called(called));
    Ok(py.detach(|| std::panic::catch_unwind(run).unwrap_or(101)))
}

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<tensor::Tensor>()?;
    module.add_class::<cpu::Cpu>()?;
    module.add_class::<engine::Engine>()?;
    module.add_class::<model::Model>()?;
    module.add_class::<model::Accumulator>()?;
    module.add_class::<model::Forward>()?;
    module.add_function(wrap_pyfunction!(cpu::get_cpu, module)?)?;
    module.add_function(wrap_pyfunction!(cpu::set_cpu, module)?)?;
    module.add_function(wrap_pyfunction!(cpu::after_fork, module)?)?;
    module.add_function(wrap_pyfunction!(threads::share_threads, module)?)?;
    module.add_function(wrap_pyfunction!(ops, module)?)?;
    module.add_function(wrap_pyfunction!(kernels, module)?)?;
    module.add_function(wrap_pyfunction!(schema, module)?)?;
    module.add_function(wrap_pyfunction!(forms, module)?)?;
    module.add_function(wrap_pyfunction!(sample, module)?)?;
    module.add_function(wrap_pyfunction!(axes, module)?)?;
    module.add_function(wrap_pyfunction!(stubs, module)?)?;
    module.add_function(wrap_pyfunction!(command, module)?)?;
    module.add_function(wrap_pyfunction!(mismatch::mismatch, module)?)?;
    module.add_function(wrap_pyfunction!(mismatch::thresholds_of, module)?)?;
    module.add_function(wrap_pyfunction!(model::read_folder, module)?)?;
    module.add_function(wrap_pyfunction!(model::folder_files, module)?)?;
    module.add_function(wrap_pyfunction!(model::config_text, module)?)?;
    module.add_function(wrap_pyfunction!(model::family, module)?)?;
    module.add_function(wrap_pyfunction!(model::sequences_of_group, module)?)?;
    module.add_function(wrap_pyfunction!(model::save, module)?)?;
    module.add_function(wrap_pyfunction!(model::join, module)?)?;
    Ok(())
}
