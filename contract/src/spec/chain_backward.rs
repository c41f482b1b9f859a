//! `chain_backward`: the gradients of whole models. What they are held to is recorded, not computed here.
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::chain_backward::OP,
    class: Class::Chain,
    fills: &[Fill::Recorded, Fill::Normal],
    table: include_str!("../../ops/chain_backward.toml"),
    make,
    compute: |_| BTreeMap::new(),
};

/// Drawn sequences of tokens below V, or none at all: recorded ones are put in by whoever holds them. The first is as long
/// as T, the others are not, the last has a single token. A third of the tokens does not count, and no first one.
fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    if maker.fill == Fill::Recorded {
        return BTreeMap::new();
    }
    let (b, t, v) = (maker.dim("B"), maker.dim("T"), maker.dim("V"));
    let tokens = maker.ints("tokens", maker.below("tokens", b * t, v));
    let mut length: Vec<i32> = maker.below("length", b, t).iter().map(|fewer| t as i32 - fewer).collect();
    length[b - 1] = 1;
    length[0] = t as i32;
    let there = |i: usize| i % t > 0 && ((i % t) as i32) < length[i / t];
    let drawn = maker.below("count", b * t, 3).into_iter().enumerate();
    let count = drawn.map(|(i, c)| i32::from(there(i) && c > 0)).collect();
    let mut inputs = BTreeMap::from([
        ("tokens".to_string(), Tensor::i32(&[b, t], tokens)),
        ("count".to_string(), Tensor::i32(&[b, t], count)),
        ("length".to_string(), Tensor::i32(&[b], length)),
    ]);
    if maker.params.get("loss").is_some_and(|loss| loss == "policy") {
        // What a model says of tokens that nobody chose is near 1 in V; ratios lie around 1.
        let near = |x: f64| 0.3 * x - (v as f64).ln();
        let old = maker.values("old_logprob", Fill::Normal, b * t, t).into_iter().map(near);
        let old = old.map(|x| x as f32).collect();
        let advantage = maker.values("advantage", Fill::Normal, b, b).into_iter().map(|x| x as f32).collect();
        inputs.insert("old_logprob".into(), Tensor::fp32(&[b, t], old));
        inputs.insert("advantage".into(), Tensor::fp32(&[b], advantage));
    }
    inputs
}
