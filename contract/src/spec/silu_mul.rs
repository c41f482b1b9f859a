//! `silu_mul`: the inputs of its cases and its oracle.
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::silu_mul::OP,
    class: Class::Elementwise,
    fills: GATES,
    table: include_str!("../../ops/silu_mul.toml"),
    make: |maker| make(maker, sharp::silu),
    compute,
};

/// `sharp` makes the gates of that fill.
pub(super) fn make(maker: &Maker, sharp: fn(usize) -> Vec<f64>) -> BTreeMap<String, Tensor> {
    let (r, n) = (maker.dim("R"), maker.dim("N"));
    if maker.fill == Fill::Classes {
        let (gate, up) = pairs(maker).into_iter().cycle().take(r * n).map(|[g, u]| (g, u)).unzip();
        return maker.floats([("gate", vec![r, n], gate), ("up", vec![r, n], up)]);
    }
    let gate = match maker.fill {
        Fill::Sharp => sharp(r * n),
        fill => maker.values("gate", fill, r * n, n),
    };
    let up = match maker.fill {
        Fill::AllBf16 | Fill::Sharp => vec![1.0; r * n],
        Fill::Tiny | Fill::NearOverflow => maker.values("up", Fill::Normal, r * n, n),
        fill => maker.values("up", fill, r * n, n),
    };
    maker.floats([("gate", vec![r, n], gate), ("up", vec![r, n], up)])
}

/// Products that are borders where the sigmoid is 1; borders on either side; a sigmoid that is nearly lost.
fn pairs(maker: &Maker) -> Vec<[f64; 2]> {
    let borders = maker.borders();
    let products: Vec<[f64; 2]> = borders.iter().flat_map(|&v| [[64.0, v / 64.0], [1024.0, v]]).collect();
    let others = [
        [89.0, 736.0],
        [89.0, -736.0],
        [-80.0, round::pow2(-20)],
        // The smallest normal bf16 out of fp16 numbers, by silu and by gelu.
        [-80.0, 137.0 * round::pow2(-24)],
        [-9.75, round::pow2(-14)],
        [-9.75, 1525.0 * round::pow2(-22)],
        [-1.0, 0.0],
        [f64::INFINITY, 0.0],
    ];
    let mut pairs = maker.held(&products, |pair| pair);
    pairs.extend(maker.held(&others, |pair| pair));
    pairs.extend(borders.iter().map(|&v| [v, 1.0]));
    pairs
}

/// A product where the sigmoid of `a` is 1 in every arithmetic that has f32, of factors that f32 has: nothing rounds but the product.
pub(super) fn saturated(a: f64, factors: [f64; 2]) -> Option<(f64, f64)> {
    let value = factors[0] * factors[1];
    let exact = factors.iter().chain([&value]).all(|x| x.is_finite() && f32_of(*x) == *x);
    (a >= 64.0 && exact).then_some((value, 0.0))
}

fn compute(c: &Checked) -> References {
    let (gate, up) = (c.floats("gate"), c.floats("up"));
    let elements = gate.iter().zip(&up).map(|(&g, &u)| element(g, u));
    one("y", Reference::new(c.case.inputs["gate"].shape().to_vec(), elements))
}

/// Value and condition of `g * sigmoid(g) * u`.
pub(super) fn element(g: f64, u: f64) -> (f64, f64) {
    let value = g * (1.0 / (1.0 + (-g).exp())) * u;
    if g == 0.0 || u == 0.0 || !g.is_finite() || !u.is_finite() {
        return (value, 0.0);
    }
    if let Some(exact) = saturated(g, [g, u]) {
        return exact;
    }
    // Below -87 the sigmoid nears the end of the f32 range and may be lost whole.
    let lost = if g < -87.0 { value.abs() * round::pow2(24) } else { 0.0 };
    (value, value.abs() + lost + FLOOR * (1.0 + u.abs()))
}
