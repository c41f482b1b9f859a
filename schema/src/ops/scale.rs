//! A tensor times a number.
use super::*;

/// `x[..] -> y[..]`
pub static OP: Op = Op {
    name: "scale",
    about: "x times a number",
    inputs: &[Input::activation("x", &[REST])],
    attributes: &[FACTOR],
    outputs: &[Output::out("y", &[REST])],
    ..Op::PLAIN
};

const FACTOR: Attribute = Attribute::float(
    "factor",
    Included(-(f32::MAX as f64)),
    Included(f32::MAX as f64),
    "1",
    "the number; read as f64, rounded to f32",
);
