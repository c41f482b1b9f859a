//! A clock for one op: what a request with `repeat` asks for (docs/WIRE.md, Timing).

use std::cell::{Cell, RefCell};
use std::hint::black_box;
use std::time::Instant;

/// Times the op of one request. Inputs, outputs and whatever was made ready stand before the clock starts.
pub struct Clock {
    repeat: usize,
    prepared: Cell<&'static str>,
    reading: RefCell<Option<Reading>>,
}

/// What a clock showed.
pub struct Reading {
    /// Seconds of every timed run, in order.
    pub seconds: Vec<f64>,
    /// Bytes by which the process's largest resident size during the runs, the warm-up among them, lay above its size
    /// before them, without the outputs, which stand ready; `None` where the system does not tell.
    pub peak_bytes: Option<u64>,
    /// What was made ready before the clock started, for example `weights packed`.
    pub prepared: &'static str,
}

impl Clock {
    /// A clock that times an op `repeat` times, after one run to warm up.
    pub fn new(repeat: usize) -> Clock {
        Clock { repeat, prepared: Cell::new(""), reading: RefCell::new(None) }
    }

    /// Notes what was made ready before the clock starts.
    pub fn prepared(&self, what: &'static str) {
        self.prepared.set(what);
    }

    /// Runs `op` once to warm up and then `repeat` times.
    ///
    /// # Errors
    /// The first error of `op`.
    pub fn time<E>(&self, mut op: impl FnMut() -> Result<(), E>) -> Result<(), E> {
        let before = memory::at_rest();
        op()?;
        let mut seconds = Vec::with_capacity(self.repeat);
        for _ in 0..self.repeat {
            let start = Instant::now();
            black_box(op()?);
            seconds.push(start.elapsed().as_secs_f64());
        }
        let peak_bytes = before.and_then(|before| Some(memory::largest()?.saturating_sub(before)));
        *self.reading.borrow_mut() = Some(Reading { seconds, peak_bytes, prepared: self.prepared.get() });
        Ok(())
    }

    /// What the clock showed; `None` if nothing was timed.
    pub fn reading(self) -> Option<Reading> {
        self.reading.into_inner()
    }
}

/// The median, the least and the most of `values`, of which there is at least one.
pub fn spread(values: &[f64]) -> [f64; 3] {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    [sorted[sorted.len() / 2], sorted[0], sorted[sorted.len() - 1]]
}

/// Resident bytes of this process; nothing where the system does not tell.
#[cfg(target_os = "linux")]
pub mod memory {
    /// Bytes resident now, from which [`largest`] counts on.
    pub fn at_rest() -> Option<u64> {
        give_back();
        // 5 sets VmHWM to the present size (proc_pid_clear_refs(5)).
        std::fs::write("/proc/self/clear_refs", "5").ok()?;
        status("VmRSS:")
    }

    /// The largest resident size since [`at_rest`].
    pub fn largest() -> Option<u64> {
        status("VmHWM:")
    }

    fn status(field: &str) -> Option<u64> {
        let text = std::fs::read_to_string("/proc/self/status").ok()?;
        let value = text.lines().find_map(|line| line.strip_prefix(field))?;
        value.trim().strip_suffix(" kB")?.parse::<u64>().ok().map(|kilobytes| kilobytes << 10)
    }

    /// Returns freed memory to the system: a run that took it up again would not be seen to grow.
    pub fn give_back() {
        #[cfg(target_env = "gnu")]
        {
            unsafe extern "C" {
                fn malloc_trim(pad: usize) -> std::ffi::c_int;
            }
            // SAFETY: the declaration is glibc's own (malloc.h), and it may be called at any time.
            unsafe { malloc_trim(0) };
        }
    }
}

/// Resident bytes of this process; nothing where the system does not tell.
#[cfg(not(target_os = "linux"))]
#[allow(missing_docs)]
pub mod memory {
    pub fn at_rest() -> Option<u64> {
        None
    }

    pub fn give_back() {}

    pub fn largest() -> Option<u64> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_warms_up_once_and_sees_memory() {
        let clock = Clock::new(3);
        let mut runs = 0;
        clock.prepared("nothing");
        let op = || {
            runs += 1;
            // The first runs take 64 MiB, the last nothing: the largest counts.
            let bytes = if runs < 3 { 64 << 20 } else { 0 };
            black_box(vec![1u8; bytes]);
            Ok::<(), ()>(())
        };
        clock.time(op).unwrap();
        let reading = clock.reading().unwrap();
        assert_eq!((runs, reading.seconds.len(), reading.prepared), (4, 3, "nothing"));
        if cfg!(target_os = "linux") {
            let peak = reading.peak_bytes.expect("Linux tells");
            assert!((60 << 20..100 << 20).contains(&peak), "{peak} bytes");
        }
        assert!(Clock::new(1).reading().is_none(), "nothing was timed");
    }

    #[test]
    fn the_median_stands_between() {
        assert_eq!(spread(&[3.0, 1.0, 2.0]), [2.0, 1.0, 3.0]);
        assert_eq!(spread(&[1.0]), [1.0; 3]);
    }
}
