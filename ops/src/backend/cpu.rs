//! How to run on this machine: instruction set, threads and workspace. None of it may move a bit.

use crate::Error;
use crate::ledger::Ledger;
use crate::workspace::memory::Memory;
use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// An instruction set, in ascending order of capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Plain Rust, one element at a time.
    Scalar,
    /// AVX2 with FMA and F16C: 8 lanes of f32.
    Avx2,
    /// AVX-512 F, BW, DQ and VL: 16 lanes of f32.
    Avx512,
    /// AVX-512 with `VDPBF16PS`.
    Avx512Bf16,
}

impl Isa {
    /// Every instruction set this crate has kernels for.
    pub const ALL: [Isa; 4] = [Isa::Scalar, Isa::Avx2, Isa::Avx512, Isa::Avx512Bf16];

    /// The name used on the command line and in kernel names.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Avx512Bf16 => "avx512bf16",
        }
    }

    /// Whether this machine has the instructions.
    pub fn available(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = || {
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
            };
            let avx512 = || {
                avx2()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            };
            match self {
                Isa::Scalar => true,
                Isa::Avx2 => avx2(),
                Isa::Avx512 => avx512(),
                Isa::Avx512Bf16 => avx512() && is_x86_feature_detected!("avx512bf16"),
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            self == Isa::Scalar
        }
    }

    /// The most capable instruction set of this machine.
    pub fn best() -> Isa {
        *Isa::ALL.iter().rev().find(|isa| isa.available()).expect("scalar is always available")
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Isa {
    type Err = Error;

    fn from_str(name: &str) -> Result<Isa, Error> {
        Isa::ALL
            .into_iter()
            .find(|isa| isa.name() == name)
            .ok_or_else(|| Error::Unavailable(format!("unknown isa `{name}`; use scalar, avx2, avx512 or avx512bf16")))
    }
}

/// Where and how ops run. The same inputs give the same bits on every `Cpu`.
///
/// Clones share their workers, the workspace kept between calls and the [`Ledger`].
#[derive(Clone)]
pub struct Cpu {
    isa: Isa,
    budget: usize,
    threads: usize,
    /// The workers beside the calling thread; `None` when there are none.
    pool: Option<Arc<Pool>>,
    /// Workspace of the last call, for the next.
    kept: Arc<Mutex<Option<Memory>>>,
    ledger: Arc<Ledger>,
}

/// Workspace above this many words goes back to the system after the call.
const KEEP: usize = 64 << 20;

impl Cpu {
    /// The best instruction set of this machine, all its cores, no workspace limit.
    pub fn best() -> Cpu {
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
        Cpu::new(Isa::best(), threads, usize::MAX).expect("the best isa is available")
    }

    /// A `Cpu` with `threads` (at least 1) threads, the calling one among them, and at most `budget` bytes of workspace
    /// per op. Workspace is what an op needs beside its inputs and outputs, some KiB of stack per thread aside; it is
    /// kept for the next call.
    ///
    /// # Errors
    /// [`Error::Unavailable`] when the machine lacks `isa`, `threads` is 0 or the threads cannot be started.
    pub fn new(isa: Isa, threads: usize, budget: usize) -> Result<Cpu, Error> {
        if !isa.available() {
            let have: Vec<_> = Isa::ALL.into_iter().filter(|isa| isa.available()).map(Isa::name).collect();
            return Err(Error::Unavailable(format!("this machine lacks `{isa}`; it has {}", have.join(", "))));
        }
        if threads == 0 || threads > 1024 {
            return Err(Error::Unavailable(format!("threads is {threads}; use 1 to 1024")));
        }
        let pool = if threads == 1 { None } else { Some(pool(threads)?) };
        Ok(Cpu { isa, budget, threads, pool, kept: Arc::default(), ledger: Arc::default() })
    }

    /// Another `Cpu` that counts in the same [`Ledger`].
    ///
    /// # Errors
    /// As [`Cpu::new`].
    pub fn other(&self, isa: Isa, threads: usize, budget: usize) -> Result<Cpu, Error> {
        Ok(Cpu { ledger: self.ledger.clone(), ..Cpu::new(isa, threads, budget)? })
    }

    /// The same `Cpu` with counters of its own, all zero; what is forbidden stays so.
    pub fn recording(&self) -> Cpu {
        Cpu { ledger: Arc::new(self.ledger.successor()), ..self.clone() }
    }

    /// The instruction set.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// The instruction set of everything but `VDPBF16PS`.
    pub(crate) fn fma_isa(&self) -> Isa {
        self.isa.min(Isa::Avx512)
    }

    /// The number of threads.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Workspace limit in bytes.
    pub fn budget(&self) -> usize {
        self.budget
    }

    /// What ops on this `Cpu` and its clones did.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// The workspace of the last call, if nobody else has it.
    pub(crate) fn kept(&self) -> Option<Memory> {
        self.kept.lock().expect("no panic while holding the lock").take()
    }

    /// Keeps `memory` for the next call.
    pub(crate) fn keep(&self, memory: Memory) {
        if memory.len() <= KEEP {
            *self.kept.lock().expect("no panic while holding the lock") = Some(memory);
        }
    }

    /// Runs `work` once for each of `slots`, the first on the calling thread, the others beside it.
    fn workers<S: Send>(&self, slots: impl IntoIterator<Item = S>, work: impl Fn(S) + Sync) {
        let mut slots = slots.into_iter().take(self.threads);
        let Some(first) = slots.next() else { return };
        match &self.pool {
            None => work(first),
            Some(pool) => pool.run(first, slots, work),
        }
    }

    /// Runs `work(slot, index)` for every index below `count`, each once, with as many threads as there are slots; a
    /// slot belongs to one thread at a time. Indices are taken in order.
    pub(crate) fn each_in<S: Send>(
        &self,
        slots: impl IntoIterator<Item = S>,
        count: usize,
        work: impl Fn(&mut S, usize) + Sync,
    ) {
        let next = AtomicUsize::new(0);
        self.workers(slots.into_iter().take(count), |mut slot| each_left(&next, count, |index| work(&mut slot, index)));
    }

    /// Runs `work(index)` for every index below `count`, each once, on any thread.
    pub(crate) fn each(&self, count: usize, work: impl Fn(usize) + Sync) {
        self.each_in(std::iter::repeat_n((), self.threads), count, |(), index| work(index));
    }

    /// Runs `first(index)` for every index below `counts[0]` and then `then(slot, index)` for every one below `counts[1]`,
    /// each once, with as many threads as there are slots. No `then` begins before the last `first` has ended, and each sees what they wrote. A thread
    /// that comes late finds the others at work already, where two calls of [`Cpu::each`] would wait for it twice.
    ///
    /// A thread takes the indices of `then` in runs as long as can be, so that what it reads for them comes as one stream.
    pub(crate) fn each_after<S: Send>(
        &self,
        slots: Vec<S>,
        counts: [usize; 2],
        first: impl Fn(usize) + Sync,
        then: impl Fn(&mut S, usize) + Sync,
    ) {
        let [begun, ended] = [(); 2].map(|()| AtomicUsize::new(0));
        let threads = self.threads.min(slots.len()).min(counts[0].max(counts[1]));
        let run = |thread: usize| thread * counts[1] / threads..(thread + 1) * counts[1] / threads;
        let next: Vec<_> = (0..threads).map(|thread| AtomicUsize::new(run(thread).start)).collect();
        self.workers((0..threads).zip(slots), |(own, mut slot)| {
            each_left(&begun, counts[0], |index| {
                let _end = Ended(&ended);
                first(index);
            });
            // What is not ended is in the hands of a thread that runs; more threads than cores take turns.
            let mut turns = 0;
            while ended.load(Ordering::Acquire) < counts[0] {
                turns += 1;
                if turns < 1000 { std::hint::spin_loop() } else { std::thread::yield_now() }
            }
            // Its own run, then what is left of the others'.
            for thread in (own..threads).chain(0..own) {
                each_left(&next[thread], run(thread).end, |index| then(&mut slot, index));
            }
        });
    }

    /// Runs `work(index, chunk)` for every `size`-element chunk of `out`. Chunks are whole outputs, so which thread
    /// takes which cannot be seen in the result.
    pub(crate) fn chunks<T: Send>(&self, out: &mut [T], size: usize, work: impl Fn(usize, &mut [T]) + Sync) {
        let size = size.max(1);
        let count = out.len().div_ceil(size);
        let chunks = Mutex::new(out.chunks_mut(size).enumerate());
        self.workers(std::iter::repeat_n((), count), |()| {
            loop {
                let chunk = chunks.lock().expect("no panic while holding the lock").next();
                let Some((index, chunk)) = chunk else { break };
                work(index, chunk);
            }
        });
    }

    /// How many elements of an elementwise op one task takes: enough to pay for starting it.
    pub(crate) fn elements_per_chunk(&self, len: usize) -> usize {
        len.div_ceil(4 * self.threads).next_multiple_of(4096)
    }

    /// How many rows of `n` elements one task takes.
    pub(crate) fn rows_per_chunk(&self, rows: usize, n: usize) -> usize {
        (self.elements_per_chunk(rows.saturating_mul(n)) / n.max(1)).max(1)
    }
}

/// Runs `work(index)` for the indices below `count` that no other thread has taken from `next`, in order.
fn each_left(next: &AtomicUsize, count: usize, mut work: impl FnMut(usize)) {
    loop {
        let index = next.fetch_add(1, Ordering::Relaxed);
        if index >= count {
            break;
        }
        work(index);
    }
}

/// Counts one more when it goes, also where its work panicked: nobody waits for ever.
struct Ended<'a>(&'a AtomicUsize);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Release);
    }
}

impl fmt::Debug for Cpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cpu {{ isa: {}, threads: {}, budget: {} }}", self.isa, self.threads, self.budget)
    }
}

/// The workers beside the calling thread.
///
/// A thread that sleeps takes tens of microseconds to wake, as long as many an op. So whoever has nothing left to do stays
/// awake for a moment: a worker for the next op, the caller for the workers. Only where each thread has a core.
struct Pool {
    workers: rayon::ThreadPool,
    /// How many ops there were: who waits for the next one sees it move.
    ops: AtomicUsize,
    awake: bool,
}

/// How often a waiting thread looks: some 100 microseconds in all.
const LOOKS: usize = 4000;

impl Pool {
    /// Runs `work` once for each slot, the first on the calling thread.
    fn run<S: Send>(self: &Arc<Pool>, first: S, others: impl Iterator<Item = S>, work: impl Fn(S) + Sync) {
        let op = self.ops.fetch_add(1, Ordering::Release) + 1;
        let (work, working) = (&work, &AtomicUsize::new(0));
        self.workers.in_place_scope(|scope| {
            for slot in others {
                working.fetch_add(1, Ordering::Relaxed);
                scope.spawn(move |_| {
                    work(slot);
                    working.fetch_sub(1, Ordering::Release);
                    if self.awake {
                        let pool = self.clone();
                        rayon::spawn(move || pool.look(|| pool.ops.load(Ordering::Acquire) != op));
                    }
                });
            }
            work(first);
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

/// The pool for so many threads, one for the whole process: an axis over threads uses it again.
fn pool(threads: usize) -> Result<Arc<Pool>, Error> {
    static POOLS: OnceLock<Mutex<HashMap<usize, Arc<Pool>>>> = OnceLock::new();
    let mut pools = POOLS.get_or_init(Mutex::default).lock().expect("no panic while holding the lock");
    if let Some(pool) = pools.get(&threads) {
        return Ok(pool.clone());
    }
    let workers = rayon::ThreadPoolBuilder::new()
        .num_threads(threads - 1)
        .thread_name(|i| format!("samebits-{}", i + 1))
        .build()
        .map_err(|e| Error::Unavailable(format!("cannot start {threads} threads: {e}")))?;
    let awake = std::thread::available_parallelism().is_ok_and(|cores| threads <= cores.get());
    let pool = Pool { workers, ops: AtomicUsize::new(0), awake };
    Ok(pools.entry(threads).or_insert(Arc::new(pool)).clone())
}
