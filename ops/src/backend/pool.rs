//! The threads of a process, or those of another library that does their work.

use crate::Error;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// Threads of another library: runs `work` for every number below `count`, each once, and returns when all have ended. They
/// need not run side by side.
pub type Team = fn(count: usize, work: &(dyn Fn(usize) + Sync));

/// The process that works on a team, and the team.
static TEAM: OnceLock<(u32, Team)> = OnceLock::new();

/// Lets `team` do the work of this process's threads from now on, in the numbers that each [`Cpu`](crate::Cpu) has; the first team
/// stays. Threads of two libraries that wait by spinning take each other's cores. The child of a fork has threads of its own, as
/// no team need live on there.
pub fn work_on(team: Team) {
    TEAM.get_or_init(|| (std::process::id(), team));
}

/// The workers beside the calling thread.
///
/// A thread that sleeps takes tens of microseconds to wake, as long as many an op. So whoever has nothing left to do stays
/// awake for a moment: a worker for the next op, the caller for the workers. Only where each thread has a core.
pub(crate) struct Pool {
    workers: rayon::ThreadPool,
    /// The process that they are threads of.
    process: u32,
    /// How many ops there were: who waits for the next one sees it move.
    ops: AtomicUsize,
    awake: bool,
}

/// How often a waiting thread looks: some 100 microseconds in all.
const LOOKS: usize = 4000;

impl Pool {
    /// Whether its workers are threads of this process, and not of one that it was forked from.
    pub fn is_here(&self) -> bool {
        self.process == std::process::id()
    }

    /// [`Pool::run`], or the same on the team of this process.
    pub fn run_or_team(self: &Arc<Pool>, count: usize, work: &(dyn Fn(usize) + Sync)) {
        match TEAM.get() {
            Some((process, team)) if *process == self.process => team(count, work),
            _ => self.run(count, work),
        }
    }

    /// Runs `work(0)` on the calling thread and the other numbers below `count` on workers.
    pub fn run(self: &Arc<Pool>, count: usize, work: &(dyn Fn(usize) + Sync)) {
        let op = self.ops.fetch_add(1, Ordering::Release) + 1;
        let working = &AtomicUsize::new(count - 1);
        self.workers.in_place_scope(|scope| {
            for i in 1..count {
                scope.spawn(move |_| {
                    work(i);
                    working.fetch_sub(1, Ordering::Release);
                    if self.awake {
                        let pool = self.clone();
                        rayon::spawn(move || pool.look(|| pool.ops.load(Ordering::Acquire) != op));
                    }
                });
            }
            work(0);
            // The end of the scope would put the caller to sleep.
            if self.awake {
                self.look(|| working.load(Ordering::Acquire) == 0);
            }
        });
    }

    /// Waits for `over`, not for long.
    fn look(&self, over: impl Fn() -> bool) {
        for _ in 0..LOOKS {
            if over() {
                return;
            }
            std::hint::spin_loop();
        }
    }
}

/// By process and number of threads.
type Pools = HashMap<(u32, usize), Arc<Pool>>;

/// The pool for so many threads, one for the whole process: an axis over threads uses it again. Those of a process that
/// forked stay in the list of its child, because workers that are not there cannot be ended.
pub(crate) fn pool(threads: usize) -> Result<Arc<Pool>, Error> {
    static POOLS: OnceLock<Mutex<Pools>> = OnceLock::new();
    let process = std::process::id();
    let mut pools = POOLS.get_or_init(Mutex::default).lock().expect("no panic while holding the lock");
    if let Some(pool) = pools.get(&(process, threads)) {
        return Ok(pool.clone());
    }
    let workers = rayon::ThreadPoolBuilder::new()
        .num_threads(threads - 1)
        .thread_name(|i| format!("samebits-{}", i + 1))
        .build()
        .map_err(|e| Error::Unavailable(format!("cannot start {threads} threads: {e}")))?;
    let awake = std::thread::available_parallelism().is_ok_and(|cores| threads <= cores.get());
    let pool = Pool { workers, process, ops: AtomicUsize::new(0), awake };
    Ok(pools.entry((process, threads)).or_insert(Arc::new(pool)).clone())
}
