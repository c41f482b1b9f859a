//! Orders of sums: implementations in plain loops that are right but for the order in which they add, which follows the number
//! of rows that are computed together. Held fixed, each order is right.

use crate::plain::values;
use samebits_contract::case::{Answer, Case};
use samebits_contract::round;
use samebits_contract::tensor::DType;
use samebits_harness::implementation::Implementation;
use std::collections::BTreeMap;

/// In which order the terms of a sum are added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// From the first to the last.
    Chain,
    /// From the last to the first.
    Reversed,
    /// As many pieces side by side, each a chain; then these from left to right.
    Parts(usize),
    /// Pieces of so many terms, each a chain; then these from left to right.
    Blocks(usize),
    /// Term i belongs to lane i mod so many; the lanes are folded in halves.
    Lanes(usize),
    /// The same, but the lanes are added from left to right.
    Strided(usize),
    /// Neighbours, then neighbours of these.
    Pairwise,
    /// Pieces of so many terms, one after the other, each added as 32 lanes that are folded.
    Warps(usize),
    /// The last so many terms by themselves, then the two.
    LastApart(usize),
    /// The last so many terms first, then the others.
    TailFirst(usize),
}

impl Order {
    fn sum(self, terms: &[f32]) -> f32 {
        let chain = |terms: &[f32]| terms.iter().fold(0.0f32, |sum, term| sum + term);
        let n = terms.len();
        match self {
            Order::Chain => chain(terms),
            Order::Reversed => terms.iter().rev().fold(0.0, |sum, term| sum + term),
            Order::Parts(parts) => Order::Blocks(n.div_ceil(parts).max(1)).sum(terms),
            Order::Blocks(size) => terms.chunks(size).map(chain).fold(0.0, |sum, part| sum + part),
            Order::Lanes(count) => {
                let mut lanes = lanes(terms, count);
                while lanes.len() > 1 {
                    let high = lanes.split_off(lanes.len().div_ceil(2));
                    lanes.iter_mut().zip(high).for_each(|(low, high)| *low += high);
                }
                lanes[0]
            }
            Order::Strided(count) => chain(&lanes(terms, count)),
            Order::Pairwise => {
                let mut sums = terms.to_vec();
                while sums.len() > 1 {
                    sums = sums.chunks(2).map(chain_of_two).collect();
                }
                sums.first().copied().unwrap_or(0.0)
            }
            Order::Warps(size) => {
                terms.chunks(size).map(|piece| Order::Lanes(32).sum(piece)).fold(0.0, |sum, piece| sum + piece)
            }
            Order::LastApart(size) => {
                let (head, tail) = terms.split_at(n.saturating_sub(size));
                chain(head) + chain(tail)
            }
            Order::TailFirst(size) => {
                let (head, tail) = terms.split_at(n.saturating_sub(size));
                head.iter().fold(chain(tail), |sum, term| sum + term)
            }
        }
    }
}

fn chain_of_two(two: &[f32]) -> f32 {
    two.iter().copied().reduce(|a, b| a + b).expect("a chunk has one")
}

fn lanes(terms: &[f32], count: usize) -> Vec<f32> {
    let mut lanes = vec![0.0f32; count];
    terms.iter().enumerate().for_each(|(i, term)| lanes[i % count] += term);
    lanes
}

/// When the second order is taken: a condition on the number of rows.
#[derive(Clone, Copy, Debug)]
pub enum When {
    /// More rows than this.
    Above(usize),
    /// A number that this divides.
    Multiple(usize),
}

/// An order that follows the number of rows.
#[derive(Clone, Copy, Debug)]
pub struct Follows {
    /// In most batches.
    pub usual: Order,
    /// In the others.
    pub other: Order,
    /// Which these are.
    pub when: When,
}

const fn follows(usual: Order, other: Order, when: When) -> Follows {
    Follows { usual, other, when }
}

/// All of them.
pub const FOLLOWS: &[Follows] = {
    use Order::*;
    use When::*;
    &[
        follows(Chain, Parts(2), Above(2)),
        follows(Chain, Parts(3), Above(2)),
        follows(Chain, Parts(4), Above(2)),
        follows(Chain, Parts(8), Above(2)),
        follows(Chain, Parts(2), Above(32)),
        follows(Chain, Parts(4), Above(16)),
        follows(Chain, Parts(8), Multiple(7)),
        follows(Chain, Reversed, Multiple(7)),
        follows(Chain, Reversed, Above(8)),
        follows(Chain, Blocks(64), Above(3)),
        follows(Chain, Blocks(128), Above(2)),
        follows(Chain, Blocks(256), Above(1)),
        follows(Chain, Lanes(8), Above(2)),
        follows(Chain, Lanes(32), Above(2)),
        follows(Chain, Lanes(32), Above(32)),
        follows(Chain, Lanes(128), Above(4)),
        follows(Chain, Lanes(256), Above(2)),
        follows(Chain, Strided(4), Above(2)),
        follows(Chain, Strided(16), Above(15)),
        follows(Chain, Pairwise, Above(2)),
        follows(Chain, Pairwise, Multiple(8)),
        follows(Chain, Warps(128), Above(2)),
        follows(Chain, Warps(32), Above(7)),
        follows(Chain, LastApart(32), Above(2)),
        follows(Chain, LastApart(100), Multiple(3)),
        follows(Chain, TailFirst(16), Above(2)),
        follows(Chain, TailFirst(100), Above(8)),
        follows(Lanes(8), Lanes(32), Above(2)),
        follows(Lanes(32), Lanes(128), Above(2)),
        follows(Lanes(32), Strided(32), Above(4)),
        follows(Lanes(128), Lanes(256), Above(2)),
        follows(Lanes(256), Pairwise, Above(2)),
        follows(Lanes(256), Warps(256), Above(16)),
        follows(Lanes(256), Parts(2), Above(2)),
        follows(Parts(2), Parts(4), Above(2)),
        follows(Parts(4), Parts(8), Above(8)),
        follows(Parts(3), Parts(4), Multiple(5)),
        follows(Pairwise, Reversed, Above(2)),
        follows(Pairwise, Blocks(64), Above(2)),
        follows(Warps(128), Warps(256), Above(2)),
        follows(Blocks(64), Blocks(128), Above(2)),
        follows(Blocks(32), Parts(4), Above(32)),
    ]
};

impl Follows {
    fn of(&self, rows: usize) -> Order {
        let other = match self.when {
            When::Above(most) => rows > most,
            When::Multiple(of) => rows.is_multiple_of(of),
        };
        if other { self.other } else { self.usual }
    }
}

impl std::fmt::Display for Follows {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "{:?}, {:?} where rows are {:?}", self.usual, self.other, self.when)
    }
}

/// An op in plain loops, with an order of its sums. It answers for one output dtype alone.
pub struct Ordered {
    /// How it adds.
    pub follows: Follows,
    /// The one output dtype that it offers.
    pub out: DType,
}

/// The ops that [`Ordered`] answers.
pub const OPS: [&str; 11] = [
    "gemm",
    "gemm_dx",
    "rms_norm",
    "rms_norm_backward",
    "layer_norm",
    "layer_norm_backward",
    "softmax",
    "softmax_backward",
    "logprob",
    "linear_logprob",
    "attention",
];

impl Implementation for Ordered {
    fn name(&self) -> &str {
        "mutant/order"
    }

    fn version(&self) -> &str {
        env!("CARGO_PKG_VERSION")
    }

    fn run(&self, case: &Case) -> Answer {
        if case.out != self.out {
            return Answer::unsupported(format!("its outputs are {}", self.out));
        }
        answer(case, &self.follows).unwrap_or_else(|| Answer::unsupported("it has no such form"))
    }
}

/// The inputs of a case, widened, and a few of its numbers.
struct Call<'a> {
    case: &'a Case,
}

impl Call<'_> {
    fn input(&self, name: &str) -> Vec<f32> {
        values(&self.case.inputs[name])
    }

    fn shape(&self, name: &str) -> Vec<usize> {
        self.case.inputs[name].shape().to_vec()
    }

    fn number(&self, name: &str, default: f64) -> f64 {
        self.case.params.get(name).map_or(default, |text| text.parse().expect("it is checked"))
    }

    fn answer<const N: usize>(&self, outputs: [(&str, DType, Vec<usize>, Vec<f32>); N]) -> Answer {
        let tensor = |(name, dtype, shape, values): (&str, DType, Vec<usize>, Vec<f32>)| {
            let wide: Vec<f64> = values.into_iter().map(f64::from).collect();
            (name.to_string(), round::tensor(dtype, &shape, &wide))
        };
        Answer::ok("mutant", BTreeMap::from(outputs.map(tensor)))
    }
}

/// One element after the other, by the sums of `follows`; `None` for a form that is not offered.
fn answer(case: &Case, follows: &Follows) -> Option<Answer> {
    let call = Call { case };
    let out = case.out;
    let plain = |known: &[&str]| case.params.keys().all(|name| known.contains(&&name[..]));
    match &case.op[..] {
        "gemm" | "gemm_dx" if plain(&[]) && !case.inputs.contains_key("bias") => {
            let (left, result) = if case.op == "gemm" { ("x", "y") } else { ("dy", "dx") };
            let (x, w, shape) = (call.input(left), call.input("w"), call.shape("w"));
            let (m, k) = (call.shape(left)[0], call.shape(left)[1]);
            let columns = if case.op == "gemm" { shape[0] } else { shape[1] };
            let order = follows.of(m);
            let weight =
                |column: usize, i: usize| if case.op == "gemm" { w[column * k + i] } else { w[i * columns + column] };
            let element = |row: usize, column: usize| {
                let terms: Vec<f32> = (0..k).map(|i| x[row * k + i] * weight(column, i)).collect();
                order.sum(&terms)
            };
            let y = (0..m * columns).map(|at| element(at / columns, at % columns)).collect();
            Some(call.answer([(result, out, vec![m, columns], y)]))
        }
        "rms_norm" if plain(&["eps"]) => {
            let (x, w, n) = (call.input("x"), call.input("w"), call.shape("w")[0]);
            let order = follows.of(x.len() / n);
            let eps = call.number("eps", 1e-6) as f32;
            let row = |x: &[f32]| {
                let r = 1.0 / (order.sum(&squares(x)) / n as f32 + eps).sqrt();
                x.iter().zip(&w).map(|(x, w)| x * r * w).collect::<Vec<_>>()
            };
            Some(call.answer([("y", out, call.shape("x"), x.chunks(n).flat_map(row).collect())]))
        }
        "rms_norm_backward" if plain(&["eps"]) => {
            let (x, w, dy, n) = (call.input("x"), call.input("w"), call.input("dy"), call.shape("w")[0]);
            let order = follows.of(x.len() / n);
            let eps = call.number("eps", 1e-6) as f32;
            let row = |(x, dy): (&[f32], &[f32])| {
                let r = 1.0 / (order.sum(&squares(x)) / n as f32 + eps).sqrt();
                let g: Vec<f32> = dy.iter().zip(&w).map(|(dy, w)| dy * w).collect();
                let c = order.sum(&products(x, &g)) / n as f32 * r * r;
                x.iter().zip(g).map(|(x, g)| r * (g - c * x)).collect::<Vec<_>>()
            };
            Some(call.answer([("dx", out, call.shape("x"), x.chunks(n).zip(dy.chunks(n)).flat_map(row).collect())]))
        }
        "layer_norm" | "layer_norm_backward" if plain(&["eps"]) => {
            let (x, n) = (call.input("x"), *call.shape("x").last()?);
            let given = |name: &str, default: f32| match case.inputs.contains_key(name) {
                true => call.input(name),
                false => vec![default; n],
            };
            // Nothing is added without a bias, not even the +0 that would turn a -0.
            let (w, bias, order) = (given("w", 1.0), given("bias", -0.0), follows.of(x.len() / n));
            let eps = call.number("eps", 1e-5) as f32;
            let normed = |x: &[f32]| {
                let mean = order.sum(x) / n as f32;
                let d: Vec<f32> = x.iter().map(|x| x - mean).collect();
                let r = 1.0 / (order.sum(&squares(&d)) / n as f32 + eps).sqrt();
                (d.into_iter().map(|d| d * r).collect::<Vec<f32>>(), r)
            };
            if case.op == "layer_norm" {
                let row = |x: &[f32]| {
                    let h = normed(x).0;
                    h.iter().zip(&w).zip(&bias).map(|((h, w), bias)| h * w + bias).collect::<Vec<_>>()
                };
                return Some(call.answer([("y", out, call.shape("x"), x.chunks(n).flat_map(row).collect())]));
            }
            let dy = call.input("dy");
            let row = |(x, dy): (&[f32], &[f32])| {
                let (h, r) = normed(x);
                let g: Vec<f32> = dy.iter().zip(&w).map(|(dy, w)| dy * w).collect();
                let (a, b) = (order.sum(&g) / n as f32, order.sum(&products(&h, &g)) / n as f32);
                h.iter().zip(g).map(|(h, g)| r * (g - a - b * h)).collect::<Vec<_>>()
            };
            Some(call.answer([("dx", out, call.shape("x"), x.chunks(n).zip(dy.chunks(n)).flat_map(row).collect())]))
        }
        "softmax" | "softmax_backward" if plain(&[]) => {
            let (x, n) = (call.input("x"), *call.shape("x").last()?);
            let order = follows.of(x.len() / n);
            if case.op == "softmax" {
                let y = x.chunks(n).flat_map(|x| shares(x, order).0).collect();
                return Some(call.answer([("y", out, call.shape("x"), y)]));
            }
            let dy = call.input("dy");
            let row = |(x, dy): (&[f32], &[f32])| {
                let p = shares(x, order).0;
                let dot = order.sum(&products(&p, dy));
                p.iter().zip(dy).map(|(p, dy)| p * (dy - dot)).collect::<Vec<_>>()
            };
            Some(call.answer([("dx", out, call.shape("x"), x.chunks(n).zip(dy.chunks(n)).flat_map(row).collect())]))
        }
        "logprob" | "linear_logprob" if plain(&[]) => {
            let target = case.inputs["target"].as_i32()?.to_vec();
            let order = follows.of(target.len());
            let logits = if case.op == "logprob" {
                call.input("logits")
            } else {
                let (x, w, k) = (call.input("x"), call.input("w"), call.shape("w")[1]);
                let row = |x: &[f32]| w.chunks(k).map(|w| order.sum(&products(x, w))).collect::<Vec<_>>();
                x.chunks(k).flat_map(row).collect()
            };
            let v = logits.len() / target.len();
            let lse: Vec<f32> = logits.chunks(v).map(|x| shares(x, order).1).collect();
            let logprob = |(row, &target): (usize, &i32)| match usize::try_from(target) {
                Ok(target) => logits[row * v + target] - lse[row],
                Err(_) => 0.0,
            };
            let logprob = target.iter().enumerate().map(logprob).collect();
            let shape = vec![target.len()];
            Some(call.answer([("logprob", DType::Fp32, shape.clone(), logprob), ("lse", DType::Fp32, shape, lse)]))
        }
        "attention" if plain(&["scale", "causal"]) => Some(attention(&call, follows)),
        _ => None,
    }
}

fn attention(call: &Call, follows: &Follows) -> Answer {
    let (q, k, v) = (call.input("q"), call.input("k"), call.input("v"));
    let (of_q, of_k, e) = (call.shape("q"), call.shape("k"), call.shape("v")[3]);
    let [b, t, hq, d] = of_q[..] else { unreachable!("it is checked") };
    let (s, hkv) = (of_k[1], of_k[2]);
    let ints = |name: &str| call.case.inputs[name].as_i32().expect("integers").to_vec();
    let (q_pos, kv_len) = (ints("q_pos"), ints("kv_len"));
    let scale = call.number("scale", 1.0 / (d as f64).sqrt()) as f32;
    let causal = call.number("causal", 0.0) == 1.0;
    let order = follows.of(b * t);
    let (mut out, mut levels) = (Vec::new(), Vec::new());
    for row in 0..b * t * hq {
        let (token, head) = (row / hq, row % hq / (hq / hkv));
        let keys: Vec<usize> = (0..kv_len[token / t] as usize)
            .filter(|&j| !causal || j as i32 <= q_pos[token])
            .map(|j| (token / t * s + j) * hkv + head)
            .collect();
        let score = |&at: &usize| order.sum(&products(&q[row * d..][..d], &k[at * d..][..d])) * scale;
        let scores: Vec<f32> = keys.iter().map(score).collect();
        if scores.is_empty() {
            out.extend(vec![0.0; e]);
            levels.push(f32::NEG_INFINITY);
            continue;
        }
        let (_, level, weights, sum) = shares(&scores, order);
        levels.push(level);
        for column in 0..e {
            let terms: Vec<f32> = keys.iter().zip(&weights).map(|(at, weight)| weight * v[at * e + column]).collect();
            out.push(order.sum(&terms) / sum);
        }
    }
    call.answer([("out", call.case.out, vec![b, t, hq, e], out), ("lse", DType::Fp32, vec![b, t, hq], levels)])
}

/// The shares of a row, the logarithm of its sum, its weights and their sum.
fn shares(x: &[f32], order: Order) -> (Vec<f32>, f32, Vec<f32>, f32) {
    let not_a_number = x.iter().any(|x| x.is_nan() || *x == f32::INFINITY);
    let top = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f32> = x.iter().map(|x| f64::from(x - top).exp() as f32).collect();
    let sum = if not_a_number { f32::NAN } else { order.sum(&weights) };
    let level = if top == f32::NEG_INFINITY && !not_a_number { top } else { top + f64::from(sum).ln() as f32 };
    (weights.iter().map(|weight| weight / sum).collect(), level, weights, sum)
}

fn squares(x: &[f32]) -> Vec<f32> {
    products(x, x)
}

fn products(a: &[f32], b: &[f32]) -> Vec<f32> {
    a.iter().zip(b).map(|(a, b)| a * b).collect()
}
