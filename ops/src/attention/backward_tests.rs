//! The gradient of attention against a plain computation, on every plan: nothing that decides how a call is cut moves a bit.

use super::attention_backward::{AttentionOutputs, QkvGradients, attention_backward};
use crate::attention::backward_job::QueryRows;
use crate::attention::job::{Attention, BLOCK, Qkv};
use crate::gemm::tests::{bits, number, on_every_plan};
use crate::math::{exp_or_nothing, tanh};
use crate::simd::scalar::Scalar;
use crate::{Cpu, Element, Error, Isa, Tf32};
use half::bf16;

#[derive(Clone)]
struct Case<I> {
    shape: Attention,
    q: Vec<I>,
    k: Vec<I>,
    v: Vec<I>,
    out: Vec<I>,
    lse: Vec<f32>,
    dout: Vec<I>,
    q_pos: Vec<i32>,
    kv_len: Vec<i32>,
    mask: Option<Vec<i32>>,
}

impl<I: Element> Case<I> {
    /// Queries are the last of their keys; every third row is padding where `padded` says so. Keys behind the last one are
    /// NaN, and so is all of padding that dk and dv may not read.
    fn new(shape: Attention, kv_len: &[i32], padded: bool) -> Case<I> {
        let Attention { batch, queries, keys, q_heads, kv_heads, head_dim: d, value_dim: e, .. } = shape;
        let values = |seed: usize, len: usize| -> Vec<I> {
            (seed..seed + len).map(|seed| I::narrow(number(seed).to_f32())).collect()
        };
        let rows = batch * queries;
        let [q, dout, out] = [(0, d), (100_000, e), (200_000, e)].map(|(seed, n)| values(seed, rows * q_heads * n));
        let [mut k, mut v] = [(300_000, d), (400_000, e)].map(|(seed, n)| values(seed, batch * keys * kv_heads * n));
        for (b, &len) in kv_len.iter().enumerate() {
            let hidden = (b * keys + len as usize) * kv_heads..(b + 1) * keys * kv_heads;
            k[hidden.start * d..hidden.end * d].fill(I::narrow(f32::NAN));
            v[hidden.start * e..hidden.end * e].fill(I::narrow(f32::NAN));
        }
        let position = |i: usize| kv_len[i / queries] + (i % queries) as i32 - queries as i32;
        let q_pos = (0..rows).map(position).collect();
        let mask = padded.then(|| (0..rows).map(|i| (i % 3) as i32).collect());
        // Weights of many magnitudes, some of them above 1.
        let lse = (0..rows * q_heads).map(|i| 0.5 + (i % 7) as f32).collect();
        Case { shape, q, k, v, out, lse, dout, q_pos, kv_len: kv_len.to_vec(), mask }
    }

    fn sees(&self, token: usize, j: usize) -> bool {
        let (b, p, j) = (token / self.shape.queries, i64::from(self.q_pos[token]), j as i64);
        j < i64::from(self.kv_len[b])
            && (!self.shape.causal || j <= p)
            && self.shape.window.is_none_or(|window| j > p - window as i64)
            && self.shape.chunk.is_none_or(|chunk| j >= p.div_euclid(chunk as i64) * chunk as i64)
    }

    /// dq, dk and dv before the last rounding.
    fn page(&self) -> [Vec<f32>; 3] {
        let Attention { batch, queries, keys, q_heads, kv_heads, head_dim: d, value_dim: e, scale, .. } = self.shape;
        let operand = |x: &[I]| {
            let cut = |x: f32| match self.shape.tf32 {
                Tf32::Enabled if x.is_finite() => f32::from_bits((x.to_bits() + 0x1000) & !0x1FFF),
                _ => x,
            };
            x.iter().map(|x| cut(x.widen())).collect::<Vec<f32>>()
        };
        let [q, k, v, dout] = [&self.q, &self.k, &self.v, &self.dout].map(|x| operand(x));
        let out: Vec<f32> = self.out.iter().map(|x| x.widen()).collect();
        let (hi, lo) = (scale as f32, (scale - f64::from(scale as f32)) as f32);
        let chain = |a: &[f32], b: &[f32]| a.iter().zip(b).fold(0f32, |sum, (a, b)| a.mul_add(*b, sum));
        let add = |to: &mut [f32], from: &[f32]| to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
        let step = |sums: &mut [f32], weight: f32, row: &[f32]| {
            sums.iter_mut().zip(row).for_each(|(sum, x)| *sum = weight.mul_add(*x, *sum));
        };
        let mut dq = vec![0f32; batch * queries * q_heads * d];
        let [mut dk, mut dv] = [d, e].map(|n| vec![0f32; batch * keys * kv_heads * n]);
        for (b, head) in (0..batch).flat_map(|b| (0..q_heads).map(move |head| (b, head))) {
            let key = |j: usize| (b * keys + j) * kv_heads + head / (q_heads / kv_heads);
            let [mut of_keys, mut of_values] = [d, e].map(|n| vec![0f32; keys * n]);
            for token in b * queries..(b + 1) * queries {
                let row = token * q_heads + head;
                let (query, gradient, lse) = (&q[row * d..][..d], &dout[row * e..][..e], self.lse[row]);
                let delta = chain(gradient, &out[row * e..][..e]);
                for block in 0..keys.div_ceil(BLOCK) {
                    let mut terms = vec![0f32; d];
                    let of_block = block * BLOCK..keys.min((block + 1) * BLOCK);
                    for j in of_block.filter(|&j| self.sees(token, j)) {
                        let score = chain(query, &k[key(j) * d..][..d]);
                        if score == f32::NEG_INFINITY && self.shape.softcap.is_none() {
                            continue;
                        }
                        let (difference, slope) = match self.shape.softcap {
                            Some(cap) => {
                                let t = tanh(Scalar, score * (scale / cap) as f32);
                                (cap as f32 * t - lse, (-t).mul_add(t, 1.0))
                            }
                            None => (score.mul_add(lo, score.mul_add(hi, -lse)), 1.0),
                        };
                        let p = exp_or_nothing(Scalar, difference);
                        let g = p * (chain(gradient, &v[key(j) * e..][..e]) - delta) * slope;
                        step(&mut terms, g, &k[key(j) * d..][..d]);
                        if self.mask.as_ref().is_none_or(|mask| mask[token] != 0) {
                            step(&mut of_keys[j * d..][..d], g, query);
                            step(&mut of_values[j * e..][..e], p, gradient);
                        }
                    }
                    add(&mut dq[row * d..][..d], &terms);
                }
            }
            for j in 0..keys {
                add(&mut dk[key(j) * d..][..d], &of_keys[j * d..][..d]);
                add(&mut dv[key(j) * e..][..e], &of_values[j * e..][..e]);
            }
        }
        [&mut dq, &mut dk].into_iter().for_each(|sums| sums.iter_mut().for_each(|sum| *sum *= hi));
        [dq, dk, dv]
    }

    fn run<O: Element>(&self, cpu: &Cpu) -> Result<[Vec<u32>; 3], Error> {
        let rows = QueryRows { q_pos: &self.q_pos, kv_len: &self.kv_len, mask: self.mask.as_deref() };
        let given = AttentionOutputs { out: &self.out[..], lse: &self.lse[..], dout: &self.dout };
        let [mut dq, mut dk, mut dv] = [&self.q, &self.k, &self.v].map(|x| vec![O::narrow(7e7); x.len()]);
        let gradients = QkvGradients { dq: &mut dq[..], dk: &mut dk, dv: &mut dv };
        attention_backward(cpu, &self.shape, &rows, Qkv { q: &self.q[..], k: &self.k, v: &self.v }, given, gradients)?;
        Ok([dq, dk, dv].map(|y| bits(&y)))
    }

    /// On all instruction sets of this machine, plans and some numbers of threads.
    fn check<O: Element>(&self) {
        let expected = self.page().map(|sums| bits(&sums.into_iter().map(O::narrow).collect::<Vec<O>>()));
        // A call before leaves NaN in the workspace, also behind the columns of a row.
        let mut before = self.clone();
        before.shape.head_dim = self.shape.head_dim.next_multiple_of(16);
        before.shape.value_dim = self.shape.value_dim.next_multiple_of(16);
        let Attention { batch, queries, keys, q_heads, kv_heads, head_dim, value_dim, .. } = before.shape;
        let (rows, of_keys) = (batch * queries * q_heads, batch * keys * kv_heads);
        [before.q, before.k] = [rows, of_keys].map(|rows| vec![I::narrow(f32::NAN); rows * head_dim]);
        before.v = vec![I::narrow(f32::NAN); of_keys * value_dim];
        [before.out, before.dout] = [(); 2].map(|()| vec![I::narrow(f32::NAN); rows * value_dim]);
        before.mask = None;
        for isa in Isa::of_machine() {
            for threads in [1, 3] {
                on_every_plan(isa, threads, |cpu| {
                    // More columns may have no plan as small as this one.
                    before.run::<O>(cpu).ok();
                    let found = self.run::<O>(cpu)?;
                    let plan = &cpu.ledger().plans()[0];
                    for ((name, found), expected) in ["dq", "dk", "dv"].iter().zip(&found).zip(&expected) {
                        let place = found.iter().zip(expected).position(|(found, expected)| found != expected);
                        assert_eq!(place, None, "{name} {isa} {threads} {:?} {plan}", self.shape);
                    }
                    Ok(())
                });
            }
        }
    }
}

fn shape([batch, queries, keys]: [usize; 3], heads: [usize; 2], [head_dim, value_dim]: [usize; 2]) -> Attention {
    Attention { value_dim, scale: 1.0 / 3.0, ..Attention::causal([batch, queries, keys], heads, head_dim) }
}

/// Two tiles of rows, two blocks of keys, and ends of both; a group, a head by itself, entries with fewer keys or none.
pub(crate) fn gradients_are_plain_on_every_plan() {
    Case::<bf16>::new(shape([2, 99, 40], [2, 1], [20, 5]), &[40, 33], true).check::<f32>();
    Case::<f32>::new(shape([3, 5, 270], [1, 1], [3, 17]), &[270, 0, 258], false).check::<bf16>();
    let not_causal = Attention { causal: false, ..shape([1, 27, 70], [3, 3], [16, 70]) };
    Case::<bf16>::new(not_causal, &[70], true).check::<bf16>();
    for [queries, keys, d, e] in [[0, 5, 4, 4], [5, 0, 4, 4], [5, 6, 0, 4], [5, 6, 4, 0]] {
        Case::<f32>::new(shape([2, queries, keys], [2, 1], [d, e]), &[keys as i32; 2], false).check::<f32>();
    }
}

/// A window, chunks, a softcap, TF32, each where rows see some keys of a block alone.
pub(crate) fn gradients_of_windows_and_caps_are_plain() {
    let window = Attention { window: Some(9), ..shape([1, 40, 300], [2, 1], [4, 4]) };
    let mut case = Case::<bf16>::new(window, &[299], false);
    // Some of the rows between see nothing of what the others see.
    case.q_pos.iter_mut().step_by(4).for_each(|p| *p = 5);
    case.check::<f32>();
    let chunks = Attention { chunk: Some(11), ..shape([1, 40, 300], [2, 1], [4, 4]) };
    let mut case = Case::<bf16>::new(chunks, &[299], false);
    case.q_pos.iter_mut().step_by(4).for_each(|p| *p = 5);
    case.check::<f32>();
    let cap = Attention { softcap: Some(2.5), ..shape([1, 26, 34], [2, 2], [8, 8]) };
    Case::<bf16>::new(cap, &[34], true).check::<f32>();
    let tf32 = Attention { tf32: Tf32::Enabled, ..shape([1, 25, 33], [2, 1], [7, 9]) };
    Case::<f32>::new(tf32, &[33], false).check::<f32>();
}

/// Infinities and NaN, in what tokens see and in what padding has: a score of -inf is as if it were not there, and what is
/// not seen leaves nothing.
pub(crate) fn gradients_beside_infinities_are_plain() {
    for (at, cap) in [(0, None), (1, None), (2, None), (3, None), (1, Some(2.5))] {
        let shape = Attention { softcap: cap, ..shape([1, 29, 90], [2, 1], [5, 6]) };
        let mut case = Case::<f32>::new(shape, &[88], true);
        let (d, e) = (shape.head_dim, shape.value_dim);
        match at {
            // Scores of -inf beside finite ones, and of both infinities.
            0 => case.q[d..2 * d].fill(f32::NEG_INFINITY),
            1 => [64, 70].into_iter().for_each(|j| case.k[j * d] = f32::INFINITY),
            2 => case.v[20 * e] = f32::NEG_INFINITY,
            // In padding alone.
            _ => {
                case.q[..2 * d].fill(f32::NAN);
                case.dout[6 * e..8 * e].fill(f32::NAN);
            }
        }
        case.check::<f32>();
    }
}
