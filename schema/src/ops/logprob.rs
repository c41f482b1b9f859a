//! Log-probabilities of targets.
use super::*;

/// `logits[R,V], target[R] -> logprob[R], lse[R]`
pub static OP: Op = Op {
    name: "logprob",
    about: "the log-probability of each row's target, and the log of the sum of exponentials",
    inputs: &[Input::activation("logits", &["R", "V"]), Input::index("target", &["R"], Holds::BelowOrIgnored("V"))],
    attributes: &[TEMPERATURE],
    outputs: &[Output::fixed("logprob", &["R"], DType::Fp32), Output::fixed("lse", &["R"], DType::Fp32)],
    operations: |call| 2.0 * call.elements(&["R", "V"]),
    ..Op::PLAIN
};

/// Its inverse is an f32 that is neither 0 nor infinite.
pub(super) const TEMPERATURE: Attribute = Attribute::float(
    "temperature",
    Included(3e-39),
    Included(1e45),
    "1",
    "logits are multiplied with its inverse; read as f64",
);
