//! The libraries whose tensors come in: which one an object is of, how it lends its memory, and how it makes outputs.

use crate::cuda::DEFAULT_STREAM;
use crate::dlpack::{Exchange, Refusal, View};
use crate::tensor::{Storage, Tensor};
use pyo3::exceptions::{PyImportError, PyMemoryError, PyNotImplementedError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyString, PyTuple, PyType};
use samebits_ops::DType;
use std::sync::{Arc, Mutex};

/// The library of a tensor.
#[derive(Clone, Copy, PartialEq)]
pub enum Library {
    /// torch, its own tensors and parameters.
    Torch(Lending),
    /// numpy.
    Numpy,
    /// Any other with `__dlpack__`.
    Other,
}

/// How torch lends a tensor.
#[derive(Clone, Copy)]
pub enum Lending {
    /// By its functions: no Python code runs.
    Exchange(&'static Exchange),
    /// By `__dlpack__`: an older torch, or a class made from torch.Tensor.
    Capsule,
    /// Not at all: a class that only stands for tensors, as FakeTensor.
    Never,
}

impl PartialEq for Lending {
    fn eq(&self, _: &Lending) -> bool {
        true
    }
}

/// Types that were met, by address; each is kept alive, so that the address stays its own.
static KNOWN: Mutex<Vec<(usize, Library)>> = Mutex::new(Vec::new());

/// More types than this are looked at anew each time.
const MOST_TYPES: usize = 64;

impl Library {
    /// The library of `object`.
    pub fn of(object: &Bound<'_, PyAny>) -> PyResult<Library> {
        let kind = object.get_type();
        let address = kind.as_ptr() as usize;
        // Held for a moment, with the interpreter's lock and without calling it: no fork happens meanwhile.
        let known = KNOWN.lock().expect("no panic while holding the lock");
        if let Some((_, library)) = known.iter().find(|(known, _)| *known == address) {
            return Ok(*library);
        }
        drop(known);
        let library = Library::of_type(&kind)?;
        let mut known = KNOWN.lock().expect("no panic while holding the lock");
        if known.len() < MOST_TYPES {
            std::mem::forget(kind.clone().unbind());
            known.push((address, library));
        }
        Ok(library)
    }

    fn of_type(kind: &Bound<'_, PyType>) -> PyResult<Library> {
        let py = kind.py();
        let modules = py.import("sys")?.getattr("modules")?;
        let loaded = |name: &str| modules.get_item(name).ok().filter(|module| !module.is_none());
        if let Some(torch) = loaded("torch") {
            let tensor = torch.getattr("Tensor")?;
            if kind.is_subclass(&tensor)? {
                let own = kind.is(&tensor) || kind.is(&torch.getattr("nn")?.getattr("Parameter")?);
                let dispatch = "__torch_dispatch__";
                let lending = match Exchange::of(&tensor).filter(|_| own) {
                    Some(exchange) => Lending::Exchange(exchange),
                    None if kind.getattr(dispatch)?.is(&tensor.getattr(dispatch)?) => Lending::Capsule,
                    None => Lending::Never,
                };
                return Ok(Library::Torch(lending));
            }
        }
        if let Some(numpy) = loaded("numpy")
            && kind.is_subclass(&numpy.getattr("ndarray")?)?
        {
            return Ok(Library::Numpy);
        }
        Ok(Library::Other)
    }

    /// `object`, a tensor of this library, as it lies. `detached`: who calls sees to gradients.
    pub fn view(self, object: &Bound<'_, PyAny>, detached: bool) -> Result<View, Refusal> {
        let py = object.py();
        match self {
            Library::Torch(lending) => {
                if !detached
                    && object.getattr(intern!(py, "requires_grad"))?.is_truthy()?
                    && Torch::get(py)?.records(py)?
                {
                    let what = "requires a gradient, which is not recorded here; use samebits.torch.ops or x.detach()";
                    return Err(Refusal::Value(what.into()));
                }
                // Lent is what stands in memory, without the sign that torch has not written yet.
                if object.call_method0(intern!(py, "is_neg"))?.is_truthy()? {
                    return Err(Refusal::Value(
                        "is a view that torch negates when it is read; give x.resolve_neg()".into(),
                    ));
                }
                match lending {
                    Lending::Never => {
                        let kind = object.get_type().name()?;
                        let what = format!("is a {kind}, which holds no memory of its own; use samebits.torch.ops");
                        Err(Refusal::Unsupported(what))
                    }
                    // SAFETY: the caller holds the object while the view is used.
                    Lending::Exchange(exchange) => unsafe { View::borrow(exchange, object) },
                    Lending::Capsule if detached => self.import(&object.call_method0(intern!(py, "detach"))?),
                    Lending::Capsule => self.import(object),
                }
            }
            Library::Numpy => View::import(object, false, None).or_else(|refusal| {
                let name = object.getattr("dtype")?.getattr("name")?;
                if name.extract::<String>()? != "bfloat16" {
                    return Err(refusal);
                }
                // numpy has no bf16 and hands out none.
                View::import(&object.call_method1("view", ("uint16",))?, true, None)
            }),
            Library::Other => self.import(object),
        }
    }

    fn import(self, object: &Bound<'_, PyAny>) -> Result<View, Refusal> {
        let stream = View::gpu_of(object)?.map(|id| self.stream(object.py(), id)).transpose()?;
        View::import(object, false, stream)
    }

    /// The stream of GPU `id` on which this library computes now, as DLPack and the driver name it; where it does not say,
    /// the default one.
    pub fn stream(self, py: Python<'_>, id: i32) -> PyResult<u64> {
        if self.waits() {
            return Ok(DEFAULT_STREAM);
        }
        let stream = py.import(intern!(py, "torch.cuda"))?.call_method1(intern!(py, "current_stream"), (id,))?;
        let stream = stream.getattr(intern!(py, "cuda_stream"))?.extract()?;
        Ok(if stream == 0 { DEFAULT_STREAM } else { stream })
    }

    /// Whether nobody knows in which order this library uses the memory of a GPU, so that a call is waited for.
    pub fn waits(self) -> bool {
        !matches!(self, Library::Torch(_))
    }

    /// A new tensor of this library where `beside` is, on a GPU.
    pub fn empty_beside<'py>(
        self,
        beside: &Bound<'py, PyAny>,
        dtype: DType,
        shape: &[usize],
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = beside.py();
        if self.waits() {
            let what = "tensors on a GPU are made for torch; give those of another library as `into`";
            return Err(PyNotImplementedError::new_err(what));
        }
        let options = PyDict::new(py);
        options.set_item("dtype", Torch::get(py)?.options[dtype as usize].bind(py).get_item("dtype")?)?;
        beside.call_method(intern!(py, "new_empty"), (PyTuple::new(py, shape)?,), Some(&options))
    }

    /// A new tensor of this library on the host, whose elements are anything.
    pub fn empty<'py>(self, py: Python<'py>, dtype: DType, shape: &[usize]) -> PyResult<Bound<'py, PyAny>> {
        let shape = PyTuple::new(py, shape)?;
        match self {
            Library::Torch(_) => {
                let torch = Torch::get(py)?;
                let options = torch.options[dtype as usize].bind(py);
                torch.empty.bind(py).call((shape,), Some(options))
            }
            Library::Numpy => {
                let numpy = py.import(intern!(py, "numpy"))?;
                let dtype = match dtype {
                    DType::Bf16 => numpy_bfloat16(py)?,
                    DType::Fp16 => intern!(py, "float16").clone().into_any(),
                    DType::Fp32 => intern!(py, "float32").clone().into_any(),
                    DType::I32 => intern!(py, "int32").clone().into_any(),
                };
                numpy.call_method1(intern!(py, "empty"), (shape, dtype))
            }
            Library::Other => {
                let storage = Storage::new(dtype, &shape.extract::<Vec<usize>>()?)
                    .map_err(|e| PyMemoryError::new_err(e.to_string()))?;
                Ok(Bound::new(py, Tensor(Arc::new(storage)))?.into_any())
            }
        }
    }

    /// `output`, made by [`Library::empty`], as a caller who gave `input` expects it.
    pub fn finish<'py>(self, input: &Bound<'py, PyAny>, output: Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        if self != Library::Other || input.is_instance_of::<Tensor>() {
            return Ok(output);
        }
        // The array API names the library of an array, jax's for example.
        match input.call_method0("__array_namespace__") {
            Ok(namespace) => namespace.call_method1("from_dlpack", (output,)),
            Err(_) => Ok(output),
        }
    }
}

/// What is asked of torch.
struct Torch {
    empty: Py<PyAny>,
    is_grad_enabled: Py<PyAny>,
    /// By dtype, in the order of its variants.
    options: [Py<PyDict>; 4],
}

impl Torch {
    fn get(py: Python<'_>) -> PyResult<&'static Torch> {
        static TORCH: PyOnceLock<Torch> = PyOnceLock::new();
        TORCH.get_or_try_init(py, || {
            let torch = py.import("torch")?;
            // Where tensors are by default is no matter: ops run on the processor.
            let cpu = torch.call_method1("device", ("cpu",))?;
            let options = |name: &str| -> PyResult<Py<PyDict>> {
                let options = PyDict::new(py);
                options.set_item("dtype", torch.getattr(name)?)?;
                options.set_item("device", &cpu)?;
                Ok(options.unbind())
            };
            debug_assert_eq!([DType::Bf16, DType::Fp16, DType::Fp32, DType::I32].map(|d| d as usize), [0, 1, 2, 3]);
            Ok(Torch {
                empty: torch.getattr("empty")?.unbind(),
                is_grad_enabled: torch.getattr("is_grad_enabled")?.unbind(),
                options: [options("bfloat16")?, options("float16")?, options("float32")?, options("int32")?],
            })
        })
    }

    /// Whether what is called now is recorded for gradients.
    fn records(&self, py: Python<'_>) -> PyResult<bool> {
        self.is_grad_enabled.bind(py).call0()?.is_truthy()
    }
}

/// numpy's bf16.
pub fn numpy_bfloat16(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    match py.import(intern!(py, "ml_dtypes")) {
        Ok(module) => module.getattr(intern!(py, "bfloat16")),
        Err(_) => Err(PyImportError::new_err("numpy has no bf16; install ml_dtypes, or ask for dtype=\"fp32\"")),
    }
}

/// A dtype of any library, or its name.
pub fn parse_dtype(given: &Bound<'_, PyAny>) -> PyResult<DType> {
    let name = match given.cast::<PyString>() {
        Ok(name) => name.to_str()?.to_string(),
        Err(_) => match given.getattr("name").or_else(|_| given.getattr("__name__")) {
            Ok(name) => name.extract()?,
            Err(_) => given.str()?.to_str()?.to_string(),
        },
    };
    match name.strip_prefix("torch.").unwrap_or(&name) {
        "bfloat16" => Ok(DType::Bf16),
        "float16" | "half" => Ok(DType::Fp16),
        "float32" | "float" => Ok(DType::Fp32),
        "int32" | "int" => Ok(DType::I32),
        name => DType::parse(name).map_err(PyValueError::new_err),
    }
}
