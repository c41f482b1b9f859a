//! `clamped_silu_mul_backward`: the inputs of its cases and its oracle.
use super::clamped_silu_mul::{activated, numbers, put, within};
use super::silu_mul::saturated;
use super::silu_mul_backward::rest;
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::clamped_silu_mul_backward::OP,
    class: Class::Elementwise,
    fills: silu_mul::SPEC.fills,
    table: include_str!("../../ops/clamped_silu_mul_backward.toml"),
    make,
    compute,
};

/// Those of `silu_mul_backward`; of fill `classes` the last elements are borders that dy is, beside slopes and ups of 1 and 0.
fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let mut inputs = silu_mul_backward::make(maker, sharp::silu);
    if maker.fill == Fill::Classes {
        let mut borders: Vec<[f64; 3]> = maker.borders().iter().map(|&v| [64.0, 0.0, v]).collect();
        // The largest fp16 number out of bf16 numbers.
        borders.push([64.0, 260.0, 251.0]);
        let borders = maker.held(&borders, |triple| triple);
        let last = (0..inputs["gate"].len()).rev();
        put(maker, &mut inputs, ["gate", "up", "dy"], last, &borders);
    }
    inputs
}

fn compute(c: &Checked) -> References {
    let [alpha, limit] = numbers(c);
    let [gate, up, dy] = ["gate", "up", "dy"].map(|name| c.floats(name));
    let shape = c.case.inputs["gate"].shape().to_vec();
    let (mut dgate, mut dup) = (Vec::new(), Vec::new());
    for ((&gate, &up), &dy) in gate.iter().zip(&up).zip(&dy) {
        let (g, u) = (if gate > limit { limit } else { gate }, within(up, limit));
        dgate.push(if gate > limit { (0.0, 0.0) } else { of_gate(alpha * g, u, dy) });
        dup.push(if up.abs() > limit { (0.0, 0.0) } else { activated(g, alpha, dy, dy.abs()) });
    }
    BTreeMap::from([
        ("dgate".to_string(), Reference::new(shape.clone(), dgate)),
        ("dup".to_string(), Reference::new(shape, dup)),
    ])
}

/// Value and condition of `dy (u + 1) (s + a s (1 - s))`, s the sigmoid of a.
fn of_gate(a: f64, u: f64, dy: f64) -> (f64, f64) {
    let (s, rest_of_s) = (1.0 / (1.0 + (-a).exp()), 1.0 / (1.0 + a.exp()));
    let t = if s * rest_of_s == 0.0 { 0.0 } else { a * s * rest_of_s };
    let slope = s + t;
    // The exponent a is a product that was rounded.
    let of_exponent = a.abs() * s * rest_of_s * (2.0 + a.abs());
    let size =
        s * (1.0 + a.abs() * (rest_of_s + rest(s, rest_of_s))) + if of_exponent.is_nan() { 0.0 } else { of_exponent };
    let (factor, size_of_factor) = (dy * (u + 1.0), dy.abs() * (u.abs() + 1.0));
    if let Some(exact) = saturated(a, [dy, u + 1.0]) {
        return exact;
    }
    let condition = match () {
        _ if !a.is_finite() || !dy.is_finite() || dy == 0.0 => 0.0,
        _ if size_of_factor > HUGE => f64::INFINITY,
        _ => {
            let lost = if a < -87.0 { slope.abs() * round::pow2(24) } else { 0.0 };
            size_of_factor * (2.0 * size + lost) + FLOOR * (1.0 + size_of_factor) * (1.0 + a.abs())
        }
    };
    (factor * slope, condition)
}
