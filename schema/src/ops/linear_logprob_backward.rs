//! The gradient of log-probabilities from hidden states, without the logits in memory.
use super::logprob::TEMPERATURE;
use super::*;

/// `x[M,K], w[V,K], target[M], lse[M], dlogprob[M], dlse[M]?, mask[M]?, carry[V,K]? -> dx[M,K], dw[V,K]`
pub static OP: Op = Op {
    name: "linear_logprob_backward",
    about: "the gradients of x and w from those of linear_logprob's outputs; lse is what it returned; the logits and their \
            gradients are never stored",
    inputs: &[
        Input::activation("x", &["M", "K"]),
        Input::weight("w", &["V", "K"]),
        Input::index("target", &["M"], Holds::BelowOrIgnored("V")),
        Input::activation("lse", &["M"]).fp32(),
        Input::gradient("dlogprob", &["M"]).fp32(),
        Input::gradient("dlse", &["M"]).fp32().optional(),
        Input::mask(&["M"]),
        Input::carry(&["V", "K"]),
    ],
    attributes: &[TEMPERATURE],
    outputs: &[Output::out("dx", &["M", "K"]), Output::token_sum("dw", &["V", "K"])],
    operations: |call| 6.0 * call.elements(&["M", "V", "K"]),
    gradient_of: Some("linear_logprob"),
    ..Op::PLAIN
};
