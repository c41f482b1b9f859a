//! The end of a sum over tokens.
use super::*;

/// `x[C,N] -> y[N]`
pub static OP: Op = Op {
    name: "fold",
    about: "the sum of C rows, the upper half added to the lower until one is left",
    inputs: &[Input::gradient("x", &["C", "N"])],
    outputs: &[Output::out("y", &["N"]).rows(0)],
    refused: "C that is no power of two",
    check,
    operations: |call| call.elements(&["C", "N"]),
    ..Op::PLAIN
};

fn check(call: &Call) -> Result<(), Error> {
    let c = call.dim("C");
    if !c.is_power_of_two() {
        return invalid(format!("input `x`: C = {c} must be a power of two"));
    }
    Ok(())
}
