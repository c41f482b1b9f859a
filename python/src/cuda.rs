//! Tensors on NVIDIA GPUs: an op is started on the caller's stream, with their memory as it lies, and is not waited for.

use crate::call::{tensor, typed};
use crate::dlpack::View;
use samebits_ops::device::Device;
use samebits_ops::device::cuda::Cuda;
use samebits_ops::{Backend, DType, Error, Tensor, TensorRef, bf16, f16};
use samebits_schema::Call;
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

/// The default stream, as DLPack and the driver name it.
pub const DEFAULT_STREAM: u64 = 1;

/// A GPU that was met; it stays open.
struct Gpu {
    cuda: Cuda,
    /// Keeps what was compiled.
    device: Device,
}

/// Taken with the interpreter's lock, so that no fork happens meanwhile.
static GPUS: Mutex<Option<HashMap<i32, &'static Gpu>>> = Mutex::new(None);

/// GPU `id`, opened when it is first asked for; kernels are kept in the folder that `SAMEBITS_KERNELS` names.
fn open(id: i32) -> Result<&'static Gpu, Error> {
    let mut gpus = GPUS.lock().unwrap_or_else(PoisonError::into_inner);
    let gpus = gpus.get_or_insert_default();
    if let Some(gpu) = gpus.get(&id) {
        return Ok(gpu);
    }
    let cache = std::env::var_os("SAMEBITS_KERNELS").map(std::path::PathBuf::from);
    let cuda = Cuda::open(usize::try_from(id).unwrap_or(usize::MAX), cache.as_deref())?;
    // SAFETY: the default stream is always there, and a GPU that was met is never dropped.
    let device = Device::new(Box::new(unsafe { cuda.on(DEFAULT_STREAM) }), usize::MAX, usize::MAX);
    Ok(gpus.entry(id).or_insert(Box::leak(Box::new(Gpu { cuda, device }))))
}

/// A tensor of a call.
#[derive(Clone, Copy)]
pub enum Operand<'a> {
    /// On the host.
    Host(TensorRef<'a>),
    /// On a GPU, without gaps: dtype, address, shape.
    Gpu(DType, u64, &'a [usize]),
}

impl<'a> Operand<'a> {
    /// # Safety
    /// What the view reaches on the host can be read and is not written while the operand is used.
    pub unsafe fn of(view: &'a View) -> Result<Operand<'a>, Error> {
        Ok(match view.gpu {
            // SAFETY: the caller's promise.
            None => Operand::Host(unsafe { tensor(view) }?),
            Some(_) => Operand::Gpu(view.dtype, view.data as u64, view.shape()),
        })
    }

    /// # Safety
    /// Of a GPU, it is live memory of `device` at a multiple of 16 until what is started with the result has ended.
    unsafe fn lend(&self, device: &Device) -> Result<Option<Tensor>, Error> {
        let Operand::Gpu(dtype, address, shape) = *self else { return Ok(None) };
        let count = shape.iter().product();
        typed!(dtype => T, {
            // SAFETY: the caller's promise.
            Tensor::on_device(unsafe { device.lent::<T>(address, count) }, shape).map(Some)
        })
    }
}

/// Where a call runs: a GPU and a stream of it.
#[derive(Clone, Copy)]
pub struct Place {
    gpu: &'static Gpu,
    stream: u64,
}

impl Place {
    /// GPU `id`, opened where it was not yet, and a stream.
    pub fn new(id: i32, stream: u64) -> Result<Place, Error> {
        Ok(Place { gpu: open(id)?, stream })
    }

    /// Starts a call; `wait`: and waits for it. Integers on the GPU are read first, which waits for the stream: ops look at
    /// them on the host.
    ///
    /// # Safety
    /// The stream is of the GPU's primary context, and lives. Until what was started has ended, operands on the GPU are live
    /// memory of it, at multiples of 16; `outputs` are there, may be written, and overlap nothing else.
    pub unsafe fn start(
        self,
        call: &Call,
        inputs: &[(&'static str, Operand)],
        outputs: &[(&'static str, Operand)],
        budget: usize,
        wait: bool,
    ) -> Result<(), Error> {
        let Gpu { cuda, device } = self.gpu;
        let _context = cuda.keep_context()?;
        // SAFETY: the stream lives, by the caller's promise; the GPU is never dropped, and its modules are its own.
        let device = unsafe { device.by(Box::new(cuda.on(self.stream))) }.with_budget(budget);
        let mut here = Vec::with_capacity(inputs.len());
        for (_, operand) in inputs {
            // SAFETY: the caller's promise.
            here.push(match unsafe { operand.lend(&device) }? {
                Some(tensor) if !tensor.dtype().is_float() => Some(device.download(tensor.view())?),
                tensor => tensor,
            });
        }
        let given: Vec<(&str, TensorRef)> = inputs
            .iter()
            .zip(&here)
            .map(|((name, operand), tensor)| match (tensor, operand) {
                (Some(tensor), _) => (*name, tensor.view()),
                (None, Operand::Host(tensor)) => (*name, *tensor),
                (None, Operand::Gpu(..)) => unreachable!("it was lent"),
            })
            .collect();
        let mut made = Vec::with_capacity(outputs.len());
        for (name, operand) in outputs {
            // SAFETY: the caller's promise.
            made.push((*name, unsafe { operand.lend(&device) }?.expect("outputs are on the GPU")));
        }
        let written = made.iter_mut().map(|(name, tensor)| (*name, tensor.view_mut())).collect();
        let done = device.run(call, &given, written);
        // Also where an op ends in the middle.
        let waited = if wait { device.finish() } else { Ok(()) };
        done.and(waited)
    }
}
