//! `x -> y`, any shape
use super::*;

pub(super) const SPEC: Spec = Spec {
    name: "softcap",
    class: Class::Elementwise,
    inputs: &[InputSpec { name: "x", axes: &["R", REST], rows: 1, ..FLOAT }],
    params: &[ParamSpec { name: "cap", kind: ParamKind::Float, default: "30" }],
    outputs: &[OutputSpec { name: "y", axes: &["R", REST], kind: OutputKind::Out }],
    row_axes: 1,
    fills: &[Fill::Normal, Fill::Wide, Fill::Tiny, Fill::NearOverflow, Fill::Edges, Fill::AllBf16],
    outs: &DType::FLOATS,
    shape: &["R", "N"],
    make: scale::make,
    check: |c| c.require("cap", 30.0, |v| v > 1e-30 && v < 1e30, "positive, and within f32 with its inverse"),
    compute,
};

/// The tangent of a small argument is `(1 - e) / (1 + e)`, whose error is that of 1.
fn compute(c: &Checked) -> References {
    let cap = f32_of(c.float("cap", 30.0));
    let inverse = f32_of(1.0 / c.float("cap", 30.0));
    let elements = c.floats("x").into_iter().map(|x| {
        let value = cap * (x * inverse).tanh();
        if x == 0.0 || !x.is_finite() { (value, 0.0) } else { (value, value.abs() + cap + FLOOR) }
    });
    one("y", Reference::new(c.case.inputs["x"].shape().to_vec(), elements))
}
