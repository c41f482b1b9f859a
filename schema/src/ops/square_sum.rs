//! Sums of squares of blocks of a gradient.
use super::*;

/// `x[R,N] -> sum[R]`
pub static OP: Op = Op {
    name: "square_sum",
    about: "the sum of the squares of each row, a block of a gradient: what clip_factor adds up",
    inputs: &[Input::gradient("x", &["R", "N"]).fp32()],
    outputs: &[Output::fixed("sum", &["R"], DType::Fp32)],
    operations: |call| 2.0 * call.elements(&["R", "N"]),
    ..Op::PLAIN
};
