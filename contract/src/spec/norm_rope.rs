//! `x[T,H,D], w[D], pos[T] -> y[T,H,D]`
use super::*;

pub(super) const SPEC: Spec = Spec {
    name: "norm_rope",
    class: Class::Reduction,
    inputs: &[
        InputSpec { name: "x", axes: &["T", "H", "D"], rows: 1, ..FLOAT },
        InputSpec { name: "w", axes: &["D"], ..FLOAT },
        InputSpec { name: "pos", axes: &["T"], rows: 1, ..INT },
    ],
    params: &[rms_norm::PARAMS[0], rms_norm::PARAMS[1], rms_norm::PARAMS[2], rope::PARAMS[0], rope::PARAMS[1]],
    outputs: &[OutputSpec { name: "y", axes: &["T", "H", "D"], kind: OutputKind::Out }],
    row_axes: 1,
    fills: &[Fill::Normal, Fill::Wide, Fill::Tiny, Fill::NearOverflow, Fill::Edges],
    outs: &DType::FLOATS,
    shape: &["T", "H", "D"],
    make,
    check,
    compute,
};

fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (t, h, d) = (maker.dim("T"), maker.dim("H"), maker.dim("D"));
    let mut x = maker.values("x", maker.fill, t * h * d, h * d);
    rms_norm::near_root(maker, &mut x);
    let w = maker.values("w", Fill::Normal, d, d);
    let mut inputs = maker.floats([("x", vec![t, h, d], x), ("w", vec![d], w)]);
    inputs.insert("pos".into(), rope::positions(maker));
    inputs
}

fn check(c: &Checked) -> Result<(), Refusal> {
    c.require("eps", 1e-6, |v| v >= 0.0, "0 or more")?;
    rope::check(c)
}

/// The norm of each head in f64, then its rotation: what rounding does to the norm is turned with it.
fn compute(c: &Checked) -> References {
    let normed = rms_norm::elements(c, &c.floats("x"), &c.floats("w"));
    let shape = vec![c.dim("T"), c.dim("H"), c.dim("D")];
    one("y", Reference::new(shape, rope::elements(c, &normed)))
}
