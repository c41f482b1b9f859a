//! The gradients of the weight and the bias of a convolution.
use super::conv::{EXTENTS, IMAGE, OUTPUT, REFUSED, WEIGHT, WINDOW, check, operations};
use super::*;

/// `x[B,C,D,H,W], dy[B,O,OD,OH,OW], mask[B]?, carry[O,I,KD,KH,KW] -> dw[O,I,KD,KH,KW], dbias[B,O]`
pub static OP: Op = Op {
    name: "conv_dw",
    about: "the gradient of w from that of conv's y, added to `carry` place after place of the images that count; and sums of \
            dy over each image, of which `token_sum` makes the gradient of bias",
    inputs: &[
        Input::activation("x", IMAGE),
        Input::gradient("dy", OUTPUT),
        Input::mask(&["B"]),
        // How many taps there are nothing else says.
        Input { optional: false, ..Input::carry(WEIGHT) },
    ],
    attributes: &WINDOW,
    outputs: &[Output::token_sum("dw", WEIGHT), Output::fixed("dbias", &["B", "O"], DType::Fp32)],
    extents: EXTENTS,
    refused: REFUSED,
    check,
    operations,
    gradient_of: Some("conv"),
    ..Op::PLAIN
};
