//! Gradient of the gated delta rule: `q, k, v, g, beta, a_log?, dt_bias?, state?, dy[B,T,Hv,E], dnext[B,Hv,D,E]? (f32), len? ->
//! dq[B,T,Hk,D], dk[B,T,Hk,D], dv[B,T,Hv,E], dg[B,T,Hv,G] (f32), dbeta[B,T,Hv] (f32), da_log[B,T,Hv] (f32), dstate[B,Hv,D,E]` (f32).
//!
//! Formula: with M the gradient of S behind a token, back from dnext: `M += w dy^T`, w = scale * q; `du = M^T k`;
//! `dr = beta * du` is dv; `N = M - k dr^T`; `dq = scale * S dy`, `dk = M u - P dr`, `dg = sum of N * P`,
//! `dbeta = du r`; `e^l * N` is the M before. Where there is an a_log that dg is dl, `da_log = dl l` and
//! `dg = dl * -e^a_log * sigmoid(g + dt_bias)`. P, r, u and S as in the forward, which is run again.
//! Order: positions descend. Sums over D and over E are eight segments of chains, joined as a tree; with one decay a head, dg is
//! the segments over D of those over E. The value heads of a key head are added, ascending from +0.
//! Rounding: every step once to f32; totals of dq times `f32(scale)`; last rounding.
//! Special: rows behind `len` are not read, and all of theirs is +0.
//!
//! Two runs over a head: one with lanes of columns e, where sums over D are made, for r and du; one with lanes of columns d,
//! where sums over E are. In the second the states are made again from one kept every [`KEPT`] tokens.

use crate::Cpu;
use crate::backend::device::workspace::choose as choose_on_device;
use crate::backend::device::{Buffer, Build, Device, Unit};
use crate::call::Entry;
use crate::columns::{
    GROUP, KEPT, THREADS, Two, Words, add, all, by_size, fma, gather, join, kept, mul, padded, product, put, scatter,
    sub, turn, two,
};
use crate::conv::causal_conv1d::{Part, optional};
use crate::conv::taps::on_host;
use crate::delta::gated_delta_rule::{DeltaInputs, DeviceInputs, Parts, check_host, dimensions, tensors};
use crate::delta::heads::{GatedDeltaRule, Inputs, Tensors, Tokens, read_back, write_back};
use crate::element::{Stored, typed};
use crate::math::sigmoid;
use crate::parallel::SharedOut;
use crate::profile::IEEE;
use crate::simd::scalar::Scalar;
use crate::simd::{Kernel, Simd};
use crate::tensor::Heads;
use crate::through_f32::convert;
use crate::{Element, Error, TensorMut, TensorRef};

const NAME: &str = "gated_delta_rule_backward";
/// The outputs.
const MADE: [&str; 7] = ["dq", "dk", "dv", "dg", "dbeta", "da_log", "dstate"];

/// The gradients that [`gated_delta_rule_backward`] makes, row-major.
#[derive(Debug)]
pub struct DeltaGradients<O, S> {
    /// `dq[B,T,Hk,D]`.
    pub dq: O,
    /// `dk[B,T,Hk,D]`.
    pub dk: O,
    /// `dv[B,T,Hv,E]`.
    pub dv: O,
    /// `dg[B,T,Hv,G]`, f32 as those below.
    pub dg: S,
    /// `dbeta[B,T,Hv]`.
    pub dbeta: S,
    /// `da_log[B,T,Hv]`, of which the gradient of a_log is the sum over tokens; that of dt_bias is that of dg.
    pub da_log: S,
    /// `dstate[B,Hv,D,E]`.
    pub dstate: S,
}

/// The gradients of [`gated_delta_rule`](crate::gated_delta_rule)'s inputs from `dy[B,T,Hv,E]` and, where it is given,
/// `dnext[B,Hv,D,E]`. What a thread keeps grows with T, as a few rows for each token of a head.
///
/// # Errors
/// As [`gated_delta_rule`](crate::gated_delta_rule).
///
/// ```
/// use samebits_ops::{Cpu, DeltaGradients, DeltaInputs, GatedDeltaRule, gated_delta_rule_backward};
///
/// let shape = GatedDeltaRule {
///     batch: 1, length: 1, key_heads: 1, value_heads: 1, key_dim: 1, value_dim: 1, decays: 1, scale: 1.0,
/// };
/// // y = 3 * (4 * 0.5 * 2), from a state of 0.
/// let inputs = DeltaInputs { q: &[3f32][..], k: &[2.0], v: &[4.0], g: &[0.0], beta: &[0.5],
///     a_log: None, dt_bias: None, state: None, len: None };
/// let ([mut dq, mut dk, mut dv], [mut dg, mut dbeta, mut da_log, mut dstate]) = ([[0f32; 1]; 3], [[0f32; 1]; 4]);
/// let made = DeltaGradients {
///     dq: &mut dq[..], dk: &mut dk, dv: &mut dv, dg: &mut dg[..], dbeta: &mut dbeta, da_log: &mut da_log,
///     dstate: &mut dstate,
/// };
/// gated_delta_rule_backward(&Cpu::best(), &shape, &inputs, &[1.0], None, made)?;
/// assert_eq!(([dq, dk, dv], [dg, dbeta, dstate]), ([[4.0], [6.0], [3.0]], [[0.0], [24.0], [-3.0]]));
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn gated_delta_rule_backward<I: Element, O: Element>(
    cpu: &Cpu,
    shape: &GatedDeltaRule,
    inputs: &DeltaInputs<I>,
    dy: &[I],
    dnext: Option<&[f32]>,
    made: DeltaGradients<&mut [O], &mut [f32]>,
) -> Result<(), Error> {
    inputs.check(shape, NAME)?;
    let DeltaGradients { dq, dk, dv, dg, dbeta, da_log, dstate } = made;
    let lens = [dq.len(), dk.len(), dv.len(), dg.len(), dbeta.len(), da_log.len(), dstate.len()];
    check_made(shape, lens, dy.len(), dnext.map(<[f32]>::len))?;
    let given = Given {
        inputs: inputs.tensors(shape),
        dy: TensorRef::of(dy, &shape.of_values()),
        dnext: dnext.map(|dnext| TensorRef::of(dnext, &shape.of_state())),
    };
    let made = Made {
        dq: TensorMut::of(dq, &shape.of_keys()),
        dk: TensorMut::of(dk, &shape.of_keys()),
        dv: TensorMut::of(dv, &shape.of_values()),
        dg: TensorMut::of(dg, &shape.of_decays()),
        dbeta: TensorMut::of(dbeta, &shape.of_betas()),
        da_log: TensorMut::of(da_log, &shape.of_betas()),
        dstate: TensorMut::of(dstate, &shape.of_state()),
    };
    run(cpu, shape, given, made)
}

/// Checks the lengths of the outputs and of the gradients that come in.
fn check_made(shape: &GatedDeltaRule, made: [usize; 7], dy: usize, dnext: Option<usize>) -> Result<(), Error> {
    let mut lens = made.into_iter().map(Some);
    shape.check_slices(NAME, MADE.map(|name| (name, lens.next().expect("as many lengths"))))?;
    shape.check_slices(NAME, [("dy", Some(dy)), ("dnext", dnext)])
}

/// The inputs of any layout.
struct Given<'a> {
    inputs: Tensors<'a>,
    dy: TensorRef<'a>,
    dnext: Option<TensorRef<'a>>,
}

/// The outputs.
struct Made<'a> {
    dq: TensorMut<'a>,
    dk: TensorMut<'a>,
    dv: TensorMut<'a>,
    dg: TensorMut<'a>,
    dbeta: TensorMut<'a>,
    da_log: TensorMut<'a>,
    dstate: TensorMut<'a>,
}

/// The form of the call has been checked.
fn run(cpu: &Cpu, shape: &GatedDeltaRule, given: Given, made: Made) -> Result<(), Error> {
    let Given { inputs, dy, dnext } = given;
    check_host(NAME, shape, &inputs)?;
    on_host(NAME, [("dy", Some(dy)), ("dnext", dnext)])?;
    let Made { dq, dk, dv, dg, dbeta, da_log, dstate } = made;
    let (dg, dbeta) = (dg.host::<f32>(NAME, "dg")?, dbeta.host::<f32>(NAME, "dbeta")?);
    let (dg, dbeta) = (SharedOut::new(dg), SharedOut::new(dbeta));
    let da_log = SharedOut::new(da_log.host::<f32>(NAME, "da_log")?);
    let dstate = SharedOut::new(dstate.host::<f32>(NAME, "dstate")?);
    typed!(inputs.q.dtype() => I, typed!(dq.dtype() => O, {
        let inputs = Inputs::<I>::new(cpu, shape, &inputs);
        let (dq, dk) = (SharedOut::new(dq.host::<O>(NAME, "dq")?), SharedOut::new(dk.host::<O>(NAME, "dk")?));
        let dv = SharedOut::new(dv.host::<O>(NAME, "dv")?);
        let (dy, dnext) = (dy.heads::<I>(), dnext.map(|dnext| dnext.heads()));
        // Extents of what has no elements may be anything.
        let GatedDeltaRule { length, value_heads, key_dim, value_dim, .. } = *shape;
        if length == 0 && (key_dim == 0 || value_dim == 0) || value_heads == 0 && key_dim == 0 {
            return Ok(());
        }
        let all = Backward { inputs, dy, dnext, dq, dk, dv, dg, dbeta, da_log, dstate };
        // Value heads of a key head are added in their order.
        cpu.each(shape.batch.saturating_mul(shape.key_heads), |task| {
            all.key_head([task / shape.key_heads, task % shape.key_heads]);
        });
    }));
    Ok(())
}

/// A call whose types are known.
struct Backward<'a, I, O> {
    inputs: Inputs<'a, I>,
    dy: Heads<'a, I>,
    dnext: Option<Heads<'a, f32>>,
    dq: SharedOut<'a, O>,
    dk: SharedOut<'a, O>,
    dv: SharedOut<'a, O>,
    dg: SharedOut<'a, f32>,
    dbeta: SharedOut<'a, f32>,
    da_log: SharedOut<'a, f32>,
    dstate: SharedOut<'a, f32>,
}

/// Rows of a head that a thread goes over, one for each token; values are padded to groups, and so are what is made of keys.
struct Room {
    tokens: Tokens,
    dy: Vec<f32>,
    /// r, then u.
    r: Vec<f32>,
    /// du, then dr.
    du: Vec<f32>,
    /// Totals of q and of k, and what the decays of a head get.
    of_keys: [Vec<f32>; 3],
}

impl<I: Element, O: Element> Backward<'_, I, O> {
    /// The value heads of a key head.
    fn key_head(&self, [b, key_head]: [usize; 2]) {
        let (cpu, shape, end) = (self.inputs.cpu, self.inputs.shape, self.inputs.tokens_of(b));
        let GatedDeltaRule { length, key_heads, value_heads, key_dim, value_dim, scale, .. } = *shape;
        let value_dim = if value_heads == 0 { 0 } else { value_dim };
        let (of_values, of_keys) = (end * padded(value_dim), padded(key_dim));
        let mut room = Room {
            tokens: Tokens::room(end, key_dim, value_dim),
            dy: vec![0.0; of_values],
            r: vec![0.0; of_values],
            du: vec![0.0; of_values],
            of_keys: [(); 3].map(|()| vec![0.0; end * of_keys]),
        };
        for h in key_head * shape.group()..(key_head + 1) * shape.group() {
            self.value_head([b, h], end, &mut room);
        }
        let [mut tq, tk, _] = room.of_keys;
        tq.iter_mut().for_each(|total| *total *= scale as f32);
        for (to, totals) in [(&self.dq, tq), (&self.dk, tk)] {
            // SAFETY: a task has a key head to itself, and each token is taken once.
            let row = |t: usize| unsafe { to.part(((b * length + t) * key_heads + key_head) * key_dim, key_dim) };
            for t in 0..end {
                convert(cpu, &totals[t * of_keys..][..key_dim], row(t));
            }
            (end..length).for_each(|t| row(t).fill(O::default()));
        }
    }

    /// A value head; what its key head gets is added to the totals.
    fn value_head(&self, [b, h]: [usize; 2], end: usize, room: &mut Room) {
        let (cpu, shape) = (self.inputs.cpu, self.inputs.shape);
        let GatedDeltaRule { length, value_heads, key_dim, value_dim, decays, .. } = *shape;
        let (width, groups, of_keys) = (padded(value_dim), value_dim.div_ceil(GROUP), padded(key_dim));
        let (head, size) = (b * value_heads + h, [key_dim, value_dim]);
        let Room { tokens, dy, r, du, of_keys: totals } = room;
        self.inputs.read([b, h], 0..end, &(0..value_dim), tokens);
        for t in 0..end {
            convert(cpu, self.dy.get(b * length + t, h), &mut dy[t * width..][..value_dim]);
        }

        let (mut state, mut dstate) = (vec![0f32; key_dim * width], vec![0f32; key_dim * width]);
        gather(self.inputs.state.as_ref(), head, 0..groups, size, &mut state);
        gather(self.dnext.as_ref(), head, 0..groups, size, &mut dstate);
        let ends = [end, key_dim, width];
        cpu.dispatch(OverKeys { ends, tokens, dy, state: &mut state, dstate: &mut dstate, r, du });
        scatter(cpu, &dstate, head, 0..groups, size, &self.dstate);

        // SAFETY: a task has the value heads of its key head to itself, and each token is taken once, here and below.
        let beta_of = |t: usize| unsafe { self.dbeta.part((b * length + t) * value_heads + h, 1) };
        // SAFETY: as above.
        let rate_of = |t: usize| unsafe { self.da_log.part((b * length + t) * value_heads + h, 1) };
        for t in 0..end {
            let [r, du] = [&r, &du].map(|x| &x[t * width..][..value_dim]);
            convert(cpu, &[cpu.dispatch(Dot(r, du))], beta_of(t));
        }
        for (t, beta) in tokens.beta.iter().enumerate().take(end) {
            [&mut *r, &mut *du].into_iter().for_each(|x| x[t * width..][..width].iter_mut().for_each(|x| *x *= beta));
            let at = ((b * length + t) * value_heads + h) * value_dim;
            // SAFETY: as above.
            convert(cpu, &du[t * width..][..value_dim], unsafe { self.dv.part(at, value_dim) });
        }

        let [mut state, mut dstate] = [(); 2].map(|()| vec![0f32; value_dim * of_keys]);
        turn(self.inputs.state.as_ref(), head, size, &mut state);
        turn(self.dnext.as_ref(), head, size, &mut dstate);
        let ends = [end, key_dim, value_dim];
        let [tq, tk, tg] = totals;
        let over = OverValues { ends, width, tokens, dy, u: r, dr: du, state, dstate, made: [tq, tk, tg] };
        cpu.dispatch(over);

        for t in 0..length {
            let at = (b * length + t) * value_heads + h;
            // SAFETY: as above.
            let to = unsafe { self.dg.part(at * decays, decays) };
            if t >= end {
                to.fill(0.0);
                beta_of(t).fill(0.0);
                rate_of(t).fill(0.0);
                // SAFETY: as above.
                unsafe { self.dv.part(at * value_dim, value_dim) }.fill(O::default());
                continue;
            }
            let of_decays = &tg[t * of_keys..][..key_dim];
            let of_head = [segments(of_decays)];
            let dl = if decays == key_dim { of_decays } else { &of_head };
            let Some(rate) = self.inputs.rate(h) else {
                convert(cpu, dl, to);
                rate_of(t).fill(0.0);
                continue;
            };
            let [l, x] = [&tokens.l, &tokens.x].map(|of| &of[t * decays..][..decays]);
            convert(cpu, &[cpu.dispatch(Dot(dl, l))], rate_of(t));
            let dg: Vec<f32> = dl.iter().zip(x).map(|(dl, x)| (dl * rate) * sigmoid(Scalar, *x)).collect();
            convert(cpu, &dg, to);
        }
    }
}

/// Segments of additions.
fn segments(x: &[f32]) -> f32 {
    let mut sums = [0f32; IEEE.segments];
    for (sum, x) in sums.iter_mut().zip(x.chunks(IEEE.segment_length(x.len()).max(1))) {
        *sum = x.iter().fold(0.0, |sum, x| sum + x);
    }
    let p = sums;
    ((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + (p[6] + p[7]))
}

/// Segments of chains of products, one number after the other.
struct Dot<'a>(&'a [f32], &'a [f32]);

impl Kernel for Dot<'_> {
    type Output = f32;
    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> f32 {
        let (n, mut p) = (self.0.len(), [0f32; IEEE.segments]);
        let piece = IEEE.segment_length(n);
        for step in 0..piece.min(n) {
            for (segment, sum) in p.iter_mut().enumerate() {
                let i = segment * piece + step;
                if i < n {
                    *sum = self.0[i].mul_add(self.1[i], *sum);
                }
            }
        }
        ((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + (p[6] + p[7]))
    }
}

/// All tokens of a head, forward for r and back for du and the gradient of its state. Lanes are columns e.
struct OverKeys<'a> {
    /// Tokens, elements of a key, columns of whole groups.
    ends: [usize; 3],
    tokens: &'a Tokens,
    dy: &'a [f32],
    state: &'a mut [f32],
    dstate: &'a mut [f32],
    r: &'a mut [f32],
    du: &'a mut [f32],
}

impl Kernel for OverKeys<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let OverKeys { ends: [end, n, width], tokens, dy, state, dstate, r, du } = self;
        let Tokens { w, k, a, v, beta, .. } = tokens;
        assert!(width.is_multiple_of(GROUP) && GROUP.is_multiple_of(2 * S::LANES));
        assert!([v.len(), dy.len(), r.len(), du.len()].iter().all(|&len| len >= end * width));
        assert!(state.len() == n * width && dstate.len() == n * width);
        for group in 0..width / GROUP {
            for at in (0..GROUP).step_by(2 * S::LANES) {
                let (of_state, of_row) = (group * GROUP * n + at, group * GROUP + at);
                for t in 0..end {
                    let ([k, a, w], row) = ([k, a, w].map(|x| &x[t * n..][..n]), t * width + of_row);
                    let beta = all(s, beta[t]);
                    // SAFETY: states have n rows of a group from `group * GROUP * n` on, of whose GROUP columns these are two
                    // vectors; the others have rows of `width`, `end` of them.
                    unsafe {
                        let of_r = read_back(s, state, of_state, [k, a], two(s, v, row));
                        put(s, of_r, r, row);
                        write_back(s, state, of_state, [k, a, w], mul(s, of_r, beta));
                    }
                }
                for t in (0..end).rev() {
                    let ([k, a, w], row) = ([k, a, w].map(|x| &x[t * n..][..n]), t * width + of_row);
                    let piece = IEEE.segment_length(n);
                    let mut sums = [all(s, 0.0); IEEE.segments];
                    // SAFETY: as above; d is below n.
                    unsafe {
                        let dy = two(s, dy, row);
                        for step in 0..piece.min(n) {
                            for (segment, sum) in sums.iter_mut().enumerate() {
                                let d = segment * piece + step;
                                if d < n {
                                    let place = of_state + d * GROUP;
                                    let m = fma(s, all(s, w[d]), dy, two(s, dstate, place));
                                    put(s, m, dstate, place);
                                    *sum = fma(s, all(s, k[d]), m, *sum);
                                }
                            }
                        }
                        let of_du = join(s, sums);
                        put(s, of_du, du, row);
                        let dr = mul(s, of_du, all(s, beta[t]));
                        for d in 0..n {
                            let place = of_state + d * GROUP;
                            let left = fma(s, all(s, -k[d]), dr, two(s, dstate, place));
                            put(s, mul(s, left, all(s, a[d])), dstate, place);
                        }
                    }
                }
            }
        }
    }
}

/// All tokens of a head, forward for its states and back for the sums over E. Lanes are columns d.
struct OverValues<'a> {
    /// Tokens, elements of a key, elements of a value.
    ends: [usize; 3],
    /// Of a row of values.
    width: usize,
    tokens: &'a Tokens,
    dy: &'a [f32],
    u: &'a [f32],
    dr: &'a [f32],
    /// Rows of e, as all below.
    state: Vec<f32>,
    dstate: Vec<f32>,
    /// The totals of q and k, which are added to, and what decays get.
    made: [&'a mut [f32]; 3],
}

impl Kernel for OverValues<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let OverValues { ends: [end, n, m], width, tokens, dy, u, dr, mut state, mut dstate, made: [tq, tk, tg] } =
            self;
        let of_keys = padded(n);
        assert!(GROUP.is_multiple_of(2 * S::LANES) && [state.len(), dstate.len()] == [m * of_keys; 2]);
        assert!([tq.len(), tk.len(), tg.len()].iter().all(|&len| len >= end * of_keys));
        let size = m * GROUP;
        let mut kept = vec![0f32; end.div_ceil(KEPT) * size];
        let mut decayed = vec![0f32; KEPT.min(end) * size];
        // Keys, queries and decays of a token in a group, +0 behind the last.
        let mut row = [[0f32; GROUP]; 3];
        for group in 0..of_keys / GROUP {
            let (first, state, dstate) =
                (group * GROUP, &mut state[group * size..][..size], &mut dstate[group * size..][..size]);
            let count = GROUP.min(n - first);
            for from in 0..end.div_ceil(KEPT) {
                kept[from * size..][..size].copy_from_slice(state);
                for t in from * KEPT..end.min((from + 1) * KEPT) {
                    of_token(tokens, t * n + first, count, &mut row);
                    for at in (0..GROUP).step_by(2 * S::LANES) {
                        let u = &u[t * width..][..m];
                        // SAFETY: `GROUP` columns in each of m rows, of which these are two vectors.
                        unsafe {
                            let [k, _, a] = [two(s, &row[0], at), two(s, &row[1], at), two(s, &row[2], at)];
                            for (e, u) in u.iter().enumerate() {
                                let p = mul(s, two(s, state, e * GROUP + at), a);
                                put(s, fma(s, k, all(s, *u), p), state, e * GROUP + at);
                            }
                        }
                    }
                }
            }
            for from in (0..end.div_ceil(KEPT)).rev() {
                let tokens_of = from * KEPT..end.min((from + 1) * KEPT);
                let state = &mut kept[from * size..][..size];
                for t in tokens_of.clone() {
                    of_token(tokens, t * n + first, count, &mut row);
                    let decayed = &mut decayed[(t - from * KEPT) * size..][..size];
                    for at in (0..GROUP).step_by(2 * S::LANES) {
                        // SAFETY: as above.
                        unsafe {
                            let [k, _, a] = [two(s, &row[0], at), two(s, &row[1], at), two(s, &row[2], at)];
                            for (e, u) in u[t * width..][..m].iter().enumerate() {
                                let p = mul(s, two(s, state, e * GROUP + at), a);
                                put(s, p, decayed, e * GROUP + at);
                                put(s, fma(s, k, all(s, *u), p), state, e * GROUP + at);
                            }
                        }
                    }
                }
                for t in tokens_of.rev() {
                    of_token(tokens, t * n + first, count, &mut row);
                    let decayed = &decayed[(t - from * KEPT) * size..][..size];
                    let of_values = [u, dr, dy].map(|x| &x[t * width..][..m]);
                    for at in (0..GROUP).step_by(2 * S::LANES) {
                        // SAFETY: as above; totals have rows of whole groups, `end` of them.
                        unsafe {
                            let row = [two(s, &row[0], at), two(s, &row[1], at), two(s, &row[2], at)];
                            let [dq, dk, dg] = go_back(s, decayed, dstate, at, row, of_values);
                            let place = t * of_keys + first + at;
                            put(s, add(s, two(s, tq, place), dq), tq, place);
                            put(s, add(s, two(s, tk, place), dk), tk, place);
                            put(s, dg, tg, place);
                        }
                    }
                }
            }
        }
    }
}

/// What a token has of a group of keys: k, w and a.
#[inline(always)]
fn of_token(tokens: &Tokens, from: usize, count: usize, to: &mut [[f32; GROUP]; 3]) {
    for (to, x) in to.iter_mut().zip([&tokens.k, &tokens.w, &tokens.a]) {
        to[..count].copy_from_slice(&x[from..][..count]);
    }
}

/// The sums over E of a token, and the M before it in the place of the one behind.
///
/// # Safety
/// Two vectors from `at` on in each row of a group, as many rows as there are values.
#[inline(always)]
unsafe fn go_back<S: Simd>(
    s: S,
    decayed: &[f32],
    dstate: &mut [f32],
    at: usize,
    [k, w, a]: [Two<S>; 3],
    [u, dr, dy]: [&[f32]; 3],
) -> [Two<S>; 3] {
    let (n, zero) = (u.len(), all(s, 0.0));
    let (piece, minus) = (IEEE.segment_length(n), [s.neg(k[0]), s.neg(k[1])]);
    let [mut of_q, mut of_u, mut of_r, mut of_g] = [[zero; IEEE.segments]; 4];
    for segment in 0..IEEE.segments {
        let mut sums = [zero; 4];
        for e in (segment * piece).min(n)..((segment + 1) * piece).min(n) {
            let (u, dr, dy) = (all(s, u[e]), all(s, dr[e]), all(s, dy[e]));
            // SAFETY: the caller's promise.
            unsafe {
                let p = two(s, decayed, e * GROUP + at);
                let m = fma(s, w, dy, two(s, dstate, e * GROUP + at));
                let left = fma(s, minus, dr, m);
                sums[0] = fma(s, fma(s, k, u, p), dy, sums[0]);
                sums[1] = fma(s, m, u, sums[1]);
                sums[2] = fma(s, p, dr, sums[2]);
                sums[3] = fma(s, left, p, sums[3]);
                put(s, mul(s, left, a), dstate, e * GROUP + at);
            }
        }
        [of_q[segment], of_u[segment], of_r[segment], of_g[segment]] = sums;
    }
    [join(s, of_q), sub(s, join(s, of_u), join(s, of_r)), join(s, of_g)]
}

/// gated_delta_rule_backward, by name.
pub(crate) const OP: Entry = Entry {
    name: NAME,
    cpu: |cpu, args| {
        let given = Given { inputs: tensors(args)?, dy: args.input("dy"), dnext: args.optional("dnext") };
        let [dq, dk, dv, dg, dbeta, da_log, dstate] = MADE.map(|name| args.output(name));
        run(cpu, &GatedDeltaRule::of(args.call), given, Made { dq, dk, dv, dg, dbeta, da_log, dstate })
    },
    device: Some(|on, args| {
        let (shape, [dq, dk, dv, dg, dbeta, da_log, dstate]) =
            (GatedDeltaRule::of(args.call), MADE.map(|name| args.output(name)));
        let (dy, dnext) = (args.input("dy"), args.optional("dnext"));
        let args = &*args;
        shape.lengths().on_device(on, args, NAME, |len| {
            typed!(dy.dtype() => I, typed!(dq.dtype() => O, {
                let parts = Parts::<I>::of_call(args, NAME, len)?;
                let dnext = dnext.map(|dnext| dnext.device_part(NAME, "dnext")).transpose()?;
                let made = DeltaGradients {
                    dq: dq.device(NAME, "dq")?,
                    dk: dk.device(NAME, "dk")?,
                    dv: dv.device(NAME, "dv")?,
                    dg: dg.device(NAME, "dg")?,
                    dbeta: dbeta.device(NAME, "dbeta")?,
                    da_log: da_log.device(NAME, "da_log")?,
                    dstate: dstate.device(NAME, "dstate")?,
                };
                launch::<I, O>(on, &shape, parts, (dy.device_part(NAME, "dy")?, dnext), made)
            }))
        })
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// Its kernels.
const UNIT: Unit = Unit::of(NAME, include_str!("gated_delta_rule_backward.cu"), &KERNELS);
/// Columns of keys of up to 128 elements, of up to 256, and of any number; rows; what keys and what heads add up to.
const KERNELS: [&str; 6] = [
    "gated_delta_rule_backward_16",
    "gated_delta_rule_backward_32",
    "gated_delta_rule_backward_any",
    "gated_delta_rule_backward_rows",
    "gated_delta_rule_backward_keys",
    "gated_delta_rule_backward_heads",
];

/// The workspace on a device, in words: r and du; totals of q, of k and of decays; the state and its gradient, the states that
/// are kept, and those of the tokens behind one of them.
fn words(shape: &GatedDeltaRule) -> Words<9> {
    let GatedDeltaRule { length, value_heads, key_dim, .. } = *shape;
    let (of_values, of_state) = (product(&shape.of_values()), product(&shape.of_state()));
    let of_keys = product(&[shape.batch, length, value_heads, key_dim]);
    let [kept, again] = kept(length, of_state);
    Words([of_values, of_values, of_keys, of_keys, of_keys, of_state, of_state, kept, again])
}

/// Lengths were checked.
fn launch<I: Stored, O: Stored>(
    on: &Device,
    shape: &GatedDeltaRule,
    inputs: Parts<I>,
    (dy, dnext): (Part<I>, Option<Part<f32>>),
    made: DeltaGradients<&mut Buffer<O>, &mut Buffer<f32>>,
) -> Result<(), Error> {
    let GatedDeltaRule { batch, length, key_heads, value_heads, key_dim, value_dim, .. } = *shape;
    let (words, room) = choose_on_device(on, NAME, [words(shape)])?;
    let DeltaGradients { dq, dk, dv, dg, dbeta, da_log, dstate } = made;
    let mut arguments = optional(inputs.arguments(on)?.buffer_from(dy.0, dy.1), dnext);
    for made in [dq, dk, dv] {
        arguments = arguments.buffer(made);
    }
    for made in [dg, dbeta, da_log, dstate] {
        arguments = arguments.buffer(made);
    }
    arguments = words.arguments(arguments, &room);
    let (rows, build) = (batch.saturating_mul(length), Build::of::<I, O>(NAME));
    let arguments = dimensions(NAME, arguments.long(rows), shape)?;
    let heads = batch.saturating_mul(value_heads);
    let of_columns = KERNELS[by_size(key_dim)];
    let [columns, own_rows] = [value_dim, key_dim].map(|extent| [heads, extent.div_ceil(THREADS / 8), 1]);
    let [of_keys, of_heads] = [key_heads.saturating_mul(key_dim), value_heads]
        .map(|each| [rows.saturating_mul(each).div_ceil(THREADS), 1, 1]);
    let launches = [(of_columns, columns), (KERNELS[3], own_rows), (KERNELS[4], of_keys), (KERNELS[5], of_heads)];
    for (kernel, grid) in launches.into_iter().filter(|(_, grid)| !grid.contains(&0)) {
        // SAFETY: lengths were checked, and these are the kernel's arguments, of which the workspace has room for what it names.
        unsafe { on.launch(build, kernel, grid, THREADS as u32, 0, &arguments)? };
    }
    Ok(())
}

/// [`gated_delta_rule_backward`] on a device.
///
/// # Errors
/// As [`gated_delta_rule_backward`]; errors of the device.
pub fn on_device<I: Stored, O: Stored>(
    on: &Device,
    shape: &GatedDeltaRule,
    inputs: &DeviceInputs<I>,
    dy: &Buffer<I>,
    dnext: Option<&Buffer<f32>>,
    made: DeltaGradients<&mut Buffer<O>, &mut Buffer<f32>>,
) -> Result<(), Error> {
    inputs.check(NAME, shape)?;
    let DeltaGradients { dq, dk, dv, dg, dbeta, da_log, dstate } = &made;
    let lens = [dq.len(), dk.len(), dv.len(), dg.len(), dbeta.len(), da_log.len(), dstate.len()];
    check_made(shape, lens, dy.len(), dnext.map(Buffer::len))?;
    launch(on, shape, Parts::of(inputs), ((dy, 0), dnext.map(|dnext| (dnext, 0))), made)
}
