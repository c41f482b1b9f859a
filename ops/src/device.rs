//! The ops on a device: the same arguments, the same bits, with tensors that live in the device's memory.
//!
//! A [`Device`] stands over a [`Driver`], which compiles and starts kernels: [`cuda`] is NVIDIA's, opened at run time;
//! tests bring an emulator. The text of the kernels is in the `.cu` file beside each op; this module holds what the host
//! has to know: which kernel, how many blocks, and how much workspace. There is no way back to the CPU: what a device cannot do
//! is an [`Error`], and the ledger has the name of every kernel that ran.

mod arena;
mod attention;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod driver;
mod experts;
mod gemm;
mod linear_logprob;
mod rows;
mod sources;
mod workspace;

pub use attention::{attention, attention_over};
pub use driver::{Arguments, Driver, Launch};
pub use experts::{combine, route};
pub use gemm::gemm;
pub use linear_logprob::linear_logprob;
pub use rows::{
    Rotations, add, add_rms_norm, argmax, embedding, gelu_mul, logprob, norm_rope, rms_norm, rope, scale, silu_mul,
    softcap, softmax,
};
pub use sources::{Build, HEADERS, UNITS, Unit};

use crate::{Counter, Element, Error, Ledger};
use arena::Arena;
use std::collections::HashMap;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex};

/// A device, its compiled kernels and its memory. Clones share all of it and the [`Ledger`].
#[derive(Clone)]
pub struct Device {
    inner: Arc<Inner>,
    budget: usize,
    ledger: Arc<Ledger>,
}

struct Inner {
    driver: Box<dyn Driver>,
    modules: Mutex<HashMap<Build, Arc<Mutex<Option<usize>>>>>,
    arena: Mutex<Arena>,
}

impl Device {
    /// A device that takes at most `cap` bytes of memory for tensors and workspace, and at most `budget` bytes of
    /// workspace per op.
    pub fn new(driver: Box<dyn Driver>, cap: usize, budget: usize) -> Device {
        let inner = Inner { driver, modules: Mutex::default(), arena: Mutex::new(Arena::new(cap)) };
        Device { inner: Arc::new(inner), budget, ledger: Arc::default() }
    }

    /// What it is, for people: `cuda:0 NVIDIA H200 (sm_90), nvrtc 13.0`.
    pub fn name(&self) -> &str {
        self.inner.driver.name()
    }

    /// The same device with counters of its own, all zero; what is forbidden stays so.
    pub fn recording(&self) -> Device {
        Device { ledger: Arc::new(self.ledger.successor()), ..self.clone() }
    }

    /// The same device with counters of its own that forbid what `ledger` forbids.
    pub fn strict_as(self, ledger: &Ledger) -> Device {
        Device { ledger: Arc::new(ledger.successor()), ..self }
    }

    /// The same device and counters with another workspace limit.
    pub fn with_budget(&self, budget: usize) -> Device {
        Device { budget, ..self.clone() }
    }

    /// Workspace limit per op in bytes.
    pub fn budget(&self) -> usize {
        self.budget
    }

    /// What ops on this device and its clones did.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Bytes of device memory that tensors and workspace hold, what is kept for the next ones included.
    pub fn held(&self) -> usize {
        self.arena().held()
    }

    /// Waits until everything that was started has ended.
    ///
    /// # Errors
    /// [`Error::Device`] when something that was started has failed.
    pub fn finish(&self) -> Result<(), Error> {
        self.inner.driver.finish()
    }

    /// How long the device takes for what `work` starts, in seconds.
    ///
    /// # Errors
    /// Those of `work` and of the device.
    pub fn seconds(&self, work: &mut dyn FnMut() -> Result<(), Error>) -> Result<f64, Error> {
        self.inner.driver.seconds(work)
    }

    /// Room for `len` elements that nobody has written.
    ///
    /// # Errors
    /// [`Error::Memory`] when the device has no room, or the cap leaves none.
    pub fn empty<T: Plain>(&self, op: &'static str, len: usize) -> Result<Buffer<T>, Error> {
        self.take(op, len, false)
    }

    /// `host` on the device.
    ///
    /// # Errors
    /// As [`Device::empty`]; [`Error::Device`].
    pub fn upload<T: Plain>(&self, op: &'static str, host: &[T]) -> Result<Buffer<T>, Error> {
        let buffer = self.empty(op, host.len())?;
        self.ledger.note(Counter::Staged, size_of_val(host), "Device::upload")?;
        if !host.is_empty() {
            self.inner.driver.write(buffer.address, bytes_of(host))?;
        }
        Ok(buffer)
    }

    /// Room for `len` elements; workspace is counted by its plan, tensors by their dtype.
    fn take<T: Plain>(&self, op: &'static str, len: usize, workspace: bool) -> Result<Buffer<T>, Error> {
        let bytes = len.saturating_mul(size_of::<T>());
        if !workspace {
            self.ledger.note(T::COUNTER, bytes, "a tensor on the device")?;
        }
        let (address, room) = self.arena().take(&*self.inner.driver, bytes).ok_or(Error::Memory { op, bytes })?;
        Ok(Buffer { inner: self.inner.clone(), address, room, len, of: PhantomData })
    }

    fn arena(&self) -> std::sync::MutexGuard<'_, Arena> {
        self.inner.arena.lock().expect("no panic while holding the lock")
    }

    /// The module of a build, compiled when it is first asked for.
    ///
    /// # Errors
    /// [`Error::Compile`] with the compiler's log.
    pub fn module(&self, build: Build) -> Result<usize, Error> {
        let place = {
            let mut modules = self.inner.modules.lock().expect("no panic while holding the lock");
            modules.entry(build).or_default().clone()
        };
        // Who else wants this build waits; other builds go on.
        let mut module = place.lock().expect("no panic while holding the lock");
        match *module {
            Some(module) => Ok(module),
            None => Ok(*module.insert(self.inner.driver.compile(&build)?)),
        }
    }

    /// Starts a kernel and takes note of it.
    ///
    /// # Safety
    /// The arguments are those of the kernel: addresses of live buffers, as long as the other arguments say.
    unsafe fn launch(
        &self,
        build: Build,
        kernel: &'static str,
        grid: [usize; 3],
        threads: u32,
        shared: usize,
        arguments: &Arguments,
    ) -> Result<(), Error> {
        if grid.contains(&0) {
            return Ok(());
        }
        let fits = grid[0] <= 0x7FFF_FFFF && grid[1] <= 0xFFFF && grid[2] <= 0xFFFF;
        if !fits {
            return Err(Error::Device(format!("{kernel}: {grid:?} blocks are more than a device takes")));
        }
        let module = self.module(build)?;
        self.ledger.note(Counter::Launches, 1, "a kernel was started")?;
        self.ledger.ran(kernel);
        let launch = Launch { module, kernel, grid: grid.map(|g| g as u32), threads, shared: shared as u32, arguments };
        // SAFETY: the caller's promise.
        unsafe { self.inner.driver.launch(&launch) }
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Device {{ {}, budget: {} }}", self.name(), self.budget)
    }
}

/// A tensor's elements in the device's memory, row-major; given back when dropped.
pub struct Buffer<T> {
    inner: Arc<Inner>,
    address: u64,
    room: usize,
    len: usize,
    of: PhantomData<T>,
}

impl<T: Plain> Buffer<T> {
    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies all elements to `host`, once what was started before has ended.
    ///
    /// # Errors
    /// [`Error::Device`]; [`Error::Length`] when `host` is not as long.
    pub fn download(&self, device: &Device, host: &mut [T]) -> Result<(), Error> {
        crate::check_len("download", "host", "of the buffer", host.len(), &[self.len])?;
        device.ledger.note(Counter::Staged, size_of_val(host), "Buffer::download")?;
        if self.len > 0 {
            self.inner.driver.read(self.address, bytes_of_mut(host))?;
        }
        Ok(())
    }

    fn address(&self) -> u64 {
        self.address
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        let mut arena = self.inner.arena.lock().expect("no panic while holding the lock");
        arena.give_back(self.address, self.room);
    }
}

/// What may lie in device memory: numbers without padding, for which every pattern of bits is a value. Sealed.
pub trait Plain: Copy + Default + sealed::Sealed + 'static {
    /// What counts its bytes.
    const COUNTER: Counter;
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! plain {
    ($($type:ty: $counter:ident),*) => {
        $(
            impl sealed::Sealed for $type {}
            impl Plain for $type {
                const COUNTER: Counter = Counter::$counter;
            }
        )*
    };
}

plain!(half::bf16: DeviceBf16, half::f16: DeviceFp16, f32: DeviceFp32, i32: DeviceI32);

fn bytes_of<T: Plain>(slice: &[T]) -> &[u8] {
    // SAFETY: Plain types have no padding, and bytes have no alignment to keep.
    unsafe { std::slice::from_raw_parts(slice.as_ptr().cast(), size_of_val(slice)) }
}

fn bytes_of_mut<T: Plain>(slice: &mut [T]) -> &mut [u8] {
    // SAFETY: as above; every pattern of bits is a value of T.
    unsafe { std::slice::from_raw_parts_mut(slice.as_mut_ptr().cast(), size_of_val(slice)) }
}

/// Storage types of tensors on a device.
pub trait Stored: Element + Plain {}
impl<T: Element + Plain> Stored for T {}
