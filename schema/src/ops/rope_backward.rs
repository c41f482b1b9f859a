//! The gradient of a rotary position embedding.
use super::rope::{PAIRING, THETA};
use super::*;

/// `dy[T,H,D], pos[T] -> dx[T,H,D]`
pub static OP: Op = Op {
    name: "rope_backward",
    about: "the gradient of x from that of rope's y: pairs turned back by their position",
    inputs: &[Input::gradient("dy", &["T", "H", "D"]), Input::index("pos", &["T"], Holds::Position)],
    attributes: &[THETA, PAIRING],
    outputs: &[Output::out("dx", &["T", "H", "D"])],
    refused: "odd D",
    check: rope::check,
    operations: |call| 3.0 * call.elements(&["T", "H", "D"]),
    gradient_of: Some("rope"),
    ..Op::PLAIN
};
