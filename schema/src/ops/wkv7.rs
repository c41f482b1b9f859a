//! The recurrence of RWKV-7: a state that decays, is corrected along one vector by another, and takes a key and its value.
use super::causal_conv1d::LEN;
use super::*;

/// `r[B,T,H,D], w[B,T,H,D], k[B,T,H,D], v[B,T,H,D], a[B,T,H,D], b[B,T,H,D], state[B,H,D,D]?, len[B]?
/// -> y[B,T,H,D], next[B,H,D,D]`
pub static OP: Op = Op {
    name: "wkv7",
    about: "the recurrence of RWKV-7: each token decays the state by e^w, adds b times what a reads of it and k times v, and reads it by r",
    inputs: &[R, W, K, V, A, B, STATE, LEN],
    outputs: &[Output::out("y", &TOKENS), Output::fixed("next", &STATES, DType::Fp32)],
    operations: |call| 9.0 * call.elements(&["B", "T", "H", "D", "D"]),
    ..Op::PLAIN
};

pub(super) const TOKENS: [&str; 4] = ["B", "T", "H", "D"];
pub(super) const STATES: [&str; 4] = ["B", "H", "D", "D"];

pub(super) const R: Input = Input::activation("r", &TOKENS);
/// The logarithm of what is left of the state.
pub(super) const W: Input = Input::activation("w", &TOKENS);
pub(super) const K: Input = Input::activation("k", &TOKENS);
pub(super) const V: Input = Input::activation("v", &TOKENS);
pub(super) const A: Input = Input::activation("a", &TOKENS);
pub(super) const B: Input = Input::activation("b", &TOKENS);
pub(super) const STATE: Input = Input::state("state", &STATES).optional();
