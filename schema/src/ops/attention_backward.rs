//! The gradient of attention.
use super::attention::{ATTRIBUTES, check, pairs};
use super::*;

/// `q[B,T,Hq,D], k[B,S,Hkv,D], v[B,S,Hkv,E], out[B,T,Hq,E], lse[B,T,Hq], dout[B,T,Hq,E], q_pos[B,T], kv_len[B],
/// mask[B,T]? -> dq[B,T,Hq,D], dk[B,S,Hkv,D], dv[B,S,Hkv,E]`
pub static OP: Op = Op {
    name: "attention_backward",
    about: "the gradients of q, k and v from that of attention's out; out and lse are what attention returned",
    inputs: &[
        Input::activation("q", &["B", "T", "Hq", "D"]).rows(2),
        Input::activation("k", &["B", "S", "Hkv", "D"]),
        Input::activation("v", &["B", "S", "Hkv", "E"]),
        Input::activation("out", &["B", "T", "Hq", "E"]).rows(2),
        Input::activation("lse", &["B", "T", "Hq"]).fp32().rows(2),
        Input::gradient("dout", &["B", "T", "Hq", "E"]).rows(2),
        Input::index("q_pos", &["B", "T"], Holds::Position).rows(2),
        Input::index("kv_len", &["B"], Holds::Length(&["S"])),
        Input::mask(&["B", "T"]).rows(2),
    ],
    attributes: ATTRIBUTES,
    // What keys and values have belongs to a sequence, whose queries it is a sum over.
    outputs: &[
        Output::out("dq", &["B", "T", "Hq", "D"]).rows(2),
        Output::out("dk", &["B", "S", "Hkv", "D"]),
        Output::out("dv", &["B", "S", "Hkv", "E"]),
    ],
    row_axes: 2,
    refused: "Hkv = 0; Hq not a multiple of Hkv",
    check,
    operations: |call| {
        let pairs = pairs(call, call.dim("B"), call.dim("T"), call.dim("S"));
        2.0 * pairs * (3 * call.dim("D") + 2 * call.dim("E")) as f64
    },
    gradient_of: Some("attention"),
    ..Op::PLAIN
};
