//! Sections 2 and 3 of NUMERICS.md in the plainest loops: what a mutant computes by itself is right but for its mutation.

use samebits_contract::case::{Answer, Case};
use samebits_contract::round;
use samebits_contract::tensor::{DType, Tensor};
use std::collections::BTreeMap;

/// The elements of a tensor, widened.
pub fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.to_f64().into_iter().map(|value| value as f32).collect()
}

/// The answer of one output `name`.
pub fn answer(name: &str, tensor: Tensor) -> Answer {
    Answer::ok("mutant", BTreeMap::from([(name.to_string(), tensor)]))
}

/// `y` after the last rounding.
pub fn rounded(dtype: DType, shape: &[usize], y: &[f32]) -> Answer {
    let wide: Vec<f64> = y.iter().map(|&v| f64::from(v)).collect();
    answer("y", round::tensor(dtype, shape, &wide))
}

/// `2^k`-sized subtrees of neighbours, until one sum is left.
fn tree(mut sums: Vec<f32>) -> f32 {
    while sums.len() > 1 {
        sums = sums.chunks(2).map(|two| two.iter().copied().reduce(|a, b| a + b).expect("a chunk has one")).collect();
    }
    sums[0]
}

/// The f32 products that an element of a matrix product sums, or a rank's part of them.
pub struct Products<'a> {
    pub pairs: &'a [(f32, f32)],
    /// Where the part begins, and how many products there are in all.
    pub offset: usize,
    pub total: usize,
}

impl Products<'_> {
    /// `fold` by the segments that the part has.
    pub fn segments(&self, fold: impl Fn(&[(f32, f32)]) -> f32) -> f32 {
        let length = (16 * self.total.div_ceil(128)).max(1);
        let (first, end) = (self.offset / length, self.offset + self.pairs.len());
        let count = if self.pairs.len() == self.total { 8 } else { end.div_ceil(length) - first };
        let at = |segment: usize| (segment * length).saturating_sub(self.offset).min(self.pairs.len());
        tree((first..first + count).map(|s| fold(&self.pairs[at(s)..at(s + 1)])).collect())
    }

    /// As the page has it.
    pub fn sum(&self) -> f32 {
        self.segments(|pairs| chain(pairs, |sum| sum))
    }

    /// As the page has it, of products in another order.
    pub fn sum_from(&self, first: usize) -> f32 {
        let (head, tail) = self.pairs.split_at(first % self.pairs.len().max(1));
        Products { pairs: &[tail, head].concat(), ..*self }.sum()
    }

    /// Contiguous pieces, each a sum of its own, added from left to right.
    pub fn in_parts(&self, parts: usize) -> f32 {
        if parts == 1 {
            return self.sum();
        }
        let size = self.pairs.len().div_ceil(parts).max(1);
        let part = |pairs| Products { pairs, offset: 0, total: pairs.len() }.sum();
        self.pairs.chunks(size).map(part).fold(0.0, |sum, part| sum + part)
    }

    /// Product i goes to lane i mod `lanes`; then the lanes from left to right.
    pub fn in_lanes(&self, lanes: usize) -> f32 {
        let mut sums = vec![0.0f32; lanes];
        self.pairs.iter().enumerate().for_each(|(i, (a, b))| sums[i % lanes] = a.mul_add(*b, sums[i % lanes]));
        sums.into_iter().fold(0.0, |sum, lane| sum + lane)
    }
}

/// A chain whose sum passes through `keep` after every product.
pub fn chain(pairs: &[(f32, f32)], keep: impl Fn(f32) -> f32) -> f32 {
    pairs.iter().fold(0.0, |sum, (a, b)| keep(a.mul_add(*b, sum)))
}

/// `gemm`, right but for how the products of an element at (row, column) are summed.
pub fn gemm(case: &Case, sum: impl Fn(usize, &Products) -> f32) -> Answer {
    let (x, w) = (&case.inputs["x"], &case.inputs["w"]);
    let (m, n, k) = (x.shape()[0], w.shape()[0], x.shape()[1]);
    let tf32 = case.params.get("tf32").is_some_and(|v| v == "enabled") && x.dtype() == DType::Fp32;
    let operand = |tensor: &Tensor| -> Vec<f32> {
        let values = values(tensor);
        if tf32 { values.into_iter().map(round::tf32).collect() } else { values }
    };
    let (x, w) = (operand(x), operand(w));
    let number = |name: &str, default| case.params.get(name).map_or(default, |v| v.parse().expect("it is checked"));
    let (offset, total) = (number("k_offset", 0), number("k_total", k));
    let partial = total != k;
    let bias = case.inputs.get("bias").filter(|_| !partial).map(values);
    let (mut y, mut pairs) = (Vec::with_capacity(m * n), Vec::with_capacity(k));
    for row in 0..m {
        for column in 0..n {
            pairs.clear();
            pairs.extend(x[row * k..][..k].iter().copied().zip(w[column * k..][..k].iter().copied()));
            let product = sum(row, &Products { pairs: &pairs, offset, total });
            y.push(bias.as_ref().map_or(product, |bias| product + bias[column]));
        }
    }
    rounded(if partial { DType::Fp32 } else { case.out }, &[m, n], &y)
}

/// The sum of the lanes, each of which has taken its elements already.
fn fold_lanes(mut lane: [f32; 256]) -> f32 {
    for h in [128, 64, 32, 16, 8, 4, 2, 1] {
        (0..h).for_each(|l| lane[l] += lane[l + h]);
    }
    lane[0]
}

/// `rms_norm`, right but for the root by which a row is divided: `root` of the sum of the squares, their number and eps.
pub fn rms_norm(case: &Case, root: fn(f32, f32, f32) -> f32) -> Answer {
    let (x, w) = (values(&case.inputs["x"]), values(&case.inputs["w"]));
    let param = |name: &str| case.params.get(name).map(String::as_str);
    let eps = param("eps").map_or(1e-6, |eps| eps.parse::<f64>().expect("it is checked")) as f32;
    let offset = param("weight_offset") == Some("1");
    let mut y = Vec::with_capacity(x.len());
    for row in x.chunks(w.len()) {
        let mut lane = [0f32; 256];
        row.iter().enumerate().for_each(|(i, v)| lane[i % 256] = v.mul_add(*v, lane[i % 256]));
        let r = 1.0 / root(fold_lanes(lane), w.len() as f32, eps);
        for (v, weight) in row.iter().zip(&w) {
            let weight = if offset { weight + 1.0 } else { *weight };
            y.push(match param("rounding") {
                Some("hf") => weight * round::round(f64::from(v * r), DType::Bf16) as f32,
                _ => (v * r) * weight,
            });
        }
    }
    rounded(case.out, case.inputs["x"].shape(), &y)
}

const LOG2E_HI: f32 = f32::from_bits(0x3FB8_AA3B);
const LOG2E_LO: f32 = f32::from_bits(0x32A5_7060);

/// `(m, i)` of e^x.
fn exp_split(x: f32) -> (f32, f32) {
    let t = x * LOG2E_HI;
    let i = t.round_ties_even();
    let f = if t.abs() >= 4_194_304.0 { 0.0 } else { x.mul_add(LOG2E_LO, x.mul_add(LOG2E_HI, -i)) };
    let coefficients = [0x3aaf_841au32, 0x3c1d_96f0, 0x3d63_57be, 0x3e75_fdee, 0x3f31_7218, 0x3f80_0000];
    let m = coefficients.into_iter().map(f32::from_bits).fold(f32::from_bits(0x3920_b5b7), |m, c| m.mul_add(f, c));
    (m, i)
}

/// `softmax`, right but for the exponent to which the weights of a row are relative: `reference` of the largest exponent of
/// the row and of the whole batch.
pub fn softmax(case: &Case, reference: fn(f32, f32) -> f32) -> Answer {
    let x = &case.inputs["x"];
    let n = x.shape()[1];
    let split: Vec<(f32, f32)> = values(x).into_iter().map(exp_split).collect();
    let largest = |split: &[(f32, f32)]| split.iter().map(|(_, i)| *i).fold(f32::NEG_INFINITY, f32::max);
    let of_batch = largest(&split);
    let mut y = Vec::with_capacity(x.len());
    for (row, split) in values(x).chunks(n).zip(split.chunks(n)) {
        let reference = reference(largest(split), of_batch);
        let weigh = |(&x, &(m, i)): (&f32, &(f32, f32))| match i - reference {
            _ if x == f32::NEG_INFINITY => 0.0,
            d if d < -100.0 => 0.0,
            d => m * f32::exp2(d),
        };
        let weights: Vec<f32> = row.iter().zip(split).map(weigh).collect();
        let length = 16 * n.div_ceil(128);
        let segment = |s: usize| {
            let mut lane = [0f32; 256];
            let terms = &weights[(s * length).min(n)..((s + 1) * length).min(n)];
            terms.iter().enumerate().for_each(|(i, w)| lane[i % 256] += w);
            fold_lanes(lane)
        };
        let sum = tree((0..8).map(segment).collect());
        let finite = row.iter().all(|v| *v < f32::INFINITY);
        y.extend(weights.iter().map(|weight| if finite { weight / sum } else { f32::NAN }));
    }
    rounded(case.out, x.shape(), &y)
}
