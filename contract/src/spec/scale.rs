//! `scale`: the inputs of its cases and its oracle.
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::scale::OP,
    class: Class::Elementwise,
    fills: &[Fill::Normal, Fill::Wide, Fill::Tiny, Fill::NearOverflow, Fill::Edges, Fill::AllBf16],
    table: include_str!("../../ops/scale.toml"),
    make,
    compute,
};

pub(super) fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (r, n) = (maker.dim("R"), maker.dim("N"));
    maker.floats([("x", vec![r, n], maker.values("x", maker.fill, r * n, n))])
}

fn compute(c: &Checked) -> References {
    let factor = f32_of(c.float("factor"));
    let elements = c.floats("x").into_iter().map(|x| {
        let value = x * factor;
        if value == 0.0 && (x == 0.0 || factor == 0.0) || !x.is_finite() {
            (value, 0.0)
        } else {
            (value, value.abs() + FLOOR)
        }
    });
    one("y", Reference::new(c.case.inputs["x"].shape().to_vec(), elements))
}
