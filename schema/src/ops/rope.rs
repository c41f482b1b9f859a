//! Rotary position embedding.
use super::*;

/// `x[T,H,D], pos[T] -> y[T,H,D]`
pub static OP: Op = Op {
    name: "rope",
    about: "pairs of elements of each head, turned by their position",
    inputs: &[Input::activation("x", &["T", "H", "D"]), Input::index("pos", &["T"], Holds::Position)],
    attributes: &[THETA, PAIRING],
    outputs: &[Output::out("y", &["T", "H", "D"])],
    refused: "odd D",
    check,
    operations: |call| 3.0 * call.elements(&["T", "H", "D"]),
    ..Op::PLAIN
};

pub(super) const THETA: Attribute =
    Attribute::float("theta", Excluded(0.0), Unbounded, "10000", "base of the frequencies; read as f64");

pub(super) const PAIRING: Attribute = Attribute::choice(
    "pairing",
    &["half", "interleaved"],
    "`half`: (i, i + D/2) turn together; `interleaved`: (2i, 2i + 1)",
);

pub(super) fn check(call: &Call) -> Result<(), Error> {
    match call.dim("D") {
        dim if dim % 2 == 0 => Ok(()),
        dim => {
            invalid(format!("input `{}`: D = {dim} must be even, RoPE turns pairs of elements", call.op.inputs[0].name))
        }
    }
}
