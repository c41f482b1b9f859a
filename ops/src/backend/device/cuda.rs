//! NVIDIA GPUs through the CUDA driver and NVRTC, both opened at run time: a machine without them runs everything else.

use super::{Build, Clock, Driver, HEADERS, Launch, lock};
use crate::Error;
use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdevice_attribute as Attribute, CUevent, CUfunction, CUgraph, CUgraphExec, CUmodule, CUstream,
};
use cudarc::driver::{DriverError, result as cuda, sys as cuda_sys};
use cudarc::nvrtc::sys as nvrtc;
use std::collections::HashMap;
use std::ffi::{CString, c_int, c_void};
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// How many GPUs the driver lists.
///
/// # Errors
/// [`Error::Unavailable`] when there is no driver, or it lists none.
pub fn count() -> Result<usize, Error> {
    // SAFETY: opening the driver library runs only its own initialisers; cudarc panics when it is called without the
    // library, which is why this is asked first.
    if !unsafe { cuda_sys::is_culib_present() } {
        return Err(Error::Unavailable("no CUDA device: no driver library found (libcuda)".into()));
    }
    let none = |e: DriverError| Error::Unavailable(format!("no CUDA device: the driver does not start: {:?}", e.0));
    cuda::init().map_err(none)?;
    match cuda::device::get_count().map_err(none)? {
        ..=0 => Err(Error::Unavailable("no CUDA device: the driver lists none".into())),
        count => Ok(count as usize),
    }
}

/// What a build was compiled to.
#[non_exhaustive]
pub struct Compiled {
    /// Assembly for any device of the architecture.
    pub ptx: String,
    /// Machine code.
    pub cubin: Vec<u8>,
    /// What the compiler and the assembler said: registers, spills and shared memory with `--ptxas-options=-v`.
    pub log: String,
}

/// The options that the bits depend on, and the architecture.
pub fn options(build: &Build, arch: &str) -> Vec<String> {
    let fixed = ["--fmad=false", "--prec-div=true", "--prec-sqrt=true", "--ftz=false", "--std=c++17"];
    let mut options = vec![format!("--gpu-architecture={arch}")];
    options.extend(fixed.map(String::from));
    // Lambdas and the member functions of function objects are the device's own.
    options.push("--device-as-default-execution-space".into());
    options.extend(build.definitions());
    options
}

/// The version of NVRTC.
///
/// # Errors
/// [`Error::Unavailable`] when it is not found.
pub fn compiler_version() -> Result<String, Error> {
    // SAFETY: as for the driver library.
    if !unsafe { nvrtc::is_culib_present() } {
        return Err(Error::Unavailable("no kernel compiler: no library found (libnvrtc)".into()));
    }
    let (mut major, mut minor): (c_int, c_int) = (0, 0);
    // SAFETY: nvrtcVersion writes one int through each pointer.
    let result = unsafe { nvrtc::nvrtcVersion(&mut major, &mut minor) };
    result.result().map_err(|e| Error::Unavailable(format!("the kernel compiler has no version: {e:?}")))?;
    Ok(format!("{major}.{minor}"))
}

/// Compiles a build, or another text in the place of its source, with more options than [`options`].
///
/// # Errors
/// [`Error::Compile`] with the log; [`Error::Unavailable`] without a compiler.
pub fn compile(build: &Build, source: &str, arch: &str, more: &[&str]) -> Result<Compiled, Error> {
    compiler_version()?;
    let options: Vec<String> = options(build, arch).into_iter().chain(more.iter().map(|o| o.to_string())).collect();
    let text = |text: &str| CString::new(text).expect("sources and options hold no zero");
    let fail = |log: String| Error::Compile { unit: build.source().name, options: options.join(" "), log };

    let (name, source) = (text(&format!("{}.cu", build.unit)), text(source));
    let names: Vec<CString> = HEADERS.iter().map(|(name, _)| text(name)).collect();
    let texts: Vec<CString> = HEADERS.iter().map(|(_, header)| text(header)).collect();
    let pointers = |strings: &[CString]| strings.iter().map(|s| s.as_ptr()).collect::<Vec<_>>();
    let (name_pointers, text_pointers) = (pointers(&names), pointers(&texts));
    let mut program = std::ptr::null_mut();
    // SAFETY: the strings end in zero and outlive the call, which copies them; the counts are those of the arrays.
    unsafe {
        nvrtc::nvrtcCreateProgram(
            &mut program,
            source.as_ptr(),
            name.as_ptr(),
            HEADERS.len() as c_int,
            text_pointers.as_ptr(),
            name_pointers.as_ptr(),
        )
    }
    .result()
    .map_err(|e| fail(format!("{e:?}")))?;
    let program = Program(program);

    let given: Vec<CString> = options.iter().map(|option| text(option)).collect();
    let given_pointers = pointers(&given);
    // SAFETY: the program was made above; the options outlive the call.
    let done = unsafe { nvrtc::nvrtcCompileProgram(program.0, given.len() as c_int, given_pointers.as_ptr()) }.result();
    let log = program.log();
    if let Err(e) = done {
        return Err(fail(format!("{e:?}\n{log}")));
    }
    let cubin = program.bytes(nvrtc::nvrtcGetCUBINSize, nvrtc::nvrtcGetCUBIN).map_err(|e| fail(format!("{e:?}")))?;
    let ptx = program.bytes(nvrtc::nvrtcGetPTXSize, nvrtc::nvrtcGetPTX).map_err(|e| fail(format!("{e:?}")))?;
    Ok(Compiled { ptx: string(ptx), cubin, log })
}

fn string(mut bytes: Vec<u8>) -> String {
    while bytes.last() == Some(&0) {
        bytes.pop();
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

struct Program(nvrtc::nvrtcProgram);

type Size = unsafe fn(nvrtc::nvrtcProgram, *mut usize) -> nvrtc::nvrtcResult;
type Get = unsafe fn(nvrtc::nvrtcProgram, *mut std::ffi::c_char) -> nvrtc::nvrtcResult;

impl Program {
    fn bytes(&self, size: Size, get: Get) -> Result<Vec<u8>, cudarc::nvrtc::result::NvrtcError> {
        let mut count = 0;
        // SAFETY: the program is live; `size` writes one number.
        unsafe { size(self.0, &mut count) }.result()?;
        let mut bytes = vec![0u8; count];
        // SAFETY: there is room for as many bytes as `size` said.
        unsafe { get(self.0, bytes.as_mut_ptr().cast()) }.result()?;
        Ok(bytes)
    }

    fn log(&self) -> String {
        self.bytes(nvrtc::nvrtcGetProgramLogSize, nvrtc::nvrtcGetProgramLog).map(string).unwrap_or_default()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: made by nvrtcCreateProgram and destroyed once.
        let _ = unsafe { nvrtc::nvrtcDestroyProgram(&mut self.0) };
    }
}

/// A stream of one GPU, on which everything happens in order: its own, or another one's.
pub struct Cuda {
    gpu: Arc<Gpu>,
    stream: CUstream,
    /// Of a stream of its own; another one's is waited for only where something is read.
    staging: Option<Mutex<Staging>>,
    /// Captured graphs by number.
    graphs: Mutex<HashMap<usize, (CUgraph, CUgraphExec)>>,
}

/// One GPU: its primary context and what was compiled for it.
struct Gpu {
    name: String,
    arch: String,
    compiler: String,
    /// Folder of compiled kernels, when they are kept.
    cache: Option<PathBuf>,
    /// Folder of units that are taken in the place of the program's own, for those who work on kernels.
    sources: Option<PathBuf>,
    modules: Mutex<Vec<Module>>,
    /// Given back last.
    context: Context,
}

/// The primary context of a GPU, retained.
struct Context(CUdevice, CUcontext);

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: it was retained once. An error has nowhere to go.
        let _ = unsafe { cuda::primary_ctx::release(self.0) };
    }
}

/// Pinned memory that small copies to the device go through. The driver may read the source of a copy until the copy has
/// ended, where the source is pinned and, in CUDA 11, where it is not; nobody but us knows this one, and no part of it is
/// written again before the stream was waited for.
struct Staging {
    start: *mut u8,
    used: usize,
}

/// Bytes of it. Larger copies are waited for.
const STAGING: usize = 256 << 10;

struct Module {
    module: CUmodule,
    functions: HashMap<&'static str, CUfunction>,
}

// SAFETY: handles of the driver may be used from any thread that has made the context current, which every method does.
unsafe impl Send for Cuda {}
// SAFETY: as above; the staging memory and the list of graphs are behind locks, and the driver locks its own.
unsafe impl Sync for Cuda {}
// SAFETY: as for `Cuda`.
unsafe impl Send for Gpu {}
// SAFETY: as for `Cuda`; the list of modules is behind a lock.
unsafe impl Sync for Gpu {}

/// The context that was current on this thread, and is again when this goes: another library may count on it.
pub struct ContextBefore(CUcontext, PhantomData<*const ()>);

impl Drop for ContextBefore {
    fn drop(&mut self) {
        // SAFETY: it was current on this thread, which is the same: the type is not `Send`. An error has nowhere to go.
        let _ = unsafe { cuda::ctx::set_current(self.0) };
    }
}

/// The driver is there.
fn context_before() -> Result<ContextBefore, Error> {
    let before = cuda::ctx::get_current().map_err(failed("cuCtxGetCurrent"))?;
    Ok(ContextBefore(before.unwrap_or(std::ptr::null_mut()), PhantomData))
}

/// Frees what [`Cuda::write_behind`] gave the stream.
///
/// # Safety
/// `source` is from `Box::into_raw` and not used again.
unsafe extern "C" fn free_source(source: *mut c_void) {
    // SAFETY: as the caller promises.
    drop(unsafe { Box::from_raw(source.cast::<Vec<u8>>()) });
}

impl Cuda {
    /// Opens GPU `ordinal`. With `cache`, compiled kernels are kept in that folder. The current context stays what it was.
    ///
    /// # Errors
    /// [`Error::Unavailable`] without a driver, a compiler or that GPU; [`Error::Device`].
    pub fn open(ordinal: usize, cache: Option<&Path>) -> Result<Cuda, Error> {
        let there = count()?;
        if ordinal >= there {
            return Err(Error::Unavailable(format!("no CUDA device {ordinal}; the driver lists {there}, from 0 on")));
        }
        let compiler = compiler_version()?;
        let _before = context_before()?;
        let device = cuda::device::get(ordinal as c_int).map_err(failed("cuDeviceGet"))?;
        let attribute = |which| {
            // SAFETY: `device` was returned by cuDeviceGet, which is all that is asked for.
            unsafe { cuda::device::get_attribute(device, which) }.map_err(failed("cuDeviceGetAttribute"))
        };
        let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let arch = format!("sm_{major}{minor}");
        let model = cuda::device::get_name(device).map_err(failed("cuDeviceGetName"))?;
        // SAFETY: as for the attributes.
        let context = unsafe { cuda::primary_ctx::retain(device) }.map_err(failed("cuDevicePrimaryCtxRetain"))?;
        let context = Context(device, context);
        // SAFETY: the context was just retained.
        unsafe { cuda::ctx::set_current(context.1) }.map_err(failed("cuCtxSetCurrent"))?;
        let stream = cuda::stream::create(cuda::stream::StreamKind::NonBlocking).map_err(failed("cuStreamCreate"))?;
        let gpu = Gpu {
            name: format!("cuda:{ordinal} {model} ({arch}), nvrtc {compiler}"),
            arch,
            compiler,
            cache: cache.map(Path::to_path_buf),
            sources: None,
            modules: Mutex::default(),
            context,
        };
        let staging = Some(Mutex::new(Staging { start: std::ptr::null_mut(), used: 0 }));
        let cuda = Cuda { gpu: Arc::new(gpu), stream, staging, graphs: Mutex::default() };
        // SAFETY: the context is current; what drops `cuda` frees the memory.
        let start = unsafe { cuda::malloc_host(STAGING, 0) }.map_err(failed("cuMemHostAlloc"))?;
        lock(cuda.staging.as_ref().expect("it was given one")).start = start.cast();
        Ok(cuda)
    }

    /// Lets this thread have the context that it has now again when the result goes.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn keep_context(&self) -> Result<ContextBefore, Error> {
        context_before()
    }

    /// The same GPU and modules with their work on a stream of somebody else's, behind what is there: 1 is the default
    /// stream. The host waits for it only to read; memory is taken and given back in its order.
    ///
    /// # Safety
    /// The stream is of the GPU's primary context and lives as long as the result; what was started on it has ended before
    /// the last of the GPU's drivers is dropped.
    pub unsafe fn on(&self, stream: u64) -> Cuda {
        Cuda { gpu: self.gpu.clone(), stream: stream as CUstream, staging: None, graphs: Mutex::default() }
    }

    /// Takes units from the files `<unit>.cu` of `folder`, those that are there.
    ///
    /// # Safety
    /// Their kernels take the arguments of the program's own and touch no other memory.
    pub unsafe fn with_sources(mut self, folder: PathBuf) -> Cuda {
        let gpu = Arc::get_mut(&mut self.gpu).expect("it was just opened");
        gpu.name += &format!(", kernels of {}", folder.display());
        gpu.sources = Some(folder);
        self
    }

    fn current(&self) -> Result<(), Error> {
        self.gpu.current()
    }

    /// Waits for the stream.
    fn wait(&self) -> Result<(), Error> {
        // SAFETY: the stream is of this context.
        unsafe { cuda::stream::synchronize(self.stream) }.map_err(failed("cuStreamSynchronize"))
    }

    /// Waits for the stream; then the staging memory is free again.
    fn drain(&self, staging: &mut Staging) -> Result<(), Error> {
        self.wait()?;
        staging.used = 0;
        Ok(())
    }

    /// Copies to the device without a wait: the stream keeps what it copies, and frees it.
    ///
    /// # Safety
    /// As [`Driver::write`].
    unsafe fn write_behind(&self, address: u64, bytes: &[u8]) -> Result<(), Error> {
        // SAFETY: the stream is of this context.
        let capturing = unsafe { cuda::stream::is_capturing(self.stream) }.map_err(failed("cuStreamIsCapturing"))?;
        if capturing != cuda_sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
            // A graph would read the source again when it is replayed.
            let what = "the stream is being captured, and a graph cannot keep numbers of the host";
            return Err(Error::Device(what.into()));
        }
        let source = Box::new(bytes.to_vec());
        // SAFETY: as many bytes at `address` are live, by the caller's promise; the source lives until the stream is
        // behind the copy: `free_source` comes after it, or we wait.
        unsafe { cuda::memcpy_htod_async(address, source.as_slice(), self.stream) }
            .map_err(failed("cuMemcpyHtoDAsync"))?;
        let source = Box::into_raw(source);
        // SAFETY: the function is given the box once.
        let freed = unsafe { cuda::stream::launch_host_function(self.stream, free_source, source.cast()) };
        freed.map_err(|e| {
            // What cannot be waited for may be read as long as the process lives.
            if self.wait().is_ok() {
                // SAFETY: it was not given away, and the copy has ended.
                unsafe { free_source(source.cast()) };
            }
            failed("cuLaunchHostFunc")(e)
        })
    }
}

impl Gpu {
    fn current(&self) -> Result<(), Error> {
        // SAFETY: the context is retained as long as self lives.
        unsafe { cuda::ctx::set_current(self.context.1) }.map_err(failed("cuCtxSetCurrent"))
    }

    /// Machine code of a build, from the cache where it is there. A file of the cache holds what it was made from, and is
    /// read only for exactly that.
    fn code(&self, build: &Build) -> Result<Vec<u8>, Error> {
        let options = options(build, &self.arch).join(" ");
        let own = self.sources.as_ref().map(|folder| folder.join(format!("{}.cu", build.unit)));
        let source = match own.filter(|path| path.exists()) {
            Some(path) => std::fs::read_to_string(&path)
                .map_err(|e| Error::Unavailable(format!("cannot read {}: {e}", path.display())))?,
            None => build.source().source.to_string(),
        };
        let mut key = format!("nvrtc {}\n{options}\n{source}", self.compiler);
        HEADERS.iter().for_each(|(name, text)| key.extend(["\n", name, "\n", text]));
        let path = self.cache.as_ref().map(|folder| {
            let types = format!("{}-{}-{}", build.input, build.output, if build.tf32 { "tf32" } else { "ieee" });
            folder.join(format!("{}-{types}-{}-nvrtc{}.cubin", build.unit, self.arch, self.compiler))
        });
        let kept = path.as_ref().and_then(|path| std::fs::read(path).ok());
        if let Some(code) = kept.as_deref().and_then(|file| whole(file, &key)) {
            return Ok(code.to_vec());
        }
        let code = compile(build, &source, &self.arch, &[])?.cubin;
        if let Some(path) = path {
            let file = [key.as_bytes(), &(code.len() as u64).to_le_bytes(), &code].concat();
            keep(&path, &file).map_err(|e| Error::Device(format!("cannot keep {}: {e}", path.display())))?;
        }
        Ok(code)
    }
}

/// The code in a file of the cache, if all of it is there and was made from `key`: the driver is not told where it ends.
fn whole<'a>(file: &'a [u8], key: &str) -> Option<&'a [u8]> {
    let (len, code) = file.strip_prefix(key.as_bytes())?.split_first_chunk()?;
    (u64::from_le_bytes(*len) == code.len() as u64).then_some(code)
}

impl Drop for Cuda {
    fn drop(&mut self) {
        let Some(staging) = &self.staging else { return };
        // Errors have nowhere to go; the process gives everything back when it ends.
        if self.finish().is_err() {
            return;
        }
        for (_, (graph, exec)) in lock(&self.graphs).drain() {
            // SAFETY: made by end_capture and destroyed once; nothing runs any more.
            let _ = unsafe { (cuda::graph::exec_destroy(exec), cuda::graph::destroy(graph)) };
        }
        let staging = lock(staging).start;
        if !staging.is_null() {
            // SAFETY: from malloc_host, and no copy is under way.
            let _ = unsafe { cuda::free_host(staging.cast()) };
        }
        // SAFETY: made by this context.
        let _ = unsafe { cuda::stream::destroy(self.stream) };
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        if self.current().is_err() {
            return;
        }
        for module in lock(&self.modules).drain(..) {
            // SAFETY: loaded by this context; what ran on its own streams and, by the promise of `on`, on others has ended.
            let _ = unsafe { cuda::module::unload(module.module) };
        }
    }
}

/// An event of the driver.
struct Event<'a>(&'a Cuda, CUevent);

impl Event<'_> {
    fn new(cuda: &Cuda) -> Result<Event<'_>, Error> {
        let event = cuda::event::create(cuda_sys::CUevent_flags::CU_EVENT_DEFAULT).map_err(failed("cuEventCreate"))?;
        Ok(Event(cuda, event))
    }

    fn record(&self) -> Result<(), Error> {
        // SAFETY: event and stream are of one context.
        unsafe { cuda::event::record(self.1, self.0.stream) }.map_err(failed("cuEventRecord"))
    }
}

impl Drop for Event<'_> {
    fn drop(&mut self) {
        if self.0.current().is_ok() {
            // SAFETY: made in `new`, destroyed once.
            let _ = unsafe { cuda_sys::cuEventDestroy_v2(self.1) };
        }
    }
}

/// Writes a file of the cache beside its place and renames it, so that nobody reads half of one.
fn keep(path: &Path, file: &[u8]) -> std::io::Result<()> {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    if std::fs::symlink_metadata(path).is_ok_and(|found| !found.is_file()) {
        return Err(std::io::Error::other("it is there and is no regular file"));
    }
    std::fs::create_dir_all(path.parent().expect("a file has a folder"))?;
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let part = path.with_extension(format!("{}-{number}.tmp", std::process::id()));
    let kept = std::fs::write(&part, file).and_then(|()| std::fs::rename(&part, path));
    if kept.is_err() {
        // The error that counts is the first.
        let _ = std::fs::remove_file(&part);
    }
    kept
}

/// Names the call that failed.
fn failed(call: &'static str) -> impl Fn(DriverError) -> Error {
    move |e| Error::Device(format!("{call}: {:?}", e.0))
}

impl Driver for Cuda {
    fn name(&self) -> &str {
        &self.gpu.name
    }

    fn compile(&self, build: &Build) -> Result<usize, Error> {
        let code = self.gpu.code(build)?;
        self.current()?;
        // SAFETY: NVRTC made the image for this device, and all of it is there.
        let module = unsafe { cuda::module::load_data(code.as_ptr().cast()) }.map_err(failed("cuModuleLoadData"))?;
        let mut functions = HashMap::new();
        for &kernel in build.source().kernels {
            let name = CString::new(kernel).expect("names hold no zero");
            // SAFETY: the module was just loaded.
            let function =
                unsafe { cuda::module::get_function(module, name) }.map_err(failed("cuModuleGetFunction"))?;
            functions.insert(kernel, function);
        }
        let mut modules = lock(&self.gpu.modules);
        modules.push(Module { module, functions });
        Ok(modules.len() - 1)
    }

    fn allocate(&self, bytes: usize) -> Option<u64> {
        self.current().ok()?;
        if self.staging.is_none() {
            // SAFETY: as below, in the order of the stream.
            return unsafe { cuda::malloc_async(self.stream, bytes) }.ok();
        }
        // SAFETY: the context is current; the memory is freed by `free`.
        unsafe { cuda::malloc_sync(bytes) }.ok()
    }

    unsafe fn free(&self, address: u64) {
        if self.staging.is_none() {
            if self.current().is_ok() {
                // SAFETY: as below; what was started before comes before it in the stream.
                let _ = unsafe { cuda::free_async(address, self.stream) };
            }
            return;
        }
        // What fails here has failed for good, and then nothing runs.
        let _ = self.finish();
        // SAFETY: the caller's promise: `allocate` gave the address, and nothing uses it any more.
        let _ = unsafe { cuda::free_sync(address) };
    }

    unsafe fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Error> {
        self.current()?;
        let Some(staging) = &self.staging else {
            // SAFETY: the caller's promise.
            return unsafe { self.write_behind(address, bytes) };
        };
        let copy = |bytes: &[u8]| {
            // SAFETY: as many bytes at `address` are live, by the caller's promise; the stream is of this context.
            unsafe { cuda::memcpy_htod_async(address, bytes, self.stream) }.map_err(failed("cuMemcpyHtoDAsync"))
        };
        let mut staging = lock(staging);
        if bytes.len() > STAGING {
            // The driver may read `bytes` as long as the copy lasts.
            let started = copy(bytes);
            return started.and(self.drain(&mut staging));
        }
        if bytes.len() > STAGING - staging.used {
            self.drain(&mut staging)?;
        }
        // SAFETY: there are STAGING bytes, and no copy under way reads those behind `used`.
        let staged = unsafe { std::slice::from_raw_parts_mut(staging.start.add(staging.used), bytes.len()) };
        staged.copy_from_slice(bytes);
        staging.used += bytes.len();
        copy(staged)
    }

    unsafe fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), Error> {
        self.current()?;
        // SAFETY: as many bytes at `address` are live, by the caller's promise; the stream is waited for before `bytes`
        // is given back, whatever was returned.
        let started = unsafe { cuda::memcpy_dtoh_async(bytes, address, self.stream) };
        started.map_err(failed("cuMemcpyDtoHAsync")).and(self.finish())
    }

    unsafe fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<(), Error> {
        self.current()?;
        // SAFETY: the caller's promise.
        unsafe { cuda::memcpy_dtod_async(to, from, bytes, self.stream) }.map_err(failed("cuMemcpyDtoDAsync"))
    }

    fn begin_capture(&self) -> Result<(), Error> {
        self.current()?;
        // Relaxed: memory may be taken and modules loaded meanwhile.
        let mode = cuda_sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream was made by this context.
        unsafe { cuda::stream::begin_capture(self.stream, mode) }.map_err(failed("cuStreamBeginCapture"))
    }

    fn end_capture(&self) -> Result<usize, Error> {
        self.current()?;
        // SAFETY: a capture of this stream was begun.
        let graph = unsafe { cuda::stream::end_capture(self.stream) }.map_err(failed("cuStreamEndCapture"))?;
        // SAFETY: the graph was just made; it lives until it is forgotten.
        let exec = unsafe { cuda::graph::instantiate(graph, cuda_sys::CUgraphInstantiate_flags(0)) }.map_err(|e| {
            // SAFETY: made above and destroyed once.
            let _ = unsafe { cuda::graph::destroy(graph) };
            failed("cuGraphInstantiate")(e)
        })?;
        let mut graphs = lock(&self.graphs);
        let number = graphs.keys().max().map_or(0, |last| last + 1);
        graphs.insert(number, (graph, exec));
        Ok(number)
    }

    unsafe fn replay(&self, graph: usize) -> Result<(), Error> {
        self.current()?;
        let (_, exec) = lock(&self.graphs)[&graph];
        // SAFETY: the graph has not been forgotten, and what it uses is live.
        unsafe { cuda::graph::launch(exec, self.stream) }.map_err(failed("cuGraphLaunch"))
    }

    fn forget(&self, graph: usize) {
        let known = lock(&self.graphs).remove(&graph);
        // It may be under way; errors have nowhere to go.
        if let (Some((graph, exec)), Ok(())) = (known, self.current().and_then(|()| self.finish())) {
            // SAFETY: made by end_capture and destroyed once.
            let _ = unsafe { (cuda::graph::exec_destroy(exec), cuda::graph::destroy(graph)) };
        }
    }

    unsafe fn launch(&self, launch: &Launch) -> Result<(), Error> {
        self.current()?;
        let function = {
            let modules = lock(&self.gpu.modules);
            modules[launch.module].functions[launch.kernel]
        };
        if launch.shared > 0 {
            let attribute = cuda_sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function belongs to a module that lives as long as self.
            unsafe { cuda::function::set_function_attribute(function, attribute, launch.shared as i32) }
                .map_err(failed("cuFuncSetAttribute"))?;
        }
        let [x, y, z] = launch.grid;
        let mut pointers: Vec<*mut _> = launch.arguments.pointers().into_iter().map(<*const _>::cast_mut).collect();
        // SAFETY: the caller's promise; the driver copies the arguments before it returns and writes to none of them.
        unsafe {
            cuda::launch_kernel(function, (x, y, z), (launch.threads, 1, 1), launch.shared, self.stream, &mut pointers)
        }
        .map_err(|e| Error::Device(format!("cuLaunchKernel of {}: {:?}", launch.kernel, e.0)))
    }

    fn clock(&self) -> Result<Clock<'_>, Error> {
        self.current()?;
        let (start, end) = (Event::new(self)?, Event::new(self)?);
        start.record()?;
        Ok(Box::new(move || {
            // The events themselves: of `start.1` alone the closure would hold a copy, and the event would end with this function.
            let (start, end) = (&start, &end);
            self.current()?;
            end.record()?;
            self.finish()?;
            // SAFETY: both have been recorded, and the stream has passed them.
            let took = unsafe { cuda::event::elapsed(start.1, end.1) }.map_err(failed("cuEventElapsedTime"))?;
            Ok(f64::from(took) / 1e3)
        }))
    }

    fn finish(&self) -> Result<(), Error> {
        self.current()?;
        match &self.staging {
            Some(staging) => self.drain(&mut lock(staging)),
            None => self.wait(),
        }
    }
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn code_is_taken_from_the_cache_whole_or_not_at_all() {
        let file = |len: u64| [b"key".as_slice(), &len.to_le_bytes(), b"code"].concat();
        assert_eq!(whole(&file(4), "key"), Some(&b"code"[..]));
        assert_eq!(whole(&file(4), "another key"), None);
        for cut in 0..file(4).len() {
            assert_eq!(whole(&file(4)[..cut], "key"), None, "{cut} bytes of a file");
        }
    }

    pub(crate) fn a_file_of_the_cache_is_whole_and_nothing_else_is_replaced() {
        let folder = std::env::temp_dir().join(format!("samebits-kernels-{}", std::process::id()));
        let path = folder.join("new/unit.cubin");
        keep(&path, b"first").unwrap();
        keep(&path, b"second").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"second");
        let odd = folder.join("new/folder.cubin");
        std::fs::create_dir(&odd).unwrap();
        assert!(keep(&odd, b"third").is_err());
        #[cfg(unix)]
        {
            let link = folder.join("new/link.cubin");
            std::os::unix::fs::symlink("unit.cubin", &link).unwrap();
            assert!(keep(&link, b"fourth").is_err());
            assert!(link.is_symlink() && std::fs::read(&path).unwrap() == b"second");
            std::fs::remove_file(link).unwrap();
        }
        assert_eq!(std::fs::read_dir(folder.join("new")).unwrap().count(), 2, "nothing is left behind");
        std::fs::remove_dir_all(folder).unwrap();
    }
}
