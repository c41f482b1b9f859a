//! Index of the largest element of a row.
use super::*;

/// `x[R,N] -> index[R]`
pub static OP: Op = Op {
    name: "argmax",
    about: "the index of the largest element of each row, the lowest among equals",
    inputs: &[Input::activation("x", &["R", "N"])],
    outputs: &[Output::fixed("index", &["R"], DType::I32)],
    refused: "N = 0; N beyond i32",
    check: |call| match call.dim("N") {
        0 => invalid("input `x`: axis N is empty; a row has at least one element".into()),
        n if i32::try_from(n).is_err() => {
            invalid(format!("input `x`: N = {n}; an index is an i32, use at most 2^31 - 1"))
        }
        _ => Ok(()),
    },
    ..Op::PLAIN
};
