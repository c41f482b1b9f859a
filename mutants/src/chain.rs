//! Mutations of whole models.

use crate::models::ModelMutation;
use crate::mutation::{Mutant, Mutation, Others};
use samebits_contract::case::{Answer, Case, Status};
use samebits_harness::implementation::Implementation;

/// Every chunk of a chain's schedule as a sequence of its own.
fn chunk_by_chunk(mutant: &Mutant, case: &Case) -> Answer {
    let chunk = match case.params.get("schedule").map_or("prefill", String::as_str) {
        "decode" => 1,
        schedule => match schedule.strip_prefix("chunk:") {
            Some(chunk) => chunk.parse().expect("the contract has checked it"),
            None => return mutant.honest.run(case),
        },
    };
    let positions: Vec<usize> = (0..case.inputs["tokens"].shape()[1]).collect();
    let mut whole: Option<Answer> = None;
    for part in positions.chunks(chunk) {
        let answer = mutant.asked(case, |case| {
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

/// A prefix hit that goes on from states which have seen one token more than the prefix has: that token comes twice.
fn snapshot_late(mutant: &Mutant, case: &Case) -> Answer {
    let prefix = case.params.get("schedule").and_then(|schedule| schedule.strip_prefix("prefix:"));
    let Some(prefix) = prefix else { return mutant.honest.run(case) };
    let (prefix, tokens) = (prefix.parse().expect("the contract has checked it"), case.inputs["tokens"].shape()[1]);
    if prefix >= tokens {
        return mutant.honest.run(case);
    }
    let mut answer = mutant.asked(case, |case| {
        let twice: Vec<usize> = (0..=prefix).chain(prefix..tokens).collect();
        let fed = case.inputs["tokens"].select(1, &twice);
        case.inputs.insert("tokens".into(), fed);
        case.params.remove("schedule");
    });
    if let Some(logits) = answer.outputs.get_mut("logits") {
        let of_prefix_and_rest: Vec<usize> = (0..prefix).chain(prefix + 1..tokens + 1).collect();
        *logits = logits.select(1, &of_prefix_and_rest);
    }
    answer
}

pub const MUTATIONS: &[Mutation] = &[
    Mutation {
        name: "chunk_forgets",
        about: "A chunk starts with an empty cache at position 0.",
        op: "chain",
        caught_by: "invariance:schedule",
        also_red: Others::Are(&[]),
        answer: chunk_by_chunk,
    },
    Mutation {
        name: "unwritten_key",
        about: "In one layer, a chunk's first key and value are not written: zeros of the page are read.",
        op: "chain",
        caught_by: "invariance:schedule",
        also_red: Others::Are(&[]),
        answer: |mutant, case| mutant.model(case, ModelMutation::UnwrittenKey),
    },
    Mutation {
        name: "unwritten_index_key",
        about: "An indexer's key of a chunk's first token is not written: zeros of the page are read.",
        op: "chain",
        caught_by: "invariance:schedule",
        also_red: Others::Are(&[]),
        answer: |mutant, case| mutant.model(case, ModelMutation::UnwrittenIndexKey),
    },
    Mutation {
        name: "position_after_chunk",
        about: "After a chunk, positions are one too high.",
        op: "chain",
        caught_by: "invariance:schedule",
        also_red: Others::Are(&[]),
        answer: |mutant, case| mutant.model(case, ModelMutation::PositionAfterChunk),
    },
    Mutation {
        name: "window_at_chunk_border",
        about: "At a chunk's border the window stands one position too early.",
        op: "chain",
        caught_by: "invariance:schedule",
        also_red: Others::Are(&[]),
        answer: |mutant, case| mutant.model(case, ModelMutation::WindowAtChunkBorder),
    },
    Mutation {
        name: "state_narrowed_between_chunks",
        about: "What layers that recur keep of a sequence is rounded to bf16 between its chunks.",
        op: "chain",
        caught_by: "invariance:schedule",
        also_red: Others::Are(&[]),
        answer: |mutant, case| mutant.model(case, ModelMutation::NarrowState),
    },
    Mutation {
        name: "gate_behind_norm",
        about: "A scan of Mamba-2 is gated behind its norm.",
        op: "chain",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden"]),
        answer: |mutant, case| mutant.model(case, ModelMutation::GateBehindNorm),
    },
    Mutation {
        name: "steps_without_their_norm",
        about: "What the steps of a scan of Mamba are projected from is not normed.",
        op: "chain",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden"]),
        answer: |mutant, case| mutant.model(case, ModelMutation::StepsUnnormed),
    },
    Mutation {
        name: "adapter_of_the_first_use",
        about: "Uses of a shared block add what the adapters of its first use have made.",
        op: "chain",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden"]),
        answer: |mutant, case| mutant.model(case, ModelMutation::FirstAdapter),
    },
    Mutation {
        name: "snapshot_one_token_late",
        about: "A prefix hit goes on from states that have seen one token more than the prefix has.",
        op: "chain",
        caught_by: "invariance:schedule",
        also_red: Others::Are(&[]),
        answer: snapshot_late,
    },
    Mutation {
        name: "shift_after_chunk",
        about: "A token behind a chunk of RWKV-7 is mixed with the one before the chunk's last.",
        op: "chain",
        caught_by: "invariance:schedule",
        also_red: Others::Are(&[]),
        answer: |mutant, case| mutant.model(case, ModelMutation::ShiftAfterChunk),
    },
    Mutation {
        name: "decay_of_rwkv_exponentiated_twice",
        about: "The logarithm of a decay of RWKV-7 is taken for that of its logarithm.",
        op: "chain",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden"]),
        answer: |mutant, case| mutant.model(case, ModelMutation::DecayTwice),
    },
    Mutation {
        name: "gated_delta_rule_ungated",
        about: "What a gated delta rule has read goes to its last projection without the gate.",
        op: "chain",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden"]),
        answer: |mutant, case| mutant.model(case, ModelMutation::RuleUngated),
    },
    Mutation {
        name: "beta_as_projected",
        about: "A beta of a gated delta rule is what its sigmoid should have read.",
        op: "chain",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden"]),
        answer: |mutant, case| mutant.model(case, ModelMutation::BetaAsProjected),
    },
    Mutation {
        name: "gated_delta_rule_forgets",
        about: "Behind a chunk, a gated delta rule begins with no state.",
        op: "chain",
        caught_by: "invariance:schedule",
        also_red: Others::Are(&[]),
        answer: |mutant, case| mutant.model(case, ModelMutation::RuleForgets),
    },
    Mutation {
        name: "gate_of_next_head",
        about: "Heads of attention behind gates have the gate of the next one.",
        op: "chain",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden"]),
        answer: |mutant, case| mutant.model(case, ModelMutation::GateOfNextHead),
    },
    Mutation {
        name: "input_of_next_block",
        about: "A block of Gemma 4 reads the input of the next one.",
        op: "chain",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden"]),
        answer: |mutant, case| mutant.model(case, ModelMutation::InputOfNextBlock),
    },
    Mutation {
        name: "experts_by_arrival",
        about: "Experts are summed in the order of their numbers where several tokens run together.",
        op: "chain",
        caught_by: "invariance:schedule",
        also_red: Others::Are(&["golden"]),
        answer: |mutant, case| mutant.model(case, ModelMutation::ExpertsByArrival),
    },
    Mutation {
        name: "shared_cache_entry",
        about: "Sequences that run together share the first entry of the cache, which the first one fills.",
        op: "chain",
        caught_by: "invariance:grouping",
        also_red: Others::Are(&["accuracy", "golden", "invariance:schedule"]),
        answer: |mutant, case| mutant.model(case, ModelMutation::SharedCacheEntry),
    },
];
