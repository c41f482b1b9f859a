//! What a causal convolution and its gradients share: rows that stand in several tensors, the chains over them, and how the
//! work is dealt. Sequences are `[B,T,C]`, and every element of an output is a chain of K terms of one channel, so vectors run
//! over C.

use crate::lengths::Lengths;
use crate::simd::{Kernel, Simd, load_at, load_two, narrow_at, narrow_two};
use crate::tensor::{Heads, Rows};
use crate::{Cpu, Element, Error, TensorRef, check_len, value_error};
use std::ops::Range;

/// Dimensions of a causal convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CausalConv1d {
    /// Sequences B.
    pub batch: usize,
    /// Rows of each, T.
    pub length: usize,
    /// Channels C.
    pub channels: usize,
    /// Taps K, at least 1.
    pub taps: usize,
}

impl CausalConv1d {
    /// Those of a call by name.
    pub(super) fn of(call: &samebits_schema::Call) -> CausalConv1d {
        let [batch, length, channels, taps] = ["B", "T", "C", "K"].map(|axis| call.dim(axis));
        CausalConv1d { batch, length, channels, taps }
    }

    /// Rows of a state, J.
    pub(super) fn before(&self) -> usize {
        self.taps - 1
    }

    /// Refuses no taps, before anything is taken from their number.
    pub(super) fn check_taps(&self, op: &'static str) -> Result<(), Error> {
        if self.taps == 0 {
            return Err(value_error(op, "K is 0; a convolution has at least one tap"));
        }
        Ok(())
    }

    /// Checks the length of a slice that has a row for each row of each sequence.
    pub(super) fn check_rows(&self, op: &'static str, name: &'static str, found: usize) -> Result<(), Error> {
        check_len(op, name, "[B,T,C]", found, &[self.batch, self.length, self.channels])
    }

    /// The same of a state, or of the gradient of one.
    pub(super) fn check_state(&self, op: &'static str, name: &'static str, found: usize) -> Result<(), Error> {
        check_len(op, name, "[B,K-1,C]", found, &[self.batch, self.before(), self.channels])
    }

    /// The same of a weight.
    pub(super) fn check_weight(&self, op: &'static str, found: usize) -> Result<(), Error> {
        check_len(op, "w", "[C,K]", found, &[self.channels, self.taps])
    }

    /// The sequences, which may have fewer rows.
    pub(super) fn lengths(&self) -> Lengths {
        Lengths { batch: self.batch, length: self.length }
    }

    /// How many rows sequence `b` has; the lengths were checked.
    pub(super) fn rows_of(&self, len: Option<&[i32]>, b: usize) -> usize {
        len.map_or(self.length, |len| len[b] as usize)
    }
}

/// Checks that tensors are on the host.
pub(crate) fn on_host<const N: usize>(op: &'static str, tensors: [(&str, Option<TensorRef>); N]) -> Result<(), Error> {
    tensors.into_iter().try_for_each(|(name, tensor)| tensor.map_or(Ok(()), |tensor| tensor.on_host(op, name)))
}

/// A row of channels, or some of them, where it stands.
#[derive(Clone, Copy)]
pub(super) enum Row<'a, I> {
    /// +0 throughout.
    Zero,
    /// Of a state, or of the gradient of one.
    Wide(&'a [f32]),
    /// Of a sequence.
    Own(&'a [I]),
}

/// What a chain reads at a place: two vectors, or one that may reach over the end.
pub(super) trait Channels: Copy {
    /// The `2 * LANES` elements from `at` on.
    fn two<S: Simd>(&self, s: S, at: usize) -> (S::F, S::F);
    /// The `LANES` elements from `at` on, as far as they are there.
    fn some<S: Simd>(&self, s: S, at: usize) -> S::F;
}

impl<I: Element> Channels for &[I] {
    #[inline(always)]
    fn two<S: Simd>(&self, s: S, at: usize) -> (S::F, S::F) {
        load_two(s, &self[at..][..2 * S::LANES], false)
    }
    #[inline(always)]
    fn some<S: Simd>(&self, s: S, at: usize) -> S::F {
        load_at(s, self, at, I::default())
    }
}

impl<I: Element> Channels for Row<'_, I> {
    #[inline(always)]
    fn two<S: Simd>(&self, s: S, at: usize) -> (S::F, S::F) {
        match self {
            Row::Zero => (s.splat(0.0), s.splat(0.0)),
            Row::Wide(row) => row.two(s, at),
            Row::Own(row) => row.two(s, at),
        }
    }
    #[inline(always)]
    fn some<S: Simd>(&self, s: S, at: usize) -> S::F {
        match self {
            Row::Zero => s.splat(0.0),
            Row::Wide(row) => row.some(s, at),
            Row::Own(row) => row.some(s, at),
        }
    }
}

/// `R` rows of an output that follow one another: `y[r]` is a chain over the taps, ascending from +0, of `w[j]` times
/// `rows[r + j]`; then plus `add`, where there is one; last rounding.
pub(super) struct Chains<'a, W, O, const R: usize> {
    /// One less than there are taps and rows of y.
    pub rows: &'a [W],
    /// A row for each tap.
    pub w: &'a [f32],
    pub add: Option<&'a [f32]>,
    pub y: [&'a mut [O]; R],
}

impl<W: Channels, O: Element, const R: usize> Kernel for Chains<'_, W, O, R> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Chains { rows, w, add, mut y } = self;
        let (n, two) = (y[0].len(), 2 * S::LANES);
        let whole = n - n % two;
        for at in (0..whole).step_by(two) {
            let mut sums = [(s.splat(0.0), s.splat(0.0)); R];
            for (j, w) in w.chunks_exact(n).enumerate() {
                let w = load_two(s, &w[at..][..two], false);
                for (sum, x) in sums.iter_mut().zip(&rows[j..][..R]) {
                    let x = x.two(s, at);
                    *sum = (s.fma(w.0, x.0, sum.0), s.fma(w.1, x.1, sum.1));
                }
            }
            for (sum, y) in sums.iter_mut().zip(&mut y) {
                if let Some(add) = add {
                    let add = load_two(s, &add[at..][..two], false);
                    *sum = (s.add(sum.0, add.0), s.add(sum.1, add.1));
                }
                narrow_two(s, *sum, &mut y[at..][..two], false);
            }
        }
        for at in (whole..n).step_by(S::LANES) {
            let mut sums = [s.splat(0.0); R];
            for (j, w) in w.chunks_exact(n).enumerate() {
                let w = load_at(s, w, at, 0.0);
                for (sum, x) in sums.iter_mut().zip(&rows[j..][..R]) {
                    *sum = s.fma(w, x.some(s, at), *sum);
                }
            }
            for (sum, y) in sums.iter_mut().zip(&mut y) {
                if let Some(add) = add {
                    *sum = s.add(*sum, load_at(s, add, at, 0.0));
                }
                narrow_at(s, *sum, y, at);
            }
        }
    }
}

/// Rows of a sequence behind those of its state.
#[derive(Clone, Copy)]
pub(super) struct Behind<'a, I> {
    pub state: Option<Heads<'a, f32>>,
    pub x: Heads<'a, I>,
    /// Rows of a state.
    pub before: usize,
}

impl<'a, I: Element> Behind<'a, I> {
    /// Some channels of row `row` of sequence `b`, counted from the first of the state on.
    #[inline(always)]
    pub fn row(&self, b: usize, row: usize, channels: &Range<usize>) -> Row<'a, I> {
        match (row.checked_sub(self.before), &self.state) {
            (Some(t), _) => Row::Own(&self.x.get(b, t)[channels.clone()]),
            (None, Some(state)) => Row::Wide(&state.get(b, row)[channels.clone()]),
            (None, None) => Row::Zero,
        }
    }
}

/// Some channels of a weight in f32, a row for each tap; the last tap first where `reversed`.
pub(super) fn transposed<I: Element>(w: &Rows<I>, channels: &Range<usize>, reversed: bool) -> Vec<f32> {
    let (n, taps) = (channels.len(), w.n());
    let mut rows = vec![0f32; taps * n];
    for (i, channel) in channels.clone().enumerate() {
        for (j, w) in w.row(channel).iter().enumerate() {
            rows[if reversed { taps - 1 - j } else { j } * n + i] = w.widen();
        }
    }
    rows
}

/// Channels that a task takes at a time: the rows of a few taps stay in L1.
const CHANNELS: usize = 256;
/// Rows of a sequence that a task takes at a time.
const ROWS: usize = 64;
/// Terms of sums that are worth a task.
const TERMS: usize = 1 << 15;

/// Deals `rows` rows of each sequence in pieces and blocks of channels: `begin(channels)` makes what the pieces of a block
/// have in common, and `work` takes that, the channels, a sequence and some of its rows. The first piece of a sequence is there
/// also where it has no rows.
pub(super) fn deal<B>(
    cpu: &Cpu,
    shape: &CausalConv1d,
    rows: usize,
    begin: impl Fn(&Range<usize>) -> B + Sync,
    work: impl Fn(&B, &Range<usize>, usize, Range<usize>) + Sync,
) {
    let CausalConv1d { batch, channels, taps, .. } = *shape;
    let (blocks, pieces) = (channels.div_ceil(CHANNELS), rows.div_ceil(ROWS).max(1));
    let units = batch.saturating_mul(pieces);
    // Without a row and a state there is nothing, of however many sequences.
    if blocks == 0 || units == 0 || rows + shape.before() == 0 {
        return;
    }
    // What a block has in common is made once for each group of units.
    let groups = (4 * cpu.threads()).div_ceil(blocks).clamp(1, units);
    let items = blocks * groups;
    let terms = [batch, rows, channels, taps].into_iter().fold(1usize, usize::saturating_mul);
    let tasks = (terms / TERMS).clamp(1, items);
    cpu.each(tasks, |task| {
        for item in task * items / tasks..(task + 1) * items / tasks {
            let (group, block) = (item / blocks, item % blocks);
            let own = block * CHANNELS..channels.min((block + 1) * CHANNELS);
            let begun = begin(&own);
            for unit in group * units / groups..(group + 1) * units / groups {
                let (b, from) = (unit / pieces, unit % pieces * ROWS);
                work(&begun, &own, b, from..rows.min(from + ROWS));
            }
        }
    });
}
