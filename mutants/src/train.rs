//! Mutations of losses.

use crate::mutation::{Mutation, Others};
use samebits_contract::tensor::Tensor;
use samebits_harness::implementation::Implementation;

fn f32s(tensor: &Tensor) -> Vec<f32> {
    tensor.to_f64().into_iter().map(|v| v as f32).collect()
}

pub const MUTATIONS: &[Mutation] = &[
    Mutation {
        name: "denominator_of_the_call",
        about: "The denominator is the number of tokens that count in this call, not that of the logical batch.",
        op: "nll",
        caught_by: "invariance:batch",
        also_red: Others::Are(&["accuracy", "golden", "invariance:neighbours", "invariance:padding"]),
        answer: |mutant, case| {
            mutant.asked(case, |case| {
                let count = case.inputs["count"].as_i32().expect("the contract has checked it");
                let counted = count.iter().filter(|&&count| count != 0).count().max(1);
                case.params.insert("denominator".into(), counted.to_string());
            })
        },
    },
    Mutation {
        name: "groups_in_order_of_arrival",
        about: "Groups are joined as they come from several threads: the last one first.",
        op: "batch_loss",
        caught_by: "invariance:threads",
        also_red: Others::Are(&[]),
        answer: |mutant, case| {
            let honest = mutant.honest.run(case);
            let number = |name: &str| case.params.get(name).and_then(|text| text.parse::<f64>().ok()).unwrap_or(1.0);
            let (groups, denominator) = (number("groups") as usize, number("denominator") as f32);
            if groups < 2 || case.config.threads.is_none_or(|threads| threads < 2) {
                return honest;
            }
            let values = f32s(&case.inputs["per_sequence"]);
            let border = |group: usize| group * values.len() / groups;
            let sum = |group: usize| values[border(group)..border(group + 1)].iter().fold(0f32, |sum, v| sum + v);
            let all = (0..groups).rev().map(sum).reduce(|all, sum| all + sum).expect("there are groups");
            let mut answer = honest;
            answer.outputs.insert("loss".into(), Tensor::fp32(&[1], vec![all / denominator]));
            answer
        },
    },
    Mutation {
        name: "clip_symmetric",
        about: "Ratios are cut as far above 1 as below, whatever `high` says.",
        op: "policy_loss",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden"]),
        answer: |mutant, case| {
            mutant.asked(case, |case| {
                if let Some(low) = case.params.get("low").cloned() {
                    case.params.insert("high".into(), low);
                }
            })
        },
    },
    Mutation {
        name: "k3_sign",
        about: "k3 takes logprob - reference for reference - logprob.",
        op: "policy_loss",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden"]),
        answer: |mutant, case| {
            mutant.asked(case, |case| {
                if case.params.get("kl").is_some_and(|kl| kl == "k3") {
                    let [logprob, reference] = ["logprob", "reference"].map(|name| f32s(&case.inputs[name]));
                    let other = logprob.iter().zip(reference).map(|(a, r)| a + (a - r)).collect();
                    let shape = case.inputs["reference"].shape().to_vec();
                    case.inputs.insert("reference".into(), Tensor::fp32(&shape, other));
                }
            })
        },
    },
];
