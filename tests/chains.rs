//! Whole models in use: what was sampled is scored again bit for bit, and a mutant is traced to its layer.

#[path = "chains/adapters.rs"]
mod adapters;
mod covering;
#[path = "chains/experts.rs"]
mod experts;
#[path = "chains/gradients.rs"]
mod gradients;
#[path = "chains/masks.rs"]
mod masks;
#[path = "chains/nonfinite.rs"]
mod nonfinite;
#[path = "chains/sampling.rs"]
mod sampling;
#[path = "chains/several_adapters.rs"]
mod several_adapters;
#[path = "chains/temperature.rs"]
mod temperature;
#[path = "chains/training.rs"]
mod training;
#[path = "chains/unsaid.rs"]
mod unsaid;

use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use samebits_contract::fill::Fill;
use samebits_contract::table::{Contract, Slice};
use samebits_contract::tensor::DType;
use samebits_harness::dump::{Divergence, Reader, Writer, compare};
use samebits_models::{
    Audit, Config, Family, Model, ModelError, PageOrder, Precision, Probe, RopeLength, Run, Sample, Sampling,
    SamplingRule, Schedule, Seen, Serving, Stop,
};
use samebits_mutants::{ModelMutant, ModelMutation};
use samebits_ops::{Cpu, Isa};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn checkpoint(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/checkpoints").join(name)
}

fn names() -> Vec<String> {
    let entries = std::fs::read_dir(checkpoint("")).unwrap();
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Every checkpoint is held to what transformers recorded of it, in the dtype it is stored in and in fp32: no other test
/// bounds the error of a model's logits.
#[test]
fn every_checkpoint_is_a_case_of_the_contract() {
    let contract = Contract::load(None).unwrap();
    let recorded = contract.cases(Slice::Quick).filter(|case| case.op == "chain" && case.fill == Fill::Recorded);
    let mut judged: BTreeMap<String, Vec<DType>> = BTreeMap::new();
    recorded.for_each(|case| judged.entry(case.params["model"].clone()).or_default().push(case.dtype));
    assert!(judged.keys().eq(names().iter()), "{judged:?}");
    for (name, dtypes) in judged {
        let stored = if name == "llama-linear" { DType::Fp16 } else { DType::Bf16 };
        assert_eq!(dtypes, [stored, DType::Fp32], "{name}");
    }
    let family = |name: String| Config::load(&checkpoint(&name)).unwrap().family.name();
    let families: BTreeSet<&str> = names().into_iter().map(family).collect();
    let without: Vec<&str> =
        Family::all().iter().map(|family| family.name()).filter(|f| !families.contains(f)).collect();
    assert!(without.is_empty(), "families without a checkpoint: {without:?}");
}

fn load(dir: &Path) -> Model {
    Model::load(dir, Precision::Bf16, &Cpu::best()).unwrap()
}

/// Eight prompts of different lengths, two of them alike.
fn prompts(model: &Model) -> Vec<Vec<i32>> {
    let vocab = model.config().vocab as i32;
    let token = |i: i32| 3 + i * 7919 % (vocab - 3);
    (0..8).map(|p: i32| (0..2 + p * 5 % 9).map(|i| token(i + 20 * (p % 7))).collect()).collect()
}

fn rollout(model: &Model, cpu: &Cpu, sampling: &Sampling, serving: &Serving) -> Vec<Sample> {
    let mut samples = Vec::new();
    let keep = |sample| {
        samples.push(sample);
        Ok(())
    };
    model.rollout(cpu, &prompts(model), sampling, serving, keep).unwrap();
    samples.sort_by_key(|sample| sample.sequence);
    samples
}

const SERVINGS: [Serving; 4] = [
    Serving { batch: 1, chunk: 256, page_size: 64, page_order: PageOrder::Ascending, share_prompts: false },
    Serving { batch: 3, chunk: 2, page_size: 1, page_order: PageOrder::Scattered, share_prompts: true },
    Serving { batch: 5, chunk: 3, page_size: 7, page_order: PageOrder::Descending, share_prompts: true },
    Serving { batch: 64, chunk: 1, page_size: 16, page_order: PageOrder::Scattered, share_prompts: false },
];

/// The others, which have the same layers, turn positions in another way: `conformance` runs that on every schedule.
#[test]
fn what_was_sampled_is_scored_the_same_to_the_bit() {
    for name in covering::checkpoints(&checkpoint("")) {
        // Where the scaling depends on a length, texts of all of the model's positions.
        let model = load(&checkpoint(&name));
        let longest = model.config().max_positions;
        let model = model.with_rope_length(RopeLength::Declared(longest)).unwrap();
        let sampling =
            Sampling { samples: 2, rule: SamplingRule::at(0.8), seed: 11, ignore_eos: true, ..Sampling::default() };
        let expected = rollout(&model, &Cpu::best(), &sampling, &SERVINGS[0]);
        assert_eq!(expected.len(), 16, "{name}");
        for (i, serving) in SERVINGS[1..].iter().enumerate() {
            let isas: Vec<Isa> = Isa::of_machine().collect();
            let cpu = Cpu::new(isas[isas.len() - 1 - i % isas.len()], 1 + i % 2, usize::MAX).unwrap();
            assert_eq!(rollout(&model, &cpu, &sampling, serving), expected, "{name}: {serving:?} {cpu:?}");
        }
        let prompts = prompts(&model);
        let texts: Vec<_> =
            expected.iter().map(|s| (&prompts[s.prompt][..], &s.tokens[..], &sampling.rule, None)).collect();
        let mut scored = 0;
        for (schedule, page_size, isa) in [
            (Schedule::Prefill, 64, Isa::best()),
            (Schedule::Chunk(5), 3, Isa::Scalar),
            (Schedule::Mixed, 1, Isa::best()),
            (Schedule::Speculative(3), 4, Isa::best()),
        ] {
            let cpu = Cpu::new(isa, 2, 1 << 20).unwrap();
            let run = Run { schedule, page_size, page_order: PageOrder::Scattered, ..Run::default() };
            let scores = model.score(&cpu, &texts, run).unwrap();
            for (sample, scores) in expected.iter().zip(&scores) {
                let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&sample.logprobs), bits(scores), "{name}: {schedule}, sequence {}", sample.sequence);
                scored += scores.len();
            }
        }
        let sampled: usize = expected.iter().map(|sample| sample.tokens.len()).sum();
        assert_eq!(scored, 4 * sampled, "{name}");
        let whole = |s: &Sample| s.tokens.len() == 64 || s.stop == Stop::MaxPositions;
        assert!(expected.iter().all(whole), "{name}: a text ended before it was whole");
    }
}

#[test]
fn a_sample_follows_its_seed_and_ends_where_it_is_told() {
    let model = load(&checkpoint("qwen3-adder"));
    let sampling = Sampling { samples: 3, max_tokens: 9, seed: 1, ignore_eos: true, ..Sampling::default() };
    let tokens = |sampling: &Sampling| -> Vec<Vec<i32>> {
        rollout(&model, &Cpu::best(), sampling, &Serving::default()).into_iter().map(|s| s.tokens).collect()
    };
    let one = tokens(&sampling);
    assert_ne!(one, tokens(&Sampling { seed: 2, ..sampling.clone() }));
    assert!(one.chunks(3).any(|three| three[0] != three[1]), "samples of a prompt differ");
    let greedy = tokens(&Sampling { rule: SamplingRule::at(0.0), ..sampling.clone() });
    assert!(greedy.chunks(3).all(|three| three[0] == three[1] && three[1] == three[2]));
    let ended = rollout(&model, &Cpu::best(), &Sampling { ignore_eos: false, ..sampling.clone() }, &Serving::default());
    let eos = &model.config().eos;
    assert!(ended.iter().any(|s| s.stop == Stop::Eos), "some text ends");
    for sample in &ended {
        assert_eq!(sample.stop == Stop::Eos, sample.tokens.last().is_some_and(|token| eos.contains(token)));
    }
    let tiny = load(&checkpoint("llama3"));
    let long = rollout(&tiny, &Cpu::best(), &Sampling { max_tokens: 1000, ..sampling }, &Serving::default());
    assert!(long.iter().all(|s| s.stop == Stop::MaxPositions && s.limit == 64));
}

/// Two sequences of the model's vocabulary.
fn sequences(model: &Model) -> Vec<Vec<i32>> {
    let vocab = model.config().vocab as i32;
    [11, 14].map(|len| (0..len).map(|i| 3 + (i * 31 + len) % (vocab - 3)).collect()).to_vec()
}

/// Where a prefill and a run by `schedule` part, the second with a mutation where one is given.
fn divergence(model: &Model, schedule: Schedule, mutation: Option<ModelMutation>) -> Option<Divergence> {
    let dir = tempfile::tempdir().unwrap();
    let sequences = sequences(model);
    let sequences: Vec<&[i32]> = sequences.iter().map(Vec::as_slice).collect();
    let run = |schedule, probe: &mut dyn Probe| {
        let run = Run { schedule, page_size: 2, probe: Some(probe), ..Run::default() };
        model.forward_run(&Cpu::best(), &sequences, run).unwrap();
    };
    let dump = |name: &str, schedule, mutation: Option<ModelMutation>| {
        let path = dir.path().join(name);
        let mut writer = Writer::create(&path, 1 << 30).unwrap();
        if let Some(mutation) = mutation {
            let mut mutant = ModelMutant::new(mutation, model.config(), writer);
            run(schedule, &mut mutant);
            writer = mutant.beside;
        } else {
            run(schedule, &mut writer);
        }
        writer.finish().unwrap();
        Reader::open(&path).unwrap()
    };
    compare(&mut dump("a", Schedule::Prefill, None), &mut dump("b", schedule, mutation), 0.0).unwrap().divergence
}

/// A copy of a checkpoint in which two experts of each router always tie.
fn tied_router() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let from = checkpoint("mixtral");
    std::fs::copy(from.join("config.json"), dir.path().join("config.json")).unwrap();
    let file = std::fs::read(from.join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let mut changed: BTreeMap<String, (safetensors::Dtype, Vec<usize>, Vec<u8>)> = BTreeMap::new();
    for (name, tensor) in tensors.iter() {
        let mut data = tensor.data().to_vec();
        if name.ends_with("block_sparse_moe.gate.weight") {
            let row = data.len() / tensor.shape()[0];
            for expert in 1..tensor.shape()[0] {
                data.copy_within(0..row, expert * row);
            }
        }
        changed.insert(name.to_string(), (tensor.dtype(), tensor.shape().to_vec(), data));
    }
    let views =
        changed.iter().map(|(n, (dtype, shape, data))| (n, TensorView::new(*dtype, shape.clone(), data).unwrap()));
    std::fs::write(dir.path().join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    dir
}

#[test]
fn a_mutant_is_traced_to_its_layer() {
    let ties = tied_router();
    let cases: [(PathBuf, ModelMutation, &str); 14] = [
        // The first layer's keys are right; the second reads what nobody wrote.
        (checkpoint("llama3"), ModelMutation::UnwrittenKey, "layers.1.attention"),
        (checkpoint("qwen3"), ModelMutation::PositionAfterChunk, "layers.0.q"),
        (ties.path().into(), ModelMutation::RouterTieByBatch, "layers.0.experts"),
        // Layer 0 is dense.
        (checkpoint("qwen3-moe"), ModelMutation::ExpertsByArrival, "layers.1.mlp"),
        (checkpoint("gemma2"), ModelMutation::WindowAtChunkBorder, "layers.0.attention"),
        // What enters the convolution is right, and what it keeps is read rounded.
        (checkpoint("mamba2"), ModelMutation::NarrowState, "layers.0.conv"),
        (checkpoint("falcon-mamba"), ModelMutation::NarrowState, "layers.0.conv"),
        (checkpoint("lfm2"), ModelMutation::NarrowState, "layers.0.conv"),
        (checkpoint("qwen3-next"), ModelMutation::NarrowState, "layers.0.q_conv"),
        (checkpoint("qwen3-next"), ModelMutation::RuleForgets, "layers.0.rule"),
        (checkpoint("kimi-linear"), ModelMutation::RuleForgets, "layers.0.rule"),
        // The last token is kept in bf16 anyway.
        (checkpoint("rwkv7"), ModelMutation::NarrowState, "layers.0.wkv"),
        (checkpoint("rwkv7"), ModelMutation::ShiftAfterChunk, "layers.0.decay"),
        // The first layer that uses a block for the second time.
        (checkpoint("zamba2"), ModelMutation::FirstAdapter, "layers.3.q"),
    ];
    for (dir, mutation, site) in cases {
        let model = load(&dir);
        let schedule = Schedule::Chunk(4);
        assert_eq!(divergence(&model, schedule, None), None, "{mutation:?} is not made");
        let found = divergence(&model, schedule, Some(mutation));
        let found = found.unwrap_or_else(|| panic!("{mutation:?} is not seen"));
        assert_eq!(found.site, site, "{mutation:?}: {found:?}");
        assert!(!found.before.is_empty() && found.count.0 > 0 && found.a.to_bits() != found.b.to_bits(), "{found:?}");
    }
}

/// The last states of sequences, by sequence, layer and op.
#[derive(Default)]
struct States {
    last: Vec<usize>,
    found: BTreeMap<(usize, Option<usize>, String), Vec<u32>>,
}

impl Probe for States {
    fn see(&mut self, _: &mut Seen) -> Result<(), ModelError> {
        Ok(())
    }

    fn see_state(&mut self, seen: &mut Seen) -> Result<(), ModelError> {
        let width = seen.values.len() / seen.tokens.len();
        for (&(sequence, position), row) in seen.tokens.iter().zip(seen.values.chunks_exact(width)) {
            if position == self.last[sequence] {
                let bits = row.iter().map(|value| value.to_bits()).collect();
                self.found.insert((sequence, seen.layer, seen.site.to_string()), bits);
            }
        }
        Ok(())
    }
}

#[test]
fn every_schedule_ends_with_the_states_of_a_prefill() {
    let mut with_states = 0;
    for name in names() {
        let model = load(&checkpoint(&name));
        let sequences = sequences(&model);
        let sequences: Vec<&[i32]> = sequences.iter().map(Vec::as_slice).collect();
        let states = |schedule, page_size| {
            let last = sequences.iter().map(|tokens| tokens.len() - 1).collect();
            let mut states = States { last, ..States::default() };
            let run = Run { schedule, page_size, probe: Some(&mut states), ..Run::default() };
            model.forward_run(&Cpu::best(), &sequences, run).unwrap();
            states.found
        };
        let expected = states(Schedule::Prefill, 16);
        if expected.is_empty() {
            continue;
        }
        with_states += 1;
        assert!(expected.values().flatten().any(|bits| *bits != 0), "{name}");
        let chunks = [Schedule::Chunk(3), Schedule::Speculative(4), Schedule::Prefix(5)];
        for schedule in [Schedule::Decode, Schedule::Mixed].into_iter().chain(chunks) {
            assert!(states(schedule, 3) == expected, "{name}: {schedule}");
        }
    }
    assert!(with_states >= 5, "{with_states} models recur");
}

fn samebits(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_samebits-tested")).args(args).output().unwrap()
}

#[test]
fn the_verbs_say_zero_or_where_not() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    let model = checkpoint("qwen3-adder").to_str().unwrap().to_string();
    let lines = "{\"prompt\": \"12+34=\"}\n{\"tokens\": [1, 4, 5]}\n{\"prompt\": \"99+1=\", \"answer\": 100}\n";
    std::fs::write(path("prompts.jsonl"), lines).unwrap();
    let (prompts, out) = (path("prompts.jsonl"), path("rollout"));
    let made = samebits(&[
        "rollout",
        "--model",
        &model,
        "--prompts",
        &prompts,
        "--samples",
        "3",
        "--max-tokens",
        "20",
        "--seed",
        "5",
        "--ignore-eos",
        "--out",
        &out,
        "--batch",
        "4",
        "--page-size",
        "3",
    ]);
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let score = |extra: &[&str]| samebits(&[&["score", "--model", &model, "--rollout", &out][..], extra].concat());
    for extra in [&[][..], &["--isa", "scalar", "--threads", "1"], &["--schedule", "chunk:3", "--page-size", "2"]] {
        let found = score(extra);
        let text = String::from_utf8_lossy(&found.stdout).to_string();
        assert_eq!(found.status.code(), Some(0), "{text}{}", String::from_utf8_lossy(&found.stderr));
        assert!(
            text.contains("0 of 180 log-probabilities of 9 texts differ") && text.contains("exactly zero"),
            "{text}"
        );
    }
    let found = score(&["--dtype", "fp32"]);
    let text = String::from_utf8_lossy(&found.stdout).to_string();
    assert_eq!(found.status.code(), Some(1), "{text}");
    assert!(text.contains("first: sequence 0, position 7, token") && text.contains("approx KL"), "{text}");
    // A file that lost its end is no rollout.
    let whole = std::fs::read_to_string(&out).unwrap();
    std::fs::write(&out, whole.lines().take(5).collect::<Vec<_>>().join("\n")).unwrap();
    let cut = score(&[]);
    assert_eq!(cut.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&cut.stderr).contains("holds 4 of 9 texts; it was cut"));

    let tokens = checkpoint("qwen3-adder").join("reference.safetensors").to_str().unwrap().to_string();
    let trace = |a: &str, b: &str| samebits(&["trace", a, b, "--model", &model, "--tokens", &tokens]);
    let same = trace("default", "schedule=mixed,pages=3,order=scattered,isa=scalar,threads=1");
    assert_eq!(same.status.code(), Some(0), "{}", String::from_utf8_lossy(&same.stdout));
    let other = trace("default", "dtype=fp32");
    assert_eq!(other.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&other.stdout).contains("first difference: layers.0.input_norm"));
    for (a, expected) in [("schedule=never", "is not prefill, decode"), ("nothing", "neither a dump nor a setting")] {
        let wrong = trace(a, "default");
        assert_eq!(wrong.status.code(), Some(2));
        assert!(String::from_utf8_lossy(&wrong.stderr).contains(expected));
    }
}

#[test]
fn an_audit_finds_what_is_wrong() {
    let ok = samebits(&["audit", checkpoint("deepseek-v3").to_str().unwrap()]);
    assert_eq!(ok.status.code(), Some(0), "{}", String::from_utf8_lossy(&ok.stdout));
    assert!(String::from_utf8_lossy(&ok.stdout).starts_with("deepseek_v3: "));
    let dir = tied_router();
    let path = dir.path().join("model.safetensors");
    let file = std::fs::read(&path).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let mut changed: BTreeMap<String, (safetensors::Dtype, Vec<usize>, Vec<u8>)> =
        tensors.iter().map(|(n, t)| (n.into(), (t.dtype(), t.shape().to_vec(), t.data().to_vec()))).collect();
    changed.remove("model.norm.weight");
    let spare = changed["lm_head.weight"].clone();
    changed.insert("model.spare".into(), spare);
    changed.get_mut("model.layers.0.self_attn.q_proj.weight").unwrap().2[..2].copy_from_slice(&[0xC0, 0x7F]);
    changed.get_mut("model.layers.1.self_attn.v_proj.weight").unwrap().2.fill(0);
    let views =
        changed.iter().map(|(n, (dtype, shape, data))| (n, TensorView::new(*dtype, shape.clone(), data).unwrap()));
    std::fs::write(&path, safetensors::serialize(views, None).unwrap()).unwrap();
    let audit = Audit::of(dir.path(), |_, _| {}).unwrap();
    let found = |wrong: bool, tensor: &str, what: &str| {
        audit.findings.iter().any(|f| f.wrong == wrong && f.tensor == tensor && f.what.contains(what))
    };
    assert!(!audit.holds());
    assert!(found(true, "model.norm.weight", "is missing"), "{:?}", audit.findings);
    assert!(found(true, "model.spare", "is not part of the model"));
    assert!(found(true, "model.layers.0.self_attn.q_proj.weight", "1 of 2304 elements are not finite"));
    assert!(found(true, "model.layers.1.self_attn.v_proj.weight", "is constant: every element is 0"));
    assert!(found(false, "model.spare", "has the same elements as lm_head.weight"));
    let json = samebits(&["audit", dir.path().to_str().unwrap(), "--json"]);
    assert_eq!(json.status.code(), Some(1));
    let json: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(json["tensors"].as_array().unwrap().len(), changed.len());
}

/// Writes a safetensors file of i32 tensors [B, T].
fn write_tokens(path: &Path, tensors: &[(&str, &[i32])], shape: [usize; 2]) {
    let data: Vec<(&str, Vec<u8>)> =
        tensors.iter().map(|(name, data)| (*name, data.iter().flat_map(|v| v.to_le_bytes()).collect())).collect();
    let views = data
        .iter()
        .map(|(name, data)| (*name, TensorView::new(safetensors::Dtype::I32, shape.to_vec(), data).unwrap()));
    std::fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

fn logits(path: &Path) -> Vec<u32> {
    let file = std::fs::read(path).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let logits = tensors.tensor("logits").unwrap();
    logits.data().chunks_exact(4).map(|c| u32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect()
}

#[test]
fn padding_on_either_side_moves_no_bit() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let forward = |model: &Path, tokens: &Path, extra: &[&str]| {
        let out = path("logits");
        let files = [model, tokens, &out].map(|path| path.to_str().unwrap().to_string());
        let args = ["forward", "--model", &files[0], "--tokens", &files[1], "--out", &files[2]];
        let ran = samebits(&[&args[..], extra].concat());
        (ran.status.code(), String::from_utf8_lossy(&ran.stderr).to_string(), out)
    };
    // Three sequences of 5, 2 and 6 tokens in rows of 6: padded behind, padded before, whole.
    let rows = [[3, 9, 4, 7, 5, 0], [0, 0, 0, 0, 8, 3], [6, 3, 3, 9, 4, 5]];
    let mask = [[1, 1, 1, 1, 1, 0], [0, 0, 0, 0, 1, 1], [1; 6]];
    for name in ["qwen3-adder", "gemma2", "mixtral", "deepseek-v3", "phi3"] {
        let model = checkpoint(name);
        let vocab = load(&model).config().vocab;
        let alone: Vec<Vec<u32>> = rows
            .iter()
            .zip(&mask)
            .map(|(row, mask)| {
                let tokens: Vec<i32> = row.iter().zip(mask).filter(|(_, m)| **m == 1).map(|(t, _)| *t).collect();
                write_tokens(&path("alone"), &[("tokens", &tokens)], [1, tokens.len()]);
                let (code, stderr, out) = forward(&model, &path("alone"), &[]);
                assert_eq!(code, Some(0), "{name}: {stderr}");
                logits(&out)
            })
            .collect();
        // What stands in the padding must not matter.
        for pad in [0, 11] {
            let tokens: Vec<i32> = rows
                .iter()
                .zip(&mask)
                .flat_map(|(row, mask)| (0..6).map(move |i| if mask[i] == 1 { row[i] } else { pad }))
                .collect();
            write_tokens(&path("padded"), &[("tokens", &tokens), ("attention_mask", mask.as_flattened())], [3, 6]);
            for extra in [&[][..], &["--schedule", "chunk:2", "--page-size", "3"], &["--schedule", "decode"]] {
                let (code, stderr, out) = forward(&model, &path("padded"), extra);
                assert_eq!(code, Some(0), "{name}: {stderr}");
                let padded = logits(&out);
                for (b, (alone, mask)) in alone.iter().zip(&mask).enumerate() {
                    let mut alone = alone.chunks_exact(vocab);
                    for (t, &counts) in mask.iter().enumerate() {
                        let found = &padded[(b * 6 + t) * vocab..][..vocab];
                        match counts {
                            1 => assert_eq!(found, alone.next().unwrap(), "{name} {extra:?}: row {b}, token {t}"),
                            _ => assert!(found.iter().all(|&bits| bits == 0), "{name} {extra:?}: row {b}, padding {t}"),
                        }
                    }
                    assert!(alone.next().is_none());
                }
            }
        }
    }
    let model = checkpoint("qwen3-adder");
    for (mask, expected) in [
        (&[1, 0, 1, 1][..], "row 0 must be one run of ones, padded on either side"),
        (&[1, 1, 0, 0], "row 1 must be one run of ones"),
        (&[1, 2, 1, 1], "row 0 holds more than 0 and 1"),
    ] {
        // Two tokens a row but for the first case.
        let shape = if mask == [1, 0, 1, 1] { [1, 4] } else { [2, 2] };
        write_tokens(&path("wrong"), &[("tokens", &[3, 4, 5, 6]), ("attention_mask", mask)], shape);
        let (code, stderr, _) = forward(&model, &path("wrong"), &[]);
        assert_eq!(code, Some(2), "{stderr}");
        assert!(stderr.contains("attention_mask") && stderr.contains(expected), "{stderr}");
    }
}

/// A file size limit stands for a disk that is full: writing fails in the middle of the file.
#[cfg(unix)]
#[test]
fn a_full_disk_leaves_nothing_half_written() {
    let dir = tempfile::tempdir().unwrap();
    let model = checkpoint("qwen3-adder");
    let tokens = model.join("reference.safetensors");
    let (out, dump) = (dir.path().join("logits"), dir.path().join("dump"));
    let forward = |blocks: &str| {
        let limited = "trap '' XFSZ; ulimit -f \"$1\"; shift; exec \"$@\"";
        let mut command = Command::new("sh");
        command.args(["-c", limited, "sh", blocks, env!("CARGO_BIN_EXE_samebits-tested"), "forward", "--model"]);
        command.arg(&model).arg("--tokens").arg(&tokens).arg("--out").arg(&out).arg("--dump").arg(&dump);
        command.env("TMPDIR", dir.path()).output().unwrap()
    };
    let files = || std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect::<Vec<_>>();
    let full = forward("16");
    let stderr = String::from_utf8_lossy(&full.stderr);
    assert_eq!(full.status.code(), Some(2), "{stderr}");
    assert!(
        stderr.contains("dump: cannot be written: File too large") && stderr.contains("free some space"),
        "{stderr}"
    );
    assert!(stderr.lines().filter(|line| !line.is_empty()).count() == 1 && !stderr.contains("reference"), "{stderr}");
    assert!(files().is_empty(), "{:?}", files());
    let plenty = forward("unlimited");
    assert_eq!(plenty.status.code(), Some(0), "{}", String::from_utf8_lossy(&plenty.stderr));
    assert_eq!(files().len(), 2, "{:?}", files());
}
