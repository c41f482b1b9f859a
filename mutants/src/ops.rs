//! Implementations that are wrong on purpose, each with the check that must catch it.
//!
//! They keep the harness honest: one that misses a mutant of [`MUTATIONS`] fails its own tests. Most ask `ours/cpu` a
//! question that is slightly off, or spoil its answer; the others compute the op on their own, in a wrong order or from
//! a wrong formula.

use crate::memory::held_here;
use crate::models::{ModelMutant, ModelMutation};
use samebits_contract::axis;
use samebits_contract::case::{Answer, Case, Status};
use samebits_contract::round;
use samebits_contract::tensor::{DType, Tensor};
use samebits_harness::checkpoints::Checkpoints;
use samebits_harness::implementation::cpu::CpuImplementation;
use samebits_harness::implementation::{Implementation, Soaked};
use samebits_models::{Config, Probe, Tripwire};
use samebits_ops::{Cpu, Isa, bf16};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock};

/// A way to be wrong.
pub struct Mutation {
    /// Its name, unique in [`MUTATIONS`].
    pub name: &'static str,
    /// What is wrong, in one sentence.
    pub about: &'static str,
    /// The op that has it; every other op is answered as `ours/cpu` answers it.
    pub op: &'static str,
    /// The check that must turn red: `accuracy`, `golden` or `invariance:<axis>`.
    pub caught_by: &'static str,
    /// Checks that must stay green, because what they look at is right.
    pub unnoticed_by: &'static [&'static str],
    answer: fn(&Mutant, &Case) -> Answer,
}

/// Axes of ops other than `chain`, for mutants that are the same whatever is around a row. `padding` is left out: it has
/// the most settings, and what it varies besides keys the others vary too.
const AXES: &[&str] = &[
    "invariance:batch",
    "invariance:position",
    "invariance:neighbours",
    "invariance:threads",
    "invariance:isa",
    "invariance:repeat",
];

/// All mutations.
pub const MUTATIONS: &[Mutation] = &[
    Mutation {
        name: "split_by_budget",
        about: "A matrix product is cut into as many parts as a small workspace needs, and the parts are added up.",
        op: "gemm",
        caught_by: "invariance:budget",
        unnoticed_by: AXES,
        answer: |_, case| {
            let parts = if case.config.budget.is_some_and(|budget| budget < 1 << 12) { 2 } else { 1 };
            gemm(case, |_, terms| in_parts(terms, parts))
        },
    },
    Mutation {
        name: "split_from_256_rows",
        about: "From 256 rows on, a kernel with other blocks takes over.",
        op: "gemm",
        caught_by: "invariance:batch",
        unnoticed_by: &["accuracy", "invariance:position", "invariance:threads", "invariance:isa", "invariance:repeat"],
        answer: |_, case| {
            let parts = if case.inputs["x"].shape()[0] < 256 { 1 } else { 4 };
            gemm(case, |_, terms| in_parts(terms, parts))
        },
    },
    Mutation {
        name: "tile_from_10_queries",
        about: "From ten queries on, keys are cut in two and the halves are merged by their log-sum-exp.",
        op: "attention",
        caught_by: "invariance:batch",
        unnoticed_by: &["invariance:threads", "invariance:isa", "invariance:repeat"],
        answer: |mutant, case| mutant.merged(case, |queries| queries >= 10),
    },
    Mutation {
        name: "decode_splits_keys",
        about: "A single query is answered by a kernel that cuts the keys in two and merges the halves.",
        op: "attention",
        caught_by: "invariance:schedule",
        unnoticed_by: &["invariance:threads", "invariance:isa", "invariance:repeat"],
        answer: |mutant, case| mutant.merged(case, |queries| queries == 1),
    },
    Mutation {
        name: "stale_page",
        about: "The last page of every sequence is the one that stood there before: the one in front of it.",
        op: "attention",
        caught_by: "invariance:pages",
        unnoticed_by: &["invariance:packing", "invariance:batch", "invariance:threads"],
        answer: |mutant, case| {
            mutant.asked(case, |case| {
                if let Some(table) = case.inputs.get_mut("page_table") {
                    let columns = table.shape()[1];
                    let mut pages = table.as_i32().expect("pages are i32").to_vec();
                    if columns > 1 {
                        pages.chunks_mut(columns).for_each(|row| row[columns - 1] = row[columns - 2]);
                    }
                    *table = Tensor::i32(table.shape(), pages);
                }
            })
        },
    },
    Mutation {
        name: "shared_page_taken",
        about: "A page that a second sequence shares was given away: the second one reads page 0.",
        op: "attention",
        caught_by: "invariance:prefix",
        unnoticed_by: &["invariance:pages", "invariance:packing", "invariance:batch", "invariance:threads"],
        answer: |mutant, case| {
            mutant.asked(case, |case| {
                if let Some(table) = case.inputs.get_mut("page_table") {
                    let mut seen = Vec::new();
                    let mut pages = table.as_i32().expect("pages are i32").to_vec();
                    for page in &mut pages {
                        if seen.contains(page) {
                            *page = 0;
                        } else {
                            seen.push(*page);
                        }
                    }
                    *table = Tensor::i32(table.shape(), pages);
                }
            })
        },
    },
    Mutation {
        name: "heads_interleaved",
        about: "Query head h reads key head h mod Hkv instead of h / (Hq / Hkv).",
        op: "attention",
        caught_by: "accuracy",
        unnoticed_by: &["invariance:threads", "invariance:isa", "invariance:repeat"],
        answer: |mutant, case| {
            if case.op != "attention" {
                return mutant.honest.run(case);
            }
            let (heads, kv_heads) = (case.inputs["q"].shape()[2], case.inputs["k"].shape()[2]);
            let group = heads / kv_heads;
            let mut answer = mutant.asked(case, |case| {
                // Heads that are to share keys are put side by side, and back afterwards.
                let order: Vec<usize> = (0..heads).map(|g| g / group + g % group * kv_heads).collect();
                let q = case.inputs["q"].select(2, &order);
                case.inputs.insert("q".into(), q);
            });
            let back: Vec<usize> = (0..heads).map(|h| h % kv_heads * group + h / kv_heads).collect();
            answer.outputs.values_mut().for_each(|tensor| *tensor = tensor.select(2, &back));
            answer
        },
    },
    Mutation {
        name: "no_running_max",
        about: "Exponentials are taken as they are, without the largest element as their reference.",
        op: "softmax",
        caught_by: "accuracy",
        unnoticed_by: &["invariance:threads", "invariance:isa", "invariance:repeat"],
        answer: |_, case| {
            let x = &case.inputs["x"];
            let mut y = Vec::with_capacity(x.len());
            let values: Vec<f32> = (0..x.len()).map(|i| x.value(i) as f32).collect();
            for row in values.chunks(x.shape()[1]) {
                let weights: Vec<f32> = row.iter().map(|v| v.exp()).collect();
                let total: f32 = weights.iter().sum();
                y.extend(weights.iter().map(|weight| f64::from(weight / total)));
            }
            answer("y", round::tensor(case.out, x.shape(), &y))
        },
    },
    Mutation {
        name: "partial_sums_in_bf16",
        about: "What a rank sends to the others is rounded to bf16 first.",
        op: "gemm",
        caught_by: "invariance:ranks",
        unnoticed_by: &["invariance:batch", "invariance:threads", "invariance:isa", "invariance:repeat"],
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
        name: "inner_rounding_fused_away",
        about: "The rounding before the weight, which `hf` asks for, is left out because the kernel is fused.",
        op: "rms_norm",
        caught_by: "golden",
        unnoticed_by: AXES,
        answer: |mutant, case| mutant.asked(case, |case| drop(case.params.remove("rounding"))),
    },
    Mutation {
        name: "divided_by_one_less",
        about: "The mean of the squares divides by N - 1.",
        op: "rms_norm",
        caught_by: "accuracy",
        unnoticed_by: AXES,
        answer: |_, case| rms_norm_in_f64(case, |sum, n, eps| (sum / (n - 1.0).max(1.0) + eps).sqrt()),
    },
    Mutation {
        name: "all_zeros",
        about: "The output buffer is returned as it was allocated.",
        op: "rope",
        caught_by: "accuracy",
        unnoticed_by: &[],
        answer: |mutant, case| mutant.spoilt(case, |_, _| 0),
    },
    Mutation {
        name: "columns_beyond_the_grid",
        about: "A grid of blocks ends at 4096 columns; those behind stay 0.",
        op: "gemm",
        caught_by: "accuracy",
        unnoticed_by: AXES,
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
        name: "keys_beyond_2048",
        about: "Keys behind the 2048th, which is what the table of a kernel holds, are not seen.",
        op: "attention",
        caught_by: "accuracy",
        unnoticed_by: &["invariance:threads", "invariance:isa", "invariance:repeat"],
        answer: |mutant, case| {
            mutant.asked(case, |case| {
                if let Some(kv_len) = case.inputs.get_mut("kv_len") {
                    let cut = kv_len.as_i32().expect("lengths are i32").iter().map(|&len| len.min(2048)).collect();
                    *kv_len = Tensor::i32(kv_len.shape(), cut);
                }
            })
        },
    },
    Mutation {
        name: "transposed",
        about: "The elements stand column by column in a tensor of the right shape.",
        op: "gemm",
        caught_by: "accuracy",
        unnoticed_by: &["invariance:threads", "invariance:isa", "invariance:repeat"],
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
        name: "infinity_clamped",
        about: "Results beyond 65504 become 65504.",
        op: "add",
        caught_by: "accuracy",
        unnoticed_by: AXES,
        answer: |mutant, case| {
            mutant.spoilt(case, |bits, dtype| match round::from_bits(bits, dtype) {
                v if v > 65504.0 => round::to_bits(65504.0, dtype),
                v if v < -65504.0 => round::to_bits(-65504.0, dtype),
                _ => bits,
            })
        },
    },
    Mutation {
        name: "fp16_accumulation",
        about: "The sum of a matrix product is kept in fp16 and overflows beyond 65504.",
        op: "gemm",
        caught_by: "accuracy",
        unnoticed_by: AXES,
        answer: |_, case| {
            let fp16 = |sum: f32| round::round(f64::from(sum), DType::Fp16) as f32;
            gemm(case, |_, terms| terms.iter().fold(0.0, |sum, term| fp16(sum + term)))
        },
    },
    Mutation {
        name: "keeps_a_little",
        about: "Every call leaves 200 bytes behind that nobody frees.",
        op: "gemm",
        caught_by: "invariance:soak",
        unnoticed_by: &[
            "accuracy",
            "golden",
            "invariance:batch",
            "invariance:position",
            "invariance:neighbours",
            "invariance:padding",
            "invariance:layout",
            "invariance:threads",
            "invariance:isa",
            "invariance:repeat",
            "invariance:order",
            "invariance:restart",
        ],
        answer: |mutant, case| {
            let kept = &mut mutant.memory.lock().expect("nothing panics under this lock").kept;
            // Address space of its own: in a process that has run for long, a heap has holes that would take the first of it.
            if kept.is_empty() {
                kept.reserve(64 << 20);
            }
            kept.extend_from_slice(&[1; 200]);
            mutant.honest.run(case)
        },
    },
    Mutation {
        name: "worn_out",
        about: "From the 500th call on a table has wrapped round, and sums start at another place.",
        op: "gemm",
        caught_by: "invariance:soak",
        unnoticed_by: &["accuracy"],
        answer: |mutant, case| {
            let worn = mutant.count() >= 499;
            gemm(case, |_, terms| in_parts(terms, if worn { 3 } else { 1 }))
        },
    },
    Mutation {
        name: "input_changed",
        about: "A call leaves its input scaled where the next one finds it.",
        op: "silu_mul",
        caught_by: "invariance:repeat",
        unnoticed_by: &[],
        answer: |mutant, case| {
            let answer = mutant.honest.run(case);
            if mutant.count() % 2 == 0 {
                return answer;
            }
            let twice = |tensor: &Tensor| {
                let values: Vec<f64> = tensor.to_f64().iter().map(|v| v * 2.0).collect();
                round::tensor(tensor.dtype(), tensor.shape(), &values)
            };
            let outputs = answer.outputs.iter().map(|(name, tensor)| (name.clone(), twice(tensor))).collect();
            Answer { outputs, ..answer }
        },
    },
    Mutation {
        name: "vocabulary_tail_dropped",
        about: "Logits behind the last whole vector of 16 do not enter the sum.",
        op: "logprob",
        caught_by: "accuracy",
        unnoticed_by: &["invariance:threads", "invariance:isa", "invariance:repeat"],
        answer: |mutant, case| {
            let width = case.inputs["logits"].shape()[1];
            let kept = width / 16 * 16;
            if kept == 0 {
                return mutant.honest.run(case);
            }
            mutant.asked(case, |case| {
                let cut = case.inputs["logits"].range(1, 0, kept);
                case.inputs.insert("logits".into(), cut);
                let target = case.inputs["target"].as_i32().expect("the contract has checked it");
                let target = target.iter().map(|&target| target.min(kept as i32 - 1)).collect::<Vec<i32>>();
                case.inputs.insert("target".into(), Tensor::i32(&[target.len()], target));
            })
        },
    },
    Mutation {
        name: "plan_of_the_call_before",
        about: "The plan that was made for the batch of the call before serves this one.",
        op: "gemm",
        caught_by: "invariance:order",
        unnoticed_by: &["accuracy"],
        answer: |mutant, case| {
            let before = {
                let mut memory = mutant.memory.lock().expect("nothing panics under this lock");
                std::mem::replace(&mut memory.calls, case.inputs["x"].shape()[0])
            };
            gemm(case, |_, terms| in_parts(terms, 1 + before % 5))
        },
    },
    Mutation {
        name: "seeded_by_the_process",
        about: "Terms are added in the order of a hash table that every process seeds anew.",
        op: "gemm",
        caught_by: "invariance:restart",
        unnoticed_by: &["accuracy", "invariance:batch", "invariance:threads", "invariance:isa", "invariance:repeat"],
        answer: |mutant, case| {
            gemm(case, |_, terms| {
                let first = mutant.process * 5 % terms.len();
                in_parts(&[&terms[first..], &terms[..first]].concat(), 1)
            })
        },
    },
    Mutation {
        name: "scalar_head_when_unaligned",
        about: "An operand that starts beside a vector's border has its first elements added apart.",
        op: "gemm",
        caught_by: "invariance:layout",
        unnoticed_by: &["accuracy", "invariance:batch", "invariance:threads", "invariance:isa", "invariance:repeat"],
        answer: |_, case| {
            let head = if case.config.layout.is_some() { 3 } else { 0 };
            gemm(case, |_, terms| {
                let (head, body) = terms.split_at(head.min(terms.len()));
                in_parts(body, 1) + in_parts(head, 1)
            })
        },
    },
    Mutation {
        name: "page_order_ignored",
        about: "Keys and values are read from pages in ascending order, whatever the table says.",
        op: "attention",
        caught_by: "invariance:pages",
        unnoticed_by: &["invariance:packing", "invariance:batch", "invariance:threads"],
        answer: |mutant, case| {
            mutant.asked(case, |case| {
                if let Some(table) = case.inputs.get_mut("page_table") {
                    let mut pages = table.as_i32().expect("pages are i32").to_vec();
                    pages.sort_unstable();
                    *table = Tensor::i32(table.shape(), pages);
                }
            })
        },
    },
    Mutation {
        name: "packed_border",
        about: "In a packed batch the keys of every sequence but the first begin one key too early.",
        op: "attention",
        caught_by: "invariance:packing",
        unnoticed_by: &["invariance:pages", "invariance:batch", "invariance:threads"],
        answer: |mutant, case| match case.op.as_str() {
            axis::PACKED => mutant.asked(case, |case| {
                let starts = &case.inputs["k_start"];
                let mut starts_of = starts.as_i32().expect("starts are i32").to_vec();
                let last = starts_of.len() - 1;
                // Later sequences begin one key early, so the border moves and nothing is read outside.
                starts_of[1..last].iter_mut().for_each(|start| *start = (*start - 1).max(0));
                let shape = starts.shape().to_vec();
                case.inputs.insert("k_start".into(), Tensor::i32(&shape, starts_of));
            }),
            _ => mutant.honest.run(case),
        },
    },
    Mutation {
        name: "bf16_accumulation",
        about: "The sum of a matrix product is kept in bf16.",
        op: "gemm",
        caught_by: "accuracy",
        unnoticed_by: AXES,
        answer: |_, case| {
            let bf16 = |sum: f32| bf16::from_f32(sum).to_f32();
            gemm(case, |_, terms| terms.iter().fold(0.0, |sum, term| bf16(sum + term)))
        },
    },
    Mutation {
        name: "tf32_inputs",
        about: "f32 operands of a matrix product are rounded to TF32 although the policy says not to.",
        op: "gemm",
        caught_by: "accuracy",
        unnoticed_by: AXES,
        answer: |mutant, case| mutant.asked(case, |case| drop(case.params.insert("tf32".into(), "enabled".into()))),
    },
    Mutation {
        name: "sequential_sum",
        about: "Every sum runs from left to right: good enough and steady, but not the canonical order.",
        op: "gemm",
        caught_by: "golden",
        unnoticed_by: &[
            "accuracy",
            "invariance:batch",
            "invariance:position",
            "invariance:neighbours",
            "invariance:threads",
            "invariance:isa",
            "invariance:repeat",
        ],
        answer: |_, case| gemm(case, |_, terms| in_parts(terms, 1)),
    },
    Mutation {
        name: "split_by_batch",
        about: "A small batch splits its sums over more workers than a large one.",
        op: "gemm",
        caught_by: "invariance:batch",
        unnoticed_by: &[
            "accuracy",
            "invariance:neighbours",
            "invariance:threads",
            "invariance:isa",
            "invariance:repeat",
        ],
        answer: |_, case| {
            let rows = case.inputs["x"].shape()[0];
            gemm(case, |_, terms| in_parts(terms, (16 / rows).max(1)))
        },
    },
    Mutation {
        name: "other_order_in_last_tile",
        about: "Rows behind the last whole tile of four are summed in an order of their own.",
        op: "gemm",
        caught_by: "invariance:position",
        unnoticed_by: &[
            "accuracy",
            "invariance:neighbours",
            "invariance:threads",
            "invariance:isa",
            "invariance:repeat",
        ],
        answer: |_, case| {
            let tiled = case.inputs["x"].shape()[0] / 4 * 4;
            gemm(case, |row, terms| in_parts(terms, if row < tiled { 1 } else { 3 }))
        },
    },
    Mutation {
        name: "order_by_threads",
        about: "Every thread sums a piece of its own.",
        op: "gemm",
        caught_by: "invariance:threads",
        unnoticed_by: &["accuracy", "invariance:batch", "invariance:position", "invariance:isa", "invariance:repeat"],
        answer: |_, case| {
            let threads = case.config.threads.unwrap_or(1);
            gemm(case, |_, terms| in_parts(terms, threads))
        },
    },
    Mutation {
        name: "order_by_isa",
        about: "A sum has as many lanes as the vectors of the instruction set.",
        op: "gemm",
        caught_by: "invariance:isa",
        unnoticed_by: &[
            "accuracy",
            "invariance:batch",
            "invariance:position",
            "invariance:threads",
            "invariance:repeat",
        ],
        answer: |_, case| {
            let lanes = match case.config.isa.as_deref() {
                Some("scalar") => 1,
                Some("avx2") => 8,
                _ => 16,
            };
            gemm(case, |_, terms| in_lanes(terms, lanes))
        },
    },
    Mutation {
        name: "order_by_arrival",
        about: "Partial sums are added in the order in which they happen to arrive.",
        op: "gemm",
        caught_by: "invariance:repeat",
        unnoticed_by: &["accuracy"],
        answer: |mutant, case| {
            let call = mutant.count();
            gemm(case, |_, terms| {
                let first = call * 5 % terms.len();
                in_parts(&[&terms[first..], &terms[..first]].concat(), 1)
            })
        },
    },
    Mutation {
        name: "tail_dropped",
        about: "The columns behind the last whole vector of 16 are left out of the sum.",
        op: "gemm",
        caught_by: "accuracy",
        unnoticed_by: AXES,
        answer: |_, case| gemm(case, |_, terms| in_parts(&terms[..terms.len() / 16 * 16], 1)),
    },
    Mutation {
        name: "causal_mask_dropped",
        about: "Queries see the keys that come after them.",
        op: "attention",
        caught_by: "accuracy",
        unnoticed_by: &["invariance:threads", "invariance:isa", "invariance:repeat"],
        answer: |mutant, case| mutant.asked(case, |case| drop(case.params.insert("causal".into(), "0".into()))),
    },
    Mutation {
        name: "causal_mask_flipped",
        about: "Queries see themselves and the keys that come after them, and no key before.",
        op: "attention",
        caught_by: "accuracy",
        unnoticed_by: &["invariance:threads", "invariance:isa", "invariance:repeat"],
        answer: |mutant, case| match case.params.get("causal").map(String::as_str) {
            Some("1") => mutant.asked(case, turn_keys_round),
            _ => mutant.honest.run(case),
        },
    },
    Mutation {
        name: "window_off_by_one",
        about: "A sliding window holds one key more than it should.",
        op: "attention",
        caught_by: "accuracy",
        unnoticed_by: &["invariance:threads", "invariance:isa", "invariance:repeat"],
        answer: |mutant, case| {
            mutant.asked(case, |case| {
                if let Some(window) = case.params.get_mut("window") {
                    *window = (window.parse::<usize>().expect("the contract has checked it") + 1).to_string();
                }
            })
        },
    },
    Mutation {
        name: "kv_len_ignored",
        about: "Keys that only fill up the cache count like any other.",
        op: "attention",
        caught_by: "invariance:padding",
        unnoticed_by: &["invariance:threads", "invariance:isa", "invariance:repeat"],
        answer: |mutant, case| {
            mutant.asked(case, |case| {
                let (entries, keys) = (case.inputs["k"].shape()[0], case.inputs["k"].shape()[1]);
                case.inputs.insert("kv_len".into(), Tensor::i32(&[entries], vec![keys as i32; entries]));
            })
        },
    },
    Mutation {
        name: "mean_over_padded_width",
        about: "The mean of the squares divides by the width rounded up to whole vectors of 16.",
        op: "rms_norm",
        caught_by: "accuracy",
        unnoticed_by: AXES,
        answer: |mutant, case| mutant.widened(case, &["x", "w"]),
    },
    Mutation {
        name: "eps_outside_root",
        about: "eps is added to the root instead of under it.",
        op: "rms_norm",
        caught_by: "accuracy",
        unnoticed_by: AXES,
        answer: |_, case| rms_norm_with_eps_outside(case),
    },
    Mutation {
        name: "stale_last_row",
        about: "The last row is never written and shows what the call before left there.",
        op: "rms_norm",
        caught_by: "invariance:batch",
        unnoticed_by: &[],
        answer: |mutant, case| {
            let mut answer = mutant.honest.run(case);
            let before = mutant.remember(&answer);
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
        name: "padded_tail_counted",
        about: "The zeros that fill a row up to whole vectors of 16 count as elements.",
        op: "softmax",
        caught_by: "accuracy",
        unnoticed_by: AXES,
        answer: |mutant, case| mutant.widened(case, &["x"]),
    },
    Mutation {
        name: "neighbour_leak",
        about: "Weights are taken relative to the largest element of the whole batch.",
        op: "softmax",
        caught_by: "invariance:neighbours",
        unnoticed_by: &["invariance:position", "invariance:threads", "invariance:isa", "invariance:repeat"],
        answer: |_, case| softmax_relative_to_batch(case),
    },
    Mutation {
        name: "temperature_twice",
        about: "Logits are divided by the temperature twice.",
        op: "logprob",
        caught_by: "accuracy",
        unnoticed_by: &[
            "golden",
            "invariance:batch",
            "invariance:position",
            "invariance:neighbours",
            "invariance:threads",
            "invariance:isa",
            "invariance:repeat",
        ],
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
        unnoticed_by: AXES,
        answer: |mutant, case| {
            mutant.asked(case, |case| {
                let target = case.inputs["target"].as_i32().expect("the contract has checked it");
                let counted = target.iter().map(|&target| target.max(0)).collect();
                case.inputs.insert("target".into(), Tensor::i32(&[target.len()], counted));
            })
        },
    },
    Mutation {
        name: "nan_swallowed",
        about: "NaN becomes 0.",
        op: "silu_mul",
        caught_by: "accuracy",
        unnoticed_by: AXES,
        answer: |mutant, case| mutant.spoilt(case, |bits, dtype| if round::is_nan(bits, dtype) { 0 } else { bits }),
    },
    Mutation {
        name: "last_rounding_truncates",
        about: "Results are cut off instead of rounded to nearest even.",
        op: "silu_mul",
        caught_by: "accuracy",
        unnoticed_by: AXES,
        answer: |mutant, case| {
            let mut answer = mutant.asked(case, |case| case.out = DType::Fp32);
            if let (Some(y), DType::Bf16) = (answer.outputs.get_mut("y"), case.out) {
                let cut = (0..y.len()).map(|i| bf16::from_bits((y.bits(i) >> 16) as u16)).collect();
                *y = Tensor::bf16(y.shape(), cut);
            } else {
                return mutant.honest.run(case);
            }
            answer
        },
    },
    Mutation {
        name: "positions_in_bf16",
        about: "Positions are kept in bf16, which has no whole numbers between 256 and 258.",
        op: "rope",
        caught_by: "accuracy",
        unnoticed_by: AXES,
        answer: |mutant, case| {
            mutant.asked(case, |case| {
                let pos = case.inputs["pos"].as_i32().expect("the contract has checked it");
                let kept = pos.iter().map(|&pos| bf16::from_f32(pos as f32).to_f32() as i32).collect();
                case.inputs.insert("pos".into(), Tensor::i32(&[pos.len()], kept));
            })
        },
    },
    Mutation {
        name: "minus_zero_lost",
        about: "-0 becomes +0.",
        op: "add",
        caught_by: "accuracy",
        unnoticed_by: AXES,
        answer: |mutant, case| mutant.spoilt(case, |bits, dtype| if bits == sign(dtype) { 0 } else { bits }),
    },
    Mutation {
        name: "nan_payload_kept",
        about: "A NaN keeps a payload instead of becoming the canonical one.",
        op: "add",
        caught_by: "accuracy",
        unnoticed_by: &[],
        answer: |mutant, case| mutant.spoilt(case, |bits, dtype| bits | u32::from(round::is_nan(bits, dtype))),
    },
    Mutation {
        name: "subnormals_flushed",
        about: "Results below the smallest normal number become 0 of the same sign.",
        op: "add",
        caught_by: "accuracy",
        unnoticed_by: AXES,
        answer: |mutant, case| {
            mutant.spoilt(case, |bits, dtype| {
                let normal = round::to_bits(1.0, dtype) - round::to_bits(0.5, dtype);
                if bits & !sign(dtype) < normal { bits & sign(dtype) } else { bits }
            })
        },
    },
    Mutation {
        name: "out_ignored",
        about: "The output is f32 whatever the request says.",
        op: "embedding",
        caught_by: "accuracy",
        unnoticed_by: AXES,
        answer: |mutant, case| mutant.asked(case, |case| case.out = DType::Fp32),
    },
    Mutation {
        name: "previous_answer",
        about: "The output buffer of the call before is returned where its shape fits.",
        op: "embedding",
        caught_by: "invariance:position",
        unnoticed_by: &[],
        answer: |mutant, case| {
            let answer = mutant.honest.run(case);
            let form = |answer: &Answer| answer.outputs.get("y").map(|y| (y.dtype(), y.shape().to_vec()));
            match mutant.remember(&answer) {
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
        unnoticed_by: AXES,
        answer: |mutant, case| {
            let n = case.inputs["x"].shape()[1];
            let mut answer = mutant.asked(case, |case| {
                let backwards: Vec<usize> = (0..n).rev().collect();
                let x = case.inputs["x"].select(1, &backwards);
                case.inputs.insert("x".into(), x);
            });
            if let Some(index) = answer.outputs.get_mut("index") {
                let values = index.as_i32().expect("argmax returns i32");
                *index = Tensor::i32(index.shape(), values.iter().map(|&i| n as i32 - 1 - i).collect());
            }
            answer
        },
    },
    Mutation {
        name: "chunk_forgets",
        about: "A chunk starts with an empty cache at position 0.",
        op: "chain",
        caught_by: "invariance:schedule",
        unnoticed_by: &[
            "accuracy",
            "golden",
            "invariance:grouping",
            "invariance:threads",
            "invariance:isa",
            "invariance:repeat",
        ],
        answer: |mutant, case| mutant.chunk_by_chunk(case),
    },
    Mutation {
        name: "unwritten_key",
        about: "In one layer, a chunk's first key and value are not written: zeros of the page are read.",
        op: "chain",
        caught_by: "invariance:schedule",
        unnoticed_by: &["accuracy", "golden", "invariance:threads", "invariance:isa", "invariance:repeat"],
        answer: |mutant, case| mutant.defective(case, ModelMutation::UnwrittenKey),
    },
    Mutation {
        name: "position_after_chunk",
        about: "After a chunk, positions are one too high.",
        op: "chain",
        caught_by: "invariance:schedule",
        unnoticed_by: &["accuracy", "golden", "invariance:threads", "invariance:isa", "invariance:repeat"],
        answer: |mutant, case| mutant.defective(case, ModelMutation::PositionAfterChunk),
    },
    Mutation {
        name: "window_at_chunk_border",
        about: "At a chunk's border the window stands one position too early.",
        op: "chain",
        caught_by: "invariance:schedule",
        unnoticed_by: &["accuracy", "golden", "invariance:threads", "invariance:isa", "invariance:repeat"],
        answer: |mutant, case| mutant.defective(case, ModelMutation::WindowAtChunkBorder),
    },
    Mutation {
        name: "experts_by_arrival",
        about: "Experts are summed in the order of their numbers where several tokens run together.",
        op: "chain",
        caught_by: "invariance:schedule",
        unnoticed_by: &["accuracy", "invariance:threads", "invariance:isa", "invariance:repeat"],
        answer: |mutant, case| mutant.defective(case, ModelMutation::ExpertsByArrival),
    },
    Mutation {
        name: "shared_cache_entry",
        about: "Sequences that run together share the first entry of the cache, which the first one fills.",
        op: "chain",
        caught_by: "invariance:grouping",
        unnoticed_by: &["invariance:threads", "invariance:isa", "invariance:repeat"],
        answer: |mutant, case| match case.params.get("batch").map(String::as_str) {
            Some("alone") => mutant.honest.run(case),
            _ => mutant.asked(case, |case| {
                let tokens = &case.inputs["tokens"];
                let (first, length) = (tokens.select(1, &[0]), tokens.shape()[1]);
                let rest: Vec<usize> = (1..length).collect();
                let shared = first.select(0, &vec![0; tokens.shape()[0]]).append(1, &tokens.select(1, &rest));
                case.inputs.insert("tokens".into(), shared);
            }),
        },
    },
];

/// The bit of the sign.
fn sign(dtype: DType) -> u32 {
    1 << (8 * dtype.size() - 1)
}

/// `ours/cpu` with one [`Mutation`].
pub struct Mutant {
    name: String,
    mutation: &'static Mutation,
    honest: CpuImplementation,
    memory: Mutex<Memory>,
    /// Stands for what differs between two processes.
    process: usize,
    checkpoints: Arc<Checkpoints>,
    /// The models with a mutation of their own, once one was asked.
    defective: OnceLock<CpuImplementation>,
}

/// What a faulty implementation wrongly keeps between calls.
#[derive(Default)]
struct Memory {
    calls: usize,
    answer: Option<Answer>,
    kept: Vec<u8>,
}

impl Mutant {
    /// The implementation that has `fault`, on the best instruction set and one thread.
    pub fn new(mutation: &'static Mutation, checkpoints: Arc<Checkpoints>) -> Mutant {
        let cpu = Cpu::new(Isa::best(), 1, usize::MAX).expect("the best instruction set is there");
        let honest = CpuImplementation::new(cpu).with_checkpoints(checkpoints.clone());
        let name = format!("mutant/{}", mutation.name);
        let (memory, defective) = (Mutex::default(), OnceLock::new());
        Mutant { name, mutation, honest, memory, process: 0, checkpoints, defective }
    }

    /// The same as another process would be: number `process`.
    pub fn in_process(self, process: usize) -> Mutant {
        Mutant { process, ..self }
    }

    /// With `when` of the number of queries: two answers over half of the keys each, merged by their log-sum-exp in f32.
    fn merged(&self, case: &Case, when: fn(usize) -> bool) -> Answer {
        let window = case.params.get("window").is_some_and(|window| window != "0");
        if case.op != "attention" || window || !when(case.inputs["q"].shape()[1]) {
            return self.honest.run(case);
        }
        let (keys, queries) = (case.inputs["k"].shape()[1], case.inputs["q"].shape()[1]);
        let ints = |name: &str| case.inputs[name].as_i32().expect("the contract has checked it").to_vec();
        let (kv_len, q_pos) = (ints("kv_len"), ints("q_pos"));
        let causal = case.params.get("causal").is_some_and(|causal| causal == "1");
        let half = keys / 2;
        // Every query must see keys of both halves, or there is nothing to merge.
        let reaches = |b: usize| !causal || q_pos[b * queries..][..queries].iter().all(|&p| p >= half as i32);
        if half == 0 || !(0..kv_len.len()).all(|b| kv_len[b] > half as i32 && reaches(b)) {
            return self.honest.run(case);
        }
        let part = |from: usize, to: usize| {
            self.asked(case, |case| {
                case.out = DType::Fp32;
                for name in ["k", "v"] {
                    let cut = case.inputs[name].range(1, from, to);
                    case.inputs.insert(name.into(), cut);
                }
                let len = kv_len.iter().map(|&len| (len - from as i32).min((to - from) as i32)).collect();
                case.inputs.insert("kv_len".into(), Tensor::i32(&[kv_len.len()], len));
                let moved = q_pos.iter().map(|&p| (p - from as i32).max(0)).collect();
                case.inputs.insert("q_pos".into(), Tensor::i32(&[kv_len.len(), queries], moved));
            })
        };
        let (a, b) = (part(0, half), part(half, keys));
        if a.status != Status::Ok || b.status != Status::Ok {
            return self.honest.run(case);
        }
        let f32s = |answer: &Answer, name: &str| -> Vec<f32> {
            answer.outputs[name].to_f64().iter().map(|&v| v as f32).collect()
        };
        let (out_a, out_b, lse_a, lse_b) = (f32s(&a, "out"), f32s(&b, "out"), f32s(&a, "lse"), f32s(&b, "lse"));
        let width = out_a.len() / lse_a.len();
        let (mut out, mut lse) = (Vec::new(), Vec::new());
        for row in 0..lse_a.len() {
            let top = lse_a[row].max(lse_b[row]);
            let (wa, wb) = ((lse_a[row] - top).exp(), (lse_b[row] - top).exp());
            lse.push(f64::from(top + (wa + wb).ln()));
            let merge = |i: usize| f64::from((out_a[row * width + i] * wa + out_b[row * width + i] * wb) / (wa + wb));
            out.extend((0..width).map(merge));
        }
        let outputs = BTreeMap::from([
            ("out".to_string(), round::tensor(case.out, a.outputs["out"].shape(), &out)),
            ("lse".to_string(), round::tensor(DType::Fp32, a.outputs["lse"].shape(), &lse)),
        ]);
        Answer::ok("mutant", outputs)
    }

    /// The answer of a model whose forward is wrong.
    fn defective(&self, case: &Case, mutation: ModelMutation) -> Answer {
        let made = self.defective.get_or_init(|| {
            let cpu = Cpu::new(Isa::best(), 1, usize::MAX).expect("the best instruction set is there");
            let make =
                move |config: &Config| -> Box<dyn Probe> { Box::new(ModelMutant::new(mutation, config, Tripwire)) };
            CpuImplementation::new(cpu).with_checkpoints(Arc::new(self.checkpoints.with_probe(Box::new(make))))
        });
        made.run(case)
    }

    /// The honest answer to a question that `change` has spoilt.
    fn asked(&self, case: &Case, change: impl FnOnce(&mut Case)) -> Answer {
        let mut case = case.clone();
        change(&mut case);
        self.honest.run(&case)
    }

    /// The honest answer with every float element replaced by bits that `change` makes of its bits.
    fn spoilt(&self, case: &Case, change: fn(u32, DType) -> u32) -> Answer {
        let mut answer = self.honest.run(case);
        for tensor in answer.outputs.values_mut().filter(|tensor| tensor.dtype() != DType::I32) {
            let dtype = tensor.dtype();
            let element = |i: usize| change(tensor.bits(i), dtype).to_le_bytes().into_iter().take(dtype.size());
            let bytes: Vec<u8> = (0..tensor.len()).flat_map(element).collect();
            *tensor = Tensor::from_bytes(dtype, tensor.shape(), &bytes).expect("the same number of elements");
        }
        answer
    }

    /// The honest answer for inputs whose last axis zeros fill up to a multiple of 16; the columns of the filling are
    /// cut off again.
    fn widened(&self, case: &Case, inputs: &[&str]) -> Answer {
        let width = *case.inputs["x"].shape().last().expect("the contract has checked it");
        let mut answer = self.asked(case, |case| {
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

    /// Every chunk of a chain's schedule as a sequence of its own.
    fn chunk_by_chunk(&self, case: &Case) -> Answer {
        let chunk = match case.params.get("schedule").map_or("prefill", String::as_str) {
            "decode" => 1,
            schedule => match schedule.strip_prefix("chunk:") {
                Some(chunk) => chunk.parse().expect("the contract has checked it"),
                None => return self.honest.run(case),
            },
        };
        let positions: Vec<usize> = (0..case.inputs["tokens"].shape()[1]).collect();
        let mut whole: Option<Answer> = None;
        for part in positions.chunks(chunk) {
            let answer = self.asked(case, |case| {
                let tokens = case.inputs["tokens"].select(1, part);
                case.inputs.insert("tokens".into(), tokens);
                case.params.remove("schedule");
            });
            if answer.status != Status::Ok {
                return answer;
            }
            whole = Some(match whole {
                None => answer,
                Some(mut before) => {
                    let logits = before.outputs["logits"].append(1, &answer.outputs["logits"]);
                    before.outputs.insert("logits".into(), logits);
                    before
                }
            });
        }
        whole.expect("a chain has a token")
    }

    /// The number of calls before this one.
    fn count(&self) -> usize {
        let mut memory = self.memory.lock().expect("nothing panics under this lock");
        memory.calls += 1;
        memory.calls - 1
    }

    /// Keeps `answer` and returns the one kept before.
    fn remember(&self, answer: &Answer) -> Option<Answer> {
        self.memory.lock().expect("nothing panics under this lock").answer.replace(answer.clone())
    }
}

impl Implementation for Mutant {
    fn name(&self) -> &str {
        &self.name
    }

    fn version(&self) -> &str {
        env!("CARGO_PKG_VERSION")
    }

    fn run(&self, case: &Case) -> Answer {
        // Forms of an op that only an axis asks for belong to the mutants that this axis catches.
        let asked_by_axis = [axis::PAGED, axis::PACKED].contains(&case.op.as_str())
            && ["invariance:pages", "invariance:packing", "invariance:prefix"].contains(&self.mutation.caught_by);
        let mutated = case.op == self.mutation.op || asked_by_axis;
        let answer = if mutated { (self.mutation.answer)(self, case) } else { self.honest.run(case) };
        Answer { layout: case.config.layout.clone().unwrap_or_default(), ..answer }
    }

    fn fresh(&self, case: &Case) -> Option<Answer> {
        Some(Mutant::new(self.mutation, self.checkpoints.clone()).in_process(self.process + 1).run(case))
    }

    fn soak(&self, case: &Case, each: &mut Soaked) -> bool {
        let anew = Mutant::new(self.mutation, self.checkpoints.clone());
        while each(anew.run(case), &held_here) {}
        true
    }
}

/// A matrix product whose every element is `sum` of (its row, the f32 products), then the bias.
fn gemm(case: &Case, sum: impl Fn(usize, &[f32]) -> f32) -> Answer {
    let (x, w) = (&case.inputs["x"], &case.inputs["w"]);
    let (m, n, k) = (x.shape()[0], w.shape()[0], x.shape()[1]);
    let tf32 = case.params.get("tf32").is_some_and(|v| v == "enabled") && x.dtype() == DType::Fp32;
    let operand = |tensor: &Tensor| -> Vec<f32> {
        let values = (0..tensor.len()).map(|i| tensor.value(i) as f32);
        if tf32 { values.map(round::tf32).collect() } else { values.collect() }
    };
    let (x, w) = (operand(x), operand(w));
    let partial = case.params.contains_key("k_total");
    let bias = case.inputs.get("bias").filter(|_| !partial);
    let mut y = Vec::with_capacity(m * n);
    for row in 0..m {
        for column in 0..n {
            let pairs = x[row * k..][..k].iter().zip(&w[column * k..][..k]);
            let terms: Vec<f32> = pairs.map(|(a, b)| a * b).collect();
            let product = sum(row, &terms);
            y.push(f64::from(bias.map_or(product, |bias| product + bias.value(column) as f32)));
        }
    }
    answer("y", round::tensor(case.out, &[m, n], &y))
}

/// `terms` in `parts` contiguous pieces, each from left to right, then the pieces.
fn in_parts(terms: &[f32], parts: usize) -> f32 {
    let size = terms.len().div_ceil(parts).max(1);
    terms.chunks(size).map(|part| part.iter().fold(0.0, |sum, term| sum + term)).fold(0.0, |sum, part| sum + part)
}

/// Term i goes to lane i mod `lanes`; then the lanes from left to right.
fn in_lanes(terms: &[f32], lanes: usize) -> f32 {
    let mut sums = vec![0.0; lanes];
    for (i, term) in terms.iter().enumerate() {
        sums[i % lanes] += term;
    }
    sums.into_iter().fold(0.0, |sum, lane| sum + lane)
}

fn rms_norm_with_eps_outside(case: &Case) -> Answer {
    rms_norm_in_f64(case, |sum, n, eps| (sum / n).sqrt() + eps)
}

/// With `root` of the sum of the squares, their number and eps in place of the root of the mean.
fn rms_norm_in_f64(case: &Case, root: fn(f64, f64, f64) -> f64) -> Answer {
    let (x, w) = (case.inputs["x"].to_f64(), case.inputs["w"].to_f64());
    let n = w.len();
    let param = |name: &str| case.params.get(name).map(String::as_str);
    let eps: f64 = param("eps").map_or(1e-6, |eps| eps.parse().expect("the contract has checked it"));
    let offset = if param("weight_offset") == Some("1") { 1.0 } else { 0.0 };
    let mut y = Vec::with_capacity(x.len());
    for row in x.chunks(n) {
        let root = root(row.iter().map(|v| v * v).sum::<f64>(), n as f64, eps);
        for (v, weight) in row.iter().zip(&w) {
            let normed = v / root;
            let normed = if param("rounding") == Some("hf") { round::round(normed, DType::Bf16) } else { normed };
            y.push(normed * (weight + offset));
        }
    }
    answer("y", round::tensor(case.out, case.inputs["x"].shape(), &y))
}

fn softmax_relative_to_batch(case: &Case) -> Answer {
    let x = &case.inputs["x"];
    let values: Vec<f32> = (0..x.len()).map(|i| x.value(i) as f32).collect();
    let top = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut y = Vec::with_capacity(x.len());
    for row in values.chunks(x.shape()[1]) {
        let weights: Vec<f32> = row.iter().map(|v| (v - top).exp()).collect();
        let total: f32 = weights.iter().sum();
        y.extend(weights.iter().map(|weight| f64::from(weight / total)));
    }
    answer("y", round::tensor(case.out, x.shape(), &y))
}

/// Reverses the keys that count, and the positions with them, so that `j <= position` becomes `j >= position`.
fn turn_keys_round(case: &mut Case) {
    let ints = |name: &str| case.inputs[name].as_i32().expect("the contract has checked it").to_vec();
    let (kv_len, mut q_pos) = (ints("kv_len"), ints("q_pos"));
    let (keys, queries) = (case.inputs["k"].shape()[1], q_pos.len() / kv_len.len());
    for (positions, len) in q_pos.chunks_mut(queries).zip(&kv_len) {
        positions.iter_mut().for_each(|position| *position = (len - 1 - *position).max(0));
    }
    for name in ["k", "v"] {
        let turned = kv_len.iter().enumerate().map(|(entry, &len)| {
            let len = len as usize;
            let order: Vec<usize> = (0..len).rev().chain(len..keys).collect();
            case.inputs[name].select(0, &[entry]).select(1, &order)
        });
        let turned = turned.reduce(|before, entry| before.append(0, &entry)).expect("a batch has an entry");
        case.inputs.insert(name.into(), turned);
    }
    let shape = [kv_len.len(), queries];
    case.inputs.insert("q_pos".into(), Tensor::i32(&shape, q_pos));
}

fn answer(name: &str, tensor: Tensor) -> Answer {
    Answer::ok("mutant", BTreeMap::from([(name.to_string(), tensor)]))
}
