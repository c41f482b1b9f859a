//! Mutations of causal convolutions.

use crate::mutation::{Mutant, Mutation, Others};
use samebits_contract::case::{Answer, Case};
use samebits_contract::round;
use samebits_contract::tensor::{DType, Tensor};
use samebits_harness::implementation::Implementation;

/// The state that a call ends with is kept as bf16.
pub(crate) fn with_narrow_state(mutant: &Mutant, case: &Case) -> Answer {
    let mut answer = mutant.honest.run(case);
    if let Some(next) = answer.outputs.get_mut("next") {
        let kept: Vec<f64> = next.to_f64().into_iter().map(|v| round::round(v, DType::Bf16)).collect();
        *next = round::tensor(DType::Fp32, next.shape(), &kept);
    }
    answer
}

/// The state is that behind the last row, whether or not that is padding.
pub(crate) fn with_state_behind_padding(mutant: &Mutant, case: &Case) -> Answer {
    let mut answer = mutant.honest.run(case);
    let whole = without_len(mutant, case);
    answer.outputs.extend(whole.outputs.get("next").map(|next| ("next".to_string(), next.clone())));
    answer
}

/// Rows of padding are rows as all others.
pub(crate) fn without_len(mutant: &Mutant, case: &Case) -> Answer {
    mutant.asked(case, |case| drop(case.inputs.remove("len")))
}

pub const MUTATIONS: &[Mutation] = &[
    Mutation {
        name: "state_narrowed",
        about: "The state that a call ends with is kept as bf16.",
        op: "causal_conv1d",
        caught_by: "invariance:schedule",
        also_red: Others::Are(&["accuracy", "golden"]),
        answer: with_narrow_state,
    },
    Mutation {
        name: "state_forgotten",
        about: "Every call begins with rows of +0.",
        op: "causal_conv1d",
        caught_by: "invariance:schedule",
        also_red: Others::Are(&["accuracy", "arithmetic", "golden"]),
        answer: |mutant, case| mutant.asked(case, |case| drop(case.inputs.remove("state"))),
    },
    Mutation {
        name: "state_one_row_late",
        about: "The state has the rows before those that it should have: its newest is missing.",
        op: "causal_conv1d",
        caught_by: "invariance:schedule",
        also_red: Others::Are(&["accuracy", "golden"]),
        answer: |mutant, case| {
            let mut answer = mutant.honest.run(case);
            if let Some(next) = answer.outputs.get_mut("next") {
                let rows: Vec<usize> = (0..next.shape()[1]).map(|row| row.saturating_sub(1)).collect();
                *next = next.select(1, &rows);
            }
            answer
        },
    },
    Mutation {
        name: "state_of_padding",
        about: "The state is that behind the last row, whether or not that is padding.",
        op: "causal_conv1d",
        caught_by: "invariance:padding",
        also_red: Others::Are(&["accuracy", "golden"]),
        answer: with_state_behind_padding,
    },
    Mutation {
        name: "taps_in_reverse",
        about: "The taps are added from the last to the first.",
        op: "causal_conv1d",
        caught_by: "golden",
        // Variants that say lengths or begin with a state are answered rightly.
        also_red: Others::Are(&["invariance:padding", "invariance:schedule"]),
        answer: |mutant, case| {
            // The gradient of a sequence that is turned around adds the same products in this order.
            let rows: Vec<usize> = (0..case.inputs["x"].shape()[1]).rev().collect();
            let plain = ["bias", "state", "len"].iter().all(|name| !case.inputs.contains_key(*name));
            if !plain {
                return mutant.honest.run(case);
            }
            let back = mutant.asked(case, |case| {
                case.op = "causal_conv1d_backward".into();
                let x = case.inputs.remove("x").expect("it has rows");
                case.inputs.insert("dy".into(), x.select(1, &rows));
            });
            let mut answer = mutant.honest.run(case);
            if let (Some(y), Some(dx)) = (answer.outputs.get_mut("y"), back.outputs.get("dx")) {
                *y = dx.select(1, &rows);
            }
            answer
        },
    },
    Mutation {
        name: "gradient_of_padding",
        about: "Rows of padding have gradients as all others.",
        op: "causal_conv1d_backward",
        caught_by: "invariance:padding",
        also_red: Others::Are(&["accuracy", "golden"]),
        answer: without_len,
    },
    Mutation {
        name: "padding_of_sequences_counted",
        about: "Rows of padding are tokens as all others.",
        op: "causal_conv1d_dw",
        caught_by: "invariance:padding",
        also_red: Others::Are(&["accuracy", "golden", "invariance:micro_batch", "invariance:accumulation"]),
        answer: |mutant, case| mutant.asked(case, |case| drop(case.inputs.remove("mask"))),
    },
    Mutation {
        name: "first_rows_look_back_at_nothing",
        about: "The rows before a sequence are left out of the gradient of its taps.",
        op: "causal_conv1d_dw",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden"]),
        answer: |mutant, case| {
            mutant.asked(case, |case| {
                if let Some(state) = case.inputs.get_mut("state") {
                    *state = Tensor::fp32(state.shape(), vec![0.0; state.len()]);
                }
            })
        },
    },
];
