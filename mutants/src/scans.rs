//! Mutations of scans.

use crate::mutation::{Mutation, Others};
use samebits_contract::round;
use samebits_contract::tensor::DType;
use samebits_harness::implementation::Implementation;

pub const MUTATIONS: &[Mutation] = &[
    Mutation {
        name: "scan_state_narrowed",
        about: "The state that a scan ends with is kept as bf16.",
        op: "ssd_scan",
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
        name: "decay_exponentiated_twice",
        about: "What a state decays by is the exponential of one too many.",
        op: "ssd_scan",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden"]),
        answer: |mutant, case| {
            mutant.asked(case, |case| {
                let a = &case.inputs["a_log"];
                let twice: Vec<f64> = a.to_f64().into_iter().map(f64::exp).collect();
                let twice = round::tensor(a.dtype(), a.shape(), &twice);
                case.inputs.insert("a_log".into(), twice);
            })
        },
    },
    Mutation {
        name: "scan_goes_on_through_padding",
        about: "The state is that behind the last position, whether or not that is padding.",
        op: "ssd_scan",
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
        name: "gradient_of_the_last_state_forgotten",
        about: "What comes behind a piece of a sequence has no gradient.",
        op: "ssd_scan_backward",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden"]),
        answer: |mutant, case| mutant.asked(case, |case| drop(case.inputs.remove("dnext"))),
    },
    Mutation {
        name: "gradient_of_padded_positions",
        about: "Positions of padding have gradients as all others.",
        op: "ssd_scan_backward",
        caught_by: "invariance:padding",
        also_red: Others::Are(&["accuracy", "golden"]),
        answer: |mutant, case| mutant.asked(case, |case| drop(case.inputs.remove("len"))),
    },
];
