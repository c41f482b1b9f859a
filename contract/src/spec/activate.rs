//! `activate`: the inputs of its cases and its oracle.
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::activate::OP,
    class: Class::Elementwise,
    fills: GATES,
    table: include_str!("../../ops/activate.toml"),
    make: |maker| maker.floats([("x", vec![maker.dim("R"), maker.dim("N")], arguments(maker))]),
    compute,
};

/// The elements of x.
pub(super) fn arguments(maker: &Maker) -> Vec<f64> {
    let (r, n) = (maker.dim("R"), maker.dim("N"));
    let is_tanh = maker.params.get("kind").is_some_and(|kind| kind == "gelu_tanh");
    match maker.fill {
        // Borders; twice those, of which a gelu makes them, and numbers whose squares they are.
        Fill::Classes => {
            let pow = round::pow2;
            let borders = maker.borders();
            let twice: Vec<f64> = borders.iter().map(|v| v * 2.0).collect();
            let roots = [pow(-63), pow(-64), pow(-67), pow(-7), 3.0 * pow(-8), 255.875, 256.0, pow(64)];
            let all = [
                borders,
                maker.held(&twice, |v| std::slice::from_ref(v)),
                maker.held(&roots, |v| std::slice::from_ref(v)),
            ];
            all.concat().into_iter().cycle().take(r * n).collect()
        }
        Fill::Sharp if is_tanh => sharp::gelu(r * n),
        Fill::Sharp => sharp::gelu_erf(r * n),
        fill => maker.values("x", fill, r * n, n),
    }
}

fn compute(c: &Checked) -> References {
    let (x, shape) = (c.floats("x"), c.case.inputs["x"].shape().to_vec());
    let reference = match c.word("kind") {
        "gelu" => Reference::new(shape, x.into_iter().map(gelu)),
        "gelu_tanh" => Reference::new(shape, x.into_iter().map(|x| gelu_mul::element(x, 1.0))),
        "xielu" => {
            let numbers = xielu_numbers(c);
            Reference::new(shape, x.into_iter().map(|x| xielu(x, numbers)))
        }
        // The product is rounded to f32, which is part of the definition; that of two f32 is exact in f64.
        _ => Reference::exact(shape, x.into_iter().map(|x| f32_of(positive(x) * positive(x))).collect()),
    };
    one("y", reference)
}

/// x above 0, else +0; a NaN stays.
pub(super) fn positive(x: f64) -> f64 {
    if x <= 0.0 { 0.0 } else { x }
}

/// The density of a normal distribution, and the share of it beyond `a`, 0 or more: near 0 by the series of the share between 0
/// and a, farther out by the continued fraction of Mills' ratio.
pub(super) fn normal(a: f64) -> (f64, f64) {
    let density = (-a * a / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt();
    if density == 0.0 {
        return (0.0, 0.0);
    }
    let beyond = if a < 2.0 {
        // a + a^3/3 + a^5/15 + ..
        let (mut term, mut sum) = (a, 0.0);
        for k in 1..64 {
            sum += term;
            term *= a * a / f64::from(2 * k + 1);
        }
        0.5 - density * sum
    } else {
        density / (1..256).rev().fold(a, |below, k| a + f64::from(k) / below)
    };
    (density, beyond)
}

/// From where on `e^(-x^2/2)` nears the end of the f32 range, and may be lost whole.
pub(super) const LOST: f64 = 13.19;

/// What rounding errors of the share beyond `a` are proportional to: its own, of a few steps, and those of the exponent.
pub(super) fn size_beyond(a: f64, beyond: f64) -> f64 {
    beyond * (3.0 + a * a / 2.0)
}

/// Value and condition of x times the share of a normal distribution below it.
fn gelu(x: f64) -> (f64, f64) {
    let a = x.abs();
    let (_, beyond) = normal(a);
    let value = x * if x < 0.0 { beyond } else { 1.0 - beyond };
    // Far out the share is 1 in every arithmetic that has f32.
    if x == 0.0 || !x.is_finite() || x >= 64.0 {
        return (value, 0.0);
    }
    let lost = if x < -LOST { value.abs() * round::pow2(24) } else { 0.0 };
    (value, value.abs() + a * size_beyond(a, beyond) + lost + FLOOR * (1.0 + a))
}

/// alpha_p, alpha_n and beta of an xIELU, as they are rounded.
pub(super) fn xielu_numbers(c: &Checked) -> [f64; 3] {
    ["alpha_p", "alpha_n", "beta"].map(|name| f32_of(c.float(name)))
}

/// Value and condition of an xIELU. Of `e^x - 1 - x`, which loses what both have in common, the parts count.
fn xielu(x: f64, [p, n, b]: [f64; 3]) -> (f64, f64) {
    let (of_curve, size) = match x <= 0.0 {
        true => (n * (x.exp_m1() - x), n.abs() * (x.exp_m1().abs() + x.abs())),
        false => (p * x * x, (p * x * x).abs()),
    };
    let (value, size) = (of_curve + b * x, size + (b * x).abs());
    let condition = match () {
        _ if x == 0.0 || !x.is_finite() => 0.0,
        // What is added may overflow although the sum does not.
        _ if size > HUGE => f64::INFINITY,
        _ => 2.0 * size + FLOOR * (1.0 + n.abs() + p.abs()),
    };
    (value, condition)
}
