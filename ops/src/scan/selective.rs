//! What the scan of Mamba and its gradient share: what a call reads, and a step of the states of some channels.
//!
//! Channels meet nowhere in a state, so they are taken in blocks, and vectors run over the channels of one. A block's state is
//! turned to `[N,CHANNELS]` when it begins and back when it ends; channels that a block lacks are there, as +0.

use crate::call::Arguments as CallArguments;
use crate::element::typed;
use crate::lengths::Lengths;
use crate::math::{exp, softplus_by};
use crate::profile::IEEE;
use crate::simd::{Kernel, MAX_LANES, Simd, load_at, load_two, narrow_at};
use crate::through_f32::{convert, widen};
use crate::{Cpu, Element, Error, TensorRef, check_len};
use std::ops::Range;

/// Channels of a block.
pub(super) const CHANNELS: usize = IEEE.channels;

/// Dimensions of a scan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SelectiveScan {
    /// Sequences B.
    pub batch: usize,
    /// Positions of each, T.
    pub length: usize,
    /// Channels C.
    pub channels: usize,
    /// Elements of the state of a channel, N.
    pub state_dim: usize,
}

/// What a scan reads.
#[derive(Clone, Copy, Debug)]
pub struct SelectiveInputs<'a, I> {
    /// `x[B,T,C]`.
    pub x: &'a [I],
    /// `dt[B,T,C]`: the steps in time before bias and softplus.
    pub dt: &'a [I],
    /// `a_log[C,N]`: an element of a state decays by `exp(-exp(a_log) * step)`.
    pub a_log: &'a [I],
    /// `b[B,T,N]`: how x enters the states.
    pub b: &'a [I],
    /// `c[B,T,N]`: how the states are read.
    pub c: &'a [I],
    /// `d[C]`: the share of x that passes the state by.
    pub d: Option<&'a [I]>,
    /// `dt_bias[C]`.
    pub dt_bias: Option<&'a [I]>,
    /// `state[B,C,N]` before the first position; +0 where there is none.
    pub state: Option<&'a [f32]>,
    /// Positions of each sequence; those behind are padding. All have T where it is left out.
    pub len: Option<&'a [i32]>,
}

impl SelectiveScan {
    /// Those of a call by name.
    pub(super) fn of(call: &samebits_schema::Call) -> SelectiveScan {
        let [batch, length, channels, state_dim] = ["B", "T", "C", "N"].map(|axis| call.dim(axis));
        SelectiveScan { batch, length, channels, state_dim }
    }

    /// Extents of x and dt, of b and c, of a_log, and of states.
    pub(super) fn extents(&self) -> ([usize; 3], [usize; 3], [usize; 2], [usize; 3]) {
        let SelectiveScan { batch, length, channels, state_dim } = *self;
        let (x, b) = ([batch, length, channels], [batch, length, state_dim]);
        (x, b, [channels, state_dim], [batch, channels, state_dim])
    }

    /// Checks a call but for the lengths of sequences: how many elements there are of the inputs, whatever they lie in.
    pub(super) fn check_inputs(
        &self,
        op: &'static str,
        [x, dt, a_log, b, c]: [usize; 5],
        [d, dt_bias, state]: [Option<usize>; 3],
    ) -> Result<(), Error> {
        let (of_x, of_b, of_a, of_state) = self.extents();
        check_len(op, "x", "[B,T,C]", x, &of_x)?;
        check_len(op, "dt", "[B,T,C]", dt, &of_x)?;
        check_len(op, "a_log", "[C,N]", a_log, &of_a)?;
        check_len(op, "b", "[B,T,N]", b, &of_b)?;
        check_len(op, "c", "[B,T,N]", c, &of_b)?;
        d.map_or(Ok(()), |d| check_len(op, "d", "[C]", d, &[self.channels]))?;
        dt_bias.map_or(Ok(()), |bias| check_len(op, "dt_bias", "[C]", bias, &[self.channels]))?;
        state.map_or(Ok(()), |state| check_len(op, "state", "[B,C,N]", state, &of_state))
    }

    /// The sequences, which may have fewer positions.
    pub(super) fn lengths(&self) -> Lengths {
        Lengths { batch: self.batch, length: self.length }
    }

    /// Blocks of channels of a sequence.
    pub(super) fn blocks(&self) -> usize {
        self.channels.div_ceil(CHANNELS)
    }

    /// The channels of a block.
    pub(super) fn block(&self, block: usize) -> Range<usize> {
        block * CHANNELS..self.channels.min((block + 1) * CHANNELS)
    }

    /// Elements of the state of a block.
    pub(super) fn of_state(&self) -> usize {
        CHANNELS * self.state_dim
    }

    /// Whether there is nothing to read and to make, of however many sequences.
    pub(super) fn is_empty(&self) -> bool {
        self.batch == 0 || self.channels == 0 || self.length == 0 && self.state_dim == 0
    }
}

/// The inputs of any layout.
#[derive(Clone, Copy)]
pub(super) struct Tensors<'a> {
    pub x: TensorRef<'a>,
    pub dt: TensorRef<'a>,
    pub a_log: TensorRef<'a>,
    pub b: TensorRef<'a>,
    pub c: TensorRef<'a>,
    pub d: Option<TensorRef<'a>>,
    pub dt_bias: Option<TensorRef<'a>>,
    pub state: Option<TensorRef<'a>>,
    pub len: Option<&'a [i32]>,
}

impl<'a> Tensors<'a> {
    /// Slices, once they were checked.
    pub fn of<I: Element>(
        op: &'static str,
        shape: &SelectiveScan,
        inputs: &SelectiveInputs<'a, I>,
    ) -> Result<Self, Error> {
        let SelectiveInputs { x, dt, a_log, b, c, d, dt_bias, state, len } = *inputs;
        let lens = [x, dt, a_log, b, c].map(<[I]>::len);
        shape.check_inputs(op, lens, [d.map(<[I]>::len), dt_bias.map(<[I]>::len), state.map(<[f32]>::len)])?;
        let (of_x, of_b, of_a, of_state) = shape.extents();
        let of_channels = |x: &'a [I]| TensorRef::of(x, &[shape.channels]);
        Ok(Tensors {
            x: TensorRef::of(x, &of_x),
            dt: TensorRef::of(dt, &of_x),
            a_log: TensorRef::of(a_log, &of_a),
            b: TensorRef::of(b, &of_b),
            c: TensorRef::of(c, &of_b),
            d: d.map(of_channels),
            dt_bias: dt_bias.map(of_channels),
            state: state.map(|state| TensorRef::of(state, &of_state)),
            len,
        })
    }

    /// Those of a call by name.
    pub fn of_call(args: &CallArguments<'_, 'a>) -> Result<Self, Error> {
        let [x, dt, a_log, b, c] = ["x", "dt", "a_log", "b", "c"].map(|name| args.input(name));
        let [d, dt_bias, state] = ["d", "dt_bias", "state"].map(|name| args.optional(name));
        Ok(Tensors { x, dt, a_log, b, c, d, dt_bias, state, len: Lengths::of_call(args)? })
    }
}

/// A scan whose call was checked.
pub(super) struct Scan<'a> {
    pub cpu: &'a Cpu,
    pub shape: &'a SelectiveScan,
    pub inputs: Tensors<'a>,
}

impl<'a> Scan<'a> {
    /// # Errors
    /// [`Error::Value`] for a tensor that is not on the host, and for lengths beyond T.
    pub fn new(
        cpu: &'a Cpu,
        op: &'static str,
        shape: &'a SelectiveScan,
        inputs: Tensors<'a>,
    ) -> Result<Scan<'a>, Error> {
        let Tensors { x, dt, a_log, b, c, d, dt_bias, state, len } = inputs;
        for (name, tensor) in [("x", x), ("dt", dt), ("a_log", a_log), ("b", b), ("c", c)] {
            tensor.on_host(op, name)?;
        }
        for (name, tensor) in [("d", d), ("dt_bias", dt_bias), ("state", state)] {
            tensor.map_or(Ok(()), |tensor| tensor.on_host(op, name))?;
        }
        shape.lengths().check(op, len)?;
        Ok(Scan { cpu, shape, inputs })
    }

    /// How many positions sequence `b` has.
    pub fn end(&self, b: usize) -> usize {
        self.inputs.len.map_or(self.shape.length, |len| len[b] as usize)
    }

    /// What a block of channels has of its own, whatever the sequence.
    pub fn channels(&self, channels: Range<usize>) -> Channels {
        let (n, count) = (self.shape.state_dim, channels.len());
        let (mut rows, mut a) = (vec![0f32; n * CHANNELS], vec![0f32; n * CHANNELS]);
        for (row, channel) in rows.chunks_mut(n.max(1)).zip(channels.clone()) {
            widen(self.cpu, &self.inputs.a_log, channel, 0, row);
        }
        self.cpu.dispatch(Rates(&mut rows[..n * count]));
        self.cpu.dispatch(Turn { from: &rows, rows: CHANNELS, columns: n, to: &mut a });
        let vector = |x: TensorRef| {
            let mut own = [0f32; CHANNELS];
            widen(self.cpu, &x, 0, channels.start, &mut own[..count]);
            own
        };
        Channels { d: self.inputs.d.map(vector), bias: self.inputs.dt_bias.map(vector), a, channels }
    }

    /// The channels' elements of x, or of what has its form, at a position; +0 behind them.
    pub fn row(&self, x: &TensorRef, b: usize, t: usize, channels: &Range<usize>, to: &mut [f32; CHANNELS]) {
        let to = &mut to[..channels.len()];
        typed!(x.dtype() => I, convert(self.cpu, &x.heads::<I>().get(b, t)[channels.clone()], to));
    }

    /// b or c at a position.
    pub fn shared(&self, x: &TensorRef, b: usize, t: usize, to: &mut [f32]) {
        typed!(x.dtype() => I, convert(self.cpu, x.heads::<I>().get(b, t), to));
    }

    /// The steps of a block at a position.
    pub fn steps(&self, of: &Channels, b: usize, t: usize, steps: &mut Steps) {
        self.row(&self.inputs.dt, b, t, &of.channels, &mut steps.v);
        self.row(&self.inputs.x, b, t, &of.channels, &mut steps.x);
        self.cpu.dispatch(MakeSteps { bias: of.bias.as_ref(), steps });
    }

    /// The states of a block before the first position, or of what has their form, `[N,CHANNELS]`; +0 where there are none. `rows`
    /// has room for them as they are stored.
    pub fn begin(&self, state: Option<TensorRef>, b: usize, of: &Channels, rows: &mut [f32], to: &mut [f32]) {
        let Some(state) = state else { return to.fill(0.0) };
        let (n, all) = (self.shape.state_dim, state.rows::<f32>());
        rows.fill(0.0);
        for (row, channel) in rows.chunks_mut(n.max(1)).zip(of.channels.clone()) {
            row.copy_from_slice(all.row(b * self.shape.channels + channel));
        }
        self.cpu.dispatch(Turn { from: rows, rows: CHANNELS, columns: n, to });
    }

    /// The other way, last rounding.
    pub fn end_with(&self, state: &[f32], rows: &mut [f32], to: &mut [f32]) {
        let n = self.shape.state_dim;
        self.cpu.dispatch(Turn { from: state, rows: n, columns: CHANNELS, to: rows });
        convert(self.cpu, &rows[..to.len()], to);
    }
}

/// What a block of channels has of its own.
pub(super) struct Channels {
    /// Which they are.
    pub channels: Range<usize>,
    /// `A[N,CHANNELS]`.
    pub a: Vec<f32>,
    pub d: Option<[f32; CHANNELS]>,
    bias: Option<[f32; CHANNELS]>,
}

/// A position of a block of channels: x, and the steps in time.
pub(super) struct Steps {
    pub x: [f32; CHANNELS],
    /// Before the softplus.
    pub v: [f32; CHANNELS],
    /// How long they are.
    pub e: [f32; CHANNELS],
    /// `e * x`
    pub u: [f32; CHANNELS],
}

impl Steps {
    pub fn new() -> Steps {
        let none = [0f32; CHANNELS];
        Steps { x: none, v: none, e: none, u: none }
    }
}

/// `v = dt + bias`, `e = softplus(v)`, `u = e * x`; dt stands in v.
struct MakeSteps<'a> {
    bias: Option<&'a [f32; CHANNELS]>,
    steps: &'a mut Steps,
}

impl Kernel for MakeSteps<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Steps { x, v, e, u } = self.steps;
        for at in (0..CHANNELS).step_by(S::LANES) {
            let mut own = load_at(s, &v[..], at, 0.0);
            if let Some(bias) = self.bias {
                own = s.add(own, load_at(s, &bias[..], at, 0.0));
                narrow_at(s, own, &mut v[..], at);
            }
            narrow_at(s, exp(s, s.neg(s.abs(own))), &mut e[..], at);
        }
        for (e, v) in e.iter_mut().zip(v) {
            *e = softplus_by(*v, *e);
        }
        for at in (0..CHANNELS).step_by(S::LANES) {
            narrow_at(s, s.mul(load_at(s, &e[..], at, 0.0), load_at(s, &x[..], at, 0.0)), &mut u[..], at);
        }
    }
}

/// `-e^a_log`, in place.
struct Rates<'a>(&'a mut [f32]);

impl Kernel for Rates<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for at in (0..self.0.len()).step_by(S::LANES) {
            narrow_at(s, s.neg(exp(s, load_at(s, self.0, at, 0.0))), self.0, at);
        }
    }
}

/// The transpose of `from[rows,columns]`; rows or columns are a multiple of every vector.
struct Turn<'a> {
    from: &'a [f32],
    rows: usize,
    columns: usize,
    to: &'a mut [f32],
}

impl Kernel for Turn<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        turn(s, self.from, [self.rows, self.columns], self.columns, self.to);
    }
}

/// The transpose of `rows` rows of `columns` elements, of which one begins every `stride` elements.
#[inline(always)]
pub(super) fn turn<S: Simd>(s: S, from: &[f32], [rows, columns]: [usize; 2], stride: usize, to: &mut [f32]) {
    assert!(
        rows == 0 || columns <= stride && from.len() >= (rows - 1) * stride + columns && to.len() >= rows * columns
    );
    let whole = columns - columns % S::LANES;
    for first in (0..rows).step_by(S::LANES) {
        let count = S::LANES.min(rows - first);
        // Where fewer rows are left, the last is there for those that are not looked at.
        let starts: [*const u32; MAX_LANES] =
            std::array::from_fn(|i| from[(first + i.min(count - 1)) * stride..].as_ptr().cast());
        for at in (0..whole).step_by(S::LANES) {
            let to = &mut to[at * rows + first..];
            assert!(to.len() >= (S::LANES - 1) * rows + count);
            // SAFETY: each row has the S::LANES words from `at` on, which is below `whole`, and `to` room for the columns.
            unsafe { s.transpose::<false>(&starts, at, count, to.as_mut_ptr().cast(), rows) };
        }
        for row in first..first + count {
            for column in whole..columns {
                to[column * rows + row] = from[row * stride + column];
            }
        }
    }
}

/// Two vectors of channels.
pub(super) type Two<S> = (<S as Simd>::F, <S as Simd>::F);

/// Two vectors of a row of channels.
#[inline(always)]
pub(super) fn two<S: Simd>(s: S, row: &[f32], at: usize) -> Two<S> {
    load_two(s, &row[at..][..2 * S::LANES], false)
}

/// What is left of an element of a state: `exp(e * a)`.
#[inline(always)]
pub(super) fn left<S: Simd>(s: S, e: Two<S>, a: Two<S>) -> Two<S> {
    (exp(s, s.mul(e.0, a.0)), exp(s, s.mul(e.1, a.1)))
}

/// An element of a state behind a step: `fma(exp(e * a), before, u * b)`.
#[inline(always)]
pub(super) fn advance<S: Simd>(s: S, [e, u, a]: [Two<S>; 3], b: f32, before: Two<S>) -> Two<S> {
    let (k, b) = (left(s, e, a), s.splat(b));
    (s.fma(k.0, before.0, s.mul(u.0, b)), s.fma(k.1, before.1, s.mul(u.1, b)))
}
