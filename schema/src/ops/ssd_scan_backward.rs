//! The gradient of the scan of Mamba-2.
use super::causal_conv1d::LEN;
use super::ssd_scan::{A_LOG, B, C, D, DT, DT_BIAS, DT_MAX, DT_MIN, STATE, X, check, operations};
use super::*;

/// `x[B,T,H,P], dt[B,T,H], a_log[H], b[B,T,G,N], c[B,T,G,N], d[H]?, dt_bias[H]?, state[B,H,P,N]?, len[B]?, dy[B,T,H,P],
/// dnext[B,H,P,N]? -> dx[B,T,H,P], ddt[B,T,H], db[B,T,G,N], dc[B,T,G,N], da_log[B,T,H], dd[B,T,H], dstate[B,H,P,N]`
pub static OP: Op = Op {
    name: "ssd_scan_backward",
    about: "the gradients of ssd_scan's x, dt, b, c and state; da_log, dd and (for dt_bias) ddt are summed by `token_sum`",
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
        Input::gradient("dy", &["B", "T", "H", "P"]),
        Input::gradient("dnext", &["B", "H", "P", "N"]).fp32().optional(),
    ],
    attributes: &[DT_MIN, DT_MAX],
    outputs: &[
        Output::out("dx", &["B", "T", "H", "P"]),
        Output::out("ddt", &["B", "T", "H"]),
        Output::out("db", &["B", "T", "G", "N"]),
        Output::out("dc", &["B", "T", "G", "N"]),
        Output::fixed("da_log", &["B", "T", "H"], DType::Fp32),
        Output::fixed("dd", &["B", "T", "H"], DType::Fp32),
        Output::fixed("dstate", &["B", "H", "P", "N"], DType::Fp32),
    ],
    refused: "G = 0; H not a multiple of G; dt_max below dt_min but not 0",
    check,
    operations: |call| operations(call, 17.0),
    gradient_of: Some("ssd_scan"),
    ..Op::PLAIN
};
