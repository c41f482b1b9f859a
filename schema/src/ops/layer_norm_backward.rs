//! The gradient of a layer normalisation.
use super::layer_norm::EPS;
use super::*;

/// `x[R,N], w[N]?, dy[R,N] -> dx[R,N]`
pub static OP: Op = Op {
    name: "layer_norm_backward",
    about: "the gradient of x from that of layer_norm's y",
    inputs: &[
        Input::activation("x", &["R", "N"]),
        Input::weight("w", &["N"]).optional(),
        Input::gradient("dy", &["R", "N"]),
    ],
    attributes: &[EPS],
    outputs: &[Output::out("dx", &["R", "N"])],
    operations: |call| 13.0 * call.elements(&["R", "N"]),
    gradient_of: Some("layer_norm"),
    ..Op::PLAIN
};
