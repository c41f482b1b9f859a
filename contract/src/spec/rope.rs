//! `rope`: the inputs of its cases and its oracle.
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::rope::OP,
    class: Class::Elementwise,
    fills: PLAIN,
    table: include_str!("../../ops/rope.toml"),
    make: |maker| make(maker, "x", -1.0),
    compute,
};

/// Heads called `name`, and positions. Rotated by an angle of the sign of `by`, two of its elements make the largest fp16
/// number.
pub(super) fn make(maker: &Maker, name: &'static str, by: f64) -> BTreeMap<String, Tensor> {
    let (t, h, d) = (maker.dim("T"), maker.dim("H"), maker.dim("D"));
    let x = match maker.fill {
        // In half of every pair; which sign a zero beside it has decides about -0.
        Fill::Classes => {
            let borders = maker.borders_from(0, t * h * d);
            let other = |i: usize| if i.is_multiple_of(2) { 1.0 } else { -1.0 };
            let border = |i: usize| (i % d < d / 2) == (i / d).is_multiple_of(2);
            let mut x: Vec<f64> = (0..t * h * d).map(|i| if border(i) { borders[i] } else { other(i) }).collect();
            // At position 1 the largest fp16 number out of two bf16 numbers.
            let last = x.len() - d;
            (x[last], x[last + d / 2]) = (44288.0, 49408.0 * by);
            x
        }
        fill => maker.values(name, fill, t * h * d, h * d),
    };
    let mut inputs = maker.floats([(name, vec![t, h, d], x)]);
    inputs.insert("pos".into(), positions(maker));
    inputs
}

/// Without explicit `pos`: 0, 1, 2, .., with every fourth one far out; for [`Fill::Classes`] 0, where nothing is
/// rotated, and the last one 1.
pub(super) fn positions(maker: &Maker) -> Tensor {
    let t = maker.dim("T");
    if maker.fill == Fill::Classes {
        return Tensor::i32(&[t], maker.ints("pos", (0..t).map(|i| i32::from(i + 1 == t)).collect()));
    }
    let far = maker.below("pos", t, 200_000);
    let pos = (0..t).map(|i| if i % 4 == 3 { far[i] } else { i as i32 }).collect();
    Tensor::i32(&[t], maker.ints("pos", pos))
}

fn compute(c: &Checked) -> References {
    let shape = vec![c.dim("T"), c.dim("H"), c.dim("D")];
    let exact: Vec<_> = c.floats("x").into_iter().map(|v| (v, 0.0)).collect();
    one("y", Reference::new(shape, elements(c, &exact, 1.0)))
}

/// Value and condition of the heads `x[T,H,D]`, each element a value and its own condition, turned as the parameters of
/// `c` and its `pos` say, or back where `sign` is -1.
pub(super) fn elements(c: &Checked, x: &[(f64, f64)], sign: f64) -> Vec<(f64, f64)> {
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
            let (x1, x2, sin) = (values[first], values[second], sign * sin);
            elements[head * d + first] = sum(x1, cos, x2, -sin);
            elements[head * d + second] = sum(x2, cos, x1, sin);
        }
    }
    elements
}

/// `a * by_a + b * by_b`, of a value and a condition each. The products round by themselves, unless nothing is rotated.
fn sum(a: (f64, f64), by_a: f64, b: (f64, f64), by_b: f64) -> (f64, f64) {
    let (first, second) = (a.0 * by_a, b.0 * by_b);
    let rounds = |v: (f64, f64)| if by_b == 0.0 { v.1 } else { v.1.max(v.0.abs()) };
    let size = match a.1.is_infinite() || b.1.is_infinite() {
        true => f64::INFINITY,
        false => rounds(a) * by_a.abs() + rounds(b) * by_b.abs(),
    };
    let exact = size == 0.0 || !first.is_finite() || !second.is_finite();
    (first + second, if exact { 0.0 } else { size + FLOOR })
}
