//! A sum over tokens.
use super::*;

/// `x[R,N], mask[R]?, carry[64,N]? -> sum[64,N]`
pub static OP: Op = Op {
    name: "token_sum",
    about: "64 sums over tokens, which `fold` joins: the gradient of a bias",
    inputs: &[Input::gradient("x", &["R", "N"]), Input::mask(&["R"]), Input::carry(&["64", "N"])],
    attributes: &[TOKEN_OFFSET],
    outputs: &[Output::token_sum("sum", &["64", "N"])],
    operations: |call| call.elements(&["R", "N"]),
    ..Op::PLAIN
};

pub(super) const TOKEN_OFFSET: Attribute =
    Attribute::count("token_offset", 0, "0", "how many tokens of the group earlier calls have had");
