//! `clamped_silu_mul`: the inputs of its cases and its oracle.
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::clamped_silu_mul::OP,
    class: Class::Elementwise,
    fills: GATES,
    table: include_str!("../../ops/clamped_silu_mul.toml"),
    make,
    compute,
};

/// Those of `silu_mul`; of fill `classes` some first elements are the largest fp16 number and the largest f32 out of factors of few
/// bits, and a subnormal out of fp16 numbers.
fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let mut inputs = silu_mul::make(maker, sharp::silu);
    if maker.fill == Fill::Classes {
        let pairs = [[251.0, 260.0], [round::pow2(125), 7.0 - round::pow2(-21)], [-87.0, round::pow2(-11) - 1.0]];
        let pairs = maker.held(&pairs, |pair| pair);
        put(maker, &mut inputs, ["gate", "up"], 0.., &pairs);
    }
    inputs
}

/// Puts tuples, an element of each input, into these places.
pub(super) fn put<const N: usize>(
    maker: &Maker,
    inputs: &mut BTreeMap<String, Tensor>,
    names: [&'static str; N],
    places: impl Iterator<Item = usize> + Clone,
    tuples: &[[f64; N]],
) {
    for (i, name) in names.into_iter().enumerate() {
        let (shape, mut values) = (inputs[name].shape().to_vec(), inputs[name].to_f64());
        places.clone().zip(tuples).for_each(|(place, tuple)| values[place] = tuple[i]);
        inputs.extend(maker.floats([(name, shape, values)]));
    }
}

/// alpha and limit, as they are rounded.
pub(super) fn numbers(c: &Checked) -> [f64; 2] {
    ["alpha", "limit"].map(|name| f32_of(c.float(name)))
}

/// x within -c and c; a NaN stays.
pub(super) fn within(x: f64, c: f64) -> f64 {
    if x > c {
        c
    } else if x < -c {
        -c
    } else {
        x
    }
}

fn compute(c: &Checked) -> References {
    let ([alpha, limit], gate, up) = (numbers(c), c.floats("gate"), c.floats("up"));
    let element = |(&gate, &up): (&f64, &f64)| {
        let (g, u) = (if gate > limit { limit } else { gate }, within(up, limit));
        activated(g, alpha, u + 1.0, u.abs() + 1.0)
    };
    one("y", Reference::new(c.case.inputs["gate"].shape().to_vec(), gate.iter().zip(&up).map(element)))
}

/// Value and condition of `g * sigmoid(alpha g)` times a factor, whose rounding errors are proportional to `size`.
pub(super) fn activated(g: f64, alpha: f64, factor: f64, size: f64) -> (f64, f64) {
    let a = alpha * g;
    let value = g / (1.0 + (-a).exp()) * factor;
    if g == 0.0 || !g.is_finite() || !factor.is_finite() {
        return (value, 0.0);
    }
    if let Some(exact) = silu_mul::saturated(a, [g, factor]) {
        return exact;
    }
    // Errors of the exponent count where the sigmoid is not flat; below -87 it may be lost whole.
    let activated = (g / (1.0 + (-a).exp())).abs();
    let bent = if a > 0.0 { a * (-a).exp() } else { a.abs() };
    let bent = if bent.is_finite() { activated * bent } else { 0.0 };
    let lost = if a < -87.0 { activated * round::pow2(24) } else { 0.0 };
    (value, (activated + bent + lost) * size + FLOOR * (1.0 + size) * (1.0 + g.abs()))
}
