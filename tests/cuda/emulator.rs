//! A device for tests: the kernels' own text, compiled by the host's C++ compiler against `machine.cuh` beside this file, and
//! linked with `machine.cpp`.

use samebits_ops::Error;
use samebits_ops::device::{Arguments, Build, Clock, Driver, HEADERS, Launch, units};
use std::collections::hash_map::DefaultHasher;
use std::collections::{HashMap, HashSet};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};

/// What kernels see of the machine, and the machine.
const MACHINE: [(&str, &str); 2] =
    [("machine.cuh", include_str!("machine.cuh")), ("machine.cpp", include_str!("machine.cpp"))];

/// One change of a kernel's text: what stands in which file, and what stands there instead.
#[derive(Clone, Copy, Debug)]
pub struct Change {
    pub file: &'static str,
    pub from: &'static str,
    pub to: &'static str,
}

/// An emulated device with memory of its own.
pub struct Emulator {
    changes: Vec<Change>,
    /// Whether blocks and threads go from the last to the first.
    backwards: bool,
    /// Allocations above this are refused.
    room: usize,
    /// Whether buffers keep what they were first told once something was captured: a graph that does not see what it is
    /// told.
    stale: bool,
    /// One thread at a time.
    state: Mutex<State>,
}

struct State {
    world: *mut c_void,
    memory: Library,
    modules: Vec<(Library, HashMap<&'static str, usize>)>,
    held: HashMap<u64, usize>,
    /// Addresses that the host has written to since they were lent.
    told: HashSet<u64>,
    /// What is being captured, and what was.
    capture: Option<Vec<Recorded>>,
    graphs: HashMap<usize, Vec<Recorded>>,
}

impl Drop for State {
    fn drop(&mut self) {
        // SAFETY: the type is that of machine.cpp.
        let delete: extern "C" fn(*mut c_void) = unsafe { std::mem::transmute(self.memory.find("emulator_delete")) };
        delete(self.world);
    }
}

/// A step of captured work.
enum Recorded {
    Lend(u64, usize),
    Launch { module: usize, kernel: &'static str, grid: [u32; 3], threads: u32, shared: u32, arguments: Arguments },
}

// SAFETY: the world is used by one thread at a time, behind the lock.
unsafe impl Send for State {}

impl State {
    fn lend(&self, address: u64, bytes: usize) {
        // SAFETY: the type is that of machine.cpp.
        let lend: extern "C" fn(*mut c_void, u64, u64) =
            unsafe { std::mem::transmute(self.memory.find("emulator_lend")) };
        lend(self.world, address, bytes as u64);
    }

    fn launch(&self, launch: &Launch, backwards: bool) -> Result<(), Error> {
        let function = self.modules[launch.module].1[launch.kernel] as *const c_void;
        type Start =
            extern "C" fn(*mut c_void, *const u32, u32, u32, *const *const c_void, c_int, c_int) -> *const c_char;
        // SAFETY: the type is that of EXPORT in machine.cuh.
        let start: Start = unsafe { std::mem::transmute(function) };
        let pointers = launch.arguments.pointers();
        let error = start(
            self.world,
            launch.grid.as_ptr(),
            launch.threads,
            launch.shared,
            pointers.as_ptr(),
            pointers.len() as c_int,
            c_int::from(backwards),
        );
        if error.is_null() {
            return Ok(());
        }
        // SAFETY: a string that lives until the next launch.
        Err(Error::Device(unsafe { CStr::from_ptr(error) }.to_string_lossy().into_owned()))
    }
}

impl Emulator {
    /// # Errors
    /// A sentence when there is no C++ compiler, or it fails.
    pub fn new(changes: &[Change], backwards: bool) -> Result<Emulator, String> {
        Emulator::with_room(changes, backwards, usize::MAX)
    }

    /// One that has `room` bytes of memory.
    ///
    /// # Errors
    /// As [`Emulator::new`].
    pub fn with_room(changes: &[Change], backwards: bool, room: usize) -> Result<Emulator, String> {
        for change in changes {
            let texts = texts();
            let found =
                texts.iter().filter(|(name, _)| *name == change.file).map(|(_, t)| t.matches(change.from).count());
            let found: usize = found.sum();
            assert_eq!(found, 1, "`{}` stands {found} times in {}", change.from, change.file);
        }
        let memory = Library::build(&[], "memory", "", &[])?;
        // SAFETY: the type is that of machine.cpp.
        let new: extern "C" fn() -> *mut c_void = unsafe { std::mem::transmute(memory.find("emulator_new")) };
        let state = State {
            world: new(),
            memory,
            modules: Vec::new(),
            held: HashMap::new(),
            told: HashSet::new(),
            capture: None,
            graphs: HashMap::new(),
        };
        Ok(Emulator { changes: changes.to_vec(), backwards, room, stale: false, state: Mutex::new(state) })
    }

    /// The same with a fault: once something was captured, buffers keep what they were first told.
    pub fn with_stale_graphs(self) -> Emulator {
        Emulator { stale: true, ..self }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().expect("no panic while holding the lock")
    }
}

/// The files of all kernels.
fn texts() -> Vec<(&'static str, &'static str)> {
    let units = units().map(|unit| (file_of(unit.name), unit.source));
    HEADERS.iter().copied().filter(|(name, _)| *name != "machine.cuh").chain(units).collect()
}

/// `<unit>.cu`, for as long as the tests run.
fn file_of(unit: &'static str) -> &'static str {
    static NAMES: Mutex<Option<HashMap<&'static str, &'static str>>> = Mutex::new(None);
    let mut names = NAMES.lock().expect("no panic while holding the lock");
    names.get_or_insert_default().entry(unit).or_insert_with(|| Box::leak(format!("{unit}.cu").into_boxed_str()))
}

impl Driver for Emulator {
    fn name(&self) -> &str {
        "emulator"
    }

    fn compile(&self, build: &Build) -> Result<usize, Error> {
        let unit = build.source();
        let exports: String = unit.kernels.iter().map(|kernel| format!("EXPORT({kernel})\n")).collect();
        let text = format!("#include \"{}.cu\"\n{exports}", unit.name);
        let name = format!("{}-{}-{}{}", unit.name, build.input, build.output, if build.tf32 { "-tf32" } else { "" });
        let library = Library::build(&self.changes, &name, &text, &build.definitions());
        let library = library.map_err(|log| Error::Compile { unit: unit.name, options: "c++".into(), log })?;
        let functions =
            unit.kernels.iter().map(|&kernel| (kernel, library.find(&format!("emulated_{kernel}")) as usize));
        let functions = functions.collect();
        let mut state = self.state();
        state.modules.push((library, functions));
        Ok(state.modules.len() - 1)
    }

    fn allocate(&self, bytes: usize) -> Option<u64> {
        let mut state = self.state();
        if state.held.values().sum::<usize>() + bytes > self.room {
            return None;
        }
        // SAFETY: the type is that of machine.cpp.
        let allocate: extern "C" fn(*mut c_void, u64) -> u64 =
            unsafe { std::mem::transmute(state.memory.find("emulator_allocate")) };
        let address = Some(allocate(state.world, bytes as u64)).filter(|&address| address != 0)?;
        state.held.insert(address, bytes);
        Some(address)
    }

    unsafe fn free(&self, address: u64) {
        let mut state = self.state();
        // SAFETY: the type is that of machine.cpp.
        let free: extern "C" fn(*mut c_void, u64) = unsafe { std::mem::transmute(state.memory.find("emulator_free")) };
        free(state.world, address);
        state.held.remove(&address);
    }

    unsafe fn lend(&self, address: u64, bytes: usize) {
        let mut state = self.state();
        state.told.remove(&address);
        match &mut state.capture {
            Some(recorded) => recorded.push(Recorded::Lend(address, bytes)),
            None => state.lend(address, bytes),
        }
    }

    unsafe fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<(), Error> {
        let state = self.state();
        type Copy = extern "C" fn(*mut c_void, u64, u64, u64) -> c_int;
        // SAFETY: the type is that of machine.cpp.
        let copy: Copy = unsafe { std::mem::transmute(state.memory.find("emulator_copy")) };
        match copy(state.world, from, to, bytes as u64) {
            0 => Ok(()),
            _ => Err(Error::Device(format!("{bytes} bytes do not stand where they are copied"))),
        }
    }

    fn begin_capture(&self) -> Result<(), Error> {
        self.state().capture = Some(Vec::new());
        Ok(())
    }

    fn end_capture(&self) -> Result<usize, Error> {
        let mut state = self.state();
        let recorded = state.capture.take().expect("a capture was begun");
        let number = state.graphs.keys().max().map_or(0, |last| last + 1);
        state.graphs.insert(number, recorded);
        Ok(number)
    }

    unsafe fn replay(&self, graph: usize) -> Result<(), Error> {
        let state = self.state();
        state.graphs[&graph].iter().try_for_each(|step| match step {
            Recorded::Lend(address, bytes) => {
                state.lend(*address, *bytes);
                Ok(())
            }
            &Recorded::Launch { module, kernel, grid, threads, shared, ref arguments } => {
                state.launch(&Launch { module, kernel, grid, threads, shared, arguments }, self.backwards)
            }
        })
    }

    fn forget(&self, graph: usize) {
        self.state().graphs.remove(&graph);
    }

    unsafe fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Error> {
        let mut state = self.state();
        if !state.told.insert(address) && self.stale && !state.graphs.is_empty() {
            return Ok(());
        }
        type Write = extern "C" fn(*mut c_void, u64, *const u8, u64) -> c_int;
        // SAFETY: the type is that of machine.cpp.
        let write: Write = unsafe { std::mem::transmute(state.memory.find("emulator_write")) };
        match write(state.world, address, bytes.as_ptr(), bytes.len() as u64) {
            0 => Ok(()),
            _ => Err(Error::Device(format!("{} bytes do not fit where they are written", bytes.len()))),
        }
    }

    unsafe fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), Error> {
        let state = self.state();
        type Read = extern "C" fn(*mut c_void, u64, *mut u8, u64) -> c_int;
        // SAFETY: the type is that of machine.cpp.
        let read: Read = unsafe { std::mem::transmute(state.memory.find("emulator_read")) };
        match read(state.world, address, bytes.as_mut_ptr(), bytes.len() as u64) {
            0 => Ok(()),
            1 => Err(Error::Device(format!("{} bytes do not stand where they are read", bytes.len()))),
            _ => Err(Error::Device("the host reads what no kernel has written".into())),
        }
    }

    unsafe fn launch(&self, launch: &Launch) -> Result<(), Error> {
        let mut state = self.state();
        let &Launch { module, kernel, grid, threads, shared, arguments } = launch;
        if let Some(recorded) = &mut state.capture {
            let arguments = arguments.unheld();
            recorded.push(Recorded::Launch { module, kernel, grid, threads, shared, arguments });
            return Ok(());
        }
        state.launch(launch, self.backwards)
    }

    fn clock(&self) -> Result<Clock<'_>, Error> {
        let start = std::time::Instant::now();
        Ok(Box::new(move || Ok(start.elapsed().as_secs_f64())))
    }

    fn finish(&self) -> Result<(), Error> {
        Ok(())
    }
}

/// The struct `name` of a unit as the compiler lays it out: its size, its alignment, and offset and size of its fields.
///
/// # Errors
/// The compiler's log, also where the struct has not exactly these fields.
pub fn struct_layout(changes: &[Change], unit: &str, name: &str, fields: &[&str]) -> Result<Vec<usize>, String> {
    let of = |field: &&str| format!(", offsetof({name}, {field}), sizeof((({name} *)0)->{field})");
    // A structured binding has as many names as there are fields.
    let names: Vec<String> = (0..fields.len()).map(|at| format!("f{at}")).collect();
    let text = format!(
        "#include \"{unit}.cu\"\n#include <cstddef>\n\
         static inline void count(const {name} &all) {{ auto &[{}] = all; (void)f0; }}\n\
         extern \"C\" __attribute__((visibility(\"default\"))) const unsigned long long *struct_layout() {{\n\
         static const unsigned long long all[] = {{sizeof({name}), alignof({name}){}}};\n\
         (void)count;\nreturn all;\n}}\n",
        names.join(", "),
        fields.iter().map(of).collect::<String>(),
    );
    let definitions = ["-DIN=bf16".to_string(), "-DOUT=fp32".to_string()];
    let library = Library::build(changes, &format!("{unit}-{name}"), &text, &definitions)?;
    // SAFETY: the type is that of the text.
    let layout: extern "C" fn() -> *const u64 = unsafe { std::mem::transmute(library.find("struct_layout")) };
    // SAFETY: it has as many entries, for as long as the library is open.
    let found = unsafe { std::slice::from_raw_parts(layout(), 2 + 2 * fields.len()) };
    Ok(found.iter().map(|&number| number as usize).collect())
}

/// A shared library, opened until the process ends.
struct Library(*mut c_void);

// SAFETY: a handle of dlopen may be used from any thread.
unsafe impl Send for Library {}

impl Library {
    /// Compiles `text`, which includes files of the kernels with `changes` applied, and opens the result. What was compiled
    /// before from the same files with the same options is opened as it is.
    fn build(changes: &[Change], name: &str, text: &str, definitions: &[String]) -> Result<Library, String> {
        let compiler = compiler()?;
        // Those that it includes, so that another one's change compiles nothing anew.
        let mut files: Vec<(String, String)> = vec![("unit.cpp".into(), text.into())];
        let mut read = 0;
        while read < files.len() {
            for file in included(&files[read].1) {
                if files.iter().all(|(known, _)| *known != file) {
                    files.push((file.clone(), changed(&file, changes)));
                }
            }
            read += 1;
        }
        let mut options: Vec<String> =
            ["-std=c++17", "-O1", "-ffp-contract=off", "-fno-gnu-unique", "-fvisibility=hidden", "-fPIC"]
                .map(String::from)
                .to_vec();
        if cfg!(target_arch = "x86_64") && samebits_ops::Isa::Avx2.available() {
            // fma as an instruction; without it the library's fmaf is as right, and slow.
            options.push("-mfma".into());
        }
        let machine = machine(&compiler, &options)?;
        options.extend(definitions.iter().cloned());

        let mut hasher = DefaultHasher::new();
        (&files, &options, &machine).hash(&mut hasher);
        let folder = emulator_folder().join(format!("{name}-{:016x}", hasher.finish()));
        let library = folder.join("unit.so");
        if !library.exists() {
            // Tests run side by side and may want the same one: each builds in a folder of its own.
            static BUILDS: AtomicUsize = AtomicUsize::new(0);
            let build = BUILDS.fetch_add(1, Ordering::Relaxed);
            let building = folder.with_extension(format!("{}-{build}", std::process::id()));
            let [header, object] = ["machine.hpp", "machine.o"].map(|file| machine.join(file).display().to_string());
            let all = ["-include", &header, "-shared", "unit.cpp", &object, "-o", "unit.so"];
            compile(&compiler, &building, &files, &options, &all)?;
            std::fs::create_dir_all(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
            std::fs::rename(building.join("unit.so"), &library).map_err(|e| format!("{}: {e}", library.display()))?;
            let _ = std::fs::remove_dir_all(&building);
        }
        open(&library)
    }

    fn find(&self, name: &str) -> *const c_void {
        let symbol = CString::new(name).expect("names hold no zero");
        // SAFETY: the handle is open, the string ends in zero.
        let found = unsafe { libc::dlsym(self.0, symbol.as_ptr()) };
        assert!(!found.is_null(), "no symbol {name}");
        found
    }
}

fn emulator_folder() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulator")
}

/// The folder with `machine.cuh` as a compiled header, `machine.hpp`, and `machine.cpp` as an object, `machine.o`: made once,
/// as together they take twice the time of a small kernel. Definitions of a kernel do not reach them. Where the compiler has
/// no use for the compiled header, it reads the text.
fn machine(compiler: &str, options: &[String]) -> Result<PathBuf, String> {
    static FOLDER: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let make = || {
        let mut hasher = DefaultHasher::new();
        (MACHINE, options, compiler).hash(&mut hasher);
        let folder = emulator_folder().join(format!("machine-{:016x}", hasher.finish()));
        if !folder.exists() {
            let building = folder.with_extension(std::process::id().to_string());
            let mut files = MACHINE.map(|(name, text)| (name.to_string(), text.to_string())).to_vec();
            files.push(("machine.hpp".into(), MACHINE[0].1.into()));
            compile(
                compiler,
                &building,
                &files,
                options,
                &["-x", "c++-header", "machine.hpp", "-o", "machine.hpp.gch"],
            )?;
            compile(compiler, &building, &[], options, &["-O2", "-c", "machine.cpp", "-o", "machine.o"])?;
            // Another process may have been as quick.
            if std::fs::rename(&building, &folder).is_err() {
                std::fs::remove_dir_all(&building).map_err(|e| format!("{}: {e}", building.display()))?;
            }
        }
        Ok(folder)
    };
    FOLDER.get_or_init(make).clone()
}

/// The files that `text` includes beside those of the system.
fn included(text: &str) -> Vec<String> {
    let names = text.lines().filter_map(|line| line.strip_prefix("#include \"")?.split('"').next());
    names.map(str::to_string).collect()
}

/// The text of a file of the kernels, with its changes.
fn changed(file: &str, changes: &[Change]) -> String {
    if let Some((_, text)) = MACHINE.iter().find(|(name, _)| *name == file) {
        return text.to_string();
    }
    let (_, text) = texts().into_iter().find(|(name, _)| *name == file).expect("a kernel includes files of kernels");
    let changes = changes.iter().filter(|change| change.file == file);
    changes.fold(text.to_string(), |text, change| text.replacen(change.from, change.to, 1))
}

/// The C++ compiler: `CXX`, or one of the usual names.
fn compiler() -> Result<String, String> {
    let named = std::env::var("CXX").ok();
    let names = named.as_deref().into_iter().chain(["c++", "g++", "clang++"]);
    let works = |name: &&str| Command::new(name).arg("--version").output().is_ok_and(|output| output.status.success());
    let found = { names }.find(works);
    found.map(str::to_string).ok_or("no C++ compiler: install g++, or name one in CXX; the emulator needs it".into())
}

/// Runs the compiler in `folder`, with `files` written to it.
fn compile(
    compiler: &str,
    folder: &Path,
    files: &[(String, String)],
    options: &[String],
    more: &[&str],
) -> Result<(), String> {
    let fail = |e: std::io::Error| format!("{}: {e}", folder.display());
    std::fs::create_dir_all(folder).map_err(fail)?;
    for (name, text) in files {
        std::fs::write(folder.join(name), text).map_err(fail)?;
    }
    let output = Command::new(compiler).current_dir(folder).args(options).args(more).output();
    let output = output.map_err(|e| format!("{compiler}: {e}"))?;
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
}

fn open(library: &Path) -> Result<Library, String> {
    let path = CString::new(library.to_str().expect("paths of the build are UTF-8")).expect("paths hold no zero");
    // SAFETY: the string ends in zero; the library's initialisers only make an empty world.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if handle.is_null() {
        // SAFETY: after a dlopen that failed it is a string that ends in zero, and stays until the next call of this thread.
        let why = unsafe { CStr::from_ptr(libc::dlerror()) };
        return Err(format!("{} cannot be opened: {}", library.display(), why.to_string_lossy()));
    }
    Ok(Library(handle))
}
