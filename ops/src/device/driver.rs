//! What runs kernels: a GPU through its driver, or an emulator.

use super::Build;
use crate::Error;

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
        self.address(buffer.address())
    }

    pub(super) fn address(self, address: u64) -> Arguments {
        self.push(&address.to_ne_bytes())
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
/// they are asked for.
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

    /// Gives memory back that [`Driver::allocate`] gave.
    fn free(&self, address: u64);

    /// The first `bytes` at `address` are a new tensor's, which nobody has written yet. For an emulator, which forgets what
    /// was there and watches the border.
    fn lend(&self, _address: u64, _bytes: usize) {}

    /// Copies to the device.
    ///
    /// # Errors
    /// [`Error::Device`].
    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Error>;

    /// Copies from the device, once everything before has ended.
    ///
    /// # Errors
    /// [`Error::Device`], also for what was started before.
    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), Error>;

    /// Starts a kernel.
    ///
    /// # Errors
    /// [`Error::Device`].
    ///
    /// # Safety
    /// The arguments fit the kernel, and what they point to is live until it has ended.
    unsafe fn launch(&self, launch: &Launch) -> Result<(), Error>;

    /// How long the device takes for what `work` starts, in seconds.
    ///
    /// # Errors
    /// Those of `work`; [`Error::Device`].
    fn seconds(&self, work: &mut dyn FnMut() -> Result<(), Error>) -> Result<f64, Error>;

    /// Waits for everything that was started.
    ///
    /// # Errors
    /// [`Error::Device`].
    fn finish(&self) -> Result<(), Error>;
}
