//! The largest elements of a row.
use super::*;

/// `x[R,N], count[R]? -> index[R,K]`
pub static OP: Op = Op {
    name: "topk",
    about: "where the `k` largest of the first `count` elements of each row stand, ascending, the lowest among equals; then -1",
    inputs: &[Input::activation("x", &["R", "N"]), Input::index("count", &["R"], Holds::Length(&["N"])).optional()],
    attributes: &[Attribute::count("k", 1, "1", "how many are taken of a row")],
    outputs: &[Output::fixed("index", &["R", "K"], DType::I32)],
    extents: &[("K", Extent::Of("k", |call| call.count("k")))],
    refused: "N beyond i32",
    check: |call| match call.dim("N") {
        n if i32::try_from(n).is_err() => {
            invalid(format!("input `x`: N = {n}; an index is an i32, use at most 2^31 - 1"))
        }
        _ => Ok(()),
    },
    ..Op::PLAIN
};
