//! `tokens[B,T] -> logits[B,T,V]`: a whole model. Its reference is recorded, not computed here.
use super::*;

pub(super) const SPEC: Spec = Spec {
    name: "chain",
    class: Class::Chain,
    inputs: &[InputSpec { name: "tokens", axes: &["B", "T"], rows: 2, ..INT }],
    params: &[
        ParamSpec { name: "model", kind: ParamKind::Text, default: "" },
        ParamSpec { name: "dtype", kind: ParamKind::Choice(&["bf16", "fp16", "fp32"]), default: "" },
        ParamSpec { name: "schedule", kind: ParamKind::Text, default: "prefill" },
        ParamSpec { name: "batch", kind: ParamKind::Choice(&["together", "alone"]), default: "together" },
        ParamSpec { name: "page_size", kind: ParamKind::Count, default: "64" },
        ParamSpec {
            name: "page_order",
            kind: ParamKind::Choice(&["ascending", "descending", "scattered"]),
            default: "ascending",
        },
    ],
    outputs: &[OutputSpec { name: "logits", axes: &["B", "T", "V"], kind: OutputKind::Fp32 }],
    row_axes: 2,
    fills: &[Fill::Recorded, Fill::Normal],
    outs: &[DType::Fp32],
    shape: &[],
    make,
    check,
    compute: |_| BTreeMap::new(),
};

/// Drawn tokens below V, or none at all: recorded tokens are put in by whoever holds the checkpoint.
fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    if maker.fill == Fill::Recorded {
        return BTreeMap::new();
    }
    let (b, t) = (maker.dim("B"), maker.dim("T"));
    let drawn = maker.below("tokens", b * t, maker.dim("V"));
    BTreeMap::from([("tokens".to_string(), Tensor::i32(&[b, t], maker.ints("tokens", drawn)))])
}

fn check(c: &Checked) -> Result<(), Refusal> {
    let schedule = c.text("schedule").unwrap_or("prefill");
    let counted = ["chunk:", "speculative:", "prefix:"].iter().find_map(|name| schedule.strip_prefix(name));
    let counted = counted.and_then(|n| n.parse::<usize>().ok());
    if !["prefill", "decode", "mixed"].contains(&schedule) && counted.is_none_or(|n| n == 0) {
        return Err(Refusal::Invalid(format!(
            "chain: parameter `schedule` is `{schedule}`; it must be prefill, decode, mixed, chunk:N, speculative:N or \
             prefix:N with N at least 1"
        )));
    }
    if c.count("page_size", 64) == 0 {
        return Err(Refusal::Invalid("chain: parameter `page_size` is 0; it must be at least 1".into()));
    }
    c.indexes("tokens", 0..1 << 31)
}
