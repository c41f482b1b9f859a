//! Attention whose keys and values stand in pages.
use super::attention::{ATTRIBUTES, SINKS};
use super::*;

/// `q[B,T,Hq,D], k[P,Z,Hkv,D], v[P,Z,Hkv,E], page_table[B,C], q_pos[B,T], kv_len[B], sinks[Hq]? -> out[B,T,Hq,E], lse[B,T,Hq]`
pub static OP: Op = Op {
    name: "paged_attention",
    about: "attention over pages: key j of sequence b is row j mod Z of page `page_table[b][j / Z]`",
    inputs: &[
        Input::activation("q", &["B", "T", "Hq", "D"]).rows(2),
        Input::float("k", &["P", "Z", "Hkv", "D"], Role::State),
        Input::float("v", &["P", "Z", "Hkv", "E"], Role::State),
        Input::index("page_table", &["B", "C"], Holds::Pages { pages: "P", size: "Z", lengths: "kv_len" }),
        Input::index("q_pos", &["B", "T"], Holds::Position).rows(2),
        Input::index("kv_len", &["B"], Holds::Length(&["C", "Z"])),
        SINKS,
    ],
    attributes: ATTRIBUTES,
    outputs: &[
        Output::out("out", &["B", "T", "Hq", "E"]).rows(2),
        Output::fixed("lse", &["B", "T", "Hq"], DType::Fp32).rows(2),
    ],
    row_axes: 2,
    refused: "Hkv = 0; Hq not a multiple of Hkv; Z = 0",
    check,
    operations: |call| super::attention::operations(call, call.dim("B"), call.dim("T"), call.dim("C") * call.dim("Z")),
    ..Op::PLAIN
};

fn check(call: &Call) -> Result<(), Error> {
    if call.dim("Z") == 0 {
        return invalid("input `k`: axis Z is empty; a page has at least one row".into());
    }
    super::attention::check(call)
}
