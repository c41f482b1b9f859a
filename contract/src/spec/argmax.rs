//! `argmax`: the inputs of its cases and its oracle.
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::argmax::OP,
    class: Class::Elementwise,
    fills: &[Fill::Normal, Fill::Wide, Fill::Tiny, Fill::NearOverflow, Fill::Edges],
    table: include_str!("../../ops/argmax.toml"),
    make,
    compute,
};

/// In every other row the maximum stands twice, so that "the lowest index among equals" is asked for.
fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (r, n) = (maker.dim("R"), maker.dim("N"));
    let mut x = maker.values("x", maker.fill, r * n, n);
    for row in x.chunks_mut(n).step_by(2) {
        let at = (0..n).max_by(|&a, &b| row[a].total_cmp(&row[b])).expect("rows are not empty");
        row[n - 1 - at] = row[at];
    }
    maker.floats([("x", vec![r, n], x)])
}

/// A NaN is larger than every number; -0 equals +0.
fn compute(c: &Checked) -> References {
    let n = c.dim("N");
    let index = |row: &[f64]| {
        let mut best = 0;
        for (i, v) in row.iter().enumerate() {
            if *v > row[best] || (v.is_nan() && !row[best].is_nan()) {
                best = i;
            }
        }
        best as f64
    };
    one("index", Reference::exact(vec![c.dim("R")], c.floats("x").chunks(n).map(index).collect()))
}
