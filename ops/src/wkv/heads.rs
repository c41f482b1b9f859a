//! What the recurrence of RWKV-7 and its gradient share: their dimensions, what they read, and the tokens of a head in f32, by
//! which one kernel serves all dtypes.

use crate::call::Arguments;
use crate::columns::{Exponentials, GROUP, Two, all, fma, join, mul, padded, put, two};
use crate::conv::taps::on_host;
use crate::lengths::Lengths;
use crate::profile::IEEE;
use crate::simd::Simd;
use crate::tensor::Heads;
use crate::through_f32::convert;
use crate::{Cpu, Element, Error, TensorRef, check_len};
use samebits_schema::Call;
use std::ops::Range;

/// Dimensions of a recurrence of RWKV-7.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wkv7 {
    /// Sequences B.
    pub batch: usize,
    /// Tokens of each, T.
    pub length: usize,
    /// Heads H.
    pub heads: usize,
    /// Elements of a head, D.
    pub head_dim: usize,
}

impl Wkv7 {
    /// Those of a call by name.
    pub(super) fn of(call: &Call) -> Wkv7 {
        let [batch, length, heads, head_dim] = ["B", "T", "H", "D"].map(|axis| call.dim(axis));
        Wkv7 { batch, length, heads, head_dim }
    }

    pub(super) fn of_tokens(&self) -> [usize; 4] {
        [self.batch, self.length, self.heads, self.head_dim]
    }

    pub(super) fn of_state(&self) -> [usize; 4] {
        [self.batch, self.heads, self.head_dim, self.head_dim]
    }

    /// Checks how many elements tensors `[B,T,H,D]` have, then some of `[B,H,D,D]`.
    pub(super) fn check<const N: usize, const M: usize>(
        &self,
        op: &'static str,
        tokens: [(&'static str, usize); N],
        states: [(&'static str, Option<usize>); M],
    ) -> Result<(), Error> {
        for (name, found) in tokens {
            check_len(op, name, "[B,T,H,D]", found, &self.of_tokens())?;
        }
        for (name, found) in states {
            found.map_or(Ok(()), |found| check_len(op, name, "[B,H,D,D]", found, &self.of_state()))?;
        }
        Ok(())
    }

    /// Its sequences, which may have fewer tokens.
    pub(super) fn lengths(&self) -> Lengths {
        Lengths { batch: self.batch, length: self.length }
    }

    /// Heads of all sequences; none where they have no elements.
    pub(super) fn units(&self) -> usize {
        if self.head_dim == 0 { 0 } else { self.batch.saturating_mul(self.heads) }
    }
}

/// What a recurrence of RWKV-7 reads, slices.
#[derive(Clone, Copy, Debug)]
pub struct Wkv7Inputs<'a, I> {
    /// `r[B,T,H,D]`, by which the state is read.
    pub r: &'a [I],
    /// `w[B,T,H,D]`, the logarithm of what is left of each row of the state.
    pub w: &'a [I],
    /// `k[B,T,H,D]`, along which v is added.
    pub k: &'a [I],
    /// `v[B,T,H,D]`.
    pub v: &'a [I],
    /// `a[B,T,H,D]`, by which the state is read before it decays.
    pub a: &'a [I],
    /// `b[B,T,H,D]`, along which what a reads is added.
    pub b: &'a [I],
    /// `state[B,H,D,D]`, before the first token; +0 where there is none.
    pub state: Option<&'a [f32]>,
    /// Tokens of each sequence; rows behind are padding. All have T where it is left out.
    pub len: Option<&'a [i32]>,
}

/// The names of what has tokens.
pub(super) const TOKENS: [&str; 6] = ["r", "w", "k", "v", "a", "b"];

/// The inputs of any layout that the op and its gradient read.
#[derive(Clone, Copy)]
pub(super) struct Tensors<'a> {
    /// As [`TOKENS`].
    pub tokens: [TensorRef<'a>; 6],
    pub state: Option<TensorRef<'a>>,
    pub len: Option<&'a [i32]>,
}

impl<'a> Tensors<'a> {
    /// Those of slices, whose lengths are checked.
    pub fn of<I: Element>(op: &'static str, shape: &Wkv7, inputs: &Wkv7Inputs<'a, I>) -> Result<Self, Error> {
        let Wkv7Inputs { r, w, k, v, a, b, state, len } = *inputs;
        let (tokens, mut names) = ([r, w, k, v, a, b], TOKENS.iter());
        let lens = tokens.map(|x| (*names.next().expect("as many names"), x.len()));
        shape.check(op, lens, [("state", state.map(<[f32]>::len))])?;
        let tokens = tokens.map(|x| TensorRef::of(x, &shape.of_tokens()));
        Ok(Tensors { tokens, state: state.map(|state| TensorRef::of(state, &shape.of_state())), len })
    }

    /// Those of a call by name.
    pub fn of_call(args: &Arguments<'_, 'a>) -> Result<Self, Error> {
        let tokens = TOKENS.map(|name| args.input(name));
        Ok(Tensors { tokens, state: args.optional("state"), len: Lengths::of_call(args)? })
    }

    /// What they have to be on the host.
    pub fn check_host(&self, op: &'static str, shape: &Wkv7) -> Result<(), Error> {
        let mut names = TOKENS.iter();
        on_host(op, self.tokens.map(|x| (*names.next().expect("as many names"), Some(x))))?;
        on_host(op, [("state", self.state)])?;
        shape.lengths().check(op, self.len)
    }
}

/// The same, whose types are known.
pub(super) struct Inputs<'a, I> {
    pub cpu: &'a Cpu,
    pub shape: &'a Wkv7,
    tokens: [Heads<'a, I>; 6],
    pub state: Option<Heads<'a, f32>>,
    len: Option<&'a [i32]>,
}

impl<'a, I: Element> Inputs<'a, I> {
    pub fn new(cpu: &'a Cpu, shape: &'a Wkv7, tensors: &Tensors<'a>) -> Inputs<'a, I> {
        let tokens = tensors.tokens.map(|x| x.heads());
        Inputs { cpu, shape, tokens, state: tensors.state.map(|state| state.heads()), len: tensors.len }
    }

    /// How many tokens sequence `b` has.
    pub fn tokens_of(&self, b: usize) -> usize {
        self.len.map_or(self.shape.length, |len| len[b] as usize)
    }

    /// Some tokens of a head, from the first row of `to` on.
    pub fn read(&self, [b, h]: [usize; 2], tokens: Range<usize>, to: &mut Tokens) {
        let (first, count, width) = (b * self.shape.length + tokens.start, tokens.len(), padded(self.shape.head_dim));
        for (from, to) in self.tokens.iter().zip(to.each()) {
            widen(self.cpu, from, [first, h], count, to);
        }
        to.left[..count * width].copy_from_slice(&to.w[..count * width]);
        self.cpu.dispatch(Exponentials(&mut to.left[..count * width]));
    }
}

/// `count` rows of a head in f32, a row of [`padded`] columns each.
pub(super) fn widen<I: Element>(cpu: &Cpu, from: &Heads<I>, [first, h]: [usize; 2], count: usize, to: &mut [f32]) {
    for i in 0..count {
        let row = from.get(first + i, h);
        convert(cpu, row, &mut to[i * padded(row.len())..][..row.len()]);
    }
}

/// Tokens of a head in f32, a row of [`padded`] columns each.
pub(super) struct Tokens {
    pub r: Vec<f32>,
    w: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub a: Vec<f32>,
    pub b: Vec<f32>,
    /// `e^w`
    pub left: Vec<f32>,
}

impl Tokens {
    /// Room for some tokens; what fills groups is +0.
    pub fn room(count: usize, head_dim: usize) -> Tokens {
        let all = || vec![0f32; count * padded(head_dim)];
        Tokens { r: all(), w: all(), k: all(), v: all(), a: all(), b: all(), left: all() }
    }

    /// As [`TOKENS`].
    fn each(&mut self) -> [&mut [f32]; 6] {
        [&mut self.r, &mut self.w, &mut self.k, &mut self.v, &mut self.a, &mut self.b]
    }
}

/// What every row of a column takes part in, a row of D to each; places beside them are not read.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    pub r: &'a [f32],
    pub left: &'a [f32],
    pub k: &'a [f32],
    pub a: &'a [f32],
    pub b: &'a [f32],
}

impl Tokens {
    /// Row `t`, as sums over `n` rows of a state read it.
    #[inline(always)]
    pub fn rows(&self, t: usize, n: usize) -> Rows<'_> {
        let at = t * padded(n);
        Rows {
            r: &self.r[at..][..n],
            left: &self.left[at..][..n],
            k: &self.k[at..][..n],
            a: &self.a[at..][..n],
            b: &self.b[at..][..n],
        }
    }
}

/// What a reads of a state: the sum over its rows of `S * a`. Lanes are columns.
///
/// # Safety
/// Rows of `GROUP` columns from `at` on are in `state`, as many as `a` has elements.
#[inline(always)]
pub(super) unsafe fn read<S: Simd>(s: S, state: &[f32], at: usize, a: &[f32]) -> Two<S> {
    let (n, piece) = (a.len(), IEEE.segment_length(a.len()));
    let mut sums = [all(s, 0.0); IEEE.segments];
    for step in 0..piece.min(n) {
        for (segment, sum) in sums.iter_mut().enumerate() {
            let d = segment * piece + step;
            if d < n {
                // SAFETY: the caller's promise; d is below n.
                unsafe { *sum = fma(s, all(s, *a.get_unchecked(d)), two(s, state, at + d * GROUP), *sum) };
            }
        }
    }
    join(s, sums)
}

/// A token: `S = k * v + (b * sa + S * e^w)`, and the sum of `S * r`.
///
/// # Safety
/// As [`read`]; all rows have as many elements.
#[inline(always)]
pub(super) unsafe fn advance<S: Simd>(s: S, state: &mut [f32], at: usize, rows: Rows, [sa, v]: [Two<S>; 2]) -> Two<S> {
    let Rows { r, left, k, b, .. } = rows;
    let (n, piece) = (r.len(), IEEE.segment_length(r.len()));
    let mut sums = [all(s, 0.0); IEEE.segments];
    for step in 0..piece.min(n) {
        for (segment, sum) in sums.iter_mut().enumerate() {
            let d = segment * piece + step;
            if d < n {
                // SAFETY: the caller's promise; d is below n.
                unsafe {
                    let left = mul(s, two(s, state, at + d * GROUP), all(s, *left.get_unchecked(d)));
                    let corrected = fma(s, all(s, *b.get_unchecked(d)), sa, left);
                    let moved = fma(s, all(s, *k.get_unchecked(d)), v, corrected);
                    put(s, moved, state, at + d * GROUP);
                    *sum = fma(s, all(s, *r.get_unchecked(d)), moved, *sum);
                }
            }
        }
    }
    join(s, sums)
}
