//! Log-probabilities of targets from hidden states, without the logits in memory.
use super::logprob::TEMPERATURE;
use super::*;

/// `x[M,K], w[V,K], target[M] -> logprob[M], lse[M]`
pub static OP: Op = Op {
    name: "linear_logprob",
    about: "logprob of the logits x w^T, which are never stored",
    inputs: &[
        Input::activation("x", &["M", "K"]),
        Input::weight("w", &["V", "K"]),
        Input::index("target", &["M"], Holds::BelowOrIgnored("V")),
    ],
    attributes: &[TEMPERATURE],
    outputs: &[Output::fixed("logprob", &["M"], DType::Fp32), Output::fixed("lse", &["M"], DType::Fp32)],
    operations: |call| 2.0 * call.elements(&["M", "V", "K"]),
    ..Op::PLAIN
};
