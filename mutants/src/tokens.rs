//! Mutations of sums over tokens.

use crate::mutation::{Mutant, Mutation, Others};
use samebits_contract::case::{Answer, Case, Status};
use samebits_contract::round;
use samebits_contract::tensor::{DType, Tensor};
use samebits_harness::implementation::Implementation;

/// The sum `name` of the tokens of this call alone, from +0, and then `carry` added to it.
fn added_to_carry(mutant: &Mutant, case: &Case, name: &str) -> Answer {
    let Some(carry) = case.inputs.get("carry") else { return mutant.honest.run(case) };
    let zeros = Tensor::fp32(carry.shape(), vec![0.0; carry.len()]);
    let mut answer = mutant.asked(case, |case| drop(case.inputs.insert("carry".into(), zeros)));
    if let Some(sum) = answer.outputs.get_mut(name) {
        let values = carry.to_f64().into_iter().zip(sum.to_f64()).map(|(carry, sum)| carry + sum);
        *sum = round::tensor(DType::Fp32, carry.shape(), &values.collect::<Vec<_>>());
    }
    answer
}

pub const MUTATIONS: &[Mutation] = &[
    Mutation {
        name: "partial_sums_added",
        about: "Each call sums its own tokens from +0, and the sum of the calls before is added to that.",
        op: "token_sum",
        caught_by: "invariance:micro_batch",
        also_red: Others::Are(&["accuracy", "golden"]),
        answer: |mutant, case| added_to_carry(mutant, case, "sum"),
    },
    Mutation {
        name: "partial_sums_rounded",
        about: "The sum of the calls before is kept as bf16.",
        op: "rms_norm_dw",
        caught_by: "invariance:micro_batch",
        also_red: Others::Are(&["accuracy", "golden", "invariance:accumulation"]),
        answer: |mutant, case| {
            mutant.asked(case, |case| {
                if let Some(carry) = case.inputs.get_mut("carry") {
                    let kept: Vec<f64> = carry.to_f64().into_iter().map(|v| round::round(v, DType::Bf16)).collect();
                    *carry = round::tensor(DType::Fp32, carry.shape(), &kept);
                }
            })
        },
    },
    Mutation {
        name: "tokens_counted_anew",
        about: "Every call begins with chain 0, whatever `token_offset` says.",
        op: "layer_norm_dw",
        caught_by: "invariance:accumulation",
        also_red: Others::Are(&["accuracy", "golden", "invariance:micro_batch"]),
        answer: |mutant, case| mutant.asked(case, |case| drop(case.params.remove("token_offset"))),
    },
    Mutation {
        name: "padding_counted",
        about: "Rows of padding are tokens as all others.",
        op: "norm_rope_dw",
        caught_by: "invariance:padding",
        also_red: Others::Are(&["accuracy", "golden", "invariance:micro_batch", "invariance:accumulation"]),
        answer: |mutant, case| mutant.asked(case, |case| drop(case.inputs.remove("mask"))),
    },
    Mutation {
        name: "padding_times_zero",
        about: "Rows of padding are multiplied by 0 and added, where NaN times 0 is NaN.",
        op: "embedding_dw",
        caught_by: "invariance:padding",
        also_red: Others::Are(&["accuracy", "golden", "invariance:micro_batch", "invariance:accumulation"]),
        answer: |mutant, case| {
            mutant.asked(case, |case| {
                let Some(mask) = case.inputs.remove("mask") else { return };
                let dy = &case.inputs["dy"];
                let width = dy.len() / mask.len();
                let counts = |row: usize| mask.value(row) != 0.0;
                let values = dy.to_f64().into_iter().enumerate();
                let values = values.map(|(i, v)| if counts(i / width) { v } else { v * 0.0 }).collect::<Vec<_>>();
                let dy = round::tensor(dy.dtype(), dy.shape(), &values);
                case.inputs.insert("dy".into(), dy);
            })
        },
    },
    Mutation {
        name: "last_odd_token_dropped",
        about: "Tokens are taken in pairs, and the last one of an odd number has no other.",
        op: "gemm_dw",
        caught_by: "invariance:micro_batch",
        also_red: Others::Are(&["accuracy", "golden", "arithmetic", "invariance:accumulation"]),
        answer: |mutant, case| {
            mutant.asked(case, |case| {
                let tokens = case.inputs["x"].shape()[0];
                let mask = case.inputs.get("mask").and_then(Tensor::as_i32).map_or(vec![1; tokens], <[i32]>::to_vec);
                let counted: Vec<usize> = (0..tokens).filter(|&t| mask[t] != 0).collect();
                if counted.len() % 2 == 1 {
                    let last = counted[counted.len() - 1];
                    let kept = (0..tokens).map(|t| if t == last { 0 } else { mask[t] }).collect();
                    case.inputs.insert("mask".into(), Tensor::i32(&[tokens], kept));
                }
            })
        },
    },
    Mutation {
        name: "rows_in_order_of_arrival",
        about: "Several threads add their rows as they come: the last ones first.",
        op: "token_sum",
        caught_by: "invariance:threads",
        also_red: Others::Are(&[]),
        answer: |mutant, case| {
            if case.config.threads.is_none_or(|threads| threads < 2) {
                return mutant.honest.run(case);
            }
            // 64 rows further on is the next row of a chain: the order of such blocks is that of the chains.
            let Some(rows) = case.inputs.get("x").map(|x| x.shape()[0]).filter(|rows| *rows >= 128) else {
                return mutant.honest.run(case);
            };
            let whole = rows - rows % 64;
            let order: Vec<usize> =
                (0..whole).map(|row| whole - 64 - row / 64 * 64 + row % 64).chain(whole..rows).collect();
            let answer = mutant.asked(case, |case| {
                for (name, tensor) in &mut case.inputs {
                    if name != "carry" {
                        *tensor = tensor.select(0, &order);
                    }
                }
            });
            if answer.status == Status::Ok { answer } else { mutant.honest.run(case) }
        },
    },
];
