//! `softcap`: the inputs of its cases and its oracle.
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::softcap::OP,
    class: Class::Elementwise,
    fills: GATES,
    table: include_str!("../../ops/softcap.toml"),
    make,
    compute,
};

fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (r, n) = (maker.dim("R"), maker.dim("N"));
    match maker.fill {
        Fill::Sharp => maker.floats([("x", vec![r, n], sharp::softcap(r * n))]),
        _ => scale::make(maker),
    }
}

/// The tangent of a small argument is `(1 - e) / (1 + e)`, whose error is that of 1.
fn compute(c: &Checked) -> References {
    let cap = f32_of(c.float("cap"));
    let inverse = f32_of(1.0 / c.float("cap"));
    let elements = c.floats("x").into_iter().map(|x| {
        let value = cap * (x * inverse).tanh();
        if x == 0.0 || !x.is_finite() { (value, 0.0) } else { (value, value.abs() + cap + FLOOR) }
    });
    one("y", Reference::new(c.case.inputs["x"].shape().to_vec(), elements))
}
