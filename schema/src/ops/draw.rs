//! A token drawn from each row.
use super::*;

/// `x[R,V], bits[R,2] -> token[R]`
pub static OP: Op = Op {
    name: "draw",
    about: "a token of each row, by the weights that softmax gives them and 64 random bits, the low half first",
    inputs: &[Input::activation("x", &["R", "V"]), Input::index("bits", &["R", "2"], Holds::Any)],
    outputs: &[Output::fixed("token", &["R"], DType::I32)],
    refused: "V above 2^22",
    check: |call| truncate::check_vocabulary(call),
    ..Op::PLAIN
};
