//! The gradient of log-probabilities.
use super::logprob::TEMPERATURE;
use super::*;

/// `logits[R,V], target[R], lse[R], dlogprob[R], dlse[R]? -> dlogits[R,V]`
pub static OP: Op = Op {
    name: "logprob_backward",
    about: "the gradient of logits from those of logprob's outputs; lse is what logprob returned",
    inputs: &[
        Input::activation("logits", &["R", "V"]),
        Input::index("target", &["R"], Holds::BelowOrIgnored("V")),
        Input::activation("lse", &["R"]).fp32(),
        Input::gradient("dlogprob", &["R"]).fp32(),
        Input::gradient("dlse", &["R"]).fp32().optional(),
    ],
    attributes: &[TEMPERATURE],
    outputs: &[Output::out("dlogits", &["R", "V"])],
    operations: |call| 4.0 * call.elements(&["R", "V"]),
    gradient_of: Some("logprob"),
    ..Op::PLAIN
};
