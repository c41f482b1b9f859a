//! Attention over sequences that stand one behind the other.
use super::attention::{self, ATTRIBUTES, SINKS, check};
use super::*;

/// `q[T,Hq,D], k[S,Hkv,D], v[S,Hkv,E], q_pos[T], q_start[B+1], k_start[B+1], sinks[Hq]? -> out[T,Hq,E], lse[T,Hq]`
pub static OP: Op = Op {
    name: "packed_attention",
    about: "attention over packed sequences: b has queries `q_start[b]..q_start[b+1]` and keys `k_start[b]..k_start[b+1]`",
    inputs: &[
        Input::activation("q", &["T", "Hq", "D"]),
        Input::activation("k", &["S", "Hkv", "D"]).rows(0),
        Input::activation("v", &["S", "Hkv", "E"]).rows(0),
        Input::index("q_pos", &["T"], Holds::Position),
        Input::index("q_start", &["B+1"], Holds::Starts("T")).rows(0),
        Input::index("k_start", &["B+1"], Holds::Starts("S")).rows(0),
        SINKS,
    ],
    attributes: ATTRIBUTES,
    outputs: &[Output::out("out", &["T", "Hq", "E"]), Output::fixed("lse", &["T", "Hq"], DType::Fp32)],
    refused: "Hkv = 0; Hq not a multiple of Hkv",
    check,
    // Sequences of one length.
    operations: |call| {
        let sequences = call.dim("B").max(1);
        attention::operations(call, sequences, call.dim("T") / sequences, call.dim("S") / sequences)
    },
    ..Op::PLAIN
};
