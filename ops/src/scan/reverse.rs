//! What the gradients of scans share: some units (heads, or blocks of channels) are taken at a time, each by one thread, and each
//! makes a part of db and dc; then these parts are added to the totals of their groups, in the order of the units.
//!
//! States are computed again from those before every so many positions, which are kept.

use crate::backend::device::workspace::choose as choose_on_device;
use crate::backend::device::{Buffer, Device};
use crate::pack::as_floats_mut;
use crate::parallel::SharedOut;
use crate::simd::{Kernel, Simd, load_at, narrow_at};
use crate::through_f32::convert;
use crate::workspace::{Need, Plan, choose};
use crate::{Cpu, Element, Error};
use std::iter::successors;
use std::ops::Range;

/// The units of a call, and what is made of them.
#[derive(Clone, Copy)]
pub(super) struct Units {
    pub batch: usize,
    pub length: usize,
    /// Units of a sequence.
    pub count: usize,
    /// Groups of these, each with a db and a dc.
    pub groups: usize,
    /// Elements of b, or of c, of a group.
    pub state_dim: usize,
    /// Elements of the state of a unit.
    pub state: usize,
    /// What a unit keeps besides states.
    pub rows: usize,
}

impl Units {
    /// Units of all sequences, counted one sequence after the other.
    pub fn all(&self) -> usize {
        self.batch.saturating_mul(self.count)
    }
}

/// How many units are worked on at a time.
#[derive(Clone, Copy)]
pub(super) struct Cut {
    pub of: Units,
    pub units: usize,
    workers: usize,
}

impl Cut {
    /// From the one that is preferred to the smallest.
    fn all(of: Units, units: usize, threads: usize) -> impl Iterator<Item = Cut> {
        let halves = successors(Some(units), |units| Some(units / 2).filter(|units| *units > 0));
        halves.map(move |units| Cut { of, units, workers: threads.min(units) })
    }

    /// db and dc of a unit.
    pub fn of_part(&self) -> usize {
        2 * self.of.length * self.of.state_dim
    }

    /// The totals of db or dc.
    pub fn of_total(&self) -> usize {
        self.of.batch * self.of.length * self.of.groups * self.of.state_dim
    }

    /// States that are kept, those of a stretch with the one before it, and the gradient of one.
    fn states(&self) -> usize {
        let stretch = stretch(self.of.length);
        self.of.length.div_ceil(stretch) + stretch + 2
    }
}

/// Positions from one state that is kept to the next: the root of how many there are.
pub(super) fn stretch(length: usize) -> usize {
    length.isqrt().max(1)
}

impl Plan for Cut {
    fn need(&self) -> Need {
        let shared = self.of_part().saturating_mul(self.units).saturating_add(2 * self.of_total());
        let slot = self.states().saturating_mul(self.of.state).saturating_add(self.of.rows);
        Need { shared, slot, workers: self.workers, pairs: 0 }
    }

    fn tiles(&self) -> [(&'static str, usize); 3] {
        [("units", self.units), ("positions", stretch(self.of.length)), ("", 0)]
    }
}

/// What a slot holds: rows, the states that are kept, those of a stretch with the one before it, and the gradient of one.
pub(super) struct Slot<'a> {
    pub rows: &'a mut [f32],
    pub kept: &'a mut [f32],
    pub run: &'a mut [f32],
    pub g: &'a mut [f32],
}

impl<'a> Slot<'a> {
    fn of(units: &Units, slot: &'a mut [f32]) -> Slot<'a> {
        let stretch = stretch(units.length);
        let (rows, states) = slot.split_at_mut(units.rows);
        let (kept, rest) = states.split_at_mut(units.length.div_ceil(stretch) * units.state);
        let (run, g) = rest.split_at_mut((stretch + 1) * units.state);
        Slot { rows, kept, run, g: &mut g[..units.state] }
    }
}

/// What a unit does at a position: take its state over it, or, on the way back, use those before it and behind it.
pub(super) enum At<'a> {
    Over(usize, &'a mut [f32]),
    Back(usize, [&'a [f32]; 2]),
}

/// The state at the start of `run`, of `size` elements, over `end` of `length` positions, and back.
pub(super) fn there_and_back(
    [length, end, size]: [usize; 3],
    kept: &mut [f32],
    run: &mut [f32],
    mut at: impl FnMut(At),
) {
    let stretch = stretch(length);
    let state = &mut run[..size];
    for t in 0..end {
        if t % stretch == 0 {
            kept[t / stretch * size..][..size].copy_from_slice(state);
        }
        at(At::Over(t, state));
    }
    for first in (0..end).step_by(stretch).rev() {
        run[..size].copy_from_slice(&kept[first / stretch * size..][..size]);
        let last = (first + stretch).min(end);
        for t in first..last {
            let (before, after) = run[(t - first) * size..].split_at_mut(size);
            let after = &mut after[..size];
            after.copy_from_slice(before);
            at(At::Over(t, after));
        }
        for t in (first..last).rev() {
            let (before, after) = run[(t - first) * size..].split_at(size);
            at(At::Back(t, [before, &after[..size]]));
        }
    }
}

/// Takes all units: `unit(number, slot, part)` makes what is its own, and in part its db and dc of each position up to `end` of its
/// sequence. Totals are rounded to db and dc.
pub(super) fn run<O: Element>(
    cpu: &Cpu,
    op: &'static str,
    units: Units,
    end: &(dyn Fn(usize) -> usize + Sync),
    unit: &(dyn Fn(usize, Slot, &mut [f32]) + Sync),
    [db, dc]: &[SharedOut<O>; 2],
) -> Result<(), Error> {
    let preferred = units.all().clamp(1, 4 * cpu.threads());
    let (cut, mut workspace) = choose(cpu, op, Cut::all(units, preferred, cpu.threads()))?;
    let (shared, slots) = workspace.split();
    let (totals, parts) = as_floats_mut(shared).split_at_mut(2 * cut.of_total());
    totals.fill(0.0);
    let (totals, parts) = (SharedOut::new(totals), SharedOut::new(parts));
    let mut slots: Vec<&mut [f32]> = slots.into_iter().map(as_floats_mut).collect();
    for first in (0..units.all()).step_by(cut.units) {
        let count = cut.units.min(units.all() - first);
        cpu.each_in(slots.iter_mut(), count, |slot, i| {
            // SAFETY: each has a part of its own.
            let part = unsafe { parts.part(i * cut.of_part(), cut.of_part()) };
            unit(first + i, Slot::of(&units, slot), part);
        });
        let pieces = (4 * cpu.threads()).min(units.length);
        cpu.each(pieces, |piece| {
            let rows = piece * units.length / pieces..(piece + 1) * units.length / pieces;
            (0..count).for_each(|i| add(cpu, &cut, first + i, (rows.clone(), end), (&parts, i), &totals));
        });
    }
    let (rows, width) = (units.batch * units.length, units.groups * units.state_dim);
    let pieces = (4 * cpu.threads()).min(rows);
    cpu.each(pieces, |piece| {
        let (from, to) = (piece * rows / pieces * width, (piece + 1) * rows / pieces * width);
        for (number, to_narrow) in [db, dc].into_iter().enumerate() {
            // SAFETY: pieces are disjoint, and nobody writes totals any more.
            let (total, made) =
                unsafe { (totals.read(number * cut.of_total() + from, to - from), to_narrow.part(from, to - from)) };
            convert(cpu, total, made);
        }
    });
    Ok(())
}

/// Adds some positions of a unit's db and dc, which are part number `i`, to the totals of its group.
fn add(
    cpu: &Cpu,
    cut: &Cut,
    unit: usize,
    (rows, end): (Range<usize>, &(dyn Fn(usize) -> usize + Sync)),
    (parts, i): (&SharedOut<f32>, usize),
    totals: &SharedOut<f32>,
) {
    let Units { length, count, groups, state_dim: n, .. } = cut.of;
    let (b, group) = (unit / count, unit % count / (count / groups));
    for t in rows.start..rows.end.min(end(b)) {
        for number in 0..2 {
            let at = number * cut.of_total() + ((b * length + t) * groups + group) * n;
            // SAFETY: tasks have positions of their own, and all parts were written before.
            let (part, total) =
                unsafe { (parts.read(i * cut.of_part() + (number * length + t) * n, n), totals.part(at, n)) };
            cpu.dispatch(AddTo { part, total });
        }
    }
}

/// `total = total + part`
struct AddTo<'a> {
    part: &'a [f32],
    total: &'a mut [f32],
}

impl Kernel for AddTo<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for at in (0..self.total.len()).step_by(S::LANES) {
            let sum = s.add(load_at(s, self.total, at, 0.0), load_at(s, self.part, at, 0.0));
            narrow_at(s, sum, self.total, at);
        }
    }
}

/// A cut on a device, in one workspace: totals, then parts, then slots.
struct DeviceCut(Cut);

impl Plan for DeviceCut {
    fn need(&self) -> Need {
        let Need { shared, slot, .. } = self.0.need();
        let shared = shared.saturating_add(slot.saturating_mul(self.0.units)).max(1);
        Need { shared, slot: 0, workers: 1, pairs: 0 }
    }

    fn tiles(&self) -> [(&'static str, usize); 3] {
        self.0.tiles()
    }
}

/// The workspace of a call on a device.
pub(super) struct Room {
    pub cut: Cut,
    pub buffer: Buffer<f32>,
}

impl Room {
    pub fn on(device: &Device, op: &'static str, units: Units) -> Result<Room, Error> {
        let (DeviceCut(cut), buffer) = choose_on_device(device, op, Cut::all(units, units.all(), 1).map(DeviceCut))?;
        Ok(Room { cut, buffer })
    }

    /// Where parts begin, and slots.
    pub fn places(&self) -> [usize; 2] {
        let parts = 2 * self.cut.of_total();
        [parts, parts + self.cut.units * self.cut.of_part()]
    }

    /// Elements of a slot.
    pub fn slot(&self) -> usize {
        self.cut.need().slot
    }

    /// The units that are taken together: the first of each lot, and how many they are.
    pub fn lots(&self) -> impl Iterator<Item = (usize, usize)> {
        let (all, units) = (self.cut.of.all(), self.cut.units);
        (0..all).step_by(units).map(move |first| (first, units.min(all - first)))
    }
}
