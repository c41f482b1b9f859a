//! The loss of a logical batch.
use super::nll::DENOMINATOR;
use super::*;

/// `per_sequence[B] -> loss[1]`
pub static OP: Op = Op {
    name: "batch_loss",
    about: "the sum of what nll or policy_loss gives for all sequences of the logical batch, over the denominator",
    inputs: &[Input::activation("per_sequence", &["B"]).fp32()],
    attributes: &[GROUPS, DENOMINATOR],
    outputs: &[Output { rows: 0, ..Output::fixed("loss", &["1"], DType::Fp32) }],
    refused: "`groups` that are no power of two, or more than 65536",
    check,
    operations: |call| call.elements(&["B"]),
    ..Op::PLAIN
};

pub(super) const GROUPS: Attribute = Attribute::count("groups", 1, "1", "how many groups the sequences are dealt to");

/// Most groups that the sequences of a batch may be dealt to.
pub const MOST_GROUPS: usize = 1 << 16;

/// Of batch_loss, and of the gradients of a model.
pub(super) fn check(call: &Call) -> Result<(), Error> {
    let groups = call.count("groups");
    if !groups.is_power_of_two() || groups > MOST_GROUPS {
        return invalid(format!("param `groups`: {groups} must be a power of two, at most {MOST_GROUPS}"));
    }
    Ok(())
}
