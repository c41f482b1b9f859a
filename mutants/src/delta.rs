//! Mutations of the gated delta rule.

use crate::mutation::{Mutation, Others};
use samebits_contract::round;
use samebits_contract::tensor::{DType, Tensor};
use samebits_harness::implementation::Implementation;

pub const MUTATIONS: &[Mutation] = &[
    Mutation {
        name: "delta_state_narrowed",
        about: "The state that a call ends with is kept as bf16.",
        op: "gated_delta_rule",
        caught_by: "invariance:schedule",
        also_red: Others::Are(&["accuracy", "golden"]),
        answer: |mutant, case| {
            let mut answer = mutant.honest.run(case);
            if let Some(next) = answer.outputs.get_mut("next") {
                let kept: Vec<f64> = next.to_f64().into_iter().map(|v| round::round(v, DType::Bf16)).collect();
                *next = round::tensor(DType::Fp32, next.shape(), &kept);
            }
            answer
        },
    },
    Mutation {
        name: "decayed_twice",
        about: "The state is decayed before it is read and once more before it is added to.",
        op: "gated_delta_rule",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden"]),
        answer: |mutant, case| {
            mutant.asked(case, |case| {
                let g = &case.inputs["g"];
                let twice: Vec<f64> = g.to_f64().into_iter().map(|g| 2.0 * g).collect();
                case.inputs.insert("g".into(), round::tensor(DType::Fp32, g.shape(), &twice));
            })
        },
    },
    Mutation {
        name: "delta_state_of_padding",
        about: "The state is that behind the last row, whether or not that is padding.",
        op: "gated_delta_rule",
        caught_by: "invariance:padding",
        also_red: Others::Are(&["accuracy", "golden"]),
        answer: |mutant, case| {
            let mut answer = mutant.honest.run(case);
            let whole = mutant.asked(case, |case| drop(case.inputs.remove("len")));
            answer.outputs.extend(whole.outputs.get("next").map(|next| ("next".to_string(), next.clone())));
            answer
        },
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
