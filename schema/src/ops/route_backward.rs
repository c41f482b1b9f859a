//! The gradient of the weights of chosen experts.
use super::route::{CHOSEN, JITTER, NORMALISE, SCALE, SCORING, check_chosen};
use super::*;

/// `logits[T,E], rank[T,E], dweight[T,E] -> dlogits[T,E]`
pub static OP: Op = Op {
    name: "route_backward",
    about: "the gradient of logits from that of route's weight; of an expert that was not chosen, dweight is not read",
    inputs: &[
        Input::activation("logits", &["T", "E"]),
        Input::index("rank", &["T", "E"], Holds::Ranks("E")),
        Input::gradient("dweight", &["T", "E"]).fp32(),
    ],
    attributes: &[CHOSEN, SCORING, JITTER, NORMALISE, SCALE],
    outputs: &[Output::fixed("dlogits", &["T", "E"], DType::Fp32)],
    refused: "E beyond i32",
    check: check_chosen,
    operations: |call| 4.0 * call.elements(&["T", "E"]),
    gradient_of: Some("route"),
    ..Op::PLAIN
};
