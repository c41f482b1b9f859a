//! The clipped policy gradient loss and its gradient.
use super::nll::{COUNT, DENOMINATOR, DLOGPROB, LOGPROB, PER_SEQUENCE, REDUCTION};
use super::*;

/// `logprob[B,T], old_logprob[B,T], advantage[B], reference[B,T]?, count[B,T] -> per_sequence[B], dlogprob[B,T]`
pub static OP: Op = Op {
    name: "policy_loss",
    about: "the clipped policy gradient loss with a KL term, summed by sequence, and the gradient of the batch's loss",
    inputs: &[
        LOGPROB,
        Input::activation("old_logprob", &["B", "T"]).fp32(),
        Input::activation("advantage", &["B"]).fp32(),
        Input::activation("reference", &["B", "T"]).fp32().optional(),
        COUNT,
    ],
    attributes: &[LOW, HIGH, KL, BETA, REDUCTION, DENOMINATOR],
    outputs: &[PER_SEQUENCE, DLOGPROB],
    refused: "`kl` other than none without reference, and reference without it",
    check,
    operations: |call| 10.0 * call.elements(&["B", "T"]),
    ..Op::PLAIN
};

pub(super) const LOW: Attribute = Attribute::float(
    "low",
    Included(0.0),
    Included(1.0),
    "0.2",
    "ratios count as at least 1 - low; read as f64, the difference rounded to f32",
);

pub(super) const HIGH: Attribute = Attribute::float(
    "high",
    Included(0.0),
    Included(1e30),
    "0.2",
    "ratios count as at most 1 + high; read as f64, the sum rounded to f32",
);

const KL: Attribute =
    Attribute::choice("kl", &["none", "k1", "k3"], "how the distance from the reference is estimated");

const BETA: Attribute =
    Attribute::float("beta", Included(0.0), Included(1e30), "0", "the weight of that; read as f64, rounded to f32");

fn check(call: &Call) -> Result<(), Error> {
    match (call.word("kl"), call.has("reference")) {
        ("none", true) => invalid("param `kl`: none reads no reference; leave it out or use k1 or k3".into()),
        ("none", false) | (_, true) => Ok(()),
        (kl, false) => invalid(format!("param `kl`: {kl} is a distance from `reference`, which is missing; give it")),
    }
}
