//! State of layers that recur, such as a scan's or the last inputs of a convolution: a row in f32 for each sequence.
//!
//! A step reads one row of a sequence and writes another, which takes the place of the first once the step is done. So a
//! row that was written stays as it is for as long as somebody uses it: a fork and a snapshot are one more user of it, a
//! rollback goes back to one, and a step that fails, or is run again for a reverse pass, finds what it began with. Row 0 is
//! the beginning of every sequence: zeros.

use super::pool::{PageOrder, Pool};
use super::{LayerState, Sequence};
use crate::ModelError;
use crate::machine::{Index, Machine};
use samebits_ops::Tensor;
use samebits_ops::device::Part;
use std::ops::Range;

/// What a layer keeps: some parts, each `[rows,width]` in f32.
pub(crate) struct Recurrent(Vec<Tensor>);

impl Recurrent {
    /// Parts of these widths, with the row of zeros.
    pub fn new(machine: &dyn Machine, widths: &[usize]) -> Result<Recurrent, ModelError> {
        let part = |&width: &usize| -> Result<Tensor, ModelError> {
            Ok(machine.upload(Tensor::new(vec![0f32; width], &[1, width])?.view())?)
        };
        Ok(Recurrent(widths.iter().map(part).collect::<Result<_, _>>()?))
    }

    /// Some rows of a part on the host.
    pub fn rows_of(&self, part: usize, rows: Range<usize>) -> &[f32] {
        let width = self.width(part);
        let all = self.0[part].as_slice::<f32>().expect("they are f32, and on the host");
        &all[rows.start * width..rows.end * width]
    }

    /// Elements of a row of a part.
    pub fn width(&self, part: usize) -> usize {
        self.0[part].shape()[1]
    }

    /// The first of the rows of a step, where they stand one behind the other and the host knows them.
    pub fn first_of(&self, rows: &Index, count: usize) -> Option<usize> {
        let Index::Host(rows) = rows else { return None };
        let first = *rows.first()?;
        let follow = rows.iter().zip(first..).all(|(&row, expected)| row == expected);
        (follow && rows.len() == count).then_some(first as usize)
    }

    /// The rows of a part, to `values[sequences,width]`.
    pub fn read(
        &self,
        machine: &dyn Machine,
        part: usize,
        rows: &Index,
        values: &mut Tensor,
    ) -> Result<(), ModelError> {
        let &[count, width] = values.shape() else { panic!("a row for each sequence") };
        let from = Part { rows: Some(rows), ..Part::whole(width) };
        Ok(machine.copy_rows([count, width], (&self.0[part], from), (values, Part::whole(width)))?)
    }

    /// Writes `values[sequences,width]` to rows of a part.
    pub fn write(
        &mut self,
        machine: &dyn Machine,
        part: usize,
        rows: &Index,
        values: &Tensor,
    ) -> Result<(), ModelError> {
        let &[count, width] = values.shape() else { panic!("a row for each sequence") };
        let to = Part { rows: Some(rows), ..Part::whole(width) };
        Ok(machine.copy_rows([count, width], (values, Part::whole(width)), (&mut self.0[part], to))?)
    }
}

/// The rows of a sequence.
#[derive(Default)]
pub(super) struct Rows {
    /// What its steps have left; `None` at its beginning.
    now: Option<i32>,
    /// What the next step writes, from when it is reserved.
    next: Option<i32>,
    /// Rows that it can go back to, and the positions that had been held.
    snapshots: Vec<(usize, i32)>,
}

/// Rows that there are from the first sequence on, on a device: steps that were recorded know the places, and those move when rows are
/// added.
const LEAST_ROWS: usize = 16;

/// More snapshots of a sequence than this are not kept: the oldest goes.
const MOST_SNAPSHOTS: usize = 4;

/// The rows of all sequences.
pub(super) struct RowPool {
    pub pool: Pool,
}

impl RowPool {
    pub fn new(order: PageOrder) -> RowPool {
        let mut pool = Pool::new(order);
        pool.grow(1);
        pool.take();
        RowPool { pool }
    }

    /// Makes sure that there is a row for the next step of a sequence. Says whether rows have moved.
    pub fn reserve(
        &mut self,
        machine: &dyn Machine,
        layers: &mut [LayerState],
        sequence: &mut Sequence,
    ) -> Result<bool, ModelError> {
        if sequence.rows.next.is_some() {
            return Ok(false);
        }
        let on_device = |layer: &LayerState| matches!(layer, LayerState::Recurrent(rows) if !rows.0[0].is_on_host());
        let least = if layers.iter().any(on_device) { LEAST_ROWS } else { 0 };
        let grown = self.pool.next_len().map(|len| len.max(least));
        if let Some(len) = grown {
            for layer in layers {
                let LayerState::Recurrent(Recurrent(parts)) = layer else { continue };
                parts.iter_mut().try_for_each(|part| machine.grow(part, len))?;
            }
            self.pool.grow(len);
        }
        sequence.rows.next = Some(self.pool.take());
        Ok(grown.is_some())
    }

    /// Takes what the step has written.
    pub fn advance(&mut self, rows: &mut Rows) {
        let Some(next) = rows.next.take() else { return };
        if let Some(before) = rows.now.replace(next) {
            self.pool.release(before);
        }
    }

    /// Keeps what there is, behind `len` positions, to go back to.
    pub fn snapshot(&mut self, rows: &mut Rows, len: usize) {
        let Some(now) = rows.now.filter(|_| rows.snapshots.last().is_none_or(|(at, _)| *at < len)) else { return };
        self.pool.share(now);
        rows.snapshots.push((len, now));
        if rows.snapshots.len() > MOST_SNAPSHOTS {
            let (_, oldest) = rows.snapshots.remove(0);
            self.pool.release(oldest);
        }
    }

    /// The rows of a sequence that begins as another, at a length that [`Rows::at_most`] gave.
    pub fn fork(&mut self, of: &Rows, (len, now): (usize, Option<i32>)) -> Rows {
        let snapshots: Vec<_> = of.snapshots.iter().copied().filter(|(at, _)| *at <= len).collect();
        snapshots.iter().map(|(_, row)| *row).chain(now).for_each(|row| self.pool.share(row));
        Rows { now, next: None, snapshots }
    }

    /// Goes back to a length that [`Rows::at_most`] gave.
    pub fn rollback(&mut self, rows: &mut Rows, (len, now): (usize, Option<i32>)) {
        now.into_iter().for_each(|row| self.pool.share(row));
        rows.now.into_iter().for_each(|row| self.pool.release(row));
        rows.now = now;
        rows.snapshots.extract_if(.., |(at, _)| *at > len).for_each(|(_, row)| self.pool.release(row));
    }

    /// Gives back all rows.
    pub fn close(&mut self, rows: Rows) {
        let all = rows.snapshots.into_iter().map(|(_, row)| row).chain(rows.now).chain(rows.next);
        all.for_each(|row| self.pool.release(row));
    }
}

impl Rows {
    /// The longest beginning of at most `len` of the `held` positions that there is a row of, and that row.
    pub fn at_most(&self, len: usize, held: usize) -> (usize, Option<i32>) {
        if len >= held {
            return (held, self.now);
        }
        let snapshot = self.snapshots.iter().rev().find(|(at, _)| *at <= len);
        snapshot.map_or((0, None), |&(at, row)| (at, Some(row)))
    }

    /// The row that the next step reads, and the one that it writes, which has been reserved.
    pub fn of_step(&self) -> [i32; 2] {
        [self.now.unwrap_or(0), self.next.expect("it is reserved")]
    }
}
