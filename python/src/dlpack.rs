//! DLPack, both ways: tensors of other libraries as they lie, and [`Tensor`]s for them.
//!
//! The structs are those of `dlpack.h` 1.3.

use crate::tensor::Storage;
use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use samebits_ops::{DType, MAX_RANK};
use std::ffi::{CStr, c_int, c_void};
use std::ptr::NonNull;
use std::sync::Arc;

const CPU: i32 = 1;
const CUDA: i32 = 2;
const CUDA_HOST: i32 = 3;

/// What `__dlpack_device__` of a tensor on the host says.
pub const HOST: (i32, i32) = (CPU, 0);

#[repr(C)]
#[derive(Clone, Copy)]
struct Device {
    kind: i32,
    id: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct DataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct DlTensor {
    data: *mut c_void,
    device: Device,
    ndim: i32,
    dtype: DataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct Managed {
    tensor: DlTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Version {
    major: u32,
    minor: u32,
}

#[repr(C)]
struct Versioned {
    version: Version,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Versioned)>,
    flags: u64,
    tensor: DlTensor,
}

const READ_ONLY: u64 = 1;
const IS_COPIED: u64 = 2;

/// The functions by which a library lends its tensors without a capsule, in the order of `DLPackExchangeAPI`; of those that
/// are not called the addresses alone.
#[repr(C)]
pub struct Exchange {
    version: Version,
    previous: usize,
    allocator: usize,
    managed: usize,
    to_object: usize,
    borrow: Option<unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int>,
}

const EXCHANGE: &CStr = c"dlpack_exchange_api";

impl Exchange {
    /// What `kind.__dlpack_c_exchange_api__` holds, where the library of that type offers it and it can lend.
    pub fn of(kind: &Bound<'_, PyAny>) -> Option<&'static Exchange> {
        let capsule = kind.getattr("__dlpack_c_exchange_api__").ok()?;
        // SAFETY: a valid Python object; the name is compared before the pointer is given out.
        let pointer = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), EXCHANGE.as_ptr()) };
        if pointer.is_null() {
            let _ = PyErr::take(kind.py());
            return None;
        }
        // SAFETY: the capsule's name says what it points to, and the protocol that it lives as long as the process.
        let exchange = unsafe { &*(pointer as *const Exchange) };
        (exchange.version.major == 1 && exchange.borrow.is_some()).then_some(exchange)
    }
}

/// What stands in the memory of another library, and the right to read it.
pub struct View {
    /// The first element; anything where there are none.
    pub data: *mut u8,
    /// The GPU whose memory it is; `None` for the host.
    pub gpu: Option<i32>,
    /// Element type.
    pub dtype: DType,
    rank: usize,
    shape: [usize; MAX_RANK],
    strides: [usize; MAX_RANK],
    /// Whether the library says that nobody may write.
    pub read_only: bool,
    /// Whether the elements are a copy of those of the tensor.
    pub copied: bool,
    /// What is given back when the view goes. A borrowed one lives as long as the object that lent it.
    _keep: Option<Keep>,
}

/// Why a tensor cannot be used, in words that follow its name.
pub enum Refusal {
    /// The words; the tensor has a form that no op takes.
    Value(String),
    /// The name of a dtype that no op takes.
    DType(String),
    /// The words; it is what no build of this kind can read.
    Unsupported(String),
    /// It is none.
    Type(String),
    /// What Python said.
    Python(PyErr),
}

impl From<PyErr> for Refusal {
    fn from(error: PyErr) -> Refusal {
        Refusal::Python(error)
    }
}

enum Keep {
    Managed(NonNull<Managed>),
    Versioned(NonNull<Versioned>),
}

impl Drop for Keep {
    fn drop(&mut self) {
        // SAFETY: the struct was taken out of its capsule, so the deleter is called here and nowhere else.
        unsafe {
            match self {
                Keep::Managed(managed) => {
                    if let Some(deleter) = managed.as_ref().deleter {
                        deleter(managed.as_ptr());
                    }
                }
                Keep::Versioned(managed) => {
                    if let Some(deleter) = managed.as_ref().deleter {
                        deleter(managed.as_ptr());
                    }
                }
            }
        }
    }
}

const PLAIN_NAME: &CStr = c"dltensor";
const PLAIN_USED: &CStr = c"used_dltensor";
const VERSIONED_NAME: &CStr = c"dltensor_versioned";
const VERSIONED_USED: &CStr = c"used_dltensor_versioned";

impl View {
    /// Extent of every axis.
    pub fn shape(&self) -> &[usize] {
        &self.shape[..self.rank]
    }

    /// From one entry of an axis to the next, in elements.
    pub fn strides(&self) -> &[usize] {
        &self.strides[..self.rank]
    }

    /// The same for who computes on the processor alone.
    pub fn on_host(self) -> Result<View, Refusal> {
        match self.gpu {
            None => Ok(self),
            Some(id) => Err(Refusal::Unsupported(format!("is on cuda:{id}; this runs on the processor, give x.cpu()"))),
        }
    }

    /// Whether it lies in row-major order without gaps.
    pub fn is_contiguous(&self) -> bool {
        let mut stride = 1;
        self.shape().contains(&0)
            || self.shape().iter().zip(self.strides()).rev().all(|(&extent, &given)| {
                let fits = extent == 1 || given == stride;
                stride *= extent;
                fits
            })
    }

    /// `object` as the functions of its library lend it.
    ///
    /// # Safety
    /// The view is used while `object` lives and nobody gives its memory away, as with every op of its library.
    pub unsafe fn borrow(exchange: &'static Exchange, object: &Bound<'_, PyAny>) -> Result<View, Refusal> {
        let borrow = exchange.borrow.expect("it was looked at");
        let mut tensor = std::mem::MaybeUninit::<DlTensor>::uninit();
        // SAFETY: the object is of the type that the functions belong to; the pointer is to room for the answer.
        if unsafe { borrow(object.as_ptr().cast(), tensor.as_mut_ptr()) } != 0 {
            // torch's messages go on with the place in its sources.
            let why = PyErr::fetch(object.py()).value(object.py()).to_string();
            let why = why.lines().next().unwrap_or("its library does not say why");
            return Err(Refusal::Unsupported(format!("cannot be lent: {why}")));
        }
        // SAFETY: it said that it wrote the answer.
        let tensor = unsafe { tensor.assume_init() };
        // SAFETY: shape and strides are those of the object, which lives.
        unsafe { View::of_parts(&tensor, false, false) }
    }

    /// The GPU that `object` says it is on; `None` for the host and for what no op takes.
    pub fn gpu_of(object: &Bound<'_, PyAny>) -> PyResult<Option<i32>> {
        match object.getattr("__dlpack_device__") {
            Ok(method) => {
                let (kind, id): (i32, i32) = method.call0()?.extract()?;
                Ok((kind == CUDA).then_some(id))
            }
            Err(_) => Ok(None),
        }
    }

    /// `object` through its `__dlpack__`; `raw`: its uint16 are bf16; `stream`: on which a GPU will read it.
    pub fn import(object: &Bound<'_, PyAny>, raw: bool, stream: Option<u64>) -> Result<View, Refusal> {
        let py = object.py();
        let method = match object.getattr("__dlpack__") {
            Ok(method) => method,
            Err(_) => {
                let kind = object.get_type().fully_qualified_name()?;
                return Err(Refusal::Type(format!("is a {kind}; give a tensor with __dlpack__")));
            }
        };
        let options = pyo3::types::PyDict::new(py);
        if let Some(stream) = stream {
            options.set_item("stream", stream)?;
        }
        options.set_item("max_version", (1, 3))?;
        let capsule = match method.call((), Some(&options)) {
            // A library that knows no versions knows no such option either.
            Err(e) if e.is_instance_of::<PyTypeError>(py) => {
                options.del_item("max_version")?;
                method.call((), Some(&options))?
            }
            other => other?,
        };
        let pointer = capsule.as_ptr();
        // SAFETY: a valid Python object; only a capsule of that name is valid.
        if unsafe { ffi::PyCapsule_IsValid(pointer, VERSIONED_NAME.as_ptr()) } == 1 {
            // SAFETY: the capsule is valid. Once renamed it is ours, as the protocol says: its own destructor leaves it alone.
            let managed = unsafe {
                let managed = ffi::PyCapsule_GetPointer(pointer, VERSIONED_NAME.as_ptr()) as *mut Versioned;
                ffi::PyCapsule_SetName(pointer, VERSIONED_USED.as_ptr());
                managed
            };
            let managed = NonNull::new(managed).expect("a valid capsule holds no null");
            let keep = Keep::Versioned(managed);
            // SAFETY: it lives until the deleter is called; what comes before `tensor` is the same in all versions.
            let (version, flags) = unsafe { (managed.as_ref().version, managed.as_ref().flags) };
            if version.major != 1 {
                let what = format!("DLPack {}.{} is not understood; 1.x is", version.major, version.minor);
                return Err(PyBufferError::new_err(what).into());
            }
            // SAFETY: as above; the version is one whose layout this is.
            let mut view = unsafe { View::of_parts(&managed.as_ref().tensor, flags & READ_ONLY != 0, raw)? };
            view.copied = flags & IS_COPIED != 0;
            view._keep = Some(keep);
            return Ok(view);
        }
        // SAFETY: as above.
        if unsafe { ffi::PyCapsule_IsValid(pointer, PLAIN_NAME.as_ptr()) } != 1 {
            return Err(PyBufferError::new_err("__dlpack__ gave no DLPack capsule").into());
        }
        // SAFETY: as above.
        let managed = unsafe {
            let managed = ffi::PyCapsule_GetPointer(pointer, PLAIN_NAME.as_ptr()) as *mut Managed;
            ffi::PyCapsule_SetName(pointer, PLAIN_USED.as_ptr());
            managed
        };
        let managed = NonNull::new(managed).expect("a valid capsule holds no null");
        let keep = Keep::Managed(managed);
        // SAFETY: it lives until the deleter is called.
        let mut view = unsafe { View::of_parts(&managed.as_ref().tensor, false, raw)? };
        view._keep = Some(keep);
        Ok(view)
    }

    /// # Safety
    /// Shape and strides can be read, and the elements stand where they say while the view is used.
    unsafe fn of_parts(tensor: &DlTensor, read_only: bool, raw: bool) -> Result<View, Refusal> {
        let DlTensor { device, dtype, .. } = *tensor;
        let gpu = match device.kind {
            CPU | CUDA_HOST => None,
            CUDA => Some(device.id),
            kind => {
                let place = format!("is on a device of DLPack type {kind}; give a tensor of the host or of CUDA");
                return Err(Refusal::Unsupported(place));
            }
        };
        let rank = usize::try_from(tensor.ndim).unwrap_or(usize::MAX);
        if rank > MAX_RANK {
            return Err(Refusal::Value(format!("has {rank} axes; at most {MAX_RANK} are taken")));
        }
        let mut view = View {
            data: tensor.data.cast::<u8>().wrapping_add(tensor.byte_offset as usize),
            gpu,
            dtype: if raw && (dtype.code, dtype.bits) == (1, 16) { DType::Bf16 } else { dtype_of(dtype)? },
            rank,
            shape: [1; MAX_RANK],
            strides: [0; MAX_RANK],
            read_only,
            copied: false,
            _keep: None,
        };
        let mut dense = 1usize;
        for axis in (0..rank).rev() {
            // SAFETY: both have an entry for every axis, but for strides that are left out: row-major order.
            let (extent, stride) = unsafe {
                let stride = if tensor.strides.is_null() { dense as i64 } else { *tensor.strides.add(axis) };
                (*tensor.shape.add(axis), stride)
            };
            view.shape[axis] =
                usize::try_from(extent).map_err(|_| Refusal::Value(format!("has {extent} entries on axis {axis}")))?;
            // Where there is one entry, or none, the stride means nothing.
            view.strides[axis] = match usize::try_from(stride) {
                Ok(stride) => stride,
                Err(_) if extent < 2 => 0,
                Err(_) => {
                    let what = format!("has stride {stride} on axis {axis}; axes must ascend, give a contiguous copy");
                    return Err(Refusal::Value(what));
                }
            };
            dense = dense.saturating_mul(view.shape[axis]);
        }
        // Kernels of a GPU read 16 bytes at once.
        let unit = if gpu.is_some() { 16 } else { view.dtype.size() };
        let misaligned = !(view.data as usize).is_multiple_of(unit);
        if dense == 0 || view.data.is_null() {
            if dense != 0 {
                return Err(Refusal::Value("has no memory".into()));
            }
            view.data = if gpu.is_some() { std::ptr::null_mut() } else { NonNull::<u64>::dangling().as_ptr().cast() };
        } else if misaligned {
            let fix = if gpu.is_some() { "; give a copy, x.clone()" } else { "" };
            return Err(Refusal::Value(format!("does not begin at a multiple of {unit} bytes{fix}")));
        }
        Ok(view)
    }

    /// The bytes from the first element to the last; empty where there are none.
    pub fn bytes(&self) -> std::ops::Range<usize> {
        let start = self.data as usize;
        start..start + self.reach() * self.dtype.size()
    }

    /// Elements from the first to the last, both included.
    pub fn reach(&self) -> usize {
        if self.shape().contains(&0) {
            return 0;
        }
        1 + self.shape().iter().zip(self.strides()).map(|(&extent, &stride)| (extent - 1) * stride).sum::<usize>()
    }
}

fn dtype_of(dtype: DataType) -> Result<DType, Refusal> {
    Ok(match (dtype.code, dtype.bits, dtype.lanes) {
        (4, 16, 1) => DType::Bf16,
        (2, 16, 1) => DType::Fp16,
        (2, 32, 1) => DType::Fp32,
        (0, 32, 1) => DType::I32,
        (code, bits, lanes) => {
            let kind = match code {
                0 => "int",
                1 => "uint",
                2 => "float",
                4 => "bfloat",
                5 => "complex",
                6 => "bool",
                7..=14 => "float8_",
                _ => "of an unknown type of bits ",
            };
            let lanes = if lanes == 1 { String::new() } else { format!("x{lanes}") };
            let name = if code == 6 { kind.to_string() } else { format!("{kind}{bits}{lanes}") };
            return Err(Refusal::DType(name));
        }
    })
}

fn dtype_code(dtype: DType) -> DataType {
    let (code, bits) = match dtype {
        DType::Bf16 => (4, 16),
        DType::Fp16 => (2, 16),
        DType::Fp32 => (2, 32),
        DType::I32 => (0, 32),
    };
    DataType { code, bits, lanes: 1 }
}

/// What a capsule holds beside its struct: the elements, which live until its deleter is called.
struct Context {
    _storage: Arc<Storage>,
    shape: Vec<i64>,
    strides: Vec<i64>,
}

/// A capsule of `storage`. `raw`: bf16 as uint16, for a library without it.
pub fn export<'py>(
    py: Python<'py>,
    storage: &Arc<Storage>,
    versioned: bool,
    copied: bool,
    raw: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let shape: Vec<i64> = storage.shape().iter().map(|&extent| extent as i64).collect();
    let mut strides = vec![1i64; shape.len()];
    for axis in (1..shape.len()).rev() {
        strides[axis - 1] = strides[axis] * shape[axis].max(1);
    }
    let mut context = Box::new(Context { _storage: storage.clone(), shape, strides });
    let dtype = if raw { DataType { code: 1, bits: 16, lanes: 1 } } else { dtype_code(storage.dtype()) };
    let tensor = DlTensor {
        data: storage.data().cast(),
        device: Device { kind: HOST.0, id: HOST.1 },
        ndim: context.shape.len() as i32,
        dtype,
        shape: context.shape.as_mut_ptr(),
        strides: context.strides.as_mut_ptr(),
        byte_offset: 0,
    };
    let context = Box::into_raw(context).cast();
    // SAFETY: the pointer is to a box that its deleter frees, which is called once: by who renamed the capsule, or by the
    // destructor of one that nobody did.
    let capsule = unsafe {
        if versioned {
            let flags = if copied { IS_COPIED } else { 0 };
            let version = Version { major: 1, minor: 0 };
            let managed = Box::new(Versioned { version, context, deleter: Some(delete_versioned), flags, tensor });
            ffi::PyCapsule_New(Box::into_raw(managed).cast(), VERSIONED_NAME.as_ptr(), Some(destroy_versioned))
        } else {
            let managed = Box::new(Managed { tensor, context, deleter: Some(delete) });
            ffi::PyCapsule_New(Box::into_raw(managed).cast(), PLAIN_NAME.as_ptr(), Some(destroy))
        }
    };
    // SAFETY: a new reference, or null with an error set.
    unsafe { Bound::from_owned_ptr_or_err(py, capsule) }
}

/// # Safety
/// `managed` came from [`export`] and is not used again.
unsafe extern "C" fn delete(managed: *mut Managed) {
    // SAFETY: as the caller promises; the context is the box that `export` made.
    unsafe {
        let managed = Box::from_raw(managed);
        drop(Box::from_raw(managed.context as *mut Context));
    }
}

/// # Safety
/// As [`delete`].
unsafe extern "C" fn delete_versioned(managed: *mut Versioned) {
    // SAFETY: as in `delete`.
    unsafe {
        let managed = Box::from_raw(managed);
        drop(Box::from_raw(managed.context as *mut Context));
    }
}

/// # Safety
/// Python calls it with a capsule of [`export`].
unsafe extern "C" fn destroy(capsule: *mut ffi::PyObject) {
    // SAFETY: Python calls it with the capsule, once. A name that was changed means that another one deletes.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, PLAIN_NAME.as_ptr()) == 1 {
            delete(ffi::PyCapsule_GetPointer(capsule, PLAIN_NAME.as_ptr()).cast());
        }
    }
}

/// # Safety
/// As [`destroy`].
unsafe extern "C" fn destroy_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: as in `destroy`.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, VERSIONED_NAME.as_ptr()) == 1 {
            delete_versioned(ffi::PyCapsule_GetPointer(capsule, VERSIONED_NAME.as_ptr()).cast());
        }
    }
}
