//! The scan of Mamba.
use super::causal_conv1d::LEN;
use super::*;

/// `x[B,T,C], dt[B,T,C], a_log[C,N], b[B,T,N], c[B,T,N], d[C]?, dt_bias[C]?, state[B,C,N]?, len[B]? -> y[B,T,C], next[B,C,N]`
pub static OP: Op = Op {
    name: "selective_scan",
    about: "the scan of Mamba, whose channels have steps and rates of their own, from `state` to `next`, the state for what follows",
    inputs: &[X, DT, A_LOG, B, C, D, DT_BIAS, STATE, LEN],
    outputs: &[Output::out("y", &["B", "T", "C"]), Output::fixed("next", &["B", "C", "N"], DType::Fp32)],
    operations: |call| operations(call, 5.0),
    ..Op::PLAIN
};

pub(super) const X: Input = Input::activation("x", &["B", "T", "C"]);
pub(super) const DT: Input = Input::activation("dt", &["B", "T", "C"]);
pub(super) const A_LOG: Input = Input::weight("a_log", &["C", "N"]);
pub(super) const B: Input = Input::activation("b", &["B", "T", "N"]);
pub(super) const C: Input = Input::activation("c", &["B", "T", "N"]);
pub(super) const D: Input = Input::weight("d", &["C"]).optional();
pub(super) const DT_BIAS: Input = Input::weight("dt_bias", &["C"]).optional();
pub(super) const STATE: Input = Input::state("state", &["B", "C", "N"]).optional();

/// So many for each element of a state at each position.
pub(super) fn operations(call: &Call, each: f64) -> f64 {
    each * call.elements(&["B", "T", "C", "N"])
}
