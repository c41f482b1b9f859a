//! What the scan of Mamba-2 and its gradient share: what a call reads, its steps in time, and a step of a head's state.
//!
//! A state is `[P,N]`, as it is stored, and vectors run over N: so a decode reads and writes it once, without turning it. Rows
//! of x, b and c are widened as they are met, so that there is one kernel for all types.

use crate::call::Arguments as CallArguments;
use crate::element::typed;
use crate::lengths::Lengths;
use crate::math::{exp, sigmoid, softplus};
use crate::reduce::Lanes;
use crate::simd::scalar::Scalar;
use crate::simd::{Kernel, Simd, load_at, load_two, narrow_at, narrow_two};
use crate::through_f32::{convert, f32_row};
use crate::{Cpu, Element, Error, TensorRef, check_len, value_error};
use std::ops::Range;

/// Dimensions and parameters of a scan.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SsdScan {
    /// Sequences B.
    pub batch: usize,
    /// Positions of each, T.
    pub length: usize,
    /// Heads H.
    pub heads: usize,
    /// Elements of a head, P.
    pub head_dim: usize,
    /// Groups of heads that share b and c, G; H is a multiple of it.
    pub groups: usize,
    /// Elements of a state for each element of a head, N.
    pub state_dim: usize,
    /// Steps are no shorter.
    pub dt_min: f64,
    /// Steps are no longer; 0 for no limit.
    pub dt_max: f64,
}

/// What a scan reads.
#[derive(Clone, Copy, Debug)]
pub struct ScanInputs<'a, I> {
    /// `x[B,T,H,P]`.
    pub x: &'a [I],
    /// `dt[B,T,H]`: the steps in time before bias and softplus.
    pub dt: &'a [I],
    /// `a_log[H]`: a state decays by `exp(-exp(a_log) * step)`.
    pub a_log: &'a [I],
    /// `b[B,T,G,N]`: how x enters the state.
    pub b: &'a [I],
    /// `c[B,T,G,N]`: how the state is read.
    pub c: &'a [I],
    /// `d[H]`: the share of x that passes the state by.
    pub d: Option<&'a [I]>,
    /// `dt_bias[H]`.
    pub dt_bias: Option<&'a [I]>,
    /// `state[B,H,P,N]` before the first position; +0 where there is none.
    pub state: Option<&'a [f32]>,
    /// Positions of each sequence; those behind are padding. All have T where it is left out.
    pub len: Option<&'a [i32]>,
}

impl SsdScan {
    /// Those of a call by name.
    pub(super) fn of(call: &samebits_schema::Call) -> SsdScan {
        let [batch, length, heads, head_dim, groups, state_dim] =
            ["B", "T", "H", "P", "G", "N"].map(|axis| call.dim(axis));
        let [dt_min, dt_max] = ["dt_min", "dt_max"].map(|name| call.float(name));
        SsdScan { batch, length, heads, head_dim, groups, state_dim, dt_min, dt_max }
    }

    /// Refuses what no call by name has.
    pub(super) fn check(&self, op: &'static str) -> Result<(), Error> {
        let SsdScan { heads, groups, dt_min, dt_max, .. } = *self;
        if groups == 0 || !heads.is_multiple_of(groups) {
            return Err(value_error(op, format!("H = {heads} must be a multiple of G = {groups}")));
        }
        let is_limit = |limit: f64| (0.0..=1e38).contains(&limit);
        if !is_limit(dt_min) || !is_limit(dt_max) || dt_max != 0.0 && dt_max < dt_min {
            return Err(value_error(op, format!("steps from {dt_min} to {dt_max}; limits are 0 to 1e38 and ascend")));
        }
        Ok(())
    }

    /// Extents of x, of dt, of b and c, and of a state.
    pub(super) fn extents(&self) -> ([usize; 4], [usize; 3], [usize; 4], [usize; 4]) {
        let SsdScan { batch, length, heads, head_dim, groups, state_dim, .. } = *self;
        let (x, dt) = ([batch, length, heads, head_dim], [batch, length, heads]);
        (x, dt, [batch, length, groups, state_dim], [batch, heads, head_dim, state_dim])
    }

    /// Checks a call but for the lengths of sequences: how many elements there are of the inputs, whatever they lie in.
    pub(super) fn check_inputs(
        &self,
        op: &'static str,
        [x, dt, a_log, b, c]: [usize; 5],
        [d, dt_bias, state]: [Option<usize>; 3],
    ) -> Result<(), Error> {
        self.check(op)?;
        let (of_x, of_dt, of_b, of_state) = self.extents();
        check_len(op, "x", "[B,T,H,P]", x, &of_x)?;
        check_len(op, "dt", "[B,T,H]", dt, &of_dt)?;
        check_len(op, "a_log", "[H]", a_log, &[self.heads])?;
        check_len(op, "b", "[B,T,G,N]", b, &of_b)?;
        check_len(op, "c", "[B,T,G,N]", c, &of_b)?;
        d.map_or(Ok(()), |d| check_len(op, "d", "[H]", d, &[self.heads]))?;
        dt_bias.map_or(Ok(()), |bias| check_len(op, "dt_bias", "[H]", bias, &[self.heads]))?;
        state.map_or(Ok(()), |state| check_len(op, "state", "[B,H,P,N]", state, &of_state))
    }

    /// The sequences, which may have fewer positions.
    pub(super) fn lengths(&self) -> Lengths {
        Lengths { batch: self.batch, length: self.length }
    }

    /// Heads of all sequences, counted one sequence after the other.
    pub(super) fn units(&self) -> usize {
        self.batch.saturating_mul(self.heads)
    }

    /// Whether there is nothing to read and to make, of however many sequences.
    pub(super) fn is_empty(&self) -> bool {
        self.units() == 0 || self.length == 0 && (self.head_dim == 0 || self.state_dim == 0)
    }

    /// Elements of a head's state.
    pub(super) fn of_state(&self) -> usize {
        self.head_dim * self.state_dim
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
    pub fn of<I: Element>(op: &'static str, shape: &SsdScan, inputs: &ScanInputs<'a, I>) -> Result<Self, Error> {
        let ScanInputs { x, dt, a_log, b, c, d, dt_bias, state, len } = *inputs;
        let lens = [x, dt, a_log, b, c].map(<[I]>::len);
        shape.check_inputs(op, lens, [d.map(<[I]>::len), dt_bias.map(<[I]>::len), state.map(<[f32]>::len)])?;
        let (of_x, of_dt, of_b, of_state) = shape.extents();
        let of_heads = |x: &'a [I]| TensorRef::of(x, &[shape.heads]);
        Ok(Tensors {
            x: TensorRef::of(x, &of_x),
            dt: TensorRef::of(dt, &of_dt),
            a_log: of_heads(a_log),
            b: TensorRef::of(b, &of_b),
            c: TensorRef::of(c, &of_b),
            d: d.map(of_heads),
            dt_bias: dt_bias.map(of_heads),
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

/// A step in time.
#[derive(Clone, Copy, Default)]
pub(super) struct Step {
    /// How long it is.
    pub e: f32,
    /// What is left of the state.
    pub k: f32,
    /// The derivative of e by dt; `None` where a limit took its place.
    pub slope: Option<f32>,
}

/// A scan whose call was checked.
pub(super) struct Scan<'a> {
    pub cpu: &'a Cpu,
    pub shape: &'a SsdScan,
    pub inputs: Tensors<'a>,
    /// A of each head.
    pub a: Vec<f32>,
    d: Option<Vec<f32>>,
    bias: Option<Vec<f32>>,
}

impl<'a> Scan<'a> {
    /// # Errors
    /// [`Error::Value`] for a tensor that is not on the host, and for lengths beyond T.
    pub fn new(cpu: &'a Cpu, op: &'static str, shape: &'a SsdScan, inputs: Tensors<'a>) -> Result<Scan<'a>, Error> {
        let Tensors { x, dt, a_log, b, c, d, dt_bias, state, len } = inputs;
        for (name, tensor) in [("x", x), ("dt", dt), ("a_log", a_log), ("b", b), ("c", c)] {
            tensor.on_host(op, name)?;
        }
        for (name, tensor) in [("d", d), ("dt_bias", dt_bias), ("state", state)] {
            tensor.map_or(Ok(()), |tensor| tensor.on_host(op, name))?;
        }
        shape.lengths().check(op, len)?;
        let of_heads = |x: TensorRef| f32_row(cpu, &x, 0);
        let a = of_heads(a_log).into_iter().map(|a_log| -exp(Scalar, a_log)).collect();
        Ok(Scan { cpu, shape, inputs, a, d: d.map(of_heads), bias: dt_bias.map(of_heads) })
    }

    /// How many positions sequence `b` has.
    pub fn end(&self, b: usize) -> usize {
        self.inputs.len.map_or(self.shape.length, |len| len[b] as usize)
    }

    /// Sequence and head of a unit.
    pub fn place(&self, unit: usize) -> (usize, usize) {
        (unit / self.shape.heads, unit % self.shape.heads)
    }

    /// The group that a head reads.
    pub fn group(&self, h: usize) -> usize {
        h / (self.shape.heads / self.shape.groups)
    }

    /// The share of x that passes the state of a head by.
    pub fn d(&self, h: usize) -> Option<f32> {
        self.d.as_ref().map(|d| d[h])
    }

    /// The step of a head at a position.
    pub fn step(&self, b: usize, t: usize, h: usize) -> Step {
        let SsdScan { length, dt_min, dt_max, .. } = *self.shape;
        let dt = typed!(self.inputs.dt.dtype() => I, self.inputs.dt.rows::<I>().row(b * length + t)[h].widen());
        let v = self.bias.as_ref().map_or(dt, |bias| dt + bias[h]);
        let (e, [min, max]) = (softplus(v), [dt_min, dt_max].map(|limit| limit as f32));
        let limit = if e < min { Some(min) } else { Some(max).filter(|max| dt_max != 0.0 && e > *max) };
        let slope = if limit.is_none() { Some(sigmoid(Scalar, v)) } else { None };
        let e = limit.unwrap_or(e);
        Step { e, k: exp(Scalar, e * self.a[h]), slope }
    }

    /// Elements of a head of x, or of what has its form, at a position.
    pub fn row(&self, x: &TensorRef, b: usize, t: usize, head: usize, elements: Range<usize>, to: &mut [f32]) {
        let row = b * self.shape.length + t;
        typed!(x.dtype() => I, convert(self.cpu, &x.heads::<I>().get(row, head)[elements], to));
    }

    /// Elements of a head's state before the first position, or of what has its form; +0 where there is none.
    pub fn begin(&self, state: Option<TensorRef>, b: usize, h: usize, elements: Range<usize>, to: &mut [f32]) {
        let Some(state) = state else { return to.fill(0.0) };
        let (rows, n) = (state.rows::<f32>(), self.shape.state_dim);
        for (p, to) in elements.zip(to.chunks_mut(n.max(1))) {
            convert(self.cpu, rows.row((b * self.shape.heads + h) * self.shape.head_dim + p), to);
        }
    }
}

/// Takes a row of a state over a step: `s = fma(k, s, u * b)`.
#[inline(always)]
pub(super) fn advance<S: Simd>(s: S, k: f32, u: f32, b: &[f32], row: &mut [f32]) {
    let (k, u, two) = (s.splat(k), s.splat(u), 2 * S::LANES);
    let whole = row.len() - row.len() % two;
    for at in (0..whole).step_by(two) {
        let (b, row) = (load_two(s, &b[at..][..two], false), &mut row[at..][..two]);
        let before = load_two(s, row, false);
        narrow_two(s, (s.fma(k, before.0, s.mul(u, b.0)), s.fma(k, before.1, s.mul(u, b.1))), row, false);
    }
    for at in (whole..row.len()).step_by(S::LANES) {
        let after = s.fma(k, load_at(s, row, at, 0.0), s.mul(u, load_at(s, b, at, 0.0)));
        narrow_at(s, after, row, at);
    }
}

/// The `lanes` sum of products.
#[inline(always)]
pub(super) fn lanes_of<S: Simd>(s: S, a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = Lanes::new();
    lanes.add_products(s, a, b);
    lanes.fold(s, a.len())
}

/// Some rows of a head's state over one step.
pub(super) struct Advance<'a> {
    pub step: Step,
    /// An element for each row.
    pub x: &'a [f32],
    pub b: &'a [f32],
    /// The rows, one behind the other.
    pub state: &'a mut [f32],
}

impl Kernel for Advance<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (n, Step { e, k, .. }) = (self.b.len(), self.step);
        for (p, x) in self.x.iter().enumerate() {
            advance(s, k, e * x, self.b, &mut self.state[p * n..][..n]);
        }
    }
}
