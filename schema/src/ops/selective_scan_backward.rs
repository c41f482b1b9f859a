//! The gradient of the scan of Mamba.
use super::causal_conv1d::LEN;
use super::selective_scan::{A_LOG, B, C, D, DT, DT_BIAS, STATE, X, operations};
use super::*;

/// `x[B,T,C], dt[B,T,C], a_log[C,N], b[B,T,N], c[B,T,N], d[C]?, dt_bias[C]?, state[B,C,N]?, len[B]?, dy[B,T,C], dnext[B,C,N]?
/// -> dx[B,T,C], ddt[B,T,C], db[B,T,N], dc[B,T,N], da_log[B,C,N], dd[B,C], dstate[B,C,N]`
pub static OP: Op = Op {
    name: "selective_scan_backward",
    about: "the gradients of selective_scan's x, dt, b, c and state; da_log, dd and (for dt_bias) ddt are summed by `token_sum`",
    inputs: &[
        X,
        DT,
        A_LOG,
        B,
        C,
        D,
        DT_BIAS,
        STATE,
        LEN,
        Input::gradient("dy", &["B", "T", "C"]),
        Input::gradient("dnext", &["B", "C", "N"]).fp32().optional(),
    ],
    outputs: &[
        Output::out("dx", &["B", "T", "C"]),
        Output::out("ddt", &["B", "T", "C"]),
        Output::out("db", &["B", "T", "N"]),
        Output::out("dc", &["B", "T", "N"]),
        Output::fixed("da_log", &["B", "C", "N"], DType::Fp32),
        Output::fixed("dd", &["B", "C"], DType::Fp32),
        Output::fixed("dstate", &["B", "C", "N"], DType::Fp32),
    ],
    operations: |call| operations(call, 20.0),
    gradient_of: Some("selective_scan"),
    ..Op::PLAIN
};
