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

/// The gradients of attention, with those of keys and values as the sum of two: of the first half of the rows and the
/// second.
fn rows_in_halves(mutant: &Mutant, case: &Case) -> Answer {
    let mut whole = mutant.honest.run(case);
    let shape = case.inputs["q_pos"].shape();
    let given = |row: usize| case.inputs.get("mask").is_none_or(|mask| mask.value(row) != 0.0);
    let half = |second: bool| {
        let mine = |row: usize| (row % shape[1] >= shape[1] / 2) == second && given(row);
        let mask = (0..shape[0] * shape[1]).map(|row| i32::from(mine(row))).collect();
        mutant.asked(case, |case| drop(case.inputs.insert("mask".into(), Tensor::i32(shape, mask))))
    };
    let [first, second] = [half(false), half(true)];
    for (name, tensor) in whole.outputs.iter_mut().filter(|(name, _)| *name != "dq") {
        let [first, second] = [&first, &second].map(|answer| answer.outputs[name].to_f64());
        let sums: Vec<f64> = first.into_iter().zip(second).map(|(a, b)| f64::from(a as f32 + b as f32)).collect();
        *tensor = round::tensor(tensor.dtype(), tensor.shape(), &sums);
    }
    whole
}

/// The same with the heads of every group in reverse.
fn heads_in_reverse(mutant: &Mutant, case: &Case) -> Answer {
    let (heads, kv_heads) = (case.inputs["q"].shape()[2], case.inputs["k"].shape()[2]);
    let group = heads / kv_heads;
    let order: Vec<usize> = (0..heads).map(|head| head / group * group + group - 1 - head % group).collect();
    let mut answer = mutant.asked(case, |case| {
        for name in ["q", "out", "lse", "dout"] {
            let turned = case.inputs[name].select(2, &order);
            case.inputs.insert(name.into(), turned);
        }
    });
    if let Some(dq) = answer.outputs.get_mut("dq") {
        *dq = dq.select(2, &order);
    }
    answer
}

pub const MUTATIONS: &[Mutation] = &[
    Mutation {
        name: "padding_in_gradients_of_keys",
        about: "Query rows that are no tokens add to the gradients of keys and values.",
        op: "attention_backward",
        caught_by: "invariance:padding",
        also_red: Others::Are(&["accuracy", "golden", "invariance:batch"]),
        answer: |mutant, case| mutant.asked(case, |case| drop(case.inputs.remove("mask"))),
    },
    Mutation {
        name: "rows_of_gradients_dealt_to_threads",
        about: "Two threads sum half of the rows each for the gradients of keys and values.",
        op: "attention_backward",
        caught_by: "invariance:threads",
        also_red: Others::Are(&[]),
        answer: |mutant, case| match case.config.threads {
            Some(2..) => rows_in_halves(mutant, case),
            _ => mutant.honest.run(case),
        },
    },
    Mutation {
        name: "heads_of_gradients_in_reverse",
        about: "The last query head of a group is added first to the gradients of keys and values.",
        op: "attention_backward",
        caught_by: "golden",
        also_red: Others::Are(&[]),
        answer: heads_in_reverse,
    },
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
