//! What will be read or written soon is brought near. None of it changes a bit.

/// Prefetches the line that holds `p`. It reads nothing, so `p` may be any address.
#[inline(always)]
pub fn prefetch<T>(p: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch reads nothing and may name any address.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(p.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = p;
}

/// [`prefetch`] to L2.
#[inline(always)]
pub fn prefetch_second<T>(p: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as above.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(p.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = p;
}

/// Prefetches the line that holds `p` in order to write it: no other cache keeps it. It writes nothing, so `p` may be any
/// address.
#[inline(always)]
pub fn prefetch_to_write<T>(p: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as above; the intrinsic would be another instruction where the compiler is not told that the machine has this
    // one, which any machine with AVX2 takes.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) p.addr(), options(nomem, nostack, preserves_flags));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = p;
}

/// Prefetches the cache lines of `x`, which stands apart from what was read before it.
#[inline(always)]
pub fn prefetch_all<T>(x: &[T]) {
    Prefetch::of(x).ask(usize::MAX);
}

/// Prefetches as much memory as `x` takes, `bytes` behind its start, to L2: a prefetch to L1 waits for the same places as a
/// load.
#[inline(always)]
pub fn prefetch_at<T>(x: &[T], bytes: usize) {
    for line in (bytes..bytes + size_of_val(x)).step_by(64) {
        prefetch_second(x.as_ptr().wrapping_byte_add(line));
    }
}

/// Memory that will be read next, prefetched some lines at a time between other work: all at once they would fill the queue
/// of misses and hold up every load behind them.
#[derive(Clone, Copy)]
pub struct Prefetch {
    at: *const i8,
    lines: usize,
}

impl Default for Prefetch {
    fn default() -> Prefetch {
        Prefetch::NONE
    }
}

impl Prefetch {
    pub const NONE: Prefetch = Prefetch { at: std::ptr::null(), lines: 0 };

    /// `bytes` bytes from `start` on, which may be any: what is no memory is not prefetched.
    #[inline(always)]
    pub fn at(start: *const i8, bytes: usize) -> Prefetch {
        Prefetch { at: start, lines: bytes.div_ceil(64) }
    }

    /// All of `x`.
    #[inline(always)]
    pub fn of<T>(x: &[T]) -> Prefetch {
        Prefetch::at(x.as_ptr().cast(), size_of_val(x))
    }

    pub fn lines(&self) -> usize {
        self.lines
    }

    /// What is behind the first `lines` lines.
    #[inline(always)]
    pub fn behind(self, lines: usize) -> Prefetch {
        let lines = lines.min(self.lines);
        Prefetch { at: self.at.wrapping_add(64 * lines), lines: self.lines - lines }
    }

    /// The first `lines` lines, and what is behind them.
    #[inline(always)]
    pub fn split_at(self, lines: usize) -> (Prefetch, Prefetch) {
        (Prefetch { lines: lines.min(self.lines), ..self }, self.behind(lines))
    }

    /// The first line and the last, if there are any.
    pub fn bounds(&self) -> Option<(*const i8, *const i8)> {
        (self.lines > 0).then(|| (self.at, self.at.wrapping_add(64 * (self.lines - 1))))
    }

    /// Prefetches the next `count` lines.
    #[inline(always)]
    pub fn ask(&mut self, count: usize) {
        for _ in 0..count.min(self.lines) {
            prefetch(self.at);
            self.at = self.at.wrapping_add(64);
        }
        self.lines -= count.min(self.lines);
    }
}
