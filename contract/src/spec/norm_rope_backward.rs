//! `norm_rope_backward`: the inputs of its cases and its oracle.
use super::rms_norm_backward::Product;
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::norm_rope_backward::OP,
    class: Class::Reduction,
    fills: norm_rope::SPEC.fills,
    table: include_str!("../../ops/norm_rope_backward.toml"),
    make,
    compute,
};

fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (t, h, d) = (maker.dim("T"), maker.dim("H"), maker.dim("D"));
    let [x, w, dy] = rms_norm_backward::rows(maker, t * h, d);
    let mut inputs = maker.floats([("x", vec![t, h, d], x), ("w", vec![d], w), ("dy", vec![t, h, d], dy)]);
    inputs.insert("pos".into(), rope::positions(maker));
    inputs
}

/// The gradients turned back in f64, then the norm of each head.
fn compute(c: &Checked) -> References {
    let shape = vec![c.dim("T"), c.dim("H"), c.dim("D")];
    one("dx", Reference::new(shape, rms_norm_backward::elements(c, &c.floats("x"), &turned(c))))
}

/// dy turned back in f64: what rounding does to it is its error. Where it is beyond f32, nothing is claimed.
pub(super) fn turned(c: &Checked) -> Vec<Product> {
    let turned = rope_backward::turned(c).into_iter().map(|(value, error)| {
        let beyond = error > 0.0 && value.is_finite() && value.abs() > HUGE;
        Product { value, error: if beyond { f64::INFINITY } else { error } }
    });
    turned.collect()
}
