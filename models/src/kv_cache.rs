//! Keys and values of the tokens seen so far, in pages.
//!
//! A sequence is a list of pages and a length; where its pages stand, how large they are and who else reads them is not
//! seen by attention. Pages are shared by sequences that begin alike and copied before one of them writes.

use crate::ModelError;
use samebits_ops::Element;
use std::str::FromStr;

/// Where keys and values of every layer stand, each `[rows, heads * dim]`; a row is a position of some page.
pub(crate) trait Store {
    /// Makes room for `rows` rows in all and keeps those that are there.
    fn grow(&mut self, rows: usize) -> Result<(), ModelError>;

    /// Copies `count` rows from row `from` on to those from `to` on, in every layer.
    fn copy(&mut self, from: usize, to: usize, count: usize) -> Result<(), ModelError>;
}

/// A store in the memory of the processor.
pub(crate) struct Host<A> {
    /// Keys and values by layer.
    layers: Vec<[Vec<A>; 2]>,
    /// Elements of one position: of its keys and of its values.
    widths: [usize; 2],
}

impl<A: Element> Host<A> {
    /// An empty one.
    pub fn new(layers: usize, widths: [usize; 2]) -> Host<A> {
        Host { layers: (0..layers).map(|_| [Vec::new(), Vec::new()]).collect(), widths }
    }
}

impl<A: Element> Store for Host<A> {
    fn grow(&mut self, rows: usize) -> Result<(), ModelError> {
        for side in self.layers.iter_mut() {
            for (side, width) in side.iter_mut().zip(self.widths) {
                grow(side, &[rows, width])?;
            }
        }
        Ok(())
    }

    fn copy(&mut self, from: usize, to: usize, count: usize) -> Result<(), ModelError> {
        for layer in &mut self.layers {
            for (side, width) in layer.iter_mut().zip(self.widths) {
                side.copy_within(from * width..(from + count) * width, to * width);
            }
        }
        Ok(())
    }
}

/// The pages of all sequences over a store.
pub(crate) struct KvCache<S> {
    store: S,
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

impl<S: Store> KvCache<S> {
    /// An empty cache over an empty store; it grows with what it is given.
    pub fn new(store: S, page_size: usize, order: PageOrder) -> KvCache<S> {
        let page_size = page_size.max(1);
        KvCache { store, page_size, order, free: Vec::new(), users: Vec::new(), sequences: Vec::new() }
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
    pub fn reserve(&mut self, number: usize, count: usize) -> Result<(), ModelError> {
        let Sequence { len, limit, ref pages } = *self.sequence(number);
        if count > limit - len {
            let why = format!("{count} more positions after {len} exceed the {limit} that the sequence declared");
            return Err(ModelError::input("kv cache", why));
        }
        // The page that holds the next position may be shared: its positions so far are copied.
        if len % self.page_size != 0 && self.users[pages[len / self.page_size] as usize] > 1 {
            let old = pages[len / self.page_size];
            let new = self.take_page()?;
            let held = len % self.page_size;
            self.store.copy(old as usize * self.page_size, new as usize * self.page_size, held)?;
            let place = len / self.page_size;
            self.sequence_mut(number).pages[place] = new;
            self.release(&[old]);
        }
        while self.sequence(number).pages.len() * self.page_size < len + count {
            let page = self.take_page()?;
            self.sequence_mut(number).pages.push(page);
        }
        Ok(())
    }

    /// A page of one's own.
    fn take_page(&mut self) -> Result<i32, ModelError> {
        if self.free.is_empty() {
            let (old, page_size) = (self.users.len(), self.page_size);
            // By half, so that growing costs little beside what is written.
            let new = (old + (old / 2).max(4)).min(i32::MAX as usize);
            self.store.grow(new.saturating_mul(page_size))?;
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

    /// The row of the store where position `at` of a sequence stands, which has been reserved.
    pub fn row(&self, number: usize, at: usize) -> usize {
        self.sequence(number).pages[at / self.page_size] as usize * self.page_size + at % self.page_size
    }

    /// Counts `count` written positions as held.
    pub fn advance(&mut self, number: usize, count: usize) {
        self.sequence_mut(number).len += count;
    }

    /// Where keys and values stand.
    pub fn store(&mut self) -> &mut S {
        &mut self.store
    }

    /// Positions in all pages.
    pub fn rows(&self) -> usize {
        self.users.len() * self.page_size
    }

    /// Positions in a page.
    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// The pages of the sequences, `[sequences, most pages]`; behind a sequence's last page stands -1.
    pub fn table(&self, numbers: impl Iterator<Item = usize> + Clone) -> Vec<i32> {
        let columns = numbers.clone().map(|number| self.sequence(number).pages.len()).max().unwrap_or(0);
        let mut table = Vec::new();
        for number in numbers {
            let pages = &self.sequence(number).pages;
            table.extend_from_slice(pages);
            table.extend(std::iter::repeat_n(-1, columns - pages.len()));
        }
        table
    }
}

impl<A: Element> KvCache<Host<A>> {
    /// Writes position `at` of a sequence, which has been reserved, in one layer.
    pub fn write(&mut self, layer: usize, number: usize, at: usize, key: &[A], value: &[A]) {
        let (row, Host { layers, widths }) = (self.row(number, at), &mut self.store);
        for ((side, width), new) in layers[layer].iter_mut().zip(*widths).zip([key, value]) {
            side[row * width..][..width].copy_from_slice(new);
        }
    }

    /// Keys and values of a layer, each `[P, page_size, ..]`.
    pub fn layer(&self, layer: usize) -> (&[A], &[A]) {
        (&self.store.layers[layer][0], &self.store.layers[layer][1])
    }
}

/// Makes a tensor longer, with zeros.
fn grow<T: Element>(data: &mut Vec<T>, dims: &[usize]) -> Result<(), ModelError> {
    let count = dims.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
    match count.map(|n| data.try_reserve_exact(n.saturating_sub(data.len())).map(|()| n)) {
        Some(Ok(n)) => {
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

    /// The key at every position of a sequence, read as attention does; values are the negatives.
    fn keys(cache: &KvCache<Host<f32>>, layer: usize, number: usize) -> Vec<f32> {
        let table = cache.table([number].into_iter());
        let (k, v) = cache.layer(layer);
        (0..cache.len(number))
            .map(|j| table[j / cache.page_size()] as usize * cache.page_size() + j % cache.page_size())
            .inspect(|&row| assert_eq!(k[row], -v[2 * row]))
            .map(|row| k[row])
            .collect()
    }

    /// Position p of layer l gets the key `tag + 100 l + p`.
    fn feed(cache: &mut KvCache<Host<f32>>, number: usize, count: usize, tag: f32) {
        cache.reserve(number, count).unwrap();
        for layer in 0..2 {
            for at in cache.len(number)..cache.len(number) + count {
                let key = tag + (100 * layer + at) as f32;
                cache.write(layer, number, at, &[key], &[-key, 0.0]);
            }
        }
        cache.advance(number, count);
    }

    const ORDERS: [PageOrder; 3] = [PageOrder::Ascending, PageOrder::Descending, PageOrder::Scattered];

    #[test]
    fn sequences_keep_what_they_were_given_whatever_the_pages() {
        for order in ORDERS {
            for page_size in 1..6 {
                let mut cache = KvCache::new(Host::new(2, [1, 2]), page_size, order);
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
                let mut cache = KvCache::new(Host::new(2, [1, 2]), page_size, order);
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
        let mut cache = KvCache::new(Host::<f32>::new(1, [1, 2]), 2, PageOrder::Ascending);
        let a = cache.open(3);
        cache.reserve(a, 2).unwrap();
        cache.advance(a, 2);
        let line = cache.reserve(a, 2).unwrap_err().to_string();
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
