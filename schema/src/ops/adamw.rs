//! A step of AdamW.
use super::*;

/// `w[..], m[..], v[..], g[..], factor[1]? -> new_w[..], new_m[..], new_v[..], rounded[..]`
pub static OP: Op = Op {
    name: "adamw",
    about: "a step of AdamW on f32 weights w, moments m and v and gradient g; `rounded` is new_w for the next forward",
    inputs: &[
        Input::weight("w", &[REST]).rows(1).fp32(),
        Input::float("m", &[REST], Role::State).rows(1).fp32(),
        Input::float("v", &[REST], Role::State).rows(1).fp32(),
        Input::gradient("g", &[REST]).fp32(),
        Input::gradient("factor", &["1"]).rows(0).fp32().optional(),
    ],
    attributes: &[LR, BETA1, BETA2, EPS, WEIGHT_DECAY, STEP],
    outputs: &[
        Output::fixed("new_w", &[REST], DType::Fp32),
        Output::fixed("new_m", &[REST], DType::Fp32),
        Output::fixed("new_v", &[REST], DType::Fp32),
        Output::out("rounded", &[REST]),
    ],
    operations: |call| 16.0 * call.elements(&[REST]),
    ..Op::PLAIN
};

const LR: Attribute = Attribute::float("lr", Included(0.0), Included(1e4), "1e-3", "the learning rate; f64");

const BETA1: Attribute = Attribute::float("beta1", Included(0.0), Excluded(1.0), "0.9", "how much of m is kept; f64");

const BETA2: Attribute = Attribute::float("beta2", Included(0.0), Excluded(1.0), "0.999", "how much of v is kept; f64");

const EPS: Attribute = Attribute::float(
    "eps",
    Included(0.0),
    Included(1e30),
    "1e-8",
    "added to the root of v; read as f64, rounded to f32",
);

const WEIGHT_DECAY: Attribute =
    Attribute::float("weight_decay", Included(0.0), Included(1e4), "0.01", "times lr: the share of w that goes; f64");

const STEP: Attribute = Attribute::count("step", 1, "1", "the number of the step, from 1 on");
