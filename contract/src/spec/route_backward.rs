//! `route_backward`: the inputs of its cases and its oracle.
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::route_backward::OP,
    class: Class::Reduction,
    fills: route::SPEC.fills,
    table: include_str!("../../ops/route_backward.toml"),
    make,
    compute,
};

/// Logits of `route` and the ranks of their largest, unless the case gives others; of borders, equal logits.
fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (t, e, chosen) = (maker.dim("T"), maker.dim("E"), maker.count("chosen", 1));
    let wide = Maker { dtype: DType::Fp32, ..*maker };
    let (mut inputs, dweight) = match maker.fill {
        Fill::Classes => (maker.floats([("logits", vec![t, e], vec![0.0; t * e])]), wide.borders_from(0, t * e)),
        Fill::Sharp => (route::make(maker), vec![1.0; t * e]),
        Fill::Tiny => (route::make(maker), wide.values("dweight", Fill::Normal, t * e, e)),
        fill => (route::make(maker), wide.values("dweight", fill, t * e, e)),
    };
    let mut ranks = Vec::with_capacity(t * e);
    for row in inputs["logits"].to_f64().chunks(e) {
        let order = route::order(row, &mut false, chosen);
        ranks.extend((0..e).map(|i| order.iter().position(|&taken| taken == i).map_or(-1, |rank| rank as i32)));
    }
    inputs.extend(wide.floats([("dweight", vec![t, e], dweight)]));
    inputs.insert("rank".into(), Tensor::i32(&[t, e], maker.ints("rank", ranks)));
    inputs
}

fn compute(c: &Checked) -> References {
    let (e, chosen, scale) = (c.dim("E"), c.count("chosen"), f32_of(c.float("scale")));
    let (sigmoid, normalise) = (c.word("scoring") == "sigmoid", c.flag("normalise"));
    let (logits, dweight) = (c.floats("logits"), c.floats("dweight"));
    let mut elements = Vec::with_capacity(logits.len());
    for ((logits, dweight), rank) in logits.chunks(e).zip(dweight.chunks(e)).zip(c.ints("rank").chunks(e)) {
        let place = |r: usize| rank.iter().position(|&rank| rank == r as i32).expect("checked");
        let taken: Vec<usize> = (0..chosen).map(place).collect();
        if let Some(limit) = route::limit(c) {
            elements.extend(by_shares(logits, dweight, &taken, (limit, scale, normalise)));
            continue;
        }
        let s: Vec<(f64, f64)> =
            if sigmoid { logits.iter().map(|&x| score(x)).collect() } else { softmax::shares(logits) };
        let of_taken: Vec<(f64, f64)> = taken.iter().map(|&i| s[i]).collect();
        let a: Vec<(f64, f64)> = taken.iter().map(|&i| scaled(dweight[i], scale)).collect();
        let a = if normalise { normalised(&a, &of_taken, if sigmoid { 1e-20 } else { 0.0 }) } else { a };
        let whole = if sigmoid { (0.0, 0.0) } else { sum_of_products(&a, &of_taken) };
        elements.extend((0..e).map(|i| {
            let a = taken.iter().position(|&t| t == i).map(|r| a[r]);
            match a {
                Some(a) if sigmoid => by_slope(a, s[i], logits[i]),
                None if sigmoid => (0.0, 0.0),
                a => product(s[i], difference(a.unwrap_or((0.0, 0.0)), whole)),
            }
        }));
    }
    one("dlogits", Reference::new(vec![c.dim("T"), e], elements))
}

/// That of one token by sparsemixer: the gradient of the softmax of each rank, added.
fn by_shares(
    logits: &[f64],
    dweight: &[f64],
    taken: &[usize],
    (limit, scale, normalise): (f64, f64, bool),
) -> Vec<(f64, f64)> {
    let shares = taken.iter().enumerate().map(|(rank, &i)| route::share(logits, &taken[..rank], i, limit));
    let shares: Vec<Vec<(f64, f64)>> = shares.collect();
    let of_taken: Vec<(f64, f64)> = shares.iter().zip(taken).map(|(shares, &i)| shares[i]).collect();
    let a: Vec<(f64, f64)> = taken.iter().map(|&i| scaled(dweight[i], scale)).collect();
    let a = if normalise { normalised(&a, &of_taken, 0.0) } else { a };
    let element = |i: usize| {
        let ranks = shares.iter().zip(taken).zip(a.iter().zip(&of_taken)).map(|((shares, &own), (&a, &share))| {
            let whole = sum_of_products(&[a], &[share]);
            product(shares[i], difference(if own == i { a } else { (0.0, 0.0) }, whole))
        });
        ranks.reduce(|sum, d| {
            let value = sum.0 + d.0;
            known(value, sum.1 + d.1 + value.abs(), sum.0.abs() + d.0.abs())
        })
    };
    (0..logits.len()).map(|i| element(i).expect("one is chosen")).collect()
}

/// A sum of numbers with errors, none below 0.
pub(super) fn known_sum(all: &[(f64, f64)]) -> (f64, f64) {
    let sum: f64 = all.iter().map(|x| x.0).sum();
    (sum, all.iter().map(|x| x.1).sum::<f64>() + sum * all.len() as f64)
}

/// A gradient times the scale, of which nothing is known where it may overflow.
fn scaled(dweight: f64, scale: f64) -> (f64, f64) {
    let (value, condition) = scale::product(dweight, scale);
    (value, if value.is_finite() && value.abs() > HUGE { f64::INFINITY } else { condition })
}

/// A sigmoid and its error, which is as large as itself, and next to 0 as the smallest normal number.
fn score(x: f64) -> (f64, f64) {
    let s = 1.0 / (1.0 + (-x).exp());
    (s, if x == 0.0 || x == f64::INFINITY { 0.0 } else { s * (1.0 - s) * softmax::exponent_error(x) + s + FLOOR })
}

/// What is NaN in any order is so; whatever else is not finite, or may overflow, is unknown.
fn known(value: f64, condition: f64, size: f64) -> (f64, f64) {
    match () {
        _ if value.is_nan() => (value, 0.0),
        _ if !(size <= HUGE && value.is_finite()) || condition.is_nan() => (value, f64::INFINITY),
        _ => (value, condition),
    }
}

/// A chain of products of numbers with errors.
pub(super) fn sum_of_products(a: &[(f64, f64)], b: &[(f64, f64)]) -> (f64, f64) {
    let terms = || a.iter().zip(b);
    let sum = terms().map(|(a, b)| a.0 * b.0).sum();
    let size: f64 = terms().map(|(a, b)| (a.0 * b.0).abs()).sum();
    let moved: f64 = terms().map(|(a, b)| a.1 * b.0.abs() + a.0.abs() * b.1).sum();
    known(sum, moved + a.len() as f64 * (size + FLOOR), size)
}

pub(super) fn difference(a: (f64, f64), b: (f64, f64)) -> (f64, f64) {
    let value = a.0 - b.0;
    known(value, a.1 + b.1 + value.abs(), a.0.abs() + b.0.abs())
}

fn product(a: (f64, f64), b: (f64, f64)) -> (f64, f64) {
    let value = a.0 * b.0;
    known(value, a.1 * b.0.abs() + a.0.abs() * b.1 + value.abs() + FLOOR, value.abs())
}

pub(super) fn quotient(a: (f64, f64), b: (f64, f64)) -> (f64, f64) {
    let value = a.0 / b.0;
    known(value, a.1 / b.0 + value.abs() * (b.1 / b.0 + 1.0) + FLOOR, value.abs())
}

/// `(a - chain(a * s / S)) / S`, S the sum of s and `more`.
fn normalised(a: &[(f64, f64)], s: &[(f64, f64)], more: f64) -> Vec<(f64, f64)> {
    let (sum, error) = known_sum(s);
    let sum = (sum + more, error + more * s.len() as f64);
    let shares: Vec<(f64, f64)> = s.iter().map(|&s| quotient(s, sum)).collect();
    let common = sum_of_products(a, &shares);
    a.iter().map(|&a| quotient(difference(a, common), sum)).collect()
}

/// `a * (s * (1 - s))` at the logit x, without error where that is 0.
fn by_slope(a: (f64, f64), s: (f64, f64), x: f64) -> (f64, f64) {
    let slope = s.0 * (1.0 - s.0);
    let value = a.0 * slope;
    match () {
        _ if value.is_nan() => (value, 0.0),
        // Where a slope is surely not rounded to 0.
        _ if a.0.is_infinite() && a.1 == 0.0 && x.abs() < 15.0 => (value, 0.0),
        _ if x == 0.0 && a.1 == 0.0 && f32_of(value) == value => (value, 0.0),
        _ => product(a, (slope, s.1 * (1.0 - s.0) + s.0 * (s.1 + (1.0 - s.0)) + slope + FLOOR)),
    }
}
