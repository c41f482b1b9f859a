//! `softmax`: the inputs of its cases and its oracle.
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::softmax::OP,
    class: Class::Reduction,
    fills: WEIGHTS,
    table: include_str!("../../ops/softmax.toml"),
    make,
    compute,
};

pub(super) fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (r, n) = (maker.dim("R"), maker.dim("N"));
    let mut x = maker.values("x", maker.fill, r * n, n);
    if maker.fill == Fill::Peaky {
        x.iter_mut().for_each(|x| *x *= 16.0);
    }
    if maker.fill == Fill::Power {
        x = power::logits(maker, "x", r, n);
    }
    if maker.fill == Fill::Sharp {
        x = sharp::logits(r, n);
    }
    if maker.fill == Fill::Classes {
        // Shares of 2^-14 beside 300 equal elements, subnormal shares in fp16, shares of nothing, no shares at all.
        let none = f64::NEG_INFINITY;
        let rows: [&[f64]; 4] = [&[0.0, -4.0], &[0.0, -11.0, -12.0, none], &[f64::NAN, 1.0], &[none, none]];
        for (values, kind) in x.chunks_mut(n).zip(rows.iter().cycle()) {
            values.fill(if kind[0] == 0.0 && kind.len() > 2 { none } else { kind[0] });
            let start = n - kind.len();
            values[start..].copy_from_slice(kind);
        }
    }
    maker.floats([("x", vec![r, n], x)])
}

fn compute(c: &Checked) -> References {
    let (r, n) = (c.dim("R"), c.dim("N"));
    let elements: Vec<_> = c.floats("x").chunks(n).flat_map(shares).collect();
    one("y", Reference::new(vec![r, n], elements))
}

/// Value and condition of each share of a row.
pub(super) fn shares(row: &[f64]) -> Vec<(f64, f64)> {
    if row.iter().any(|v| v.is_nan() || *v == f64::INFINITY) || row.iter().all(|v| *v == f64::NEG_INFINITY) {
        return vec![(f64::NAN, 0.0); row.len()];
    }
    let top = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    // A row whose exponents overflow is measured from its top.
    let from = if super::logprob::exponent_overflows(top) { top } else { 0.0 };
    let exponent_error = |v: f64| exponent_error(v - from);
    let weights: Vec<f64> = row.iter().map(|v| (v - top).exp()).collect();
    let total: f64 = weights.iter().sum();
    // Errors in the exponents move weight between elements that differ; equal elements err alike.
    let absorbed = absorbed(weights.iter().copied(), total);
    let (mut others, mut others_error, mut spread) = (0.0, 0.0, 0.0);
    for (weight, &v) in weights.iter().zip(row) {
        spread += weight / total * exponent_error(v);
        if v != top {
            others += weight / total;
            others_error += weight / total * exponent_error(v);
        }
    }
    let element = |(weight, &v): (&f64, &f64)| {
        if v == f64::NEG_INFINITY {
            return (0.0, 0.0);
        }
        let share = weight / total;
        let moved =
            share * if v == top { others * exponent_error(v) + others_error } else { exponent_error(v) + spread };
        // A weight below 2^-100 of the largest is dropped.
        (share, share * (1.0 + absorbed) + moved + round::pow2(-76))
    };
    weights.iter().zip(row).map(element).collect()
}

/// What the error of the exponent of `exp(x)` is proportional to: its fraction, and from 2^21 on x itself.
pub(super) fn exponent_error(x: f64) -> f64 {
    match x.abs() {
        size if size.is_infinite() => 0.0,
        size if size < round::pow2(21) => 1.0 + size * round::pow2(-20),
        size => size + round::pow2(24),
    }
}
