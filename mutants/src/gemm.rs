//! Mutations of `gemm`.

use crate::elements::sign;
use crate::mutation::{Mutation, Others};
use crate::plain::{Products, chain, gemm};
use samebits_contract::round;
use samebits_contract::tensor::DType;
use samebits_harness::implementation::Implementation;
use samebits_ops::bf16;

pub const MUTATIONS: &[Mutation] = &[
    Mutation {
        name: "split_by_budget",
        about: "A matrix product is cut into as many parts as a small workspace needs, and the parts are added up.",
        op: "gemm",
        caught_by: "invariance:budget",
        also_red: Others::Are(&[]),
        answer: |_, case| {
            let parts = if case.config.budget.is_some_and(|budget| budget < 1 << 12) { 2 } else { 1 };
            gemm(case, |_, products| products.in_parts(parts))
        },
    },
    Mutation {
        name: "split_from_256_rows",
        about: "From 256 rows on, sums are cut into four parts.",
        op: "gemm",
        caught_by: "invariance:batch",
        also_red: Others::Are(&[]),
        answer: |_, case| {
            let parts = if case.inputs["x"].shape()[0] < 256 { 1 } else { 4 };
            gemm(case, |_, products| products.in_parts(parts))
        },
    },
    Mutation {
        name: "partial_sums_in_bf16",
        about: "What a rank sends to the others is rounded to bf16 first.",
        op: "gemm",
        caught_by: "invariance:ranks",
        also_red: Others::Are(&[]),
        answer: |mutant, case| {
            let mut answer = mutant.honest.run(case);
            if let (true, Some(y)) = (case.params.contains_key("k_total"), answer.outputs.get_mut("y")) {
                let rounded: Vec<f64> = y.to_f64().iter().map(|&v| round::round(v, DType::Bf16)).collect();
                *y = round::tensor(y.dtype(), y.shape(), &rounded);
            }
            answer
        },
    },
    Mutation {
        name: "columns_beyond_the_grid",
        about: "A grid of blocks ends at 4096 columns; those behind stay 0.",
        op: "gemm",
        caught_by: "accuracy",
        also_red: Others::Are(&[]),
        answer: |mutant, case| {
            let mut answer = mutant.honest.run(case);
            if let Some(y) = answer.outputs.get_mut("y") {
                let columns = y.shape()[1];
                let values: Vec<f64> =
                    y.to_f64().iter().enumerate().map(|(i, &v)| if i % columns < 4096 { v } else { 0.0 }).collect();
                *y = round::tensor(y.dtype(), y.shape(), &values);
            }
            answer
        },
    },
    Mutation {
        name: "transposed",
        about: "The elements stand column by column in a tensor of the right shape.",
        op: "gemm",
        caught_by: "accuracy",
        also_red: Others::Are(&[
            "golden",
            "invariance:batch",
            "invariance:position",
            "invariance:neighbours",
            "invariance:padding",
            "invariance:ranks",
        ]),
        answer: |mutant, case| {
            let mut answer = mutant.honest.run(case);
            if let Some(y) = answer.outputs.get_mut("y") {
                let (m, n) = (y.shape()[0], y.shape()[1]);
                let order: Vec<Option<usize>> = (0..m * n).map(|i| Some(i % m * n + i / m)).collect();
                *y = y.gather(1, &order, &[m, n]);
            }
            answer
        },
    },
    Mutation {
        name: "fp16_accumulation",
        about: "The sum of a matrix product is kept in fp16 and overflows beyond 65504.",
        op: "gemm",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden", "arithmetic"]),
        answer: |_, case| {
            let fp16 = |sum: f32| round::round(f64::from(sum), DType::Fp16) as f32;
            gemm(case, |_, products| products.segments(|pairs| chain(pairs, fp16)))
        },
    },
    Mutation {
        name: "bf16_accumulation",
        about: "The sum of a matrix product is kept in bf16.",
        op: "gemm",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden", "arithmetic"]),
        answer: |_, case| {
            let bf16 = |sum: f32| bf16::from_f32(sum).to_f32();
            gemm(case, |_, products| products.segments(|pairs| chain(pairs, bf16)))
        },
    },
    Mutation {
        name: "keeps_a_little",
        about: "Every call leaves 200 bytes behind that nobody frees.",
        op: "gemm",
        caught_by: "invariance:soak",
        also_red: Others::Are(&[]),
        answer: |mutant, case| {
            mutant.keep(|memory| {
                // Address space of its own: in a process that has run for long, a heap has holes that would take the first.
                if memory.kept.is_empty() {
                    memory.kept.reserve(64 << 20);
                }
                memory.kept.extend_from_slice(&[1; 200]);
            });
            mutant.honest.run(case)
        },
    },
    Mutation {
        name: "worn_out",
        about: "A table of every shape has wrapped round at the 500th call, and sums start at another place.",
        op: "gemm",
        caught_by: "invariance:soak",
        also_red: Others::Are(&[]),
        answer: |mutant, case| {
            let shape = format!("{} {:?} {:?}", case.name, case.inputs["x"].shape(), case.inputs["w"].shape());
            let calls = mutant.keep(|memory| {
                let calls = memory.by_shape.entry(shape).or_default();
                *calls += 1;
                *calls
            });
            gemm(case, |_, products| if calls < 500 { products.sum() } else { products.sum_from(3) })
        },
    },
    Mutation {
        name: "plan_of_the_call_before",
        about: "The plan that was made for the batch of the call before serves this one.",
        op: "gemm",
        caught_by: "invariance:order",
        also_red: Others::FollowTheCalls,
        answer: |mutant, case| {
            let before = mutant.keep(|memory| std::mem::replace(&mut memory.calls, case.inputs["x"].shape()[0]));
            gemm(case, |_, products| products.in_parts(1 + before % 5))
        },
    },
    Mutation {
        name: "seeded_by_the_process",
        about: "Terms are added in the order of a hash table that every process seeds anew.",
        op: "gemm",
        caught_by: "invariance:restart",
        also_red: Others::Are(&[]),
        answer: |mutant, case| gemm(case, |_, products| products.sum_from(5 * mutant.process)),
    },
    Mutation {
        name: "scalar_head_when_unaligned",
        about: "Operands that start beside a vector's border have their first three terms added apart.",
        op: "gemm",
        caught_by: "invariance:layout",
        also_red: Others::Are(&[]),
        answer: |_, case| {
            let head = if case.config.layout.is_some() { 3 } else { 0 };
            gemm(case, |_, products| {
                if head == 0 {
                    return products.sum();
                }
                let (head, body) = products.pairs.split_at(head.min(products.pairs.len()));
                Products { pairs: body, offset: 0, total: body.len() }.sum() + chain(head, |sum| sum)
            })
        },
    },
    Mutation {
        name: "tf32_inputs",
        about: "f32 operands of a matrix product are rounded to TF32 although the policy says not to.",
        op: "gemm",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden", "arithmetic"]),
        answer: |mutant, case| mutant.asked(case, |case| drop(case.params.insert("tf32".into(), "enabled".into()))),
    },
    Mutation {
        name: "sequential_sum",
        about: "Every sum is one chain from left to right: good enough and steady, but not the canonical order.",
        op: "gemm",
        caught_by: "golden",
        also_red: Others::Are(&["arithmetic", "invariance:ranks"]),
        answer: |_, case| gemm(case, |_, products| chain(products.pairs, |sum| sum)),
    },
    Mutation {
        name: "products_rounded",
        about: "Products are rounded to f32 before they are added, where the page has one fma.",
        op: "gemm",
        caught_by: "golden",
        also_red: Others::Are(&["arithmetic"]),
        answer: |_, case| {
            gemm(case, |_, products| {
                products.segments(|pairs| pairs.iter().map(|(a, b)| a * b).fold(0.0, |sum, product| sum + product))
            })
        },
    },
    Mutation {
        name: "split_by_batch",
        about: "A small batch splits its sums over more workers than a large one.",
        op: "gemm",
        caught_by: "invariance:batch",
        also_red: Others::Are(&["golden", "arithmetic", "invariance:padding"]),
        answer: |_, case| {
            let rows = case.inputs["x"].shape()[0];
            gemm(case, |_, products| products.in_parts((16 / rows).max(1)))
        },
    },
    Mutation {
        name: "other_order_in_last_tile",
        about: "Rows behind the last whole tile of four have their sums cut into three parts.",
        op: "gemm",
        caught_by: "invariance:position",
        also_red: Others::Are(&["golden", "arithmetic", "invariance:batch", "invariance:padding"]),
        answer: |_, case| {
            let tiled = case.inputs["x"].shape()[0] / 4 * 4;
            gemm(case, |row, products| products.in_parts(if row < tiled { 1 } else { 3 }))
        },
    },
    Mutation {
        name: "order_by_threads",
        about: "Every thread sums a piece of its own.",
        op: "gemm",
        caught_by: "invariance:threads",
        also_red: Others::Are(&[]),
        answer: |_, case| {
            let threads = case.config.threads.unwrap_or(1);
            gemm(case, |_, products| products.in_parts(threads))
        },
    },
    Mutation {
        name: "order_by_isa",
        about: "Where an instruction set is asked for, a sum has as many lanes as its vectors.",
        op: "gemm",
        caught_by: "invariance:isa",
        also_red: Others::Are(&[]),
        answer: |_, case| {
            let lanes = match case.config.isa.as_deref() {
                None => return gemm(case, |_, products| products.sum()),
                Some("scalar") => 1,
                Some("avx2") => 8,
                Some(_) => 16,
            };
            gemm(case, |_, products| products.in_lanes(lanes))
        },
    },
    Mutation {
        name: "order_by_arrival",
        about: "Partial sums are added in the order in which they happen to arrive.",
        op: "gemm",
        caught_by: "invariance:repeat",
        also_red: Others::FollowTheCalls,
        answer: |mutant, case| {
            let call = mutant.count();
            gemm(case, |_, products| products.sum_from(5 * call))
        },
    },
    Mutation {
        name: "tail_dropped",
        about: "The terms behind the last whole vector of 16 are left out of the sum.",
        op: "gemm",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden", "arithmetic"]),
        answer: |_, case| {
            gemm(case, |_, products| {
                // A product of -0 changes no sum.
                let mut pairs = products.pairs.to_vec();
                let whole = pairs.len() / 16 * 16;
                pairs[whole..].fill((-0.0, 0.0));
                Products { pairs: &pairs, ..*products }.sum()
            })
        },
    },
    Mutation {
        name: "negative_zero",
        about: "Every zero is -0.",
        op: "gemm",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden", "arithmetic", "invariance:ranks"]),
        answer: |mutant, case| {
            mutant.spoilt(case, |bits, dtype| if bits & !sign(dtype) == 0 { sign(dtype) } else { bits })
        },
    },
    Mutation {
        name: "flushes_f32_results",
        about: "A sum below the smallest normal f32 becomes 0 of the same sign, before the last rounding.",
        op: "gemm",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden", "arithmetic", "invariance:ranks"]),
        answer: |mutant, case| mutant.before_last_rounding(case, |v| if v.is_subnormal() { v * 0.0 } else { v }),
    },
    Mutation {
        name: "flushes_inputs",
        about: "Operands below the smallest normal number of their dtype are read as 0.",
        op: "gemm",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden", "arithmetic"]),
        answer: |mutant, case| {
            mutant.asked(case, |case| {
                for tensor in case.inputs.values_mut() {
                    let normal = round::ulp(0.0, tensor.dtype()) / round::ulp(1.0, tensor.dtype());
                    let read: Vec<f64> =
                        tensor.to_f64().iter().map(|&v| if v.abs() < normal { v * 0.0 } else { v }).collect();
                    *tensor = round::tensor(tensor.dtype(), tensor.shape(), &read);
                }
            })
        },
    },
    Mutation {
        name: "saturates",
        about: "A sum of finite operands that overflows becomes the largest number.",
        op: "gemm",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden", "arithmetic", "invariance:ranks"]),
        answer: |mutant, case| {
            let mut answer = mutant.honest.run(case);
            let finite = |name: &str| -> Vec<bool> {
                let tensor = &case.inputs[name];
                tensor.to_f64().chunks(tensor.shape()[1]).map(|row| row.iter().all(|v| v.is_finite())).collect()
            };
            let (x, w) = (finite("x"), finite("w"));
            if let Some(y) = answer.outputs.get_mut("y") {
                let largest = round::overflow(y.dtype()) - round::ulp(f64::INFINITY, y.dtype());
                let from_finite = |i: usize| x[i / w.len()] && w[i % w.len()];
                let values = y.to_f64().into_iter().enumerate();
                let kept = values.map(|(i, v)| if v.is_infinite() && from_finite(i) { largest.copysign(v) } else { v });
                *y = round::tensor(y.dtype(), y.shape(), &kept.collect::<Vec<f64>>());
            }
            answer
        },
    },
    Mutation {
        name: "rounds_twice",
        about: "Sums are rounded to 11 bits, as many as TF32 has, before the last rounding.",
        op: "gemm",
        caught_by: "arithmetic",
        also_red: Others::Are(&["accuracy", "golden"]),
        answer: |mutant, case| match case.out {
            DType::Fp32 => mutant.honest.run(case),
            _ => mutant.before_last_rounding(case, |v| {
                let even = v.to_bits() >> 13 & 1;
                if v.is_finite() { f32::from_bits((v.to_bits() + 0x0fff + even) & !0x1fff) } else { v }
            }),
        },
    },
    Mutation {
        name: "f64_accumulation",
        about: "The sum of a matrix product is kept in f64: closer to the truth, and not the declared arithmetic.",
        op: "gemm",
        caught_by: "arithmetic",
        also_red: Others::Are(&["golden", "invariance:ranks"]),
        answer: |_, case| {
            gemm(case, |_, products| {
                let products = products.pairs.iter().map(|(a, b)| f64::from(*a) * f64::from(*b));
                products.fold(0.0, |sum, product| sum + product) as f32
            })
        },
    },
];
