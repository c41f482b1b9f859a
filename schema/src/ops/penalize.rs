//! Penalties of tokens that a text has.
use super::*;

/// `logits[R,V], tokens[S], begin[R], prompt_end[R], end[R], repetition[R], frequency[R], presence[R], bias[R,V]? -> y[R,V]`
pub static OP: Op = Op {
    name: "penalize",
    about: "logits plus `bias`, then those of tokens that a text has made less likely; its tokens so far are `begin..end` of `tokens`, its output those from `prompt_end` on",
    inputs: &[
        Input::activation("logits", &["R", "V"]),
        Input::index("tokens", &["S"], Holds::Below("V")).rows(0),
        Input::index("begin", &["R"], Holds::Place("S")),
        Input::index("prompt_end", &["R"], Holds::Place("S")),
        Input::index("end", &["R"], Holds::Place("S")),
        Input::activation("repetition", &["R"]).fp32(),
        Input::activation("frequency", &["R"]).fp32(),
        Input::activation("presence", &["R"]).fp32(),
        Input::activation("bias", &["R", "V"]).fp32().optional(),
    ],
    outputs: &[Output::fixed("y", &["R", "V"], DType::Fp32)],
    ..Op::PLAIN
};
