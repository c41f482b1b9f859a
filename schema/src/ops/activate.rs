//! Activations of one input.
use super::*;

/// `x[..] -> y[..]`
pub static OP: Op = Op {
    name: "activate",
    about: "an activation of x: its gelu, the square of what of it is above 0, or its xIELU",
    inputs: &[Input::activation("x", &[REST])],
    attributes: ATTRIBUTES,
    outputs: &[Output::out("y", &[REST])],
    operations: |call| 2.0 * call.elements(&[REST]),
    ..Op::PLAIN
};

pub(super) const ATTRIBUTES: &[Attribute] = &[
    Attribute::choice(
        "kind",
        &["gelu", "gelu_tanh", "relu2", "xielu"],
        "which: gelu by the error function, or by the hyperbolic tangent; the square of the positive part; xIELU",
    ),
    of_xielu("alpha_p", "0.8", "of xielu: the share of squares above 0"),
    of_xielu("alpha_n", "0.8", "of xielu: the share of `e^x - 1 - x` below 0"),
    of_xielu("beta", "0.5", "of xielu: the share of x"),
];

const fn of_xielu(name: &'static str, default: &'static str, about: &'static str) -> Attribute {
    Attribute::float(name, Included(-1e38), Included(1e38), default, about)
}
