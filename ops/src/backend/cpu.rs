//! How to run on this machine: instruction set, threads and workspace. None of it may move a bit.

use crate::Error;
use crate::backend::pool::{Pool, pool};
use crate::ledger::Ledger;
use crate::workspace::memory::Memory;
use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, Mutex};

/// An instruction set, in ascending order of capability; those that are emulated come last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Isa {
    /// Plain Rust, one element at a time.
    Scalar,
    /// AVX2 with FMA and F16C: 8 lanes of f32.
    Avx2,
    /// AVX-512 F, BW, DQ and VL: 16 lanes of f32.
    Avx512,
    /// AVX-512 with `VDPBF16PS`.
    Avx512Bf16,
    /// The kernels of [`Isa::Avx512`] over instructions computed by their definition: for tests on machines without them, and
    /// slow. It runs on an x86 with AVX2 and on everything that is not an x86. Where the machine that compiled it has AVX-512, its dot
    /// products alone are emulated (`build.rs`).
    #[cfg(feature = "emulated-isa")]
    EmulatedAvx512,
    /// The same of [`Isa::Avx512Bf16`].
    #[cfg(feature = "emulated-isa")]
    EmulatedAvx512Bf16,
}

impl Isa {
    /// Every instruction set this crate has kernels for, and behind them the emulated ones where the build has them.
    pub fn all() -> impl DoubleEndedIterator<Item = Isa> {
        const ALL: &[Isa] = &[
            Isa::Scalar,
            Isa::Avx2,
            Isa::Avx512,
            Isa::Avx512Bf16,
            #[cfg(feature = "emulated-isa")]
            Isa::EmulatedAvx512,
            #[cfg(feature = "emulated-isa")]
            Isa::EmulatedAvx512Bf16,
        ];
        ALL.iter().copied()
    }

    /// The name used on the command line and in kernel names.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Avx512Bf16 => "avx512bf16",
            #[cfg(feature = "emulated-isa")]
            Isa::EmulatedAvx512 => "emulated-avx512",
            #[cfg(feature = "emulated-isa")]
            Isa::EmulatedAvx512Bf16 => "emulated-avx512bf16",
        }
    }

    /// How many f32 one of its vectors holds.
    pub(crate) fn lanes(self) -> usize {
        match self {
            Isa::Scalar => 1,
            Isa::Avx2 => 8,
            Isa::Avx512 | Isa::Avx512Bf16 => 16,
            #[cfg(feature = "emulated-isa")]
            Isa::EmulatedAvx512 | Isa::EmulatedAvx512Bf16 => 16,
        }
    }

    /// Whether this machine can run it.
    pub fn available(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        let (avx2, avx512, bf16) = {
            let avx2 =
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
            let avx512 = avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            (avx2, avx512, avx512 && is_x86_feature_detected!("avx512bf16"))
        };
        #[cfg(not(target_arch = "x86_64"))]
        let (avx2, avx512, bf16) = (false, false, false);
        match self {
            Isa::Scalar => true,
            Isa::Avx2 => avx2,
            Isa::Avx512 => avx512,
            Isa::Avx512Bf16 => bf16,
            #[cfg(feature = "emulated-isa")]
            Isa::EmulatedAvx512 | Isa::EmulatedAvx512Bf16 => match cfg!(real_avx512) {
                // Kernels without dot products run on it.
                true => avx512,
                false => avx2 || cfg!(not(target_arch = "x86_64")),
            },
        }
    }

    /// Those of this machine and, where some are emulated, those that it lacks.
    pub fn of_machine() -> impl Iterator<Item = Isa> {
        Isa::all().filter(|isa| isa.available() && !isa.emulates().is_some_and(Isa::available))
    }

    /// The most capable instruction set of this machine, none that is emulated.
    pub fn best() -> Isa {
        let real = |isa: &Isa| isa.available() && isa.emulates().is_none();
        Isa::all().rfind(real).expect("scalar is always available")
    }

    /// The instruction set whose kernels an emulated one runs; `None` for a real one.
    pub fn emulates(self) -> Option<Isa> {
        match self {
            #[cfg(feature = "emulated-isa")]
            Isa::EmulatedAvx512 => Some(Isa::Avx512),
            #[cfg(feature = "emulated-isa")]
            Isa::EmulatedAvx512Bf16 => Some(Isa::Avx512Bf16),
            _ => None,
        }
    }

    /// Whether it has `VDPBF16PS`.
    pub fn has_dot(self) -> bool {
        self.emulates().unwrap_or(self) == Isa::Avx512Bf16
    }

    /// Whether bf16 weights are packed in 12 bits for it: its kernels of few rows read them so.
    pub(crate) fn reads_coded(self) -> bool {
        self.has_dot() || self.lanes() == 8
    }

    /// Whether `VDPBF16PS` multiplies more than multiply-adds of f32 do: AMD's twice as much, Intel's half as much. Where it
    /// does not, many rows are left to those. Tests emulate the one that the machine is not.
    pub fn dots_pay(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        static INTEL: std::sync::LazyLock<bool> = std::sync::LazyLock::new(|| {
            let vendor = std::arch::x86_64::__cpuid(0);
            [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).concat() == b"GenuineIntel"
        });
        #[cfg(target_arch = "x86_64")]
        let of_machine = Isa::Avx512Bf16.available() && !*INTEL;
        #[cfg(not(target_arch = "x86_64"))]
        let of_machine = false;
        self.has_dot() && self.emulates().is_none() == of_machine
    }

    /// The same without `VDPBF16PS`.
    pub fn without_dot(self) -> Isa {
        match self {
            Isa::Avx512Bf16 => Isa::Avx512,
            #[cfg(feature = "emulated-isa")]
            Isa::EmulatedAvx512Bf16 => Isa::EmulatedAvx512,
            isa => isa,
        }
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
        Isa::all()
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
    /// per op. Workspace is what an op needs beside its inputs and outputs; it is kept for the next call. Not counted are
    /// some KiB of stack per thread and, for a row op whose types no kernel is compiled for, a row of its inputs and of its
    /// output in f32.
    ///
    /// # Errors
    /// [`Error::Unavailable`] when the machine lacks `isa`, `threads` is 0 or the threads cannot be started.
    pub fn new(isa: Isa, threads: usize, budget: usize) -> Result<Cpu, Error> {
        if !isa.available() {
            let have: Vec<_> = Isa::all().filter(|isa| isa.available()).map(Isa::name).collect();
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

    /// The number of threads.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// The workers beside the calling thread.
    pub(crate) fn pool(&self) -> Option<&Arc<Pool>> {
        self.pool.as_ref()
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
}

impl fmt::Debug for Cpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cpu {{ isa: {}, threads: {}, budget: {} }}", self.isa, self.threads, self.budget)
    }
}
