//! Scaled dot-product attention with grouped heads.
use super::*;

/// `q[B,T,Hq,D], k[B,S,Hkv,D], v[B,S,Hkv,E], q_pos[B,T], kv_len[B], sinks[Hq]? -> out[B,T,Hq,E], lse[B,T,Hq]`
pub static OP: Op = Op {
    name: "attention",
    about: "attention over padded keys: sequence b has the first `kv_len[b]` of S",
    inputs: &[
        Input::activation("q", &["B", "T", "Hq", "D"]).rows(2),
        Input::activation("k", &["B", "S", "Hkv", "D"]),
        Input::activation("v", &["B", "S", "Hkv", "E"]),
        Input::index("q_pos", &["B", "T"], Holds::Position).rows(2),
        Input::index("kv_len", &["B"], Holds::Length(&["S"])),
        SINKS,
    ],
    attributes: ATTRIBUTES,
    outputs: &[
        Output::out("out", &["B", "T", "Hq", "E"]).rows(2),
        Output::fixed("lse", &["B", "T", "Hq"], DType::Fp32).rows(2),
    ],
    row_axes: 2,
    refused: "Hkv = 0; Hq not a multiple of Hkv",
    check,
    operations: |call| operations(call, call.dim("B"), call.dim("T"), call.dim("S")),
    ..Op::PLAIN
};

/// A logit of each query head that joins the softmax and has no value.
pub(super) const SINKS: Input = Input::weight("sinks", &["Hq"]).fp32().optional();

pub(super) const ATTRIBUTES: &[Attribute] = &[
    Attribute::float("scale", Included(0.0), Unbounded, "", "scores are multiplied with it; read as f64")
        .default(DefaultValue::Of("1/sqrt(D)", |dims| Value::Float(1.0 / (dims["D"].max(1) as f64).sqrt()))),
    Attribute::flag("causal", "`1`: key j is visible to position p only when j <= p"),
    Attribute::count("window", 0, "0", "key j is visible only when j > p - window; `0` means no window"),
    Attribute::count("chunk", 0, "0", "key j is visible only when j >= p - p mod chunk; `0` means no chunks"),
    Attribute::float(
        "softcap",
        Included(0.0),
        Unbounded,
        "0",
        "scores are bent below it by a hyperbolic tangent; read as f64; `0` means none",
    ),
    TF32,
];

/// Of the pairs of a query and a key that it sees, two of each element of k and of v.
pub(super) fn operations(call: &Call, batch: usize, queries: usize, keys: usize) -> f64 {
    2.0 * pairs(call, batch, queries, keys) * (call.dim("D") + call.dim("E")) as f64
}

/// The pairs of a query, of all heads, and a key that it sees.
pub(super) fn pairs(call: &Call, batch: usize, queries: usize, keys: usize) -> f64 {
    // The queries stand behind all keys but as many.
    let seen = |t: usize| {
        let next = (keys + t + 1).saturating_sub(queries);
        let last = if call.flag("causal") { next } else { keys };
        let windowed = if call.count("window") > 0 { last.min(call.count("window")) } else { last };
        let position = next.saturating_sub(1);
        let first = position.checked_rem(call.count("chunk")).map_or(0, |within| position - within);
        windowed.min(last.saturating_sub(first))
    };
    (batch * call.dim("Hq")) as f64 * (0..queries).map(|t| seen(t) as f64).sum::<f64>()
}

pub(super) fn check(call: &Call) -> Result<(), Error> {
    let (hq, hkv) = (call.dim("Hq"), call.dim("Hkv"));
    if hkv == 0 || hq % hkv != 0 {
        return invalid(format!("input `q`: Hq = {hq} must be a multiple of Hkv = {hkv}"));
    }
    Ok(())
}
