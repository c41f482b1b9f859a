//! The gradient of a table.
use super::*;

/// `dy[T,D], tokens[T], mask[T]?, carry[V,D] -> dw[V,D]`
pub static OP: Op = Op {
    name: "embedding_dw",
    about: "the gradient of w from that of embedding's y, added to `carry`",
    inputs: &[
        Input::gradient("dy", &["T", "D"]),
        Input::index("tokens", &["T"], Holds::Below("V")),
        Input::mask(&["T"]),
        Input { optional: false, ..Input::carry(&["V", "D"]) },
    ],
    outputs: &[Output::token_sum("dw", &["V", "D"])],
    operations: |call| call.elements(&["T", "D"]),
    gradient_of: Some("embedding"),
    ..Op::PLAIN
};
