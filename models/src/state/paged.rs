//! Keys and values of the tokens seen so far, and what stands beside them, in pages.
//!
//! A sequence is a list of pages and a length; where its pages stand, how large they are and who else reads them is not
//! seen by attention. Pages are shared by sequences that begin alike and copied before one of them writes.

use super::pool::{PageOrder, Pool};
use super::{LayerState, Sequence};
use crate::ModelError;
use crate::machine::Machine;

/// The pages of all sequences.
pub(super) struct Pages {
    /// Positions in a page.
    pub size: usize,
    pub pool: Pool,
}

impl Pages {
    pub fn new(size: usize, order: PageOrder) -> Pages {
        Pages { size: size.max(1), pool: Pool::new(order) }
    }

    /// Makes sure that `count` further positions of a sequence have pages of their own. Says whether pages have moved.
    pub fn reserve(
        &mut self,
        machine: &dyn Machine,
        layers: &mut [LayerState],
        sequence: &mut Sequence,
        count: usize,
    ) -> Result<bool, ModelError> {
        let (place, held, mut moved) = (sequence.len / self.size, sequence.len % self.size, false);
        // The page that holds the next position may be shared: its positions so far are copied.
        if held != 0 && self.pool.is_shared(sequence.pages[place]) {
            moved |= self.make_room(machine, layers)?;
            let (old, new) = (sequence.pages[place], self.pool.take());
            for side in sides(layers) {
                machine.copy_within(side, old as usize * self.size, new as usize * self.size, held)?;
            }
            sequence.pages[place] = new;
            self.pool.release(old);
        }
        while sequence.pages.len() * self.size < sequence.len + count {
            moved |= self.make_room(machine, layers)?;
            sequence.pages.push(self.pool.take());
        }
        Ok(moved)
    }

    /// Makes sure that a page is free; says whether all have moved for it.
    fn make_room(&mut self, machine: &dyn Machine, layers: &mut [LayerState]) -> Result<bool, ModelError> {
        let Some(len) = self.pool.next_len() else { return Ok(false) };
        for side in sides(layers) {
            machine.grow(side, len.saturating_mul(self.size))?;
        }
        self.pool.grow(len);
        Ok(true)
    }

    /// The pages of the first `len` positions of a sequence, for one more user.
    pub fn share(&mut self, sequence: &Sequence, len: usize) -> Vec<i32> {
        let pages = sequence.pages[..len.div_ceil(self.size).min(sequence.pages.len())].to_vec();
        pages.iter().for_each(|&page| self.pool.share(page));
        pages
    }

    /// Gives back the pages behind the first `len` positions.
    pub fn cut(&mut self, sequence: &mut Sequence, len: usize) {
        let kept = len.div_ceil(self.size).min(sequence.pages.len());
        sequence.pages.drain(kept..).for_each(|page| self.pool.release(page));
    }
}

/// Keys, values and what stands beside them of all layers that keep them.
fn sides(layers: &mut [LayerState]) -> impl Iterator<Item = &mut samebits_ops::Tensor> {
    let paged = layers.iter_mut().filter_map(|layer| match layer {
        LayerState::Paged(sides) => Some(sides.iter_mut()),
        _ => None,
    });
    paged.flatten()
}
