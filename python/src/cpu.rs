//! How ops run: instruction set, threads and workspace, of the process. It moves no bit.

use crate::call::exception;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use samebits_ops::Isa;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The settings in use; taken for a moment with the interpreter's lock, so that no fork happens meanwhile.
static CURRENT: Mutex<Option<Cpu>> = Mutex::new(None);

/// How often this process is the child of a fork: workspaces and counters of before are another process's.
static FORKS: AtomicUsize = AtomicUsize::new(0);

/// How to run: instruction set, threads, and bytes of workspace per op. It moves no bit.
///
/// `isa` is "scalar", "avx2", "avx512" or "avx512bf16" (the best of this machine), `threads` 1 to 1024 (all cores, and no more
/// than OMP_NUM_THREADS says, which torchrun sets to 1), `budget` a number of bytes (no limit). In a `with` block it is the
/// one of the process; so is what `set_cpu` was given.
///
/// Raises ValueError for a word or number that there is not, NotImplementedError for what the machine lacks.
#[pyclass(frozen, module = "samebits", from_py_object)]
#[derive(Clone)]
pub struct Cpu {
    cpu: samebits_ops::Cpu,
    forks: usize,
}

impl Cpu {
    fn of(cpu: samebits_ops::Cpu) -> Cpu {
        Cpu { cpu, forks: FORKS.load(Ordering::Relaxed) }
    }

    /// The same in this process.
    fn here(&self) -> PyResult<Cpu> {
        if self.forks == FORKS.load(Ordering::Relaxed) {
            return Ok(self.clone());
        }
        let cpu = samebits_ops::Cpu::new(self.cpu.isa(), self.cpu.threads(), self.cpu.budget());
        Ok(Cpu::of(cpu.map_err(exception)?))
    }
}

/// What a `with` block has replaced, the last one last.
static REPLACED: Mutex<Vec<Cpu>> = Mutex::new(Vec::new());

#[pymethods]
impl Cpu {
    #[new]
    #[pyo3(signature = (isa = None, threads = None, budget = None))]
    fn new(isa: Option<&str>, threads: Option<usize>, budget: Option<usize>) -> PyResult<Cpu> {
        let best = samebits_ops::Cpu::best();
        let isa = match isa {
            None => best.isa(),
            Some(name) => name.parse::<Isa>().map_err(|e| PyValueError::new_err(e.to_string()))?,
        };
        let threads = threads.unwrap_or_else(default_threads);
        if !(1..=1024).contains(&threads) {
            return Err(PyValueError::new_err(format!("threads is {threads}; use 1 to 1024")));
        }
        let cpu = samebits_ops::Cpu::new(isa, threads, budget.unwrap_or(usize::MAX));
        Ok(Cpu::of(cpu.map_err(exception)?))
    }

    /// Instruction set.
    #[getter]
    fn isa(&self) -> &'static str {
        self.cpu.isa().name()
    }

    /// Threads, the calling one among them.
    #[getter]
    fn threads(&self) -> usize {
        self.cpu.threads()
    }

    /// Most bytes of workspace per op; None without a limit.
    #[getter]
    fn budget(&self) -> Option<usize> {
        Some(self.cpu.budget()).filter(|&budget| budget != usize::MAX)
    }

    fn __repr__(&self) -> String {
        let budget = self.budget().map_or("None".into(), |budget| budget.to_string());
        format!("samebits.Cpu(isa='{}', threads={}, budget={budget})", self.isa(), self.threads())
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyResult<PyRef<'_, Self>> {
        let before = get_cpu();
        set_cpu(slf.clone())?;
        REPLACED.lock().expect("no panic while holding the lock").push(before);
        Ok(slf)
    }

    fn __exit__(&self, _kind: &Bound<'_, PyAny>, _value: &Bound<'_, PyAny>, _trace: &Bound<'_, PyAny>) -> PyResult<()> {
        let before = REPLACED.lock().expect("no panic while holding the lock").pop();
        before.map_or(Ok(()), set_cpu)
    }
}

/// All cores, and no more than OMP_NUM_THREADS says: processes that share a machine are told so by it.
fn default_threads() -> usize {
    let cores = samebits_ops::Cpu::best().threads();
    let told = std::env::var("OMP_NUM_THREADS").ok();
    // One number for each level of teams within teams; an op is a team of the first.
    let told = told.and_then(|levels| levels.split(',').next()?.trim().parse().ok());
    told.map_or(cores, |told: usize| told.clamp(1, cores))
}

/// How ops run in this process.
#[pyfunction]
pub fn get_cpu() -> Cpu {
    let mut current = CURRENT.lock().expect("no panic while holding the lock");
    let default =
        || samebits_ops::Cpu::new(Isa::best(), default_threads(), usize::MAX).expect("the best of this machine");
    current.get_or_insert_with(|| Cpu::of(default())).clone()
}

/// Lets ops of this process run as `cpu` says.
#[pyfunction]
pub fn set_cpu(cpu: Cpu) -> PyResult<()> {
    let cpu = cpu.here()?;
    *CURRENT.lock().expect("no panic while holding the lock") = Some(cpu);
    Ok(())
}

/// What the next op runs on.
pub fn current() -> samebits_ops::Cpu {
    get_cpu().cpu
}

/// Called in the child of a fork: threads, workspace and counters are made anew, with the same settings.
#[pyfunction]
pub fn after_fork() -> PyResult<()> {
    FORKS.fetch_add(1, Ordering::Relaxed);
    let before = CURRENT.lock().expect("no panic while holding the lock").take();
    match before {
        Some(before) => {
            let now = before.here();
            // Its parts may be locked by a thread that is not here.
            std::mem::forget(before);
            set_cpu(now?)
        }
        None => Ok(()),
    }
}
