//! `entropy`: the inputs of its cases and its oracle.
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::entropy::OP,
    class: Class::Logprob,
    fills: logprob::SPEC.fills,
    table: include_str!("../../ops/entropy.toml"),
    make,
    compute,
};

fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let mut inputs = logprob::make(maker);
    inputs.remove("target");
    inputs
}

fn compute(c: &Checked) -> References {
    let (r, v) = (c.dim("R"), c.dim("V"));
    let inverse = f32_of(1.0 / c.float("temperature"));
    let (mut entropy, mut lse) = (Vec::with_capacity(r), Vec::with_capacity(r));
    for row in c.floats("logits").chunks(v) {
        let x: Vec<f64> = row.iter().map(|z| logprob::scaled(z * inverse)).collect();
        entropy.push(of_row(&x, inverse != 1.0));
        lse.push(logprob::log_sum(&x));
    }
    BTreeMap::from([
        ("entropy".to_string(), Reference::new(vec![r], entropy)),
        ("lse".to_string(), Reference::new(vec![r], lse)),
    ])
}

/// Value and condition of the entropy of the row x, whose elements may have been rounded.
pub(super) fn of_row(x: &[f64], rounded: bool) -> (f64, f64) {
    if !logprob::log_sum(x).0.is_finite() {
        return (f64::NAN, 0.0);
    }
    let top = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    // How far below the top a weight is cut off, with a margin.
    let cut = -72.0;
    if x.iter().filter(|v| **v - top >= cut).count() == 1 {
        return (0.0, 0.0);
    }
    let (mut total, mut distance, mut moved) = (0.0, 0.0, 0.0);
    for &v in x.iter().filter(|v| **v != f64::NEG_INFINITY) {
        let (below, weight) = (top - v, (v - top).exp());
        total += weight;
        distance += weight * below;
        let inexact = if rounded { v.abs() } else { 0.0 };
        moved += weight * (1.0 + below) * (softmax::exponent_error(below) + inexact);
    }
    let value = total.ln() + distance / total;
    let terms = || x.iter().filter(|v| **v != f64::NEG_INFINITY).map(|v| (top - v, (v - top).exp()));
    let lost = absorbed(terms().map(|(_, weight)| weight), total);
    let of_distance = absorbed(terms().map(|(below, weight)| weight * below), distance);
    (value, 1.0 + value + moved / total + lost * (1.0 + distance / total) + of_distance * distance / total)
}
