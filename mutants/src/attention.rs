//! Mutations of `attention`. But for those of pages and of packing, they are in every form of the op.

use crate::mutation::{Mutant, Mutation, Others};
use samebits_contract::axis::{PACKED, PAGED};
use samebits_contract::case::{Answer, Case, Status};
use samebits_contract::round;
use samebits_contract::tensor::{DType, Tensor};
use samebits_harness::implementation::Implementation;
use std::collections::BTreeMap;

fn ints(case: &Case, name: &str) -> Vec<i32> {
    case.inputs[name].as_i32().expect("the contract has checked it").to_vec()
}

fn number(case: &Case, name: &str) -> usize {
    case.params.get(name).map_or(0, |v| v.parse().expect("the contract has checked it"))
}

/// `answer` to the same question with its keys in rows: what pages and packed sequences mean.
pub fn in_every_form(case: &Case, answer: impl Fn(&Case) -> Answer) -> Answer {
    match case.op.as_str() {
        PAGED => answer(&without_pages(case)),
        PACKED => {
            let (queries, keys) = (ints(case, "q_start"), ints(case, "k_start"));
            let mut whole: Option<Answer> = None;
            for (q, k) in queries.windows(2).zip(keys.windows(2)).filter(|(q, _)| q[0] < q[1]) {
                let mut part = answer(&sequence(case, [q[0] as usize, q[1] as usize], [k[0] as usize, k[1] as usize]));
                if part.status != Status::Ok {
                    return part;
                }
                for (name, tensor) in &mut part.outputs {
                    let shape = tensor.shape()[1..].to_vec();
                    let rows: Vec<Option<usize>> = (0..shape[0]).map(Some).collect();
                    let flat = tensor.gather(shape[1..].iter().product(), &rows, &shape);
                    *tensor = match &whole {
                        None => flat,
                        Some(before) => before.outputs[name].append(0, &flat),
                    };
                }
                whole = Some(part);
            }
            whole.expect("a packed batch has a query")
        }
        _ => answer(case),
    }
}

/// The keys of every sequence in a row, whole pages of them.
fn without_pages(case: &Case) -> Case {
    let mut plain = case.clone();
    plain.op = "attention".into();
    let table = plain.inputs.remove("page_table").expect("the contract has checked it");
    let (batch, columns, size) = (table.shape()[0], table.shape()[1], case.inputs["k"].shape()[1]);
    let pages = table.as_i32().expect("pages are i32");
    let row = |page: i32, i: usize| usize::try_from(page).ok().map(|page| page * size + i);
    let rows: Vec<Option<usize>> = pages.iter().flat_map(|&page| (0..size).map(move |i| row(page, i))).collect();
    for name in ["k", "v"] {
        let tensor = &case.inputs[name];
        let tail = &tensor.shape()[2..];
        let shape = [&[batch, columns * size], tail].concat();
        plain.inputs.insert(name.into(), tensor.gather(tail.iter().product(), &rows, &shape));
    }
    plain
}

/// One sequence of a packed batch: rows `q` of the queries and `k` of the keys.
fn sequence(case: &Case, q: [usize; 2], k: [usize; 2]) -> Case {
    let mut plain = case.clone();
    plain.op = "attention".into();
    for name in ["q_start", "k_start"] {
        plain.inputs.remove(name);
    }
    // One without keys still has a row for them.
    let count = (k[1] - k[0]).max(1);
    let first = k[0].min(case.inputs["k"].shape()[0] - count);
    for (name, from, to) in
        [("q", q[0], q[1]), ("q_pos", q[0], q[1]), ("k", first, first + count), ("v", first, first + count)]
    {
        plain.inputs.insert(name.into(), case.inputs[name].range(0, from, to).with_leading_axis());
    }
    plain.inputs.insert("kv_len".into(), Tensor::i32(&[1], vec![(k[1] - k[0]) as i32]));
    plain
}

/// With `when` of the number of queries: two answers over half of the keys each, merged by their log-sum-exp in f32.
fn merged(mutant: &Mutant, case: &Case, when: fn(usize) -> bool) -> Answer {
    if number(case, "window") > 0 || number(case, "chunk") > 0 || !when(case.inputs["q"].shape()[1]) {
        return mutant.honest.run(case);
    }
    let (keys, queries) = (case.inputs["k"].shape()[1], case.inputs["q"].shape()[1]);
    let (kv_len, q_pos) = (ints(case, "kv_len"), ints(case, "q_pos"));
    let half = keys / 2;
    // Every query must see keys of both halves, or there is nothing to merge.
    let causal = number(case, "causal") == 1;
    let reaches = |b: usize| !causal || q_pos[b * queries..][..queries].iter().all(|&p| p >= half as i32);
    if half == 0 || !(0..kv_len.len()).all(|b| kv_len[b] > half as i32 && reaches(b)) {
        return mutant.honest.run(case);
    }
    let part = |from: usize, to: usize| {
        mutant.asked(case, |case| {
            case.out = DType::Fp32;
            for name in ["k", "v"] {
                let cut = case.inputs[name].range(1, from, to);
                case.inputs.insert(name.into(), cut);
            }
            // A sink is one term of the whole.
            if from > 0 {
                case.inputs.remove("sinks");
            }
            let len = kv_len.iter().map(|&len| (len - from as i32).min((to - from) as i32)).collect();
            case.inputs.insert("kv_len".into(), Tensor::i32(&[kv_len.len()], len));
            let moved = q_pos.iter().map(|&p| (p - from as i32).max(0)).collect();
            case.inputs.insert("q_pos".into(), Tensor::i32(&[kv_len.len(), queries], moved));
        })
    };
    let (a, b) = (part(0, half), part(half, keys));
    if a.status != Status::Ok || b.status != Status::Ok {
        return mutant.honest.run(case);
    }
    let f32s = |answer: &Answer, name: &str| crate::plain::values(&answer.outputs[name]);
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

/// The honest answer to a question about pages whose table `change` has spoilt; what has no pages is right.
fn with_pages(mutant: &Mutant, case: &Case, change: fn(usize, &mut [i32])) -> Answer {
    mutant.asked(case, |case| {
        if let Some(table) = case.inputs.get_mut("page_table") {
            let mut pages = table.as_i32().expect("pages are i32").to_vec();
            change(table.shape()[1], &mut pages);
            *table = Tensor::i32(table.shape(), pages);
        }
    })
}

/// The answer to each query by itself, whose chunk begins with the first query of its sequence or a whole number of chunks behind it.
fn chunks_of_requests(mutant: &Mutant, case: &Case) -> Answer {
    let (chunk, q_pos) = (number(case, "chunk") as i32, ints(case, "q_pos"));
    if chunk == 0 || q_pos.is_empty() {
        return mutant.honest.run(case);
    }
    let (batch, queries) = (case.inputs["q_pos"].shape()[0], case.inputs["q_pos"].shape()[1]);
    let mut whole: Option<Answer> = None;
    for b in 0..batch {
        let mut sequence: Option<Answer> = None;
        for t in 0..queries {
            let position = q_pos[b * queries + t];
            let behind = (position - q_pos[b * queries]).rem_euclid(chunk) as usize + 1;
            let of_row = mutant.asked(case, |case| {
                for name in ["q", "k", "v", "q_pos", "kv_len"] {
                    let mut part = case.inputs[name].select(0, &[b]);
                    if name.starts_with('q') {
                        part = part.select(1, &[t]);
                    }
                    case.inputs.insert(name.into(), part);
                }
                let window = match number(case, "window") {
                    0 => behind,
                    window => window.min(behind),
                };
                case.params.remove("chunk");
                case.params.insert("window".into(), window.to_string());
            });
            if of_row.status != Status::Ok {
                return of_row;
            }
            sequence = Some(joined(1, sequence, of_row));
        }
        whole = Some(joined(0, whole, sequence.expect("there is a query")));
    }
    whole.expect("there is a sequence")
}

/// The outputs of two answers, one behind the other along an axis.
fn joined(axis: usize, before: Option<Answer>, mut after: Answer) -> Answer {
    if let Some(before) = before {
        for (name, tensor) in &mut after.outputs {
            *tensor = before.outputs[name].append(axis, tensor);
        }
    }
    after
}

/// Reverses the keys that count, and the positions with them, so that `j <= position` becomes `j >= position`.
fn turn_keys_round(case: &mut Case) {
    let (kv_len, mut q_pos) = (ints(case, "kv_len"), ints(case, "q_pos"));
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

pub const MUTATIONS: &[Mutation] = &[
    Mutation {
        name: "heads_of_an_indexer_backwards",
        about: "The heads of an indexer are added from the last to the first.",
        op: "index_score",
        caught_by: "arithmetic",
        also_red: Others::Are(&["golden"]),
        answer: |mutant, case| mutant.asked_backwards(case, &["q", "weight"]),
    },
    Mutation {
        name: "heads_below_zero_count",
        about: "What a head of an indexer has below 0 counts as well.",
        op: "index_score",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden"]),
        answer: |mutant, case| {
            let mut answer = mutant.honest.run(case);
            // What is below 0 is above it for the other sign.
            let below = mutant.asked(case, |case| {
                let scale: f64 = case.params.get("scale").map_or(1.0, |scale| scale.parse().expect("it is checked"));
                case.params.insert("scale".into(), (-scale).to_string());
            });
            for (name, score) in &mut answer.outputs {
                let values = score.to_f64().into_iter().zip(below.outputs[name].to_f64());
                let values: Vec<f32> = values.map(|(above, below)| (above - below) as f32).collect();
                *score = Tensor::fp32(score.shape(), values);
            }
            answer
        },
    },
    Mutation {
        name: "tile_from_10_queries",
        about: "From ten queries on, keys are cut in two and the halves are merged by their log-sum-exp.",
        op: "attention",
        caught_by: "invariance:batch",
        also_red: Others::Are(&["invariance:padding"]),
        answer: |mutant, case| in_every_form(case, |case| merged(mutant, case, |queries| queries >= 10)),
    },
    Mutation {
        name: "sink_left_out_of_the_sum",
        about: "Weights are divided by the sum over keys alone, as if there were no sink.",
        op: "attention",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden"]),
        answer: |mutant, case| mutant.asked(case, |case| drop(case.inputs.remove("sinks"))),
    },
    Mutation {
        name: "decode_splits_keys",
        about: "A single query is answered by a kernel that cuts the keys in two and merges the halves.",
        op: "attention",
        caught_by: "invariance:schedule",
        also_red: Others::Are(&["arithmetic", "invariance:batch"]),
        answer: |mutant, case| in_every_form(case, |case| merged(mutant, case, |queries| queries == 1)),
    },
    Mutation {
        name: "stale_page",
        about: "The last page of every sequence is the one that stood there before: the one in front of it.",
        op: "attention",
        caught_by: "invariance:pages",
        also_red: Others::Are(&["invariance:prefix"]),
        answer: |mutant, case| {
            with_pages(mutant, case, |columns, pages| {
                if columns > 1 {
                    pages.chunks_mut(columns).for_each(|row| row[columns - 1] = row[columns - 2]);
                }
            })
        },
    },
    Mutation {
        name: "shared_page_taken",
        about: "A page that a second sequence shares was given away: the second one reads page 0.",
        op: "attention",
        caught_by: "invariance:prefix",
        also_red: Others::Are(&[]),
        answer: |mutant, case| {
            with_pages(mutant, case, |_, pages| {
                let mut seen = Vec::new();
                for page in pages {
                    if seen.contains(page) {
                        *page = 0;
                    } else {
                        seen.push(*page);
                    }
                }
            })
        },
    },
    Mutation {
        name: "page_order_ignored",
        about: "Keys and values are read from pages in ascending order, whatever the table says.",
        op: "attention",
        caught_by: "invariance:pages",
        also_red: Others::Are(&["invariance:prefix"]),
        answer: |mutant, case| with_pages(mutant, case, |_, pages| pages.sort_unstable()),
    },
    Mutation {
        name: "packed_border",
        about: "In a packed batch the border between the keys of two sequences stands one key too early.",
        op: "attention",
        caught_by: "invariance:packing",
        also_red: Others::Are(&[]),
        answer: |mutant, case| {
            mutant.asked(case, |case| {
                if let Some(starts) = case.inputs.get_mut("k_start") {
                    let mut moved = starts.as_i32().expect("starts are i32").to_vec();
                    let last = moved.len() - 1;
                    moved[1..last].iter_mut().for_each(|start| *start = (*start - 1).max(0));
                    *starts = Tensor::i32(starts.shape(), moved);
                }
            })
        },
    },
    Mutation {
        name: "heads_interleaved",
        about: "Query head h reads key head h mod Hkv instead of h / (Hq / Hkv).",
        op: "attention",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden", "invariance:ranks"]),
        answer: |mutant, case| {
            in_every_form(case, |case| {
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
            })
        },
    },
    Mutation {
        name: "keys_beyond_2048",
        about: "Keys behind the 2048th, which is what the table of a kernel holds, are not seen.",
        op: "attention",
        caught_by: "accuracy",
        also_red: Others::Are(&[]),
        answer: |mutant, case| {
            in_every_form(case, |case| {
                mutant.asked(case, |case| {
                    let cut = ints(case, "kv_len").into_iter().map(|len| len.min(2048)).collect::<Vec<_>>();
                    case.inputs.insert("kv_len".into(), Tensor::i32(&[cut.len()], cut));
                })
            })
        },
    },
    Mutation {
        name: "causal_mask_dropped",
        about: "Queries see the keys that come after them.",
        op: "attention",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden", "invariance:schedule"]),
        answer: |mutant, case| mutant.asked(case, |case| drop(case.params.insert("causal".into(), "0".into()))),
    },
    Mutation {
        name: "causal_mask_flipped",
        about: "Where a mask is causal, queries see themselves and the keys that come after them, and no key before.",
        op: "attention",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden", "invariance:schedule"]),
        answer: |mutant, case| {
            in_every_form(case, |case| match number(case, "causal") {
                1 => mutant.asked(case, turn_keys_round),
                _ => mutant.honest.run(case),
            })
        },
    },
    Mutation {
        name: "window_off_by_one",
        about: "A sliding window holds one key more than it should.",
        op: "attention",
        caught_by: "accuracy",
        also_red: Others::Are(&[]),
        answer: |mutant, case| match number(case, "window") {
            0 => mutant.honest.run(case),
            window => mutant.asked(case, |case| drop(case.params.insert("window".into(), (window + 1).to_string()))),
        },
    },
    Mutation {
        name: "chunk_from_the_first_query",
        about: "Chunks are counted from the first query of a request, not from the first key of its sequence.",
        op: "attention",
        caught_by: "invariance:schedule",
        also_red: Others::Are(&[]),
        answer: |mutant, case| in_every_form(case, |case| chunks_of_requests(mutant, case)),
    },
    Mutation {
        name: "kv_len_ignored",
        about: "Keys that only fill up the cache count like any other.",
        op: "attention",
        caught_by: "invariance:padding",
        also_red: Others::Are(&["accuracy", "golden", "invariance:pages", "invariance:packing"]),
        answer: |mutant, case| {
            in_every_form(case, |case| {
                mutant.asked(case, |case| {
                    let (entries, keys) = (case.inputs["k"].shape()[0], case.inputs["k"].shape()[1]);
                    case.inputs.insert("kv_len".into(), Tensor::i32(&[entries], vec![keys as i32; entries]));
                })
            })
        },
    },
];
