//! `chain`: whole models. Their reference is recorded, not computed here.
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::chain::OP,
    class: Class::Chain,
    fills: &[Fill::Recorded, Fill::Normal],
    table: include_str!("../../ops/chain.toml"),
    make,
    compute: |_| BTreeMap::new(),
};

/// Drawn tokens below V, or none at all: recorded tokens are put in by whoever holds the checkpoint.
fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    if maker.fill == Fill::Recorded {
        return BTreeMap::new();
    }
    let (b, t) = (maker.dim("B"), maker.dim("T"));
    let drawn = maker.below("tokens", b * t, maker.dim("V"));
    BTreeMap::from([("tokens".to_string(), Tensor::i32(&[b, t], maker.ints("tokens", drawn)))])
}
