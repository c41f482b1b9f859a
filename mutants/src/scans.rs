//! Mutations of scans.

use crate::convolutions::{with_narrow_state, with_state_behind_padding, without_len};
use crate::mutation::{Mutant, Mutation, Others};
use samebits_contract::case::{Answer, Case, Status};
use samebits_contract::round;
use samebits_contract::tensor::{DType, Tensor};

/// Positions of a chunk.
const CHUNK: usize = 4;

/// Chunk by chunk, as parallel forms of a scan do it: what a chunk makes of nothing, and beside it what it makes of the state
/// that came into it, are added.
fn by_chunks(mutant: &Mutant, case: &Case) -> Answer {
    let positions: Vec<usize> = (0..case.inputs["x"].shape()[1]).collect();
    let mut whole: Option<Answer> = None;
    let mut state = case.inputs.get("state").cloned();
    for part in positions.chunks(CHUNK) {
        let ask = |state: Option<Tensor>, sees_x: bool| {
            mutant.asked(case, |case| {
                case.out = DType::Fp32;
                for name in ["x", "dt", "b", "c"] {
                    let tokens = case.inputs[name].select(1, part);
                    case.inputs.insert(name.into(), tokens);
                }
                if !sees_x {
                    let x = &case.inputs["x"];
                    let zeros = round::tensor(x.dtype(), x.shape(), &vec![0.0; x.len()]);
                    case.inputs.insert("x".into(), zeros);
                }
                if let Some(len) = case.inputs.get_mut("len") {
                    let of_chunk = |len: &i32| (len - part[0] as i32).clamp(0, part.len() as i32);
                    *len = Tensor::i32(len.shape(), len.as_i32().expect("integers").iter().map(of_chunk).collect());
                }
                case.inputs.remove("state");
                case.inputs.extend(state.map(|state| ("state".to_string(), state)));
            })
        };
        let mut answer = ask(None, true);
        if let Some(state) = state.take().filter(|_| answer.status == Status::Ok) {
            let carried = ask(Some(state), false);
            for (name, made) in &mut answer.outputs {
                let terms = made.to_f64().into_iter().zip(carried.outputs[name].to_f64());
                let sums: Vec<f64> = terms.map(|(a, b)| round::round(a + b, DType::Fp32)).collect();
                *made = round::tensor(DType::Fp32, made.shape(), &sums);
            }
        }
        if answer.status != Status::Ok {
            return answer;
        }
        state = Some(answer.outputs["next"].clone());
        whole = Some(match whole {
            None => answer,
            Some(before) => {
                let y = before.outputs["y"].append(1, &answer.outputs["y"]);
                answer.outputs.insert("y".into(), y);
                answer
            }
        });
    }
    let mut whole = whole.unwrap_or_else(|| mutant.asked(case, |_| {}));
    if let Some(y) = whole.outputs.get_mut("y") {
        *y = round::tensor(case.out, y.shape(), &y.to_f64());
    }
    whole
}

/// What comes behind a piece of a sequence has no gradient.
fn without_what_follows(mutant: &Mutant, case: &Case) -> Answer {
    mutant.asked(case, |case| drop(case.inputs.remove("dnext")))
}

/// With other logarithms of rates, made of those that there are and of how many a channel has.
fn with_rates(mutant: &Mutant, case: &Case, change: fn(Vec<f64>, usize) -> Vec<f64>) -> Answer {
    mutant.asked(case, |case| {
        let a = &case.inputs["a_log"];
        let others = change(a.to_f64(), a.shape()[1]);
        let others = round::tensor(a.dtype(), a.shape(), &others);
        case.inputs.insert("a_log".into(), others);
    })
}

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
        name: "scan_by_chunks",
        about: "Four positions at once: what they make of nothing and of the state that came in are added.",
        op: "ssd_scan",
        caught_by: "invariance:schedule",
        also_red: Others::Are(&["accuracy", "golden"]),
        answer: by_chunks,
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
        answer: without_what_follows,
    },
    Mutation {
        name: "gradient_of_padded_positions",
        about: "Positions of padding have gradients as all others.",
        op: "ssd_scan_backward",
        caught_by: "invariance:padding",
        also_red: Others::Are(&["accuracy", "golden"]),
        answer: without_len,
    },
    Mutation {
        name: "selective_state_narrowed",
        about: "The state that a scan of Mamba ends with is kept as bf16.",
        op: "selective_scan",
        caught_by: "invariance:schedule",
        also_red: Others::Are(&["accuracy", "golden"]),
        answer: with_narrow_state,
    },
    Mutation {
        name: "rates_exponentiated_twice",
        about: "What the elements of a state decay by are the exponentials of one too many.",
        op: "selective_scan",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden"]),
        answer: |mutant, case| with_rates(mutant, case, |rates, _| rates.into_iter().map(f64::exp).collect()),
    },
    Mutation {
        name: "one_rate_for_a_channel",
        about: "All elements of a channel's state decay as the first one does.",
        op: "selective_scan",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden"]),
        answer: |mutant, case| {
            with_rates(mutant, case, |rates, n| (0..rates.len()).map(|i| rates[i - i % n]).collect())
        },
    },
    Mutation {
        name: "selective_scan_by_chunks",
        about: "Four positions at once: what they make of nothing and of the state that came in are added.",
        op: "selective_scan",
        caught_by: "invariance:schedule",
        also_red: Others::Are(&["accuracy", "golden"]),
        answer: by_chunks,
    },
    Mutation {
        name: "selective_scan_goes_on_through_padding",
        about: "The state is that behind the last position, whether or not that is padding.",
        op: "selective_scan",
        caught_by: "invariance:padding",
        also_red: Others::Are(&["accuracy", "golden"]),
        answer: with_state_behind_padding,
    },
    Mutation {
        name: "selective_gradient_of_what_follows_forgotten",
        about: "What comes behind a piece of a sequence has no gradient.",
        op: "selective_scan_backward",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden"]),
        answer: without_what_follows,
    },
    Mutation {
        name: "selective_gradient_of_padded_positions",
        about: "Positions of padding have gradients as all others.",
        op: "selective_scan_backward",
        caught_by: "invariance:padding",
        also_red: Others::Are(&["accuracy", "golden"]),
        answer: without_len,
    },
    Mutation {
        name: "wkv_state_narrowed",
        about: "The state that a recurrence of RWKV-7 ends with is kept as bf16.",
        op: "wkv7",
        caught_by: "invariance:schedule",
        also_red: Others::Are(&["accuracy", "golden"]),
        answer: with_narrow_state,
    },
    Mutation {
        name: "corrected_behind_the_decay",
        about: "The state is read by a when it has decayed.",
        op: "wkv7",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden"]),
        answer: |mutant, case| {
            mutant.asked(case, |case| {
                let (a, w) = (&case.inputs["a"], case.inputs["w"].to_f64());
                let decayed: Vec<f64> = a.to_f64().into_iter().zip(w).map(|(a, w)| a * w.exp()).collect();
                let decayed = round::tensor(a.dtype(), a.shape(), &decayed);
                case.inputs.insert("a".into(), decayed);
            })
        },
    },
    Mutation {
        name: "wkv_goes_on_through_padding",
        about: "The state is that behind the last token, whether or not that is padding.",
        op: "wkv7",
        caught_by: "invariance:padding",
        also_red: Others::Are(&["accuracy", "golden"]),
        answer: with_state_behind_padding,
    },
    Mutation {
        name: "gradient_of_what_follows_forgotten",
        about: "What comes behind a piece of a sequence has no gradient.",
        op: "wkv7_backward",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden"]),
        answer: without_what_follows,
    },
    Mutation {
        name: "gradient_of_padded_tokens",
        about: "Tokens of padding have gradients as all others.",
        op: "wkv7_backward",
        caught_by: "invariance:padding",
        also_red: Others::Are(&["accuracy", "golden"]),
        answer: without_len,
    },
];
