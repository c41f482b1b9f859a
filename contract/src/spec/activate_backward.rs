//! `activate_backward`: the inputs of its cases and its oracle.
use super::activate::{LOST, arguments, normal, positive, size_beyond, xielu_numbers};
use super::silu_mul_backward::{Slope, dgate};
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::activate_backward::OP,
    class: Class::Elementwise,
    fills: GATES,
    table: include_str!("../../ops/activate_backward.toml"),
    make,
    compute,
};

fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (r, n) = (maker.dim("R"), maker.dim("N"));
    let (x, dy) = match maker.fill {
        // Borders of either, beside a slope of 1; the largest fp16 number out of bf16 numbers, by the square; subnormals and the
        // smallest normal bf16 out of fp16 numbers, by the gelu of the hyperbolic tangent.
        Fill::Classes => {
            let one = if maker.params.get("kind").is_some_and(|kind| kind == "relu2") { 0.5 } else { 64.0 };
            let borders = maker.borders();
            let mut pairs: Vec<[f64; 2]> = borders.iter().flat_map(|&v| [[one, v], [v, 1.0], [-64.0, v]]).collect();
            pairs.extend(maker.held(
                &[[44.5, 736.0], [44.5, -736.0], [-9.75, round::pow2(-16)], [-9.75, 279.0 * round::pow2(-24)]],
                |pair| pair,
            ));
            let column = |i: usize| pairs.iter().cycle().take(r * n).map(|pair| pair[i]).collect();
            (column(0), column(1))
        }
        fill => {
            let dy = match fill {
                Fill::AllBf16 | Fill::Sharp => vec![1.0; r * n],
                Fill::Tiny | Fill::NearOverflow => maker.values("dy", Fill::Normal, r * n, n),
                fill => maker.values("dy", fill, r * n, n),
            };
            (arguments(maker), dy)
        }
    };
    maker.floats([("x", vec![r, n], x), ("dy", vec![r, n], dy)])
}

fn compute(c: &Checked) -> References {
    let (x, shape) = (c.floats("x"), c.case.inputs["x"].shape().to_vec());
    let pairs = x.into_iter().zip(c.floats("dy"));
    let reference = match c.word("kind") {
        "gelu" => Reference::new(shape, pairs.map(|(x, dy)| dgate(x, dy, slope(x)))),
        "xielu" => {
            let numbers = xielu_numbers(c);
            Reference::new(shape, pairs.map(|(x, dy)| xielu(x, dy, numbers)))
        }
        "gelu_tanh" => Reference::new(shape, pairs.map(|(x, dy)| dgate(x, dy, gelu_mul_backward::slope(x)))),
        // Two f32 roundings, which are part of the definition; a product of two f32 is exact in f64.
        _ => Reference::exact(shape, pairs.map(|(x, dy)| f32_of(dy * f32_of(positive(x) * 2.0))).collect()),
    };
    one("dx", reference)
}

/// That of the gelu of the error function: the share below x, plus x times the density.
fn slope(x: f64) -> Slope {
    let a = x.abs();
    let (density, beyond) = normal(a);
    let share = if x < 0.0 { beyond } else { 1.0 - beyond };
    if density == 0.0 {
        return Slope { value: share, size: share, lost: x < 0.0 };
    }
    let size = share + size_beyond(a, beyond) + a * density * (3.0 + a * a / 2.0);
    Slope { value: share + x * density, size, lost: x < -LOST }
}

/// Value and condition of `dy` times the slope of an xIELU.
fn xielu(x: f64, dy: f64, [p, n, b]: [f64; 3]) -> (f64, f64) {
    let of_curve = if x <= 0.0 { n * x.exp_m1() } else { 2.0 * p * x };
    let (slope, size) = (of_curve + b, of_curve.abs() + b.abs());
    let condition = match () {
        _ if !x.is_finite() || !dy.is_finite() || dy == 0.0 => 0.0,
        _ if size > HUGE || dy.abs() * size > HUGE => f64::INFINITY,
        _ if f32_of(slope) == slope && f32_of(dy * slope) == dy * slope && x == 0.0 => 0.0,
        _ => dy.abs() * 2.0 * size + FLOOR * (1.0 + dy.abs()),
    };
    (dy * slope, condition)
}
