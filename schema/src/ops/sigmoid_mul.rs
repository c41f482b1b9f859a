//! Rows times sigmoids of gates.
use super::*;

/// `gate[R,G], x[R,N] -> y[R,N]`
pub static OP: Op = Op {
    name: "sigmoid_mul",
    about: "sigmoid(gate) times x, each gate for N / G elements side by side",
    inputs: &[Input::activation("gate", &["R", "G"]), Input::activation("x", &["R", "N"])],
    outputs: &[Output::out("y", &["R", "N"])],
    refused: REFUSED,
    check,
    operations: |call| call.elements(&["R", "N"]),
    ..Op::PLAIN
};

pub(super) const REFUSED: &str = "N that is not a multiple of G";

pub(super) fn check(call: &Call) -> Result<(), Error> {
    let (gates, n) = (call.dim("G"), call.dim("N"));
    if !n.is_multiple_of(gates) {
        return invalid(format!("input `gate`: {gates} gates do not share {n} elements; G must divide N"));
    }
    Ok(())
}
