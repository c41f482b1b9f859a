//! Mutations of ops over rows: norms, softmax, log-probabilities.

use crate::mutation::{Mutant, Mutation, Others};
use crate::plain::{rms_norm, softmax};
use samebits_contract::case::{Answer, Case};
use samebits_contract::round;
use samebits_contract::tensor::{DType, Tensor};
use samebits_harness::implementation::Implementation;

/// The honest answer for inputs whose last axis zeros fill up to a multiple of 16; the columns of the filling are cut off
/// again.
fn widened(mutant: &Mutant, case: &Case, inputs: &[&str]) -> Answer {
    let width = *case.inputs["x"].shape().last().expect("the contract has checked it");
    let mut answer = mutant.asked(case, |case| {
        for name in inputs {
            let tensor = &case.inputs[*name];
            let mut shape = tensor.shape().to_vec();
            let last = shape.len() - 1;
            shape[last] = width.next_multiple_of(16) - width;
            let zeros = round::tensor(tensor.dtype(), &shape, &vec![0.0; shape.iter().product()]);
            let wide = tensor.append(last, &zeros);
            case.inputs.insert(name.to_string(), wide);
        }
    });
    if let Some(y) = answer.outputs.get_mut("y") {
        let columns: Vec<usize> = (0..width).collect();
        *y = y.select(1, &columns);
    }
    answer
}

pub const MUTATIONS: &[Mutation] = &[
    Mutation {
        name: "inner_rounding_fused_away",
        about: "The rounding before the weight, which `hf` asks for, is left out because the kernel is fused.",
        op: "rms_norm",
        caught_by: "golden",
        also_red: Others::Are(&["accuracy"]),
        answer: |mutant, case| mutant.asked(case, |case| drop(case.params.remove("rounding"))),
    },
    Mutation {
        name: "divided_by_one_less",
        about: "The mean of the squares divides by N - 1.",
        op: "rms_norm",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden", "arithmetic"]),
        answer: |_, case| rms_norm(case, |sum, n, eps| (sum / (n - 1.0).max(1.0) + eps).sqrt()),
    },
    Mutation {
        name: "eps_outside_root",
        about: "eps is added to the root instead of under it.",
        op: "rms_norm",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden"]),
        answer: |_, case| rms_norm(case, |sum, n, eps| (sum / n).sqrt() + eps),
    },
    Mutation {
        name: "mean_over_padded_width",
        about: "The mean of the squares divides by the width rounded up to whole vectors of 16.",
        op: "rms_norm",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden", "arithmetic"]),
        answer: |mutant, case| widened(mutant, case, &["x", "w"]),
    },
    Mutation {
        name: "stale_last_row",
        about: "The last row is never written and shows what the call before left there.",
        op: "rms_norm",
        caught_by: "invariance:batch",
        also_red: Others::FollowTheCalls,
        answer: |mutant, case| {
            let mut answer = mutant.honest.run(case);
            let before = mutant.keep(|memory| memory.answer.replace(answer.clone()));
            if let (Some(y), Some(old)) =
                (answer.outputs.get_mut("y"), before.as_ref().and_then(|a| a.outputs.get("y")))
                && (old.dtype(), &old.shape()[1..]) == (y.dtype(), &y.shape()[1..])
            {
                let kept: Vec<usize> = (0..y.shape()[0] - 1).collect();
                *y = y.select(0, &kept).append(0, &old.select(0, &[old.shape()[0] - 1]));
            }
            answer
        },
    },
    Mutation {
        name: "no_running_max",
        about: "Exponentials are taken as they are, without the largest element as their reference.",
        op: "softmax",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden"]),
        answer: |_, case| softmax(case, |_, _| 0.0),
    },
    Mutation {
        name: "neighbour_leak",
        about: "Weights are taken relative to the largest element of the whole batch.",
        op: "softmax",
        caught_by: "invariance:neighbours",
        also_red: Others::Are(&["accuracy", "golden", "invariance:batch", "invariance:padding"]),
        answer: |_, case| softmax(case, |_, of_batch| of_batch),
    },
    Mutation {
        name: "padded_tail_counted",
        about: "The zeros that fill a row up to whole vectors of 16 count as elements.",
        op: "softmax",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden", "arithmetic"]),
        answer: |mutant, case| widened(mutant, case, &["x"]),
    },
    Mutation {
        name: "vocabulary_tail_dropped",
        about: "Logits behind the last whole vector of 16, where there is one, do not enter the sum.",
        op: "logprob",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden", "arithmetic"]),
        answer: |mutant, case| {
            let logits = &case.inputs["logits"];
            let width = logits.shape()[1];
            let kept = width / 16 * 16;
            if kept == 0 {
                return mutant.honest.run(case);
            }
            // What is -inf is skipped and moves nothing else.
            let dropped = |(i, v): (usize, f64)| if i % width < kept { v } else { f64::NEG_INFINITY };
            let masked: Vec<f64> = logits.to_f64().into_iter().enumerate().map(dropped).collect();
            let masked = round::tensor(logits.dtype(), logits.shape(), &masked);
            let mut answer = mutant.asked(case, |case| drop(case.inputs.insert("logits".into(), masked)));
            let inverse = case.params.get("temperature").map_or(1.0, |t| t.parse().expect("it is checked"));
            let inverse = (1.0f64 / inverse) as f32;
            // The target's own logit is read all the same.
            if let (Some(lse), Some(logprob)) = (answer.outputs.get("lse"), answer.outputs.get("logprob")) {
                let target = case.inputs["target"].as_i32().expect("the contract has checked it");
                let row = |(row, &target): (usize, &i32)| match usize::try_from(target) {
                    Ok(target) if target >= kept => {
                        logits.value(row * width + target) as f32 * inverse - lse.value(row) as f32
                    }
                    _ => logprob.value(row) as f32,
                };
                let values: Vec<f64> = target.iter().enumerate().map(row).map(f64::from).collect();
                let logprob = round::tensor(DType::Fp32, logprob.shape(), &values);
                answer.outputs.insert("logprob".into(), logprob);
            }
            answer
        },
    },
    Mutation {
        name: "temperature_twice",
        about: "Logits are divided by the temperature twice.",
        op: "logprob",
        caught_by: "accuracy",
        also_red: Others::Are(&[]),
        answer: |mutant, case| {
            mutant.asked(case, |case| {
                if let Some(temperature) = case.params.get_mut("temperature") {
                    let once: f64 = temperature.parse().expect("the contract has checked it");
                    *temperature = (once * once).to_string();
                }
            })
        },
    },
    Mutation {
        name: "ignored_target_counted",
        about: "A negative target, which is to be ignored, counts as token 0.",
        op: "logprob",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden"]),
        answer: |mutant, case| {
            mutant.asked(case, |case| {
                let target = case.inputs["target"].as_i32().expect("the contract has checked it");
                let counted = target.iter().map(|&target| target.max(0)).collect();
                case.inputs.insert("target".into(), Tensor::i32(&[target.len()], counted));
            })
        },
    },
];
