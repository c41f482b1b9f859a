//! Mutations of scans.

use crate::convolutions::{with_narrow_state, with_state_behind_padding};
use crate::mutation::{Mutation, Others};
use samebits_contract::round;

pub const MUTATIONS: &[Mutation] = &[
    Mutation {
        name: "scan_state_narrowed",
        about: "The state that a scan ends with is kept as bf16.",
        op: "ssd_scan",
        caught_by: "invariance:schedule",
        also_red: Others::Are(&["accuracy", "golden"]),
        answer: with_narrow_state,
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
        answer: with_state_behind_padding,
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
