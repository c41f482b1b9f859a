//! The entropy of rows of logits.
use super::logprob::TEMPERATURE;
use super::*;

/// `logits[R,V] -> entropy[R], lse[R]`
pub static OP: Op = Op {
    name: "entropy",
    about: "the entropy of each row's distribution, and logprob's lse",
    inputs: &[Input::activation("logits", &["R", "V"])],
    attributes: &[TEMPERATURE],
    outputs: &[Output::fixed("entropy", &["R"], DType::Fp32), Output::fixed("lse", &["R"], DType::Fp32)],
    operations: |call| 4.0 * call.elements(&["R", "V"]),
    ..Op::PLAIN
};
