//! What the gated delta rule and its gradient share: their dimensions, what they read, and the tokens of a head in f32, by
//! which one kernel serves all dtypes.

use crate::columns::{Exponentials, GROUP, Two, all, fma, join, mul, padded, put, sub, two};
use crate::lengths::Lengths;
use crate::math::{exp, softplus};
use crate::profile::IEEE;
use crate::simd::Simd;
use crate::simd::scalar::Scalar;
use crate::tensor::{Heads, Rows};
use crate::through_f32::convert;
use crate::{Cpu, Element, Error, TensorRef, check_len, value_error};
use std::ops::Range;

/// Dimensions of a gated delta rule.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GatedDeltaRule {
    /// Sequences B.
    pub batch: usize,
    /// Tokens of each, T.
    pub length: usize,
    /// Heads of queries and keys, Hk.
    pub key_heads: usize,
    /// Heads of values, Hv, a multiple of Hk.
    pub value_heads: usize,
    /// Elements of a query and of a key, D.
    pub key_dim: usize,
    /// Elements of a value, E.
    pub value_dim: usize,
    /// Decays of a head, G: 1, or one for each element of its keys.
    pub decays: usize,
    /// Factor of queries, finite in f32; read as `f32(scale)`.
    pub scale: f64,
}

impl GatedDeltaRule {
    /// Those of a call by name.
    pub(super) fn of(call: &samebits_schema::Call) -> GatedDeltaRule {
        let [batch, length, key_heads, value_heads] = ["B", "T", "Hk", "Hv"].map(|axis| call.dim(axis));
        let [key_dim, value_dim, decays] = ["D", "E", "G"].map(|axis| call.dim(axis));
        let scale = call.float("scale");
        GatedDeltaRule { batch, length, key_heads, value_heads, key_dim, value_dim, decays, scale }
    }

    /// Refuses what the form of a call refuses.
    pub(super) fn check(&self, op: &'static str) -> Result<(), Error> {
        let GatedDeltaRule { key_heads, value_heads, key_dim, decays, scale, .. } = *self;
        if key_heads == 0 || !value_heads.is_multiple_of(key_heads) {
            return Err(value_error(op, format!("Hv = {value_heads} must be a multiple of Hk = {key_heads}")));
        }
        if decays != 1 && decays != key_dim {
            return Err(value_error(op, format!("G is {decays}; it must be 1 or D = {key_dim}")));
        }
        if !(scale as f32).is_finite() {
            return Err(value_error(op, format!("scale is {scale}; it must be finite in f32")));
        }
        Ok(())
    }

    /// Value heads that read a key head.
    pub(super) fn group(&self) -> usize {
        self.value_heads / self.key_heads
    }

    pub(super) fn of_keys(&self) -> [usize; 4] {
        [self.batch, self.length, self.key_heads, self.key_dim]
    }

    pub(super) fn of_values(&self) -> [usize; 4] {
        [self.batch, self.length, self.value_heads, self.value_dim]
    }

    pub(super) fn of_decays(&self) -> [usize; 4] {
        [self.batch, self.length, self.value_heads, self.decays]
    }

    pub(super) fn of_betas(&self) -> [usize; 3] {
        [self.batch, self.length, self.value_heads]
    }

    pub(super) fn of_state(&self) -> [usize; 4] {
        [self.batch, self.value_heads, self.key_dim, self.value_dim]
    }

    /// Checks the lengths of slices, by the names of their tensors.
    pub(super) fn check_slices<const N: usize>(
        &self,
        op: &'static str,
        slices: [(&'static str, Option<usize>); N],
    ) -> Result<(), Error> {
        for (name, found) in slices {
            let Some(found) = found else { continue };
            match name.trim_start_matches('d') {
                "q" | "k" => check_len(op, name, "[B,T,Hk,D]", found, &self.of_keys()),
                "v" | "y" => check_len(op, name, "[B,T,Hv,E]", found, &self.of_values()),
                "g" => check_len(op, name, "[B,T,Hv,G]", found, &self.of_decays()),
                "a_log" if name == "a_log" => check_len(op, name, "[Hv]", found, &[self.value_heads]),
                "t_bias" => check_len(op, name, "[Hv,G]", found, &[self.value_heads, self.decays]),
                "beta" | "a_log" => check_len(op, name, "[B,T,Hv]", found, &self.of_betas()),
                _ => check_len(op, name, "[B,Hv,D,E]", found, &self.of_state()),
            }?;
        }
        Ok(())
    }

    /// Its sequences, which may have fewer tokens.
    pub(super) fn lengths(&self) -> Lengths {
        Lengths { batch: self.batch, length: self.length }
    }
}

/// The inputs of any layout that the op and its gradient read.
#[derive(Clone, Copy)]
pub(super) struct Tensors<'a> {
    pub q: TensorRef<'a>,
    pub k: TensorRef<'a>,
    pub v: TensorRef<'a>,
    pub g: TensorRef<'a>,
    pub beta: TensorRef<'a>,
    pub a_log: Option<TensorRef<'a>>,
    pub dt_bias: Option<TensorRef<'a>>,
    pub state: Option<TensorRef<'a>>,
    pub len: Option<&'a [i32]>,
}

/// The same, whose types are known.
pub(super) struct Inputs<'a, I> {
    pub cpu: &'a Cpu,
    pub shape: &'a GatedDeltaRule,
    q: Heads<'a, I>,
    k: Heads<'a, I>,
    v: Heads<'a, I>,
    g: Heads<'a, f32>,
    beta: Rows<'a, f32>,
    /// What a head's logarithm is a multiple of, `-e^a_log`.
    rates: Option<Vec<f32>>,
    dt_bias: Option<Rows<'a, f32>>,
    /// The states before the first tokens.
    pub state: Option<Heads<'a, f32>>,
    len: Option<&'a [i32]>,
}

impl<'a, I: Element> Inputs<'a, I> {
    pub fn new(cpu: &'a Cpu, shape: &'a GatedDeltaRule, tensors: &Tensors<'a>) -> Inputs<'a, I> {
        let &Tensors { q, k, v, g, beta, a_log, dt_bias, state, len } = tensors;
        let (q, k, v, g) = (q.heads(), k.heads(), v.heads(), g.heads());
        let rates = a_log.map(|a_log| a_log.rows::<f32>().row(0).iter().map(|&a_log| -exp(Scalar, a_log)).collect());
        let (dt_bias, state) = (dt_bias.map(|dt_bias| dt_bias.rows()), state.map(|state| state.heads()));
        Inputs { cpu, shape, q, k, v, g, beta: beta.rows(), rates, dt_bias, state, len }
    }

    /// What the logarithm of a head is a multiple of, where there is an a_log.
    pub fn rate(&self, h: usize) -> Option<f32> {
        self.rates.as_ref().map(|rates| rates[h])
    }

    /// How many tokens sequence `b` has.
    pub fn tokens_of(&self, b: usize) -> usize {
        self.len.map_or(self.shape.length, |len| len[b] as usize)
    }

    /// Some tokens of a head, from the first row of `to` on.
    pub fn read(&self, [b, h]: [usize; 2], tokens: Range<usize>, columns: &Range<usize>, to: &mut Tokens) {
        let GatedDeltaRule { length, key_dim, decays, scale, .. } = *self.shape;
        let (key_head, scale, count) = (h / self.shape.group(), scale as f32, tokens.len());
        let width = padded(columns.len());
        for (row, t) in tokens.enumerate() {
            let (at, from) = (b * length + t, row * key_dim);
            convert(self.cpu, self.q.get(at, key_head), &mut to.w[from..][..key_dim]);
            to.w[from..][..key_dim].iter_mut().for_each(|q| *q *= scale);
            convert(self.cpu, self.k.get(at, key_head), &mut to.k[from..][..key_dim]);
            let v = &self.v.get(at, h)[columns.clone()];
            convert(self.cpu, v, &mut to.v[row * width..][..columns.len()]);
            let (l, g) = (&mut to.l[row * decays..][..decays], self.g.get(at, h));
            l.copy_from_slice(g);
            if let Some(rate) = self.rate(h) {
                let x = &mut to.x[row * decays..][..decays];
                x.copy_from_slice(g);
                if let Some(bias) = &self.dt_bias {
                    x.iter_mut().zip(bias.row(h)).for_each(|(x, bias)| *x += bias);
                }
                l.iter_mut().zip(x).for_each(|(l, x)| *l = rate * softplus(*x));
            }
            to.beta[row] = self.beta.row(at)[h];
        }
        to.a[..count * decays].copy_from_slice(&to.l[..count * decays]);
        self.cpu.dispatch(Exponentials(&mut to.a[..count * decays]));
        if decays != key_dim {
            for row in (0..count).rev() {
                let a = to.a[row];
                to.a[row * key_dim..][..key_dim].fill(a);
            }
        }
    }
}

/// Tokens of a head in f32, a row each; columns of values are [`padded`].
pub(super) struct Tokens {
    /// Queries times the scale.
    pub w: Vec<f32>,
    pub k: Vec<f32>,
    /// What is left of the state, for each element of a key.
    pub a: Vec<f32>,
    /// Its logarithm, as many as a head has decays.
    pub l: Vec<f32>,
    /// What that comes of, where there is an a_log.
    pub x: Vec<f32>,
    pub v: Vec<f32>,
    pub beta: Vec<f32>,
}

impl Tokens {
    /// Room for some tokens; what fills groups is +0.
    pub fn room(count: usize, key_dim: usize, columns: usize) -> Tokens {
        // Room for a decay also where keys have no elements.
        let of_keys = || vec![0f32; count * key_dim.max(1)];
        Tokens {
            w: of_keys(),
            k: of_keys(),
            a: of_keys(),
            l: of_keys(),
            x: of_keys(),
            v: vec![0.0; count * padded(columns)],
            beta: vec![0.0; count],
        }
    }
}

/// A step of a token before a column's u is known: `r = v - sum of P * k`, with `P = S * a`. Lanes are columns.
///
/// # Safety
/// Rows of `GROUP` columns from `at` on are in `state`, as many as `k` and `a` have elements; two vectors from `v_at` in v.
#[inline(always)]
pub(super) unsafe fn read_back<S: Simd>(s: S, state: &[f32], at: usize, [k, a]: [&[f32]; 2], v: Two<S>) -> Two<S> {
    let (n, piece) = (k.len(), IEEE.segment_length(k.len()));
    let mut sums = [all(s, 0.0); IEEE.segments];
    for step in 0..piece.min(n) {
        for (segment, sum) in sums.iter_mut().enumerate() {
            let d = segment * piece + step;
            if d < n {
                // SAFETY: the caller's promise; d is below n.
                unsafe {
                    let decayed = mul(s, all(s, *a.get_unchecked(d)), two(s, state, at + d * GROUP));
                    *sum = fma(s, all(s, *k.get_unchecked(d)), decayed, *sum);
                }
            }
        }
    }
    sub(s, v, join(s, sums))
}

/// The rest of it: `S = k * u + P`, and the sum of `S * w`.
///
/// # Safety
/// As [`read_back`]; w has as many elements as k.
#[inline(always)]
pub(super) unsafe fn write_back<S: Simd>(
    s: S,
    state: &mut [f32],
    at: usize,
    [k, a, w]: [&[f32]; 3],
    u: Two<S>,
) -> Two<S> {
    let (n, piece) = (k.len(), IEEE.segment_length(k.len()));
    let mut sums = [all(s, 0.0); IEEE.segments];
    for step in 0..piece.min(n) {
        for (segment, sum) in sums.iter_mut().enumerate() {
            let d = segment * piece + step;
            if d < n {
                // SAFETY: the caller's promise; d is below n.
                unsafe {
                    let decayed = mul(s, all(s, *a.get_unchecked(d)), two(s, state, at + d * GROUP));
                    let moved = fma(s, all(s, *k.get_unchecked(d)), u, decayed);
                    put(s, moved, state, at + d * GROUP);
                    *sum = fma(s, all(s, *w.get_unchecked(d)), moved, *sum);
                }
            }
        }
    }
    join(s, sums)
}
