//! The gradient of the gated delta rule.
use super::causal_conv1d::LEN;
use super::gated_delta_rule::{A_LOG, ATTRIBUTES, BETA, DECAY, DT_BIAS, REFUSED, check};
use super::*;

/// `q, k, v, g, beta, a_log?, dt_bias?, state?, dy[B,T,Hv,E], dnext[B,Hv,D,E]?, len? -> dq, dk, dv, dg, dbeta,
/// da_log[B,T,Hv], dstate`
pub static OP: Op = Op {
    name: "gated_delta_rule_backward",
    about: "the gradients of gated_delta_rule's inputs from those of y and next; da_log and (for dt_bias) dg are summed by `token_sum`",
    inputs: &[
        Input::activation("q", &["B", "T", "Hk", "D"]),
        Input::activation("k", &["B", "T", "Hk", "D"]),
        Input::activation("v", &["B", "T", "Hv", "E"]),
        DECAY,
        BETA,
        A_LOG,
        DT_BIAS,
        Input::state("state", &["B", "Hv", "D", "E"]).optional(),
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
