//! Whole models.
use super::*;

/// `tokens[B,T] -> logits[B,T,V]`
pub static OP: Op = Op {
    name: "chain",
    about: "a whole model, for who has its checkpoint",
    inputs: &[Input::index("tokens", &["B", "T"], Holds::Below("V")).rows(2)],
    attributes: &[
        PROGRAM,
        Attribute { name: "model", about: "the name of its folder", kind: Kind::Text, default: DefaultValue::Required },
        Attribute::choice("dtype", &["bf16", "fp16", "fp32"], "the dtype of weights and products")
            .default(DefaultValue::Required),
        Attribute {
            name: "schedule",
            about: "`prefill`, `decode`, `mixed`, `chunk:N`, `speculative:N` or `prefix:N`: how tokens go in",
            kind: Kind::Text,
            default: DefaultValue::Is("prefill"),
        },
        Attribute::choice("batch", &["together", "alone"], "whether sequences go in together"),
        Attribute::count("page_size", 1, "64", "positions in a page of the KV cache"),
        Attribute::choice(
            "page_order",
            &["ascending", "descending", "scattered"],
            "in which order pages are given out",
        ),
    ],
    outputs: &[Output::fixed("logits", &["B", "T", "V"], DType::Fp32).rows(2)],
    extents: &[("V", Extent::OfModel)],
    program: "decoder",
    row_axes: 2,
    refused: "another `schedule`; N = 0",
    check,
    ..Op::PLAIN
};

/// Of what `chain` and `chain_backward` take and give here.
pub(super) const PROGRAM: Attribute = Attribute::program(&["decoder"]);

fn check(call: &Call) -> Result<(), Error> {
    let schedule = call.word("schedule");
    let counted = ["chunk:", "speculative:", "prefix:"].iter().find_map(|name| schedule.strip_prefix(name));
    let counted = counted.and_then(|n| n.parse::<usize>().ok());
    if !["prefill", "decode", "mixed"].contains(&schedule) && counted.is_none_or(|n| n == 0) {
        return invalid(format!(
            "param `schedule`: `{schedule}` is not prefill, decode, mixed, chunk:N, speculative:N or prefix:N with N at \
             least 1"
        ));
    }
    Ok(())
}
