//! What runs kernels: a GPU through its driver, or an emulator.

use super::{Build, Memory};
use crate::Error;
use std::sync::Arc;

/// A kernel to start.
pub struct Launch<'a> {
    /// The module, as [`Driver::compile`] named it.
    pub module: usize,
    /// A kernel of its unit.
    pub kernel: &'static str,
    /// Blocks in x, y and z; none is 0.
    pub grid: [u32; 3],
    /// Threads of a block, all in x; a multiple of 32.
    pub threads: u32,
    /// Bytes of shared memory beside what the kernel declares.
    pub shared: u32,
    /// Its arguments in order.
    pub arguments: &'a Arguments,
}

/// The arguments of a kernel as C++ has them in memory.
#[derive(Default)]
pub struct Arguments {
    /// Words of eight bytes, so that each argument starts at a multiple of eight.
    words: Vec<u64>,
    starts: Vec<usize>,
    /// What they point to.
    holds: Vec<Arc<Memory>>,
}

impl Arguments {
    /// None yet.
    pub fn new() -> Arguments {
        Arguments::default()
    }

    fn push(mut self, bytes: &[u8]) -> Arguments {
        self.starts.push(self.words.len());
        self.words.extend(bytes.chunks(8).map(|chunk| {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            u64::from_ne_bytes(word)
        }));
        self
    }

    /// A pointer to the elements of a buffer.
    pub fn buffer<T: super::Plain>(self, buffer: &super::Buffer<T>) -> Arguments {
        self.buffer_from(buffer, 0)
    }

    /// A pointer to the elements of a buffer from `first` on.
    pub(crate) fn buffer_from<T: super::Plain>(mut self, buffer: &super::Buffer<T>, first: usize) -> Arguments {
        self.holds.push(buffer.memory.clone());
        self.push(&(buffer.address() + (first * size_of::<T>()) as u64).to_ne_bytes())
    }

    pub(super) fn holds(&self) -> &[Arc<Memory>] {
        &self.holds
    }

    /// The same arguments without a hold on the buffers: whoever keeps them sees to it that those live.
    pub fn unheld(&self) -> Arguments {
        Arguments { words: self.words.clone(), starts: self.starts.clone(), holds: Vec::new() }
    }

    /// A pointer to nothing, for an input that is not there.
    pub fn null(self) -> Arguments {
        self.push(&0u64.to_ne_bytes())
    }

    /// An `int`.
    pub fn int(self, value: i32) -> Arguments {
        self.push(&value.to_ne_bytes())
    }

    /// A `long long`.
    pub fn long(self, value: usize) -> Arguments {
        self.push(&(value as i64).to_ne_bytes())
    }

    /// A `float`.
    pub fn float(self, value: f32) -> Arguments {
        self.push(&value.to_ne_bytes())
    }

    /// A struct, laid out by the caller.
    pub fn layout(self, bytes: &[u8]) -> Arguments {
        self.push(bytes)
    }

    /// Where each argument stands, in order.
    pub fn pointers(&self) -> Vec<*const std::ffi::c_void> {
        self.starts.iter().map(|&start| self.words[start..].as_ptr().cast()).collect()
    }
}

/// A device as [`Device`](super::Device) needs it. Launches and copies happen one after the other, in the order in which
/// they are asked for. Addresses are plain numbers, so whatever takes one is unsafe:
///
/// ```compile_fail,E0133
/// use samebits_ops::device::Driver;
///
/// fn overwrite(driver: &dyn Driver) {
///     driver.write(0xDEAD, &[0]).unwrap();
/// }
/// ```
pub trait Driver: Send + Sync {
    /// What it is, for people.
    fn name(&self) -> &str;

    /// Compiles a build and names the module.
    ///
    /// # Errors
    /// [`Error::Compile`] with the compiler's log; [`Error::Device`].
    fn compile(&self, build: &Build) -> Result<usize, Error>;

    /// `bytes` (at least 1) of memory, at a multiple of 256; `None` when there is no room.
    fn allocate(&self, bytes: usize) -> Option<u64>;

    /// Gives memory back that [`Driver::allocate`] gave, once everything that was started has ended.
    ///
    /// # Safety
    /// The memory is live, and nothing uses it from now on.
    unsafe fn free(&self, address: u64);

    /// The first `bytes` at `address` are a new tensor's, which nobody has written yet. For an emulator, which forgets what
    /// was there and watches the border.
    ///
    /// # Safety
    /// The `bytes` at `address` are live memory of this driver, and no tensor stands there.
    unsafe fn lend(&self, _address: u64, _bytes: usize) {}

    /// Copies to the device. `bytes` are not read after the return, whatever memory they lie in.
    ///
    /// # Errors
    /// [`Error::Device`].
    ///
    /// # Safety
    /// As many bytes at `address` are live memory of this driver.
    unsafe fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Error>;

    /// Copies from the device, once everything before has ended.
    ///
    /// # Errors
    /// [`Error::Device`], also for what was started before.
    ///
    /// # Safety
    /// As many bytes at `address` are live memory of this driver.
    unsafe fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), Error>;

    /// Copies within the device, after everything before.
    ///
    /// # Errors
    /// [`Error::Device`].
    ///
    /// # Safety
    /// The `bytes` at both addresses are live memory of this driver until the copy has ended, and do not overlap.
    unsafe fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<(), Error>;

    /// From now on launches are recorded and not run; nothing else is asked but memory and compilation.
    ///
    /// # Errors
    /// [`Error::Device`].
    fn begin_capture(&self) -> Result<(), Error>;

    /// Ends that and names what was recorded.
    ///
    /// # Errors
    /// [`Error::Device`]; then nothing is recorded any more, and nothing was.
    fn end_capture(&self) -> Result<usize, Error>;

    /// Starts what was recorded, in its order, after everything before.
    ///
    /// # Errors
    /// [`Error::Device`].
    ///
    /// # Safety
    /// [`Driver::end_capture`] has named the graph and it is not forgotten; what its kernels use is live until they have
    /// ended.
    unsafe fn replay(&self, graph: usize) -> Result<(), Error>;

    /// Forgets what was recorded.
    fn forget(&self, graph: usize);

    /// Starts a kernel.
    ///
    /// # Errors
    /// [`Error::Device`].
    ///
    /// # Safety
    /// [`Driver::compile`] has named the module; the arguments fit the kernel, and what they point to is live until it has
    /// ended.
    unsafe fn launch(&self, launch: &Launch) -> Result<(), Error>;

    /// Starts a clock behind everything that was started. The result stops it behind everything that was started since,
    /// waits for that, and says the seconds between.
    ///
    /// # Errors
    /// [`Error::Device`], here and when it is stopped.
    fn clock(&self) -> Result<Clock<'_>, Error>;

    /// Waits for everything that was started.
    ///
    /// # Errors
    /// [`Error::Device`].
    fn finish(&self) -> Result<(), Error>;
}

/// Stops a clock of [`Driver::clock`]: the seconds.
pub type Clock<'a> = Box<dyn FnOnce() -> Result<f64, Error> + 'a>;
