//! Forward and generation on the checkpoints in `tests/checkpoints`: the same bits however they run.

#[path = "../../tests/covering.rs"]
mod covering;

use safetensors::SafeTensors;
use samebits_models::{Generation, Grouping, Model, PageOrder, Precision, RopeLength, Run, Schedule, Stop};
use samebits_ops::{Cpu, Isa};
use std::fs;
use std::path::PathBuf;

fn checkpoint(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/checkpoints").join(name)
}

fn load(name: &str, precision: Precision) -> Model {
    let model = Model::load(&checkpoint(name), precision, &Cpu::best()).unwrap();
    // What was recorded is of whole texts, each with frequencies of its own length.
    model.with_rope_length(RopeLength::OfText).unwrap()
}

/// The reference tokens: 2 sequences.
fn tokens(name: &str) -> Vec<i32> {
    let file = fs::read(checkpoint(name).join("reference.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let tensor = tensors.tensor("tokens").unwrap();
    assert_eq!(tensor.shape()[0], 2);
    tensor.data().chunks_exact(4).map(|b| i32::from_le_bytes(b.try_into().unwrap())).collect()
}

/// Checkpoints that have every part a checkpoint has, or all of them. `conformance` runs them all, the others on fewer schedules.
fn checkpoints() -> Vec<String> {
    covering::checkpoints(&checkpoint(""))
}

/// Fails with the first element whose bits differ.
fn assert_same_bits(expected: &[f32], found: &[f32], setting: &str) {
    assert_eq!(expected.len(), found.len(), "{setting}");
    if let Some(i) = (0..found.len()).find(|&i| expected[i].to_bits() != found[i].to_bits()) {
        panic!("{setting}: logit {i} is {:?}, expected {:?}", found[i], expected[i]);
    }
}

const SCHEDULES: [Schedule; 12] = [
    Schedule::Prefill,
    Schedule::Decode,
    Schedule::Chunk(7),
    Schedule::Chunk(11),
    Schedule::Chunk(1000),
    Schedule::Mixed,
    Schedule::Speculative(2),
    Schedule::Speculative(5),
    Schedule::Prefix(1),
    Schedule::Prefix(5),
    Schedule::Prefix(8),
    Schedule::Prefix(1000),
];

/// Page sizes and orders: pages of one, some that no chunk fits, and one for all.
const PAGES: [(usize, PageOrder); 5] = [
    (1, PageOrder::Scattered),
    (3, PageOrder::Descending),
    (8, PageOrder::Scattered),
    (64, PageOrder::Ascending),
    (1024, PageOrder::Ascending),
];

/// One length shorter than the other, so that batches are ragged.
fn ragged(tokens: &[i32]) -> [&[i32]; 3] {
    let (first, second) = tokens.split_at(tokens.len() / 2);
    [first, &second[..second.len() - 3], &first[..5]]
}

#[test]
fn every_schedule_and_page_gives_the_same_bits() {
    for name in checkpoints() {
        let tokens = tokens(&name);
        let sequences = ragged(&tokens);
        for precision in [Precision::Bf16, Precision::Fp32] {
            let (model, cpu) = (load(&name, precision), Cpu::best());
            // Each sequence by itself in one piece; then all the ways to share and to cut.
            let alone = Run { grouping: Grouping::Alone, page_size: 4096, ..Run::default() };
            let expected = model.forward_run(&cpu, &sequences, alone).unwrap();
            assert!(expected.iter().all(|x| x.is_finite()) && expected.iter().any(|&x| x != expected[0]));
            for (i, schedule) in SCHEDULES.into_iter().enumerate() {
                for grouping in [Grouping::Together, Grouping::Alone] {
                    let (page_size, page_order) = PAGES[i % PAGES.len()];
                    let run = Run { schedule, grouping, page_size, page_order, ..Run::default() };
                    let found = model.forward_run(&cpu, &sequences, run).unwrap();
                    assert_same_bits(
                        &expected,
                        &found,
                        &format!("{name} {precision:?} {schedule} {grouping} {page_size}"),
                    );
                }
            }
            for (page_size, page_order) in PAGES {
                let run = Run { schedule: Schedule::Chunk(6), page_size, page_order, ..Run::default() };
                let found = model.forward_run(&cpu, &sequences, run).unwrap();
                assert_same_bits(&expected, &found, &format!("{name} {precision:?} {page_size} {page_order:?}"));
            }
        }
    }
}

#[test]
fn every_thread_count_budget_and_isa_gives_the_same_bits() {
    for name in checkpoints() {
        let tokens = tokens(&name);
        let sequences = ragged(&tokens);
        for precision in Precision::ALL {
            let model = load(&name, precision);
            let run = |cpu: &Cpu, schedule| {
                model.forward_run(cpu, &sequences, Run { schedule, page_size: 5, ..Run::default() }).unwrap()
            };
            let expected = run(&Cpu::best(), Schedule::Prefill);
            for isa in Isa::of_machine() {
                for (threads, budget) in [(1, usize::MAX), (2, usize::MAX), (2, 1 << 18)] {
                    let cpu = Cpu::new(isa, threads, budget).unwrap();
                    for schedule in [Schedule::Chunk(9), Schedule::Mixed] {
                        assert_same_bits(&expected, &run(&cpu, schedule), &format!("{name} {precision:?} {cpu:?}"));
                    }
                }
            }
        }
    }
}

#[test]
fn a_sequence_does_not_see_what_follows_or_who_runs_beside_it() {
    let model = load("llama", Precision::Bf16);
    let (cpu, tokens, vocab) = (Cpu::best(), tokens("llama"), model.config().vocab);
    let run = |tokens: &[i32], batch| {
        model.forward(&cpu, tokens, batch, tokens.len() / batch, Schedule::Prefill, Grouping::Together).unwrap()
    };
    let expected = run(&tokens, 2);
    assert_same_bits(&expected[..13 * vocab], &run(&tokens[..13], 1), "the first 13 tokens by themselves");
    let swapped = [&tokens[40..], &tokens[..40]].concat();
    assert_same_bits(&expected[40 * vocab..], &run(&swapped, 2)[..40 * vocab], "the other row of the batch");
    let mut other = tokens.clone();
    other[39] = (other[39] + 1) % vocab as i32;
    let found = run(&other, 2);
    assert_same_bits(&expected[..39 * vocab], &found[..39 * vocab], "another last token");
    assert_ne!(expected[39 * vocab..40 * vocab], found[39 * vocab..40 * vocab], "the last token has no effect");
}

#[test]
fn both_precisions_differ() {
    let tokens = tokens("qwen2");
    let run = |precision| {
        let cpu = Cpu::best();
        load("qwen2", precision).forward(&cpu, &tokens, 2, 40, Schedule::Prefill, Grouping::Together).unwrap()
    };
    assert_ne!(run(Precision::Bf16), run(Precision::Fp32));
}

#[test]
fn wrong_tokens_are_refused() {
    let model = load("llama", Precision::Bf16);
    let long = vec![3; 1025];
    let cases: [(&[i32], usize, usize, &str); 9] = [
        (&[], 1, 0, "tokens: there are 0; pass batch 1 times length 0, at least 1"),
        (&[], 0, 0, "tokens: there are 0"),
        (&[1, 2], 0, 2, "tokens: there are 2; pass batch 0 times length 2"),
        (&[1, 2, 3], 2, 2, "tokens: there are 3; pass batch 2 times length 2"),
        (&[1, 2], usize::MAX, 2, "tokens: there are 2; pass batch"),
        (&[1, 512], 1, 2, "tokens: element 1 is 512; the vocabulary is 0 to 511"),
        (&[1, 2, -1], 1, 3, "tokens: element 2 is -1; the vocabulary is 0 to 511"),
        (&[1, i32::MAX], 1, 2, "tokens: element 1 is 2147483647"),
        (&long, 1, 1025, "tokens: a sequence has 1025; the model has 1024 positions"),
    ];
    for (tokens, batch, len, expected) in cases {
        let run = |schedule| model.forward(&Cpu::best(), tokens, batch, len, schedule, Grouping::Together);
        let line = run(Schedule::Prefill).unwrap_err().to_string();
        assert!(line.starts_with(expected), "{line}");
    }
    let zero = model.forward(&Cpu::best(), &[1], 1, 1, Schedule::Chunk(0), Grouping::Alone);
    assert!(zero.unwrap_err().to_string().starts_with("schedule: chunk:0 makes no progress"));
}

#[test]
fn completions_are_those_of_transformers() {
    let samples = fs::read(checkpoint("qwen3-adder").join("samples.json")).unwrap();
    let samples: serde_json::Value = serde_json::from_slice(&samples).unwrap();
    let samples = samples["samples"].as_array().unwrap();
    assert_eq!(samples.len(), 20);
    let ids = |value: &serde_json::Value| -> Vec<i32> {
        value.as_array().unwrap().iter().map(|id| id.as_i64().unwrap() as i32).collect()
    };
    for precision in [Precision::Bf16, Precision::Fp32] {
        let model = load("qwen3-adder", precision);
        for sample in samples {
            let found = model.generate(&Cpu::best(), sample["prompt"].as_str().unwrap(), 8).unwrap();
            let expected = Generation {
                warning: None,
                prompt: ids(&sample["prompt_ids"]),
                tokens: ids(&sample["completion_ids"]),
                text: sample["completion"].as_str().unwrap().into(),
                stop: Stop::Eos,
            };
            assert_eq!(found, expected, "{precision:?}");
        }
    }
}

#[test]
fn generation_ends_where_it_is_told() {
    let model = load("qwen3-adder", Precision::Bf16);
    let run = |prompt: &str, max_tokens| model.generate(&Cpu::best(), prompt, max_tokens);
    let one = run("99+99=", 1).unwrap();
    assert_eq!((one.text.as_str(), one.stop), ("1", Stop::MaxTokens));
    let none = run("99+99=", 0).unwrap();
    assert_eq!((none.text.as_str(), none.tokens.len(), none.stop), ("", 0, Stop::MaxTokens));
    let line = load("llama", Precision::Bf16).generate(&Cpu::best(), "x", 1).unwrap_err().to_string();
    assert!(line.contains("llama/tokenizer.json: cannot be read"), "{line}");
}
