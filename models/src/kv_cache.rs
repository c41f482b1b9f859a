//! Keys and values of the tokens seen so far, in pages.
//!
//! A sequence is a list of pages and a length; where its pages stand, how large they are and who else reads them is not
//! seen by attention. Pages are shared by sequences that begin alike and copied before one of them writes.

use crate::ModelError;
use crate::machine::{Machine, empty};
use crate::step::Forms;
use samebits_ops::{DType, Element, Tensor, ask_for_huge_pages};
use std::str::FromStr;

/// The pages of all sequences, and the keys and values that stand in them.
pub(crate) struct KvCache {
    /// Keys and values by layer, each `[rows, heads * dim]`; a row is a position of some page.
    pub layers: Vec<[Tensor; 2]>,
    /// What is kept of the steps that were run over it.
    pub forms: Forms,
    page_size: usize,
    order: PageOrder,
    /// Pages that nobody uses; the last one is taken next.
    free: Vec<i32>,
    /// By page, how many sequences use it.
    users: Vec<u32>,
    sequences: Vec<Option<Sequence>>,
}

/// Which of the free pages is taken next. No order may move a bit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PageOrder {
    /// The lowest number.
    #[default]
    Ascending,
    /// The highest number.
    Descending,
    /// Far from the one before.
    Scattered,
}

impl FromStr for PageOrder {
    type Err = ModelError;

    fn from_str(text: &str) -> Result<PageOrder, ModelError> {
        match text {
            "ascending" => Ok(PageOrder::Ascending),
            "descending" => Ok(PageOrder::Descending),
            "scattered" => Ok(PageOrder::Scattered),
            _ => Err(ModelError::input("page order", format!("`{text}` is not ascending, descending or scattered"))),
        }
    }
}

#[derive(Clone)]
struct Sequence {
    pages: Vec<i32>,
    /// Positions held; the position of the next token.
    len: usize,
    /// Positions it may come to hold, as declared when it began.
    limit: usize,
}

impl KvCache {
    /// An empty cache, which grows with what it is given. A position has keys and values of these widths in each layer.
    ///
    /// # Errors
    /// Those of a device.
    pub fn new(
        machine: &dyn Machine,
        dtype: DType,
        layers: usize,
        widths: [usize; 2],
        page_size: usize,
        order: PageOrder,
    ) -> Result<KvCache, ModelError> {
        let side = |width| empty(machine, dtype, &[0, width]);
        let layers =
            (0..layers).map(|_| Ok([side(widths[0])?, side(widths[1])?])).collect::<Result<_, ModelError>>()?;
        let (forms, free, users, sequences) = (Forms::default(), Vec::new(), Vec::new(), Vec::new());
        Ok(KvCache { layers, forms, page_size: page_size.max(1), order, free, users, sequences })
    }

    /// Begins a sequence of at most `limit` positions and returns its number.
    pub fn open(&mut self, limit: usize) -> usize {
        self.put(Sequence { pages: Vec::new(), len: 0, limit })
    }

    fn put(&mut self, sequence: Sequence) -> usize {
        match self.sequences.iter().position(Option::is_none) {
            Some(place) => {
                self.sequences[place] = Some(sequence);
                place
            }
            None => {
                self.sequences.push(Some(sequence));
                self.sequences.len() - 1
            }
        }
    }

    fn sequence(&self, number: usize) -> &Sequence {
        self.sequences[number].as_ref().expect("the sequence is open")
    }

    fn sequence_mut(&mut self, number: usize) -> &mut Sequence {
        self.sequences[number].as_mut().expect("the sequence is open")
    }

    /// Begins a sequence with the first `len` positions of another, which are shared and not computed again.
    pub fn fork(&mut self, number: usize, len: usize, limit: usize) -> usize {
        let from = self.sequence(number);
        let pages = from.pages[..len.min(from.len).div_ceil(self.page_size)].to_vec();
        let len = len.min(from.len);
        pages.iter().for_each(|&page| self.users[page as usize] += 1);
        self.put(Sequence { pages, len, limit })
    }

    /// Forgets the positions from `len` on.
    pub fn truncate(&mut self, number: usize, len: usize) {
        let keep = len.div_ceil(self.page_size);
        let sequence = self.sequence_mut(number);
        sequence.len = sequence.len.min(len);
        let dropped = sequence.pages.split_off(keep.min(sequence.pages.len()));
        self.release(&dropped);
    }

    /// Ends a sequence; its pages go to the next ones as they are.
    pub fn close(&mut self, number: usize) {
        let sequence = self.sequences[number].take().expect("the sequence is open");
        self.release(&sequence.pages);
    }

    fn release(&mut self, pages: &[i32]) {
        for &page in pages {
            self.users[page as usize] -= 1;
            if self.users[page as usize] == 0 {
                self.free.push(page);
            }
        }
    }

    /// Positions of a sequence; the position of its next token.
    pub fn len(&self, number: usize) -> usize {
        self.sequence(number).len
    }

    /// Positions a sequence may come to hold.
    pub fn limit(&self, number: usize) -> usize {
        self.sequence(number).limit
    }

    /// Makes sure that `count` further positions of a sequence have pages of their own.
    ///
    /// # Errors
    /// More positions than the sequence declared; no memory.
    pub fn reserve(&mut self, machine: &dyn Machine, number: usize, count: usize) -> Result<(), ModelError> {
        let Sequence { len, limit, ref pages } = *self.sequence(number);
        if count > limit - len {
            let why = format!("{count} more positions after {len} exceed the {limit} that the sequence declared");
            return Err(ModelError::input("kv cache", why));
        }
        // The page that holds the next position may be shared: its positions so far are copied.
        if len % self.page_size != 0 && self.users[pages[len / self.page_size] as usize] > 1 {
            let old = pages[len / self.page_size];
            let new = self.take_page(machine)?;
            let held = len % self.page_size;
            for side in self.layers.iter_mut().flatten() {
                machine.copy_within(side, old as usize * self.page_size, new as usize * self.page_size, held)?;
            }
            let place = len / self.page_size;
            self.sequence_mut(number).pages[place] = new;
            self.release(&[old]);
        }
        while self.sequence(number).pages.len() * self.page_size < len + count {
            let page = self.take_page(machine)?;
            self.sequence_mut(number).pages.push(page);
        }
        Ok(())
    }

    /// A page of one's own.
    fn take_page(&mut self, machine: &dyn Machine) -> Result<i32, ModelError> {
        if self.free.is_empty() {
            let (old, page_size) = (self.users.len(), self.page_size);
            // By half, so that growing costs little beside what is written.
            let new = (old + (old / 2).max(4)).min(i32::MAX as usize);
            // What was recorded knows the old places.
            self.forms.recorded.clear();
            for side in self.layers.iter_mut().flatten() {
                machine.grow(side, new.saturating_mul(page_size))?;
            }
            self.users.resize(new, 0);
            self.free.extend((old as i32..new as i32).rev());
        }
        let place = match self.order {
            PageOrder::Ascending => (0..self.free.len()).min_by_key(|&i| self.free[i]),
            PageOrder::Descending => (0..self.free.len()).max_by_key(|&i| self.free[i]),
            PageOrder::Scattered => (0..self.free.len()).min_by_key(|&i| self.free[i].wrapping_mul(-1_640_531_535)),
        };
        let page = self.free.swap_remove(place.expect("there is a free page"));
        self.users[page as usize] = 1;
        Ok(page)
    }

    /// The row where position `at` of a sequence stands, which has been reserved.
    pub fn row(&self, number: usize, at: usize) -> usize {
        self.sequence(number).pages[at / self.page_size] as usize * self.page_size + at % self.page_size
    }

    /// Counts `count` written positions as held.
    pub fn advance(&mut self, number: usize, count: usize) {
        self.sequence_mut(number).len += count;
    }

    /// Positions in all pages.
    pub fn rows(&self) -> usize {
        self.users.len() * self.page_size
    }

    /// Positions in a page.
    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// The most pages of one of the sequences.
    pub fn columns(&self, numbers: impl Iterator<Item = usize>) -> usize {
        numbers.map(|number| self.sequence(number).pages.len()).max().unwrap_or(0)
    }

    /// The pages of the sequences, `[sequences, most pages]`; behind a sequence's last page stands -1.
    pub fn table(&self, numbers: impl Iterator<Item = usize> + Clone) -> Vec<i32> {
        let columns = self.columns(numbers.clone());
        let mut table = Vec::new();
        for number in numbers {
            let pages = &self.sequence(number).pages;
            table.extend_from_slice(pages);
            table.extend(std::iter::repeat_n(-1, columns - pages.len()));
        }
        table
    }
}

/// Makes a tensor longer, with zeros.
pub(crate) fn grow<T: Element>(data: &mut Vec<T>, dims: &[usize]) -> Result<(), ModelError> {
    let count = dims.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
    match count.map(|n| data.try_reserve_exact(n.saturating_sub(data.len())).map(|()| n)) {
        Some(Ok(n)) => {
            ask_for_huge_pages(data.spare_capacity_mut());
            data.resize(n, T::default());
            Ok(())
        }
        _ => {
            let why = format!("a {} tensor of shape {dims:?} does not fit; pass fewer tokens", T::NAME);
            Err(ModelError::input("memory", why))
        }
    }
}

/// Zeros for a tensor of extents `dims`; an error when memory does not hold it.
pub(crate) fn buffer<T: Element>(dims: &[usize]) -> Result<Vec<T>, ModelError> {
    let mut data = Vec::new();
    grow(&mut data, dims)?;
    Ok(data)
}

#[cfg(test)]
mod tests {
    use super::*;
    use samebits_ops::Cpu;

    /// An empty cache of two layers, whose keys have one element and whose values have two.
    fn cache(page_size: usize, order: PageOrder) -> KvCache {
        KvCache::new(&Cpu::best(), DType::Fp32, 2, [1, 2], page_size, order).unwrap()
    }

    /// The key at every position of a sequence, read as attention does; values are the negatives.
    fn keys(cache: &KvCache, layer: usize, number: usize) -> Vec<f32> {
        let table = cache.table([number].into_iter());
        let [k, v] = &cache.layers[layer];
        let (k, v) = (k.as_slice::<f32>().unwrap(), v.as_slice::<f32>().unwrap());
        (0..cache.len(number))
            .map(|j| table[j / cache.page_size()] as usize * cache.page_size() + j % cache.page_size())
            .inspect(|&row| assert_eq!(k[row], -v[2 * row]))
            .map(|row| k[row])
            .collect()
    }

    /// Position p of layer l gets the key `tag + 100 l + p`.
    fn feed(cache: &mut KvCache, number: usize, count: usize, tag: f32) {
        cache.reserve(&Cpu::best(), number, count).unwrap();
        for layer in 0..2 {
            for at in cache.len(number)..cache.len(number) + count {
                let (row, key) = (cache.row(number, at), tag + (100 * layer + at) as f32);
                let [k, v] = &mut cache.layers[layer];
                k.as_slice_mut::<f32>().unwrap()[row] = key;
                v.as_slice_mut::<f32>().unwrap()[2 * row..][..2].copy_from_slice(&[-key, 0.0]);
            }
        }
        cache.advance(number, count);
    }

    const ORDERS: [PageOrder; 3] = [PageOrder::Ascending, PageOrder::Descending, PageOrder::Scattered];

    #[test]
    fn sequences_keep_what_they_were_given_whatever_the_pages() {
        for order in ORDERS {
            for page_size in 1..6 {
                let mut cache = cache(page_size, order);
                let (a, b) = (cache.open(20), cache.open(20));
                for step in [3, 1, 5] {
                    feed(&mut cache, a, step, 0.0);
                    feed(&mut cache, b, step, 1000.0);
                }
                let expected: Vec<f32> = (0..9).map(|p| p as f32).collect();
                assert_eq!(keys(&cache, 0, a), expected, "{order:?} {page_size}");
                assert_eq!(keys(&cache, 1, b), expected.iter().map(|k| k + 1100.0).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn a_shared_beginning_is_copied_before_it_is_written() {
        for order in ORDERS {
            for page_size in 1..6 {
                let mut cache = cache(page_size, order);
                let a = cache.open(20);
                feed(&mut cache, a, 7, 0.0);
                let b = cache.fork(a, 5, 20);
                feed(&mut cache, b, 2, 500.0);
                feed(&mut cache, a, 1, 0.0);
                assert_eq!(keys(&cache, 0, a), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
                assert_eq!(keys(&cache, 0, b), [0.0, 1.0, 2.0, 3.0, 4.0, 505.0, 506.0]);
                cache.close(a);
                cache.truncate(b, 3);
                feed(&mut cache, b, 1, 900.0);
                assert_eq!(keys(&cache, 1, b), [100.0, 101.0, 102.0, 1003.0]);
                cache.close(b);
                assert_eq!(cache.free.len(), cache.users.len(), "every page is free again");
            }
        }
    }

    #[test]
    fn more_than_was_declared_is_an_error_and_changes_nothing() {
        let mut cache = cache(2, PageOrder::Ascending);
        let a = cache.open(3);
        cache.reserve(&Cpu::best(), a, 2).unwrap();
        cache.advance(a, 2);
        let line = cache.reserve(&Cpu::best(), a, 2).unwrap_err().to_string();
        assert_eq!(line, "kv cache: 2 more positions after 2 exceed the 3 that the sequence declared");
        assert_eq!((cache.len(a), cache.limit(a)), (2, 3));
    }

    #[test]
    fn too_much_memory_is_an_error() {
        for dims in [&[usize::MAX, 2][..], &[usize::MAX / 8]] {
            assert!(buffer::<f32>(dims).unwrap_err().to_string().contains("does not fit"));
        }
    }
}
