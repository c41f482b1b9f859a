//! `sigmoid_mul_backward`: the inputs of its cases and its oracle.
use super::gemm::sum_of;
use super::sigmoid_mul::{gates, products};
use super::silu_mul_backward::rest;
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::sigmoid_mul_backward::OP,
    class: Class::Reduction,
    fills: &[
        Fill::Normal,
        Fill::Wide,
        Fill::Cancel,
        Fill::Tiny,
        Fill::NearOverflow,
        Fill::Edges,
        Fill::AllBf16,
        Fill::Classes,
        Fill::Sharp,
        Fill::Power,
    ],
    table: include_str!("../../ops/sigmoid_mul_backward.toml"),
    make,
    compute,
};

fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (r, g, n) = (maker.dim("R"), maker.dim("G"), maker.dim("N"));
    let (mut gate, ones) = (gates(maker, r * g, g), || vec![1.0; r * n]);
    let (x, dy) = match maker.fill {
        Fill::Classes => classes(maker, &mut gate, r * n),
        Fill::AllBf16 | Fill::Sharp => (ones(), ones()),
        // A slope of a quarter, and sums of masks.
        Fill::Power => {
            gate.fill(0.0);
            (power::masks(&maker.draw("x"), r * g, n / g), ones())
        }
        // Neighbours are equal in dy and nearly opposite in x, so the sum is far below its terms.
        Fill::Cancel => {
            let (mut x, mut dy) =
                (maker.values("x", Fill::Normal, r * n, n), maker.values("dy", Fill::Normal, r * n, n));
            dy.chunks_exact_mut(2).for_each(|pair| pair[1] = pair[0]);
            x.chunks_exact_mut(2).for_each(|pair| pair[1] = -pair[0] * (1.0 + pair[1] / 256.0));
            (x, dy)
        }
        // Sums of products with ordinary numbers: among the subnormals, and near the largest f32.
        Fill::Tiny => (maker.values("x", Fill::Normal, r * n, n), maker.values("dy", Fill::Tiny, r * n, n)),
        Fill::NearOverflow if maker.dtype != DType::Fp16 => {
            (maker.values("x", Fill::Normal, r * n, n), fold::near_overflow(maker, r * n))
        }
        fill => (maker.values("x", fill, r * n, n), maker.values("dy", fill, r * n, n)),
    };
    maker.floats([("gate", vec![r, g], gate), ("x", vec![r, n], x), ("dy", vec![r, n], dy)])
}

/// x and dy: borders in dy beside 4, which the slope at 0 takes back, and beside 1 where the sigmoid is 1; the largest fp16
/// number out of bf16 numbers.
fn classes(maker: &Maker, gate: &mut [f64], len: usize) -> (Vec<f64>, Vec<f64>) {
    let (mut x, mut dy) = (vec![4.0; len], maker.borders_from(0, len));
    let each = len / gate.len();
    (x[0], dy[0]) = (356.0, 736.0);
    (x[each], dy[each]) = (-356.0, 736.0);
    (0..gate.len()).filter(|i| i % 3 < 2 && i / 3 % 2 == 0).for_each(|i| gate[i] = 0.0);
    (x, dy)
}

fn compute(c: &Checked) -> References {
    let (r, g, n) = (c.dim("R"), c.dim("G"), c.dim("N"));
    let (gate, x, dy) = (c.floats("gate"), c.floats("x"), c.floats("dy"));
    let each = n / g.max(1);
    let dgate = gate.iter().enumerate().map(|(i, &gate)| {
        let of_gate = i * each..(i + 1) * each;
        of_slope(gate, sum_of(dy[of_gate.clone()].iter().zip(&x[of_gate]).map(|(dy, x)| dy * x)))
    });
    BTreeMap::from([
        ("dgate".to_string(), Reference::new(vec![r, g], dgate.collect::<Vec<_>>())),
        ("dx".to_string(), Reference::new(vec![r, n], products(c, &gate, &dy))),
    ])
}

/// Value and condition of a sum times the slope of the sigmoid at the gate g.
fn of_slope(g: f64, (sum, of_sum): (f64, f64)) -> (f64, f64) {
    let (s, one_less_s) = (1.0 / (1.0 + (-g).exp()), 1.0 / (1.0 + g.exp()));
    let (slope, size) = (s * one_less_s, s * (one_less_s + rest(s, one_less_s)));
    let value = sum * slope;
    let condition = match () {
        _ if g.is_nan() || sum.is_nan() => 0.0,
        _ if of_sum.is_infinite() => f64::INFINITY,
        // The slope is at least +0, so the sign of an exact 0 stays.
        _ if of_sum == 0.0 && (sum == 0.0 || g.is_infinite()) => 0.0,
        // Infinity times what may be 0.
        _ if sum.is_infinite() => {
            if g.abs() < 16.0 {
                0.0
            } else {
                f64::INFINITY
            }
        }
        // The slope is 1/4.
        _ if of_sum == 0.0 && g == 0.0 && f32_of(value) == value => 0.0,
        _ => {
            // The sigmoid may be lost whole: it nears the end of the f32 range.
            let lost = if g < -87.0 { value.abs() * round::pow2(24) } else { 0.0 };
            of_sum * slope + sum.abs() * size + lost + FLOOR * (1.0 + sum.abs())
        }
    };
    (value, condition)
}
