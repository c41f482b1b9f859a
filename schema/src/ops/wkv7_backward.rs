//! The gradient of the recurrence of RWKV-7.
use super::causal_conv1d::LEN;
use super::wkv7::{A, B, K, R, STATE, STATES, TOKENS, V, W};
use super::*;

/// `r[B,T,H,D], w[B,T,H,D], k[B,T,H,D], v[B,T,H,D], a[B,T,H,D], b[B,T,H,D], state[B,H,D,D]?, len[B]?,
/// dy[B,T,H,D], dnext[B,H,D,D]?
/// -> dr[B,T,H,D], dw[B,T,H,D], dk[B,T,H,D], dv[B,T,H,D], da[B,T,H,D], db[B,T,H,D], dstate[B,H,D,D]`
pub static OP: Op = Op {
    name: "wkv7_backward",
    about: "the gradients of wkv7's inputs from those of y and next",
    inputs: &[
        R,
        W,
        K,
        V,
        A,
        B,
        STATE,
        LEN,
        Input::gradient("dy", &TOKENS),
        Input::gradient("dnext", &STATES).fp32().optional(),
    ],
    outputs: &[
        Output::out("dr", &TOKENS),
        Output::out("dw", &TOKENS),
        Output::out("dk", &TOKENS),
        Output::out("dv", &TOKENS),
        Output::out("da", &TOKENS),
        Output::out("db", &TOKENS),
        Output::fixed("dstate", &STATES, DType::Fp32),
    ],
    operations: |call| 30.0 * call.elements(&["B", "T", "H", "D", "D"]),
    gradient_of: Some("wkv7"),
    ..Op::PLAIN
};
