//! `sigmoid_mul`: the inputs of its cases and its oracle.
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::sigmoid_mul::OP,
    class: Class::Elementwise,
    fills: GATES,
    table: include_str!("../../ops/sigmoid_mul.toml"),
    make,
    compute,
};

fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (r, g, n) = (maker.dim("R"), maker.dim("G"), maker.dim("N"));
    let gate = gates(maker, r * g, g);
    let x = match maker.fill {
        Fill::Classes => maker.borders_from(0, r * n),
        Fill::AllBf16 | Fill::Sharp => vec![1.0; r * n],
        Fill::Tiny | Fill::NearOverflow => maker.values("x", Fill::Normal, r * n, n),
        fill => maker.values("x", fill, r * n, n),
    };
    maker.floats([("gate", vec![r, g], gate), ("x", vec![r, n], x)])
}

/// In a case of classes gates whose sigmoid is 1 and others, one after the other.
pub(super) fn gates(maker: &Maker, len: usize, of_row: usize) -> Vec<f64> {
    match maker.fill {
        Fill::Classes => {
            let others = [0.0, -9.75, -80.0, f64::INFINITY, f64::NEG_INFINITY, 3.0];
            (0..len).map(|i| if i % 3 < 2 { 64.0 } else { others[i / 3 % others.len()] }).collect()
        }
        Fill::Sharp => sharp::sigmoid(len),
        fill => maker.values("gate", fill, len, of_row),
    }
}

fn compute(c: &Checked) -> References {
    let (gate, x) = (c.floats("gate"), c.floats("x"));
    one("y", Reference::new(c.case.inputs["x"].shape().to_vec(), products(c, &gate, &x)))
}

/// Value and condition of every element times the sigmoid of its gate.
pub(super) fn products(c: &Checked, gate: &[f64], x: &[f64]) -> Vec<(f64, f64)> {
    let each = c.dim("N") / c.dim("G").max(1);
    x.iter().enumerate().map(|(i, &x)| element(gate[i / each], x)).collect()
}

/// Value and condition of `sigmoid(g) * x`.
fn element(g: f64, x: f64) -> (f64, f64) {
    let value = x / (1.0 + (-g).exp());
    // Below -87 the sigmoid nears the end of the f32 range and may be lost whole.
    let may_be_lost = g < -87.0 && g.is_finite();
    let condition = match () {
        _ if g.is_nan() || x.is_nan() || x == 0.0 => 0.0,
        // Infinity times what may be 0.
        _ if x.is_infinite() => return (x * (1.0 / (1.0 + (-g).exp())), if may_be_lost { f64::INFINITY } else { 0.0 }),
        _ if g == f64::NEG_INFINITY => 0.0,
        // The sigmoid is 1 in every arithmetic that has f32, or 1/2.
        _ if g >= 64.0 => return (x, 0.0),
        _ if g == 0.0 && f32_of(value) == value => 0.0,
        _ => value.abs() * if may_be_lost { round::pow2(24) } else { 1.0 } + FLOOR * (1.0 + x.abs()),
    };
    (value, condition)
}
