//! `x -> y`, any shape
use super::*;

pub(super) const SPEC: Spec = Spec {
    name: "scale",
    class: Class::Elementwise,
    inputs: &[InputSpec { name: "x", axes: &["R", REST], rows: 1, ..FLOAT }],
    params: &[ParamSpec { name: "factor", kind: ParamKind::Float, default: "1" }],
    outputs: &[OutputSpec { name: "y", axes: &["R", REST], kind: OutputKind::Out }],
    row_axes: 1,
    fills: &[Fill::Normal, Fill::Wide, Fill::Tiny, Fill::NearOverflow, Fill::Edges, Fill::AllBf16],
    outs: &DType::FLOATS,
    shape: &["R", "N"],
    make,
    check: |c| c.require("factor", 1.0, |v| v.abs() < 3e38, "within f32"),
    compute,
};

pub(super) fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (r, n) = (maker.dim("R"), maker.dim("N"));
    maker.floats([("x", vec![r, n], maker.values("x", maker.fill, r * n, n))])
}

fn compute(c: &Checked) -> References {
    let factor = f32_of(c.float("factor", 1.0));
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
