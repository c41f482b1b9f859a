//! What a model keeps of sequences from step to step, under one manager.
//!
//! A layer says which state it has: keys and values by position, or a row that every position changes. Whatever its layers
//! keep, a sequence is begun, forked, rolled back and ended as a whole, and has one length.

mod paged;
mod pool;
mod recurrent;
#[cfg(feature = "unit-tests")]
pub(crate) mod tests;

pub use pool::PageOrder;
pub(crate) use recurrent::Recurrent;

use crate::ModelError;
use crate::machine::{Machine, empty};
use crate::step::Forms;
use paged::Pages;
use recurrent::Rows;
use samebits_ops::{DType, Tensor};

/// What a layer keeps of a sequence.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Kind {
    /// Nothing.
    None,
    /// Keys and values of these widths for each position, and what stands beside them.
    Paged(Vec<usize>),
    /// Rows of these widths in f32.
    Recurrent(Vec<usize>),
}

/// What a layer keeps of all sequences.
pub(crate) enum LayerState {
    None,
    /// Keys, values and what stands beside them, each `[rows,width]`; a row is a position of some page.
    Paged(Vec<Tensor>),
    Recurrent(Recurrent),
}

impl LayerState {
    /// Keys, values and what stands beside them of a layer that keeps them.
    pub fn pages(&mut self) -> &mut [Tensor] {
        let LayerState::Paged(sides) = self else { unreachable!("a layer has the state that it asked for") };
        sides
    }

    /// The rows of a layer that recurs.
    pub fn rows(&mut self) -> &mut Recurrent {
        let LayerState::Recurrent(rows) = self else { unreachable!("a layer has the state that it asked for") };
        rows
    }
}

/// The states of all sequences in all layers.
pub(crate) struct States {
    /// By layer, in the order in which they are run.
    pub layers: Vec<LayerState>,
    /// What is kept of the steps that were run over it.
    pub forms: Forms,
    pages: Option<Pages>,
    rows: Option<recurrent::RowPool>,
    sequences: Vec<Option<Sequence>>,
}

struct Sequence {
    /// Positions held; the position of the next token.
    len: usize,
    /// Positions it may come to hold, as declared when it began.
    limit: usize,
    pages: Vec<i32>,
    rows: Rows,
}

impl States {
    /// Those of no sequence yet, which grow with what they are given.
    ///
    /// # Errors
    /// Those of a device.
    pub fn new(
        machine: &dyn Machine,
        dtype: DType,
        kinds: &[Kind],
        page_size: usize,
        order: PageOrder,
    ) -> Result<States, ModelError> {
        let layer = |kind: &Kind| -> Result<LayerState, ModelError> {
            Ok(match kind {
                Kind::None => LayerState::None,
                Kind::Paged(widths) => {
                    let sides = widths.iter().map(|&width| empty(machine, dtype, &[0, width]));
                    LayerState::Paged(sides.collect::<Result<_, _>>()?)
                }
                Kind::Recurrent(widths) => LayerState::Recurrent(Recurrent::new(machine, widths)?),
            })
        };
        let is_paged = kinds.iter().any(|kind| matches!(kind, Kind::Paged(_)));
        let recurs = kinds.iter().any(|kind| matches!(kind, Kind::Recurrent(_)));
        Ok(States {
            layers: kinds.iter().map(layer).collect::<Result<_, _>>()?,
            forms: Forms::default(),
            pages: is_paged.then(|| Pages::new(page_size, order)),
            rows: recurs.then(|| recurrent::RowPool::new(order)),
            sequences: Vec::new(),
        })
    }

    /// Begins a sequence of at most `limit` positions and returns its number.
    pub fn open(&mut self, limit: usize) -> usize {
        self.put(Sequence { len: 0, limit, pages: Vec::new(), rows: Rows::default() })
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

    /// The longest beginning of at most `len` positions of a sequence that can be gone on with, and its row.
    fn at_most(&self, number: usize, len: usize) -> (usize, Option<i32>) {
        let sequence = self.sequence(number);
        match &self.rows {
            Some(_) => sequence.rows.at_most(len, sequence.len),
            None => (len.min(sequence.len), None),
        }
    }

    /// Begins a sequence with the first `len` positions of another, which are shared and not computed again; or with as many
    /// of them as there is a snapshot of, where a layer recurs ([`States::len`]).
    pub fn fork(&mut self, number: usize, len: usize, limit: usize) -> usize {
        let beginning = self.at_most(number, len);
        let from = self.sequences[number].as_ref().expect("the sequence is open");
        let pages = self.pages.as_mut().map(|pages| pages.share(from, beginning.0)).unwrap_or_default();
        let rows = self.rows.as_mut().map(|states| states.fork(&from.rows, beginning)).unwrap_or_default();
        self.put(Sequence { len: beginning.0, limit, pages, rows })
    }

    /// Keeps the states that a sequence has now, so that it can be rolled back and forked there.
    pub fn snapshot(&mut self, number: usize) {
        let sequence = self.sequences[number].as_mut().expect("the sequence is open");
        if let Some(states) = &mut self.rows {
            states.snapshot(&mut sequence.rows, sequence.len);
        }
    }

    /// Forgets the positions from `len` on; and those before as far as there is a snapshot, where a layer recurs. The
    /// positions that are left: those from there on are to be fed again.
    pub fn rollback(&mut self, number: usize, len: usize) -> usize {
        let beginning = self.at_most(number, len);
        let sequence = self.sequences[number].as_mut().expect("the sequence is open");
        sequence.len = beginning.0;
        if let Some(pages) = &mut self.pages {
            pages.cut(sequence, beginning.0);
        }
        if let Some(states) = &mut self.rows {
            states.rollback(&mut sequence.rows, beginning);
        }
        beginning.0
    }

    /// Ends a sequence; its places go to the next ones as they are.
    pub fn close(&mut self, number: usize) {
        let mut sequence = self.sequences[number].take().expect("the sequence is open");
        if let Some(pages) = &mut self.pages {
            pages.cut(&mut sequence, 0);
        }
        if let Some(states) = &mut self.rows {
            states.close(sequence.rows);
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

    /// Makes sure that a step can write `count` further positions of a sequence.
    ///
    /// # Errors
    /// More positions than the sequence declared; no memory.
    pub fn reserve(&mut self, machine: &dyn Machine, number: usize, count: usize) -> Result<(), ModelError> {
        let moved = self.reserve_places(machine, number, count);
        if !matches!(moved, Ok(false)) {
            // What was recorded knows the old places.
            self.forms.recorded.clear();
        }
        moved.map(drop)
    }

    /// [`States::reserve`]; says whether places have moved.
    fn reserve_places(&mut self, machine: &dyn Machine, number: usize, count: usize) -> Result<bool, ModelError> {
        let sequence = self.sequences[number].as_mut().expect("the sequence is open");
        let &mut Sequence { len, limit, .. } = sequence;
        if count > limit - len {
            let why = format!("{count} more positions after {len} exceed the {limit} that the sequence declared");
            return Err(ModelError::input("kv cache", why));
        }
        let mut moved = false;
        if let Some(pages) = &mut self.pages {
            moved |= pages.reserve(machine, &mut self.layers, sequence, count)?;
        }
        if let Some(states) = &mut self.rows {
            moved |= states.reserve(machine, &mut self.layers, sequence)?;
        }
        Ok(moved)
    }

    /// Counts `count` written positions as held.
    pub fn advance(&mut self, number: usize, count: usize) {
        let sequence = self.sequences[number].as_mut().expect("the sequence is open");
        sequence.len += count;
        if let Some(states) = &mut self.rows {
            states.advance(&mut sequence.rows);
        }
    }

    /// The row of keys and values where position `at` of a sequence stands, which has been reserved; `None` where no layer
    /// keeps them.
    pub fn row(&self, number: usize, at: usize) -> Option<usize> {
        let pages = self.pages.as_ref()?;
        Some(self.sequence(number).pages[at / pages.size] as usize * pages.size + at % pages.size)
    }

    /// The rows of the sequences of a step that layers that recur read, and those that they write, and how many there are;
    /// `None` where none does.
    pub fn rows_of_step(&self, numbers: impl Iterator<Item = usize>) -> Option<([Vec<i32>; 2], usize)> {
        let states = self.rows.as_ref()?;
        let (read, written) = numbers.map(|number| self.sequence(number).rows.of_step().into()).unzip();
        Some(([read, written], states.pool.len()))
    }

    /// Positions in all pages.
    pub fn positions(&self) -> usize {
        self.pages.as_ref().map_or(0, |pages| pages.pool.len() * pages.size)
    }

    /// Positions in a page; 1 where no layer keeps any.
    pub fn page_size(&self) -> usize {
        self.pages.as_ref().map_or(1, |pages| pages.size)
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
