//! Mutations of elementwise ops, of rotations and of ops that only look up.

use crate::mutation::{Mutation, Others};
use samebits_contract::case::{Answer, Case};
use samebits_contract::round;
use samebits_contract::tensor::{DType, Tensor};
use samebits_harness::implementation::Implementation;
use samebits_ops::bf16;

/// The bit of the sign.
pub fn sign(dtype: DType) -> u32 {
    1 << (8 * dtype.size() - 1)
}

/// How many elements of each row `topk` chooses from.
fn counts(case: &Case) -> Vec<usize> {
    let shape = case.inputs["x"].shape();
    match case.inputs.get("count").and_then(Tensor::as_i32) {
        Some(count) => count.iter().map(|count| *count as usize).collect(),
        None => vec![shape[1]; shape[0]],
    }
}

/// Changes what `topk` has taken of each row.
fn each_choice(answer: &mut Answer, change: impl Fn(usize, &mut [i32])) {
    let Some(index) = answer.outputs.get_mut("index") else { return };
    let (shape, mut values) = (index.shape().to_vec(), index.as_i32().expect("topk returns i32").to_vec());
    for (row, index) in values.chunks_mut(shape[1]).enumerate() {
        let taken = index.iter().filter(|i| **i >= 0).count();
        change(row, &mut index[..taken]);
    }
    *index = Tensor::i32(&shape, values);
}

pub const MUTATIONS: &[Mutation] = &[
    Mutation {
        name: "all_zeros",
        about: "The output buffer is returned as it was allocated.",
        op: "rope",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden", "arithmetic"]),
        answer: |mutant, case| mutant.spoilt(case, |_, _| 0),
    },
    Mutation {
        name: "positions_in_bf16",
        about: "Positions are kept in bf16, which has no whole numbers between 256 and 258.",
        op: "rope",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden"]),
        answer: |mutant, case| {
            mutant.asked(case, |case| {
                let pos = case.inputs["pos"].as_i32().expect("the contract has checked it");
                let kept = pos.iter().map(|&pos| bf16::from_f32(pos as f32).to_f32() as i32).collect();
                case.inputs.insert("pos".into(), Tensor::i32(&[pos.len()], kept));
            })
        },
    },
    Mutation {
        name: "infinity_clamped",
        about: "Results beyond 65504 become 65504.",
        op: "add",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden", "arithmetic"]),
        answer: |mutant, case| {
            mutant.spoilt(case, |bits, dtype| match round::from_bits(bits, dtype) {
                v if v > 65504.0 => round::to_bits(65504.0, dtype),
                v if v < -65504.0 => round::to_bits(-65504.0, dtype),
                _ => bits,
            })
        },
    },
    Mutation {
        name: "minus_zero_lost",
        about: "-0 becomes +0.",
        op: "add",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden", "arithmetic"]),
        answer: |mutant, case| mutant.spoilt(case, |bits, dtype| if bits == sign(dtype) { 0 } else { bits }),
    },
    Mutation {
        name: "nan_payload_kept",
        about: "A NaN keeps a payload instead of becoming the canonical one.",
        op: "add",
        caught_by: "accuracy",
        also_red: Others::Are(&[
            "golden",
            "arithmetic",
            "invariance:batch",
            "invariance:position",
            "invariance:padding",
            "invariance:layout",
            "invariance:threads",
            "invariance:isa",
            "invariance:budget",
            "invariance:repeat",
            "invariance:order",
            "invariance:restart",
            "invariance:neighbours",
        ]),
        answer: |mutant, case| mutant.spoilt(case, |bits, dtype| bits | u32::from(round::is_nan(bits, dtype))),
    },
    Mutation {
        name: "subnormals_flushed",
        about: "Results below the smallest normal number become 0 of the same sign.",
        op: "add",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden", "arithmetic"]),
        answer: |mutant, case| {
            mutant.spoilt(case, |bits, dtype| {
                let normal = round::to_bits(1.0, dtype) - round::to_bits(0.5, dtype);
                if bits & !sign(dtype) < normal { bits & sign(dtype) } else { bits }
            })
        },
    },
    Mutation {
        name: "factor_narrowed",
        about: "The second factor is rounded to bf16 before the product.",
        op: "mul",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden"]),
        answer: |mutant, case| {
            mutant.asked(case, |case| {
                let b = &case.inputs["b"];
                let narrow: Vec<f64> = b.to_f64().into_iter().map(|v| round::round(v, DType::Bf16)).collect();
                let narrow = round::tensor(b.dtype(), b.shape(), &narrow);
                case.inputs.insert("b".into(), narrow);
            })
        },
    },
    Mutation {
        name: "gelu_by_the_tangent",
        about: "The gelu of the error function is that of the hyperbolic tangent.",
        op: "activate",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden"]),
        answer: |mutant, case| {
            mutant.asked(case, |case| {
                if case.params.get("kind").is_some_and(|kind| kind == "gelu") {
                    case.params.insert("kind".into(), "gelu_tanh".into());
                }
            })
        },
    },
    Mutation {
        name: "input_scaled",
        about: "A call scales its gate where it lies; asked the same right afterwards, it finds the gate scaled.",
        op: "silu_mul",
        caught_by: "invariance:repeat",
        also_red: Others::Are(&["invariance:threads", "invariance:isa", "invariance:budget", "invariance:layout"]),
        answer: |mutant, case| {
            let before = mutant.keep(|memory| memory.question.replace(case.clone()));
            let again = before.is_some_and(|before| {
                before.name == case.name
                    && before.inputs.iter().all(|(name, a)| case.inputs.get(name).is_some_and(|b| a.same_bits(b)))
            });
            mutant.asked(case, |case| {
                let gate = &case.inputs["gate"];
                if again {
                    let values: Vec<f64> = gate.to_f64().iter().map(|v| v * 2.0).collect();
                    let scaled = round::tensor(gate.dtype(), gate.shape(), &values);
                    case.inputs.insert("gate".into(), scaled);
                }
            })
        },
    },
    Mutation {
        name: "nan_swallowed",
        about: "NaN becomes 0.",
        op: "silu_mul",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden", "arithmetic"]),
        answer: |mutant, case| mutant.spoilt(case, |bits, dtype| if round::is_nan(bits, dtype) { 0 } else { bits }),
    },
    Mutation {
        name: "last_rounding_truncates",
        about: "Results in bf16 are cut off instead of rounded to nearest even.",
        op: "silu_mul",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden", "arithmetic"]),
        answer: |mutant, case| {
            if case.out != DType::Bf16 {
                return mutant.honest.run(case);
            }
            let mut answer = mutant.asked(case, |case| case.out = DType::Fp32);
            if let Some(y) = answer.outputs.get_mut("y") {
                let cut = (0..y.len()).map(|i| bf16::from_bits((y.bits(i) >> 16) as u16)).collect();
                *y = Tensor::bf16(y.shape(), cut);
            }
            answer
        },
    },
    Mutation {
        name: "gates_taken_in_turn",
        about: "The elements of a row take its gates in turn, as if each were for every G-th of them.",
        op: "sigmoid_mul",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden"]),
        answer: |mutant, case| {
            let (gates, n) = (case.inputs["gate"].shape()[1], case.inputs["x"].shape()[1]);
            mutant.asked(case, |case| {
                let turned: Vec<usize> = (0..n).map(|i| i % gates.max(1)).collect();
                let gate = case.inputs["gate"].select(1, &turned);
                case.inputs.insert("gate".into(), gate);
            })
        },
    },
    Mutation {
        name: "gate_within_both_limits",
        about: "The gate is kept above the negative of the limit too, as the up is.",
        op: "clamped_silu_mul",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden"]),
        answer: |mutant, case| {
            let limit =
                case.params.get("limit").map_or(7.0, |limit| limit.parse().expect("the contract has checked it"));
            mutant.asked(case, |case| {
                let gate = &case.inputs["gate"];
                let values: Vec<f64> =
                    gate.to_f64().into_iter().map(|gate| if gate < -limit { -limit } else { gate }).collect();
                let gate = round::tensor(gate.dtype(), gate.shape(), &values);
                case.inputs.insert("gate".into(), gate);
            })
        },
    },
    Mutation {
        name: "slope_beyond_the_limits",
        about: "The gradients go on beyond the limits, as if the value were not cut there.",
        op: "clamped_silu_mul_backward",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden"]),
        answer: |mutant, case| {
            mutant.asked(case, |case| {
                case.params.insert("limit".into(), "1e30".into());
            })
        },
    },
    Mutation {
        name: "slope_without_the_rest",
        about: "The gradient of a gate is that of its exponential: without the factor of one less the sigmoid.",
        op: "sigmoid_mul_backward",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden"]),
        answer: |mutant, case| {
            let mut answer = mutant.honest.run(case);
            let gate = case.inputs["gate"].to_f64();
            if let Some(dgate) = answer.outputs.get_mut("dgate") {
                let values = dgate.to_f64().into_iter().zip(gate).map(|(value, gate)| value * (1.0 + gate.exp()));
                *dgate = round::tensor(dgate.dtype(), dgate.shape(), &values.collect::<Vec<_>>());
            }
            answer
        },
    },
    Mutation {
        name: "out_ignored",
        about: "The output is f32 whatever the request says.",
        op: "embedding",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden", "arithmetic"]),
        answer: |mutant, case| mutant.asked(case, |case| case.out = DType::Fp32),
    },
    Mutation {
        name: "previous_answer",
        about: "The output buffer of the call before is returned where its shape fits.",
        op: "embedding",
        caught_by: "invariance:position",
        also_red: Others::FollowTheCalls,
        answer: |mutant, case| {
            let answer = mutant.honest.run(case);
            let form = |answer: &Answer| answer.outputs.get("y").map(|y| (y.dtype(), y.shape().to_vec()));
            match mutant.keep(|memory| memory.answer.replace(answer.clone())) {
                Some(before) if form(&before) == form(&answer) => before,
                _ => answer,
            }
        },
    },
    Mutation {
        name: "last_of_equals",
        about: "Of equal largest elements the last one wins.",
        op: "argmax",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden"]),
        answer: |mutant, case| {
            let n = case.inputs["x"].shape()[1];
            let mut answer = mutant.asked_backwards(case, &["x"]);
            if let Some(index) = answer.outputs.get_mut("index") {
                let values = index.as_i32().expect("argmax returns i32");
                *index = Tensor::i32(index.shape(), values.iter().map(|&i| n as i32 - 1 - i).collect());
            }
            answer
        },
    },
    Mutation {
        name: "last_of_equals_among_the_largest",
        about: "Of equal elements, of which there is room for some, the last ones are taken.",
        op: "topk",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden"]),
        answer: |mutant, case| {
            let n = case.inputs["x"].shape()[1];
            let ends = counts(case);
            let mut answer = mutant.asked(case, |case| {
                let x = &case.inputs["x"];
                let places = (0..x.len()).map(|at| {
                    let (end, i) = (ends[at / n], at % n);
                    Some(if i < end { at - i + end - 1 - i } else { at })
                });
                let turned = x.gather(1, &places.collect::<Vec<_>>(), x.shape());
                case.inputs.insert("x".into(), turned);
            });
            each_choice(&mut answer, |row, index| {
                index.iter_mut().for_each(|i| *i = ends[row] as i32 - 1 - *i);
                index.reverse();
            });
            answer
        },
    },
    Mutation {
        name: "largest_element_first",
        about: "The largest elements of a row are given in the order of their size.",
        op: "topk",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden"]),
        answer: |mutant, case| {
            let (x, n) = (case.inputs["x"].to_f64(), case.inputs["x"].shape()[1]);
            let mut answer = mutant.honest.run(case);
            each_choice(&mut answer, |row, index| {
                index.sort_by(|a, b| x[row * n + *b as usize].total_cmp(&x[row * n + *a as usize]));
            });
            answer
        },
    },
    Mutation {
        name: "every_logit_counts",
        about: "The weights of sparsemixer are softmaxes of all experts that were not chosen before.",
        op: "route",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden"]),
        answer: |mutant, case| mutant.asked(case, |case| drop(case.params.insert("jitter".into(), "1e30".into()))),
    },
    Mutation {
        name: "experts_chosen_by_scores",
        about: "Experts are chosen by scores where their logits should decide.",
        op: "route",
        caught_by: "accuracy",
        also_red: Others::Are(&[]),
        answer: |mutant, case| mutant.asked(case, |case| drop(case.params.remove("chosen_by"))),
    },
    Mutation {
        name: "named_experts_in_their_order",
        about: "Experts that a row names have the ranks of their places there.",
        op: "route",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden"]),
        answer: |mutant, case| {
            let mut answer = mutant.honest.run(case);
            let (Some(named), Some(rank)) = (case.inputs.get("experts"), answer.outputs.get_mut("rank")) else {
                return answer;
            };
            let (e, chosen) = (rank.shape()[1], named.shape()[1]);
            let mut ranks = rank.as_i32().expect("ranks are i32").to_vec();
            for (place, &expert) in named.as_i32().expect("they are i32").iter().enumerate().filter(|(_, e)| **e >= 0) {
                ranks[place / chosen * e + expert as usize] = (place % chosen) as i32;
            }
            *rank = Tensor::i32(&[ranks.len() / e, e], ranks);
            answer
        },
    },
    Mutation {
        name: "experts_of_the_token_before",
        about: "A token has the experts that the row before its own names.",
        op: "route",
        caught_by: "accuracy",
        also_red: Others::Are(&[
            "golden",
            "invariance:batch",
            "invariance:neighbours",
            "invariance:padding",
            "invariance:position",
        ]),
        answer: |mutant, case| {
            mutant.asked(case, |case| {
                let Some(named) = case.inputs.get_mut("experts") else { return };
                let rows = named.shape()[0];
                *named = named.select(0, &(0..rows).map(|row| (row + rows - 1) % rows).collect::<Vec<_>>());
            })
        },
    },
    Mutation {
        name: "gradient_of_the_own_choice",
        about: "The gradient of a router goes through its likeliest experts, whichever were chosen.",
        op: "route_backward",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden"]),
        answer: |mutant, case| {
            mutant.asked(case, |case| {
                let (logits, rank) = (case.inputs["logits"].to_f64(), &case.inputs["rank"]);
                let (e, ranks) = (rank.shape()[1], rank.as_i32().expect("ranks are i32"));
                let of_row = |(logits, ranks): (&[f64], &[i32])| {
                    let mut order: Vec<usize> = (0..e).collect();
                    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
                    let chosen = ranks.iter().filter(|rank| **rank >= 0).count();
                    let place = |i: usize| order.iter().position(|of| *of == i).filter(|place| *place < chosen);
                    (0..e).map(|i| place(i).map_or(-1, |place| place as i32)).collect::<Vec<i32>>()
                };
                let own: Vec<i32> = logits.chunks(e).zip(ranks.chunks(e)).flat_map(of_row).collect();
                let shape = rank.shape().to_vec();
                case.inputs.insert("rank".into(), Tensor::i32(&shape, own));
            })
        },
    },
    Mutation {
        name: "last_expert_first",
        about: "What the experts of a token made is added from the last rank to the first.",
        op: "combine",
        caught_by: "arithmetic",
        also_red: Others::Are(&["golden"]),
        answer: |mutant, case| mutant.asked_backwards(case, &["row", "weight"]),
    },
];
