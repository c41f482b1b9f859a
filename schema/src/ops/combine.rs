//! The outputs of experts, brought back to their tokens.
use super::*;

/// `x[R,N], row[T,K], weight[T,K], shared[T,N]? -> y[T,N]`
pub static OP: Op = Op {
    name: "combine",
    about: "for each token the rows of x that `row` names, weighted and added, and then `shared`",
    inputs: &[
        Input::activation("x", &["R", "N"]).rows(0),
        Input::index("row", &["T", "K"], Holds::Below("R")),
        Input::activation("weight", &["T", "K"]),
        Input::activation("shared", &["T", "N"]).optional(),
    ],
    outputs: &[Output::out("y", &["T", "N"])],
    operations: |call| 2.0 * call.elements(&["T", "K", "N"]),
    ..Op::PLAIN
};
