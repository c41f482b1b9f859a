//! The gradient of the gated delta rule.
use super::causal_conv1d::LEN;
use super::gated_delta_rule::{A_LOG, ATTRIBUTES, BETA, DECAY, DT_BIAS, K, Q, REFUSED, STATE, V, check};
use super::*;

/// `q[B,T,Hk,D], k[B,T,Hk,D], v[B,T,Hv,E], g[B,T,Hv,G], beta[B,T,Hv], a_log[Hv]?, dt_bias[Hv,G]?,
/// state[B,Hv,D,E]?, dy[B,T,Hv,E], dnext[B,Hv,D,E]?, len[B]?
/// -> dq[B,T,Hk,D], dk[B,T,Hk,D], dv[B,T,Hv,E], dg[B,T,Hv,G], dbeta[B,T,Hv], da_log[B,T,Hv], dstate[B,Hv,D,E]`
pub static OP: Op = Op {
    name: "gated_delta_rule_backward",
    about: "the gradients of gated_delta_rule's inputs from those of y and next; da_log and (for dt_bias) dg are summed by `token_sum`",
    inputs: &[
        Q,
        K,
        V,
        DECAY,
        BETA,
        A_LOG,
        DT_BIAS,
        STATE,
        Input::gradient("dy", &["B", "T", "Hv", "E"]),
        Input::gradient("dnext", &["B", "Hv", "D", "E"]).fp32().optional(),
        LEN,
    ],
    attributes: ATTRIBUTES,
    outputs: &[
        Output::out("dq", &["B", "T", "Hk", "D"]),
        Output::out("dk", &["B", "T", "Hk", "D"]),
        Output::out("dv", &["B", "T", "Hv", "E"]),
        Output::fixed("dg", &["B", "T", "Hv", "G"], DType::Fp32),
        Output::fixed("dbeta", &["B", "T", "Hv"], DType::Fp32),
        Output::fixed("da_log", &["B", "T", "Hv"], DType::Fp32),
        Output::fixed("dstate", &["B", "Hv", "D", "E"], DType::Fp32),
    ],
    refused: REFUSED,
    check,
    operations: |call| 24.0 * call.elements(&["B", "T", "Hv", "D", "E"]),
    gradient_of: Some("gated_delta_rule"),
    ..Op::PLAIN
};
