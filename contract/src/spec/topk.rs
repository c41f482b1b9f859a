//! `topk`: the inputs of its cases and its oracle.
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::topk::OP,
    class: Class::Elementwise,
    fills: &[Fill::Normal, Fill::Wide, Fill::Tiny, Fill::NearOverflow, Fill::Edges],
    table: include_str!("../../ops/topk.toml"),
    make,
    compute,
};

/// Rows take turns: numbers as they come, a few whole ones over and over, one alone, and zeros of both signs among others. So do
/// counts: all, some, none, one less than is asked for.
fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (r, n, k) = (maker.dim("R"), maker.dim("N"), maker.count("k", 1));
    let mut x = maker.values("x", maker.fill, r * n, n);
    for (row, x) in x.chunks_mut(n).enumerate() {
        let first = x[0];
        for v in x {
            *v = match row % 4 {
                1 => v.round(),
                2 => first,
                3 if v.abs() < 1.0 => 0f64.copysign(*v),
                _ => *v,
            };
        }
    }
    let mut inputs = maker.floats([("x", vec![r, n], x)]);
    if maker.has("count") {
        let some = maker.below("count", r, n + 1);
        let count = (0..r).map(|row| match row % 5 {
            0 => n as i32,
            2 => 0,
            3 => (k - 1).min(n) as i32,
            _ => some[row],
        });
        inputs.insert("count".into(), Tensor::i32(&[r], maker.ints("count", count.collect())));
    }
    inputs
}

/// All places in the order of values: a NaN before every number, -0 as +0, the lower place among equals.
fn compute(c: &Checked) -> References {
    let (r, n, k) = (c.dim("R"), c.dim("N"), c.dim("K"));
    let count = c.case.inputs.get("count").and_then(Tensor::as_i32);
    let mut index = Vec::with_capacity(r * k);
    for (row, x) in c.floats("x").chunks(n).enumerate() {
        let mut places: Vec<usize> = (0..count.map_or(n, |count| count[row] as usize)).collect();
        let value = |place: &usize| if x[*place].is_nan() { f64::INFINITY } else { x[*place] };
        places.sort_by(|a, b| {
            let of_numbers = value(b).partial_cmp(&value(a)).expect("neither is NaN");
            x[*b].is_nan().cmp(&x[*a].is_nan()).then(of_numbers)
        });
        places.truncate(k);
        places.sort_unstable();
        index.extend(places.iter().map(|place| *place as f64));
        index.resize((row + 1) * k, -1.0);
    }
    one("index", Reference::exact(vec![r, k], index))
}
