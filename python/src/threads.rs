//! The threads of OpenMP, where another library of the process has started them.

use pyo3::prelude::*;
use std::any::Any;
use std::ffi::{c_uint, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};

/// `GOMP_parallel(run, data, threads, flags)`, what a compiler makes of `#pragma omp parallel`: it calls `run(data)` on every
/// thread of a team and returns when all calls have.
type Parallel = unsafe extern "C" fn(unsafe extern "C" fn(*mut c_void), *mut c_void, c_uint, c_uint);

static PARALLEL: OnceLock<Parallel> = OnceLock::new();

/// Lets ops work on the threads of OpenMP that are loaded for all, as torch loads them. Those spin for some milliseconds after
/// each operator, on cores that workers of ours would need. False where there are none; ops keep their workers then.
#[pyfunction]
pub fn share_threads() -> bool {
    // SAFETY: a name that ends with 0; where it is found, it is a function of OpenMP's runtimes, which are never unloaded.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"GOMP_parallel".as_ptr()) };
    if found.is_null() {
        return false;
    }
    // SAFETY: a function of this name has this form in every runtime of OpenMP that has it.
    PARALLEL.get_or_init(|| unsafe { std::mem::transmute::<*mut c_void, Parallel>(found) });
    samebits_ops::work_on(on_team);
    true
}

/// What the threads of a team share.
struct Task<'a> {
    work: &'a (dyn Fn(usize) + Sync),
    count: usize,
    next: AtomicUsize,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

fn on_team(count: usize, work: &(dyn Fn(usize) + Sync)) {
    let task = Task { work, count, next: AtomicUsize::new(0), panic: Mutex::default() };
    let parallel = PARALLEL.get().expect("found before the ops were told");
    // SAFETY: `take_part` reads a Task, which lives until the call returns, and then no thread is in it.
    unsafe { parallel(take_part, (&raw const task).cast_mut().cast(), count as c_uint, 0) };
    if let Some(panic) = task.panic.into_inner().expect("no panic while holding the lock") {
        resume_unwind(panic);
    }
}

/// Takes numbers until none is left: a team may have fewer threads than it was asked for. A panic waits for the caller.
///
/// # Safety
/// `task` is the Task of an [`on_team`] that has not returned.
unsafe extern "C" fn take_part(task: *mut c_void) {
    // SAFETY: the caller's promise.
    let task = unsafe { &*task.cast::<Task>() };
    loop {
        let number = task.next.fetch_add(1, Ordering::Relaxed);
        if number >= task.count {
            break;
        }
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| (task.work)(number))) {
            *task.panic.lock().expect("no panic while holding the lock") = Some(panic);
        }
    }
}
