//! What decode prefetches: the keys or values of the next panel, a share for each head. It changes no bit.

use crate::Element;
use crate::attention::job::{Job, Range, Task};
use crate::pack::PANEL;
use crate::simd::prefetch::{Prefetch, prefetch_second};
use crate::tensor::Heads;
use crate::workspace::memory::PAGE;

/// Keys of a sequence that are prefetched while others are worked on.
#[derive(Clone, Copy)]
pub struct Next {
    b: usize,
    keys: Range,
}

impl Next {
    pub const NOTHING: Next = Next { b: 0, keys: Range { from: 0, to: 0 } };

    /// The panel behind the one of `task` that ends at `end`, or the first one of the task that follows.
    pub fn after(end: usize, task: &Task, following: Option<&Task>) -> Next {
        match following {
            Some(following) if end >= task.keys.to => Next::panel(following, following.keys.from),
            _ => Next::panel(task, end),
        }
    }

    /// The panel of a task that holds key `from`; nothing behind its keys.
    fn panel(task: &Task, from: usize) -> Next {
        let to = task.keys.to;
        let from = if from < to { from / PANEL * PANEL } else { to };
        Next { b: task.b, keys: Range { from, to: to.min(from + PANEL) } }
    }
}

/// Where the rows of k or v stand that the heads of a task prefetch.
pub struct Ahead<'a, I> {
    job: &'a Job<'a, I>,
    heads: Range,
    /// These heads of row 0.
    start: *const i8,
    /// Bytes of these heads, and from one row to the next. 0 where rows do not stand one behind the other: then none is
    /// prefetched.
    width: usize,
    stride: usize,
    rows_in_page: usize,
    /// Rows that each head prefetches.
    share: usize,
}

impl<'a, I: Element> Ahead<'a, I> {
    pub fn new(job: &'a Job<'a, I>, x: &Heads<I>, dim: usize, heads: Range) -> Ahead<'a, I> {
        let kv_heads = job.shape.kv_heads;
        let stride = if x.is_dense(kv_heads) { kv_heads * dim * size_of::<I>() } else { 0 };
        Ahead {
            job,
            heads,
            start: x.data().as_ptr().wrapping_add(heads.from * dim).cast(),
            width: (heads.to - heads.from) * dim * size_of::<I>(),
            stride,
            rows_in_page: (PAGE / stride.max(1)).max(1),
            share: PANEL.div_ceil(heads.to - heads.from),
        }
    }

    /// The share of some heads of the next keys, in the order of memory: every head prefetches some whole rows, on its way
    /// where they are adjacent and can be, else at once.
    pub fn of(&self, next: Next, some: Range, on_the_way: bool) -> Prefetch {
        if self.stride == 0 {
            return Prefetch::NONE;
        }
        let count = next.keys.to - next.keys.from;
        let keys_of = |from: usize, to: usize| {
            let [from, to] = [from, to].map(|head| next.keys.from + ((head - self.heads.from) * self.share).min(count));
            from..to
        };
        let row = |j: usize| self.job.key_row(next.b, j);
        let at = |row: usize| self.start.wrapping_add(row * self.stride);
        // A TLB miss holds up the loads behind it, and misses that are under way together overlap. So one line of every page is
        // prefetched before the others. On vectors of 8 a head does so for the pages of the next head (a Zen 3 takes 0.95 of
        // the time of all at once); on others the first head does so for all pages.
        let first = some.from == self.heads.from;
        let to_find = match self.job.cpu.isa().lanes() {
            8 if first => keys_of(some.from, some.to + 1),
            8 => keys_of(some.to, some.to + 1),
            _ if first => keys_of(self.heads.from, self.heads.to),
            _ => 0..0,
        };
        let mut j = to_find.start;
        while j < to_find.end {
            prefetch_second(at(row(j)));
            j += self.rows_in_page;
        }
        let keys = keys_of(some.from, some.to);
        if keys.is_empty() {
            return Prefetch::NONE;
        }
        let (first, last) = (row(keys.start), row(keys.end - 1));
        if on_the_way && keys.len() > 1 && self.width == self.stride && last == first + keys.len() - 1 {
            return Prefetch::at(at(first), keys.len() * self.stride);
        }
        keys.for_each(|j| Prefetch::at(at(row(j)), self.width).ask(usize::MAX));
        Prefetch::NONE
    }
}
