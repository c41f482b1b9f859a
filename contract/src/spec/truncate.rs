//! `truncate`: the inputs of its cases and its oracle.
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::truncate::OP,
    class: Class::Elementwise,
    fills: PLAIN,
    table: include_str!("../../ops/truncate.toml"),
    make,
    compute,
};

/// Scale, top_k, top_p and min_p of rows.
const LIMITS: [(f64, i32, f64, f64); 11] = [
    (1.0, 0, 1.0, 0.0),
    (1.25, 5, 1.0, 0.0),
    (1.0, 0, 0.8, 0.0),
    (2.0, 0, 1.0, 0.1),
    (0.5, 9, 0.6, 0.02),
    (1.0, 0, 0.55, 0.2),
    (0.25, 1, 1.0, 0.0),
    (1.5, 0, 0.0, 0.0),
    (3.0, 1 << 30, 0.95, 0.0),
    (1.0, 4, 0.9, 0.0),
    (1.0, 0, 1.0, 1.0),
];

/// Limits of all kinds, over rows of numbers as they come, of whole ones over and over, and of a few among nothing, which no
/// share of the weight divides between equals. Rows of borders are of ones.
fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (r, v) = (maker.dim("R"), maker.dim("V"));
    let wide = Maker { dtype: DType::Fp32, ..*maker };
    let classes = maker.fill == Fill::Classes;
    let mut x = if classes { vec![1.0; r * v] } else { maker.values("x", maker.fill, r * v, v) };
    for (row, x) in x.chunks_mut(v).enumerate().filter(|_| !classes) {
        for (i, z) in x.iter_mut().enumerate() {
            *z = match row % 3 {
                1 => z.round(),
                2 if i % 3 == 1 => f64::NEG_INFINITY,
                _ => *z,
            };
        }
    }
    let limits = |row: usize| if classes { LIMITS[0] } else { LIMITS[row % LIMITS.len()] };
    let each = |of: fn((f64, i32, f64, f64)) -> f64| (0..r).map(|row| of(limits(row))).collect::<Vec<_>>();
    let scale = if classes { wide.borders_from(0, r) } else { each(|limits| limits.0) };
    let mut inputs = maker.floats([("x", vec![r, v], x)]);
    let by = [("scale", vec![r], scale), ("top_p", vec![r], each(|limits| limits.2))];
    inputs.extend(wide.floats(by));
    inputs.extend(wide.floats([("min_p", vec![r], each(|limits| limits.3))]));
    inputs.insert("top_k".into(), Tensor::i32(&[r], (0..r).map(|row| limits(row).1).collect()));
    inputs
}

/// By sorting. Nothing is claimed of a token at a border that a rounding of weights could move.
fn compute(c: &Checked) -> References {
    let (r, v) = (c.dim("R"), c.dim("V"));
    let [scale, top_p, min_p] = ["scale", "top_p", "min_p"].map(|name| c.floats(name));
    let (mut y, mut kept) = (Vec::with_capacity(r * v), Vec::with_capacity(r));
    for (row, x) in c.floats("x").chunks(v).enumerate() {
        let z: Vec<f64> = x.iter().map(|x| f32_of(x * scale[row])).collect();
        if z.iter().any(|z| z.is_nan() || *z == f64::INFINITY) {
            y.extend(vec![(f64::NAN, 0.0); v]);
            kept.push((0.0, 0.0));
            continue;
        }
        let mut order: Vec<usize> = (0..v).filter(|i| z[*i] > f64::NEG_INFINITY).collect();
        order.sort_by(|a, b| z[*b].partial_cmp(&z[*a]).expect("neither is NaN"));
        match c.ints("top_k")[row] {
            0 => {}
            k => order.truncate(k as usize),
        }
        let far = |i: &usize| z[*i] - z[order[0]];
        let total: f64 = order.iter().map(|i| far(i).exp()).sum();
        let mut elements = vec![(f64::NEG_INFINITY, 0.0); v];
        let (mut before, mut count, mut doubtful) = (0.0, 0.0, false);
        for i in &order {
            let (e, border) = (far(i).exp(), top_p[row].max(0.0) * total);
            let first = before == 0.0;
            let reached = top_p[row] < 1.0 && before >= border && !first;
            let close =
                top_p[row] < 1.0 && !first && (before - border).abs() < total * 2e-6 + v as f64 * round::pow2(-40);
            let least = min_p[row].min(1.0);
            let near =
                far(i) != 0.0 && least > 0.0 && (e - least).abs() < least * 1e-6 * (1.0 + far(i).abs().min(100.0));
            let dropped = reached || e < least;
            let sure = !close && !near;
            elements[*i] = (if dropped { f64::NEG_INFINITY } else { z[*i] }, if sure { 0.0 } else { f64::INFINITY });
            count += f64::from(u8::from(!dropped));
            doubtful |= !sure;
            before += e;
        }
        y.extend(elements);
        kept.push((count, if doubtful { f64::INFINITY } else { 0.0 }));
    }
    BTreeMap::from([
        ("y".to_string(), Reference::new(vec![r, v], y)),
        ("kept".to_string(), Reference::new(vec![r], kept)),
    ])
}
