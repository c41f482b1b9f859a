//! The ops on a device: the same arguments, the same bits, with tensors that live in the device's memory.
//!
//! A [`Device`] stands over a [`Driver`], which compiles and starts kernels: [`cuda`] is NVIDIA's, opened at run time;
//! tests bring an emulator. The text of the kernels is in the `.cu` file beside each op, and what the host has to know
//! in the op's own file: which kernel, how many blocks, and how much workspace. This module holds what they share.
//! There is no way back to the CPU: what a device cannot do is an [`Error`], and the ledger has the name of every
//! kernel that ran.
//!
//! ```
//! use samebits_ops::Error;
//! use samebits_ops::device::{self, Device};
//!
//! fn sum(device: &Device, a: &[f32], b: &[f32]) -> Result<Vec<f32>, Error> {
//!     let (a, b) = (device.upload("sum", a)?, device.upload("sum", b)?);
//!     let (mut y, mut host) = (device.empty::<f32>("sum", a.len())?, vec![0f32; a.len()]);
//!     device::add(device, &a, &b, &mut y)?;
//!     y.download(device, &mut host)?;
//!     Ok(host)
//! }
//! ```

mod arena;
mod copy_rows;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod driver;
mod indices;
mod layout;
mod sources;
pub(crate) mod workspace;

pub(crate) use copy_rows::UNIT as COPIES;
pub use copy_rows::{Part, copy_rows};
pub use driver::{Arguments, Clock, Driver, Launch};
pub use indices::Indices;
pub use layout::StructLayout;
pub(crate) use layout::launch_struct;
pub use sources::{Build, HEADERS, Unit};

use crate::{Counter, Error, Ledger, value_error};
use arena::Arena;
use std::collections::HashMap;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;

/// A device, its compiled kernels and its memory. Clones share all of it and the [`Ledger`].
#[derive(Clone)]
pub struct Device {
    inner: Arc<Inner>,
    budget: usize,
    ledger: Arc<Ledger>,
}

/// The modules of a driver by their build; the lock of one is held while it is compiled.
type Modules = Arc<Mutex<HashMap<Build, Arc<Mutex<Option<usize>>>>>>;

struct Inner {
    driver: Box<dyn Driver>,
    modules: Modules,
    arena: Mutex<Arena>,
    /// What is being captured. Who holds the lock is the only one to ask the device for something.
    capture: Mutex<Option<Capture>>,
    captured: Condvar,
    /// How many captures were begun.
    captures: AtomicU64,
}

/// Work that a thread has recorded and not run; the others wait until it is a [`Graph`].
struct Capture {
    number: u64,
    thread: ThreadId,
    /// What its kernels use.
    holds: Vec<Arc<Memory>>,
    launches: usize,
}

/// What a lock guards. A panic elsewhere left it whole: every change under these locks is a single step.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Inner {
    fn new(driver: Box<dyn Driver>, cap: usize, modules: Modules) -> Inner {
        Inner {
            driver,
            modules,
            arena: Mutex::new(Arena::new(cap)),
            capture: Mutex::default(),
            captured: Condvar::new(),
            captures: AtomicU64::new(0),
        }
    }

    /// This thread's turn to use the device.
    fn turn(&self) -> MutexGuard<'_, Option<Capture>> {
        let mut capture = lock(&self.capture);
        let me = std::thread::current().id();
        while capture.as_ref().is_some_and(|capture| capture.thread != me) {
            capture = self.captured.wait(capture).unwrap_or_else(PoisonError::into_inner);
        }
        capture
    }

    /// The same where nothing may be captured: copies, which a graph would not make again, and waiting.
    fn turn_to_copy(&self) -> Result<MutexGuard<'_, Option<Capture>>, Error> {
        let turn = self.turn();
        match *turn {
            None => Ok(turn),
            Some(_) => Err(Error::Device("a copy or a wait in work that is being captured".into())),
        }
    }

    /// The number of the capture that this thread is at work on.
    fn capturing(&self) -> Option<u64> {
        self.turn().as_ref().map(|capture| capture.number)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let arena = self.arena.get_mut().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the arena was never asked with another driver.
        unsafe { arena.free_kept(&*self.driver) };
    }
}

/// A capture that this thread has begun. It ends when this goes, also where the work panics: nobody waits for ever.
struct Capturing<'a> {
    inner: &'a Arc<Inner>,
    ended: bool,
}

impl<'a> Capturing<'a> {
    fn begin(inner: &'a Arc<Inner>) -> Result<Capturing<'a>, Error> {
        let mut turn = inner.turn_to_copy()?;
        inner.driver.begin_capture()?;
        let number = inner.captures.fetch_add(1, Ordering::Relaxed);
        *turn = Some(Capture { number, thread: std::thread::current().id(), holds: Vec::new(), launches: 0 });
        Ok(Capturing { inner, ended: false })
    }

    fn end(&mut self) -> Result<Graph, Error> {
        self.ended = true;
        let mut turn = self.inner.turn();
        let number = self.inner.driver.end_capture();
        let capture = turn.take();
        drop(turn);
        self.inner.captured.notify_all();
        let Capture { holds, launches, .. } = capture.expect("it was begun");
        Ok(Graph { inner: self.inner.clone(), number: number?, launches, _holds: holds })
    }
}

impl Drop for Capturing<'_> {
    fn drop(&mut self) {
        if !self.ended {
            // The graph is forgotten, and an error has nowhere to go.
            drop(self.end());
        }
    }
}

impl Device {
    /// A device that takes at most `cap` bytes of memory for tensors and workspace, and at most `budget` bytes of
    /// workspace per op.
    pub fn new(driver: Box<dyn Driver>, cap: usize, budget: usize) -> Device {
        Device { inner: Arc::new(Inner::new(driver, cap, Modules::default())), budget, ledger: Arc::default() }
    }

    /// The same device by another driver, with memory of its own, the same budget and the same counters.
    ///
    /// # Safety
    /// The modules of this device's driver are those of `driver`: a number means the same to both.
    pub unsafe fn by(&self, driver: Box<dyn Driver>) -> Device {
        let inner = Inner::new(driver, usize::MAX, self.inner.modules.clone());
        Device { inner: Arc::new(inner), ..self.clone() }
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
        lock(&self.inner.arena).held()
    }

    /// Waits until everything that was started has ended.
    ///
    /// # Errors
    /// [`Error::Device`] when something that was started has failed.
    pub fn finish(&self) -> Result<(), Error> {
        let _turn = self.inner.turn_to_copy()?;
        self.inner.driver.finish()
    }

    /// How long the device takes for what `work` starts, in seconds. What other threads start meanwhile counts too.
    ///
    /// # Errors
    /// Those of `work` and of the device; work that is being captured takes no time.
    pub fn seconds(&self, work: &mut dyn FnMut() -> Result<(), Error>) -> Result<f64, Error> {
        let stop = {
            let _turn = self.inner.turn_to_copy()?;
            self.inner.driver.clock()?
        };
        work()?;
        let _turn = self.inner.turn_to_copy()?;
        stop()
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
        let mut buffer = self.empty(op, host.len())?;
        buffer.fill(self, host)?;
        Ok(buffer)
    }

    /// `len` elements at `address` that somebody else has lent; they are not given back.
    ///
    /// # Safety
    /// As many elements there are live memory of this device, at a multiple of 16 bytes, until everything has ended that is
    /// started with the buffer or with a graph that holds it. What is written to is apart from every other buffer, lent or
    /// not.
    pub unsafe fn lent<T: Plain>(&self, address: u64, len: usize) -> Buffer<T> {
        Buffer { memory: Arc::new(Memory { inner: self.inner.clone(), address, room: 0 }), len, of: PhantomData }
    }

    /// Records what `work` starts instead of running it. The kernels read what stands in their buffers when the graph is
    /// replayed; what the buffers of `work` hold, the graph keeps. Meanwhile other threads wait; the capture ends with
    /// `work`, also where that fails or panics.
    ///
    /// # Errors
    /// Those of `work`, which copies nothing between host and device; those of the device.
    pub fn capture(&self, work: &mut dyn FnMut() -> Result<(), Error>) -> Result<Graph, Error> {
        let mut capturing = Capturing::begin(&self.inner)?;
        work()?;
        capturing.end()
    }

    /// Starts the kernels of `graph` anew.
    ///
    /// # Errors
    /// [`Error::Device`]; a graph of another device.
    pub fn replay(&self, graph: &Graph) -> Result<(), Error> {
        if !Arc::ptr_eq(&self.inner, &graph.inner) {
            return Err(Error::Device("a graph of another device".into()));
        }
        let _turn = self.inner.turn_to_copy()?;
        self.ledger.note(Counter::Launches, graph.launches, "a captured kernel was started")?;
        self.ledger.note(Counter::Replays, 1, "a captured graph was started")?;
        // SAFETY: a graph is forgotten when it is dropped, and it holds what its kernels use.
        unsafe { self.inner.driver.replay(graph.number) }
    }

    /// Room for `len` elements; workspace is counted by its plan, tensors by their dtype.
    pub(crate) fn take<T: Plain>(&self, op: &'static str, len: usize, workspace: bool) -> Result<Buffer<T>, Error> {
        let bytes = len.saturating_mul(size_of::<T>());
        if !workspace {
            self.ledger.note(T::COUNTER, bytes, "a tensor on the device")?;
        }
        let mut turn = self.inner.turn();
        // What captured work has dropped serves the work behind it.
        let kept = turn.as_mut().and_then(|capture| {
            let fits = |memory: &&Arc<Memory>| Arc::strong_count(memory) == 1 && memory.serves(bytes);
            capture.holds.iter().find(fits).cloned()
        });
        let memory = match kept {
            Some(memory) => {
                // SAFETY: nobody but the graph holds this memory, and it has room for as many bytes.
                unsafe { self.inner.driver.lend(memory.address, bytes) };
                memory
            }
            None => {
                // SAFETY: the arena is never asked with another driver.
                let taken = unsafe { lock(&self.inner.arena).take(&*self.inner.driver, bytes, turn.is_none()) };
                let (address, room) = taken.ok_or(Error::Memory { op, bytes })?;
                Arc::new(Memory { inner: self.inner.clone(), address, room })
            }
        };
        Ok(Buffer { memory, len, of: PhantomData })
    }

    /// The module of a build, compiled when it is first asked for.
    ///
    /// # Errors
    /// [`Error::Compile`] with the compiler's log.
    pub fn module(&self, build: Build) -> Result<usize, Error> {
        let place = {
            let mut modules = lock(&self.inner.modules);
            modules.entry(build).or_default().clone()
        };
        // Who else wants this build waits; other builds go on.
        let mut module = lock(&place);
        match *module {
            Some(module) => Ok(module),
            None => Ok(*module.insert(self.inner.driver.compile(&build)?)),
        }
    }

    /// Starts a kernel of a build, in a grid of blocks of so many threads with so many bytes of shared memory beside what it
    /// declares, and takes note of it.
    ///
    /// # Errors
    /// [`Error::Compile`]; [`Error::Device`], also for a buffer of another device and a grid that no device takes.
    ///
    /// # Safety
    /// The arguments are those of the kernel: addresses of live buffers, as long as the other arguments say.
    pub unsafe fn launch(
        &self,
        build: Build,
        kernel: &'static str,
        grid: [usize; 3],
        threads: u32,
        shared: usize,
        arguments: &Arguments,
    ) -> Result<(), Error> {
        if arguments.holds().iter().any(|memory| !Arc::ptr_eq(&memory.inner, &self.inner)) {
            return Err(Error::Device(format!("{kernel}: a buffer of another device")));
        }
        if grid.contains(&0) {
            return Ok(());
        }
        let fits = grid[0] <= 0x7FFF_FFFF && grid[1] <= 0xFFFF && grid[2] <= 0xFFFF;
        if !fits {
            return Err(Error::Device(format!("{kernel}: {grid:?} blocks are more than a device takes")));
        }
        let module = self.module(build)?;
        let mut turn = self.inner.turn();
        match &mut *turn {
            None => self.ledger.note(Counter::Launches, 1, "a kernel was started")?,
            Some(capture) => {
                capture.launches += 1;
                for memory in arguments.holds() {
                    if capture.holds.iter().all(|held| !Arc::ptr_eq(held, memory)) {
                        capture.holds.push(memory.clone());
                    }
                }
            }
        }
        self.ledger.ran(kernel);
        let launch = Launch { module, kernel, grid: grid.map(|g| g as u32), threads, shared: shared as u32, arguments };
        // SAFETY: the caller's promise; the buffers are this device's, and their memory is used again only by what is
        // started later.
        unsafe { self.inner.driver.launch(&launch) }
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Device {{ {}, budget: {} }}", self.name(), self.budget)
    }
}

/// A part of the device's memory; given back when dropped.
struct Memory {
    inner: Arc<Inner>,
    address: u64,
    /// Bytes of it; 0 of what is lent.
    room: usize,
}

impl Memory {
    /// Whether it has room for `bytes`, and not many times as much.
    fn serves(&self, bytes: usize) -> bool {
        arena::serves(self.room, arena::room_of(bytes).unwrap_or(usize::MAX))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.room == 0 {
            return;
        }
        // SAFETY: the arena gave it, and this was its last holder.
        unsafe { lock(&self.inner.arena).give_back(self.address, self.room) };
    }
}

/// Work that was captured: kernels with their arguments, to be started in one go and again and again.
pub struct Graph {
    inner: Arc<Inner>,
    number: usize,
    launches: usize,
    /// Every buffer that the kernels use.
    _holds: Vec<Arc<Memory>>,
}

impl Graph {
    /// Kernels it starts.
    pub fn launches(&self) -> usize {
        self.launches
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let _turn = self.inner.turn();
        self.inner.driver.forget(self.number);
    }
}

/// A tensor's elements in the device's memory, row-major; given back when dropped.
pub struct Buffer<T> {
    memory: Arc<Memory>,
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

    /// Copies `host` over all elements.
    ///
    /// # Errors
    /// [`Error::Device`]; [`Error::Length`] when `host` is not as long.
    pub fn fill(&mut self, device: &Device, host: &[T]) -> Result<(), Error> {
        crate::check_len("upload", "host", "of the buffer", host.len(), &[self.len])?;
        device.ledger.note(Counter::Staged, size_of_val(host), "Buffer::fill")?;
        let _turn = self.memory.inner.turn_to_copy()?;
        if self.len > 0 {
            // SAFETY: the memory is live and has room for `len` elements.
            unsafe { self.memory.inner.driver.write(self.address(), bytes_of(host))? };
        }
        Ok(())
    }

    /// Copies all elements to `host`, once what was started before has ended.
    ///
    /// # Errors
    /// [`Error::Device`]; [`Error::Length`] when `host` is not as long.
    pub fn download(&self, device: &Device, host: &mut [T]) -> Result<(), Error> {
        crate::check_len("download", "host", "of the buffer", host.len(), &[self.len])?;
        device.ledger.note(Counter::Staged, size_of_val(host), "Buffer::download")?;
        let _turn = self.memory.inner.turn_to_copy()?;
        if self.len > 0 {
            // SAFETY: as in `fill`.
            unsafe { self.memory.inner.driver.read(self.address(), bytes_of_mut(host))? };
        }
        Ok(())
    }

    /// Copies `len` elements of another buffer of the same device, from `from` on, to the elements from `at` on.
    ///
    /// # Errors
    /// [`Error::Device`], also where the elements are not there.
    pub fn copy_from(&mut self, at: usize, other: &Buffer<T>, from: usize, len: usize) -> Result<(), Error> {
        let inside = |start: usize, all: usize| start.checked_add(len).is_some_and(|end| end <= all);
        let same = Arc::ptr_eq(&self.memory.inner, &other.memory.inner);
        if !same || !inside(at, self.len) || !inside(from, other.len) {
            return Err(Error::Device(format!("{len} elements from {from} do not go to {at}")));
        }
        let _turn = self.memory.inner.turn_to_copy()?;
        let place = |buffer: &Buffer<T>, start: usize| buffer.address() + (start * size_of::<T>()) as u64;
        if len > 0 {
            // SAFETY: both parts are inside their buffers; two buffers do not overlap, nor do the parts of
            // `copy_within`. Memory that is given back is used again only by what is started later.
            unsafe { self.memory.inner.driver.copy(place(other, from), place(self, at), len * size_of::<T>())? };
        }
        Ok(())
    }

    /// The same within the buffer; the two parts do not overlap.
    ///
    /// # Errors
    /// As [`Buffer::copy_from`].
    pub fn copy_within(&mut self, from: usize, at: usize, len: usize) -> Result<(), Error> {
        let own = Buffer { memory: self.memory.clone(), len: self.len, of: PhantomData };
        if from.abs_diff(at) < len {
            return Err(Error::Device(format!("{len} elements from {from} overlap those from {at}")));
        }
        self.copy_from(at, &own, from, len)
    }

    fn address(&self) -> u64 {
        self.memory.address
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

/// An int argument from a dimension.
pub(crate) fn int(op: &'static str, name: &str, value: usize) -> Result<i32, Error> {
    i32::try_from(value).map_err(|_| value_error(op, format!("{name} is {value}; a device takes up to {}", i32::MAX)))
}
