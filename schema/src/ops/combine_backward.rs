//! The gradient of the sum of experts' outputs.
use super::*;

/// `x[R,N], row[T,K], weight[T,K], dy[T,N] -> dx[R,N], dweight[T,K]`
pub static OP: Op = Op {
    name: "combine_backward",
    about: "the gradients of x and weight from that of combine's y; that of shared is dy",
    inputs: &[
        Input::activation("x", &["R", "N"]).rows(0),
        Input::index("row", &["T", "K"], Holds::Distinct("R")),
        Input::activation("weight", &["T", "K"]),
        Input::gradient("dy", &["T", "N"]),
    ],
    outputs: &[Output::out("dx", &["R", "N"]), Output::fixed("dweight", &["T", "K"], DType::Fp32)],
    refused: "more entries in `row` than R",
    check,
    operations: |call| 3.0 * call.elements(&["T", "K", "N"]),
    gradient_of: Some("combine"),
    ..Op::PLAIN
};

fn check(call: &Call) -> Result<(), Error> {
    let (rows, entries) = (call.dim("R"), call.dim("T").saturating_mul(call.dim("K")));
    if entries > rows {
        return invalid(format!("input `row`: {entries} entries name {rows} rows; each row is named once at most"));
    }
    Ok(())
}
