//! Mutations of penalties, of what may be sampled, and of the draw.

use crate::mutation::{Mutant, Mutation, Others};
use samebits_contract::case::{Answer, Case, Status};
use samebits_contract::tensor::Tensor;
use samebits_harness::implementation::Implementation;

/// The honest answer to `x` with its rows from the last token to the first.
fn backwards(mutant: &Mutant, case: &Case) -> Answer {
    mutant.asked_backwards(case, &["x"])
}

/// `y` and `kept` of truncate where y becomes what `change` makes of each row, with its number.
fn each_row(answer: Answer, change: impl Fn(usize, &mut [f32])) -> Answer {
    let (Status::Ok, Some(y)) = (answer.status, answer.outputs.get("y")) else { return answer };
    let shape = y.shape().to_vec();
    let mut values: Vec<f32> = y.to_f64().into_iter().map(|z| z as f32).collect();
    values.chunks_mut(shape[1]).enumerate().for_each(|(row, y)| change(row, y));
    let kept = values.chunks(shape[1]).map(|y| y.iter().filter(|z| z.is_finite()).count() as i32).collect();
    let outputs = [("y", Tensor::fp32(&shape, values)), ("kept", Tensor::i32(&shape[..1], kept))];
    Answer { outputs: outputs.map(|(name, tensor)| (name.to_string(), tensor)).into(), ..answer }
}

/// Puts the same number in each row of an input of truncate.
fn fill(case: &mut Case, name: &str, value: f32) {
    let rows = case.inputs[name].shape().to_vec();
    case.inputs.insert(name.into(), Tensor::fp32(&rows, vec![value; rows[0]]));
}

pub const MUTATIONS: &[Mutation] = &[
    Mutation {
        name: "each_token_of_the_output_counts_twice",
        about: "The penalty for how often the output has a token takes each one twice.",
        op: "penalize",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden"]),
        answer: |mutant, case| {
            mutant.asked(case, |case| {
                let by = &case.inputs["frequency"];
                let twice = by.to_f64().into_iter().map(|f| (2.0 * f) as f32).collect();
                case.inputs.insert("frequency".into(), Tensor::fp32(by.shape(), twice));
            })
        },
    },
    Mutation {
        name: "support_before_temperature",
        about: "Which tokens may be sampled is decided before logits are divided by the temperature.",
        op: "truncate",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden"]),
        answer: |mutant, case| {
            let before = mutant.asked(case, |case| fill(case, "scale", 1.0));
            let all = mutant.asked(case, |case| {
                let rows = case.inputs["top_k"].shape().to_vec();
                case.inputs.insert("top_k".into(), Tensor::i32(&rows, vec![0; rows[0]]));
                fill(case, "top_p", 1.0);
                fill(case, "min_p", 0.0);
            });
            let Some(support) = before.outputs.get("y").map(Tensor::to_f64) else { return all };
            each_row(all, |row, y| {
                for (i, z) in y.iter_mut().enumerate().filter(|(_, z)| !z.is_nan()) {
                    if support[row * case.inputs["x"].shape()[1] + i] == f64::NEG_INFINITY {
                        *z = f32::NEG_INFINITY;
                    }
                }
            })
        },
    },
    Mutation {
        name: "token_that_crosses_the_border_is_left_out",
        about: "Of the likeliest tokens, the one that reaches the share of top_p is left out, unless it is the first.",
        op: "truncate",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden"]),
        answer: |mutant, case| {
            let by_weight = mutant.asked(case, |case| fill(case, "min_p", 0.0));
            let Some(by_weight) = by_weight.outputs.get("y").map(Tensor::to_f64) else { return by_weight };
            let top_p = case.inputs["top_p"].to_f64();
            each_row(mutant.honest.run(case), |row, y| {
                let kept = &by_weight[row * y.len()..][..y.len()];
                // The last of those that are kept for their weight, of equals the one of the highest index.
                let in_order = (0..y.len()).rev().filter(|i| kept[*i].is_finite());
                let last = in_order.min_by(|a, b| kept[*a].partial_cmp(&kept[*b]).expect("they are finite"));
                if let Some(last) = last
                    && top_p[row] < 1.0
                    && kept.iter().filter(|z| z.is_finite()).count() > 1
                {
                    y[last] = f32::NEG_INFINITY;
                }
            })
        },
    },
    Mutation {
        name: "last_of_equals_may_be_sampled",
        about: "Of equal tokens, of which there is room for some, the last ones stay.",
        op: "truncate",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden"]),
        answer: |mutant, case| each_row(backwards(mutant, case), |_, y| y.reverse()),
    },
    Mutation {
        name: "drawn_from_the_last_token_on",
        about: "The weights of tokens are added from the last one to the first.",
        op: "draw",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden"]),
        answer: |mutant, case| {
            let last = case.inputs["x"].shape()[1] as i32 - 1;
            let mut answer = backwards(mutant, case);
            for token in answer.outputs.values_mut() {
                let turned = |token: &i32| if *token < 0 { *token } else { last - *token };
                *token = Tensor::i32(token.shape(), token.as_i32().expect("it is").iter().map(turned).collect());
            }
            answer
        },
    },
];
