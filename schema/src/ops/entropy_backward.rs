//! The gradient of entropies.
use super::logprob::TEMPERATURE;
use super::*;

/// `logits[R,V], entropy[R], lse[R], dentropy[R], dlse[R]? -> dlogits[R,V]`
pub static OP: Op = Op {
    name: "entropy_backward",
    about: "the gradient of logits from those of entropy's outputs; entropy and lse are what it returned",
    inputs: &[
        Input::activation("logits", &["R", "V"]),
        Input::activation("entropy", &["R"]).fp32(),
        Input::activation("lse", &["R"]).fp32(),
        Input::gradient("dentropy", &["R"]).fp32(),
        Input::gradient("dlse", &["R"]).fp32().optional(),
    ],
    attributes: &[TEMPERATURE],
    outputs: &[Output::out("dlogits", &["R", "V"])],
    operations: |call| 5.0 * call.elements(&["R", "V"]),
    gradient_of: Some("entropy"),
    ..Op::PLAIN
};
