//! `norm_rope_dw`: the inputs of its cases and its oracle.
use super::token_sum::{mask_and_carry, sums};
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::norm_rope_dw::OP,
    class: Class::Reduction,
    fills: norm_rope::SPEC.fills,
    table: include_str!("../../ops/norm_rope_dw.toml"),
    make,
    compute,
};

fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (t, h, d) = (maker.dim("T"), maker.dim("H"), maker.dim("D"));
    let [x, dy] = rms_norm_dw::rows(maker, t * h, d);
    let mut inputs = maker.floats([("x", vec![t, h, d], x), ("dy", vec![t, h, d], dy)]);
    inputs.insert("pos".into(), rope::positions(maker));
    inputs.extend(mask_and_carry(maker, t, [64, d]));
    inputs
}

/// The gradients turned back in f64, as in `norm_rope_backward`.
fn compute(c: &Checked) -> References {
    let d = c.dim("D");
    one("dw", sums(c, d, &rms_norm_dw::terms(c, d, &norm_rope_backward::turned(c))))
}
