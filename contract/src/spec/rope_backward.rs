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

/// Turned back.
fn compute(c: &Checked) -> References {
    let shape = vec![c.dim("T"), c.dim("H"), c.dim("D")];
    let exact: Vec<_> = c.floats("dy").into_iter().map(|v| (v, 0.0)).collect();
    one("dx", Reference::new(shape, rope::elements(c, &exact, -1.0)))
}
