//! What keys are worth to tokens, by the indexer of a sparse attention.
use super::*;

/// `q[T,H,D], k[S,D], weight[T,H] -> score[T,S]`
pub static OP: Op = Op {
    name: "index_score",
    about: "what each key is worth to each token: the heads' scores, none below 0, weighted and added",
    inputs: &[
        Input::activation("q", &["T", "H", "D"]),
        Input::activation("k", &["S", "D"]).rows(0),
        Input::activation("weight", &["T", "H"]).fp32(),
    ],
    attributes: &[SCALE],
    outputs: &[Output::fixed("score", &["T", "S"], DType::Fp32)],
    operations: |call| 2.0 * call.elements(&["T", "S", "H", "D"]),
    ..Op::PLAIN
};

const SCALE: Attribute = Attribute::float(
    "scale",
    Included(-(f32::MAX as f64)),
    Included(f32::MAX as f64),
    "1",
    "a head's score is multiplied with it; read as f64, rounded to f32",
);
