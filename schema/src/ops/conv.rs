//! Convolutions of images of three axes; those of fewer have axes of one place and one tap.
use super::*;

/// `x[B,C,D,H,W], w[O,I,KD,KH,KW], bias[O]? -> y[B,O,OD,OH,OW]`
pub static OP: Op = Op {
    name: "conv",
    about: "the convolution of images, plus bias: in groups of channels, each output a product over input channels and taps",
    inputs: &[Input::activation("x", IMAGE), Input::weight("w", WEIGHT), Input::weight("bias", &["O"]).optional()],
    attributes: &WINDOW,
    outputs: &[Output::out("y", OUTPUT)],
    extents: EXTENTS,
    refused: REFUSED,
    check,
    operations,
    ..Op::PLAIN
};

pub(super) const IMAGE: &[&str] = &["B", "C", "D", "H", "W"];
pub(super) const WEIGHT: &[&str] = &["O", "I", "KD", "KH", "KW"];
pub(super) const OUTPUT: &[&str] = &["B", "O", "OD", "OH", "OW"];

/// What belongs to one axis of an image.
pub struct Axis {
    /// Places of the image.
    pub places: &'static str,
    /// Taps.
    pub taps: &'static str,
    /// Places of the output.
    pub outputs: &'static str,
    /// Attributes: from one output to the next, from one tap to the next, zeros before the image and behind it.
    pub stride: &'static str,
    /// See [`Axis::stride`].
    pub dilation: &'static str,
    /// See [`Axis::stride`].
    pub before: &'static str,
    /// See [`Axis::stride`].
    pub behind: &'static str,
    /// Places that an image of `conv_dx` has behind those that the taps of its last output reach.
    pub extra: &'static str,
}

/// Depth, height and width.
pub const AXES: [Axis; 3] = [
    Axis {
        places: "D",
        taps: "KD",
        outputs: "OD",
        stride: "stride_d",
        dilation: "dilation_d",
        before: "pad_front",
        behind: "pad_back",
        extra: "extra_d",
    },
    Axis {
        places: "H",
        taps: "KH",
        outputs: "OH",
        stride: "stride_h",
        dilation: "dilation_h",
        before: "pad_top",
        behind: "pad_bottom",
        extra: "extra_h",
    },
    Axis {
        places: "W",
        taps: "KW",
        outputs: "OW",
        stride: "stride_w",
        dilation: "dilation_w",
        before: "pad_left",
        behind: "pad_right",
        extra: "extra_w",
    },
];

const fn stride(name: &'static str) -> Attribute {
    Attribute::count(name, 1, "1", "places from one output to the next")
}

const fn dilation(name: &'static str) -> Attribute {
    Attribute::count(name, 1, "1", "places from one tap to the next")
}

const fn pad(name: &'static str) -> Attribute {
    Attribute::count(name, 0, "0", "zeros on this side of the image; fewer than a window has places")
}

/// How windows lie on an image.
pub(super) const WINDOW: [Attribute; 13] = [
    Attribute::count("groups", 1, "1", "how many groups the channels are cut into, in their order"),
    stride("stride_d"),
    stride("stride_h"),
    stride("stride_w"),
    dilation("dilation_d"),
    dilation("dilation_h"),
    dilation("dilation_w"),
    pad("pad_front"),
    pad("pad_back"),
    pad("pad_top"),
    pad("pad_bottom"),
    pad("pad_left"),
    pad("pad_right"),
];

pub(super) const EXTENTS: &[(&str, Extent)] = &[
    CHANNELS,
    (
        "OD",
        Extent::Of("(D + pad_front + pad_back - dilation_d * (KD - 1) - 1) // stride_d + 1", |call| outputs(call, 0)),
    ),
    (
        "OH",
        Extent::Of("(H + pad_top + pad_bottom - dilation_h * (KH - 1) - 1) // stride_h + 1", |call| outputs(call, 1)),
    ),
    (
        "OW",
        Extent::Of("(W + pad_left + pad_right - dilation_w * (KW - 1) - 1) // stride_w + 1", |call| outputs(call, 2)),
    ),
];

pub(super) const CHANNELS: (&str, Extent) = ("C", Extent::Of("I * groups", channels));

fn channels(call: &Call) -> usize {
    call.dim("I").saturating_mul(call.count("groups"))
}

/// Places of an image and of the zeros beside it.
fn padded(call: &Call, axis: &Axis) -> usize {
    call.dim(axis.places).saturating_add(call.count(axis.before)).saturating_add(call.count(axis.behind))
}

/// Places from the first tap of a window to the last.
pub(super) fn window(call: &Call, axis: &Axis) -> usize {
    (call.dim(axis.taps) - 1).saturating_mul(call.count(axis.dilation)).saturating_add(1)
}

fn outputs(call: &Call, axis: usize) -> usize {
    let axis = &AXES[axis];
    (padded(call, axis) - window(call, axis)) / call.count(axis.stride) + 1
}

pub(super) const REFUSED: &str = "an axis of an image or a window without places; a window longer than the image and its \
    padding; padding of a whole window; O that is not a multiple of `groups`";

pub(super) fn check(call: &Call) -> Result<(), Error> {
    check_window(call)?;
    for axis in &AXES {
        let (image, window) = (padded(call, axis), window(call, axis));
        if call.dim(axis.places) == 0 {
            return invalid(format!("input `x`: axis {} is empty; an image has at least one place", axis.places));
        }
        if window > image {
            let of = axis.places;
            return invalid(format!(
                "input `w`: a window of {window} places does not fit the {image} of {of} and padding"
            ));
        }
    }
    Ok(())
}

/// What of a window has nothing to do with the extents of an image.
pub(super) fn check_window(call: &Call) -> Result<(), Error> {
    let (outputs, groups) = (call.dim("O"), call.count("groups"));
    if !outputs.is_multiple_of(groups) {
        return invalid(format!("param `groups`: {groups} groups do not share {outputs} channels; it must divide O"));
    }
    for axis in &AXES {
        if call.dim(axis.taps) == 0 {
            return invalid(format!("input `w`: axis {} is empty; a window has at least one tap", axis.taps));
        }
        let window = window(call, axis);
        for pad in [axis.before, axis.behind] {
            if call.count(pad) >= window {
                let given = call.count(pad);
                return invalid(format!("param `{pad}`: {given}; use less than the {window} places of a window"));
            }
        }
    }
    Ok(())
}

pub(super) fn operations(call: &Call) -> f64 {
    2.0 * call.elements(OUTPUT) * call.elements(&["I", "KD", "KH", "KW"])
}
