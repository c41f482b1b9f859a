//! `samebits.Tensor`: elements that Rust owns, for libraries that this module does not know.

use crate::dlpack;
use crate::library::parse_dtype;
use pyo3::exceptions::{PyBufferError, PyMemoryError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use samebits_ops::{Backend, Cpu, DType};
use std::sync::Arc;

/// Elements in row-major order. They are reached through the pointer alone: others hold it as well.
pub struct Storage {
    tensor: samebits_ops::Tensor,
    data: *mut u8,
}

// SAFETY: the elements are plain numbers; who reads and who writes them is up to Python code, as with all its tensors.
unsafe impl Send for Storage {}
// SAFETY: as above.
unsafe impl Sync for Storage {}

impl Storage {
    /// Zeros.
    pub fn new(dtype: DType, shape: &[usize]) -> Result<Storage, samebits_ops::Error> {
        Ok(Storage::of(Cpu::best().empty(dtype, shape)?))
    }

    /// The elements of a tensor on the host.
    pub fn of(mut tensor: samebits_ops::Tensor) -> Storage {
        let data: *mut u8 = match tensor.dtype() {
            DType::Bf16 => tensor.as_slice_mut::<samebits_ops::bf16>().expect("of this type").as_mut_ptr().cast(),
            DType::Fp16 => tensor.as_slice_mut::<samebits_ops::f16>().expect("of this type").as_mut_ptr().cast(),
            DType::Fp32 => tensor.as_slice_mut::<f32>().expect("of this type").as_mut_ptr().cast(),
            DType::I32 => tensor.as_slice_mut::<i32>().expect("of this type").as_mut_ptr().cast(),
        };
        Storage { tensor, data }
    }

    pub fn dtype(&self) -> DType {
        self.tensor.dtype()
    }

    pub fn shape(&self) -> &[usize] {
        self.tensor.shape()
    }

    pub fn data(&self) -> *mut u8 {
        self.data
    }

    fn bytes(&self) -> usize {
        self.shape().iter().product::<usize>() * self.dtype().size()
    }
}

/// A tensor on the host in row-major order, for every library that reads DLPack.
///
/// Ops return it where their inputs are of a library that has no `from_dlpack` this module finds.
#[pyclass(frozen, module = "samebits")]
pub struct Tensor(pub Arc<Storage>);

#[pymethods]
impl Tensor {
    /// Zeros of a shape and a dtype: "bf16", "fp16", "fp32" or "i32".
    #[new]
    #[pyo3(signature = (shape, dtype = None))]
    fn new(shape: Vec<usize>, dtype: Option<&Bound<'_, PyAny>>) -> PyResult<Tensor> {
        let dtype = match dtype {
            Some(dtype) => parse_dtype(dtype)?,
            None => DType::Fp32,
        };
        let storage = Storage::new(dtype, &shape).map_err(|e| match e {
            samebits_ops::Error::Memory { .. } => PyMemoryError::new_err(e.to_string()),
            e => PyValueError::new_err(e.to_string()),
        })?;
        Ok(Tensor(Arc::new(storage)))
    }

    /// Extent of every axis.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.shape())
    }

    /// "bf16", "fp16", "fp32" or "i32".
    #[getter]
    fn dtype(&self) -> &'static str {
        self.0.dtype().name()
    }

    fn __repr__(&self) -> String {
        format!("samebits.Tensor(shape={:?}, dtype={})", self.0.shape(), self.0.dtype())
    }

    /// Where the elements are: on the host.
    fn __dlpack_device__(&self) -> (i32, i32) {
        dlpack::HOST
    }

    /// A DLPack capsule of the same elements; of a copy with `copy=True`.
    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if stream.is_some() {
            return Err(PyBufferError::new_err("stream: the tensor is on the host, which has no streams; use None"));
        }
        if dl_device.is_some_and(|device| device != dlpack::HOST) {
            return Err(PyBufferError::new_err("dl_device: the tensor is on the host; use (1, 0) or None"));
        }
        let copied = copy == Some(true);
        let storage = if copied { self.copy()? } else { self.0.clone() };
        dlpack::export(py, &storage, max_version.is_some_and(|(major, _)| major >= 1), copied, false)
    }

    /// The same elements as a numpy array; bf16 needs the package ml_dtypes.
    fn numpy<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let numpy = py.import("numpy")?;
        if self.0.dtype() != DType::Bf16 {
            let this = Bound::new(py, Tensor(self.0.clone()))?;
            return numpy.call_method1("from_dlpack", (this,));
        }
        let bfloat16 = crate::library::numpy_bfloat16(py)?;
        let raw = Bound::new(py, Raw(self.0.clone()))?;
        numpy.call_method1("from_dlpack", (raw,))?.call_method1("view", (bfloat16,))
    }

    /// The same elements as a torch tensor.
    fn torch<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let this = Bound::new(py, Tensor(self.0.clone()))?;
        py.import("torch")?.call_method1("from_dlpack", (this,))
    }
}

impl Tensor {
    fn copy(&self) -> PyResult<Arc<Storage>> {
        let copy = Storage::new(self.0.dtype(), self.0.shape()).map_err(|e| PyMemoryError::new_err(e.to_string()))?;
        // SAFETY: both have so many bytes, and the copy is new.
        unsafe { std::ptr::copy_nonoverlapping(self.0.data(), copy.data(), copy.bytes()) };
        Ok(Arc::new(copy))
    }
}

/// A bf16 tensor as numpy reads one: uint16.
#[pyclass(frozen)]
struct Raw(Arc<Storage>);

#[pymethods]
impl Raw {
    fn __dlpack_device__(&self) -> (i32, i32) {
        dlpack::HOST
    }

    #[pyo3(signature = (*, max_version = None, **_other))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        max_version: Option<(u32, u32)>,
        _other: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        dlpack::export(py, &self.0, max_version.is_some_and(|(major, _)| major >= 1), false, true)
    }
}
