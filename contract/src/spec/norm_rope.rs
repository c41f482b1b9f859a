//! `norm_rope`: the inputs of its cases and its oracle.
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::norm_rope::OP,
    class: Class::Reduction,
    fills: SUMS,
    table: include_str!("../../ops/norm_rope.toml"),
    make,
    compute,
};

fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (t, h, d) = (maker.dim("T"), maker.dim("H"), maker.dim("D"));
    let mut x = maker.values("x", maker.fill, t * h * d, h * d);
    rms_norm::near_root(maker, &mut x);
    let mut w = maker.values("w", Fill::Normal, d, d);
    if maker.fill == Fill::Power {
        [x, w] = power::norm_rows(maker, "x", t * h, d);
    }
    if maker.fill == Fill::Classes {
        x = rms_norm::unit_rows(t * h, d);
        // Where nothing is rotated, the other element of a pair must only be finite.
        w = rms_norm::weights(maker, d);
        let half = d / 2;
        (half..d).filter(|i| !w[i - half].is_finite()).collect::<Vec<_>>().into_iter().for_each(|i| w[i] = 1.0);
    }
    let mut inputs = maker.floats([("x", vec![t, h, d], x), ("w", vec![d], w)]);
    inputs.insert("pos".into(), rope::positions(maker));
    inputs
}

/// The norm of each head in f64, then its rotation: what rounding does to the norm is turned with it. Of a pair with a
/// norm that is beyond f32 nothing is claimed.
fn compute(c: &Checked) -> References {
    let mut normed = rms_norm::elements(c, &c.floats("x"), &c.floats("w"));
    let beyond = |value: f64| value.is_finite() && value.abs() > HUGE;
    normed.iter_mut().filter(|(value, _)| beyond(*value)).for_each(|(_, condition)| *condition = f64::INFINITY);
    let shape = vec![c.dim("T"), c.dim("H"), c.dim("D")];
    one("y", Reference::new(shape, rope::elements(c, &normed, 1.0)))
}
