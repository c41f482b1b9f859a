//! The gradient of the images of a convolution, which is the transposed convolution.
use super::conv::{AXES, Axis, CHANNELS, IMAGE, OUTPUT, WEIGHT, WINDOW, check_window, operations, window};
use super::*;

/// `dy[B,O,OD,OH,OW], w[O,I,KD,KH,KW], offset[C]? -> dx[B,C,D,H,W]`
pub static OP: Op = Op {
    name: "conv_dx",
    about: "the gradient of x from that of conv's y; plus offset, the transposed convolution",
    inputs: &[Input::gradient("dy", OUTPUT), Input::weight("w", WEIGHT), Input::weight("offset", &["C"]).optional()],
    attributes: &ATTRIBUTES,
    outputs: &[Output::out("dx", IMAGE)],
    extents: &[
        CHANNELS,
        (
            "D",
            Extent::Of("(OD - 1) * stride_d + dilation_d * (KD - 1) + 1 + extra_d - pad_front - pad_back", |call| {
                places(call, 0)
            }),
        ),
        (
            "H",
            Extent::Of("(OH - 1) * stride_h + dilation_h * (KH - 1) + 1 + extra_h - pad_top - pad_bottom", |call| {
                places(call, 1)
            }),
        ),
        (
            "W",
            Extent::Of("(OW - 1) * stride_w + dilation_w * (KW - 1) + 1 + extra_w - pad_left - pad_right", |call| {
                places(call, 2)
            }),
        ),
    ],
    refused: "an axis of dy or a window without places; an axis of dx that padding leaves none; `extra` of a stride or more; \
        padding of a whole window; O that is not a multiple of `groups`",
    check,
    operations,
    gradient_of: Some("conv"),
    ..Op::PLAIN
};

const ATTRIBUTES: [Attribute; 16] = {
    let mut all = [extra("extra_d"); 16];
    let mut i = 0;
    while i < WINDOW.len() {
        all[i + 3] = WINDOW[i];
        i += 1;
    }
    all[1] = extra("extra_h");
    all[2] = extra("extra_w");
    all
};

const fn extra(name: &'static str) -> Attribute {
    Attribute::count(name, 0, "0", "places of x behind those that windows reach; fewer than the stride")
}

/// Places of an axis of dx and of the zeros beside it.
fn padded(call: &Call, axis: &Axis) -> usize {
    let steps = (call.dim(axis.outputs) - 1).saturating_mul(call.count(axis.stride));
    steps.saturating_add(window(call, axis)).saturating_add(call.count(axis.extra))
}

fn places(call: &Call, axis: usize) -> usize {
    let axis = &AXES[axis];
    padded(call, axis) - call.count(axis.before) - call.count(axis.behind)
}

fn check(call: &Call) -> Result<(), Error> {
    check_window(call)?;
    for axis in &AXES {
        let Axis { outputs, places, extra, stride, before, behind, .. } = axis;
        if call.dim(outputs) == 0 {
            return invalid(format!("input `dy`: axis {outputs} is empty; an image has at least one place"));
        }
        let (given, stride) = (call.count(extra), call.count(stride));
        if given >= stride {
            return invalid(format!("param `{extra}`: {given}; use less than the stride, {stride}"));
        }
        let (whole, pads) = (padded(call, axis), call.count(before).saturating_add(call.count(behind)));
        if whole <= pads {
            return invalid(format!(
                "param `{before}`: padding of {pads} leaves nothing of {whole} places for axis {places}"
            ));
        }
    }
    Ok(())
}
