//! Rows of a table.
use super::*;

/// `w[V,D], tokens[T] -> y[T,D]`
pub static OP: Op = Op {
    name: "embedding",
    about: "the rows of w that the tokens name",
    inputs: &[Input::weight("w", &["V", "D"]), Input::index("tokens", &["T"], Holds::Below("V"))],
    outputs: &[Output::out("y", &["T", "D"])],
    operations: |call| call.elements(&["T", "D"]),
    ..Op::PLAIN
};
