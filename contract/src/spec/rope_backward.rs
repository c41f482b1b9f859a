//! `rope_backward`: the inputs of its cases and its oracle.
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::rope_backward::OP,
    class: Class::Elementwise,
    fills: rope::SPEC.fills,
    table: include_str!("../../ops/rope_backward.toml"),
    make: |maker| rope::make(maker, "dy", 1.0),
    compute,
};

fn compute(c: &Checked) -> References {
    let shape = vec![c.dim("T"), c.dim("H"), c.dim("D")];
    one("dx", Reference::new(shape, turned(c)))
}

/// Value and condition of dy turned back.
pub(super) fn turned(c: &Checked) -> Vec<(f64, f64)> {
    let exact: Vec<_> = c.floats("dy").into_iter().map(|v| (v, 0.0)).collect();
    rope::elements(c, &exact, -1.0)
}
