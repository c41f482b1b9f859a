//! The negative log-likelihood and its gradient.
use super::*;

/// `logprob[B,T], count[B,T] -> per_sequence[B], dlogprob[B,T]`
pub static OP: Op = Op {
    name: "nll",
    about: "minus the log-probabilities that count, summed by sequence, and the gradient of the batch's loss",
    inputs: &[LOGPROB, COUNT],
    attributes: &[REDUCTION, DENOMINATOR],
    outputs: &[PER_SEQUENCE, DLOGPROB],
    operations: |call| 2.0 * call.elements(&["B", "T"]),
    ..Op::PLAIN
};

pub(super) const LOGPROB: Input = Input::activation("logprob", &["B", "T"]).fp32();

pub(super) const COUNT: Input = Input::index("count", &["B", "T"], Holds::Mask);

pub(super) const PER_SEQUENCE: Output = Output::fixed("per_sequence", &["B"], DType::Fp32);

pub(super) const DLOGPROB: Output = Output::fixed("dlogprob", &["B", "T"], DType::Fp32);

pub(super) const REDUCTION: Attribute =
    Attribute::choice("reduction", &["sum", "mean"], "what a sequence is worth: the sum of its values, or their mean");

/// What it is rounded to is a positive finite f32.
pub(super) const DENOMINATOR: Attribute = Attribute::float(
    "denominator",
    Included(1e-30),
    Included(1e30),
    "1",
    "what the sum of all sequences of the logical batch is divided by; read as f64, rounded to f32",
);
