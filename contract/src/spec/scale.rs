//! `scale`: the inputs of its cases and its oracle.
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::scale::OP,
    class: Class::Elementwise,
    fills: &[Fill::Normal, Fill::Wide, Fill::Tiny, Fill::NearOverflow, Fill::Edges, Fill::AllBf16, Fill::Classes],
    table: include_str!("../../ops/scale.toml"),
    make,
    compute,
};

pub(super) fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (r, n) = (maker.dim("R"), maker.dim("N"));
    let x = match maker.fill {
        // A factor makes largest numbers of dtypes out of these, which the case's own dtype does not hold.
        Fill::Classes => {
            let others = [32640.0, -32640.0, 65280.0, -65280.0];
            maker.borders().into_iter().chain(others).cycle().take(r * n).collect()
        }
        fill => maker.values("x", fill, r * n, n),
    };
    maker.floats([("x", vec![r, n], x)])
}

fn compute(c: &Checked) -> References {
    let factor = f32_of(c.float("factor"));
    let elements = c.floats("x").into_iter().map(|x| product(x, factor));
    one("y", Reference::new(c.case.inputs["x"].shape().to_vec(), elements))
}

/// Value and condition of a product. One that f32 holds is exact.
pub(super) fn product(x: f64, factor: f64) -> (f64, f64) {
    let value = x * factor;
    if f32_of(value) == value || !x.is_finite() || !factor.is_finite() {
        (value, 0.0)
    } else {
        (value, value.abs() + FLOOR)
    }
}
