//! Choice of experts.
use super::*;

/// `logits[T,E], bias[E]?, experts[T,K]? -> rank[T,E], weight[T,E]`
pub static OP: Op = Op {
    name: "route",
    about: "each token's experts: their rank, -1 where not chosen, and their weight, +0 where not chosen",
    inputs: &[
        Input::activation("logits", &["T", "E"]),
        Input::weight("bias", &["E"]).optional(),
        Input::index("experts", &["T", "K"], Holds::Choices("E")).optional(),
    ],
    attributes: &[CHOSEN, SCORING, JITTER, CHOSEN_BY, GROUPS, TOP_GROUPS, GROUP_WORTH, NORMALISE, SCALE],
    outputs: &[Output::fixed("rank", &["T", "E"], DType::I32), Output::fixed("weight", &["T", "E"], DType::Fp32)],
    extents: &[("K", Extent::Of("chosen", |call| call.count("chosen")))],
    refused: "`groups` that do not divide E; `top_groups` that do not hold `chosen`; `top_two` of groups of one; E beyond i32",
    check,
    ..Op::PLAIN
};

pub(super) const CHOSEN: Attribute = Attribute::count("chosen", 1, "1", "how many experts a token has");

pub(super) const SCORING: Attribute =
    Attribute::choice("scoring", &["softmax", "sigmoid", "sparsemixer"], "how logits become scores");

pub(super) const JITTER: Attribute = Attribute::float(
    "jitter",
    Included(0.0),
    Included(f32::MAX as f64 / 2.0),
    "0.01",
    "for sparsemixer, how far below the chosen logit, as half a share, others count for its weight; read as f64",
);

const CHOSEN_BY: Attribute =
    Attribute::choice("chosen_by", &["scores", "logits"], "what decides the choice, beside the bias");

const GROUPS: Attribute = Attribute::count("groups", 1, "1", "groups of experts of one size");

const TOP_GROUPS: Attribute = Attribute::count("top_groups", 1, "1", "groups that experts are chosen from");

const GROUP_WORTH: Attribute = Attribute::choice(
    "group_worth",
    &["max", "top_two"],
    "what a group is worth: its best score, or the sum of its best two",
);

pub(super) const NORMALISE: Attribute = Attribute::flag("normalise", "`1`: weights are divided by their sum");

pub(super) const SCALE: Attribute = Attribute::float(
    "scale",
    Included(-(f32::MAX as f64)),
    Included(f32::MAX as f64),
    "1",
    "weights are multiplied with it; read as f64, rounded to f32",
);

fn check(call: &Call) -> Result<(), Error> {
    check_chosen(call)?;
    let (experts, chosen) = (call.dim("E"), call.count("chosen"));
    let (groups, top) = (call.count("groups"), call.count("top_groups"));
    if !experts.is_multiple_of(groups) {
        return invalid(format!("param `groups`: {experts} experts do not make {groups} groups of one size"));
    }
    let size = experts / groups;
    if top > groups || top.saturating_mul(size) < chosen {
        return invalid(format!("param `top_groups`: {top} of {groups} groups of {size} do not hold {chosen} experts"));
    }
    if call.word("group_worth") == "top_two" && groups > 1 && size < 2 {
        return invalid(format!("param `group_worth`: a group of {size} has no two experts; use max"));
    }
    Ok(())
}

/// As many experts as are chosen, and ranks for them.
pub(super) fn check_chosen(call: &Call) -> Result<(), Error> {
    let (experts, chosen) = (call.dim("E"), call.count("chosen"));
    if i32::try_from(experts).is_err() {
        return invalid(format!("input `logits`: E = {experts}; a rank is an i32, use at most 2^31 - 1"));
    }
    if chosen > experts {
        return invalid(format!("param `chosen`: {chosen} of {experts} experts; choose at most all"));
    }
    Ok(())
}
