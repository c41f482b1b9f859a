//! Mutations of the gradients of whole models.

use crate::models::ModelMutation;
use crate::mutation::{Mutant, Mutation, Others};
use samebits_contract::case::{Answer, Case, Status};
use samebits_contract::round;
use samebits_contract::tensor::{DType, Tensor};
use samebits_harness::implementation::Implementation;
use std::ops::Range;

/// A count among the parameters of a case, 1 where it has none.
fn count(case: &Case, name: &str) -> usize {
    case.params.get(name).map_or(1, |text| text.parse().expect("the contract has checked it"))
}

/// Rows of padding on one side.
fn padding(case: &Case, side: &str) -> usize {
    let rows = case.params.get("pad").and_then(|pad| pad.strip_prefix(side)?.strip_prefix(':'));
    rows.map_or(0, |rows| rows.parse().expect("the contract has checked it"))
}

fn sequences(case: &Case) -> usize {
    case.inputs["tokens"].shape()[0]
}

fn f32s(tensor: &Tensor) -> Vec<f32> {
    tensor.to_f64().into_iter().map(|v| v as f32).collect()
}

/// What some sequences would have as a batch of their own.
struct Part {
    gradients: Vec<f32>,
    loss: f32,
    /// The tokens of all sequences that count are so many times theirs.
    share: f32,
}

impl Part {
    fn scaled(&self) -> Vec<f32> {
        self.gradients.iter().map(|g| g * self.share).collect()
    }
}

/// Sequences as a batch of their own; those without a token that counts have nothing.
fn parts(mutant: &Mutant, case: &Case, ranges: impl Iterator<Item = Range<usize>>) -> Result<Vec<Part>, Box<Answer>> {
    let counted = |case: &Case| f32s(&case.inputs["count"]).iter().filter(|&&c| c != 0.0).count();
    let mut parts = Vec::new();
    for range in ranges.filter(|range| !range.is_empty()) {
        let mut part = case.clone();
        for tensor in part.inputs.values_mut() {
            *tensor = tensor.range(0, range.start, range.end);
        }
        for name in ["groups", "ranks"] {
            part.params.remove(name);
        }
        if counted(&part) == 0 {
            continue;
        }
        let answer = mutant.honest.run(&part);
        if answer.status != Status::Ok {
            return Err(Box::new(answer));
        }
        let share = counted(&part) as f32 / counted(case) as f32;
        parts.push(Part {
            gradients: f32s(&answer.outputs["gradients"]),
            loss: f32s(&answer.outputs["loss"])[0],
            share,
        });
    }
    Ok(parts)
}

/// The sequences of each micro-batch, as if there were one group.
fn micro_batches(case: &Case) -> impl Iterator<Item = Range<usize>> {
    let (all, size) = (sequences(case), count(case, "micro_batch"));
    (0..all).step_by(size).map(move |first| first..all.min(first + size))
}

/// The honest answer with other gradients, where `make` has some.
fn with_gradients(mutant: &Mutant, case: &Case, make: impl FnOnce() -> Result<Vec<f32>, Box<Answer>>) -> Answer {
    let mut answer = mutant.honest.run(case);
    if answer.status == Status::Ok {
        match make() {
            Ok(gradients) => {
                answer.outputs.insert("gradients".into(), Tensor::fp32(&[gradients.len()], gradients));
            }
            Err(refused) => return *refused,
        }
    }
    answer
}

fn add(sum: Vec<f32>, more: Vec<f32>) -> Vec<f32> {
    sum.iter().zip(more).map(|(a, b)| a + b).collect()
}

/// The sum of micro-batches, through `keep` behind each.
fn accumulated(mutant: &Mutant, case: &Case, keep: fn(f32) -> f32) -> Answer {
    with_gradients(mutant, case, || {
        let parts = parts(mutant, case, micro_batches(case))?;
        let sums = parts.iter().map(Part::scaled).map(|sum| sum.into_iter().map(keep).collect());
        let kept = |sum, more| add(sum, more).into_iter().map(keep).collect::<Vec<f32>>();
        Ok(sums.reduce(kept).expect("a token counts"))
    })
}

fn bf16(value: f32) -> f32 {
    round::round(f64::from(value), DType::Bf16) as f32
}

/// What else sees another sum of micro-batches: some settings of every axis have several.
const ALL_BUT_MICRO_BATCH: &[&str] =
    &["accuracy", "golden", "invariance:groups", "invariance:packing", "invariance:padding", "invariance:recompute"];

pub const MUTATIONS: &[Mutation] = &[
    Mutation {
        name: "denominator_of_the_micro_batch",
        about: "The loss of a micro-batch is the mean over its own tokens, and that of the batch the mean of these.",
        op: "chain_backward",
        caught_by: "invariance:micro_batch",
        also_red: Others::Are(ALL_BUT_MICRO_BATCH),
        answer: |mutant, case| {
            let mut loss = 0.0;
            let mut answer = with_gradients(mutant, case, || {
                let parts = parts(mutant, case, micro_batches(case))?;
                let number = parts.len() as f32;
                loss = parts.iter().map(|part| part.loss).sum::<f32>() / number;
                let sum = parts.into_iter().map(|part| part.gradients).reduce(add).expect("a token counts");
                Ok(sum.into_iter().map(|sum| sum / number).collect())
            });
            if answer.status == Status::Ok {
                answer.outputs.insert("loss".into(), Tensor::fp32(&[1], vec![loss]));
            }
            answer
        },
    },
    Mutation {
        name: "chains_restart_at_micro_batches",
        about: "Sums over tokens do not go on from the micro-batch before: each has its own, added as a tree.",
        op: "chain_backward",
        caught_by: "invariance:micro_batch",
        also_red: Others::Are(&["golden", "invariance:packing", "invariance:padding", "invariance:recompute"]),
        answer: |mutant, case| {
            if count(case, "groups") > 1 {
                return mutant.honest.run(case);
            }
            mutant.asked(case, |case| {
                let micro_batches = sequences(case).div_ceil(count(case, "micro_batch"));
                case.params.insert("groups".into(), micro_batches.next_power_of_two().to_string());
            })
        },
    },
    Mutation {
        name: "gradients_in_bf16_between_micro_batches",
        about: "Between two micro-batches the sum of gradients is kept in bf16.",
        op: "chain_backward",
        caught_by: "invariance:micro_batch",
        also_red: Others::Are(ALL_BUT_MICRO_BATCH),
        answer: |mutant, case| accumulated(mutant, case, bf16),
    },
    Mutation {
        name: "groups_by_arrival",
        about: "A rank adds its groups one after the other, and ranks are added as they come: the last one first.",
        op: "chain_backward",
        caught_by: "invariance:groups",
        also_red: Others::Are(&["golden"]),
        answer: |mutant, case| {
            let (all, groups, ranks) = (sequences(case), count(case, "groups"), count(case, "ranks"));
            if groups == 1 {
                return mutant.honest.run(case);
            }
            with_gradients(mutant, case, || {
                let group = |g: usize| g * all / groups..(g + 1) * all / groups;
                let mut of_ranks = Vec::new();
                for rank in 0..ranks {
                    let own = (rank * groups / ranks..(rank + 1) * groups / ranks).map(group);
                    let sums = parts(mutant, case, own)?.into_iter().map(|part| part.scaled());
                    of_ranks.extend(sums.reduce(add));
                }
                Ok(of_ranks.into_iter().rev().reduce(add).expect("a token counts"))
            })
        },
    },
    Mutation {
        name: "padding_in_the_sums",
        about: "Rows of padding are added to the sums over tokens as zeros times what they hold, which is NaN.",
        op: "chain_backward",
        caught_by: "invariance:padding",
        also_red: Others::Are(&["invariance:packing", "invariance:recompute"]),
        answer: |mutant, case| {
            let mut answer = mutant.honest.run(case);
            if padding(case, "left") + padding(case, "right") > 0 && answer.status == Status::Ok {
                let elements = answer.outputs["gradients"].len();
                answer.outputs.insert("gradients".into(), Tensor::fp32(&[elements], vec![f32::NAN; elements]));
            }
            answer
        },
    },
    Mutation {
        name: "padding_is_attended",
        about: "Padding on the left stands at the first positions of its sequence, and is seen like tokens.",
        op: "chain_backward",
        caught_by: "invariance:padding",
        also_red: Others::Are(&["invariance:packing"]),
        answer: |mutant, case| {
            let (rows, batch, len) = (padding(case, "left"), sequences(case), case.inputs["tokens"].shape()[1]);
            let mut answer = mutant.asked(case, |case| {
                for name in ["tokens", "count", "old_logprob"] {
                    if let Some(tensor) = case.inputs.get_mut(name) {
                        let zeros = Tensor::from_bytes(tensor.dtype(), &[batch, rows], &vec![0; 4 * batch * rows]);
                        *tensor = zeros.expect("four bytes an element").append(1, tensor);
                    }
                }
                if let Some(length) = case.inputs.get_mut("length") {
                    let more = length.as_i32().expect("checked").iter().map(|length| length + rows as i32).collect();
                    *length = Tensor::i32(&[batch], more);
                }
            });
            if let Some(logprob) = answer.outputs.get_mut("logprob") {
                *logprob = logprob.range(1, rows, rows + len);
                // A first token has no log-probability.
                let mut values = f32s(logprob);
                values.chunks_mut(len).for_each(|row| row[0] = 0.0);
                *logprob = Tensor::fp32(&[batch, len], values);
            }
            answer
        },
    },
    Mutation {
        name: "recompute_by_other_attention",
        about: "Where a layer is run again for its reverse, attention rounds in another way.",
        op: "chain_backward",
        caught_by: "invariance:recompute",
        also_red: Others::Are(&[]),
        answer: |mutant, case| mutant.model(case, ModelMutation::RecomputedAttention),
    },
    Mutation {
        name: "lent_keys_untrained",
        about: "Keys and values have no gradient of the later blocks that read them.",
        op: "chain_backward",
        caught_by: "accuracy",
        also_red: Others::Are(&[]),
        answer: |mutant, case| mutant.model(case, ModelMutation::LentUntrained),
    },
];
