//! `rope`: the inputs of its cases and its oracle.
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::rope::OP,
    class: Class::Elementwise,
    fills: &[Fill::Normal, Fill::Wide, Fill::Tiny, Fill::NearOverflow, Fill::Edges],
    table: include_str!("../../ops/rope.toml"),
    make,
    compute,
};

fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (t, h, d) = (maker.dim("T"), maker.dim("H"), maker.dim("D"));
    let mut inputs = maker.floats([("x", vec![t, h, d], maker.values("x", maker.fill, t * h * d, h * d))]);
    inputs.insert("pos".into(), positions(maker));
    inputs
}

/// Without explicit `pos`: 0, 1, 2, .., with every fourth one far out.
pub(super) fn positions(maker: &Maker) -> Tensor {
    let t = maker.dim("T");
    let far = maker.below("pos", t, 200_000);
    let pos = (0..t).map(|i| if i % 4 == 3 { far[i] } else { i as i32 }).collect();
    Tensor::i32(&[t], maker.ints("pos", pos))
}

fn compute(c: &Checked) -> References {
    let shape = vec![c.dim("T"), c.dim("H"), c.dim("D")];
    let exact: Vec<_> = c.floats("x").into_iter().map(|v| (v, v.abs())).collect();
    one("y", Reference::new(shape, elements(c, &exact)))
}

/// Value and condition of the heads `x[T,H,D]`, each element a value and its own condition, turned as the parameters of
/// `c` and its `pos` say.
pub(super) fn elements(c: &Checked, x: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let (h, d, pos) = (c.dim("H"), c.dim("D"), c.ints("pos"));
    let theta = c.float("theta");
    let interleaved = c.word("pairing") == "interleaved";
    let inverse: Vec<f64> = (0..d / 2).map(|i| f32_of(theta.powf(-2.0 * i as f64 / d as f64))).collect();
    let mut elements = vec![(0.0, 0.0); x.len()];
    for (head, values) in x.chunks(d).enumerate() {
        let position = f32_of(f64::from(pos[head / h]));
        for (i, &inverse) in inverse.iter().enumerate() {
            let (first, second) = if interleaved { (2 * i, 2 * i + 1) } else { (i, i + d / 2) };
            let (sin, cos) = f32_of(position * inverse).sin_cos();
            let (x1, x2) = (values[first], values[second]);
            elements[head * d + first] = sum(x1, cos, x2, -sin);
            elements[head * d + second] = sum(x2, cos, x1, sin);
        }
    }
    elements
}

/// `a * by_a + b * by_b`, of a value and a condition each.
fn sum(a: (f64, f64), by_a: f64, b: (f64, f64), by_b: f64) -> (f64, f64) {
    let (first, second) = (a.0 * by_a, b.0 * by_b);
    let size = match a.1.is_infinite() || b.1.is_infinite() {
        true => f64::INFINITY,
        false => a.1 * by_a.abs() + b.1 * by_b.abs(),
    };
    let exact = size == 0.0 || !first.is_finite() || !second.is_finite();
    (first + second, if exact { 0.0 } else { size + FLOOR })
}
