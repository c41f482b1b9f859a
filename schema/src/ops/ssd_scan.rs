//! The scan of Mamba-2.
use super::causal_conv1d::LEN;
use super::*;

/// `x[B,T,H,P], dt[B,T,H], a_log[H], b[B,T,G,N], c[B,T,G,N], d[H]?, dt_bias[H]?, state[B,H,P,N]?, len[B]?
/// -> y[B,T,H,P], next[B,H,P,N]`
pub static OP: Op = Op {
    name: "ssd_scan",
    about: "the state-space scan of Mamba-2, position after position, from `state` to `next`, the state for what follows",
    inputs: &[X, DT, A_LOG, B, C, D, DT_BIAS, STATE, LEN],
    attributes: &[DT_MIN, DT_MAX],
    outputs: &[Output::out("y", &["B", "T", "H", "P"]), Output::fixed("next", &["B", "H", "P", "N"], DType::Fp32)],
    refused: "G = 0; H not a multiple of G; dt_max below dt_min but not 0",
    check,
    operations: |call| operations(call, 5.0),
    ..Op::PLAIN
};

pub(super) const X: Input = Input::activation("x", &["B", "T", "H", "P"]);
pub(super) const DT: Input = Input::activation("dt", &["B", "T", "H"]);
pub(super) const A_LOG: Input = Input::weight("a_log", &["H"]);
pub(super) const B: Input = Input::activation("b", &["B", "T", "G", "N"]);
pub(super) const C: Input = Input::activation("c", &["B", "T", "G", "N"]);
pub(super) const D: Input = Input::weight("d", &["H"]).optional();
pub(super) const DT_BIAS: Input = Input::weight("dt_bias", &["H"]).optional();
pub(super) const STATE: Input = Input::state("state", &["B", "H", "P", "N"]).optional();

pub(super) const DT_MIN: Attribute =
    Attribute::float("dt_min", Included(0.0), Included(1e38), "0", "steps are no shorter, behind their softplus");
pub(super) const DT_MAX: Attribute =
    Attribute::float("dt_max", Included(0.0), Included(1e38), "0", "steps are no longer; `0` means no limit");

/// So many for each element of a state at each position.
pub(super) fn operations(call: &Call, each: f64) -> f64 {
    each * call.elements(&["B", "T", "H", "P", "N"])
}

pub(super) fn check(call: &Call) -> Result<(), Error> {
    let (heads, groups, min, max) = (call.dim("H"), call.dim("G"), call.float("dt_min"), call.float("dt_max"));
    if groups == 0 || !heads.is_multiple_of(groups) {
        return invalid(format!("input `x`: H = {heads} must be a multiple of G = {groups}"));
    }
    if max != 0.0 && max < min {
        return invalid(format!("param `dt_max`: {max} is below dt_min {min}; use 0 for no limit"));
    }
    Ok(())
}
