//! Group normalisation of images.
use super::layer_norm::EPS;
use super::*;

/// `x[B,C,P], w[C]?, bias[C]? -> y[B,C,P]`
pub static OP: Op = Op {
    name: "group_norm",
    about: "each group of channels of an image less its mean, over its standard deviation, times w, plus bias, then silu",
    inputs: &[
        Input::activation("x", &["B", "C", "P"]),
        Input::weight("w", &["C"]).optional(),
        Input::weight("bias", &["C"]).optional(),
    ],
    attributes: ATTRIBUTES,
    outputs: &[Output::out("y", &["B", "C", "P"])],
    refused: REFUSED,
    check,
    operations: |call| 9.0 * call.elements(&["B", "C", "P"]),
    ..Op::PLAIN
};

pub(super) const ATTRIBUTES: &[Attribute] = &[
    Attribute::count("groups", 1, "1", "how many groups the channels are cut into, in their order"),
    EPS,
    Attribute::flag("silu", "whether silu of the norm is taken before the last rounding"),
];

pub(super) const REFUSED: &str = "C that is not a multiple of `groups`";

pub(super) fn check(call: &Call) -> Result<(), Error> {
    let (channels, groups) = (call.dim("C"), call.count("groups"));
    if !channels.is_multiple_of(groups) {
        return invalid(format!("param `groups`: {groups} groups do not share {channels} channels; it must divide C"));
    }
    Ok(())
}
