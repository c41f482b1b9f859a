//! Products of two tensors.
use super::*;

/// `a[..], b[..] -> y[..]`
pub static OP: Op = Op {
    name: "mul",
    about: "a * b",
    inputs: &[Input::activation("a", &[REST]), Input::activation("b", &[REST])],
    outputs: &[Output::out("y", &[REST])],
    ..Op::PLAIN
};
