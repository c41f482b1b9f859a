//! The gradients of whole models.
use super::batch_loss::{self, GROUPS};
use super::chain::PROGRAM;
use super::policy_loss::{HIGH, LOW};
use super::*;

/// `tokens[B,T], length[B]?, count[B,T], advantage[B]?, old_logprob[B,T]? -> gradients[P], loss[1], per_sequence[B],
/// logprob[B,T]`
pub static OP: Op = Op {
    name: "chain_backward",
    about: "the loss of a whole model and its gradient, for who has its checkpoint: all elements of all parameters, in \
            the order of their names (bytes)",
    inputs: &[
        Input::index("tokens", &["B", "T"], Holds::Below("V")).rows(2),
        Input::index("length", &["B"], Holds::Length(&["T"])).optional(),
        Input::index("count", &["B", "T"], Holds::Mask).rows(2),
        Input::activation("advantage", &["B"]).fp32().optional(),
        Input::activation("old_logprob", &["B", "T"]).fp32().optional().rows(2),
    ],
    attributes: &[
        PROGRAM,
        Attribute { name: "model", about: "the name of its folder", kind: Kind::Text, default: DefaultValue::Required },
        Attribute::choice("dtype", &["bf16", "fp32"], "the dtype of weights and products")
            .default(DefaultValue::Required),
        Attribute::choice("loss", &["nll", "policy"], "minus the mean log-probability, or the clipped policy gradient"),
        LOW,
        HIGH,
        Attribute::float(
            "entropy",
            Included(-1e30),
            Included(1e30),
            "0",
            "policy: so many times the mean entropy of what tokens were drawn from is subtracted; rounded to f32",
        ),
        GROUPS,
        Attribute::count("ranks", 1, "1", "how many ranks the groups are dealt to"),
        Attribute::count("micro_batch", 1, "1", "how many sequences of a group go forward and back together"),
        Attribute {
            name: "pad",
            about: "`none`, `left:N` or `right:N`: rows of padding, whose embeddings are NaN",
            kind: Kind::Text,
            default: DefaultValue::Is("none"),
        },
        Attribute::flag("pack", "whether the sequences of a micro-batch stand one behind the other, padded once"),
        Attribute::flag("recompute", "whether a layer is run again for its reverse instead of keeping what it made"),
    ],
    outputs: &[
        Output::token_sum("gradients", &["P"]),
        Output::token_sum("loss", &["1"]),
        Output::fixed("per_sequence", &["B"], DType::Fp32),
        Output::fixed("logprob", &["B", "T"], DType::Fp32).rows(2),
    ],
    extents: &[("V", Extent::OfModel), ("P", Extent::OfModel)],
    program: "decoder",
    row_axes: 2,
    refused: "another `pad`; `groups` that are no power of two, or more than 65536, or that `ranks` do not divide; a policy \
              without advantage and old_logprob, and any of them, or `entropy`, without it",
    check,
    gradient_of: Some("chain"),
    ..Op::PLAIN
};

fn check(call: &Call) -> Result<(), Error> {
    let (groups, ranks, pad) = (call.count("groups"), call.count("ranks"), call.word("pad"));
    batch_loss::check(call)?;
    if !groups.is_multiple_of(ranks) {
        return invalid(format!("param `ranks`: {ranks} do not divide {groups} groups; each must hold as many"));
    }
    let rows = pad.strip_prefix("left:").or(pad.strip_prefix("right:")).and_then(|n| n.parse::<u16>().ok());
    if pad != "none" && rows.is_none() {
        return invalid(format!("param `pad`: `{pad}` is not none, left:N or right:N with N at most 65535"));
    }
    let policy = call.word("loss") == "policy";
    if !policy && call.float("entropy") != 0.0 {
        return invalid("param `entropy`: loss = nll has none; leave it out or use policy".into());
    }
    match ["advantage", "old_logprob"].into_iter().find(|name| call.has(name) != policy) {
        Some(name) if policy => invalid(format!("input `{name}`: missing; loss = policy reads it")),
        Some(name) => invalid(format!("input `{name}`: loss = nll reads none; leave it out or use policy")),
        None => Ok(()),
    }
}
