//! What is known of how well outputs of one dtype show the order of an op's sums.

/// Ops with outputs in several dtypes whose sums were measured: each of the orders that `docs/METHOD.md` lists ("Power") turns
/// cases of fill `power` red, with outputs of one dtype alone. `tests/orders.rs` holds it.
pub const MEASURED: [&str; 21] = [
    "gemm",
    "gemm_dx",
    "rms_norm",
    "rms_norm_backward",
    "add_rms_norm",
    "add_rms_norm_backward",
    "layer_norm",
    "layer_norm_backward",
    "group_norm",
    "conv",
    "conv_dx",
    "norm_rope",
    "norm_rope_backward",
    "softmax",
    "softmax_backward",
    "attention",
    "attention_backward",
    "linear_logprob_backward",
    "combine",
    "combine_backward",
    "sigmoid_mul_backward",
];

/// Ops that have outputs in several dtypes, sums, and no such measurement: how many rows there are is the length of the sum of
/// `fold`, the places of an image are that of group_norm_backward, a convolution adds a few taps, and scans, RWKV-7 and delta rules add products of what recurs.
pub const UNMEASURED: [&str; 12] = [
    "fold",
    "group_norm_backward",
    "causal_conv1d",
    "causal_conv1d_backward",
    "ssd_scan",
    "ssd_scan_backward",
    "selective_scan",
    "selective_scan_backward",
    "wkv7",
    "wkv7_backward",
    "gated_delta_rule",
    "gated_delta_rule_backward",
];

/// What outputs of one dtype show of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// It has no sum whose order could change, or stores it in f32 whatever is asked.
    NoSum,
    /// All orders that were judged, in cases of fill `power`.
    All,
    /// Nobody measured.
    Unmeasured,
}

/// What is known of `op`.
pub fn seen(op: &str) -> Seen {
    match op {
        _ if MEASURED.contains(&op) => Seen::All,
        _ if UNMEASURED.contains(&op) => Seen::Unmeasured,
        _ => Seen::NoSum,
    }
}
