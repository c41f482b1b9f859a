//! Work on several threads. Tasks are whole outputs, so which thread takes which cannot be seen in a result.
//!
//! The pool takes a task's code as `&dyn Fn`: it is compiled once, not once for every kernel.

use crate::Cpu;
use crate::backend::pool::pool;
use crate::simd::prefetch::prefetch;
use std::marker::PhantomData;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

impl Cpu {
    /// Runs `work(0)` on the calling thread and the other numbers below `count` beside it, or all on the team; `count` is at
    /// most the number of threads.
    fn run(&self, count: usize, work: &(dyn Fn(usize) + Sync)) {
        match (count, self.pool()) {
            (0, _) => {}
            (1, _) | (_, None) => work(0),
            (_, Some(own)) if own.is_here() => own.run_or_team(count, work),
            // The child of a fork: the workers stayed behind. Where none can be started, the caller does the work of all.
            _ => match pool(self.threads()) {
                Ok(pool) => pool.run(count, work),
                Err(_) => (0..count).for_each(work),
            },
        }
    }

    /// Runs `work` once for each of `slots`, at most as many as there are threads.
    fn workers<S: Send>(&self, slots: impl IntoIterator<Item = S>, work: impl Fn(S) + Sync) {
        let slots: Vec<_> = slots.into_iter().take(self.threads()).map(|slot| Mutex::new(Some(slot))).collect();
        self.run(slots.len(), &|i| {
            let slot = slots[i].lock().expect("no panic while holding the lock").take();
            work(slot.expect("each number is run once"));
        });
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

    /// As [`Cpu::each_in`]; `work(slot, index, following)` also learns which index its thread takes next, if one is left. Near the
    /// end that is a guess: what is left is then taken by who is done first.
    pub(crate) fn each_with_next<S: Send>(
        &self,
        slots: impl ExactSizeIterator<Item = S>,
        count: usize,
        work: impl Fn(&mut S, usize, Option<usize>) + Sync,
    ) {
        let (next, threads) = (AtomicUsize::new(0), slots.len());
        self.workers(slots.take(count), |mut slot| {
            let mut first = take(&next, count);
            while let Some(index) = first {
                let taken = if index + threads < count { take(&next, count) } else { None };
                let guess = || Some(next.load(Ordering::Relaxed)).filter(|index| *index < count);
                work(&mut slot, index, taken.or_else(guess));
                first = taken.or_else(|| take(&next, count));
            }
        });
    }

    /// Runs `work(index)` for every index below `count`, each once, on any thread.
    pub(crate) fn each(&self, count: usize, work: impl Fn(usize) + Sync) {
        let next = AtomicUsize::new(0);
        self.run(self.threads().min(count), &|_| each_left(&next, count, &work));
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
        let threads = self.threads().min(slots.len()).min(counts[0].max(counts[1]));
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

    /// Runs `work(index, chunk)` for every `size`-element chunk of `out`.
    pub fn chunks<T: Send>(&self, out: &mut [T], size: usize, work: impl Fn(usize, &mut [T]) + Sync) {
        let size = size.max(1);
        let count = out.len().div_ceil(size);
        let chunks = Mutex::new(out.chunks_mut(size).enumerate());
        self.run(self.threads().min(count), &|_| {
            loop {
                let chunk = chunks.lock().expect("no panic while holding the lock").next();
                let Some((index, chunk)) = chunk else { break };
                work(index, chunk);
            }
        });
    }

    /// How many elements of an elementwise op one task takes: enough to pay for starting it.
    pub fn elements_per_chunk(&self, len: usize) -> usize {
        len.div_ceil(4 * self.threads()).next_multiple_of(4096)
    }

    /// How many rows of `n` elements one task takes.
    pub fn rows_per_chunk(&self, rows: usize, n: usize) -> usize {
        (self.elements_per_chunk(rows.saturating_mul(n)) / n.max(1)).max(1)
    }
}

/// The next index below `count` that no thread has taken from `next`.
fn take(next: &AtomicUsize, count: usize) -> Option<usize> {
    Some(next.fetch_add(1, Ordering::Relaxed)).filter(|index| *index < count)
}

/// Runs `work(index)` for the indices below `count` that no other thread has taken from `next`, in order.
fn each_left(next: &AtomicUsize, count: usize, mut work: impl FnMut(usize)) {
    while let Some(index) = take(next, count) {
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

/// A slice that tasks write to in disjoint parts.
pub(crate) struct SharedOut<'a, O> {
    data: *mut O,
    len: usize,
    of: PhantomData<&'a mut [O]>,
}

// SAFETY: the only accesses are `part` and `read`, whose callers promise that no part overlaps another or what is read.
unsafe impl<O: Send + Sync> Sync for SharedOut<'_, O> {}

impl<'a, O> SharedOut<'a, O> {
    /// All of `slice`.
    pub(crate) fn new(slice: &'a mut [O]) -> SharedOut<'a, O> {
        SharedOut { data: slice.as_mut_ptr(), len: slice.len(), of: PhantomData }
    }

    /// Prefetches the cache lines of `rows` elements, `stride` apart from `at`.
    pub(crate) fn prefetch_rows(&self, at: usize, rows: usize, stride: usize) {
        let mut line = self.data.wrapping_add(at);
        for _ in 0..rows {
            prefetch(line);
            line = line.wrapping_add(stride);
        }
    }

    /// Where `columns` elements of each of some rows stand, `stride` apart from `at`.
    pub(crate) fn rows(&self, at: usize, [rows, columns]: [usize; 2], stride: usize) -> *mut O {
        let end = (rows - 1).checked_mul(stride).and_then(|last| last.checked_add(at)?.checked_add(columns));
        assert!(end.is_some_and(|end| end <= self.len), "rows outside the slice");
        self.data.wrapping_add(at)
    }

    /// The elements `at..at + len`, to be read.
    ///
    /// # Safety
    /// No live part overlaps it.
    pub(crate) unsafe fn read(&self, at: usize, len: usize) -> &[O] {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.len), "part outside the slice");
        // SAFETY: inside the slice; the rest is the caller's promise.
        unsafe { std::slice::from_raw_parts(self.data.add(at), len) }
    }

    /// The elements `at..at + len`.
    ///
    /// # Safety
    /// No other live part, and nothing that is read, overlaps it.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn part(&self, at: usize, len: usize) -> &mut [O] {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.len), "part outside the output");
        // SAFETY: in bounds by the assertion, exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(at), len) }
    }
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use crate::{Cpu, Isa};

    /// Every index is worked on once; what a thread is told to come next does, but near the end.
    pub(crate) fn the_next_index_is_known() {
        for (threads, count) in [(1, 100), (2, 100), (3, 2), (2, 0)] {
            let cpu = Cpu::new(Isa::Scalar, threads, usize::MAX).unwrap();
            let mut slots = vec![Vec::new(); threads];
            cpu.each_with_next(slots.iter_mut(), count, |slot, index, following| slot.push((index, following)));
            for slot in &slots {
                let come = slot.iter().skip(1).map(|(index, _)| Some(*index)).chain([None]);
                for ((index, following), come) in slot.iter().zip(come) {
                    let known = threads == 1 || index + threads < count;
                    assert!(*following == come || !known, "{slot:?}");
                }
            }
            let mut indices: Vec<usize> = slots.concat().into_iter().map(|(index, _)| index).collect();
            indices.sort_unstable();
            assert_eq!(indices, (0..count).collect::<Vec<_>>());
        }
    }
}
