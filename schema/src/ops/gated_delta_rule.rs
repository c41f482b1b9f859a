//! The gated delta rule: a state that forgets, is corrected by each key, and is read by each query.
use super::causal_conv1d::LEN;
use super::*;

/// `q[B,T,Hk,D], k[B,T,Hk,D], v[B,T,Hv,E], g[B,T,Hv,G], beta[B,T,Hv], a_log[Hv]?, dt_bias[Hv,G]?,
/// state[B,Hv,D,E]?, len[B]? -> y[B,T,Hv,E], next[B,Hv,D,E]`
pub static OP: Op = Op {
    name: "gated_delta_rule",
    about: "each token decays the state by e^g, moves what k reads from it towards v by beta, and reads it by q",
    inputs: &[Q, K, V, DECAY, BETA, A_LOG, DT_BIAS, STATE, LEN],
    attributes: ATTRIBUTES,
    outputs: &[Output::out("y", &["B", "T", "Hv", "E"]), Output::fixed("next", &["B", "Hv", "D", "E"], DType::Fp32)],
    refused: REFUSED,
    check,
    operations: |call| 8.0 * call.elements(&["B", "T", "Hv", "D", "E"]),
    ..Op::PLAIN
};

pub(super) const Q: Input = Input::activation("q", &["B", "T", "Hk", "D"]);
pub(super) const K: Input = Input::activation("k", &["B", "T", "Hk", "D"]);
pub(super) const V: Input = Input::activation("v", &["B", "T", "Hv", "E"]);
pub(super) const STATE: Input = Input::state("state", &["B", "Hv", "D", "E"]).optional();

/// The logarithm of what is left of the state, one number for a head or one for each element of a key.
pub(super) const DECAY: Input = Input::activation("g", &["B", "T", "Hv", "G"]).fp32();

/// How far the state is moved.
pub(super) const BETA: Input = Input::activation("beta", &["B", "T", "Hv"]).fp32();

/// The logarithm of a head's rate, by which its decays come of g.
pub(super) const A_LOG: Input = Input::weight("a_log", &["Hv"]).fp32().optional();

/// What is added to g then.
pub(super) const DT_BIAS: Input = Input::weight("dt_bias", &["Hv", "G"]).fp32().optional();

pub(super) const ATTRIBUTES: &[Attribute] =
    &[Attribute::float("scale", Included(-(f32::MAX as f64)), Included(f32::MAX as f64), "", SCALE)
        .default(DefaultValue::Of("1/sqrt(D)", |dims| Value::Float(1.0 / (dims["D"].max(1) as f64).sqrt())))];

const SCALE: &str = "queries are multiplied with it; read as f64, rounded to f32";

pub(super) const REFUSED: &str = "Hk = 0; Hv not a multiple of Hk; G other than 1 or D; dt_bias without a_log";

pub(super) fn check(call: &Call) -> Result<(), Error> {
    let [hk, hv, d, g] = ["Hk", "Hv", "D", "G"].map(|axis| call.dim(axis));
    if hk == 0 || hv % hk != 0 {
        return invalid(format!("input `v`: Hv = {hv} must be a multiple of Hk = {hk}"));
    }
    if g != 1 && g != d {
        return invalid(format!("input `g`: G is {g}; it must be 1 or D = {d}"));
    }
    if call.has("dt_bias") && !call.has("a_log") {
        return invalid("input `dt_bias`: it is added where there is an `a_log`".into());
    }
    Ok(())
}
