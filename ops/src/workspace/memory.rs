//! Memory for packed weights and workspaces: words on cache-line borders, in huge pages where the system has them.

use std::mem::MaybeUninit;
use std::ops::{Deref, DerefMut};

/// From this many bytes on, memory is mapped on its own and asks for huge pages: a weight that is read once per step
/// would otherwise miss the address cache on every page.
const MAPPED: usize = 1 << 20;

/// Bytes of the smallest pages.
pub const PAGE: usize = 4096;

/// Room from this many bytes on is worth huge pages.
#[cfg(target_os = "linux")]
const ROOM: usize = 4 << 20;

/// Asks for huge pages for memory that nothing should have touched yet, where there is much of it: the system takes longer to
/// hand out small pages than most ops take to fill them. Only speed depends on it.
pub fn ask_for_huge_pages<T>(room: &mut [MaybeUninit<T>]) {
    #[cfg(target_os = "linux")]
    {
        let (start, bytes) = (room.as_mut_ptr().cast::<u8>(), size_of_val(room));
        let head = start.align_offset(PAGE);
        if bytes < ROOM || head > bytes {
            return;
        }
        // SAFETY: these pages lie within `room`, and the advice changes nothing of what is in them; a system
        // that has other pages or no huge ones refuses.
        unsafe { libc::madvise(start.add(head).cast(), (bytes - head) / PAGE * PAGE, libc::MADV_HUGEPAGE) };
    }
    #[cfg(not(target_os = "linux"))]
    let _ = room;
}

/// From now on memory that is given back stays with the process for what asks next, where the C library is one that does
/// so: what makes the same tensors again and again, as a training does, would else be handed gigabytes of fresh pages each
/// time. Only speed depends on it.
pub fn keep_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    for (parameter, value) in [
        // Nothing goes back to the system, and all but the largest blocks come from what was kept.
        (libc::M_TRIM_THRESHOLD, -1),
        (libc::M_MMAP_THRESHOLD, 32 << 20),
        (libc::M_TOP_PAD, 64 << 20),
    ] {
        // SAFETY: it changes how the allocator gets and keeps memory, and nothing that it has handed out.
        unsafe { libc::mallopt(parameter, value) };
    }
}

/// One cache line of words.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u32; LINE]);

/// Words per cache line; sizes of parts are multiples of it.
pub const LINE: usize = 16;

/// A fixed number of words with arbitrary contents, the first on a cache-line border.
pub struct Memory {
    store: Store,
    words: usize,
}

enum Store {
    Lines(Vec<Line>),
    Mapped(memmap2::MmapMut),
}

impl Memory {
    /// Room for `words` words, or `None` when the system has none.
    pub fn new(words: usize) -> Option<Memory> {
        let lines = words.div_ceil(LINE);
        let bytes = lines.checked_mul(size_of::<Line>()).filter(|&bytes| isize::try_from(bytes).is_ok())?;
        if bytes < MAPPED {
            let mut store = Vec::new();
            store.try_reserve_exact(lines).ok()?;
            store.resize(lines, Line([0; LINE]));
            return Some(Memory { store: Store::Lines(store), words });
        }
        let store = memmap2::MmapMut::map_anon(bytes).ok()?;
        // Only speed depends on it, and systems without huge pages refuse.
        #[cfg(target_os = "linux")]
        let _ = store.advise(memmap2::Advice::HugePage);
        Some(Memory { store: Store::Mapped(store), words })
    }

    /// Puts what was written into huge pages up to both ends, for memory that is read again and again: where mappings meet,
    /// the system gave out small ones, a quarter of a model whose matrices take some megabytes each. Only speed depends on it.
    pub fn settle(&self) {
        #[cfg(all(target_os = "linux", target_env = "gnu"))]
        if let Store::Mapped(map) = &self.store {
            const HUGE: usize = 2 << 20;
            let first = map.as_ptr().addr() / HUGE * HUGE;
            let end = (map.as_ptr().addr() + map.len()).next_multiple_of(HUGE);
            // One page at a time: the first and the last may lie partly in what is not mapped, which ends a call.
            for page in (first..end).step_by(HUGE) {
                // SAFETY: which pages hold memory, ours or a neighbour's, is nothing that the program can see; a system
                // without huge pages, or without this advice, refuses.
                unsafe { libc::madvise(std::ptr::without_provenance_mut(page), HUGE, libc::MADV_COLLAPSE) };
            }
        }
    }

    /// How many words there are.
    pub fn len(&self) -> usize {
        self.words
    }
}

impl Deref for Memory {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        let start = match &self.store {
            Store::Lines(lines) => lines.as_ptr().cast::<u32>(),
            Store::Mapped(map) => map.as_ptr().cast::<u32>(),
        };
        // SAFETY: `new` made room for this many words, aligned to lines or pages and zeroed; every bit pattern is a u32.
        unsafe { std::slice::from_raw_parts(start, self.words) }
    }
}

impl DerefMut for Memory {
    fn deref_mut(&mut self) -> &mut [u32] {
        let start = match &mut self.store {
            Store::Lines(lines) => lines.as_mut_ptr().cast::<u32>(),
            Store::Mapped(map) => map.as_mut_ptr().cast::<u32>(),
        };
        // SAFETY: as above, and `self` is borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(start, self.words) }
    }
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn memory_is_aligned_and_whole_on_both_sides_of_the_border() {
        for words in [0, 1, 17, MAPPED / 4 - 1, MAPPED / 4, MAPPED / 4 + 1] {
            let mut memory = Memory::new(words).unwrap();
            assert_eq!((memory.len(), memory.as_ptr().addr() % 64), (words, 0));
            memory.fill(7);
            assert!(memory.iter().all(|&word| word == 7));
        }
    }

    pub(crate) fn too_much_is_none() {
        assert!(Memory::new(usize::MAX).is_none());
        assert!(Memory::new(1 << 60).is_none());
    }
}
