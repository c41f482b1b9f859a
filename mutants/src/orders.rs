//! Orders of sums: implementations in plain loops that are right but for the order in which they add, which follows the number
//! of rows that are computed together. Held fixed, each order is right.

use crate::plain::values;
use samebits_contract::case::{Answer, Case};
use samebits_contract::round;
use samebits_contract::tensor::{DType, Tensor};
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
    /// The same over the terms from the last to the first: a step of an ulp or two in a sum that is as exact as the other.
    LanesBack(usize),
    /// As [`Order::Lanes`], but the lanes are added from left to right.
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

/// What sums add: a number, or the numbers of several sums side by side.
trait Term: Copy + Default {
    fn plus(self, other: Self) -> Self;
}

impl Term for f32 {
    #[inline(always)]
    fn plus(self, other: f32) -> f32 {
        self + other
    }
}

/// How many sums stand side by side: a chain waits for each addition, so that as many cost what one does.
const SIDE_BY_SIDE: usize = 16;

impl Term for [f32; SIDE_BY_SIDE] {
    // Loops over places become vectors in every profile.
    #[inline(always)]
    fn plus(mut self, other: Self) -> Self {
        for (i, sum) in self.iter_mut().enumerate() {
            *sum += other[i];
        }
        self
    }
}

/// The first numbers of a column of a tile; zeros where there are fewer.
fn side_by_side(values: &[f32]) -> [f32; SIDE_BY_SIDE] {
    std::array::from_fn(|i| values.get(i).copied().unwrap_or(0.0))
}

fn chain<T: Term>(terms: &[T]) -> T {
    let mut sum = T::default();
    for term in terms {
        sum = sum.plus(*term);
    }
    sum
}

impl Order {
    fn sum<T: Term>(self, terms: &[T]) -> T {
        let n = terms.len();
        match self {
            Order::Chain => chain(terms),
            Order::Reversed => terms.iter().rev().fold(T::default(), |sum, term| sum.plus(*term)),
            Order::Parts(parts) => Order::Blocks(n.div_ceil(parts).max(1)).sum(terms),
            Order::Blocks(size) => terms.chunks(size).map(chain).fold(T::default(), T::plus),
            Order::Lanes(count) => folded(lanes(terms.iter(), count)),
            Order::LanesBack(count) => folded(lanes(terms.iter().rev(), count)),
            Order::Strided(count) => chain(&lanes(terms.iter(), count)),
            Order::Pairwise => {
                let mut sums = terms.to_vec();
                let mut count = n;
                while count > 1 {
                    for i in 0..count / 2 {
                        sums[i] = sums[2 * i].plus(sums[2 * i + 1]);
                    }
                    if count % 2 == 1 {
                        sums[count / 2] = sums[count - 1];
                    }
                    count = count.div_ceil(2);
                }
                sums.first().copied().unwrap_or_default()
            }
            Order::Warps(size) => {
                terms.chunks(size).map(|piece| Order::Lanes(32).sum(piece)).fold(T::default(), T::plus)
            }
            Order::LastApart(size) => {
                let (head, tail) = terms.split_at(n.saturating_sub(size));
                chain(head).plus(chain(tail))
            }
            Order::TailFirst(size) => {
                let (head, tail) = terms.split_at(n.saturating_sub(size));
                head.iter().fold(chain(tail), |sum: T, term| sum.plus(*term))
            }
        }
    }
}

fn lanes<'a, T: Term + 'a>(terms: impl Iterator<Item = &'a T>, count: usize) -> Vec<T> {
    let mut lanes = vec![T::default(); count];
    let mut lane = 0;
    for term in terms {
        lanes[lane] = lanes[lane].plus(*term);
        lane = if lane + 1 == count { 0 } else { lane + 1 };
    }
    lanes
}

/// The upper half onto the lower one, until one is left.
fn folded<T: Term>(mut lanes: Vec<T>) -> T {
    while lanes.len() > 1 {
        let high = lanes.split_off(lanes.len().div_ceil(2));
        lanes.iter_mut().zip(high).for_each(|(low, high)| *low = low.plus(high));
    }
    lanes[0]
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
        follows(Lanes(32), LanesBack(32), Above(2)),
        follows(Lanes(64), LanesBack(64), Above(2)),
        follows(Lanes(128), LanesBack(128), Above(8)),
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
    /// Which of its sums follows the rows, by the name that `answer` gives it; the others keep the usual order. All do where
    /// it is `None`.
    pub only: Option<&'static str>,
    /// The one output dtype that it offers.
    pub out: DType,
}

/// The ops that [`Ordered`] answers.
pub const OPS: [&str; 35] = [
    "gemm",
    "gemm_dx",
    "gemm_dw",
    "rms_norm",
    "rms_norm_backward",
    "rms_norm_dw",
    "add_rms_norm",
    "add_rms_norm_backward",
    "layer_norm",
    "layer_norm_backward",
    "layer_norm_dw",
    "group_norm",
    "conv",
    "conv_dx",
    "norm_rope",
    "norm_rope_backward",
    "norm_rope_dw",
    "softmax",
    "softmax_backward",
    "attention",
    "attention_backward",
    "logprob",
    "linear_logprob",
    "linear_logprob_backward",
    "entropy",
    "combine",
    "combine_backward",
    "sigmoid_mul_backward",
    "token_sum",
    "embedding_dw",
    "square_sum",
    "nll",
    "policy_loss",
    "group_advantage",
    "causal_conv1d_dw",
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
        answer(&Call { case, follows: self.follows, only: self.only })
            .unwrap_or_else(|| Answer::unsupported("it has no such form"))
    }
}

/// A case, and how it is added.
struct Call<'a> {
    case: &'a Case,
    follows: Follows,
    only: Option<&'static str>,
}

impl Call<'_> {
    /// The order of the sum called `sum` where so many rows are computed together.
    fn order(&self, sum: &str, rows: usize) -> Order {
        if self.only.is_none_or(|only| only == sum) { self.follows.of(rows) } else { self.follows.usual }
    }

    fn input(&self, name: &str) -> Vec<f32> {
        values(&self.case.inputs[name])
    }

    fn optional(&self, name: &str) -> Option<Vec<f32>> {
        self.case.inputs.get(name).map(values)
    }

    fn shape(&self, name: &str) -> Vec<usize> {
        self.case.inputs[name].shape().to_vec()
    }

    fn ints(&self, name: &str) -> Vec<i32> {
        self.case.inputs[name].as_i32().expect("integers").to_vec()
    }

    fn number(&self, name: &str, default: f64) -> f64 {
        self.case.params.get(name).map_or(default, |text| text.parse().expect("it is checked"))
    }

    /// Whether it has no parameters but these.
    fn knows(&self, params: &[&str]) -> bool {
        self.case.params.keys().all(|name| params.contains(&&name[..]))
    }

    /// The numbers of the rows of a `mask` that count.
    fn counted(&self, rows: usize) -> Vec<usize> {
        let mask = self.case.inputs.get("mask").and_then(Tensor::as_i32);
        (0..rows).filter(|row| mask.is_none_or(|mask| mask[row * mask.len() / rows] != 0)).collect()
    }

    /// Answers with these outputs, those of no dtype of their own in that of the case.
    fn answer<const N: usize>(&self, outputs: [(&str, DType, Vec<usize>, Vec<f32>); N]) -> Answer {
        let tensor = |(name, dtype, shape, values): (&str, DType, Vec<usize>, Vec<f32>)| {
            let wide: Vec<f64> = values.into_iter().map(f64::from).collect();
            (name.to_string(), round::tensor(dtype, &shape, &wide))
        };
        Answer::ok("mutant", BTreeMap::from(outputs.map(tensor)))
    }

    /// Answers with one output in the dtype of the case.
    fn one(&self, name: &str, shape: Vec<usize>, values: Vec<f32>) -> Answer {
        self.answer([(name, self.case.out, shape, values)])
    }

    /// A sum over tokens for each of `places` rows of an output of width `n`, from `carry` on: of the terms of the tokens that
    /// `of` their number, of those that count, and their row sends there.
    fn token_sums(&self, places: usize, n: usize, terms: &[f32], of: impl Fn(usize, usize) -> usize) -> Vec<f32> {
        let (order, carry) = (self.order("tokens", terms.len() / n), self.optional("carry"));
        // The rows of each place.
        let mut added = vec![Vec::new(); places];
        if let Some(carry) = &carry {
            added.iter_mut().zip(carry.chunks(n)).for_each(|(rows, carry)| rows.push(carry));
        }
        for (number, row) in self.counted(terms.len() / n).into_iter().enumerate() {
            added[of(number, row)].push(&terms[row * n..][..n]);
        }
        let sums = added.iter().flat_map(|rows| {
            (0..n).step_by(SIDE_BY_SIDE).flat_map(move |first| {
                let terms: Vec<_> = rows.iter().map(|row| side_by_side(&row[first..])).collect();
                order.sum(&terms).into_iter().take(n - first)
            })
        });
        sums.collect()
    }

    /// Answers with 64 sums over rows, `heads` of each token, behind those of the first `token_offset` tokens.
    fn vector_sums(&self, name: &str, n: usize, heads: usize, terms: &[f32]) -> Answer {
        let first = self.number("token_offset", 0.0) as usize * heads;
        let sums = self.token_sums(64, n, terms, |number, _| (first + number) % 64);
        self.answer([(name, DType::Fp32, vec![64, n], sums)])
    }
}

/// One element after the other, each sum in its order; `None` for a form that is not offered.
fn answer(call: &Call) -> Option<Answer> {
    let case = call.case;
    let bare = call.knows(&[]);
    let answer = match &case.op[..] {
        "gemm" | "gemm_dx" if bare => gemm(call),
        // One window on all of an image is a row, as are channels of one place.
        "conv" if bare && call.shape("w")[2..] == call.shape("x")[2..] => gemm(call),
        "conv_dx" if bare && [call.shape("w"), call.shape("dy")].iter().all(|shape| shape[2..] == [1; 3]) => gemm(call),
        "gemm_dw" if bare => {
            let (x, dy, n, k) = (call.input("x"), call.input("dy"), call.shape("dy")[1], call.shape("x")[1]);
            let products = x.chunks(k).zip(dy.chunks(n));
            let terms: Vec<f32> =
                products.flat_map(|(x, dy)| dy.iter().flat_map(|dy| x.iter().map(move |x| x * dy))).collect();
            let dw = call.token_sums(1, n * k, &terms, |_, _| 0);
            call.answer([("dw", DType::Fp32, vec![n, k], dw)])
        }
        "rms_norm"
        | "add_rms_norm"
        | "norm_rope"
        | "rms_norm_backward"
        | "add_rms_norm_backward"
        | "norm_rope_backward"
        | "rms_norm_dw"
        | "norm_rope_dw"
            if call.knows(&["eps", "theta", "token_offset"]) && !case.inputs.contains_key("dsum") =>
        {
            rms_norm(call)
        }
        "group_norm" if call.knows(&["eps"]) && call.shape("x")[2] == 1 => layer_norm(call),
        "layer_norm" | "layer_norm_backward" | "layer_norm_dw" if call.knows(&["eps", "token_offset"]) => {
            layer_norm(call)
        }
        "softmax" | "softmax_backward" if bare => {
            let (x, n) = (call.input("x"), *call.shape("x").last()?);
            let (weights, products) = (call.order("weights", x.len() / n), call.order("products", x.len() / n));
            if case.op == "softmax" {
                return Some(call.one("y", call.shape("x"), x.chunks(n).flat_map(|x| shares(x, weights).0).collect()));
            }
            let dy = call.input("dy");
            let row = |(x, dy): (&[f32], &[f32])| {
                let p = shares(x, weights).0;
                let dot = products.sum(&times(&p, dy));
                p.iter().zip(dy).map(|(p, dy)| p * (dy - dot)).collect::<Vec<_>>()
            };
            call.one("dx", call.shape("x"), x.chunks(n).zip(dy.chunks(n)).flat_map(row).collect())
        }
        "logprob" | "linear_logprob" if bare => {
            let target = call.ints("target");
            let order = call.order("weights", target.len());
            let logits = if case.op == "logprob" { call.input("logits") } else { linear_logits(call) };
            let v = logits.len() / target.len();
            let lse: Vec<f32> = logits.chunks(v).map(|x| shares(x, order).1).collect();
            let logprob = |(row, &target): (usize, &i32)| match usize::try_from(target) {
                Ok(target) => logits[row * v + target] - lse[row],
                Err(_) => 0.0,
            };
            let logprob = target.iter().enumerate().map(logprob).collect();
            let shape = vec![target.len()];
            call.answer([("logprob", DType::Fp32, shape.clone(), logprob), ("lse", DType::Fp32, shape, lse)])
        }
        "linear_logprob_backward" if bare => linear_logprob_backward(call),
        "entropy" if bare => {
            let (logits, shape) = (call.input("logits"), call.shape("logits"));
            let [of_weights, of_distances] = ["weights", "distances"].map(|sum| call.order(sum, shape[0]));
            let (mut entropy, mut levels) = (Vec::new(), Vec::new());
            for row in logits.chunks(shape[1]) {
                let (_, level, weights, sum) = shares(row, of_weights);
                let top = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let distances =
                    row.iter().zip(&weights).map(|(x, weight)| if *weight == 0.0 { 0.0 } else { weight * (top - x) });
                let distance = of_distances.sum(&distances.collect::<Vec<_>>());
                entropy.push((f64::from(sum).ln() + f64::from(distance) / f64::from(sum)) as f32);
                levels.push(level);
            }
            let shape = vec![shape[0]];
            call.answer([("entropy", DType::Fp32, shape.clone(), entropy), ("lse", DType::Fp32, shape, levels)])
        }
        "attention" if call.knows(&["scale", "causal"]) => attention(call),
        "attention_backward" if call.knows(&["scale", "causal"]) => attention_backward(call),
        "combine" | "combine_backward" if bare && !case.inputs.contains_key("shared") => combine(call),
        "sigmoid_mul_backward" => {
            let [gate, x, dy] = ["gate", "x", "dy"].map(|name| call.input(name));
            let (shape, of_gates) = (call.shape("x"), call.shape("gate"));
            let (order, each) = (call.order("products", shape[0]), shape[1] / of_gates[1]);
            let s: Vec<f32> = gate.iter().map(|gate| 1.0 / (1.0 + (-gate).exp())).collect();
            let of_gate = |(i, s): (usize, &f32)| {
                order.sum(&times(&x[i * each..][..each], &dy[i * each..][..each])) * (s * (1.0 - s))
            };
            let dgate = s.iter().enumerate().map(of_gate).collect();
            let dx = dy.iter().enumerate().map(|(i, dy)| s[i / each] * dy).collect();
            call.answer([("dgate", case.out, of_gates, dgate), ("dx", case.out, shape, dx)])
        }
        "token_sum" if call.knows(&["token_offset"]) => {
            call.vector_sums("sum", call.shape("x")[1], 1, &call.input("x"))
        }
        "causal_conv1d_dw" if call.knows(&["token_offset"]) => {
            let (x, dy, state, shape) = (call.input("x"), call.input("dy"), call.optional("state"), call.shape("x"));
            let (taps, [t, c]) = (call.shape("carry")[2], [shape[1], shape[2]]);
            let row = |b: usize, row: usize, channel: usize| match (row.checked_sub(taps - 1), &state) {
                (Some(row), _) => x[(b * t + row) * c + channel],
                (None, Some(state)) => state[(b * (taps - 1) + row) * c + channel],
                (None, None) => 0.0,
            };
            let term = |i: usize| {
                let (token, channel, j) = (i / taps / c, i / taps % c, i % taps);
                dy[token * c + channel] * row(token / t, token % t + j, channel)
            };
            let terms: Vec<f32> = (0..x.len() * taps).map(term).collect();
            let first = call.number("token_offset", 0.0) as usize;
            let dw = call.token_sums(64, c * taps, &terms, |number, _| (first + number) % 64);
            call.answer([("dw", DType::Fp32, vec![64, c, taps], dw)])
        }
        "embedding_dw" => {
            let (tokens, of_dw) = (call.ints("tokens"), call.shape("carry"));
            let dw = call.token_sums(of_dw[0], of_dw[1], &call.input("dy"), |_, row| tokens[row] as usize);
            call.answer([("dw", DType::Fp32, of_dw, dw)])
        }
        "square_sum" => {
            let (x, shape) = (call.input("x"), call.shape("x"));
            let order = call.order("squares", shape[0]);
            let sums = x.chunks(shape[1]).map(|row| order.sum(&squares(row))).collect();
            call.answer([("sum", DType::Fp32, vec![shape[0]], sums)])
        }
        "nll" | "policy_loss" if call.knows(&["denominator", "low", "high"]) => losses(call),
        "group_advantage" if call.knows(&["eps"]) => {
            let (reward, shape) = (call.input("reward"), call.shape("reward"));
            let [of_mean, of_squares] = ["mean", "squares"].map(|sum| call.order(sum, shape[0]));
            let (s, eps) = (shape[1] as f32, call.number("eps", 1e-6) as f32);
            let of_prompt = |reward: &[f32]| {
                let mean = of_mean.sum(reward) / s;
                let d: Vec<f32> = reward.iter().map(|reward| reward - mean).collect();
                let deviation = (of_squares.sum(&squares(&d)) / s).sqrt() + eps;
                d.into_iter().map(|d| d / deviation).collect::<Vec<_>>()
            };
            call.one("advantage", shape, reward.chunks(s as usize).flat_map(of_prompt).collect())
        }
        _ => return None,
    };
    Some(answer)
}

/// The sums of `nll` and `policy_loss` by sequence, and the gradients of tokens.
fn losses(call: &Call) -> Answer {
    let (logprob, count, shape) = (call.input("logprob"), call.ints("count"), call.shape("logprob"));
    let (old, advantage) = (call.optional("old_logprob"), call.optional("advantage"));
    let [low, high] = [1.0 - call.number("low", 0.2), 1.0 + call.number("high", 0.2)].map(|end| end as f32);
    let denominator = call.number("denominator", 1.0) as f32;
    let token = |i: usize| match (&old, &advantage) {
        (Some(old), Some(advantage)) => {
            let (ratio, advantage) = (f64::from(logprob[i] - old[i]).exp() as f32, advantage[i / shape[1]]);
            let (u, v) = (ratio * advantage, ratio.clamp(low, high) * advantage);
            if v < u { (-v, 0.0) } else { (-u, -u) }
        }
        _ => (-logprob[i], -1.0),
    };
    let order = call.order("tokens", shape[0]);
    let (mut sums, mut slopes) = (Vec::new(), vec![0.0; logprob.len()]);
    for sequence in 0..shape[0] {
        let counted = (sequence * shape[1]..(sequence + 1) * shape[1]).filter(|&i| count[i] != 0);
        let terms = counted.map(|i| {
            let (value, slope) = token(i);
            slopes[i] = slope / denominator;
            value
        });
        sums.push(order.sum(&terms.collect::<Vec<_>>()));
    }
    call.answer([("per_sequence", DType::Fp32, vec![shape[0]], sums), ("dlogprob", DType::Fp32, shape, slopes)])
}

fn gemm(call: &Call) -> Answer {
    let forward = ["gemm", "conv"].contains(&&call.case.op[..]);
    let (left, result) = if forward { ("x", "y") } else { ("dy", "dx") };
    let (x, w, shape) = (call.input(left), call.input("w"), call.shape("w"));
    let rows = call.shape(left);
    let (m, k) = (rows[0], rows[1..].iter().product());
    let columns = if forward { shape[0] } else { shape[1] };
    let order = call.order("products", m);
    let weight = |column: usize, i: usize| if forward { w[column * k + i] } else { w[i * columns + column] };
    let mut y = products(&x, [m, columns, k], order, weight);
    if call.case.inputs.contains_key("bias") {
        let bias = call.input("bias");
        y.iter_mut().zip(bias.iter().cycle()).for_each(|(y, bias)| *y += bias);
    }
    call.one(result, [vec![m, columns], vec![1; rows.len() - 2]].concat(), y)
}

/// `y[m,n]`, the sums over i of `x[row,i] * w(column, i)`.
fn products(x: &[f32], [m, n, k]: [usize; 3], order: Order, w: impl Fn(usize, usize) -> f32) -> Vec<f32> {
    let mut y = vec![0.0; m * n];
    for first in (0..n).step_by(SIDE_BY_SIDE) {
        let count = SIDE_BY_SIDE.min(n - first);
        let tile: Vec<[f32; SIDE_BY_SIDE]> =
            (0..k).map(|i| std::array::from_fn(|c| if c < count { w(first + c, i) } else { 0.0 })).collect();
        let mut terms = Vec::with_capacity(k);
        for row in 0..m {
            terms.clear();
            for (i, x) in x[row * k..][..k].iter().enumerate() {
                let mut products = tile[i];
                for product in &mut products {
                    *product *= x;
                }
                terms.push(products);
            }
            y[row * n + first..][..count].copy_from_slice(&order.sum(&terms)[..count]);
        }
    }
    y
}

/// `rms_norm`, alone, after `add`, before `rope`; their gradients, and those of their weights.
fn rms_norm(call: &Call) -> Answer {
    let (op, eps) = (&call.case.op[..], call.number("eps", 1e-6) as f32);
    let rotated = op.starts_with("norm_rope");
    let read = if op == "add_rms_norm_backward" { "sum" } else { "x" };
    let (mut x, shape) = (call.input(read), call.shape(read));
    let n = shape[shape.len() - 1];
    let rows = shape[0];
    let (of_squares, of_products) = (call.order("squares", rows), call.order("products", rows));
    let root = |x: &[f32]| 1.0 / (of_squares.sum(&squares(x)) / n as f32 + eps).sqrt();
    if let Some(residual) = call.optional("residual") {
        let sum: Vec<f32> = x.iter().zip(residual).map(|(x, residual)| x + residual).collect();
        // What is normalised is what is stored.
        x = sum.iter().map(|&sum| round::round(f64::from(sum), call.case.out) as f32).collect();
        let y = normalised(&x, &call.input("w"), root);
        return call.answer([("sum", call.case.out, shape.clone(), sum), ("y", call.case.out, shape, y)]);
    }
    let Some(mut dy) = call.optional("dy") else {
        let mut y = normalised(&x, &call.input("w"), root);
        if rotated {
            rotate(call, &mut y, 1.0);
        }
        return call.one("y", shape, y);
    };
    if rotated {
        rotate(call, &mut dy, -1.0);
    }
    if op.ends_with("_dw") {
        let h = normalised(&x, &vec![1.0; n], root);
        return call.vector_sums("dw", n, x.len() / n / rows, &times(&h, &dy));
    }
    let w = call.input("w");
    let row = |(x, dy): (&[f32], &[f32])| {
        let r = root(x);
        let g = times(dy, &w);
        let c = of_products.sum(&times(x, &g)) / n as f32 * r * r;
        x.iter().zip(g).map(|(x, g)| r * (g - c * x)).collect::<Vec<_>>()
    };
    call.one("dx", shape, x.chunks(n).zip(dy.chunks(n)).flat_map(row).collect())
}

fn normalised(x: &[f32], w: &[f32], root: impl Fn(&[f32]) -> f32) -> Vec<f32> {
    let row = |x: &[f32]| {
        let r = root(x);
        x.iter().zip(w).map(|(x, w)| x * r * w).collect::<Vec<_>>()
    };
    x.chunks(w.len()).flat_map(row).collect()
}

/// Turns the heads `x[T,H,D]`, i with i + D/2, by their positions times `sign`.
fn rotate(call: &Call, x: &mut [f32], sign: f64) {
    let (shape, theta) = (call.shape("x"), call.number("theta", 10000.0));
    let (heads, d) = (shape[1], shape[2]);
    for (token, pos) in call.ints("pos").into_iter().enumerate() {
        for i in 0..d / 2 {
            // The angle is one of f32.
            let angle = f64::from(pos as f32 * theta.powf(-2.0 * i as f64 / d as f64) as f32);
            let (cos, sin) = (angle.cos() as f32, (sign * angle.sin()) as f32);
            for head in x[token * heads * d..][..heads * d].chunks_mut(d) {
                let (a, b) = (head[i], head[i + d / 2]);
                (head[i], head[i + d / 2]) = (a * cos - b * sin, b * cos + a * sin);
            }
        }
    }
}

fn layer_norm(call: &Call) -> Answer {
    let (case, x, n) = (call.case, call.input("x"), call.shape("x")[1..].iter().product());
    // Nothing is added without a bias, not even the +0 that would turn a -0.
    let given = |name: &str, default: f32| call.optional(name).unwrap_or(vec![default; n]);
    let (w, bias, eps) = (given("w", 1.0), given("bias", -0.0), call.number("eps", 1e-5) as f32);
    let order = |sum: &str| call.order(sum, x.len() / n);
    let (of_mean, of_squares) = (order("mean"), order("squares"));
    let normed = |x: &[f32]| {
        let mean = of_mean.sum(x) / n as f32;
        let d: Vec<f32> = x.iter().map(|x| x - mean).collect();
        let r = 1.0 / (of_squares.sum(&squares(&d)) / n as f32 + eps).sqrt();
        (d.into_iter().map(|d| d * r).collect::<Vec<f32>>(), r)
    };
    let Some(dy) = call.optional("dy") else {
        let row = |x: &[f32]| {
            let h = normed(x).0;
            h.iter().zip(&w).zip(&bias).map(|((h, w), bias)| h * w + bias).collect::<Vec<_>>()
        };
        return call.one("y", call.shape("x"), x.chunks(n).flat_map(row).collect());
    };
    if case.op == "layer_norm_dw" {
        let h: Vec<f32> = x.chunks(n).flat_map(|x| normed(x).0).collect();
        return call.vector_sums("dw", n, 1, &times(&h, &dy));
    }
    let (of_gradients, of_products) = (order("gradients"), order("products"));
    let row = |(x, dy): (&[f32], &[f32])| {
        let (h, r) = normed(x);
        let g = times(dy, &w);
        let (a, b) = (of_gradients.sum(&g) / n as f32, of_products.sum(&times(&h, &g)) / n as f32);
        h.iter().zip(g).map(|(h, g)| r * (g - a - b * h)).collect::<Vec<_>>()
    };
    call.one("dx", call.shape("x"), x.chunks(n).zip(dy.chunks(n)).flat_map(row).collect())
}

/// The logits of `linear_logprob`.
fn linear_logits(call: &Call) -> Vec<f32> {
    let (x, w, k) = (call.input("x"), call.input("w"), call.shape("w")[1]);
    let order = call.order("products", x.len() / k);
    products(&x, [x.len() / k, w.len() / k, k], order, |column, i| w[column * k + i])
}

fn linear_logprob_backward(call: &Call) -> Answer {
    let (x, w, of_w) = (call.input("x"), call.input("w"), call.shape("w"));
    let (v, k, target) = (of_w[0], of_w[1], call.ints("target"));
    let (lse, dlogprob, dlse) = (call.input("lse"), call.input("dlogprob"), call.optional("dlse"));
    let dtype = call.case.inputs["x"].dtype();
    let mut dz = linear_logits(call);
    for (row, dz) in dz.chunks_mut(v).enumerate() {
        let own = if target[row] < 0 { 0.0 } else { dlogprob[row] };
        let c = dlse.as_ref().map_or(0.0, |dlse| dlse[row]) - own;
        for (j, z) in dz.iter_mut().enumerate() {
            let g = f64::from(*z - lse[row]).exp() as f32 * c;
            let g = if target[row] == j as i32 { g + own } else { g };
            *z = round::round(f64::from(g), dtype) as f32;
        }
    }
    let order = call.order("vocabulary", target.len());
    let dx = products(&dz, [target.len(), k, v], order, |column, j| w[j * k + column]);
    let pairs = dz.chunks(v).zip(x.chunks(k));
    let terms: Vec<f32> = pairs.flat_map(|(dz, x)| dz.iter().flat_map(|dz| x.iter().map(move |x| dz * x))).collect();
    let dw = call.token_sums(1, v * k, &terms, |_, _| 0);
    call.answer([("dx", call.case.out, call.shape("x"), dx), ("dw", DType::Fp32, of_w, dw)])
}

fn combine(call: &Call) -> Answer {
    let (x, weight, row, n) = (call.input("x"), call.input("weight"), call.ints("row"), call.shape("x")[1]);
    let (t, k) = (call.shape("row")[0], call.shape("row")[1]);
    let place = |token: usize, choice: usize| row[token * k + choice] as usize * n;
    if call.case.op == "combine" {
        let order = call.order("experts", t);
        let element = |token: usize, column: usize| {
            order.sum(&(0..k).map(|i| weight[token * k + i] * x[place(token, i) + column]).collect::<Vec<_>>())
        };
        return call.one("y", vec![t, n], (0..t * n).map(|at| element(at / n, at % n)).collect());
    }
    let (dy, order) = (call.input("dy"), call.order("products", t));
    let (mut dx, mut dweight) = (vec![0.0; x.len()], Vec::new());
    for (at, weight) in weight.iter().enumerate() {
        let (from, dy) = (place(at / k, at % k), &dy[at / k * n..][..n]);
        dx[from..][..n].iter_mut().zip(dy).for_each(|(dx, dy)| *dx = weight * dy);
        dweight.push(order.sum(&times(&x[from..][..n], dy)));
    }
    call.answer([("dx", call.case.out, call.shape("x"), dx), ("dweight", DType::Fp32, vec![t, k], dweight)])
}

/// Queries and keys, and which of these a row sees.
struct Heads {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    /// Extents of q, and D and E.
    rows: [usize; 3],
    dims: [usize; 2],
    /// Places of keys of a head that each row sees.
    seen: Vec<Vec<usize>>,
    scale: f32,
}

impl Heads {
    fn of(call: &Call) -> Heads {
        let (of_q, of_k, e) = (call.shape("q"), call.shape("k"), call.shape("v")[3]);
        let [b, t, hq, d] = of_q[..] else { unreachable!("it is checked") };
        let (s, hkv) = (of_k[1], of_k[2]);
        let (q_pos, kv_len) = (call.ints("q_pos"), call.ints("kv_len"));
        let causal = call.number("causal", 0.0) == 1.0;
        let keys = |row: usize| {
            let (token, head) = (row / hq, row % hq / (hq / hkv));
            let seen = (0..kv_len[token / t] as usize).filter(|&j| !causal || j as i32 <= q_pos[token]);
            seen.map(|j| (token / t * s + j) * hkv + head).collect()
        };
        Heads {
            q: call.input("q"),
            k: call.input("k"),
            v: call.input("v"),
            rows: [b, t, hq],
            dims: [d, e],
            seen: (0..b * t * hq).map(keys).collect(),
            scale: call.number("scale", 1.0 / (d as f64).sqrt()) as f32,
        }
    }

    /// How many queries there are.
    fn queries(&self) -> usize {
        self.rows[0] * self.rows[1]
    }

    fn scores(&self, row: usize, order: Order) -> Vec<f32> {
        let d = self.dims[0];
        self.seen[row]
            .iter()
            .map(|&at| order.sum(&times(&self.q[row * d..][..d], &self.k[at * d..][..d])) * self.scale)
            .collect()
    }
}

fn attention(call: &Call) -> Answer {
    let heads = Heads::of(call);
    let ([b, t, hq], [_, e]) = (heads.rows, heads.dims);
    let [of_scores, of_weights, of_values] =
        ["scores", "weights", "values"].map(|sum| call.order(sum, heads.queries()));
    let (mut out, mut levels) = (Vec::new(), Vec::new());
    for (row, keys) in heads.seen.iter().enumerate() {
        if keys.is_empty() {
            out.extend(vec![0.0; e]);
            levels.push(f32::NEG_INFINITY);
            continue;
        }
        let (_, level, weights, sum) = shares(&heads.scores(row, of_scores), of_weights);
        levels.push(level);
        let mixed = products(&weights, [1, e, keys.len()], of_values, |column, i| heads.v[keys[i] * e + column]);
        out.extend(mixed.iter().map(|mixed| mixed / sum));
    }
    call.answer([("out", call.case.out, vec![b, t, hq, e], out), ("lse", DType::Fp32, vec![b, t, hq], levels)])
}

fn attention_backward(call: &Call) -> Answer {
    let heads = Heads::of(call);
    let [d, e] = heads.dims;
    let (out, dout, lse) = (call.input("out"), call.input("dout"), call.input("lse"));
    let [of_scores, of_products, of_keys, of_queries] =
        ["scores", "products", "keys", "queries"].map(|sum| call.order(sum, heads.rows[0]));
    let mut dq = Vec::with_capacity(heads.q.len());
    let counted = call.counted(heads.seen.len());
    // Of each key the rows that see it, and its g and p there.
    let mut seen_by: Vec<Vec<(usize, [f32; 2])>> = vec![Vec::new(); heads.k.len() / d];
    for (row, keys) in heads.seen.iter().enumerate() {
        let (dout, out) = (&dout[row * e..][..e], &out[row * e..][..e]);
        let delta = of_products.sum(&times(dout, out));
        let mut gs = Vec::with_capacity(keys.len());
        for (&at, score) in keys.iter().zip(heads.scores(row, of_scores)) {
            let p = f64::from(score - lse[row]).exp() as f32;
            let g = p * (of_products.sum(&times(dout, &heads.v[at * e..][..e])) - delta);
            gs.push(g);
            // Padding asks for nothing of a key.
            if counted.binary_search(&row).is_ok() {
                seen_by[at].push((row, [g, p]));
            }
        }
        let sums = products(&gs, [1, d, keys.len()], of_keys, |column, i| heads.k[keys[i] * d + column]);
        dq.extend(sums.iter().map(|sum| sum * heads.scale));
    }
    let (mut dk, mut dv) = (Vec::with_capacity(heads.k.len()), Vec::with_capacity(heads.v.len()));
    for rows in &seen_by {
        let [gs, ps] = [0, 1].map(|i| rows.iter().map(|(_, of)| of[i]).collect::<Vec<f32>>());
        let sums = products(&gs, [1, d, rows.len()], of_queries, |column, i| heads.q[rows[i].0 * d + column]);
        dk.extend(sums.iter().map(|sum| sum * heads.scale));
        dv.extend(products(&ps, [1, e, rows.len()], of_queries, |column, i| dout[rows[i].0 * e + column]));
    }
    let dtype = call.case.out;
    call.answer([
        ("dq", dtype, call.shape("q"), dq),
        ("dk", dtype, call.shape("k"), dk),
        ("dv", dtype, call.shape("v"), dv),
    ])
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
    times(x, x)
}

fn times(a: &[f32], b: &[f32]) -> Vec<f32> {
    a.iter().zip(b).map(|(a, b)| a * b).collect()
}
