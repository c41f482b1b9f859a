//! Advantages of the samples of a prompt.
use super::*;

/// `reward[P,S] -> advantage[P,S]`
pub static OP: Op = Op {
    name: "group_advantage",
    about: "the reward of each of a prompt's S samples minus their mean, over their deviation",
    inputs: &[Input::activation("reward", &["P", "S"]).fp32()],
    attributes: &[EPS, DIVIDE],
    outputs: &[Output::fixed("advantage", &["P", "S"], DType::Fp32)],
    operations: |call| 5.0 * call.elements(&["P", "S"]),
    ..Op::PLAIN
};

const EPS: Attribute = Attribute::float(
    "eps",
    Included(0.0),
    Included(f32::MAX as f64),
    "1e-6",
    "added to the deviation; read as f64, rounded to f32",
);

const DIVIDE: Attribute =
    Attribute::choice("divide_by", &["deviation", "one"], "`one`: the difference from the mean as it is");
