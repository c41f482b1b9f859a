//! A causal convolution of each channel by itself.
use super::*;

/// `x[B,T,C], w[C,K], bias[C]?, state[B,J,C]?, len[B]? -> y[B,T,C], next[B,J,C]`
pub static OP: Op = Op {
    name: "causal_conv1d",
    about: "each channel over its last K rows, those of `state` before the first; `next` is the state for what follows",
    inputs: &[
        Input::activation("x", &["B", "T", "C"]),
        Input::weight("w", &["C", "K"]),
        Input::weight("bias", &["C"]).optional(),
        Input::state("state", &["B", "J", "C"]).optional(),
        LEN,
    ],
    outputs: &[Output::out("y", &["B", "T", "C"]), Output::fixed("next", &["B", "J", "C"], DType::Fp32)],
    extents: BEFORE,
    refused: "K = 0; J other than K - 1",
    check,
    operations,
    ..Op::PLAIN
};

/// How many rows of a sequence there are; those behind them are padding.
pub(super) const LEN: Input = Input::index("len", &["B"], Holds::Length(&["T"])).optional();

/// How many rows before its own an output reads.
pub(super) const BEFORE: &[(&str, Extent)] = &[("J", Extent::Of("K - 1", |call| call.dim("K") - 1))];

pub(super) fn check(call: &Call) -> Result<(), Error> {
    if call.dim("K") == 0 {
        let name = call.op.inputs.iter().find(|input| input.axes.contains(&"K")).map_or("", |input| input.name);
        return invalid(format!("input `{name}`: axis K is empty; a convolution has at least one tap"));
    }
    Ok(())
}

pub(super) fn operations(call: &Call) -> f64 {
    2.0 * call.elements(&["B", "T", "C", "K"])
}
