//! Mutations of the gated delta rule.

use crate::convolutions::{with_narrow_state, with_state_behind_padding};
use crate::mutation::{Mutation, Others};
use samebits_contract::round;
use samebits_contract::tensor::{DType, Tensor};

pub const MUTATIONS: &[Mutation] = &[
    Mutation {
        name: "delta_state_narrowed",
        about: "The state that a call ends with is kept as bf16.",
        op: "gated_delta_rule",
        caught_by: "invariance:schedule",
        also_red: Others::Are(&["accuracy", "golden"]),
        answer: with_narrow_state,
    },
    Mutation {
        name: "decayed_twice",
        about: "The state is decayed before it is read and once more before it is added to.",
        op: "gated_delta_rule",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden"]),
        answer: |mutant, case| {
            mutant.asked(case, |case| {
                // Where decays come of steps, their rate is twice what it was.
                let (name, twice): (_, fn(f64) -> f64) = match case.inputs.contains_key("a_log") {
                    true => ("a_log", |a_log| a_log + std::f64::consts::LN_2),
                    false => ("g", |g| 2.0 * g),
                };
                let decays = &case.inputs[name];
                let twice: Vec<f64> = decays.to_f64().into_iter().map(twice).collect();
                let twice = round::tensor(DType::Fp32, decays.shape(), &twice);
                case.inputs.insert(name.into(), twice);
            })
        },
    },
    Mutation {
        name: "delta_state_of_padding",
        about: "The state is that behind the last row, whether or not that is padding.",
        op: "gated_delta_rule",
        caught_by: "invariance:padding",
        also_red: Others::Are(&["accuracy", "golden"]),
        answer: with_state_behind_padding,
    },
    Mutation {
        name: "delta_gradient_of_padding",
        about: "Rows of padding have gradients as all others.",
        op: "gated_delta_rule_backward",
        caught_by: "invariance:padding",
        also_red: Others::Are(&["accuracy", "golden"]),
        answer: |mutant, case| mutant.asked(case, |case| drop(case.inputs.remove("len"))),
    },
    Mutation {
        name: "gradient_without_the_last_state",
        about: "What the state that a call ends with gets is left out.",
        op: "gated_delta_rule_backward",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden"]),
        answer: |mutant, case| {
            mutant.asked(case, |case| {
                if let Some(dnext) = case.inputs.get_mut("dnext") {
                    *dnext = Tensor::fp32(dnext.shape(), vec![0.0; dnext.len()]);
                }
            })
        },
    },
];
