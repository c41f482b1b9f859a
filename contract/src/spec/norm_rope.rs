//! `norm_rope`: the inputs of its cases and its oracle.
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::norm_rope::OP,
    class: Class::Reduction,
    fills: &[Fill::Normal, Fill::Wide, Fill::Tiny, Fill::NearOverflow, Fill::Edges],
    table: include_str!("../../ops/norm_rope.toml"),
    make,
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

/// The norm of each head in f64, then its rotation: what rounding does to the norm is turned with it.
fn compute(c: &Checked) -> References {
    let normed = rms_norm::elements(c, &c.floats("x"), &c.floats("w"));
    let shape = vec![c.dim("T"), c.dim("H"), c.dim("D")];
    one("y", Reference::new(shape, rope::elements(c, &normed)))
}
